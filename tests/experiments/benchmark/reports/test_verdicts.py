"""Verdicts follow from the interval, the margin, Holm's correction and the seeds of both runs."""

from __future__ import annotations

import numpy as np
import pytest

from hf_federated.experiments.benchmark.grid import BenchmarkSection
from hf_federated.experiments.benchmark.reports.verdicts import evaluate_claims, number


def records(values, **more):
    """Records of runs, from the accuracy by run and seed. The loss is 1 − accuracy."""
    return [
        {
            "run": run,
            "seed": seed,
            "method": "federated",
            "metric": "accuracy",
            "metrics": {"accuracy": value, "loss": None if value is None else 1 - value},
            "history": [],
            "num_rounds": 5,
            **more,
        }
        for run, by_seed in values.items()
        for seed, value in enumerate(by_seed)
    ]


def verdicts(claims, values, more=None, num_seeds=None, read_examples=None, **fields):
    found = records(values, **(more or {})) if isinstance(values, dict) else values
    runs = {record["run"]: {} for record in found}
    seeds = list(range(num_seeds or max(record["seed"] for record in found) + 1))
    section = BenchmarkSection(runs, seeds=seeds, claims=claims, **fields)
    return evaluate_claims(found, section, read_examples)


A = (0.70, 0.72, 0.71, 0.73)
B = (0.62, 0.65, 0.62, 0.64)


def test_variation_is_the_standard_deviation_of_the_changes():
    def run(name, seed, values):
        history = [{"round": number, "accuracy": value} for number, value in enumerate(values, start=1)]
        return {**records({name: [values[-1]]})[0], "seed": seed, "history": history}

    smooth, rough = (0.1, 0.2, 0.3, 0.4), (0.1, 0.5, 0.2, 0.7)
    found = [run("A", 0, smooth), run("B", 0, rough), run("A", 1, (0.1, 0.3, 0.4, 0.6)), run("B", 1, rough)]
    (result,) = verdicts(["A > B in variation"], found)
    # The changes of B are 0.4, -0.3 and 0.5. Those of A are 0.1 three times, or 0.2, 0.1 and 0.2.
    expected = np.std([0.4, -0.3, 0.5], ddof=1) - np.array([0.0, np.std([0.2, 0.1, 0.2], ddof=1)])
    assert result.differences.values == pytest.approx(expected) and result.loss is None
    (result,) = verdicts(["A > B in variation"], [run(name, 0, (0.1, 0.2)) for name in "AB"])
    assert result.verdict == "not measured: A has 2 evaluations, and the variation needs three"


@pytest.mark.parametrize(
    ("claim", "verdict"),
    [
        ("A > B", "holds"),
        ("B > A", "does not hold"),
        ("A > B by 0.02", "holds"),
        ("A > B by 0.2", "does not hold"),
        ("A > B by 0.08", "cannot be told, differences from the margin below 0.0199 are not visible"),
        ("A = B within 0.2", "equal within 0.2"),
        ("A = B within 0.02", "not equal within 0.02"),
        ("A = B within 0.09", "cannot be told, differences below 0.0199 are not visible"),
        ("A > B in loss", "holds"),
        ("B > A in loss", "does not hold"),
    ],
)
def test_verdict_is_decided_by_the_interval_and_the_margin(claim, verdict):
    (result,) = verdicts([claim], {"A": A, "B": B})
    assert result.verdict == verdict
    low, high = result.differences.interval
    if verdict == "holds":
        assert low > result.claim.margin
    if verdict == "does not hold":
        assert high < result.claim.margin


def test_number_of_seeds_that_agree():
    assert verdicts(["A > B by 0.08"], {"A": A, "B": B})[0].num_agreeing == 2
    assert verdicts(["A = B within 0.085"], {"A": A, "B": B})[0].num_agreeing == 2


