"""Who has which rows in the two partitions of FL-GLM's figure 5."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path

import pytest
from datasets import Dataset


SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "recipes" / "fl_glm" / "prepare_data.py"))


def rows_of(*num_rows: int) -> Dataset:
    """So many rows of each label, mixed."""
    labels = [label for label, number in enumerate(num_rows) for _ in range(number)]
    return Dataset.from_dict({"row": range(len(labels)), "label": labels}).shuffle(seed=0)


def counts(rows: Dataset, column: str) -> dict[str, tuple[int, ...]]:
    """Rows of each label that each owner has."""
    found = Counter(zip(rows[column], rows["label"], strict=True))
    labels = sorted(set(rows["label"]))
    return {owner: tuple(found[owner, label] for label in labels) for owner in ("first", "second")}


def test_the_rows_of_copa_go_to_two_clients_as_in_the_paper():
    rows = SCRIPT["with_owners"](rows_of(195, 205), seed=0)
    assert counts(rows, "iid_owner") == {"first": (97, 102), "second": (98, 103)}
    assert counts(rows, "skewed_owner") == {"first": (195, 5), "second": (0, 200)}


def test_every_row_stays_with_its_label_in_its_place():
    given = rows_of(195, 205)
    rows = SCRIPT["with_owners"](given, seed=0)
    assert rows.select_columns(["row", "label"]).to_dict() == given.to_dict()


@pytest.mark.parametrize("column", ["iid_owner", "skewed_owner"])
def test_the_seed_alone_says_who_has_a_row(column):
    one, same, other = (SCRIPT["with_owners"](rows_of(195, 205), seed)[column] for seed in (0, 0, 1))
    assert one == same != other


def test_who_has_the_rows_of_a_label_is_drawn_and_not_the_first_that_come():
    rows = SCRIPT["with_owners"](rows_of(195, 205), seed=0)
    places = [
        place
        for place, (owner, label) in enumerate(zip(rows["iid_owner"], rows["label"], strict=True))
        if label == 0 and owner == "first"
    ]
    of_label = [place for place, label in enumerate(rows["label"]) if label == 0]
    assert places != of_label[:97] and set(places) < set(of_label)


def test_other_tasks_have_the_same_shares_and_a_third_label_that_of_the_second():
    rows = SCRIPT["with_owners"](rows_of(390, 410, 205), seed=0)
    assert counts(rows, "iid_owner") == {"first": (194, 204, 102), "second": (196, 206, 103)}
    assert counts(rows, "skewed_owner") == {"first": (390, 10, 5), "second": (0, 400, 200)}
