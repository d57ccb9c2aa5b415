"""`read_labels` numbers labels of every type, and one rule says which label a row of tags has."""

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
        ([10, 9, 10], ["9", "10"]),  # by value, not as strings
        ([True, False, True], ["False", "True"]),
        (
            [datetime.date(2024, 2, 1), datetime.date(2023, 12, 9), datetime.date(2024, 2, 1)],
            ["2023-12-09", "2024-02-01"],
        ),
    ],
)
def test_values_that_occur_are_sorted(values, names):
    dataset = Dataset.from_dict({"label": values})
    assert read_labels(dataset, "label")[1] == names
    assert labels_of(dataset) == [str(value) for value in values]


@pytest.mark.parametrize("dtype", ["int8", "int64", "large_string"])
def test_width_of_a_type_does_not_matter(dtype):
    values = ["2", "1", "2"] if "string" in dtype else [2, 1, 2]
    assert labels_of(of_feature(values, Value(dtype))) == ["2", "1", "2"]


def test_names_of_a_class_label_keep_their_order_and_stay_if_they_do_not_occur():
    codes, names = read_labels(of_feature([2, 0, 2], ClassLabel(names=["z", "y", "a"])), "label")
    assert (codes.tolist(), names) == ([2, 0, 2], ["z", "y", "a"])


@pytest.mark.parametrize("num_selected", [3, 12])  # of 20: few are gathered before they are read, many after
@pytest.mark.parametrize(
    "label", [["c", "a", None, "a", "b"], [2, 0, None, 0, 1], [["c"], ["a"], None, ["a"], ["b"]]], ids=str
)
def test_rows_are_those_selected_and_the_others_do_not_count(label, num_selected):
    dataset = Dataset.from_dict({"label": label * 4})
    rows = [3, 0, 13, 1, 3, 10, 18, 16, 6, 8, 5, 0][:num_selected]
    selected = [dataset[row]["label"] for row in rows]
    expected = [value[0] if isinstance(value, list) else str(value) for value in selected]
    assert labels_of(dataset.select(rows)) == expected
    assert read_labels(dataset.select(rows), "label")[1] == sorted(set(expected))


def test_pieces_of_a_table_agree_on_numbers():
    pieces = [of_feature(["b", "a"], Value("string")), of_feature(["c", "a"], Value("string"))]
    assert labels_of(concatenate_datasets(pieces)) == ["b", "a", "c", "a"]
    pieces = [of_feature([["b", "a", "a"], []], List(Value("string"))), of_feature([["c"]], List(Value("string")))]
    assert labels_of(concatenate_datasets(pieces)) == ["a", "O", "c"]


def test_no_rows_have_no_labels():
    for feature in (Value("string"), ClassLabel(names=["a"]), List(Value("string"))):
        assert labels_of(of_feature([], feature)) == []


@pytest.mark.parametrize("sequence", [List, LargeList])
@pytest.mark.parametrize("as_class", [True, False])
def test_label_of_a_row_of_tags_is_its_most_frequent_entity_type(as_class, sequence):
    rows = [
        ["O", "O", "O", "B-LOC", "I-LOC", "B-PER"],  # two tokens of LOC
        ["B-PER", "B-LOC", "O"],  # equal: the first
        ["B-LOC", "B-PER", "I-LOC", "I-PER"],
        ["O", "O"],
        [],
        ["S-ORG"],
    ]
    values = [[TAGS.index(tag) for tag in row] for row in rows] if as_class else rows
    dataset = of_feature(values, sequence(ClassLabel(names=TAGS) if as_class else Value("string")))
    assert labels_of(dataset) == ["LOC", "PER", "LOC", "O", "O", "ORG"]
    assert read_labels(dataset, "label")[1] == (["O", "PER", "LOC", "ORG"] if as_class else ["LOC", "O", "ORG", "PER"])


def test_tags_of_a_fixed_number_are_read():
    values = [["B-LOC", "B-PER", "I-PER"], ["O", "B-LOC", "O"]]
    assert labels_of(of_feature(values, List(Value("string"), length=3))) == ["PER", "LOC"]


def test_only_labels_that_a_row_has_are_listed_unless_they_are_those_of_a_class_label():
    rows = [["B-LOC", "I-LOC", "B-PER"]]
    assert read_labels(Dataset.from_dict({"label": rows}), "label")[1] == ["LOC"]
    numbers = of_feature([[3, 4, 1]], List(ClassLabel(names=TAGS)))
    assert read_labels(numbers, "label")[1] == ["O", "PER", "LOC", "ORG"]


