"""A trained head and its encoder become one model that takes texts."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from tiny import arguments
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from hf_federated import FederatedConfig, FederatedTrainer
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


def test_word_embeddings_in_place_of_token_ids_give_the_same_logits(model_dir):
    model = complete_model(head(), FrozenEncoder(model_dir))
    inputs = AutoTokenizer.from_pretrained(model_dir)(TEXTS, padding=True, return_tensors="pt")
    expected = model(**inputs).logits
    words = model.get_input_embeddings()(inputs.pop("input_ids"))
    torch.testing.assert_close(model(inputs_embeds=words, **inputs).logits, expected)


def test_feddrs_trains_a_complete_model(model_dir, tmp_path):
    encoder = FrozenEncoder(model_dir)
    encoded = dict(encoder.tokenizer(TEXTS * 4, padding=True)) | {"labels": [0, 1, 1] * 4}
    kwargs = {"num_samples": 4, "sample_length": 3, "num_steps": 2, "server_lr": 0.01}
    trainer = FederatedTrainer(
        model=complete_model(head(), encoder),
        args=arguments(tmp_path, per_device_train_batch_size=4),
        train_dataset={name: Dataset.from_dict(encoded) for name in "ab"},
        processing_class=encoder.tokenizer,
        federation=FederatedConfig(num_rounds=1, distillation="feddrs", distillation_kwargs=kwargs),
    )
    trainer.train()
    name = "federated/post_num_clients"
    assert [log[name] for log in trainer.state.log_history if name in log] == [2]
