"""Statistics of a partition equal independent references, and say what they cannot do."""

from __future__ import annotations

import json
import math
import re
import sys
import time

import numpy as np
import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset
from scipy.optimize import minimize_scalar
from scipy.spatial.distance import jensenshannon
from scipy.special import gammaln

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
from hf_federated.data.statistics import label_statistics as label_module
from hf_federated.data.statistics.text_statistics import text_map


TEXTS = {"cars": ["A fast car", "the engine"], "bikes": ["a fast BIKE"], "more": ["engine, car; the fast"]}


def rows(num_rows: int = 60, num_clients: int = 4, seed: int = 0) -> Dataset:
    rng = np.random.default_rng(seed)
    return Dataset.from_dict(
        {
            "owner": [f"client {number}" for number in rng.integers(0, num_clients, num_rows)],
            "label": [("sport", "space", "cars")[number] for number in rng.integers(0, 3, num_rows)],
        }
    )


def counted_by_hand(clients: FederatedDataset, names: list, column: str = "label") -> list[list[int]]:
    return [[clients[client_id][column][:].count(name) for name in names] for client_id in clients]


def drawn_counts(alpha: float, num_clients: int, size: int, prior: np.ndarray, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.multinomial(size, q) for q in rng.dirichlet(alpha * prior, num_clients)])


def log_likelihood(alpha: float, counts: np.ndarray, prior: np.ndarray) -> float:
    """Of the Dirichlet-multinomial distribution, without the terms that do not depend on alpha."""
    sizes = counts.sum(axis=1)
    of_clients = gammaln(alpha) - gammaln(alpha + sizes)
    return float(of_clients.sum() + (gammaln(alpha * prior + counts) - gammaln(alpha * prior)).sum())


# label_counts


def test_labels_of_a_partitioned_source_are_counted():
    clients = FederatedDataset.from_column(rows(), "owner")
    counts = label_counts(clients)
    assert counts.client_ids == clients.client_ids
    assert counts.label_names == ["cars", "space", "sport"]
    assert counts.counts.dtype == np.int64
    assert counts.counts.tolist() == counted_by_hand(clients, counts.label_names)
    assert counts.sizes.tolist() == list(clients.num_rows.values())
    np.testing.assert_allclose(counts.shares.sum(axis=1), 1)


def test_no_client_of_a_partitioned_source_is_opened(monkeypatch):
    clients = FederatedDataset.from_column(rows(), "owner")
    monkeypatch.setattr(FederatedDataset, "__getitem__", lambda *_: pytest.fail("a client was opened"))
    assert label_counts(clients).counts.sum() == 60


def test_labels_of_separate_data_sets_are_counted_under_common_names():
    dataset = rows()
    # "b" has no row about cars: numbered on its own its labels would be shifted
    parts = {"a": dataset, "b": dataset.filter(lambda row: row["label"] != "cars"), "c": dataset.shuffle(seed=1)}
    clients = FederatedDataset.from_dict(parts)
    counts = label_counts(clients)
    assert counts.counts.tolist() == counted_by_hand(clients, ["cars", "space", "sport"])


def test_separate_clients_keep_the_names_of_a_class_label():
    dataset = rows().cast_column("label", ClassLabel(names=["sport", "unused", "space", "cars"]))
    clients = FederatedDataset.from_dict({"a": dataset.select(range(9, 0, -2)), "b": dataset})
    counts = label_counts(clients)
    assert counts.label_names == ["sport", "unused", "space", "cars"]
    assert counts.counts.tolist() == counted_by_hand(clients, [0, 1, 2, 3])


def test_shuffled_sources_and_selected_clients_are_counted_as_they_are():
    clients = FederatedDataset.from_column(rows().shuffle(seed=3), "owner").select_clients(["client 3", "client 0"])
    counts = label_counts(clients)
    assert counts.client_ids == ["client 3", "client 0"]
    assert counts.counts.tolist() == counted_by_hand(clients, ["cars", "space", "sport"])


def test_a_row_that_nobody_has_may_lack_its_label():
    dataset = Dataset.from_dict({"owner": ["a", "a", "b"], "label": [0, 1, None]})
    counts = label_counts(FederatedDataset.from_column(dataset, "owner", min_rows=2))
    assert counts.counts.tolist() == [[1, 1]]
    with pytest.raises(ValueError, match="label"):
        label_counts(FederatedDataset.from_column(dataset, "owner"))


