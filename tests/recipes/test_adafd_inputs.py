"""How AdaFD's recipe lays reviews out: domains of other sizes, and test rows with other labels."""

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


def test_all_rows_are_kept_and_labels_named(prepare):
    splits = prepare()
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 240, "validation": 120, "test": 120}
    assert counted(splits["test"], "domain", "label")["south", "positive"] == 50


def test_domains_get_other_sizes_and_only_in_training(prepare):
    whole, splits = prepare(), prepare("--train-rows", "south=40")
    assert counted(splits["train"], "domain") == {("north",): 120, ("south",): 40}
    assert splits["test"] == whole["test"] and splits == prepare("--train-rows", "south=40")
    texts = [row["text"] for row in splits["train"]]
    assert texts == [row["text"] for row in whole["train"] if row["text"] in set(texts)]


def test_further_test_rows_have_shares_of_a_dirichlet_distribution(prepare):
    whole, splits = prepare(), prepare("--test-alpha", "0.8", "--seed", "3")
    assert whole.items() <= splits.items() and "shifted" not in whole
    assert {row["text"] for row in splits["shifted"]} <= {row["text"] for row in whole["test"]}
    found, available = counted(splits["shifted"], "domain", "label"), counted(whole["test"], "domain", "label")
    for domain in ("north", "south"):
        own = {key: count for key, count in found.items() if key[0] == domain}
        assert any(own[key] == available[key] for key in own)  # no more rows of such shares are there
        shares = [own.get((domain, label), 0) / sum(own.values()) for label in ("neutral", "positive", "negative")]
        before = [available[domain, label] / 60 for label in ("neutral", "positive", "negative")]
        assert np.abs(np.subtract(shares, before)).max() > 0.05


def test_the_shares_follow_the_concentration(prepare):
    found = counted(prepare("--test-alpha", "1e9")["shifted"], "domain", "label")  # a third each
    fewest = {"north": 10, "south": 5}
    assert len(found) == 6 and all(fewest[domain] - count in (0, 1) for (domain, _), count in found.items())


def test_a_domain_that_lacks_a_label_keeps_its_others(prepare, tmp_path):
    path = tmp_path / "west_test.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"w {n}", "label": n % 2}) for n in range(20)))
    found = counted(prepare("--test-alpha", "1e9")["shifted"], "domain", "label")
    of_west = {label: count for (domain, label), count in found.items() if domain == "west"}
    assert of_west.keys() == {"neutral", "positive"} and min(of_west.values()) >= 9


def test_test_rows_do_not_depend_on_the_sizes_of_training(prepare):
    options = ["--test-alpha", "0.8", "--seed", "2"]
    assert prepare(*options)["shifted"] == prepare(*options, "--train-rows", "south=40")["shifted"]


def test_one_label_may_have_all_the_share(prepare):
    found = counted(prepare("--test-alpha", "1e-9")["shifted"], "domain", "label")
    assert {domain for domain, _ in found} == {"north", "south"} and len(found) == 2


def test_splits_are_found_under_their_names(prepare, tmp_path):
    splits = prepare("--test-alpha", "0.8")
    loaded = load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert {split: rows["text"][:] for split, rows in loaded.items()} == {
        split: [row["text"] for row in rows] for split, rows in splits.items()
    }


def test_the_card_of_another_stays(prepare, tmp_path):
    prepare()
    prepare("--test-alpha", "0.8")  # its own is written again
    (tmp_path / "out" / "README.md").write_text("mine")
    with pytest.raises(SystemExit, match="is not of this script"):
        prepare()
    assert (tmp_path / "out" / "README.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train-rows", "east=3"], "names east"),
        (["--train-rows", "north"], "not of the form domain=rows"),
        (["--train-rows", "north=0"], "not of the form domain=rows"),
        (["--test-alpha", "0"], "must be more than 0"),
        (["--test-alpha", "nan"], "must be more than 0, and finite"),
    ],
)
def test_bad_options_are_refused(prepare, capsys, options, message):
    with pytest.raises(SystemExit) as error:
        prepare(*options)
    assert message in f"{error.value} {capsys.readouterr().err}"
