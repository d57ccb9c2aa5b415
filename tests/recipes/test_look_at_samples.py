"""Tests of `look_at_samples.py` of the FedDRS recipes, which audits pseudo-samples."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from hf_federated.distillation.feddrs import KINDS
from hf_federated.tasks.superglue import LABEL_NAMES


SCRIPT = str(Path(__file__).parents[2] / "recipes" / "feddrs" / "look_at_samples.py")
SAMPLES = "{num_samples: 4, sample_length: 4, num_steps: 3, step_size: 5.0}"


@pytest.fixture
def look(model_dir, superglue_dir, tmp_path, monkeypatch):
    """Run the script on a tiny model and return its output folder."""

    def run(*options):
        settings = [
            f"model.name_or_path={model_dir}",
            f"data.path={superglue_dir}",
            "task.max_length=16",
            "training.use_cpu=true",
            "training.eval_strategy=no",
            "federation.num_rounds=1",
            "federation.local_epochs=1",
            "federation.clients_per_round=2",
            f"federation.distillation_kwargs={SAMPLES}",
            "partition.num_clients=3",
        ]
        given = [part for setting in settings for part in ("--set", setting)]
        monkeypatch.setattr(sys, "argv", [SCRIPT, "--output-dir", str(tmp_path / "out"), *given, *options])
        runpy.run_path(SCRIPT, run_name="__main__")
        return tmp_path / "out"

    return run


def test_script_writes_the_same_table_to_card_and_report_and_a_figure(look, capsys):
    output = look()
    printed = capsys.readouterr().out
    rows = re.findall(r"^\| \S+ \|(?: [01]\.\d{4} \|){4}$", printed, flags=re.MULTILINE)
    assert len(rows) == 2  # clients of the last round
    card = (output / "README.md").read_text(encoding="utf-8")
    report = (output / "samples.md").read_text(encoding="utf-8")
    assert all(row in card and row in report for row in rows)
    for kind in KINDS:
        assert re.search(rf"^{kind}: \S", printed, flags=re.MULTILINE)
        assert re.search(rf"^{kind}: \S", report, flags=re.MULTILINE)
    assert "After 1 round, 3 steps on 4 samples of 4 positions" in report
    assert (output / "samples.png").read_bytes().startswith(b"\x89PNG")
    model = AutoModelForSequenceClassification.from_pretrained(output)
    assert list(model.config.id2label.values()) == list(LABEL_NAMES)


def test_client_without_samples_raises_and_lists_the_clients_with_samples(look):
    with pytest.raises(
        SystemExit, match="Client 'missing' has no samples of the last round. Set --client to one of: "
    ):
        look("--client", "missing")