def test_a_class_label_keeps_names_that_no_client_has():
    dataset = rows().cast_column("label", ClassLabel(names=["sport", "unused", "space", "cars"]))
    counts = label_counts(FederatedDataset.from_column(dataset, "owner"))
    assert counts.label_names == ["sport", "unused", "space", "cars"]
    assert counts.counts[:, 1].tolist() == [0, 0, 0, 0]
    assert counts.counts.sum() == 60


def test_counts_that_do_not_fit_the_names_are_refused():
    with pytest.raises(ValueError, match=r"2 clients and 3 labels need counts of shape \(2, 3\), got \(2, 2\)"):
        LabelCounts(["a", "b"], ["x", "y", "z"], np.zeros((2, 2), dtype=np.int64))


def test_a_wrong_column_is_refused_with_those_there_are():
    clients = FederatedDataset.from_column(rows(), "owner")
    for function in (label_counts, describe_partition, vocabulary_overlap):
        with pytest.raises(ValueError, match="There is no column 'sentiment'. The columns are: owner, label"):
            function(clients, "sentiment")


def test_iterable_clients_are_refused_by_name():
    clients = FederatedDataset.from_dict({"a": rows(), "stream": rows().to_iterable_dataset()})
    for function in (label_counts, describe_partition, vocabulary_overlap):
        with pytest.raises(TypeError, match="Client 'stream' is an IterableDataset.*select_clients"):
            function(clients, "label")


# Jensen-Shannon divergence


def test_the_divergence_is_the_square_of_scipys_distance_in_bits():
    shares = np.random.default_rng(0).dirichlet(np.full(6, 0.3), 9)
    expected = [[jensenshannon(p, q, base=2) ** 2 for q in shares] for p in shares]
    np.testing.assert_allclose(jensen_shannon_divergence(shares), expected, atol=1e-12)


def test_the_documented_conversion_to_the_published_distance_holds():
    p, q = np.array([0.9, 0.1]), np.array([0.2, 0.8])
    divergence = jensen_shannon_divergence(np.stack([p, q]))[0, 1]
    assert jensenshannon(p, q) == pytest.approx(math.sqrt(divergence * math.log(2)))


def test_the_divergence_is_symmetric_with_a_zero_diagonal_and_at_most_one():
    shares = np.random.default_rng(0).dirichlet(np.full(5, 0.05), 30)
    divergence = jensen_shannon_divergence(shares)
    assert np.array_equal(divergence, divergence.T)
    assert np.array_equal(np.diag(divergence), np.zeros(30))
    assert divergence.min() >= 0 and divergence.max() <= 1


def test_disjoint_labels_diverge_by_one_bit_and_equal_shares_by_nothing():
    divergence = jensen_shannon_divergence(np.array([[0.5, 0.5, 0], [0, 0, 1], [0.5, 0.5, 0]]))
    np.testing.assert_allclose(divergence, [[0, 1, 0], [1, 0, 1], [0, 1, 0]], atol=1e-15)


def test_a_permutation_of_clients_permutes_the_divergence():
    shares = np.random.default_rng(0).dirichlet(np.ones(4), 12)
    order = np.random.default_rng(1).permutation(12)
    divergence = jensen_shannon_divergence(shares)
    np.testing.assert_allclose(jensen_shannon_divergence(shares[order]), divergence[np.ix_(order, order)], atol=1e-15)


def test_blocks_do_not_change_the_divergence(monkeypatch):
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
        ([0.5, 0.5], r"array of shape \(2,\)"),
    ],
)
def test_what_is_no_distribution_is_refused(shares, message):
    with pytest.raises(ValueError, match=message):
        jensen_shannon_divergence(np.array(shares))


def test_the_mean_is_over_pairs_of_different_clients():
    divergence = jensen_shannon_divergence(np.random.default_rng(0).dirichlet(np.ones(3), 6))
    pairs = [divergence[i, j] for i in range(6) for j in range(i)]
    assert mean_divergence(divergence) == pytest.approx(sum(pairs) / len(pairs))
    overlap = np.ones((3, 3)) * 0.5 + np.eye(3) * 0.5
    assert mean_divergence(overlap) == pytest.approx(0.5)  # a diagonal of ones does not count
    with pytest.raises(ValueError, match="at least two clients"):
        mean_divergence(divergence[:1, :1])


# effective concentration


