"""Tables of random values against Python's csv module, types against pandas, lines, JSON, Excel and the cache."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_dataset

from hf_federated.data.tables import TableError, TableOptions, load_tables, read_table


ALPHABET = ["a", "b", "ä", "日", " ", ",", ";", "\t", "|", '"', "'", "\n", "\r\n", "1", ".", "-", "🙂", "=", "#", "\\"]


def random_table(seed: int) -> tuple[list[str], list[list[str]], bytes]:
    """Names of columns, rows, and a CSV file of them that Python's csv module writes in a random dialect."""
    draw = random.Random(seed)
    columns = [f"column {number}" for number in range(draw.randint(2, 5))]
    words = ["".join(draw.choices(ALPHABET, k=draw.randint(0, 12))) for _ in range(30)]
    rows = [[draw.choice(words) for _ in columns] for _ in range(draw.randint(1, 40))]
    stream = io.StringIO(newline="")
    writer = csv.writer(
        stream,
        delimiter=draw.choice(",;\t|"),
        quoting=draw.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
        lineterminator=draw.choice(["\n", "\r\n"]),
    )
    writer.writerows([columns, *rows])
    encoding = draw.choice(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
    return columns, rows, stream.getvalue().encode(encoding)


def test_random_tables_of_the_csv_module_are_read_as_written(tmp_path):
    path = tmp_path / "north.csv"
    for seed in range(150):
        columns, rows, content = random_table(seed)
        path.write_bytes(content)
        table = read_table(path)
        assert table.columns == columns, seed
        found = [list(row.values()) for _, batch in table.batches(as_text=True) for row in batch.to_pylist()]
        assert found == [[value or None for value in row] for row in rows], seed


def test_line_of_each_row_is_where_the_row_starts(tmp_path):
    path = tmp_path / "north.csv"
    for seed in range(50):
        _, _, content = random_table(seed)
        if content.startswith((b"\xff", b"\xfe", b"\xef")) or b"\0" in content:
            continue
        path.write_bytes(content)
        text = content.decode()
        lines = text.splitlines(keepends=True)
        table = read_table(path)
        assert table.format is not None
        for starts, batch in table.batches(as_text=True):
            for start, row in zip(starts.tolist(), batch.to_pylist(), strict=True):
                rest = io.StringIO("".join(lines[start - 1 :]), newline="")
                expected = next(csv.reader(rest, delimiter=table.format.separator))
                assert [value or "" for value in row.values()] == expected, seed


# Each column has the texts of four rows.
TYPED = {
    "integers": ["1", "-2", "+3", "40000000000"],
    "integers with a missing value": ["1", "", "3", "4"],
    "large integers": ["18446744073709551615", "1", "2", "3"],
    "floats": ["0.1", "1e-7", "-2.675", "3.141592653589793238"],
    "infinity": ["inf", "-inf", "1", "nan"],
    "missing texts": ["NA", "null", "None", "n/a"],
    "booleans": ["True", "false", "TRUE", "False"],
    "booleans with a missing value": ["True", "", "False", "True"],
    "blanks around numbers": [" 1", "2 ", " 3 ", "4"],
    "mixed": ["1", "two", "3.0", ""],
    "texts": ["a", "NA", "b, c", "line\nbreak"],
    "quotes": ['say "hi"', '"', "'", "`"],
    "dates": ["2024-01-02", "2024-01-03", "", "x"],
    "hexadecimal": ["0x1F", "1", "2", "3"],
    "thousands": ["1,000", "2,000", "3", "4"],
    "leading zeros": ["007", "012", "1", "2"],
    "empty": ["", "", "", ""],
    "old line breaks": ["a\rb", "c\r\nd", "e", "f"],
    "underscores": ["1_000", "2", "3", "4"],
    "words of numbers": ["Infinity", "NaN", "-Infinity", "1"],
    "exponents": ["1E5", "2e+3", "5", "1e400"],
}


def test_types_and_values_equal_those_of_load_dataset(tmp_path):
    path = tmp_path / "north.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([list(TYPED), *zip(*TYPED.values(), strict=True)])
    found = load_tables({"train": [path]})["train"]
    expected = load_dataset("csv", data_files={"train": str(path)}, cache_dir=str(tmp_path / "cache"))["train"]
    assert found.features == expected.features
    assert json.dumps(found[:]) == json.dumps(expected[:])


def test_types_of_all_rows_are_those_of_the_first_rows_as_in_load_dataset(tmp_path):
    path = tmp_path / "north.csv"
    rows = [f"text {number},{'' if number % 7 == 0 and number > 10_000 else number % 5}" for number in range(10_050)]
    path.write_text("\n".join(["text,label", *rows]))
    found = load_tables({"train": [path]})["train"]
    expected = load_dataset("csv", data_files={"train": str(path)}, cache_dir=str(tmp_path / "cache"))["train"]
    assert found.features == expected.features
    assert found[:] == expected[:]


def test_column_whose_first_value_comes_late_has_the_type_of_the_value(tmp_path):
    path = tmp_path / "north.csv"
    path.write_text("\n".join(["text,note", *["a,"] * 10_000, "b,broken"]))
    assert load_tables({"train": [path]})["train"]["note"][-2:] == [None, "broken"]


def test_texts_of_numbers_after_the_first_rows_stay_as_written(tmp_path):
    path = tmp_path / "north.csv"
    path.write_text("\n".join(["text,code", *["a,x"] * 10_000, "b,007"]))
    assert load_tables({"train": [path]})["train"]["code"][-1] == "007"


@pytest.mark.parametrize(
    ("value", "words"), [("x", ["'x'", "whole numbers", "text_columns"]), ("1.5", ["'1.5'", "such as 3.0"])]
)
def test_value_of_another_type_is_refused_with_its_line_and_column(tmp_path, value, words):
    path = tmp_path / "north.csv"
    path.write_text("\n".join(["text,label", *["a,1"] * 10_000, '"b\nc",2', f"d,{value}"]))
    with pytest.raises(TableError) as caught:
        load_tables({"train": [path]})
    assert all(word in str(caught.value) for word in [str(path), "line 10004", "column 'label'", *words])


def typed_columns(path: Path, options: TableOptions | None = None) -> dict[str, list[Any]]:
    return dict(load_tables({"train": [path]}, options)["train"][:])


def test_integers_of_more_than_64_bits_are_texts(tmp_path):
    path = tmp_path / "north.csv"
    path.write_text("text,number\na,18446744073709551616\nb,007\n")
    assert typed_columns(path)["number"] == ["18446744073709551616", "007"]


def test_decimal_commas_are_numbers_in_files_with_semicolons_only(tmp_path):
    path = tmp_path / "north.csv"
    path.write_text("text;score;range\na;1,5;1,5\nb;-2;1,5 to 2\n")
    assert typed_columns(path) == {"text": ["a", "b"], "score": [1.5, -2.0], "range": ["1,5", "1,5 to 2"]}
    assert typed_columns(path, TableOptions(decimal="."))["score"] == ["1,5", "-2"]
    path.write_text("text\tscore\na\t1,500\n")
    assert typed_columns(path)["score"] == ["1,500"]
    assert typed_columns(path, TableOptions(decimal=","))["score"] == [1.5]


def test_leading_zeros_are_named_and_can_be_kept(tmp_path):
    path = tmp_path / "north.csv"
    path.write_text("text,label\na,12\nb,007\n")
    table = read_table(path)
    assert [batch.column("label").to_pylist() for _, batch in table.batches()] == [[12, 7]]
    assert all(word in table.notes[0] for word in ["'label'", "007 on line 3", "read as 7", "text_columns"])
    assert typed_columns(path, TableOptions(text_columns=["label"]))["label"] == ["12", "007"]


def test_changed_file_is_read_again(tmp_path):
    path = tmp_path / "north.csv"
    path.write_text("text;label\na;x\n")
    first = load_tables({"train": [path]})["train"]
    assert first._fingerprint == load_tables({"train": [path]})["train"]._fingerprint
    path.write_text("text;label\nb;x\n")
    assert load_tables({"train": [path]})["train"]["text"] == ["b"]


def test_files_of_a_split_need_the_same_columns(tmp_path):
    for name, header in (("a", "text,label"), ("b", "text,lable")):
        (tmp_path / f"{name}.csv").write_text(f"{header}\n1,2\n")
    with pytest.raises(TableError, match="b.csv has the columns text, lable, but .*a.csv has text, label"):
        load_tables({"train": [tmp_path / "a.csv", tmp_path / "b.csv"]})


def test_column_of_text_is_text_in_all_files_of_a_split(tmp_path):
    (tmp_path / "a.csv").write_text("text,code\na,x\n")
    (tmp_path / "b.csv").write_text("text,code\nb,007\n")
    assert load_tables({"train": [tmp_path / "a.csv", tmp_path / "b.csv"]})["train"]["code"][:] == ["x", "007"]


OBJECTS = [{"text": "a, b", "label": 1}, {"text": 'say "hi"\n', "label": 2, "spans": [{"start": 1}]}, {"text": None}]
INDENTED = json.dumps(OBJECTS, indent=1)


@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        ("a.jsonl", "\n\n".join(map(json.dumps, OBJECTS)), [1, 3, 5]),
        ("a.jsonl.gz", "\n".join(map(json.dumps, OBJECTS)), [1, 2, 3]),
        ("a.jsonl", "\n".join(json.dumps(row, indent=2) for row in OBJECTS), [1, 5, 14]),
        ("a.json", json.dumps(OBJECTS), [1, 1, 1]),
        ("a.json", "\n[\n" + ",\n\n".join(map(json.dumps, OBJECTS)) + "\n]\n", [3, 5, 7]),
        ("a.json", INDENTED, [number for number, text in enumerate(INDENTED.splitlines(), 1) if text == " {"]),
    ],
)
def test_json_rows_have_the_lines_at_which_they_start(tmp_path, name, content, lines):
    path = tmp_path / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith("gz") else content.encode())
    ((starts, batch),) = read_table(path).batches()
    assert batch.to_pylist() == [{"text": None, "label": None, "spans": None} | row for row in OBJECTS]
    assert starts.tolist() == lines


