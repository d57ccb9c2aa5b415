"""Values that a reader could lose or change: each is kept, named in a note, or refused with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_federated.data.tables import TableError, read_table


# Rows of a batch, the first of which determines the types of the columns.
FIRST_ROWS = 10_000


def json_lines(path: Path, first: Any, *later: Any) -> Path:
    """A file of which the first batch has one value, and the next lines have other values."""
    rows = [{"x": first}] * FIRST_ROWS + [value if isinstance(value, dict) else {"x": value} for value in later]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def assert_refused(path: Path, *words: str) -> None:
    with pytest.raises(TableError) as caught:
        list(read_table(path).batches())
    for word in [str(path), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("first", "later", "words"),
    [
        (1, 1.9, ["column 'x'", "the value 1.9", "Correct"]),
        (1, True, ["column 'x'", "the value true"]),
        (True, 1, ["column 'x'", "the value 1 "]),
        (1.5, True, ["column 'x'", "the value true"]),
        ([1], [1.7], ["column 'x'", "the value [1.7]"]),
        ({"a": 1}, {"x": {"a": 1, "b": 2}}, ["column 'x'", '"b": 2']),
        ([{"a": 1}], [{"a": 1, "b": 2}], ["column 'x'", '"b": 2']),
        (1, {"x": 2, "y": 3}, ['column "y"', "the value 3", "move a row"]),
    ],
)
def test_later_json_value_that_would_change_is_refused(tmp_path, first, later, words):
    assert_refused(json_lines(tmp_path / "a.jsonl", first, None, later), "line 10002", *words)


@pytest.mark.parametrize(
    ("first", "later"),
    [(1, [2, None]), (1.5, [2, None]), ([1.5], [[2], []]), ({"a": 1, "b": "c"}, [{"x": {"a": 2, "b": None}}])],
)
def test_later_json_value_of_the_same_type_is_kept(tmp_path, first, later):
    _, (_, batch) = read_table(json_lines(tmp_path / "a.jsonl", first, *later)).batches()
    assert batch.column("x").to_pylist() == [row["x"] if isinstance(row, dict) else row for row in later]


def test_first_value_of_a_json_column_can_come_late(tmp_path):
    _, (_, batch) = read_table(json_lines(tmp_path / "a.jsonl", None, "late", 7)).batches()
    assert batch.column("x").to_pylist() == ["late", "7"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('[{"a": 1}]\n\n[{"a": 2}]', ["line 3", "after the end of the array", "'[{\"a\": 2}]'"]),
        ('[{"a": 1}] x', ["line 1", "after the end"]),
        ('[{"a": 1}\n{"a": 2}]', ["line 2", "comma is missing", "'{\"a\": 2}]'"]),
        ('[{"a": 1},\n,{"a": 2}]', ["line 2", "no valid JSON"]),
    ],
)
def test_json_array_with_lost_rows_is_refused(tmp_path, content, words):
    path = tmp_path / "a.json"
    path.write_text(content)
    assert_refused(path, *words)