@pytest.mark.parametrize("alpha", [0.05, 1.0, 20.0, 400.0])
def test_the_estimate_maximises_the_likelihood_that_scipy_computes(alpha):
    prior = np.array([0.5, 0.2, 0.2, 0.1])
    counts = drawn_counts(alpha, num_clients=80, size=60, prior=prior)
    for assumed in (prior, None):
        mean = counts.sum(axis=0) / counts.sum() if assumed is None else assumed
        best = minimize_scalar(
            lambda log_alpha, mean=mean: -log_likelihood(math.exp(log_alpha), counts, mean),
            bounds=(-8, 12),
            method="bounded",
            options={"xatol": 1e-10},
        )
        assert math.log(estimate_alpha(counts, assumed)) == pytest.approx(best.x, abs=1e-4)


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0, 100.0])
def test_the_concentration_of_drawn_counts_is_recovered_within_ten_percent(alpha):
    counts = drawn_counts(alpha, num_clients=1000, size=200, prior=np.full(10, 0.1))
    assert estimate_alpha(counts) == pytest.approx(alpha, rel=0.1)


def test_clients_of_few_rows_are_not_taken_for_more_different():
    # 5 rows a client: their shares are far from the ones they were drawn from
    counts = drawn_counts(2.0, num_clients=4000, size=5, prior=np.full(4, 0.25))
    assert estimate_alpha(counts) == pytest.approx(2.0, rel=0.1)


def test_clients_dealt_by_chance_have_an_infinite_concentration_or_a_large_one():
    rng = np.random.default_rng(0)
    prior = np.full(5, 0.2)
    estimates = [estimate_alpha(rng.multinomial(100, prior, size=50), prior) for _ in range(40)]
    assert min(estimates) > 300
    # the likelihood has a maximum below infinity for about half of such draws
    assert 8 <= sum(map(math.isinf, estimates)) <= 32
    assert estimate_alpha(np.full((6, 3), 40)) == math.inf  # more alike than chance


def test_infinity_is_returned_exactly_where_the_likelihood_rises_for_ever():
    rng = np.random.default_rng(1)
    prior = np.full(3, 1 / 3)
    for _ in range(30):
        counts = rng.multinomial(40, prior, size=8)
        rises = log_likelihood(1e6, counts, prior) > log_likelihood(1e5, counts, prior)
        estimate = estimate_alpha(counts, prior)
        assert math.isinf(estimate) == rises or 1e5 < estimate < 1e7


def test_clients_of_one_label_each_have_no_concentration():
    assert estimate_alpha(np.diag([5, 9, 3])) == 0.0


def test_order_of_clients_and_labels_and_labels_nobody_has_do_not_matter():
    counts = drawn_counts(1.0, num_clients=30, size=40, prior=np.array([0.6, 0.3, 0.1]))
    expected = estimate_alpha(counts)
    padded = np.concatenate([counts[::-1, ::-1], np.zeros((30, 2), dtype=np.int64)], axis=1)
    assert estimate_alpha(padded) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(
    ("counts", "prior", "message"),
    [
        ([[3, 1]], None, "at least two clients"),
        ([[3, 0], [2, 0]], None, "at least two labels"),
        ([[1, 0], [0, 1]], None, "no client has two rows"),
        ([[3, 1], [0, -2]], None, "whole numbers from 0"),
        ([[0.5, 0.5], [0.1, 0.9]], None, "Pass LabelCounts.counts, not shares"),
        ([[3, 1], [0, 2]], [1.0, 0.0], "gives label 1 no share, but 3 rows have it"),
        ([[3, 1], [0, 2]], [1.0, 1.0], "sum to 1, got 2 numbers that sum to 2"),
        ([[3, 1], [0, 2]], [0.2, 0.3, 0.5], "must be 2 shares"),
    ],
)
def test_counts_that_say_nothing_of_a_concentration_are_refused(counts, prior, message):
    with pytest.raises(ValueError, match=message):
        estimate_alpha(np.array(counts), None if prior is None else np.array(prior))


# words


def text_clients(texts: dict[str, list[str]] = TEXTS) -> FederatedDataset:
    return FederatedDataset.from_dict(
        {name: Dataset.from_dict({"text": of_client}) for name, of_client in texts.items()}
    )


