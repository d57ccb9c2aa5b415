"""Label counts and divergence equal independent reference implementations."""

from __future__ import annotations

import math
import time

import numpy as np
import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset
from labeled_rows import rows
from scipy.spatial.distance import jensenshannon

from hf_federated.data import (
    FederatedDataset,
    IidPartitioner,
    LabelCounts,
    jensen_shannon_divergence,
    label_counts,
    mean_divergence,
)
from hf_federated.data.statistics import label_statistics as label_module


def count_labels(clients: FederatedDataset, names: list, column: str = "label") -> list[list[int]]:
    return [[clients[client_id][column][:].count(name) for name in names] for client_id in clients]


def test_label_counts_of_a_partition_equal_a_simple_count():
    clients = FederatedDataset.from_column(rows(), "owner")
    counts = label_counts(clients)
    assert counts.client_ids == clients.client_ids
    assert counts.label_names == ["cars", "space", "sport"]
    assert counts.counts.dtype == np.int64
    assert counts.counts.tolist() == count_labels(clients, counts.label_names)
    assert counts.sizes.tolist() == list(clients.num_rows.values())
    np.testing.assert_allclose(counts.shares.sum(axis=1), 1)


def test_label_counts_of_a_partition_do_not_create_client_datasets(monkeypatch):
    clients = FederatedDataset.from_column(rows(), "owner")
    monkeypatch.setattr(FederatedDataset, "__getitem__", lambda *_: pytest.fail("a client was opened"))
    assert label_counts(clients).counts.sum() == 60


def test_labels_of_separate_datasets_share_label_names():
    dataset = rows()
    # "b" has no label "cars". If its labels were numbered separately, the numbers would be shifted.
    parts = {"a": dataset, "b": dataset.filter(lambda row: row["label"] != "cars"), "c": dataset.shuffle(seed=1)}
    clients = FederatedDataset.from_dict(parts)
    counts = label_counts(clients)
    assert counts.counts.tolist() == count_labels(clients, ["cars", "space", "sport"])


def test_separate_datasets_keep_the_names_of_a_class_label():
    dataset = rows().cast_column("label", ClassLabel(names=["sport", "unused", "space", "cars"]))
    clients = FederatedDataset.from_dict({"a": dataset.select(range(9, 0, -2)), "b": dataset})
    counts = label_counts(clients)
    assert counts.label_names == ["sport", "unused", "space", "cars"]
    assert counts.counts.tolist() == count_labels(clients, [0, 1, 2, 3])


def test_label_counts_respect_shuffle_and_select_clients():
    clients = FederatedDataset.from_column(rows().shuffle(seed=3), "owner").select_clients(["client 3", "client 0"])
    counts = label_counts(clients)
    assert counts.client_ids == ["client 3", "client 0"]
    assert counts.counts.tolist() == count_labels(clients, ["cars", "space", "sport"])


def test_rows_without_client_may_have_no_label():
    dataset = Dataset.from_dict({"owner": ["a", "a", "b"], "label": [0, 1, None]})
    counts = label_counts(FederatedDataset.from_column(dataset, "owner", min_rows=2))
    assert counts.counts.tolist() == [[1, 1]]
    with pytest.raises(ValueError, match="label"):
        label_counts(FederatedDataset.from_column(dataset, "owner"))


def test_partition_keeps_class_label_names_that_no_client_has():
    dataset = rows().cast_column("label", ClassLabel(names=["sport", "unused", "space", "cars"]))
    counts = label_counts(FederatedDataset.from_column(dataset, "owner"))
    assert counts.label_names == ["sport", "unused", "space", "cars"]
    assert counts.counts[:, 1].tolist() == [0, 0, 0, 0]
    assert counts.counts.sum() == 60


def test_counts_of_wrong_shape_raise_error():
    message = r"counts has shape \(2, 2\), but 2 clients and 3 labels need shape \(2, 3\)"
    with pytest.raises(ValueError, match=message):
        LabelCounts(["a", "b"], ["x", "y", "z"], np.zeros((2, 2), dtype=np.int64))


