"""Texts are embedded and clustered, and a cluster belongs to the row that it was predicted for."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from datasets import Dataset
from language import sentences, tokenizer
from partition_checks import count_labels, rows_of, shares, shares_in_splits
from tiny import tiny_model

from hf_federated.data import FeatureClusterPartitioner, LabelDirichletPartitioner


TOPICS = {"rain": 0, "music": 1, "ball": 2, "bread": 3}


def places(texts: list[str]) -> np.ndarray:
    """A corner of the plane for each topic, and a little noise."""
    corners = np.array([[0, 0], [0, 9], [9, 0], [9, 9]])
    return np.array([corners[TOPICS[text.split()[0]]] + len(text) % 3 / 10 for text in texts])


def texts(num_rows: int, seed: int = 0) -> Dataset:
    generator = np.random.default_rng(seed)
    topics = generator.choice(list(TOPICS), num_rows, p=[0.4, 0.3, 0.2, 0.1]).tolist()
    return Dataset.from_dict({"text": [f"{topic} {i}" for i, topic in enumerate(topics)], "topic": topics})


def test_clusters_belong_to_their_rows():
    dataset = texts(1000)
    partition = FeatureClusterPartitioner(8, "text", 4, places, alpha=1e-6, batch_size=64).partition(dataset)
    counts = count_labels(partition, dataset["topic"][:])
    assert sorted(partition.indices.tolist()) == list(range(1000))
    # Whoever comes first has one cluster; scrambled ids would mix the topics.
    assert (counts[0] > 0).sum() == 1
    np.testing.assert_array_equal(partition.sizes, 125)


def test_rows_are_dealt_as_by_labels():
    dataset, arguments = texts(2000), {"num_clients": 30, "alpha": 0.5, "quantity_beta": 1.0, "seed": 5}
    by_cluster = FeatureClusterPartitioner(
        text_columns="text", num_clusters=4, embedder=places, **arguments
    ).partition(dataset)
    by_topic = LabelDirichletPartitioner(label_column="topic", **arguments).partition(dataset)
    # Cluster numbers are those of K-means, so the draws are others; sizes and how far clients differ are the same.
    assert by_cluster.sizes.tolist() == by_topic.sizes.tolist()
    topics = dataset["topic"][:]
    spread = [shares(count_labels(partition, topics)).std(axis=0).mean() for partition in (by_cluster, by_topic)]
    assert abs(spread[0] - spread[1]) < 0.1


def test_clusters_are_fitted_on_the_first_split():
    splits = {"train": texts(4000), "test": texts(2000, seed=1)}
    partitions = FeatureClusterPartitioner(20, "text", 4, places, alpha=0.5).partition_splits(splits)
    first, second = shares_in_splits(partitions, splits, "topic")
    assert np.corrcoef(first.ravel(), second.ravel())[0, 1] > 0.9


def test_a_later_split_is_not_clustered_on_its_own():
    train = Dataset.from_dict({"text": ["rain", "bread"] * 100})
    # One topic in two places that lie close: K-means of these rows alone would take them for two clusters.
    kinds = ["rain 1", "rain 12"] * 100
    partitioner = FeatureClusterPartitioner(4, "text", 2, places, alpha=1e-6)
    partition = partitioner.partition_splits({"train": train, "test": Dataset.from_dict({"text": kinds})})["test"]
    assert count_labels(partition, kinds).min() > 10  # of the 50 rows of each client


def test_columns_and_tokens_are_joined():
    seen = []

    def remember(batch: list[str]) -> np.ndarray:
        seen.extend(batch)
        return np.zeros((len(batch), 1))

    dataset = Dataset.from_dict({"question": ["who", "why"], "answer": [["it", "is"], []], "other": [1.0, 2.0]})
    FeatureClusterPartitioner(1, ["question", "answer"], 1, remember).partition(dataset)
    assert seen == ["who\nit is", "why\n"]


def test_rows_are_embedded_in_batches():
    sizes = []

    def remember(batch: list[str]) -> np.ndarray:
        sizes.append(len(batch))
        return places(batch)

    FeatureClusterPartitioner(2, "text", 2, remember, batch_size=40).partition(texts(100))
    assert sizes == [40, 40, 20]


def test_a_format_of_the_data_set_does_not_matter():
    dataset = texts(200)
    partitioner = FeatureClusterPartitioner(4, "text", 4, places)
    assert rows_of(partitioner.partition(dataset.with_format("torch"))) == rows_of(partitioner.partition(dataset))


def test_an_encoder_is_loaded_by_its_path_and_the_global_generators_are_left_alone(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    tiny_model().base_model.save_pretrained(tmp_path / "bert")
    tokenizer().save_pretrained(tmp_path / "bert")
    transformer = Transformer(str(tmp_path / "bert"))
    modules = [transformer, Pooling(transformer.get_embedding_dimension())]
    encoder = sentence_transformers.SentenceTransformer(modules=modules, device="cpu")
    encoder.save_pretrained(str(tmp_path / "encoder"))

    dataset = Dataset.from_dict({"text": sentences("north", 30) + sentences("south", 30)})
    by_path = FeatureClusterPartitioner(4, "text", 3, str(tmp_path / "encoder"), alpha=0.5)
    before = torch.get_rng_state()
    partition = by_path.partition(dataset)
    assert torch.equal(torch.get_rng_state(), before)
    by_function = FeatureClusterPartitioner(4, "text", 3, encoder.encode, alpha=0.5)
    assert rows_of(partition) == rows_of(by_function.partition(dataset))
    assert by_path.settings()["embedder"] == str(tmp_path / "encoder")


@pytest.mark.parametrize(("module", "embedder"), [("sklearn.cluster", places), ("sentence_transformers", "a/model")])
def test_what_is_not_installed_is_named_with_the_extra(monkeypatch, module, embedder):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'hf-federated\[embeddings\]'"):
        FeatureClusterPartitioner(2, "text", 2, embedder).partition(texts(20))


@pytest.mark.parametrize(
    ("embedder", "message"),
    [
        (lambda batch: np.zeros(len(batch)), r"returned shape \(10,\) for 10 texts"),
        (lambda batch: np.zeros((3, 2)), r"returned shape \(3, 2\) for 10 texts"),
        (lambda batch: np.full((len(batch), 2), np.nan), "the embedding of row 0 is not finite"),
    ],
)
def test_embeddings_that_cannot_be_right_are_refused(embedder, message):
    with pytest.raises(ValueError, match=message):
        FeatureClusterPartitioner(2, "text", 2, embedder).partition(texts(10))


def test_embeddings_of_two_lengths_are_refused():
    partitioner = FeatureClusterPartitioner(2, "text", 2, lambda b: np.zeros((len(b), len(b))), batch_size=6)
    with pytest.raises(ValueError, match=r"returned shape \(4, 4\) for 4 texts"):
        partitioner.partition(texts(10))


def test_a_row_without_text_is_named():
    dataset = Dataset.from_dict({"text": ["rain"] * 5 + [None]})
    with pytest.raises(ValueError, match="row 5 has no text in the column 'text' but None"):
        FeatureClusterPartitioner(2, "text", 2, places, batch_size=4).partition(dataset)
    with pytest.raises(ValueError, match="row 0 has no text in the column 'number' but 1"):
        FeatureClusterPartitioner(1, "number", 1, places).partition(Dataset.from_dict({"number": [1, 2]}))


def test_rows_that_do_not_suffice_are_refused_before_texts_are_embedded():
    def fail(batch: list[str]) -> np.ndarray:
        raise AssertionError("embedded")

    with pytest.raises(ValueError, match="10 rows cannot form 11 clusters. Lower num_clusters"):
        FeatureClusterPartitioner(2, "text", 11, fail).partition(texts(10))
    with pytest.raises(ValueError, match="FeatureClusterPartitioner: 11 clients cannot share 10 rows"):
        FeatureClusterPartitioner(11, "text", 2, fail).partition(texts(10))
    with pytest.raises(ValueError, match="3 clients cannot share 2 rows of the split 'test'"):
        FeatureClusterPartitioner(3, "text", 2, fail).partition_splits({"train": texts(10), "test": texts(2)})
    with pytest.raises(ValueError, match="no column 'words'"):
        FeatureClusterPartitioner(2, "words", 2, fail).partition(texts(10))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text_columns": []}, "text_columns must be the name of a column or several names"),
        ({"text_columns": [3]}, "text_columns must be the name of a column or several names"),
        ({"text_columns": 3}, "text_columns must be the name of a column or several names"),
        ({"text_columns": ""}, "text_columns must be the name of a column"),
        ({"embedder": None}, "embedder must be the name or path of a sentence encoder, or a function"),
        ({"num_clusters": True}, "num_clusters must be a whole number from 1"),
        ({"batch_size": 0}, "batch_size must be a whole number from 1"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        FeatureClusterPartitioner(**{"num_clients": 2, "text_columns": "text", **arguments})