def test_the_overlap_is_the_jaccard_index_of_the_clients_words():
    words = {name: set(re.findall(r"\b\w\w+\b", " ".join(texts).lower())) for name, texts in TEXTS.items()}
    assert words["cars"] == {"fast", "car", "the", "engine"}
    expected = [[len(a & b) / len(a | b) for b in words.values()] for a in words.values()]
    np.testing.assert_allclose(vocabulary_overlap(text_clients()), expected)


def test_a_word_does_not_reach_from_one_row_into_the_next():
    overlap = vocabulary_overlap(text_clients({"a": ["foot", "ball"], "b": ["football"], "c": ["foot ball"]}))
    assert overlap.tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 1]]


def test_rows_are_sampled_for_each_client_on_its_own():
    rng = np.random.default_rng(0)
    texts = {name: [f"w{number}" for number in rng.integers(10, 99, 50)] for name in "abc"}
    clients = text_clients(texts)
    overlap = vocabulary_overlap(clients, rows_per_client=10)
    assert np.array_equal(overlap, vocabulary_overlap(clients, rows_per_client=10))
    assert not np.array_equal(overlap, vocabulary_overlap(clients, rows_per_client=10, seed=1))
    assert not np.array_equal(overlap, vocabulary_overlap(clients, rows_per_client=None))
    # neither the order of clients nor who else is there changes a client's rows
    permuted = vocabulary_overlap(clients.select_clients(["c", "a"]), rows_per_client=10)
    assert np.array_equal(permuted, overlap[np.ix_([2, 0], [2, 0])])


def test_clients_without_words_overlap_with_each_other_only():
    overlap = vocabulary_overlap(text_clients({"a": ["word"], "b": ["?"], "c": ["!", ""]}))
    assert overlap.tolist() == [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
    with pytest.raises(ValueError, match="no client has a word in the column 'text'"):
        vocabulary_overlap(text_clients({"b": ["?"], "c": ["!"]}))


def test_texts_that_are_missing_or_are_no_strings_are_refused():
    clients = FederatedDataset.from_column(Dataset.from_dict({"id": ["a", "b"], "text": ["word", None]}), "id")
    with pytest.raises(ValueError, match="Client 'b' has a row without a text in the column 'text'"):
        vocabulary_overlap(clients)
    clients = FederatedDataset.from_column(Dataset.from_dict({"id": ["a", "b"], "text": [1, 2]}), "id")
    with pytest.raises(TypeError, match="'text' has the type int64, expected strings"):
        vocabulary_overlap(clients)
    with pytest.raises(ValueError, match="rows_per_client must be a whole number from 1, or None"):
        vocabulary_overlap(text_clients(), rows_per_client=0)


def test_the_map_is_the_two_first_principal_components_of_tf_idf():
    from sklearn.feature_extraction.text import TfidfVectorizer

    rng = np.random.default_rng(0)
    texts = {
        name: [
            " ".join(f"{name}{number}" if number < 15 else f"w{number}" for number in rng.integers(0, 30, 12))
            for _ in range(20)
        ]
        for name in ("xx", "yy")
    }
    coordinates, owners = text_map(text_clients(texts), max_features=25)
    dense = TfidfVectorizer(max_features=25).fit_transform([*texts["xx"], *texts["yy"]]).toarray()
    assert dense.shape == (40, 25)
    left, singular, _ = np.linalg.svd(dense - dense.mean(axis=0), full_matrices=False)
    np.testing.assert_allclose(np.abs(coordinates), np.abs(left[:, :2] * singular[:2]), atol=1e-8)
    assert owners.tolist() == [0] * 20 + [1] * 20
    assert np.array_equal(coordinates, text_map(text_clients(texts), max_features=25)[0])


def test_a_map_of_too_little_is_refused():
    with pytest.raises(ValueError, match="at least three texts and three words .* got 2 texts and 2 words"):
        text_map(text_clients({"a": ["one word"], "b": ["word"]}))
    with pytest.raises(ValueError, match="all 3 texts have the same words"):
        text_map(text_clients({"a": ["one two three"] * 2, "b": ["three two one"]}))


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    for function in (vocabulary_overlap, text_map):
        with pytest.raises(ImportError, match=r"pip install hf-federated\[metrics\]"):
            function(text_clients())
    clients = FederatedDataset.from_column(rows(), "owner")
    assert describe_partition(clients, "label").labels is not None  # labels need none of it


# everything together


def test_a_description_is_made_of_the_single_statistics():
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


def test_what_was_not_asked_for_is_left_out():
    statistics = describe_partition(FederatedDataset.from_column(rows(), "owner"))
    assert statistics.labels is None
    assert set(statistics.to_dict()) == {"num_clients", "num_rows", "rows_per_client", "sizes"}
    assert "label" not in statistics.to_markdown() and "client 3" in statistics.to_markdown()


def test_the_gini_coefficient_is_half_the_mean_difference_over_the_mean():
    sizes = np.array([3, 10, 1, 6, 6])
    expected = np.abs(sizes[:, None] - sizes[None, :]).mean() / (2 * sizes.mean())
    statistics = PartitionStatistics(["a", "b", "c", "d", "e"], sizes)
    assert statistics.gini == pytest.approx(expected)


@pytest.mark.parametrize("num_clients", [1, 5, 500])
def test_a_description_is_json(num_clients):
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


def test_an_infinite_concentration_is_a_string_that_float_reads():
    values = PartitionStatistics(["a"], np.array([3]), alpha=math.inf).to_dict()
    assert values["alpha"] == "inf" and float(values["alpha"]) == math.inf
    assert PartitionStatistics(["a"], np.array([3]), alpha=2.5).to_dict()["alpha"] == 2.5


@pytest.mark.parametrize("num_labels", [1, 2, 50])
@pytest.mark.parametrize("num_clients", [1, 5, 20, 21, 500])
def test_the_tables_are_short_aligned_and_name_the_extremes(num_clients, num_labels):
    sizes = np.random.default_rng(0).permutation(num_clients) + 2
    counts = np.random.default_rng(0).multinomial(1, np.full(num_labels, 1 / num_labels), num_clients) * sizes[:, None]
    ids = [f"client {number} with | and a name that is too long" for number in range(num_clients)]
    labels = LabelCounts(ids, [f"label {number} of a long name, too long" for number in range(num_labels)], counts)
    text = PartitionStatistics(ids, sizes, labels, 0.5, math.inf).to_markdown()
    for table in text.split("\n\n"):
        assert len({len(line) for line in table.split("\n")}) == 1  # aligned
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.split("\n")}) == 1  # as many cells in a row
    lines = text.split("\n\n")[1].split("\n")[2:]
    assert max(len(line) for line in lines) <= 165
    assert len(lines) == (num_clients if num_clients <= 20 else 11)
    if num_clients > 20:
        assert f"client {sizes.argmax()} " in lines[0] and f"client {sizes.argmin()} " in lines[-1]
        assert f"… {num_clients - 10} more" in lines[5]
    assert "inf" in text


