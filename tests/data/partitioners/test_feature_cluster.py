"""Tests of the partitioner that embeds and clusters texts."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from datasets import Dataset
from language import sentences, tokenizer
from partition_checks import client_rows, count_labels, shares, shares_in_splits
from tiny import tiny_model

from hf_federated.data import FeatureClusterPartitioner, LabelDirichletPartitioner


TOPICS = {"rain": 0, "music": 1, "ball": 2, "bread": 3}


def embed_topics(texts: list[str]) -> np.ndarray:
    """Return a 2-D embedding: each topic has a corner of the plane, plus a small offset."""
    corners = np.array([[0, 0], [0, 9], [9, 0], [9, 9]])
    return np.array([corners[TOPICS[text.split()[0]]] + len(text) % 3 / 10 for text in texts])


def texts(num_rows: int, seed: int = 0) -> Dataset:
    generator = np.random.default_rng(seed)
    topics = generator.choice(list(TOPICS), num_rows, p=[0.4, 0.3, 0.2, 0.1]).tolist()
    return Dataset.from_dict({"text": [f"{topic} {i}" for i, topic in enumerate(topics)], "topic": topics})


def test_cluster_ids_belong_to_the_rows_they_are_predicted_for():
    dataset = texts(1000)
    partition = FeatureClusterPartitioner(8, "text", 4, embed_topics, alpha=1e-6, batch_size=64).partition(dataset)
    counts = count_labels(partition, dataset["topic"][:])
    assert sorted(partition.indices.tolist()) == list(range(1000))
    # The first client has one cluster. Cluster ids in the wrong order would mix the topics.
    assert (counts[0] > 0).sum() == 1
    np.testing.assert_array_equal(partition.sizes, 125)


def test_rows_are_assigned_as_by_labels():
    dataset, arguments = texts(2000), {"num_clients": 30, "alpha": 0.5, "quantity_beta": 1.0, "seed": 5}
    by_cluster = FeatureClusterPartitioner(
        text_columns="text", num_clusters=4, embedder=embed_topics, **arguments
    ).partition(dataset)
    by_topic = LabelDirichletPartitioner(label_column="topic", **arguments).partition(dataset)
    # K-means numbers the clusters in a different order, so the draws differ. The sizes and the spread are the same.
    assert by_cluster.sizes.tolist() == by_topic.sizes.tolist()
    topics = dataset["topic"][:]
    spread = [shares(count_labels(partition, topics)).std(axis=0).mean() for partition in (by_cluster, by_topic)]
    assert abs(spread[0] - spread[1]) < 0.1


def test_clusters_are_fitted_on_the_first_split():
    splits = {"train": texts(4000), "test": texts(2000, seed=1)}
    partitions = FeatureClusterPartitioner(20, "text", 4, embed_topics, alpha=0.5).partition_splits(splits)
    first, second = shares_in_splits(partitions, splits, "topic")
    assert np.corrcoef(first.ravel(), second.ravel())[0, 1] > 0.9


def test_later_split_uses_the_clusters_of_the_first_split():
    train = Dataset.from_dict({"text": ["rain", "bread"] * 100})
    # One topic with two nearby embeddings. K-means on these rows alone would find two clusters.
    texts_of_one_topic = ["rain 1", "rain 12"] * 100
    partitioner = FeatureClusterPartitioner(4, "text", 2, embed_topics, alpha=1e-6)
    partition = partitioner.partition_splits(
        {"train": train, "test": Dataset.from_dict({"text": texts_of_one_topic})}
    )["test"]
    assert count_labels(partition, texts_of_one_topic).min() > 10  # each client has 50 rows


def test_text_columns_and_tokens_are_joined():
    seen = []

    def record(batch: list[str]) -> np.ndarray:
        seen.extend(batch)
        return np.zeros((len(batch), 1))

    dataset = Dataset.from_dict({"question": ["who", "why"], "answer": [["it", "is"], []], "other": [1.0, 2.0]})
    FeatureClusterPartitioner(1, ["question", "answer"], 1, record).partition(dataset)
    assert seen == ["who\nit is", "why\n"]


def test_rows_are_embedded_in_batches():
    sizes = []

    def record(batch: list[str]) -> np.ndarray:
        sizes.append(len(batch))
        return embed_topics(batch)

    FeatureClusterPartitioner(2, "text", 2, record, batch_size=40).partition(texts(100))
    assert sizes == [40, 40, 20]


def test_dataset_format_does_not_change_the_partition():
    dataset = texts(200)
    partitioner = FeatureClusterPartitioner(4, "text", 4, embed_topics)
    assert client_rows(partitioner.partition(dataset.with_format("torch"))) == client_rows(
        partitioner.partition(dataset)
    )


def test_encoder_is_loaded_from_path_without_using_global_random_generators(tmp_path):
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
    assert client_rows(partition) == client_rows(by_function.partition(dataset))
    assert by_path.settings()["embedder"] == str(tmp_path / "encoder")


@pytest.mark.parametrize(("module", "embedder"), [("sklearn", embed_topics), ("sentence_transformers", "a/model")])
def test_error_for_missing_package_names_the_extra(monkeypatch, module, embedder):
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
def test_embeddings_of_wrong_shape_or_not_finite_raise_error(embedder, message):
    with pytest.raises(ValueError, match=message):
        FeatureClusterPartitioner(2, "text", 2, embedder).partition(texts(10))


def test_embeddings_of_different_lengths_raise_error():
    partitioner = FeatureClusterPartitioner(2, "text", 2, lambda b: np.zeros((len(b), len(b))), batch_size=6)
    with pytest.raises(ValueError, match=r"returned shape \(4, 4\) for 4 texts"):
        partitioner.partition(texts(10))


def test_error_names_the_row_without_text():
    dataset = Dataset.from_dict({"text": ["rain"] * 5 + [None]})
    with pytest.raises(ValueError, match="the column 'text' of row 5 contains None, not a text"):
        FeatureClusterPartitioner(2, "text", 2, embed_topics, batch_size=4).partition(dataset)
    with pytest.raises(ValueError, match="the column 'number' of row 0 contains 1, not a text"):
        FeatureClusterPartitioner(1, "number", 1, embed_topics).partition(Dataset.from_dict({"number": [1, 2]}))


def test_too_few_rows_raise_error_before_texts_are_embedded():
    def fail(batch: list[str]) -> np.ndarray:
        raise AssertionError("embedded")

    with pytest.raises(
        ValueError, match="num_clusters=11, but the first split has 10 rows. Set num_clusters to at most 10"
    ):
        FeatureClusterPartitioner(2, "text", 11, fail).partition(texts(10))
    with pytest.raises(ValueError, match="FeatureClusterPartitioner: num_clients=11, but 10 rows are too few"):
        FeatureClusterPartitioner(11, "text", 2, fail).partition(texts(10))
    with pytest.raises(ValueError, match="2 rows of the split 'test' are too few for 3 clients"):
        FeatureClusterPartitioner(3, "text", 2, fail).partition_splits({"train": texts(10), "test": texts(2)})
    with pytest.raises(ValueError, match="no column 'words'"):
        FeatureClusterPartitioner(2, "words", 2, fail).partition(texts(10))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text_columns": []}, "text_columns must be the name of a column or a sequence of names"),
        ({"text_columns": [3]}, "text_columns must be the name of a column or a sequence of names"),
        ({"text_columns": 3}, "text_columns must be the name of a column or a sequence of names"),
        ({"text_columns": ""}, "text_columns must be the name of a column"),
        ({"embedder": None}, "embedder must be the name or path of a sentence encoder, or a function"),
        ({"num_clusters": True}, "num_clusters must be an integer of at least 1"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
    ],
)
def test_invalid_settings_raise_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        FeatureClusterPartitioner(**{"num_clients": 2, "text_columns": "text", **arguments})
