"""`describe_partition` combines the statistics, for JSON and in Markdown tables."""

from __future__ import annotations

import json
import math
import re
import time

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset
from labeled_rows import rows

from hf_federated.data import (
    FederatedDataset,
    IidPartitioner,
    LabelCounts,
    PartitionStatistics,
    describe_partition,
    estimate_alpha,
    jensen_shannon_divergence,
    label_counts,
    mean_divergence,
    vocabulary_overlap,
)


def test_describe_partition_returns_the_individual_statistics():
    dataset = rows().add_column("text", [f"word{number % 7} common" for number in range(60)])
    clients = FederatedDataset.from_column(dataset, "owner")
    statistics = describe_partition(clients, "label", "text")
    counts = label_counts(clients)
    assert statistics.sizes.tolist() == counts.sizes.tolist()
    assert (statistics.num_clients, statistics.num_rows) == (4, 60)
    assert statistics.labels.counts.tolist() == counts.counts.tolist()
    assert statistics.mean_divergence == mean_divergence(jensen_shannon_divergence(counts.shares))
    assert statistics.alpha == estimate_alpha(counts.counts)
    assert statistics.mean_vocabulary_overlap == mean_divergence(vocabulary_overlap(clients))


def test_statistics_of_unspecified_columns_are_left_out():
    statistics = describe_partition(FederatedDataset.from_column(rows(), "owner"))
    assert statistics.labels is None
    assert set(statistics.to_dict()) == {"num_clients", "num_rows", "rows_per_client", "sizes"}
    assert "label" not in statistics.to_markdown() and "client 3" in statistics.to_markdown()


def test_error_for_missing_column_lists_the_columns():
    clients = FederatedDataset.from_column(rows(), "owner", keep_column=True)
    for function in (label_counts, describe_partition, vocabulary_overlap):
        with pytest.raises(ValueError, match="There is no column 'sentiment'. The columns are: owner, label"):
            function(clients, "sentiment")


def test_error_names_a_client_with_an_iterable_dataset():
    clients = FederatedDataset.from_dict({"a": rows(), "stream": rows().to_iterable_dataset()})
    for function in (label_counts, describe_partition, vocabulary_overlap):
        with pytest.raises(TypeError, match="Client 'stream' is an IterableDataset.*select_clients"):
            function(clients, "label")


def test_gini_is_half_the_mean_absolute_difference_over_the_mean():
    sizes = np.array([3, 10, 1, 6, 6])
    expected = np.abs(sizes[:, None] - sizes[None, :]).mean() / (2 * sizes.mean())
    statistics = PartitionStatistics(["a", "b", "c", "d", "e"], sizes)
    assert statistics.gini == pytest.approx(expected)


@pytest.mark.parametrize("num_clients", [1, 5, 500])
def test_to_dict_can_be_stored_as_json(num_clients):
    clients = FederatedDataset.from_dataset(rows(1000), IidPartitioner(num_clients))
    statistics = describe_partition(clients, "label")
    values = json.loads(json.dumps(statistics.to_dict(), allow_nan=False))
    assert values["sizes"] == clients.num_rows
    assert values["label_names"] == ["cars", "space", "sport"]
    assert values["label_counts"]["0"] == statistics.labels.counts[0].tolist()
    if num_clients == 1:
        assert not {"alpha", "mean_divergence"} & set(values)
    else:
        assert float(values["alpha"]) == statistics.alpha


def test_infinite_alpha_becomes_a_string_that_float_parses():
    values = PartitionStatistics(["a"], np.array([3]), alpha=math.inf).to_dict()
    assert values["alpha"] == "inf" and float(values["alpha"]) == math.inf
    assert PartitionStatistics(["a"], np.array([3]), alpha=2.5).to_dict()["alpha"] == 2.5


@pytest.mark.parametrize("num_labels", [1, 2, 50])
@pytest.mark.parametrize("num_clients", [1, 5, 20, 21, 500])
def test_markdown_tables_are_short_and_aligned_and_list_the_extremes(num_clients, num_labels):
    sizes = np.random.default_rng(0).permutation(num_clients) + 2
    counts = np.random.default_rng(0).multinomial(1, np.full(num_labels, 1 / num_labels), num_clients) * sizes[:, None]
    ids = [f"client {number} with | and a name that is too long" for number in range(num_clients)]
    labels = LabelCounts(ids, [f"label {number} of a long name, too long" for number in range(num_labels)], counts)
    text = PartitionStatistics(ids, sizes, labels, 0.5, math.inf).to_markdown()
    for table in text.split("\n\n"):
        assert len({len(line) for line in table.split("\n")}) == 1  # aligned
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.split("\n")}) == 1  # same number of cells
    lines = text.split("\n\n")[1].split("\n")[2:]
    assert max(len(line) for line in lines) <= 165
    assert len(lines) == (num_clients if num_clients <= 20 else 11)
    if num_clients > 20:
        assert f"client {sizes.argmax()} " in lines[0] and f"client {sizes.argmin()} " in lines[-1]
        assert f"… {num_clients - 10} more" in lines[5]
    assert "inf" in text


def test_max_clients_limits_the_compared_clients_and_appears_in_the_table():
    clients = FederatedDataset.from_dataset(rows(600), IidPartitioner(60))
    statistics = describe_partition(clients, "label", max_clients=20)
    compared = np.sort(np.random.default_rng(0).choice(60, 20, replace=False))
    counts = label_counts(clients)
    assert statistics.mean_divergence == mean_divergence(jensen_shannon_divergence(counts.shares[compared]))
    assert statistics.alpha == estimate_alpha(counts.counts)
    assert "of 20 clients" in statistics.to_markdown()
    assert describe_partition(clients, "label", max_clients=60).num_compared_clients is None
    with pytest.raises(ValueError, match="max_clients must be an integer of at least 2"):
        describe_partition(clients, max_clients=1)


@pytest.mark.slow
def test_describing_a_million_rows_over_a_thousand_clients_takes_two_seconds():
    labels = np.random.default_rng(0).integers(0, 20, 1_000_000)
    clients = FederatedDataset.from_dataset(
        Dataset(pa.table({"label": labels}), fingerprint="million"), IidPartitioner(1000)
    )
    begin = time.perf_counter()
    assert describe_partition(clients, "label").num_rows == 1_000_000
    assert time.perf_counter() - begin < 2
