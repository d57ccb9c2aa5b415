"""Tests of `prepare_data.py` of the FedDRS recipes, which writes SuperGLUE's eight tasks as one dataset."""

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
    """Write the benchmark's files under several folder and file names, compressed or not."""
    for task, rows in FILES.items():
        folder = tmp_path / "data" / {"rte": "glue_rte", "cb": "cb"}.get(task, f"superglue_{task}")
        folder.mkdir(parents=True)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        with gzip.open(folder / "train.jsonl.gz", "wt", encoding="utf-8") as file:
            file.write(text)
        (folder / {"cb": "val.jsonl", "wic": "validation.jsonl"}.get(task, "dev.jsonl")).write_text(text)
    return tmp_path / "data"


def prepare(monkeypatch: pytest.MonkeyPatch, data_dir: Path, *options: str) -> Any:
    """Run the script and load its output like a recipe does."""
    output = data_dir.parent / "out"
    given = ["--data-dir", str(data_dir), "--output-dir", str(output), *options]
    monkeypatch.setattr(sys, "argv", [SCRIPT, *given])
    runpy.run_path(SCRIPT, run_name="__main__")
    return load_dataset(str(output), split=["train", "validation"])


def test_all_tasks_become_one_dataset(monkeypatch, data_dir, capsys):
    for rows in prepare(monkeypatch, data_dir):
        for task in LABELS:
            task_rows = rows.filter(lambda name, task=task: name == task, input_columns="task")
            assert task_rows[:] == superglue_rows(task, files(task))[:]
        assert set(rows["task"]) == set(LABELS)
    assert "train      multirc       1 raw,       5 examples,       5 taken" in capsys.readouterr().out


def test_caps_keep_whole_questions(monkeypatch, data_dir):
    train, validation = prepare(
        monkeypatch, data_dir, "--max-train-rows", "1", "multirc=4", "record=3", "--max-validation-rows", "record=5"
    )
    counts = {task: train["task"][:].count(task) for task in LABELS}
    # MultiRC has questions with 3 and 2 answers, ReCoRD two queries with 3 candidates each.
    assert counts.pop("multirc") in (2, 3) and counts.pop("record") == 3 and set(counts.values()) == {1}
    assert len({name for name in train["question"] if name.startswith(("multirc", "record"))}) == 2
    assert validation["task"][:].count("record") == 3 and validation["task"][:].count("multirc") == 5


def test_tasks_and_mark_span1_options(monkeypatch, data_dir):
    train, _ = prepare(monkeypatch, data_dir, "--tasks", "wsc", "cb", "--mark-span1")
    assert set(train["task"]) == {"wsc", "cb"}
    assert sum("* Eve *" in source for source in train["source"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-train-rows", "qnli=3"], "'qnli=3' is not a cap"),
        (["--max-train-rows", "0"], "'0' is not a cap. Set a number of at least 1"),
        (["--max-train-rows", "record=2"], "The cap of 2 examples is smaller than the first drawn question"),
    ],
)
def test_invalid_caps_raise(monkeypatch, data_dir, options, message):
    with pytest.raises(SystemExit, match=message):
        prepare(monkeypatch, data_dir, *options)


def test_missing_file_and_invalid_label_raise(monkeypatch, data_dir):
    path = data_dir / "superglue_copa" / "dev.jsonl"
    path.write_text(json.dumps({**FILES["copa"][0], "label": 5}) + "\n")
    with pytest.raises(SystemExit, match="validation: Row 0 of 'copa' has the label 5; allowed are 'choice1'"):
        prepare(monkeypatch, data_dir)
    path.unlink()
    with pytest.raises(SystemExit, match="has no file superglue_copa/val.jsonl or .*superglue_copa/dev.jsonl"):
        prepare(monkeypatch, data_dir)
