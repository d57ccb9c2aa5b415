"""The view of the rows of a client is the dataset that `Dataset.select` returns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset

from hf_federated._compat import dataset_fingerprint
from hf_federated.data.row_selection import select_rows


def source(kind: str) -> Dataset:
    """Ten rows, as a table in memory, as selected rows, and with a format."""
    dataset = Dataset.from_dict({"x": [[i, i + 0.5] for i in range(20)], "label": [i % 2 for i in range(20)]})
    dataset = dataset.cast_column("label", ClassLabel(names=["no", "yes"]))
    if kind == "shuffled":
        return dataset.shuffle(seed=0).select(range(3, 13))
    dataset = dataset.select(range(10))
    return dataset.with_format("torch", columns=["x"]) if kind == "formatted" else dataset


@pytest.mark.parametrize("kind", ["table", "shuffled", "formatted"])
@pytest.mark.parametrize(
    "rows", [[2, 3, 4], [4, 3, 2], [0], [9], [1, 1, 2], [5, 0, 9], [0, 3, 1, 3], list(range(10)), []], ids=repr
)
@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_rows_features_and_format_are_those_of_select(kind, rows, dtype):
    dataset, indices = source(kind), np.array(rows, dtype=np.int64)
    view, expected = select_rows(dataset, indices.astype(dtype)), dataset.select(rows)
    assert len(view) == len(expected) and view.features == expected.features and view.format == expected.format
    assert view.with_format(None).to_list() == expected.with_format(None).to_list()
    for number in range(len(expected)):
        assert str(view[number]) == str(expected[number])
    assert view.select(range(len(rows) // 2)).with_format(None)[:] == expected.with_format(None)[: len(rows) // 2]
    assert view.shuffle(seed=1).with_format(None)[:] == expected.shuffle(seed=1).with_format(None)[:]


def test_equal_views_have_one_fingerprint_and_other_views_another():
    dataset = source("table")
    first, again, other = (select_rows(dataset, np.array(rows)) for rows in ([1, 5], [1, 5], [1, 6]))
    assert dataset_fingerprint(first) == dataset_fingerprint(again) != dataset_fingerprint(other)
    assert dataset_fingerprint(first) != dataset_fingerprint(dataset)


def test_change_of_a_view_does_not_change_its_source():
    dataset = source("table")
    view = select_rows(dataset, np.array([1, 5, 2]))
    view.info.description = "changed"
    view.set_format("torch")
    view.features["label"].names.append("maybe")
    view.info.features["x"].length = 7
    assert dataset.info.description == "" and dataset.features == source("table").features
    assert dataset.format["type"] is None and isinstance(dataset[0]["x"], list)
    assert isinstance(view.remove_columns("label")[0]["x"], torch.Tensor) and dataset.column_names == ["x", "label"]


def test_row_number_out_of_range_raises():
    with pytest.raises(IndexError, match="out of range"):
        select_rows(source("table"), np.array([3, 10]))
