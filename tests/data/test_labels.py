"""`read_labels` encodes labels of every type and reduces a row of tags to one label."""

from __future__ import annotations

import datetime
import time
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset, Features, LargeList, List, Value, concatenate_datasets

from hf_federated.data.labels import read_labels, read_labels_of_splits


TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "S-ORG"]


def labels_of(dataset: Dataset, column: str = "label") -> list[str]:
    codes, names = read_labels(dataset, column)
    assert codes.dtype == np.int64
    return [names[code] for code in codes]


def of_feature(values: list, feature: object) -> Dataset:
    return Dataset.from_dict({"label": values}, features=Features({"label": feature}))


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["b", "a", "b"], ["a", "b"]),
        ([10, 9, 10], ["9", "10"]),  # sorted by value, not as strings
        ([True, False, True], ["False", "True"]),
        (
            [datetime.date(2024, 2, 1), datetime.date(2023, 12, 9), datetime.date(2024, 2, 1)],
            ["2023-12-09", "2024-02-01"],
        ),
    ],
)
def test_occurring_values_are_sorted_by_value(values, names):
    dataset = Dataset.from_dict({"label": values})
    assert read_labels(dataset, "label")[1] == names
    assert labels_of(dataset) == [str(value) for value in values]


@pytest.mark.parametrize("dtype", ["int8", "int64", "large_string"])
def test_labels_do_not_depend_on_the_width_of_the_type(dtype):
    values = ["2", "1", "2"] if "string" in dtype else [2, 1, 2]
    assert labels_of(of_feature(values, Value(dtype))) == ["2", "1", "2"]


def test_class_label_names_keep_their_order_even_if_unused():
    codes, names = read_labels(of_feature([2, 0, 2], ClassLabel(names=["z", "y", "a"])), "label")
    assert (codes.tolist(), names) == ([2, 0, 2], ["z", "y", "a"])


# `read_column` copies the values of the small selection before it reads them, but not of the large selection.
@pytest.mark.parametrize("num_selected", [3, 12])
@pytest.mark.parametrize(
    "label", [["c", "a", None, "a", "b"], [2, 0, None, 0, 1], [["c"], ["a"], None, ["a"], ["b"]]], ids=str
)
def test_only_selected_rows_are_read(label, num_selected):
    dataset = Dataset.from_dict({"label": label * 4})
    rows = [3, 0, 13, 1, 3, 10, 18, 16, 6, 8, 5, 0][:num_selected]
    selected = [dataset[row]["label"] for row in rows]
    expected = [value[0] if isinstance(value, list) else str(value) for value in selected]
    assert labels_of(dataset.select(rows)) == expected
    assert read_labels(dataset.select(rows), "label")[1] == sorted(set(expected))


def test_chunks_of_a_table_share_label_numbers():
    pieces = [of_feature(["b", "a"], Value("string")), of_feature(["c", "a"], Value("string"))]
    assert labels_of(concatenate_datasets(pieces)) == ["b", "a", "c", "a"]
    pieces = [of_feature([["b", "a", "a"], []], List(Value("string"))), of_feature([["c"]], List(Value("string")))]
    assert labels_of(concatenate_datasets(pieces)) == ["a", "O", "c"]


def test_empty_dataset_has_no_labels():
    for feature in (Value("string"), ClassLabel(names=["a"]), List(Value("string"))):
        assert labels_of(of_feature([], feature)) == []


@pytest.mark.parametrize("sequence", [List, LargeList])
@pytest.mark.parametrize("as_class", [True, False])
def test_label_of_a_tag_sequence_is_its_most_frequent_entity_type(as_class, sequence):
    rows = [
        ["O", "O", "O", "B-LOC", "I-LOC", "B-PER"],  # LOC has two tokens
        ["B-PER", "B-LOC", "O"],  # tie: the first type
        ["B-LOC", "B-PER", "I-LOC", "I-PER"],
        ["O", "O"],
        [],
        ["S-ORG"],
    ]
    values = [[TAGS.index(tag) for tag in row] for row in rows] if as_class else rows
    dataset = of_feature(values, sequence(ClassLabel(names=TAGS) if as_class else Value("string")))
    assert labels_of(dataset) == ["LOC", "PER", "LOC", "O", "O", "ORG"]
    assert read_labels(dataset, "label")[1] == (["O", "PER", "LOC", "ORG"] if as_class else ["LOC", "O", "ORG", "PER"])


def test_tag_sequences_of_fixed_length_are_read():
    values = [["B-LOC", "B-PER", "I-PER"], ["O", "B-LOC", "O"]]
    assert labels_of(of_feature(values, List(Value("string"), length=3))) == ["PER", "LOC"]


