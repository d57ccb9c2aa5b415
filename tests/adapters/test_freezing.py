"""Freezing from the embedding up: FedNLP's Table 3, and models of other shapes."""

from __future__ import annotations

import pytest
import torch
from tiny import arguments, rows, same_weights, tiny_model
from torch import nn
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_federated import FederatedConfig, FederatedTrainer
from hf_federated.adapters import Exchange, freeze_layers


def frozen(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def trainable(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


# ---- FedNLP, Table 3


def distilbert() -> PreTrainedModel:
    """DistilBERT's size with the classes of 20 Newsgroups, without memory for its weights."""
    with torch.device("meta"):
        return DistilBertForSequenceClassification(DistilBertConfig(num_labels=20))


def test_without_freezing_the_count_is_that_of_table_three():
    count = Exchange(distilbert()).num_values
    assert count == trainable(distilbert())
    assert round(count / 1e6, 1) == 67.0


@pytest.mark.parametrize(
    ("freeze", "millions"),
    [
        ("embeddings", 43.1),
        ("embeddings+1", 36.0),
        ("embeddings+2", 29.0),
        ("embeddings+3", 21.9),
        ("embeddings+4", 14.8),
        ("embeddings+5", 7.7),
        ("embeddings+6", 0.6),
    ],
)
def test_trainable_parameters_are_those_of_table_three(freeze, millions):
    model = distilbert()
    count = freeze_layers(model, freeze)
    assert count == trainable(model)
    assert round(count / 1e6, 1) == millions
    assert Exchange(model).num_values == count  # and nothing else travels


# ---- Other shapes


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=3, n_head=2))


def llama() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2))


def bart() -> PreTrainedModel:
    config = BartConfig(
        vocab_size=32,
        d_model=16,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=16,
        num_labels=2,
    )
    return BartForSequenceClassification(config)


MODELS = {"bert": tiny_model, "gpt2": gpt2, "llama": llama, "t5": t5, "bart": bart}
# The layers from the embedding up, an encoder's before a decoder's.
LAYERS = {
    "bert": [f"bert.encoder.layer.{i}." for i in range(2)],
    "gpt2": [f"transformer.h.{i}." for i in range(3)],
    "llama": [f"model.layers.{i}." for i in range(3)],
    "t5": [f"{part}.block.{i}." for part in ("encoder", "decoder") for i in range(2)],
    "bart": [f"model.encoder.layers.{i}." for i in range(2)] + [f"model.decoder.layers.{i}." for i in range(3)],
}
EMBEDDINGS = {
    "bert": ["bert.embeddings."],
    "gpt2": ["transformer.wte.", "transformer.wpe."],
    "llama": ["model.embed_tokens."],
    "t5": ["shared."],
    "bart": ["model.shared."],
}


@pytest.mark.parametrize("name", list(MODELS))
def test_layers_are_frozen_from_the_embedding_up(name):
    for number in range(len(LAYERS[name]) + 1):
        model = MODELS[name]()
        count = freeze_layers(model, str(number))
        expected = {n for n, _ in model.named_parameters() if n.startswith(tuple(LAYERS[name][:number]) or "-")}
        assert frozen(model) == expected
        assert count == trainable(model)


@pytest.mark.parametrize("name", list(MODELS))
def test_embeddings_are_frozen_and_nothing_else(name):
    model = MODELS[name]()
    freeze_layers(model, "embeddings")
    assert frozen(model) == {n for n, _ in model.named_parameters() if n.startswith(tuple(EMBEDDINGS[name]))}


@pytest.mark.parametrize("name", list(MODELS))
def test_both_are_frozen_in_either_order(name):
    expected = tuple(EMBEDDINGS[name] + LAYERS[name][:1])
    for freeze in ("embeddings+1", "1+embeddings"):
        model = MODELS[name]()
        freeze_layers(model, freeze)
        assert frozen(model) == {n for n, _ in model.named_parameters() if n.startswith(expected)}


@pytest.mark.parametrize("name", list(MODELS))
def test_more_layers_than_there_are_is_refused_with_their_number(name):
    model = MODELS[name]()
    with pytest.raises(ValueError, match=f"asks for 9 layers; {type(model).__name__} has {len(LAYERS[name])}"):
        freeze_layers(model, "9")
    assert not frozen(model)


@pytest.mark.parametrize("freeze", ["encoder", "-1", "1.5", "", "embeddings+", "embeddings 2", "all"])
def test_other_words_are_refused(freeze):
    with pytest.raises(ValueError, match="write 'embeddings', a number of layers, or 'embeddings"):
        freeze_layers(tiny_model(), freeze)


def test_a_model_that_is_not_from_transformers_is_refused():
    with pytest.raises(ValueError, match="`freeze` knows the layers of transformers models, not of Linear"):
        freeze_layers(nn.Linear(1, 1), "1")


# ---- In a run


def test_a_model_that_the_trainer_builds_itself_is_frozen_in_the_run_too(tmp_path):
    def run(**model) -> FederatedTrainer:
        trainer = FederatedTrainer(
            **model,
            args=arguments(tmp_path),
            train_dataset={"a": rows(4), "b": rows(4, seed=1)},
            federation=FederatedConfig(num_rounds=1, freeze="embeddings+1"),
        )
        trainer.train()
        return trainer

    given, built = run(model=tiny_model()), run(model_init=lambda: tiny_model())
    prefixes = ("bert.embeddings.", "bert.encoder.layer.0.")
    expected = [name for name, _ in tiny_model().named_parameters() if not name.startswith(prefixes)]
    assert built.exchange.names == given.exchange.names == expected
    assert built.ledger.to_dict() == given.ledger.to_dict()
    assert same_weights(built.model, given.model)
    parameters = dict(built.model.named_parameters())
    for name, parameter in tiny_model().named_parameters():
        assert torch.equal(parameters[name], parameter) == (name not in expected), name
