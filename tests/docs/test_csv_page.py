"""The three commands of the page on CSV files train a model on all sites."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import offline_world
import pytest
from doc_blocks import blocks
from transformers import AutoModelForSequenceClassification

from hf_federated.cli.main import main


PAGE = "docs/get-started/csv-files.md"


@pytest.mark.slow
def test_commands_of_the_page_train_four_sites_and_test_on_a_share_of_each(tmp_path, monkeypatch, capsys) -> None:
    offline_world.build(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(next(block.code for block in blocks(PAGE) if block.language == "yaml"))
    commands = [shlex.split(block.code) for block in blocks(PAGE) if block.language == "bash" and not block.is_skipped]
    assert [words[1] for words in commands] == ["partition", "inspect", "train"]
    for words in commands[:2]:
        assert main(words[1:]) == 0
    assert Path("pictures/labels.png").exists()
    overrides = ["federation.num_rounds=1", "training.use_cpu=true", "training.save_strategy=no"]
    assert main([*commands[2][1:], *(word for override in overrides for word in ("--set", override))]) == 0
    output = capsys.readouterr().out
    # Each site has 12 examples. A tenth, rounded up, is 2 test examples.
    assert "4 clients with 40 examples" in output and "Federated (1 round;" in output
    ledger = json.loads(Path("outputs/sites/federated_ledger.json").read_text())
    assert sorted(ledger["rounds"]["0"]) == sorted(offline_world.SITES)
    model = AutoModelForSequenceClassification.from_pretrained("outputs/sites")
    assert set(model.config.id2label.values()) == {"defect", "fine"}