def test_label_names_of_tags_are_occurring_types_or_all_class_label_types():
    rows = [["B-LOC", "I-LOC", "B-PER"]]
    assert read_labels(Dataset.from_dict({"label": rows}), "label")[1] == ["LOC"]
    numbers = of_feature([[3, 4, 1]], List(ClassLabel(names=TAGS)))
    assert read_labels(numbers, "label")[1] == ["O", "PER", "LOC", "ORG"]


def test_integer_tags_are_counted_and_ignored_positions_are_skipped():
    dataset = Dataset.from_dict({"label": [[-100, 7, 10, 10, -100, -100], [-100], [0, 0, 7]]})
    assert read_labels(dataset, "label")[1] == ["0", "10", "O"]
    assert labels_of(dataset) == ["10", "O", "0"]
    assert labels_of(of_feature([[-100, -100, 1], [-100]], List(ClassLabel(names=["N", "V"])))) == ["V", "O"]


def test_tag_labels_match_a_reference_implementation_on_random_rows(monkeypatch):
    monkeypatch.setattr("hf_federated.data.labels._MOST_COUNTS", 64)  # forces several count tables
    generator = np.random.default_rng(0)
    rows = [generator.choice(TAGS, generator.integers(0, 9)).tolist() for _ in range(500)]

    def reference(row: list[str]) -> str:
        types = [tag.partition("-")[2] for tag in row if tag != "O"]
        return Counter(types).most_common(1)[0][0] if types else "O"  # ties: the first type in the row

    assert labels_of(Dataset.from_dict({"label": rows})) == [reference(row) for row in rows]


@pytest.mark.parametrize(
    ("values", "feature"),
    [
        (["a", None], Value("string")),
        ([1, None], Value("int64")),
        ([0, None], ClassLabel(names=["a"])),
        ([0, -1], ClassLabel(names=["a"])),  # test splits on the Hub mark unlabeled rows with -1
        ([["a"], None], List(Value("string"))),
    ],
)
def test_missing_label_error_names_the_row(values, feature):
    with pytest.raises(ValueError, match="Row 1 has no label in the column 'label'.*dataset.filter"):
        read_labels(of_feature(values, feature), "label")


@pytest.mark.parametrize("feature", [Value("string"), Value("int64"), ClassLabel(names=["1"])])
def test_missing_tag_error_names_the_row(feature):
    values = (
        [[0], [], [0, None]] if not isinstance(feature, Value) or feature.dtype == "int64" else [["0"], [], [None]]
    )
    with pytest.raises(ValueError, match="Row 2 has a tag without a value"):
        read_labels(of_feature(values, List(feature)), "label")


def test_label_number_without_a_name_raises_value_error():
    table = pa.table({"label": [0, 2]})
    dataset = Dataset(table).cast(Features({"label": Value("int64")}))
    dataset.info.features = Features({"label": ClassLabel(names=["a", "b"])})
    with pytest.raises(ValueError, match=r"Row 1 has the label 2, but the column 'label' names 2 classes \(0 to 1\)"):
        read_labels(dataset, "label")


@pytest.mark.parametrize("values", [[0.5, 1.0], [[0.5], []], [{"a": 1}], [[["a"]]]])
def test_column_type_that_cannot_name_classes_raises_type_error(values):
    with pytest.raises(TypeError, match="'label' has the type .* whose values are no class labels"):
        read_labels(Dataset.from_dict({"label": values}), "label")


def test_missing_column_error_lists_existing_columns():
    with pytest.raises(ValueError, match="There is no column 'lable'. The columns are: label."):
        read_labels(Dataset.from_dict({"label": [1]}), "lable")


@pytest.mark.slow
def test_a_million_tag_sequences_are_read_in_three_seconds():
    generator = np.random.default_rng(0)
    tags = pa.array(TAGS).take(pa.array(generator.integers(0, len(TAGS), 10_000_000)))
    rows = pa.ListArray.from_arrays(pa.array(np.arange(0, 10_000_001, 10, dtype=np.int32)), tags)
    dataset = Dataset(pa.table({"label": rows}), fingerprint="tags")
    begin = time.perf_counter()
    read_labels(dataset, "label")
    assert time.perf_counter() - begin < 3


def test_label_names_and_numbers_in_different_splits_raise_value_error():
    names = Dataset.from_dict({"label": [0, 1]}).cast_column("label", ClassLabel(names=["n", "p"]))
    numbers = Dataset.from_dict({"label": [0, 1]})
    with pytest.raises(ValueError, match="label names in the split 'train' and numbers in 'test'"):
        read_labels_of_splits({"train": names, "test": numbers}, "label")
    words = Dataset.from_dict({"label": ["p", "n"]})
    codes, _ = read_labels_of_splits({"train": names, "test": words}, "label")
    assert codes["test"].tolist() == [1, 0]