def test_array_of_texts_has_a_column_of_text(tmp_path):
    (tmp_path / "a.json").write_text('["a",\n"b"]')
    ((lines, batch),) = read_table(tmp_path / "a.json").batches()
    assert (lines.tolist(), batch.to_pylist()) == ([1, 2], [{"text": "a"}, {"text": "b"}])


def test_long_json_array_is_read_in_parts(tmp_path):
    rows = [{"text": "x" * (number % 3000), "number": number} for number in range(3000)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    ((_, batch),) = read_table(tmp_path / "a.json").batches()
    assert batch.to_pylist() == rows


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "a"}\n{"text": b"}\n', ["line 2", "character 10", '{"text": b"}']),
        ('[{"text": "a"},\n{"text": "b"}\n', ["line 3", "not closed"]),
        ('{"text": ' + "[" * 100_000 + "\n", ["line 1", "too many levels"]),
        ("[" * 100_000, ["line 1", "too many levels"]),
        ('{"text": "a"}\n["b"]\n', ["line 2", "no JSON object", '["b"]']),
        ("", ["no rows"]),
    ],
)
def test_broken_json_is_refused_with_its_line(tmp_path, content, words):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(TableError) as caught:
        list(read_table(path).batches())
    assert all(word in str(caught.value) for word in [str(path), *words])


