"""Values that a reader could lose or change: each is kept, named in a note, or refused with its line."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hf_federated.data.tables import TableError, TableOptions, load_tables, read_table, table_dataset


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


def csv_lines(path: Path, first: str, *later: str, header: str = "id;x") -> Path:
    """A file of which the first batch has one value, and the next lines have other values."""
    path.write_text("\n".join([header, *[f"a;{first}"] * FIRST_ROWS, *(f"a;{value}" for value in later)]))
    return path


@pytest.mark.parametrize(
    ("first", "later", "words"),
    [
        ("true", ["true", "1"], ["'1'", "true or false", "text_columns"]),
        ("true", ["1", "0"], ["line 10002", "'1'"]),
        ("1", ["true", "false"], ["line 10002", "'true'", "whole numbers"]),
        ("1.5", ["", "false"], ["line 10003", "'false'", "numbers"]),
        ("1", ["0x1F", "2"], ["line 10002", "'0x1F'"]),
    ],
)
def test_later_csv_value_that_would_change_is_refused(tmp_path, first, later, words):
    assert_refused(csv_lines(tmp_path / "a.csv", first, *later), "column 'x'", *words)


def test_later_batch_without_values_has_the_type_of_the_column(tmp_path):
    _, (_, batch) = read_table(csv_lines(tmp_path / "a.csv", "true", "", "NA")).batches()
    assert batch.column("x").to_pylist() == [None, None]


def notes_of(path: Path) -> list[str]:
    table = read_table(path)
    for _ in range(2):  # The same notes are not added again.
        list(table.batches())
    return table.notes


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["12", "", "007"], ["007 on line 4", "read as 7.0", "text_columns"]),
        (["1,5", "01,2"], ["01,2 on line 3", "read as 1.2"]),
        (["5", "000"], ["000 on line 3", "read as 0."]),
        (["1.5", "02.5"], ["02.5 on line 3", "read as 2.5"]),
    ],
)
def test_leading_zeros_of_numbers_are_named(tmp_path, values, words):
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["id;x", *(f"a;{value}" for value in values)]))
    (note,) = [note for note in notes_of(path) if "leading zeros" in note]
    assert all(word in note for word in ["'x'", *words])


@pytest.mark.parametrize("values", [["0,5", "1,5"], ["0.5", "00.5"], ["0", "10"], ["0,5", "00,5"], ["x", "007"]])
def test_values_without_lost_zeros_have_no_note(tmp_path, values):
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["id;x", *(f"a;{value}" for value in values)]))
    assert not [note for note in notes_of(path) if "leading zeros" in note]


def test_leading_zeros_of_a_later_batch_are_named_once(tmp_path):
    (note,) = notes_of(csv_lines(tmp_path / "a.csv", "1", "2", "007", "008"))
    assert "007 on line 10003" in note


def test_note_on_a_later_batch_is_a_warning_of_load_tables(tmp_path, monkeypatch):
    warnings: list[str] = []
    monkeypatch.setattr(table_dataset.logger, "warning", warnings.append)
    load_tables({"train": [csv_lines(tmp_path / "a.csv", "001", "2", header="id;y")]})
    assert warnings == []
    load_tables({"train": [csv_lines(tmp_path / "a.csv", "1", "007")]})
    assert len(warnings) == 1 and "007 on line 10002" in warnings[0]


@pytest.mark.parametrize("value", ["1.234", "1.5", "1.234,5"])
def test_later_point_in_a_column_with_decimal_commas_is_refused(tmp_path, value):
    path = csv_lines(tmp_path / "a.csv", "1,5", "2", "1.#QNAN", value)
    assert_refused(path, "line 10004", "column 'x'", f"'{value}'", "thousands", "text_columns")


@pytest.mark.parametrize("values", [["1.234", "", "12.500"], ["1,234", "-2,500"]])
def test_numbers_that_may_be_thousands_are_named(tmp_path, values):
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["id;x", *(f"a;{value}" for value in values)]))
    (note,) = [note for note in notes_of(path) if "thousands" in note]
    assert all(word in note for word in ["'x'", f"{values[0]} is read as 1.234", "text_columns", "--csv-decimal"])


@pytest.mark.parametrize(
    ("content", "decimal"),
    [("id;x\na;1.234\na;1.5", None), ("id;x\na;1234", None), ("id,x\na,1.234", None), ("id;x\na;1.234", ".")],
)
def test_other_numbers_have_no_note_on_thousands(tmp_path, content, decimal):
    path = tmp_path / "a.csv"
    path.write_text(content)
    table = read_table(path, TableOptions(decimal=decimal))
    list(table.batches())
    assert table.notes == []


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"x": "a"}\n{"x": "\\ud800"}', ["line 2", '"x"', "\\ud800", "half of a character"]),
        ("a.jsonl", '{"x": [{"\\ud800": 1}]}', ["line 1", '"x"', "half of a character"]),
        ("a.jsonl", '{"x": "a"}\n{"\\udfff": "a"}', ["line 2", "\\udfff", "half of a character"]),
        ("a.jsonl", '{"x": 1}\n{"x": ' + "9" * 5000 + "}", ["line 2", "too many digits", "quotes"]),
        ("a.jsonl", '{"x": 1}\n{\n"x": ' + "9" * 5000 + "\n}", ["line 2", "too many digits", "quotes"]),
        ("a.json", '[{"x": 1},\n{"x": ' + "9" * 5000 + "}]", ["line 2", "too many digits", "quotes"]),
    ],
)
def test_json_value_that_no_column_can_hold_is_refused(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_text(content)
    assert_refused(path, *words)


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**64, 10**400])
def test_later_csv_integer_out_of_range_is_refused(tmp_path, number):
    path = csv_lines(tmp_path / "a.csv", "1", "2", str(number))
    assert_refused(path, "line 10003", "column 'x'", str(number)[:50], "whole numbers", "text_columns")


@pytest.mark.parametrize("encoding", ["base64", "rot13", "hex"])
def test_codec_that_is_no_text_encoding_is_refused(encoding):
    with pytest.raises(ValueError, match=f"'{encoding}', which is no encoding of text. Examples"):
        TableOptions(encoding=encoding)


def test_damaged_workbook_is_refused(tmp_path):
    openpyxl = pytest.importorskip("openpyxl", reason="openpyxl (extra xlsx) is not installed")
    workbook = openpyxl.Workbook()
    workbook.active.append(["x"])
    workbook.active.append([1])
    workbook.save(tmp_path / "whole.xlsx")
    for name in ("xl/worksheets/sheet1.xml", "xl/workbook.xml"):
        path = tmp_path / "a.xlsx"
        with zipfile.ZipFile(tmp_path / "whole.xlsx") as whole, zipfile.ZipFile(path, "w") as damaged:
            for part in whole.namelist():
                content = whole.read(part)
                damaged.writestr(part, content[: len(content) // 2] if part == name else content)
        assert_refused(path, "damaged", "save it as .xlsx")
