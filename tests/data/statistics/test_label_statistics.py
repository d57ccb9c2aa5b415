"""Label counts, divergence and effective α equal independent reference implementations."""

from __future__ import annotations

import math
import time

import numpy as np
import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset
from labeled_rows import rows
from scipy.optimize import minimize_scalar
from scipy.spatial.distance import jensenshannon
from scipy.special import gammaln

from hf_federated.data import (
    FederatedDataset,
    IidPartitioner,
    LabelCounts,
    estimate_alpha,
    jensen_shannon_divergence,
    label_counts,
    mean_divergence,
)
from hf_federated.data.statistics import label_statistics as label_module


def count_labels(clients: FederatedDataset, names: list, column: str = "label") -> list[list[int]]:
    return [[clients[client_id][column][:].count(name) for name in names] for client_id in clients]


def draw_counts(alpha: float, num_clients: int, size: int, prior: np.ndarray, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.multinomial(size, q) for q in rng.dirichlet(alpha * prior, num_clients)])


def log_likelihood(alpha: float, counts: np.ndarray, prior: np.ndarray) -> float:
    """Log-likelihood of the Dirichlet-multinomial distribution, without the terms that do not depend on alpha."""
    sizes = counts.sum(axis=1)
    client_terms = gammaln(alpha) - gammaln(alpha + sizes)
    return float(client_terms.sum() + (gammaln(alpha * prior + counts) - gammaln(alpha * prior)).sum())


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


@pytest.mark.parametrize("alpha", [0.05, 1.0, 20.0, 400.0])
def test_estimated_alpha_maximizes_the_likelihood_computed_with_scipy(alpha):
    prior = np.array([0.5, 0.2, 0.2, 0.1])
    counts = draw_counts(alpha, num_clients=80, size=60, prior=prior)
    for assumed in (prior, None):
        mean = counts.sum(axis=0) / counts.sum() if assumed is None else assumed
        maximum = minimize_scalar(
            lambda log_alpha, mean=mean: -log_likelihood(math.exp(log_alpha), counts, mean),
            bounds=(-8, 12),
            method="bounded",
            options={"xatol": 1e-10},
        )
        assert math.log(estimate_alpha(counts, assumed)) == pytest.approx(maximum.x, abs=1e-4)


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0, 100.0])
def test_estimated_alpha_is_within_ten_percent_of_the_true_alpha(alpha):
    counts = draw_counts(alpha, num_clients=1000, size=200, prior=np.full(10, 0.1))
    assert estimate_alpha(counts) == pytest.approx(alpha, rel=0.1)


def test_small_clients_do_not_lower_the_estimated_alpha():
    # With 5 rows per client, the label shares are far from the distributions that the labels are drawn from.
    counts = draw_counts(2.0, num_clients=4000, size=5, prior=np.full(4, 0.25))
    assert estimate_alpha(counts) == pytest.approx(2.0, rel=0.1)


def test_random_assignment_gives_large_or_infinite_alpha():
    rng = np.random.default_rng(0)
    prior = np.full(5, 0.2)
    estimates = [estimate_alpha(rng.multinomial(100, prior, size=50), prior) for _ in range(40)]
    assert min(estimates) > 300
    # The likelihood has a finite maximum for about half of these draws.
    assert 8 <= sum(map(math.isinf, estimates)) <= 32
    assert estimate_alpha(np.full((6, 3), 40)) == math.inf  # clients are more similar than by chance


def test_alpha_is_infinite_only_if_the_likelihood_has_no_maximum():
    rng = np.random.default_rng(1)
    prior = np.full(3, 1 / 3)
    for _ in range(30):
        counts = rng.multinomial(40, prior, size=8)
        increases = log_likelihood(1e6, counts, prior) > log_likelihood(1e5, counts, prior)
        estimate = estimate_alpha(counts, prior)
        assert math.isinf(estimate) == increases or 1e5 < estimate < 1e7


def test_alpha_is_zero_if_every_client_has_one_label():
    assert estimate_alpha(np.diag([5, 9, 3])) == 0.0


def test_order_of_clients_and_labels_and_absent_labels_do_not_change_alpha():
    counts = draw_counts(1.0, num_clients=30, size=40, prior=np.array([0.6, 0.3, 0.1]))
    expected = estimate_alpha(counts)
    padded = np.concatenate([counts[::-1, ::-1], np.zeros((30, 2), dtype=np.int64)], axis=1)
    assert estimate_alpha(padded) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(
    ("counts", "prior", "message"),
    [
        ([[3, 1]], None, "at least two clients"),
        ([[3, 0], [2, 0]], None, "at least two labels"),
        ([[1, 0], [0, 1]], None, "no client has two rows"),
        ([[3, 1], [0, -2]], None, "integer counts of at least 0"),
        ([[0.5, 0.5], [0.1, 0.9]], None, "Pass LabelCounts.counts, not shares"),
        ([[3, 1], [0, 2]], [1.0, 0.0], "the prior of label 1 is 0, but 3 rows have this label"),
        ([[3, 1], [0, 2]], [1.0, 1.0], "sum to 1, got 2 numbers that sum to 2"),
        ([[3, 1], [0, 2]], [0.2, 0.3, 0.5], "must be 2 shares"),
    ],
)
def test_invalid_counts_or_prior_raise_error(counts, prior, message):
    with pytest.raises(ValueError, match=message):
        estimate_alpha(np.array(counts), None if prior is None else np.array(prior))


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
