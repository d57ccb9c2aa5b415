"""The attacks and the tables of `benchmarks/robustness.py`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch


BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


def knowledge(num_honest: int, num_hostile: int):
    from robustness_attacks import Knowledge

    honest = torch.randn(num_honest, 50, generator=torch.Generator().manual_seed(0))
    return Knowledge(honest, num_hostile, torch.full((50,), 0.25))


@pytest.mark.parametrize("num_hostile", [2, 4, 8])
def test_min_max_is_as_far_as_the_most_distant_honest_clients(num_hostile):
    from robustness_attacks import min_max

    known = knowledge(20 - num_hostile, num_hostile)
    honest = known.honest.double().numpy()
    crafted = min_max(torch.zeros(50), known).double().numpy()
    allowed = max(np.linalg.norm(a - b) for a in honest for b in honest)
    assert max(np.linalg.norm(crafted - each) for each in honest) == pytest.approx(allowed, rel=1e-5)
    further = crafted + 0.01 * (crafted - honest.mean(0))
    assert max(np.linalg.norm(further - each) for each in honest) > allowed


@pytest.mark.parametrize(("num_hostile", "share"), [(2, 0.5), (4, 9 / 16), (8, 9 / 12)])
def test_alie_shifts_the_mean_by_the_deviations_that_still_have_a_majority(num_hostile, share):
    from robustness_attacks import a_little_is_enough

    known = knowledge(20 - num_hostile, num_hostile)
    crafted = a_little_is_enough(torch.zeros(50), known)
    shift = (known.honest.mean(0) - crafted) / known.honest.std(0)
    z = float(shift.mean())
    assert shift.std() < 1e-4
    assert 0.5 * (1 + math.erf(z / math.sqrt(2))) == pytest.approx(share, abs=1e-5)


def test_simple_attacks_have_the_stated_directions():
    from robustness_attacks import flip_and_scale, flip_sign, free_ride, manipulate_inner_product

    known, own = knowledge(12, 8), torch.ones(50)
    assert flip_sign(own, known).equal(-own) and flip_and_scale(own, known).equal(-10 * own)
    assert manipulate_inner_product(own, known).equal(-0.5 * known.honest.mean(0))
    assert free_ride(own, known).equal(torch.full((50,), 0.25))


def test_flattened_state_is_restored():
    from robustness_attacks import flatten, unflatten

    state = {"a": torch.randn(2, 3), "b": torch.randn(4)}
    restored = unflatten(flatten(state), state)
    assert all(restored[name].equal(value) for name, value in state.items())


def test_report_averages_the_seeds_and_names_the_best_rule(tmp_path, capsys):
    from robustness_report import report

    results = []
    for partition in ("iid", "dirichlet"):
        for attack, aggregation, accuracies in (
            ("none", "fedavg", (0.60, 0.70)),
            ("none", "median", (0.60, 0.68)),
            ("sign flip", "fedavg", (0.20, 0.30)),
            ("sign flip", "median", (0.58, 0.66)),
        ):
            results += [
                {
                    "partition": partition,
                    "share": 0.2,
                    "attack": attack,
                    "aggregation": aggregation,
                    "seed": seed,
                    "accuracy": accuracy,
                    "attack_success": 0.0,
                }
                for seed, accuracy in enumerate(accuracies)
            ]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(result) + "\n" for result in results))
    report(path, str(tmp_path / "picture.png"))
    printed = capsys.readouterr().out
    assert "| fedavg | 65.0 | 25.0 |" in printed and "| median | 64.0 | 62.0 |" in printed
    assert "sign flip: median 62.0 (-3.0)" in printed
    assert (tmp_path / "picture.png").stat().st_size > 10_000
