"""The shards of parameters that a process holds under FSDP2, and whole tensors for what leaves the processes.

FSDP2 replaces each parameter of a model by a `DTensor`, of which each process holds some rows. This module is the only
one that reads it. A tensor whose rows are fewer than the processes has an empty shard in some of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


M = TypeVar("M")
# The fields of messages with a tensor for each exchanged tensor.
_FIELDS = ("state", "extra")


def values_here(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor that this process holds, without gradients. They share memory with the tensor."""
    values = tensor.detach()
    return values.to_local() if isinstance(values, DTensor) else values


def parameters_here(parameters: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
    """Return parameters whose values and gradients are those that this process holds, and share their memory."""
    if not any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        return parameters
    local: dict[str, nn.Parameter] = {}
    for name, parameter in parameters.items():
        local[name] = nn.Parameter(values_here(parameter), requires_grad=parameter.requires_grad)
        local[name].grad = None if parameter.grad is None else values_here(parameter.grad)
    return local


def is_divided_when_loaded(model: nn.Module) -> bool:
    """Whether `from_pretrained` divided the parameters of a model over processes, for example with `tp_plan`."""
    return not isinstance(model, FSDPModule) and any(isinstance(value, DTensor) for value in model.parameters())


def free_unsharded(model: nn.Module) -> None:
    """
    Free the whole parameters that modules of FSDP2 keep after a forward pass without a backward pass.

    Otherwise, the next forward pass would use them instead of the shards, which may have other values by then.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def with_tied_weights(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Let the whole tensors of tied weights share memory, so that a file contains them once."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(value), name) for name, value in model.state_dict(keep_vars=True).items()}
    return {name: state.get(names.get(name, name), value) for name, value in state.items()}


def optimizer_state_here(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer, with the values that this process holds."""
    state = optimizer.state_dict()
    if not _sharded_parameters(optimizer):
        return state
    entries = {
        number: {name: values_here(value) if isinstance(value, DTensor) else value for name, value in entry.items()}
        for number, entry in state["state"].items()
    }
    return {**state, "state": entries}


def load_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load the state that [`optimizer_state_here`] returned."""
    sharded = _sharded_parameters(optimizer)
    # As in torch, a state has the number of a parameter in the order of the groups.
    entries = {
        number: {
            name: _as_shard_of(sharded[number], value)
            if number in sharded and torch.is_tensor(value) and value.shape == sharded[number].to_local().shape
            else value
            for name, value in entry.items()
        }
        for number, entry in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": entries} if sharded else state)


def parameters_of_groups(optimizer: Optimizer) -> list[list[Any]]:
    """Return the parameters of the groups of an optimizer, if FSDP2 has sharded them. Otherwise an empty list."""
    return [list(group["params"]) for group in optimizer.param_groups] if _sharded_parameters(optimizer) else []


def _sharded_parameters(optimizer: Optimizer) -> dict[int, DTensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {number: value for number, value in enumerate(parameters) if isinstance(value, DTensor)}


def _as_shard_of(like: DTensor, value: torch.Tensor) -> DTensor:
    """Return a tensor that is divided as another tensor, from the shard of this process."""
    return DTensor.from_local(
        value.to(like.device), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


class ShardedTensors:
    """
    Convert messages between shards and whole tensors.

    Args:
        tensors (`Mapping[str, torch.Tensor]`): The exchanged tensors of a model, by name.

    Attributes:
        shapes (`dict[str, torch.Size]`): Shapes of the whole tensors that are divided over processes, by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def shards_of(self, message: M) -> M:
        """Return a message with the shards of this process, from a message with whole tensors."""
        return self._converted(message, self._shard)

    def whole(self, message: M, keep: bool) -> M:
        """
        Return a message with whole tensors, from a message with shards. All processes must call this method.

        One tensor at a time is whole in a process that does not keep them.

        Args:
            message ([`Message`]): A message. Fields without exchanged tensors stay as they are.
            keep (`bool`): Whether this process needs the message.
        """

        def gather(name: str, value: torch.Tensor) -> torch.Tensor:
            whole = _as_shard_of(self._tensors[name], value).full_tensor()
            return whole.to(value.device) if keep else value

        return self._converted(message, gather)

    def _shard(self, name: str, value: torch.Tensor) -> torch.Tensor:
        like = self._tensors[name]
        if value.shape != like.shape:
            return value  # The check of the message names it.
        placed = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
        # A copy, so that the whole tensor can be freed.
        return placed.to_local().to(value.device, copy=True)

    def _converted(self, message: M, convert: Any) -> M:
        changed = {
            field: {
                name: convert(name, value) if name in self._tensors else value
                for name, value in getattr(message, field).items()
            }
            for field in _FIELDS
            if getattr(message, field, None)
        }
        return dataclasses.replace(message, **changed) if changed else message  # type: ignore[type-var]