def test_tags_without_names_are_counted_as_they_are_and_ignored_positions_are_not():
    dataset = Dataset.from_dict({"label": [[-100, 7, 10, 10, -100, -100], [-100], [0, 0, 7]]})
    assert read_labels(dataset, "label")[1] == ["0", "10", "O"]
    assert labels_of(dataset) == ["10", "O", "0"]
    assert labels_of(of_feature([[-100, -100, 1], [-100]], List(ClassLabel(names=["N", "V"])))) == ["V", "O"]


def test_rule_for_tags_holds_on_random_rows(monkeypatch):
    monkeypatch.setattr("hf_federated.data.labels._MOST_COUNTS", 64)  # several tables
    generator = np.random.default_rng(0)
    rows = [generator.choice(TAGS, generator.integers(0, 9)).tolist() for _ in range(500)]

    def rule(row: list[str]) -> str:
        types = [tag.partition("-")[2] for tag in row if tag != "O"]
        return Counter(types).most_common(1)[0][0] if types else "O"  # of equals, the first that was met

    assert labels_of(Dataset.from_dict({"label": rows})) == [rule(row) for row in rows]


@pytest.mark.parametrize(
    ("values", "feature"),
    [
        (["a", None], Value("string")),
        ([1, None], Value("int64")),
        ([0, None], ClassLabel(names=["a"])),
        ([0, -1], ClassLabel(names=["a"])),  # how test splits on the Hub mark unlabelled rows
        ([["a"], None], List(Value("string"))),
    ],
)
def test_row_without_label_is_named(values, feature):
    with pytest.raises(ValueError, match="Row 1 has no label in the column 'label'.*dataset.filter"):
        read_labels(of_feature(values, feature), "label")


@pytest.mark.parametrize("feature", [Value("string"), Value("int64"), ClassLabel(names=["1"])])
def test_row_with_an_empty_tag_is_named(feature):
    values = (
        [[0], [], [0, None]] if not isinstance(feature, Value) or feature.dtype == "int64" else [["0"], [], [None]]
    )
    with pytest.raises(ValueError, match="Row 2 has a tag without a value"):
        read_labels(of_feature(values, List(feature)), "label")


def test_label_beyond_the_names_is_refused():
    table = pa.table({"label": [0, 2]})
    dataset = Dataset(table).cast(Features({"label": Value("int64")}))
    dataset.info.features = Features({"label": ClassLabel(names=["a", "b"])})
    with pytest.raises(ValueError, match=r"Row 1 has the label 2, but the column 'label' names 2 classes \(0 to 1\)"):
        read_labels(dataset, "label")


@pytest.mark.parametrize("values", [[0.5, 1.0], [[0.5], []], [{"a": 1}], [[["a"]]]])
def test_types_that_name_no_classes_are_refused(values):
    with pytest.raises(TypeError, match="'label' has the type .* whose values are no class labels"):
        read_labels(Dataset.from_dict({"label": values}), "label")


def test_missing_column_is_named_with_those_there_are():
    with pytest.raises(ValueError, match="There is no column 'lable'. The columns are: label."):
        read_labels(Dataset.from_dict({"label": [1]}), "lable")


@pytest.mark.slow
def test_a_million_rows_of_tags_take_seconds():
    generator = np.random.default_rng(0)
    tags = pa.array(TAGS).take(pa.array(generator.integers(0, len(TAGS), 10_000_000)))
    rows = pa.ListArray.from_arrays(pa.array(np.arange(0, 10_000_001, 10, dtype=np.int32)), tags)
    dataset = Dataset(pa.table({"label": rows}), fingerprint="tags")
    begin = time.perf_counter()
    read_labels(dataset, "label")
    assert time.perf_counter() - begin < 3


def test_names_and_numbers_of_labels_are_not_matched():
    names = Dataset.from_dict({"label": [0, 1]}).cast_column("label", ClassLabel(names=["n", "p"]))
    numbers = Dataset.from_dict({"label": [0, 1]})
    with pytest.raises(ValueError, match="names in the split 'train' and numbers in 'test'"):
        read_labels_of_splits({"train": names, "test": numbers}, "label")
    words = Dataset.from_dict({"label": ["p", "n"]})
    codes, _ = read_labels_of_splits({"train": names, "test": words}, "label")
    assert codes["test"].tolist() == [1, 0]
