"""Vocabulary overlap and the map of texts equal independent reference implementations."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
from datasets import Dataset
from labeled_rows import rows

from hf_federated.data import (
    FederatedDataset,
    describe_partition,
    vocabulary_overlap,
)
from hf_federated.data.statistics.text_statistics import text_map


TEXTS = {"cars": ["A fast car", "the engine"], "bikes": ["a fast BIKE"], "more": ["engine, car; the fast"]}


def text_clients(texts: dict[str, list[str]] = TEXTS) -> FederatedDataset:
    return FederatedDataset.from_dict(
        {name: Dataset.from_dict({"text": client_texts}) for name, client_texts in texts.items()}
    )


def test_overlap_is_the_jaccard_index_of_the_words():
    words = {name: set(re.findall(r"\b\w\w+\b", " ".join(texts).lower())) for name, texts in TEXTS.items()}
    assert words["cars"] == {"fast", "car", "the", "engine"}
    expected = [[len(a & b) / len(a | b) for b in words.values()] for a in words.values()]
    np.testing.assert_allclose(vocabulary_overlap(text_clients()), expected)


def test_words_do_not_span_two_texts():
    overlap = vocabulary_overlap(text_clients({"a": ["foot", "ball"], "b": ["football"], "c": ["foot ball"]}))
    assert overlap.tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 1]]


def test_sampled_texts_do_not_depend_on_other_clients():
    rng = np.random.default_rng(0)
    texts = {name: [f"w{number}" for number in rng.integers(10, 99, 50)] for name in "abc"}
    clients = text_clients(texts)
    overlap = vocabulary_overlap(clients, rows_per_client=10)
    assert np.array_equal(overlap, vocabulary_overlap(clients, rows_per_client=10))
    assert not np.array_equal(overlap, vocabulary_overlap(clients, rows_per_client=10, seed=1))
    assert not np.array_equal(overlap, vocabulary_overlap(clients, rows_per_client=None))
    # The order of the clients and the presence of other clients do not change the sample of a client.
    permuted = vocabulary_overlap(clients.select_clients(["c", "a"]), rows_per_client=10)
    assert np.array_equal(permuted, overlap[np.ix_([2, 0], [2, 0])])


def test_clients_without_words_overlap_only_with_each_other():
    overlap = vocabulary_overlap(text_clients({"a": ["word"], "b": ["?"], "c": ["!", ""]}))
    assert overlap.tolist() == [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
    with pytest.raises(ValueError, match="no client has a word in the column 'text'"):
        vocabulary_overlap(text_clients({"b": ["?"], "c": ["!"]}))


def test_missing_texts_or_other_types_raise_error():
    clients = FederatedDataset.from_column(Dataset.from_dict({"id": ["a", "b"], "text": ["word", None]}), "id")
    with pytest.raises(ValueError, match="Client 'b' has a row without a text in the column 'text'"):
        vocabulary_overlap(clients)
    clients = FederatedDataset.from_column(Dataset.from_dict({"id": ["a", "b"], "text": [1, 2]}), "id")
    with pytest.raises(TypeError, match="'text' has the type int64. Use a column of strings"):
        vocabulary_overlap(clients)
    with pytest.raises(ValueError, match="rows_per_client must be an integer of at least 1, or None"):
        vocabulary_overlap(text_clients(), rows_per_client=0)


def test_text_map_is_the_first_two_principal_components_of_tf_idf():
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


def test_text_map_of_too_few_texts_or_words_raises_error():
    with pytest.raises(ValueError, match="at least three texts and three words, got 2 texts and 2 words"):
        text_map(text_clients({"a": ["one word"], "b": ["word"]}))
    with pytest.raises(ValueError, match="all 3 texts have the same words"):
        text_map(text_clients({"a": ["one two three"] * 2, "b": ["three two one"]}))


def test_error_without_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    for function in (vocabulary_overlap, text_map):
        with pytest.raises(ImportError, match=r"pip install 'hf-federated\[metrics\]'"):
            function(text_clients())
    clients = FederatedDataset.from_column(rows(), "owner")
    assert describe_partition(clients, "label").labels is not None  # label statistics do not need it
