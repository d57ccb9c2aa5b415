"""Data of FL-GLM's recipes: who has which rows of figure 5, and the abstracts of SciTLDR."""

from __future__ import annotations

import json
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from datasets import Dataset, load_dataset


FOLDER = Path(__file__).parents[2] / "recipes" / "fl_glm"
SCRIPT = runpy.run_path(str(FOLDER / "prepare_data.py"))


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


@pytest.mark.parametrize(("source", "column"), [(["One.", " Two."], "target"), ("One. Two.", "targets")])
def test_abstracts_are_joined_and_keep_all_their_summaries(source, column):
    raw = Dataset.from_dict({"source": [source], column: [[" First. ", "Second."]], "id": ["a"]})
    assert SCRIPT["scitldr_rows"](raw).to_dict() == {"source": ["One. Two."], "targets": [["First.", "Second."]]}


def test_an_abstract_without_text_or_summary_is_left_out():
    raw = Dataset.from_dict({"source": [["One."], [], ["Two."]], "target": [["First."], ["Second."], [" "]]})
    assert SCRIPT["scitldr_rows"](raw).to_dict() == {"source": ["One."], "targets": [["First."]]}


def test_abstracts_lie_where_the_recipe_of_summaries_reads_them(tmp_path, monkeypatch):
    recipe = yaml.safe_load((FOLDER / "summaries.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    for split in ("train", "dev"):
        path = tmp_path / "data" / "SciTLDR-A" / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"source": ["One.", "Two."], "target": [split]}) + "\n")
    output_dir = str(Path(recipe["data"]["path"]).parent)
    argv = ["prepare_data.py", "--data-dir", "data", "--output-dir", output_dir, "--tasks", "scitldr"]
    monkeypatch.setattr(sys, "argv", argv)
    SCRIPT["main"]()
    rows = load_dataset(recipe["data"]["path"], split=recipe["data"]["test_split"])
    assert rows.to_dict() == {"source": ["One. Two."], recipe["task"]["target_column"]: [["dev"]]}


def test_the_configuration_of_the_hub_is_that_of_abstracts(monkeypatch, tmp_path):
    asked = []

    def load(*args, **kwargs):
        asked.append((args, kwargs))
        return Dataset.from_dict({"source": [["One."]], "target": [["First."]]})

    monkeypatch.setitem(SCRIPT["main"].__globals__, "load_dataset", load)
    argv = ["prepare_data.py", "--hub-id", "allenai/scitldr", "--revision", "r", "--output-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*argv, "--tasks", "scitldr"])
    SCRIPT["main"]()
    assert asked == [
        (("allenai/scitldr", "Abstract"), {"split": split, "revision": "r"}) for split in ("train", "validation")
    ]


def test_rows_that_are_not_of_the_data_set_are_refused_by_their_columns():
    with pytest.raises(ValueError, match="no column.*source"):
        SCRIPT["scitldr_rows"](Dataset.from_dict({"text": ["One."]}))