def test_parquet_and_text_files_have_row_numbers(tmp_path):
    Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("a\n\nb", encoding="utf-16")
    ((rows, batch),) = read_table(tmp_path / "a.parquet").batches()
    assert (rows.tolist(), batch.to_pylist()) == ([1, 2], [{"text": "a", "label": 0}, {"text": "b", "label": 1}])
    ((lines, batch),) = read_table(tmp_path / "a.txt").batches()
    assert (lines.tolist(), batch.column("text").to_pylist()) == ([1, 2, 3], ["a", "", "b"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.xls", ["Save it as .xlsx"]),
        ("a.doc", ["a .doc file", ".csv"]),
        ("a", ["without a suffix"]),
        ("a.parquet", ["no valid Parquet file"]),
    ],
)
def test_unknown_format_is_refused_with_the_allowed_formats(tmp_path, name, words):
    (tmp_path / name).write_text("text\n")
    with pytest.raises(TableError) as caught:
        read_table(tmp_path / name)
    assert all(word in str(caught.value) for word in words)


def test_workbook_has_the_values_of_its_sheet_and_keeps_texts_of_numbers(tmp_path):
    openpyxl = pytest.importorskip("openpyxl", reason="openpyxl (extra xlsx) is not installed")
    workbook = openpyxl.Workbook()
    for row in (
        ["text", "label", "code", "ok"],
        ["grün, zu laut", 1, "007", True],
        [None] * 4,
        ["a\nb", 2.5, "12", None],
    ):
        workbook.active.append(row)
    workbook.create_sheet("empty")
    workbook.save(tmp_path / "a.xlsx")
    table = read_table(tmp_path / "a.xlsx")
    ((numbers, batch),) = table.batches()
    assert numbers.tolist() == [2, 4]
    assert batch.to_pylist() == [
        {"text": "grün, zu laut", "label": 1.0, "code": "007", "ok": True},
        {"text": "a\nb", "label": 2.5, "code": "12", "ok": None},
    ]
    workbook["empty"].append(["x"])
    workbook.save(tmp_path / "b.xlsx")
    with pytest.raises(TableError, match="2 sheets Sheet, empty have values"):
        read_table(tmp_path / "b.xlsx")


@pytest.mark.skipif(importlib.util.find_spec("openpyxl") is not None, reason="openpyxl is installed")
def test_workbook_without_openpyxl_names_the_extra(tmp_path):
    (tmp_path / "a.xlsx").write_bytes(b"")
    with pytest.raises(ImportError, match=r"hf-federated\[xlsx\]"):
        read_table(tmp_path / "a.xlsx")


@pytest.mark.slow
def test_million_rows_are_read_in_little_memory(tmp_path):
    """The peak of Python's allocations, without the memory of libraries."""
    import tracemalloc

    path = tmp_path / "north.csv"
    path.write_text("text;label\n" + "the pump leaks again after an hour of work;defect\n" * 1_000_000)
    tracemalloc.start()
    count = sum(len(batch) for _, batch in read_table(path).batches(as_text=True))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 1_000_000
    assert peak < 50_000_000
