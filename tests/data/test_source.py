"""`content_hash` and `row_hashes` are equal for equal rows and different for different rows."""

from __future__ import annotations

import datetime
import decimal
import random

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value, concatenate_datasets

from hf_federated.data.source import content_hash, row_hashes


COLUMNS = {
    "text": ["a", None, "ccc", "é", ""],
    "number": [1, None, 3, 4, 0],
    "real": [1.5, None, float("inf"), 2.0, -0.0],
    "truth": [True, None, False, True, False],
    "tokens": [[1, 2], [], None, [3], [None]],
    "words": [["a", "b"], None, [], ["c", None], ["ab"]],
    "record": [{"x": 1, "y": "a"}, {"x": None, "y": "b"}, {"x": 2, "y": None}, {"x": 3, "y": "q"}, {"x": 4, "y": ""}],
    "time": [datetime.datetime(2020, 1, day) for day in range(1, 5)] + [None],
    "date": [datetime.date(2020, 1, day) for day in range(1, 5)] + [None],
    "nothing": [None] * 5,
    "bytes": [b"\x00", None, b"", b"\xff\xfe", b"x"],
    "price": [
        decimal.Decimal("1.50"),
        None,
        decimal.Decimal("2.00"),
        decimal.Decimal("0.01"),
        decimal.Decimal("3.10"),
    ],
}


@pytest.fixture
def rows() -> Dataset:
    return Dataset.from_dict(COLUMNS)


def test_hash_does_not_depend_on_selection_chunks_or_file_format(rows, tmp_path):
    expected = content_hash(rows)
    order = [3, 1, 0, 4, 2]
    inverse = np.argsort(order).tolist()
    assert content_hash(rows.select(order).select(inverse)) == expected
    assert content_hash(rows.select(order).flatten_indices().select(inverse).flatten_indices()) == expected
    assert content_hash(concatenate_datasets([rows.select([0, 1]), rows.select([2, 3, 4])])) == expected
    assert content_hash(concatenate_datasets([rows, rows]).select(range(5, 10))) == expected
    rows.to_parquet(tmp_path / "rows.parquet")
    assert content_hash(Dataset.from_parquet(str(tmp_path / "rows.parquet"))) == expected
    rows.save_to_disk(tmp_path / "rows")
    assert content_hash(Dataset.load_from_disk(tmp_path / "rows")) == expected
    assert content_hash(rows.with_format("numpy", columns=["text"])) == expected


@pytest.mark.parametrize("column", COLUMNS)
def test_changed_value_changes_the_hash(rows, column):
    if column == "nothing":
        return
    for row in range(len(rows)):
        changed = {name: list(values) for name, values in COLUMNS.items()}
        changed[column][row] = next(value for value in COLUMNS[column] if value != COLUMNS[column][row])
        other = Dataset.from_dict(changed, features=rows.features)
        assert content_hash(other) != content_hash(rows), row


def test_hash_depends_on_row_order_row_number_columns_and_label_names(rows):
    expected = content_hash(rows)
    assert content_hash(rows.select([1, 0, 2, 3, 4])) != expected
    assert content_hash(rows.select(range(4))) != expected
    assert content_hash(rows.remove_columns("nothing")) != expected
    assert content_hash(rows.rename_column("text", "body")) != expected
    labels = [Dataset.from_dict({"y": [0, 1]}).cast_column("y", ClassLabel(names=n)) for n in (["a", "b"], ["b", "a"])]
    assert content_hash(labels[0]) != content_hash(labels[1])


def test_hash_depends_on_boundaries_of_strings_and_lists():
    def hash_of(**columns):
        return content_hash(Dataset.from_dict(columns))

    assert hash_of(text=["ab", "c"]) != hash_of(text=["a", "bc"])
    assert hash_of(words=[["ab"], ["c"]]) != hash_of(words=[["a", "b"], ["c"]])
    assert hash_of(words=[["a", "b"], ["c"]]) != hash_of(words=[["a"], ["b", "c"]])
    lists = Features({"x": List(Value("int64"))})
    empty, null = (Dataset.from_dict({"x": [[1], value]}, features=lists) for value in ([], None))
    assert content_hash(empty) != content_hash(null)


def test_swapped_columns_change_the_hash():
    rows = Dataset.from_dict({"question": ["q"], "answer": ["a"]})
    assert content_hash(rows) != content_hash(rows.rename_columns({"question": "answer", "answer": "question"}))
    assert content_hash(rows) != content_hash(rows.select_columns(["answer", "question"]))
    structs = [Dataset.from_dict({"x": [{"a": "1", "b": "2"}]}), Dataset.from_dict({"x": [{"b": "1", "a": "2"}]})]
    assert content_hash(structs[0]) != content_hash(structs[1])


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8"])
def test_null_and_false_have_different_hashes(dtype):
    features = Features({"a": Value(dtype), "b": Value(dtype)})
    left = Dataset.from_dict({"a": [None, True], "b": [True, False]}, features=features)
    right = Dataset.from_dict({"a": [True, False], "b": [True, None]}, features=features)
    assert content_hash(left) != content_hash(right)


def test_hash_of_several_blocks_does_not_depend_on_chunks():
    numbers = list(range(25_000))
    random.Random(0).shuffle(numbers)
    whole = Dataset.from_dict({"n": numbers, "text": [str(n) for n in numbers]})
    pieces = concatenate_datasets([whole.select(range(start, start + 2_500)) for start in range(0, 25_000, 2_500)])
    assert content_hash(whole) == content_hash(pieces)
    assert content_hash(whole) != content_hash(whole.select([*range(24_998), 24_999, 24_998]))


def test_a_row_has_the_same_hash_in_each_dataset_that_contains_it(rows):
    hashes = row_hashes(rows)
    assert hashes.dtype == np.uint64 and len(set(hashes.tolist())) == 5
    halves = concatenate_datasets([rows.select([3, 4]), rows.select([0, 1, 2])])
    np.testing.assert_array_equal(row_hashes(halves), hashes[[3, 4, 0, 1, 2]])
    np.testing.assert_array_equal(row_hashes(rows.select([2, 2])), hashes[[2, 2]])
    assert row_hashes(rows.select([])).shape == (0,)


def test_each_column_changes_the_hash_of_a_row(rows):
    for name in rows.column_names:
        if rows[name][0] is not None:
            missing = Dataset.from_dict({**COLUMNS, name: [None, *COLUMNS[name][1:]]}, features=rows.features)
            assert (row_hashes(missing) == row_hashes(rows)).tolist() == [False, True, True, True, True]


def test_types_and_names_of_columns_change_the_hash_of_a_row():
    row = Dataset.from_dict({"a": [1]})
    others = [row.rename_column("a", "b"), row.cast(Features({"a": Value("int32")})), Dataset.from_dict({"a": ["1"]})]
    assert row_hashes(row)[0] not in [row_hashes(other)[0] for other in others]
