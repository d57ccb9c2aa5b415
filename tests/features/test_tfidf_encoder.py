"""TF-IDF weights with a singular value decomposition, for machines without a model."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer

from hf_federated.features import TfidfEncoder


TEXTS = ["a warm film", "a cold film", "a cold plot", "a warm and bright plot", "dull plot", "bright film not dull"]


def test_features_are_those_of_scikit_learn_with_length_one():
    weights = TfidfVectorizer(sublinear_tf=True).fit_transform(TEXTS)
    expected = TruncatedSVD(3, random_state=0).fit(weights).transform(weights)
    features = TfidfEncoder(num_components=3).fit(TEXTS)(TEXTS)["features"]
    np.testing.assert_allclose(features, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-6)
    assert features.dtype == np.float32


def test_text_without_known_words_has_zero_features():
    assert TfidfEncoder(num_components=2).fit(TEXTS)(["unknown words", ""])["features"].tolist() == [[0, 0], [0, 0]]


def test_pairs_are_joined():
    encoder = TfidfEncoder(num_components=2).fit(TEXTS)
    assert (encoder(["warm"], ["film"])["features"] == encoder(["warm film"])["features"]).all()


def test_saved_encoder_gives_the_same_features_and_key(tmp_path):
    encoder = TfidfEncoder(num_components=2).fit(TEXTS)
    encoder.save_pretrained(tmp_path)
    loaded = TfidfEncoder.from_pretrained(tmp_path)
    assert loaded.digest == encoder.digest != TfidfEncoder(num_components=2).fit(TEXTS[1:]).digest
    assert (loaded(TEXTS)["features"] == encoder(TEXTS)["features"]).all()


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(ValueError, match="The TfidfEncoder is not fitted"):
        TfidfEncoder(num_components=2)(TEXTS)
    with pytest.raises(ValueError, match="`num_components` is 6, but there are 6 texts with 8 different words"):
        TfidfEncoder(num_components=6).fit(TEXTS)
    with pytest.raises(ValueError, match="`num_components` is 0; it must be at least 1"):
        TfidfEncoder(num_components=0)
    TfidfEncoder(num_components=2).fit(TEXTS).save_pretrained(tmp_path)
    TfidfEncoder(num_components=3).fit(TEXTS).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "tfidf.safetensors").replace(tmp_path / "tfidf.safetensors")
    with pytest.raises(ValueError, match="Save the encoder again"):
        TfidfEncoder.from_pretrained(tmp_path)