def test_divergence_is_the_square_of_the_scipy_distance_in_bits():
    shares = np.random.default_rng(0).dirichlet(np.full(6, 0.3), 9)
    expected = [[jensenshannon(p, q, base=2) ** 2 for q in shares] for p in shares]
    np.testing.assert_allclose(jensen_shannon_divergence(shares), expected, atol=1e-12)


def test_documented_conversion_to_the_fednlp_distance_is_correct():
    p, q = np.array([0.9, 0.1]), np.array([0.2, 0.8])
    divergence = jensen_shannon_divergence(np.stack([p, q]))[0, 1]
    assert jensenshannon(p, q) == pytest.approx(math.sqrt(divergence * math.log(2)))


def test_divergence_is_symmetric_with_zero_diagonal_and_at_most_one():
    shares = np.random.default_rng(0).dirichlet(np.full(5, 0.05), 30)
    divergence = jensen_shannon_divergence(shares)
    assert np.array_equal(divergence, divergence.T)
    assert np.array_equal(np.diag(divergence), np.zeros(30))
    assert divergence.min() >= 0 and divergence.max() <= 1


def test_divergence_is_one_for_disjoint_labels_and_zero_for_equal_shares():
    divergence = jensen_shannon_divergence(np.array([[0.5, 0.5, 0], [0, 0, 1], [0.5, 0.5, 0]]))
    np.testing.assert_allclose(divergence, [[0, 1, 0], [1, 0, 1], [0, 1, 0]], atol=1e-15)


def test_permuting_clients_permutes_the_divergence():
    shares = np.random.default_rng(0).dirichlet(np.ones(4), 12)
    order = np.random.default_rng(1).permutation(12)
    divergence = jensen_shannon_divergence(shares)
    np.testing.assert_allclose(jensen_shannon_divergence(shares[order]), divergence[np.ix_(order, order)], atol=1e-15)


def test_block_size_does_not_change_the_divergence(monkeypatch):
    shares = np.random.default_rng(0).dirichlet(np.ones(7), 23)
    whole = jensen_shannon_divergence(shares)
    monkeypatch.setattr(label_module, "BLOCK_SIZE", 4 * 7)
    np.testing.assert_allclose(jensen_shannon_divergence(shares), whole, atol=1e-15)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([[3, 1], [0, 4]], "the shares of client 0 sum to 4, not to 1. Pass shares"),
        ([[0.5, 0.5], [0.0, 0.0]], "the shares of client 1 sum to 0"),
        ([[1.5, -0.5], [0.5, 0.5]], "negative or infinite"),
        ([[math.nan, 1.0]], "negative or infinite"),
        ([0.5, 0.5], r"got shape \(2,\)"),
    ],
)
def test_invalid_distributions_raise_error(shares, message):
    with pytest.raises(ValueError, match=message):
        jensen_shannon_divergence(np.array(shares))


def test_mean_divergence_ignores_the_diagonal():
    divergence = jensen_shannon_divergence(np.random.default_rng(0).dirichlet(np.ones(3), 6))
    pairs = [divergence[i, j] for i in range(6) for j in range(i)]
    assert mean_divergence(divergence) == pytest.approx(sum(pairs) / len(pairs))
    overlap = np.ones((3, 3)) * 0.5 + np.eye(3) * 0.5
    assert mean_divergence(overlap) == pytest.approx(0.5)  # the diagonal of ones is not included
    with pytest.raises(ValueError, match="at least two clients"):
        mean_divergence(divergence[:1, :1])


@pytest.mark.slow
def test_separate_views_of_a_million_rows_are_counted_without_concatenating_tables():
    labels = np.random.default_rng(0).integers(0, 20, 1_000_000)
    source = FederatedDataset.from_dataset(
        Dataset(pa.table({"label": labels}), fingerprint="million"), IidPartitioner(1000)
    )
    separate = FederatedDataset.from_dict(dict(source))
    begin = time.perf_counter()
    assert np.array_equal(label_counts(separate).counts, label_counts(source).counts)
    assert time.perf_counter() - begin < 10  # concatenating a thousand views of the table takes more than 30 seconds
