"""`ModuleParameters` finds what `Module.parameters` finds, also after the module has changed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from decoders import decoder
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from hf_federated import SplitModel
from hf_federated.split import BodyServer, LocalLink, Wire
from hf_federated.split.module_parameters import ModuleParameters


def trained(module: nn.Module) -> list[int]:
    return [id(parameter) for parameter in module.parameters() if parameter.requires_grad]


def found(parameters: ModuleParameters) -> list[int]:
    return list(map(id, parameters.trained()))


def freeze(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(False)


def add_adapter(model: nn.Module) -> None:
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), model)


def replace_block(model: nn.Module) -> None:
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])


def replace_weight(model: nn.Module) -> None:
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def share_weight(model: nn.Module) -> None:
    model.shared_module, model.shared_weight, model.no_module = model.lm_head, model.lm_head.weight, None
    model.register_parameter("no_weight", None)


@pytest.mark.parametrize("change", [freeze, add_adapter, replace_block, replace_weight, share_weight])
def test_parameters_are_found_after_a_change(change):
    model = decoder("llama")
    parameters = ModuleParameters(model)
    assert found(parameters) == trained(model)
    change(model)
    assert found(parameters) == trained(model)


def test_an_unchanged_module_is_searched_once(monkeypatch):
    """The slices of blocks that a forward pass creates do not count as changes."""
    model = decoder("llama")
    parameters = ModuleParameters(model)
    expected = found(parameters)
    model(torch.tensor([[1, 2, 3]]))
    ModuleParameters(decoder("llama")).trained()
    monkeypatch.setattr(model, "parameters", pytest.fail)
    assert found(parameters) == expected


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_finds_the_parameters_of_the_copied_module(copy_of):
    parameters = ModuleParameters(nn.Sequential(nn.Linear(2, 2)))
    parameters.trained()
    module, copied = copy_of((parameters._module, parameters))
    assert found(copied) == trained(module)
    assert not set(found(copied)) & set(found(parameters))
    module[0] = nn.Linear(2, 2, bias=False)
    assert found(copied) == trained(module)


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_failed_backward_pass_keeps_the_gradients_of_a_new_adapter(accumulated, monkeypatch):
    """The body gets an adapter after its server was created. A gradient that overflows changes nothing."""
    split = SplitModel.from_model(decoder("llama"))
    split.boundary.link = LocalLink(BodyServer(split.server_body, split.boundary.wire))
    split.add_adapter(LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"))
    tokens = torch.tensor([[1, 2, 3]])
    if accumulated:
        split(tokens, labels=tokens).loss.backward()
    before = {name: value.grad for name, value in split.server_body.named_parameters()}
    values = {name: None if value is None else value.clone() for name, value in before.items()}
    hidden = split(tokens).logits
    monkeypatch.setattr(Wire, "encode", lambda *args, **kwargs: {"values": torch.full((3, 32), 3e38)})
    with pytest.raises(ValueError, match="are not finite"):
        hidden.sum().backward()
    for name, value in split.server_body.named_parameters():
        assert value.grad is before[name]
        assert values[name] is None or torch.equal(value.grad, values[name])
    assert accumulated == any(value is not None for value in values.values())