def test_of_very_many_clients_some_are_compared_and_the_table_says_so():
    clients = FederatedDataset.from_dataset(rows(600), IidPartitioner(60))
    statistics = describe_partition(clients, "label", max_clients=20)
    compared = np.sort(np.random.default_rng(0).choice(60, 20, replace=False))
    counts = label_counts(clients)
    assert statistics.mean_divergence == mean_divergence(jensen_shannon_divergence(counts.shares[compared]))
    assert statistics.alpha == estimate_alpha(counts.counts)
    assert "of 20 clients" in statistics.to_markdown()
    assert describe_partition(clients, "label", max_clients=60).num_compared_clients is None
    with pytest.raises(ValueError, match="max_clients must be a whole number from 2"):
        describe_partition(clients, max_clients=1)


@pytest.mark.slow
def test_separate_views_of_a_million_rows_are_counted_without_joining_their_tables():
    labels = np.random.default_rng(0).integers(0, 20, 1_000_000)
    source = FederatedDataset.from_dataset(
        Dataset(pa.table({"label": labels}), fingerprint="million"), IidPartitioner(1000)
    )
    separate = FederatedDataset.from_dict(dict(source))
    begin = time.perf_counter()
    assert np.array_equal(label_counts(separate).counts, label_counts(source).counts)
    assert time.perf_counter() - begin < 10  # joining a thousand views of the table takes over half a minute


@pytest.mark.slow
def test_a_million_rows_over_a_thousand_clients_are_described_in_two_seconds():
    labels = np.random.default_rng(0).integers(0, 20, 1_000_000)
    clients = FederatedDataset.from_dataset(
        Dataset(pa.table({"label": labels}), fingerprint="million"), IidPartitioner(1000)
    )
    begin = time.perf_counter()
    assert describe_partition(clients, "label").num_rows == 1_000_000
    assert time.perf_counter() - begin < 2
