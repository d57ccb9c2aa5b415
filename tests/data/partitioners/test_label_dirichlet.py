"""Tests of clients of equal size whose labels follow Dir(alpha * p), and of dynamic re-assignment."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from partition_checks import (
    client_rows,
    count_labels,
    mean_divergence,
    shares,
    shares_in_splits,
    skewed_labels,
    with_labels,
)

from hf_federated.data import LabelDirichletPartitioner, QuantityDirichletPartitioner
from hf_federated.data.partitioners.label_dirichlet import draw_counts


def test_20_newsgroups_over_100_clients_has_the_sizes_of_the_paper():
    partition = LabelDirichletPartitioner(num_clients=100, alpha=1.0).partition(with_labels(skewed_labels(11_314)))
    assert partition.sizes.tolist() == [113] * 99 + [127]
    assert partition.client_ids == [str(i) for i in range(100)]


@pytest.mark.parametrize("alpha", [1e-300, 1e-6, 0.01, 1, 1e6, 1e300])
def test_any_alpha_keeps_all_clients_and_rows(alpha):
    partition = LabelDirichletPartitioner(num_clients=100, alpha=alpha).partition(with_labels(skewed_labels(2000)))
    assert partition.sizes.tolist() == [20] * 100
    assert sorted(partition.indices.tolist()) == list(range(2000))


def test_larger_alpha_makes_clients_more_similar():
    labels = skewed_labels(11_314)
    means = []
    for alpha in (1, 5, 10, 100):
        partition = LabelDirichletPartitioner(100, alpha=alpha).partition(with_labels(labels))
        means.append(mean_divergence(shares(count_labels(partition, labels))))
    assert means == sorted(means, reverse=True)
    assert means[0] > 2 * means[-1]


def test_huge_alpha_gives_every_client_the_label_shares_of_the_dataset():
    labels = skewed_labels(50_000, 5)
    partition = LabelDirichletPartitioner(num_clients=10, alpha=1e6).partition(with_labels(labels))
    prior = np.bincount(labels) / 50_000
    # Each client draws 5000 rows by the prior. The standard deviation is below sqrt(0.25 / 5000).
    assert np.abs(shares(count_labels(partition, labels)) - prior).max() < 4.5 * np.sqrt(0.25 / 5000)


def test_tiny_alpha_gives_the_first_clients_one_label_each():
    labels = skewed_labels(10_000)
    counts = count_labels(LabelDirichletPartitioner(num_clients=50, alpha=1e-6).partition(with_labels(labels)), labels)
    assert (counts[:5] > 0).sum(axis=1).tolist() == [1] * 5


def test_label_shares_have_the_mean_and_variance_of_the_dirichlet_distribution():
    labels = [0] * 5000 + [1] * 3000 + [2] * 2000
    alpha, size, num_seeds = 2.0, 100, 600
    dataset = with_labels(labels)
    drawn = np.empty((num_seeds, 3))
    for seed in range(num_seeds):
        partition = LabelDirichletPartitioner(100, alpha=alpha, seed=seed).partition(dataset)
        drawn[seed] = np.bincount(np.array(labels)[partition.rows(0)], minlength=3) / size
    prior = np.array([0.5, 0.3, 0.2])
    variance_of_q = prior * (1 - prior) / (alpha + 1)
    # Counts are multinomial given q. Their variance is Var[q] + E[q (1 - q)] / n, where
    # E[q (1 - q)] = p (1 - p) alpha / (alpha + 1).
    variance = variance_of_q + prior * (1 - prior) * alpha / (alpha + 1) / size
    np.testing.assert_allclose(drawn.mean(axis=0), prior, atol=4 * np.sqrt(variance.max() / num_seeds))
    np.testing.assert_allclose(drawn.var(axis=0), variance, rtol=0.25)


def draw_row_by_row(generator, label_shares, sizes, available):
    """Draw the label of each row by q_j. If the label has run out, draw one of the remaining rows instead."""
    remaining = list(available)
    counts = np.zeros(label_shares.shape, dtype=int)
    for client, size in enumerate(sizes):
        missing = 0
        for _ in range(size):
            label = generator.choice(len(remaining), p=label_shares[client])
            if remaining[label] == 0:
                missing += 1
                continue
            remaining[label] -= 1
            counts[client, label] += 1
        for _ in range(missing):
            label = generator.choice(len(remaining), p=np.array(remaining) / sum(remaining))
            remaining[label] -= 1
            counts[client, label] += 1
    return counts


def test_counts_have_the_same_distribution_as_drawing_row_by_row():
    label_shares = np.array([[0.8, 0.15, 0.05], [0.7, 0.0, 0.3], [0.1, 0.1, 0.8]])
    sizes, available, num_draws = np.array([6, 5, 4]), np.array([6, 5, 5]), 3000
    generator = np.random.default_rng(0)
    fast = np.array([draw_counts(generator, label_shares, sizes, available) for _ in range(num_draws)])
    slow = np.array([draw_row_by_row(generator, label_shares, sizes, available) for _ in range(num_draws)])
    for counts in (fast, slow):
        assert (counts.sum(axis=2) == sizes).all()
        assert (counts.sum(axis=1) <= available).all()
    error = np.sqrt((fast.var(axis=0) + slow.var(axis=0)) / num_draws)
    assert (np.abs(fast.mean(axis=0) - slow.mean(axis=0)) <= 4 * error + 1e-12).all()
    np.testing.assert_allclose(fast.var(axis=0), slow.var(axis=0), rtol=0.2, atol=0.02)


def test_missing_rows_are_drawn_in_proportion_to_the_remaining_rows():
    label_shares = np.array([[1.0, 0.0, 0.0]])
    generator = np.random.default_rng(0)
    available = np.array([10, 300, 100])
    drawn = np.array([draw_counts(generator, label_shares, np.array([50]), available)[0] for _ in range(2000)])
    assert (drawn[:, 0] == 10).all()
    np.testing.assert_allclose(drawn.mean(axis=0), [10, 30, 10], atol=0.3)


def test_client_has_the_same_label_shares_in_all_splits():
    splits = {
        "train": with_labels(skewed_labels(20_000)),
        "test": with_labels(skewed_labels(10_000, seed=1)),
    }
    first, second = shares_in_splits(LabelDirichletPartitioner(40, alpha=0.5).partition_splits(splits), splits)
    same = np.corrcoef(first.ravel(), second.ravel())[0, 1]
    other = np.corrcoef(first.ravel(), np.roll(second, 1, axis=0).ravel())[0, 1]
    assert same > 0.9
    assert other < 0.5


def test_labels_of_splits_are_matched_by_name():
    names = ["a", "b", "c"]
    values = [names[label] for label in skewed_labels(3000, 3)]
    numbered = [
        with_labels(values).cast(Features({"label": ClassLabel(names=order)})) for order in (names, names[::-1])
    ]
    strings = with_labels(values)
    partitioner = LabelDirichletPartitioner(10, alpha=0.2)
    expected = client_rows(partitioner.partition_splits({"train": strings, "test": strings})["test"])
    for second in (*numbered, strings.cast_column("label", Value("large_string"))):
        assert client_rows(partitioner.partition_splits({"train": strings, "test": second})["test"]) == expected


def test_rows_of_a_label_absent_from_the_first_split_are_assigned():
    train = with_labels(["a", "b"] * 50)
    for test in (["a"] * 30 + ["new"] * 30, ["new"] * 60):
        partition = LabelDirichletPartitioner(5).partition_splits({"train": train, "test": with_labels(test)})["test"]
        assert sorted(partition.indices.tolist()) == list(range(60))
        assert partition.sizes.tolist() == [12] * 5


def test_labels_of_a_later_split_do_not_change_the_first_split():
    names = ClassLabel(names=["m", "a", "b", "c", "z"])
    partitioner = LabelDirichletPartitioner(20, alpha=0.3)
    train = with_labels([["a", "b", "c"][label] for label in skewed_labels(3000, 3)])
    alone = client_rows(partitioner.partition(train))
    assert (
        client_rows(partitioner.partition_splits({"train": train, "test": with_labels(["m", "z"] * 50)})["train"])
        == alone
    )
    assert client_rows(partitioner.partition(train.cast_column("label", names))) == alone


def test_min_size_does_not_apply_to_later_splits():
    partitioner = LabelDirichletPartitioner(5, min_size=20)
    partitions = partitioner.partition_splits({"train": with_labels([0, 1] * 50), "test": with_labels([0, 1] * 5)})
    assert partitions["test"].sizes.tolist() == [2] * 5


def test_quantity_beta_gives_the_sizes_of_the_quantity_partitioner():
    labels = skewed_labels(5000)
    arguments = {"num_clients": 30, "min_size": 7, "seed": 4}
    partition = LabelDirichletPartitioner(alpha=0.5, quantity_beta=0.7, **arguments).partition(with_labels(labels))
    quantity = QuantityDirichletPartitioner(beta=0.7, **arguments).partition(with_labels(labels))
    assert partition.sizes.tolist() == quantity.sizes.tolist()
    assert len(set(partition.sizes.tolist())) > 10
    assert mean_divergence(shares(count_labels(partition, labels))) > 3 * mean_divergence(
        shares(count_labels(quantity, labels))
    )


def test_sizes_are_independent_of_the_label_shares():
    # Sizes and label shares come from one seed. Equal random numbers would correlate a client's size with its labels.
    pairs = []
    for seed in range(150):
        partitioner = LabelDirichletPartitioner(2, alpha=40.0, quantity_beta=20.0, seed=seed)
        partition = partitioner.partition(with_labels([0, 1] * 200))
        pairs.append((partition.sizes[0], (partition.rows(0) % 2).mean()))
    assert abs(np.corrcoef(np.array(pairs).T)[0, 1]) < 0.3


def test_class_with_one_row_belongs_to_one_client():
    counts = count_labels(LabelDirichletPartitioner(4).partition(with_labels([0] * 50 + [1])), [0] * 50 + [1])
    assert sorted(counts[:, 1].tolist()) == [0, 0, 0, 1]


def test_sequences_of_tags_can_be_labels():
    rows = [["B-PER", "O"], ["O"], ["B-LOC", "I-LOC"], ["O", "O"]] * 100
    kinds = ["PER", "O", "LOC", "O"] * 100
    partition = LabelDirichletPartitioner(8, "tags", alpha=1e-6).partition(with_labels(kinds, tags=rows))
    counts = count_labels(partition, kinds)
    assert counts[0].max() == 50


def tagged_rows(num_rows=2000):
    """Tags of words of which two thirds of the rows have no entity, as in OntoNotes."""
    entities = [["O", "B-LOC", "I-LOC"], ["B-PER", "O", "O"], ["O", "B-ORG", "O"]]
    return [entities[number // 3 % 3] if number % 3 == 0 else ["O", "O", "O"] for number in range(num_rows)]


@pytest.mark.parametrize("alpha", [1e-3, 0.1, 100])
@pytest.mark.parametrize("quantity_beta", [None, 0.3])
def test_balance_entities_gives_all_clients_the_same_share_of_examples_with_entities(alpha, quantity_beta):
    tags = tagged_rows()
    dataset = Dataset.from_dict({"ner_tags": tags})
    partitioner = LabelDirichletPartitioner(
        20, "ner_tags", alpha=alpha, quantity_beta=quantity_beta, min_size=5, balance_entities=True
    )
    partition = partitioner.partition(dataset)
    has_entity = np.array([any(tag != "O" for tag in row) for row in tags])
    assert sorted(partition.indices.tolist()) == list(range(2000))
    for client, size in enumerate(partition.sizes):
        assert abs(has_entity[partition.rows(client)].sum() - size * has_entity.mean()) < 1
    # The entity types differ between clients as much as without the option.
    kinds = [{tag for row in partition.rows(client) for tag in tags[row] if tag != "O"} for client in range(20)]
    assert (max(map(len, kinds[:5])) <= 2) == (alpha == 1e-3)


def test_small_alpha_without_balance_leaves_clients_without_entities(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hf_federated"), "propagate", True)
    tags = tagged_rows()
    partition = LabelDirichletPartitioner(20, "ner_tags", alpha=0.01).partition(Dataset.from_dict({"ner_tags": tags}))
    has_entity = np.array([any(tag != "O" for tag in row) for row in tags])
    num_without = sum(not has_entity[partition.rows(client)].any() for client in range(20))
    assert num_without > 3
    (warning,) = caplog.messages
    assert warning.startswith(f"{num_without} of 20 clients have no example with an entity")
    caplog.clear()
    LabelDirichletPartitioner(20, "ner_tags", alpha=100).partition(Dataset.from_dict({"ner_tags": tags}))
    LabelDirichletPartitioner(2, "label", alpha=0.01).partition(Dataset.from_dict({"label": ["O", "x"] * 20}))
    assert not caplog.messages


def test_balance_entities_of_two_splits_and_of_class_labels():
    names = ["O", "B-LOC", "I-LOC", "B-PER", "B-ORG"]
    features = Features({"ner_tags": List(ClassLabel(names=names))})
    rows = {"ner_tags": [[names.index(tag) for tag in row] for row in tagged_rows(300)]}
    splits = {name: Dataset.from_dict(rows, features) for name in ("train", "test")}
    partitioner = LabelDirichletPartitioner(6, "ner_tags", alpha=0.01, balance_entities=True)
    for partition in partitioner.partition_splits(splits).values():
        has_entity = np.arange(300) % 3 == 0
        assert {int(has_entity[partition.rows(client)].sum()) for client in range(6)} <= {16, 17}


@pytest.mark.parametrize("column", [["a", "b"] * 10, [[0, 1]] * 20])
def test_balance_entities_needs_tags_with_names(column):
    with pytest.raises(ValueError, match="not a list of tags with names"):
        LabelDirichletPartitioner(2, "tags", balance_entities=True).partition(Dataset.from_dict({"tags": column}))


def test_balance_entities_without_any_entity():
    with pytest.raises(ValueError, match="no example has an entity"):
        LabelDirichletPartitioner(2, "tags", balance_entities=True).partition(Dataset.from_dict({"tags": [["O"]] * 9}))


def test_settings_have_balance_entities_only_if_it_is_set():
    assert "balance_entities" not in LabelDirichletPartitioner(2).settings()
    assert LabelDirichletPartitioner(2, balance_entities=True).settings()["balance_entities"] is True
