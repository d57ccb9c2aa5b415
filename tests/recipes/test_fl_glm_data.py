"""Tests of `prepare_data.py` of the FL-GLM recipes: the partitions of figure 5, and the abstracts of SciTLDR."""

from __future__ import annotations

import json
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer


FOLDER = Path(__file__).parents[2] / "recipes" / "fl_glm"
SCRIPT = runpy.run_path(str(FOLDER / "prepare_data.py"))


def rows_of(*num_rows: int) -> Dataset:
    """Build the given number of examples of each label, in random order."""
    labels = [label for label, number in enumerate(num_rows) for _ in range(number)]
    return Dataset.from_dict({"row": range(len(labels)), "label": labels}).shuffle(seed=0)


def counts(rows: Dataset, column: str) -> dict[str, tuple[int, ...]]:
    """Count the examples of each label that each client owns."""
    counter = Counter(zip(rows[column], rows["label"], strict=True))
    labels = sorted(set(rows["label"]))
    return {owner: tuple(counter[owner, label] for label in labels) for owner in ("first", "second")}


def test_copa_partitions_match_the_paper():
    rows = SCRIPT["add_owners"](rows_of(195, 205), seed=0)
    assert counts(rows, "iid_owner") == {"first": (97, 102), "second": (98, 103)}
    assert counts(rows, "skewed_owner") == {"first": (195, 5), "second": (0, 200)}


def test_adding_owners_keeps_examples_and_their_order():
    given = rows_of(195, 205)
    rows = SCRIPT["add_owners"](given, seed=0)
    assert rows.select_columns(["row", "label"]).to_dict() == given.to_dict()


@pytest.mark.parametrize("column", ["iid_owner", "skewed_owner"])
def test_owners_depend_only_on_the_seed(column):
    one, same, other = (SCRIPT["add_owners"](rows_of(195, 205), seed)[column] for seed in (0, 0, 1))
    assert one == same != other


def test_owners_of_a_label_are_drawn_at_random():
    rows = SCRIPT["add_owners"](rows_of(195, 205), seed=0)
    positions = [
        position
        for position, (owner, label) in enumerate(zip(rows["iid_owner"], rows["label"], strict=True))
        if label == 0 and owner == "first"
    ]
    label_positions = [position for position, label in enumerate(rows["label"]) if label == 0]
    assert positions != label_positions[:97] and set(positions) < set(label_positions)


def test_other_tasks_use_the_shares_of_copa():
    rows = SCRIPT["add_owners"](rows_of(390, 410, 205), seed=0)
    assert counts(rows, "iid_owner") == {"first": (194, 204, 102), "second": (196, 206, 103)}
    assert counts(rows, "skewed_owner") == {"first": (390, 10, 5), "second": (0, 400, 200)}


@pytest.mark.parametrize(("source", "column"), [(["One.", " Two."], "target"), ("One. Two.", "targets")])
def test_scitldr_joins_abstracts_and_keeps_all_summaries(source, column):
    raw = Dataset.from_dict({"source": [source], column: [[" First. ", "Second."]], "id": ["a"]})
    assert SCRIPT["scitldr_rows"](raw).to_dict() == {"source": ["One. Two."], "targets": [["First.", "Second."]]}


def test_scitldr_drops_examples_without_text_or_summary():
    raw = Dataset.from_dict({"source": [["One."], [], ["Two."]], "target": [["First."], ["Second."], [" "]]})
    assert SCRIPT["scitldr_rows"](raw).to_dict() == {"source": ["One."], "targets": [["First."]]}


def test_output_path_and_columns_match_the_summaries_recipe(tmp_path, monkeypatch):
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


def test_scitldr_loads_the_abstract_configuration_from_the_hub(monkeypatch, tmp_path):
    calls = []

    def load(*args, **kwargs):
        calls.append((args, kwargs))
        return Dataset.from_dict({"source": [["One."]], "target": [["First."]]})

    monkeypatch.setitem(SCRIPT["main"].__globals__, "load_dataset", load)
    argv = ["prepare_data.py", "--hub-id", "allenai/scitldr", "--revision", "r", "--output-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*argv, "--tasks", "scitldr"])
    SCRIPT["main"]()
    assert calls == [
        (("allenai/scitldr", "Abstract"), {"split": split, "revision": "r"}) for split in ("train", "validation")
    ]


def test_scitldr_missing_column_raises():
    with pytest.raises(ValueError, match="no column.*source"):
        SCRIPT["scitldr_rows"](Dataset.from_dict({"text": ["One."]}))


def phrases(*texts: str) -> Dataset:
    return Dataset.from_dict({"sentence": list(texts), "label": [len(text) % 2 for text in texts]})


def test_test_phrases_of_sst2_are_not_in_the_training_phrases():
    long = " ".join(f"word{number}" for number in range(16))
    train = phrases("word3 word4", long, f"{long} more ", "word", "unseen", "other words", "rd3 word4")
    splits = SCRIPT["sst2_splits"](train, phrases("the other words were fine"), seed=0)
    assert splits["train"]["sentence"] == ["word", "unseen", "rd3 word4"]
    held_out = ["word3 word4", long, f"{long} more"]
    assert splits["validation"]["sentence"] == [*held_out, "the other words were fine"]
    assert splits["train"]["label"] == ["negative", "negative", "positive"]


def test_no_training_phrase_of_sst2_overlaps_a_phrase_around_a_drawn_phrase(monkeypatch):
    monkeypatch.setitem(SCRIPT["sst2_splits"].__globals__, "NUM_HELD_OUT", 1)
    long = " ".join(f"word{number}" for number in range(16))
    tested = []
    for seed in range(4):
        splits = SCRIPT["sst2_splits"](phrases(long, f"{long} more", "more", "unseen"), phrases("fine"), seed)
        assert splits["train"]["sentence"] == ["unseen"]
        tested.append("more" in splits["validation"]["sentence"])
    assert set(tested) == {False, True}  # each of the long phrases was drawn


def test_only_some_long_phrases_are_held_out():
    texts = [" ".join(f"w{row}x{number}" for number in range(15)) for row in range(400)]
    splits = SCRIPT["sst2_splits"](phrases(*texts), phrases("fine"), seed=0)
    assert (len(splits["train"]), len(splits["validation"])) == (100, 301)


def test_small_model_reads_its_texts(tmp_path):
    texts = ["a fine film", "It was great"] * 20
    SCRIPT["write_small_model"](texts, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer("a fine film")["input_ids"]).strip() == "a fine film"
    assert model.config.vocab_size == len(tokenizer) and model.config.num_hidden_layers == 4
