"""A trained head and its encoder become one model that takes texts."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from hf_federated.features import (
    FeatureClassifier,
    FeatureClassifierConfig,
    FrozenEncoder,
    FrozenLayers,
    complete_model,
)


TEXTS = ["a dull film", "a bright plot and a warm film and a cold plot", "warm"]


def head(feature_size=16):
    labels = {"id2label": {0: "dull", 1: "bright"}, "label2id": {"dull": 0, "bright": 1}}
    return FeatureClassifier(FeatureClassifierConfig(feature_size=feature_size, hidden_sizes=[5], **labels))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_saved_model_gives_the_logits_of_the_head_on_cached_features(model_dir, tmp_path, pooling):
    encoder, trained = FrozenEncoder(model_dir, pooling=pooling), head()
    complete_model(trained, encoder).save_pretrained(tmp_path)
    encoder.tokenizer.save_pretrained(tmp_path)
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path),
    )
    features = torch.tensor(encoder(TEXTS)["features"])
    expected = trained(features=features).logits
    torch.testing.assert_close(model(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits, expected)
    answers = pipeline("text-classification", model=model, tokenizer=tokenizer)(TEXTS)
    assert [each["label"] for each in answers] == [["dull", "bright"][number] for number in expected.argmax(1)]


def test_head_and_encoder_must_belong_together(model_dir):
    with pytest.raises(ValueError, match="The head has 8 features, but .* has 16"):
        complete_model(head(8), FrozenEncoder(model_dir))
    with pytest.raises(ValueError, match="A FeatureClassifier does not belong to a FrozenLayers"):
        complete_model(head(), FrozenLayers(model_dir, "embeddings"))
