"""Tests of `llm_weights.py` of the AdaFD recipes, in which a local language model weights the clients."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest


SCRIPT = str(Path(__file__).parents[2] / "recipes" / "adafd" / "llm_weights.py")


def test_script_weights_clients_of_two_architectures(model_dir, llama_dir, tmp_path, monkeypatch, capsys):
    for split, number in (("train", 40), ("validation", 12)):
        rows = [
            {"text": ["bright film", "dull plot", "a cold film"][row % 3], "label": label, "domain": domain}
            for row in range(number)
            for label, domain in [(("positive", "negative", "neutral")[row % 3], ("north", "south")[row // 3 % 2])]
        ]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"--data": tmp_path, "--llm": llama_dir, "--server-model": model_dir, "--output-dir": tmp_path / "out"}
    sizes = ["--num-rounds", "2", "--local-epochs", "1", "--max-train-rows", "40", "--max-validation-rows", "12"]
    given = [part for pair in options.items() for part in map(str, pair)]
    monkeypatch.setattr(sys, "argv", [SCRIPT, *given, *sizes, "--client-models", str(model_dir), str(llama_dir)])
    runpy.run_path(SCRIPT, run_name="__main__")
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "out" / "llm_weights.json").read_text())
    assert len(results["weights"]) == len(results["f1_weighted"]) == 2
    assert all(sum(weights.values()) == pytest.approx(1) for weights in results["weights"])
    # A random language model replies without numbers: three attempts a round, then the weights of ENWC.
    assert results["fell_back"] == [True, True] and len(results["replies"]) == 6
    assert printed.count("| yes |") == 2
