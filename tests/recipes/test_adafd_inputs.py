"""Tests of `prepare_data.py` of the AdaFD recipes: domain sizes, and test examples with shifted label shares."""

from __future__ import annotations

import gzip
import json
import runpy
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from datasets import load_dataset


SCRIPT = str(Path(__file__).parents[2] / "recipes" / "adafd" / "prepare_data.py")


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    for domain, counts in {"north": (30, 20, 10), "south": (5, 50, 5)}.items():
        for split, times in (("train", 2), ("dev", 1), ("test", 1)):
            labels = [label for label, count in enumerate(counts) for _ in range(count * times)]
            lines = [json.dumps({"text": f"{domain} {split} {n}", "label": label}) for n, label in enumerate(labels)]
            with gzip.open(tmp_path / f"{domain}_{split}.jsonl.gz", "wt") as file:
                file.write("\n".join(lines))

    def run(*options):
        given = ["--source", str(tmp_path), "--output-dir", str(tmp_path / "out"), *options]
        monkeypatch.setattr(sys, "argv", [SCRIPT, *given])
        runpy.run_path(SCRIPT, run_name="__main__")
        paths = {split: tmp_path / "out" / f"{split}.jsonl" for split in ("train", "validation", "test", "shifted")}
        return {
            split: [json.loads(line) for line in path.read_text().splitlines()]
            for split, path in paths.items()
            if path.exists()
        }

    return run


def counted(rows, *columns):
    return Counter(tuple(row[column] for column in columns) for row in rows)


def test_default_keeps_all_examples_and_names_the_labels(prepare):
    splits = prepare()
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 240, "validation": 120, "test": 120}
    assert counted(splits["test"], "domain", "label")["south", "positive"] == 50


def test_train_rows_caps_a_domain_in_the_training_split_only(prepare):
    whole, splits = prepare(), prepare("--train-rows", "south=40")
    assert counted(splits["train"], "domain") == {("north",): 120, ("south",): 40}
    assert splits["test"] == whole["test"] and splits == prepare("--train-rows", "south=40")
    texts = [row["text"] for row in splits["train"]]
    assert texts == [row["text"] for row in whole["train"] if row["text"] in set(texts)]


def test_test_alpha_adds_a_split_with_new_label_shares(prepare):
    whole, splits = prepare(), prepare("--test-alpha", "0.8", "--seed", "3")
    assert whole.items() <= splits.items() and "shifted" not in whole
    assert {row["text"] for row in splits["shifted"]} <= {row["text"] for row in whole["test"]}
    counts, available = counted(splits["shifted"], "domain", "label"), counted(whole["test"], "domain", "label")
    for domain in ("north", "south"):
        domain_counts = {key: count for key, count in counts.items() if key[0] == domain}
        assert any(domain_counts[key] == available[key] for key in domain_counts)  # one label is used up
        total = sum(domain_counts.values())
        shares = [domain_counts.get((domain, label), 0) / total for label in ("neutral", "positive", "negative")]
        before = [available[domain, label] / 60 for label in ("neutral", "positive", "negative")]
        assert np.abs(np.subtract(shares, before)).max() > 0.05


def test_large_test_alpha_gives_equal_label_shares(prepare):
    counts = counted(prepare("--test-alpha", "1e9")["shifted"], "domain", "label")  # a third each
    fewest = {"north": 10, "south": 5}
    assert len(counts) == 6 and all(fewest[domain] - count in (0, 1) for (domain, _), count in counts.items())


def test_domain_without_one_label_keeps_its_other_labels(prepare, tmp_path):
    path = tmp_path / "west_test.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"w {n}", "label": n % 2}) for n in range(20)))
    counts = counted(prepare("--test-alpha", "1e9")["shifted"], "domain", "label")
    west_counts = {label: count for (domain, label), count in counts.items() if domain == "west"}
    assert west_counts.keys() == {"neutral", "positive"} and min(west_counts.values()) >= 9


def test_shifted_split_does_not_depend_on_train_rows(prepare):
    options = ["--test-alpha", "0.8", "--seed", "2"]
    assert prepare(*options)["shifted"] == prepare(*options, "--train-rows", "south=40")["shifted"]


def test_tiny_test_alpha_gives_one_label_for_each_domain(prepare):
    counts = counted(prepare("--test-alpha", "1e-9")["shifted"], "domain", "label")
    assert {domain for domain, _ in counts} == {"north", "south"} and len(counts) == 2


def test_load_dataset_finds_all_splits_by_name(prepare, tmp_path):
    splits = prepare("--test-alpha", "0.8")
    loaded = load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert {split: rows["text"][:] for split, rows in loaded.items()} == {
        split: [row["text"] for row in rows] for split, rows in splits.items()
    }


def test_foreign_dataset_card_is_not_overwritten(prepare, tmp_path):
    prepare()
    prepare("--test-alpha", "0.8")  # overwrites the card that the script wrote
    (tmp_path / "out" / "README.md").write_text("mine")
    with pytest.raises(SystemExit, match="was not written by this script"):
        prepare()
    assert (tmp_path / "out" / "README.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train-rows", "east=3"], "names east"),
        (["--train-rows", "north"], "not of the form domain=rows"),
        (["--train-rows", "north=0"], "not of the form domain=rows"),
        (["--test-alpha", "0"], "must be greater than 0"),
        (["--test-alpha", "nan"], "must be greater than 0 and finite"),
    ],
)
def test_invalid_options_raise(prepare, capsys, options, message):
    with pytest.raises(SystemExit) as error:
        prepare(*options)
    assert message in f"{error.value} {capsys.readouterr().err}"
