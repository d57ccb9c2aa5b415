"""Selections of exchanged and local tensors: words, patterns and functions."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from torch import nn
from transformers import BertModel, GPT2Config, GPT2LMHeadModel

from hf_federated.adapters import Exchange, ModelMismatchError


HEAD = ["classifier.weight", "classifier.bias"]


class Normalized(nn.Module):
    """A body, a batch normalization with an integer buffer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)


def is_head(name: str, parameter: torch.Tensor) -> bool:
    return name.startswith("head.")


def is_body(name: str, parameter: torch.Tensor) -> bool:
    return name.startswith("body.")


def lora() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return get_peft_model(tiny_model(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))


def randomized(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(value) if value.is_floating_point() else value + 1 for name, value in state.items()}


# ---- Which tensors


@pytest.mark.parametrize("keep_local", ["classifier*", ["*classifier.weight", "classifier.b?as"], "head"])
def test_patterns_select_local_parameters(keep_local):
    model = tiny_model()
    exchange = Exchange(model, keep_local=keep_local)
    assert exchange.local_names == HEAD
    assert exchange.names == [name for name, _ in model.named_parameters() if name not in HEAD]
    assert list(exchange.trainable) == exchange.names
    assert exchange.num_values + exchange.num_local_values == Exchange(model).num_values


@pytest.mark.parametrize(
    ("exchange", "keep_local"),
    [
        (["body.*", "norm.*"], "head.*"),
        (["body.*", "norm.*"], is_head),
        (lambda name, parameter: not is_head(name, parameter), "head.*"),
        ("*", "head.*"),
    ],
)
def test_patterns_and_functions_select_exchanged_tensors_of_trainable(exchange, keep_local):
    model = Normalized()
    found = Exchange(model, exchange, keep_local)
    assert found.kind == "selected"
    assert found.names == Exchange(model, "trainable", "head.*").names
    assert "norm.running_mean" in found.names and found.local_names == ["head.weight", "head.bias"]


def test_frozen_tensors_do_not_match_a_pattern_of_exchange():
    model = tiny_model()
    model.bert.embeddings.requires_grad_(False)
    assert Exchange(model, "*").names == Exchange(model, "trainable").names


def test_buffers_can_be_local_without_the_parameters_of_their_module():
    exchange = Exchange(Normalized(), keep_local="norm.running_*")
    assert exchange.local_names == ["norm.running_mean", "norm.running_var"]
    assert {"norm.weight", "norm.num_batches_tracked"} <= set(exchange.names)


def test_all_exchanges_frozen_tensors_that_are_not_local():
    model = Normalized()
    model.body.requires_grad_(False)
    exchange = Exchange(model, "all", "head.*")
    assert set(exchange.names) == {name for name in model.state_dict() if not name.startswith("head.")}


def test_head_of_an_adapter_is_its_modules_to_save():
    model = lora()
    exchange = Exchange(model, keep_local="head")
    assert exchange.kind == "adapter"
    assert exchange.local_names == [
        f"base_model.model.classifier.modules_to_save.default.{kind}" for kind in ("weight", "bias")
    ]
    assert exchange.names and all(".lora_" in name for name in exchange.names)


def test_parameters_outside_the_adapter_may_be_local():
    model = lora()
    model.base_model.model.bert.pooler.requires_grad_(True)
    with pytest.raises(ValueError, match=r"outside the adapter.*pooler.*`keep_local`"):
        Exchange(model)
    exchange = Exchange(model, keep_local="*.pooler.*")
    assert len(exchange.local_names) == 2 and all(".pooler." in name for name in exchange.local_names)


# ---- Errors


TIED = GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)


@pytest.mark.parametrize(
    ("model", "exchange", "keep_local", "message"),
    [
        (tiny_model, "auto", "classifer*", "'classifer\\*' of `keep_local` matches no tensor.*'classifier.bias'"),
        (tiny_model, "auto", ["head*", "classifier*"], "'head\\*' of `keep_local` matches no tensor"),
        (tiny_model, "auto", lambda name, value: False, "function `keep_local` selects no tensor"),
        (tiny_model, "brt.*", None, "'brt.\\*' of `exchange` matches no tensor.*'bert"),
        (
            tiny_model,
            "bert.*",
            None,
            "2 trainable parameters are not selected by `exch.*'classifier.weight'.*keep_local",
        ),
        (Normalized, is_body, "head.*", "2 trainable parameters are not selected by `exch.*'norm.weight'.*freeze"),
        (tiny_model, "auto", "*", "`keep_local` selects all .*nothing is left to exchange.*aggregation='local_only'"),
        (Normalized, "auto", "head", "keep_local='head' needs a transformers or PEFT model, got Normalized.*pattern"),
        (lambda: BertModel(tiny_model().config), "auto", "head", "no trainable parameter outside its base model"),
        (lambda: GPT2LMHeadModel(TIED), "auto", "head", "no trainable parameter outside its base model 'transformer'"),
    ],
)
def test_selection_without_use_is_refused_with_a_name_and_the_remedy(model, exchange, keep_local, message):
    with pytest.raises(ValueError, match=message):
        Exchange(model(), exchange, keep_local)


# ---- Values


def test_every_write_restores_the_initial_local_tensors():
    model = Normalized()
    exchange = Exchange(model, keep_local=["head.*", "norm.*"])
    initial = exchange.read_local()
    assert set(initial) == {name for name in model.state_dict() if not name.startswith("body.")}
    own = randomized(initial)
    exchange.write_local(own, "north")
    assert all(torch.equal(exchange.read_local()[name], value) for name, value in own.items())
    received = randomized(exchange.read())
    exchange.write(received)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in {**initial, **received}.items())
    exchange.write_local(own, "north")
    exchange.write_local(None, "south")
    assert all(torch.equal(exchange.read_local()[name], value) for name, value in initial.items())


def test_reads_and_writes_leave_local_tensors_out():
    exchange = Exchange(tiny_model(), keep_local="head")
    assert not set(exchange.read()) & set(HEAD) and not set(exchange.tensors) & set(HEAD)
    assert set(exchange.read_local()) == set(HEAD)


def test_saved_local_tensors_of_another_model_are_refused_by_name():
    exchange = Exchange(tiny_model(), keep_local="head")
    saved = Exchange(tiny_model(num_labels=3), keep_local="head").read_local()
    with pytest.raises(ModelMismatchError, match=r"client 'north'.*'classifier.bias' has the shape \(3,\)"):
        exchange.write_local(saved, "north")


def test_training_may_not_freeze_local_parameters():
    model = tiny_model()
    exchange = Exchange(model, keep_local="head")
    model.classifier.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="'classifier.bias' ceased to train on this client"):
        exchange.check_unchanged(model)
    assert model.classifier.bias.requires_grad
