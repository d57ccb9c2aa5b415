"""How the FedDRS recipes get SuperGLUE's eight tasks as one data set."""

from __future__ import annotations

import gzip
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset
from superglue_raw import FILES, files

from hf_federated.tasks import superglue_rows
from hf_federated.tasks.superglue import LABELS


SCRIPT = str(Path(__file__).parents[2] / "recipes" / "feddrs" / "prepare_data.py")


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """The benchmark's files as they may lie about: under several names, packed or not."""
    for task, rows in FILES.items():
        folder = tmp_path / "data" / {"rte": "glue_rte", "cb": "cb"}.get(task, f"superglue_{task}")
        folder.mkdir(parents=True)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        with gzip.open(folder / "train.jsonl.gz", "wt", encoding="utf-8") as file:
            file.write(text)
        (folder / {"cb": "val.jsonl", "wic": "validation.jsonl"}.get(task, "dev.jsonl")).write_text(text)
    return tmp_path / "data"


def prepare(monkeypatch: pytest.MonkeyPatch, data_dir: Path, *options: str) -> Any:
    """Runs the script, and loads what it wrote as a recipe does."""
    output = data_dir.parent / "out"
    given = ["--data-dir", str(data_dir), "--output-dir", str(output), *options]
    monkeypatch.setattr(sys, "argv", [SCRIPT, *given])
    runpy.run_path(SCRIPT, run_name="__main__")
    return load_dataset(str(output), split=["train", "validation"])


def test_all_tasks_become_one_data_set(monkeypatch, data_dir, capsys):
    for rows in prepare(monkeypatch, data_dir):
        for task in LABELS:
            of_task = rows.filter(lambda name, task=task: name == task, input_columns="task")
            assert of_task[:] == superglue_rows(task, files(task))[:]
        assert set(rows["task"]) == set(LABELS)
    assert "train      multirc       1 raw,       5 rows,       5 taken" in capsys.readouterr().out


def test_caps_take_whole_questions(monkeypatch, data_dir):
    train, validation = prepare(
        monkeypatch, data_dir, "--max-train-rows", "1", "multirc=4", "record=3", "--max-validation-rows", "record=5"
    )
    counts = {task: train["task"][:].count(task) for task in LABELS}
    # Of 3 + 2 answers, and of two queries with 3 candidates each.
    assert counts.pop("multirc") in (2, 3) and counts.pop("record") == 3 and set(counts.values()) == {1}
    assert len({name for name in train["question"] if name.startswith(("multirc", "record"))}) == 2
    assert validation["task"][:].count("record") == 3 and validation["task"][:].count("multirc") == 5


def test_some_tasks_and_marked_nouns(monkeypatch, data_dir):
    train, _ = prepare(monkeypatch, data_dir, "--tasks", "wsc", "cb", "--mark-span1")
    assert set(train["task"]) == {"wsc", "cb"}
    assert sum("* Eve *" in source for source in train["source"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-train-rows", "qnli=3"], "'qnli=3' is no cap"),
        (["--max-train-rows", "0"], "'0' is no cap; write a number from 1"),
        (["--max-train-rows", "record=2"], "A cap of 2 rows is less than the first question"),
    ],
)
def test_a_cap_that_cannot_be_is_refused(monkeypatch, data_dir, options, message):
    with pytest.raises(SystemExit, match=message):
        prepare(monkeypatch, data_dir, *options)


def test_a_missing_file_and_a_bad_row_are_named(monkeypatch, data_dir):
    path = data_dir / "superglue_copa" / "dev.jsonl"
    path.write_text(json.dumps({**FILES["copa"][0], "label": 5}) + "\n")
    with pytest.raises(SystemExit, match="validation: Row 0 of 'copa' has the label 5; allowed are 'choice1'"):
        prepare(monkeypatch, data_dir)
    path.unlink()
    with pytest.raises(SystemExit, match="has no file superglue_copa/val.jsonl or .*superglue_copa/dev.jsonl"):
        prepare(monkeypatch, data_dir)
