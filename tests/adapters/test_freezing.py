"""Tests of freezing from the embeddings upward: FedNLP's Table 3, and other model families."""

from __future__ import annotations

import pytest
import torch
from families import BERT, FAMILIES
from peft import LoraConfig, get_peft_model
from tiny import arguments, rows, same_weights, tiny_model
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedModel,
)

from hf_federated import FederatedConfig, FederatedTrainer
from hf_federated.adapters import Exchange, freeze_layers


def frozen(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def trainable(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


# ---- FedNLP, Table 3


def distilbert() -> PreTrainedModel:
    """DistilBERT at full size with the 20 classes of 20 Newsgroups, on the meta device to save memory."""
    with torch.device("meta"):
        return DistilBertForSequenceClassification(DistilBertConfig(num_labels=20))


def test_unfrozen_parameter_count_matches_table_three():
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
def test_trainable_parameter_count_matches_table_three(freeze, millions):
    model = distilbert()
    count = freeze_layers(model, freeze)
    assert count == trainable(model)
    assert round(count / 1e6, 1) == millions
    assert Exchange(model).num_values == count  # frozen parameters are not exchanged


# ---- Other model families


families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())


@families
def test_layers_are_frozen_from_embeddings_upward(family):
    for number in range(len(family.layers) + 1):
        model = family.build()
        count = freeze_layers(model, str(number))
        expected = {n for n, _ in model.named_parameters() if n.startswith(tuple(family.layers[:number]) or "-")}
        assert frozen(model) == expected | frozen(family.build())  # Marian's sinusoidal positions are always frozen
        assert count == trainable(model)


@families
def test_embeddings_freezes_exactly_parameters_before_first_layer(family):
    model = family.build()
    freeze_layers(model, "embeddings")
    found = [{n for n, _ in model.named_parameters() if n.startswith(prefix)} for prefix in family.embeddings]
    assert all(found) and frozen(model) == set.union(*found)


@families
def test_embeddings_and_layers_can_be_given_in_either_order(family):
    expected = tuple(family.embeddings + family.layers[:1])
    for freeze in ("embeddings+1", "1+embeddings"):
        model = family.build()
        freeze_layers(model, freeze)
        assert frozen(model) == {n for n, _ in model.named_parameters() if n.startswith(expected)}


@families
def test_too_many_layers_raises_with_number_of_layers(family):
    model = family.build()
    with pytest.raises(ValueError, match=f"asks for 9 layers; {family.model} has {len(family.layers)}"):
        freeze_layers(model, "embeddings+9")
    assert not frozen(model) - frozen(family.build())


@pytest.mark.parametrize(("num_groups", "allowed"), [(1, "0 or 4"), (2, "0, 2 or 4")])
def test_layers_with_shared_weights_are_frozen_together(num_groups, allowed):
    def albert() -> PreTrainedModel:
        return AlbertForSequenceClassification(
            AlbertConfig(**BERT, embedding_size=8, num_hidden_layers=4, num_hidden_groups=num_groups)
        )

    for number in range(5):
        model = albert()
        groups = [f"albert.encoder.albert_layer_groups.{i}." for i in range(number * num_groups // 4)]
        if len(groups) * 4 != number * num_groups:
            with pytest.raises(ValueError, match=f"asks for {number} layers, but Albert.* to {allowed} layers"):
                freeze_layers(model, f"embeddings+{number}")
            assert not frozen(model)
        else:
            before = tuple(["albert.embeddings.", "albert.encoder.embedding_hidden_mapping_in.", *groups])
            freeze_layers(model, f"embeddings+{number}")
            assert frozen(model) == {n for n, _ in model.named_parameters() if n.startswith(before)}


@pytest.mark.parametrize("freeze", ["encoder", "-1", "1.5", "", "embeddings+", "embeddings 2", "all"])
def test_invalid_freeze_value_raises(freeze):
    with pytest.raises(ValueError, match="use 'embeddings', a number of layers, or 'embeddings"):
        freeze_layers(tiny_model(), freeze)


@pytest.mark.parametrize("wrapped", [False, True])
def test_model_outside_transformers_raises(wrapped):
    model = get_peft_model(tiny_model(), LoraConfig(target_modules=["query"])) if wrapped else nn.Linear(1, 1)
    before = frozen(model)
    with pytest.raises(ValueError, match=f"got {type(model).__name__}. PEFT .*Freeze a model before wrapping it"):
        freeze_layers(model, "1")
    assert frozen(model) == before


# ---- In a training run


def test_model_from_model_init_is_frozen_like_given_model(tmp_path):
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
