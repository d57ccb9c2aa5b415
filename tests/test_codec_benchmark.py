"""The measured errors and the tables of `benchmarks/exchange_codecs.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_federated.messages import ClientUpdate, Fit


BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_error_is_the_lost_share_of_the_change():
    """The tenth with the largest magnitudes is one of two values."""
    from exchange_codecs import MeasureErrors

    step, sent = MeasureErrors(), Fit(0, "a", 0, {"w": torch.tensor([1.0, 1.0])})
    update = ClientUpdate(0, "a", {"w": torch.tensor([1.5, 3.0])}, num_examples=1, num_tokens=0, num_steps=1)
    assert step.client_send(update, sent, {}) is update
    assert step.errors["top 10 %"] == pytest.approx([0.5 / (0.25 + 4) ** 0.5])
    assert step.errors["int8"][0] < 0.01 < step.errors["int4"][0]


def test_report_compares_bytes_and_accuracy(tmp_path, capsys):
    from exchange_codecs import report

    path = tmp_path / "results.jsonl"
    runs = [
        {"trained": "head", "codec": codec, "direction": direction, "feedback": True, "seed": seed}
        | {"accuracy": accuracy + 0.02 * seed, "bytes_up": up, "bytes_down": 80}
        for codec, direction, accuracy, up in (("none", "", 0.6, 80), ("int8", "up", 0.59, 20))
        for seed in range(2)
    ]
    path.write_text("".join(json.dumps(run) + "\n" for run in runs))
    report(str(path))
    assert "| int8 | 4.00 | 0.600 ± 0.014 |" in capsys.readouterr().out
