"""Claims are read from one line of text, also if the names of runs contain operators and keywords."""

from __future__ import annotations

import pytest

from hf_federated.experiments.benchmark.claims import Claim, parse_claim


RUNS = ["FedAvg", "FedOpt", "α = 1", "α = 5", "A > B", "A", "B", "after 3 rounds", "one > two"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FedOpt > FedAvg", {}),
        ("FedOpt>FedAvg", {}),
        ("FedOpt > FedAvg by 0.01", {"margin": 0.01}),
        ("FedOpt = FedAvg within 1e-2", {"is_equality": True, "margin": 0.01}),
        ("FedOpt > FedAvg in loss", {"metric": "loss"}),
        ("FedOpt > FedAvg in bytes_up by 1000", {"metric": "bytes_up", "margin": 1000.0}),
        ("FedOpt > FedAvg on shifted in f1 by 0.1", {"split": "shifted", "metric": "f1", "margin": 0.1}),
        ("FedOpt > FedAvg for client baby", {"client": "baby"}),
        ('FedOpt > FedAvg for client "on the in by"', {"client": "on the in by"}),
        ("FedOpt > FedAvg after 3 rounds", {"step": 3}),
        ("FedOpt > FedAvg after round 1", {"step": 1}),
        ("FedOpt > FedAvg after 20 optimizer steps", {"step": 20}),
    ],
)
def test_forms_of_a_claim(text, expected):
    claim = parse_claim(text, RUNS)
    assert claim == Claim(text=text, first="FedOpt", second="FedAvg", **expected)


def test_names_of_runs_may_contain_operators_and_keywords():
    claim = parse_claim("α = 5 > α = 1", RUNS)
    assert (claim.first, claim.second, claim.is_equality) == ("α = 5", "α = 1", False)
    claim = parse_claim("A = after 3 rounds within 0.5", RUNS)
    assert (claim.first, claim.second, claim.margin) == ("A", "after 3 rounds", 0.5)
    claim = parse_claim("one > two > A", RUNS)
    assert (claim.first, claim.second) == ("one > two", "A")


def test_quotes_decide_between_two_readings():
    runs = ["A", "B", "A in loss", "B in loss"]
    with pytest.raises(ValueError, match="has several readings"):
        parse_claim("A > B in loss", runs)
    assert parse_claim('A > "B in loss"', runs).second == "B in loss"
    assert parse_claim('A > "B" in loss', runs).metric == "loss"


def test_margin_of_the_recipe_applies_to_equality_in_its_metric():
    claim = parse_claim("A = B", RUNS, margin=0.02)
    assert claim.margin == 0.02 and claim.text == "A = B within 0.02"
    assert parse_claim("A = B within 0.1", RUNS, margin=0.02).margin == 0.1
    assert parse_claim("A > B", RUNS, margin=0.02).margin == 0
    with pytest.raises(ValueError, match="needs a margin. Add 'within 0.01'"):
        parse_claim("A = B in loss", RUNS, margin=0.02)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be of the form"),
        ("A", "must be of the form"),
        ("A beats B", "must be of the form"),
        ("A >", "'' on the right is not a run"),
        ("A > C", "'C' on the right is not a run. The runs are A, A > B"),
        ("C > A", "'C' on the left is not a run"),
        ("A > A", "compares 'A' with itself"),
        ("A > FedAvg by", "'by' is not a qualifier"),
        ("A > FedAvg by much", "margin 'much' must be a positive number"),
        ("A > FedAvg by -1", "margin '-1' must be a positive number"),
        ("A > FedAvg by nan", "margin 'nan' must be a positive number"),
        ("A > FedAvg by inf", "margin 'inf' must be a positive number"),
        ("A > FedAvg within 0.1", "'within' does not fit"),
        ("A = FedAvg by 0.1", "'by' does not fit"),
        ("A = FedAvg", "needs a margin"),
        ("A > FedAvg in loss in f1", "'in' is given twice"),
        ("A > FedAvg after 0 rounds", "'after 0 rounds' must be of the form"),
        ("A > FedAvg after some rounds", "'after some rounds' must be of the form"),
        ("A > FedAvg on x after 3 rounds", "cannot be combined"),
        ("A > FedAvg in bytes after 3 rounds", "cannot be combined"),
        ("A > FedAvg in variation on x", "cannot be combined"),
        ('A > FedAvg on ""', "is not a name"),
    ],
)
def test_mistakes_in_a_claim(text, message):
    with pytest.raises(ValueError) as error:
        parse_claim(text, RUNS)
    assert message in str(error.value)