def test_claims_are_corrected_for_their_number():
    """One claim with p = 0.03 holds alone, and not among three claims."""
    generator = np.random.default_rng(0)
    base = generator.normal(0, 0.01, 6)
    base = (base - base.mean()) / base.std(ddof=1)
    first = tuple(0.5 + 0.02 * (base + 1.22))  # t = 1.22 · √6 = 2.99, p = 0.0305
    values = {"A": first, "B": (0.5,) * 6, "C": tuple(0.5 + 0.02 * base)}
    (alone,) = verdicts(["A > B"], values)
    assert alone.verdict == "holds" and alone.adjusted_p == pytest.approx(alone.differences.p_value())
    results = verdicts(["A > B", "C > B"], values, former_claims=["B > C"])
    assert results[0].adjusted_p == pytest.approx(3 * alone.adjusted_p)
    assert results[0].verdict == "cannot be told, not after Holm's correction"
    assert [result.is_former for result in results] == [False, False, True]


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ({"A": (0.7,), "B": (0.6,)}, "cannot be told: one seed has no spread"),
        ({"A": (0.5, 0.5), "B": (0.5, 0.5)}, "cannot be told: the difference is 0.0000 under every seed"),
        (
            {"A": (0.7, 0.8), "B": (0.6, 0.7)},
            "cannot be told: the difference is the same under every seed, so its spread is unknown",
        ),
        ({"A": (0.7, None, 0.8), "B": (0.5, 0.6, 0.7)}, "cannot be told: no finite accuracy under 1 seed"),
        ({"A": (None, None), "B": (0.5, 0.6)}, "not measured: no finite accuracy under 2 seeds"),
    ],
)
def test_values_that_allow_no_verdict(values, verdict):
    assert verdicts(["A > B"], values)[0].verdict == verdict


def test_missing_seeds_are_named():
    values = {"A": A, "B": B[:3]}
    assert verdicts(["A > B"], values, num_seeds=4)[0].verdict == "holds so far"
    section = BenchmarkSection({"A": {}, "B": {}}, seeds=[0, 1], claims=["A > B"])
    (result,) = evaluate_claims(records({"A": A[:2]}), section)
    assert result.verdict == "not measured: no finished runs of B under seed 0" and result.num_compared == 0


def test_equal_bytes_of_every_seed_are_decided():
    """Bytes have no spread, and fewer are better."""
    found = records({"A": A, "B": B})
    for record in found:
        record.update({"bytes_up": 100 if record["run"] == "A" else 300, "bytes_down": 50})
    claims = ["A > B in bytes_up", "A > B in bytes by 500", "A = B in bytes_down within 10"]
    assert [result.verdict for result in verdicts(claims, found)] == ["holds", "does not hold", "equal within 10"]
    (result,) = verdicts(["A > B in bytes"], {"A": A, "B": B})
    assert result.verdict == "not measured: A has no bytes_up and bytes_down"


def test_claims_name_a_split_a_client_or_a_round():
    found = records({"A": A, "B": B})
    for record in found:
        worse = {"accuracy": 1 - record["metrics"]["accuracy"]}
        record["further_tests"] = {"shifted": worse}
        record["clients"] = {"baby": worse}
        record["history"] = [{"round": 3, **worse}]
    names = ["on shifted", "for client baby", "after 3 rounds"]
    results = verdicts([f"A > B {name}" for name in names], found)
    assert [result.verdict for result in results] == ["does not hold"] * 3
    assert [result.verdict for result in verdicts(["A > B after 5 rounds"], found)] == ["holds"]
    claims = ["A > B on other", "A > B for client toys", "A > B after 4 rounds", "A > B in f1"]
    assert [result.verdict for result in verdicts(claims, found)] == [
        "not measured: A has no test split 'other', but shifted",
        "not measured: A has no client 'toys', but baby",
        "not measured: A was not evaluated after step 4, but after 3",
        "not measured: A has no metric 'f1', but accuracy, loss",
    ]


def test_loss_stands_beside_the_score():
    (result,) = verdicts(["A > B"], {"A": A, "B": B})
    assert result.loss.mean == pytest.approx(result.differences.mean)  # the lower loss is better
    assert verdicts(["A > B in loss"], {"A": A, "B": B})[0].loss is None


def test_interval_over_test_examples_needs_the_predictions_of_both_runs():
    generator = np.random.default_rng(4)
    correct = {run: generator.random((4, 50)) < share for run, share in (("A", 0.8), ("B", 0.6))}

    def read(run, seed):
        return {f"row {row}": (float(value), -0.5) for row, value in enumerate(correct[run][seed])}

    (result,) = verdicts(["A > B"], {"A": A, "B": B}, read_examples=read)
    low, high = result.example_interval
    assert low < np.mean(correct["A"]) - np.mean(correct["B"]) < high and 0.05 < high - low < 0.4
    for other in (lambda run, seed: None, lambda run, seed: read(run, seed) if run == "A" else {"other": (1.0, 0.0)}):
        assert verdicts(["A > B"], {"A": A, "B": B}, read_examples=other)[0].example_interval is None
    assert verdicts(["A > B after 5 rounds"], {"A": A, "B": B}, read_examples=read)[0].example_interval is None


def test_numbers_have_digits_that_fit_their_size():
    values = [None, 0.12345, -0.5, 12.345, 123456.0]
    assert [number(value) for value in values] == ["-", "0.1235", "-0.5000", "12.35", "1.23e+05"]
    assert number(0.5, signed=True) == "+0.5000"
