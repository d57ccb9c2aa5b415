"""Settings that the server and the clients must share: each difference is named with both values."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from datasets import Dataset
from distillation_setup import client_model
from federations import settings_of
from language import language_model, masking_tokenizer, sentences, tokenizer
from peft import LoraConfig, get_peft_model
from tiny import arguments, rows, tiny_model
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedTokenizerFast, TrainingArguments

from hf_federated import ClientSpec, FederatedConfig, FederatedTrainer
from hf_federated.tasks import LanguageModeling, TextClassification
from hf_federated.trainer.network_settings import NetworkSettings


ROUNDS = {"num_rounds": 1}
RAW = Dataset.from_dict({"text": ["snow1 snow2", "sand1"], "label": [0, 1]})


def settings(
    directory,
    model: nn.Module | None = None,
    federation: Any = (),
    args: Any = (),
    own_args: TrainingArguments | None = None,
    **kwargs: Any,
):
    """Return the settings of a client."""
    trainer = FederatedTrainer(
        model=model or tiny_model(),
        args=own_args or arguments(directory, **dict(args)),
        federation=FederatedConfig(**{**ROUNDS, **dict(federation)}),
        **{"train_dataset": {"north": rows(4)}, **kwargs},
    )
    return settings_of(trainer, "north")


def with_labels(*names: str) -> nn.Module:
    label2id = {name: label for label, name in enumerate(names)}
    return tiny_model(num_labels=len(names), id2label=dict(enumerate(names)), label2id=label2id)


def tiny_lora(shift: float = 0.0, **kwargs: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = get_peft_model(tiny_model(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"], **kwargs))
    model.base_model.model.bert.pooler.dense.weight.data += shift
    return model


def with_rank(**kwargs: Any) -> dict[str, Any]:
    """A client with its own LoRA configuration."""
    spec = ClientSpec(peft_config=LoraConfig(**kwargs))
    return {"model": tiny_lora(), "federation": {"aggregation": "stacked_lora"}, "clients": {"north": spec}}


def classification(*label_names: str) -> dict[str, Any]:
    return {
        "task": TextClassification(label_names=label_names),
        "train_dataset": {"north": RAW},
        "processing_class": masking_tokenizer(),
    }


def token_distillation(processing_class: Any) -> dict[str, Any]:
    return {
        "model": language_model(),
        "federation": {"distillation": "dsfl"},
        "task": LanguageModeling(),
        "train_dataset": {"north": Dataset.from_dict({"text": sentences("north", 4)})},
        "public_dataset": Dataset.from_dict({"text": sentences("south", 4)}),
        "processing_class": processing_class,
    }


def reordered_tokenizer() -> Any:
    """The tokenizer of `language`, with the ids of two words exchanged."""
    original = tokenizer()
    content = json.loads(original.backend_tokenizer.to_str())
    vocab = content["model"]["vocab"]
    vocab["snow1"], vocab["snow2"] = vocab["snow2"], vocab["snow1"]
    reordered = Tokenizer.from_str(json.dumps(content))
    special = original.special_tokens_map
    return PreTrainedTokenizerFast(tokenizer_object=reordered, **special)


def starts_with(text: str) -> Callable[[str, torch.Tensor], bool]:
    """A function whose name is the same for every text."""
    return lambda name, parameter: name.startswith(text)


def with_own_head() -> nn.Module:
    model = tiny_model()
    model.classifier.weight.data += 1.0
    return model


DSFL = {"federation": {"distillation": "dsfl"}, "public_dataset": rows(4, seed=5)}
FEDAUX = {"federation": {"distillation": "fedaux"}, "public_dataset": rows(4, seed=5)}
FEDED = {"federation": {"distillation": "feded"}, "public_dataset": rows(4, seed=5)}

# Name of the setting, arguments of the server, arguments of the client, and parts of both values.
Arguments = Callable[[], dict[str, Any]]
DIFFERENCES: dict[str, tuple[str, Arguments, Arguments, str, str]] = {
    "learning rate": ("learning_rate", lambda: {"args": {"learning_rate": 0.1}}, lambda: {}, "0.1", "0.01"),
    "local epochs": (
        "FederatedConfig.local_epochs",
        lambda: {"federation": {"local_epochs": 2}},
        lambda: {},
        "2",
        "1",
    ),
    "public examples": (
        "content of `public_dataset`",
        lambda: DSFL,
        lambda: {**DSFL, "public_dataset": rows(4, seed=6)},
        "",
        "",
    ),
    "order of the labels": (
        "labels",
        lambda: {"model": with_labels("low", "high")},
        lambda: {"model": with_labels("high", "low")},
        "{0: 'low', 1: 'high'}",
        "{0: 'high', 1: 'low'}",
    ),
    "last of many labels": (
        "labels",
        lambda: {"model": with_labels(*(f"label {number}" for number in range(99)), "low")},
        lambda: {"model": with_labels(*(f"label {number}" for number in range(99)), "high")},
        "0: 'label 0'",
        "0: 'label 0'",
    ),
    "labels of the task": (
        "task",
        lambda: classification("low", "high"),
        lambda: classification("high", "low"),
        "TextClassification with {0: 'low', 1: 'high'}",
        "TextClassification with {0: 'high', 1: 'low'}",
    ),
    "vocabulary": (
        "tokenizer",
        lambda: {"processing_class": tokenizer()},
        lambda: {"processing_class": masking_tokenizer()},
        "27 tokens",
        "28 tokens",
    ),
    "ids of tokens": (
        "tokenizer",
        lambda: {"processing_class": tokenizer()},
        lambda: {"processing_class": reordered_tokenizer()},
        "27 tokens",
        "27 tokens",
    ),
    "tokenizer of predicted tokens": (
        "tokenizer",
        lambda: token_distillation(tokenizer()),
        lambda: token_distillation(reordered_tokenizer()),
        "27 tokens",
        "27 tokens",
    ),
    "layout of the model": (
        "model",
        lambda: {},
        lambda: {"model": tiny_model(hidden_size=32)},
        "BertForSequenceClassification of",
        "BertForSequenceClassification of",
    ),
    "layout of a student whose parameters are only received": (
        "model",
        lambda: FEDED,
        lambda: {**FEDED, "model": tiny_model(num_hidden_layers=3)},
        "BertForSequenceClassification of",
        "BertForSequenceClassification of",
    ),
    "parameters that stay local": (
        "values of the parameters that are not exchanged",
        lambda: {"model": tiny_lora()},
        lambda: {"model": tiny_lora(0.1)},
        "SHA-256",
        "SHA-256",
    ),
    "scale of LoRA modules": (
        "ranks and scales of the LoRA modules",
        lambda: {"model": tiny_lora(lora_alpha=8)},
        lambda: {"model": tiny_lora(lora_alpha=16)},
        "rank 2 with scale 4",
        "rank 2 with scale 8",
    ),
    "LoRA configuration of a client": (
        "LoRA of client 'north'",
        lambda: with_rank(r=1, lora_alpha=4),
        lambda: with_rank(r=1, lora_alpha=8),
        "rank 1 with scale 4",
        "rank 1 with scale 8",
    ),
    "tensors that clients keep": (
        "names of the tensors that clients keep",
        lambda: {"federation": {"keep_local": starts_with("classifier.")}},
        lambda: {"federation": {"keep_local": starts_with("classifier.w")}},
        "2 (SHA-256",
        "1 (SHA-256",
    ),
    "largest number of examples": (
        "FederatedConfig.max_examples_per_client",
        lambda: {"federation": {"max_examples_per_client": 40}},
        lambda: {},
        "40",
        "not set",
    ),
    "numbers of examples of the clients": (
        "number of examples of each client",
        lambda: {"federation": {"max_examples_per_client": {"north": 4, "south": 9}}},
        lambda: {"federation": {"max_examples_per_client": {"north": 4, "south": 8}}},
        "2 clients (SHA-256",
        "2 clients (SHA-256",
    ),
    "patterns of exchanged tensors": (
        "FederatedConfig.exchange",
        lambda: {"federation": {"exchange": ["bert.*", "classifier.*"]}},
        lambda: {"federation": {"exchange": "*"}},
        "['bert.*', 'classifier.*']",
        "'*'",
    ),
    "initial parameters that give features": (
        "initial values of the exchanged parameters",
        lambda: FEDAUX,
        lambda: {**FEDAUX, "model": tiny_model(seed=1)},
        "SHA-256",
        "SHA-256",
    ),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_difference_is_named_with_both_values(tmp_path, difference):
    name, server, client, server_value, client_value = DIFFERENCES[difference]
    ours, theirs = settings(tmp_path, **server()), settings(tmp_path, **client())
    assert ours.differences(ours.to_dict()) == []
    lines = ours.differences(theirs.to_dict())
    found = next((line for line in lines if line.startswith(f"{name}: ")), None)
    assert found is not None, lines
    at_server, _, at_client = found.removeprefix(f"{name}: ").partition(" at the server, ")
    assert server_value in at_server and client_value in at_client
    assert at_server != at_client.removesuffix(" at the client") and len(found) < 1200
    assert lines == [found]


HARMLESS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "batch size and precision": ({}, lambda: {"args": {"per_device_train_batch_size": 2, "bf16": True}}),
    "initial parameters that the server replaces": ({}, lambda: {"model": tiny_model(seed=1)}),
    "initial values of a head that each client keeps": (
        {"federation": {"aggregation": "fedper"}},
        lambda: {"federation": {"aggregation": "fedper"}, "model": with_own_head()},
    ),
    "a party without a tokenizer": ({}, lambda: {"processing_class": masking_tokenizer()}),
    "model in a distillation": (DSFL, lambda: {**DSFL, "model": tiny_model(seed=1, num_hidden_layers=3)}),
    "a client without partition.json": ({"federation": {"max_examples_per_client": {"north": 4}}}, lambda: {}),
    "number of processes": ({}, lambda: {"federation": {"parallelism": "clients"}}),
}


@pytest.mark.parametrize("difference", HARMLESS)
def test_difference_that_the_method_allows_is_accepted(tmp_path, difference):
    server, client = HARMLESS[difference]
    assert settings(tmp_path, **server).differences(settings(tmp_path, **client()).to_dict()) == []


def test_arguments_of_the_class_of_a_trainer_are_compared_if_both_parties_have_them(tmp_path):
    @dataclass
    class Packing(TrainingArguments):
        packing: bool = False
        dataset_text_field: str = "text"

    def own(**kwargs: Any) -> NetworkSettings:
        base = arguments(tmp_path)
        return settings(tmp_path, own_args=Packing(tmp_path, learning_rate=base.learning_rate, use_cpu=True, **kwargs))

    ours, without = own(), settings(tmp_path)
    assert ours.differences(own(dataset_text_field="content").to_dict()) == []
    assert ours.differences(own(packing=True).to_dict()) == [
        "Packing.packing: False at the server, True at the client"
    ]
    assert ours.differences(without.to_dict()) == without.differences(ours.to_dict()) == []


def test_own_tokenizer_of_a_distillation_client_is_accepted(tmp_path):
    common = {
        "federation": {"distillation": "mhat"},
        **classification("low", "high"),
        "public_dataset": RAW.remove_columns("label"),
    }
    spec = ClientSpec(model=client_model("b"), processing_class=reordered_tokenizer())
    ours = settings(tmp_path, **common)
    assert ours.differences(settings(tmp_path, clients={"north": spec}, **common).to_dict()) == []


def test_initial_parameters_of_a_resumed_server_are_those_before_the_first_round(tmp_path):
    """The model of a resumed server has the parameters of the checkpoint. A client starts with the initial ones."""
    ours = settings(tmp_path, **FEDAUX)
    trainer = FederatedTrainer(
        model=tiny_model(seed=1),
        args=arguments(tmp_path),
        federation=FederatedConfig(**ROUNDS, distillation="fedaux"),
        train_dataset={"north": rows(4)},
        public_dataset=FEDAUX["public_dataset"],
    )
    initial = {name: value.detach() for name, value in tiny_model().named_parameters()}
    resumed = NetworkSettings.of(trainer._federation_setup, trainer.args, initial=initial)
    assert resumed.differences(ours.to_dict()) == []
