"""Memory and floating point operations of a training step, computed without weights.

The step runs on fake tensors (`torch._subclasses.FakeTensorMode`), which have shapes and dtypes but no values. A
dispatch mode counts the bytes of all tensors that are alive at the same time, and torch's `FlopCounterMode` counts the
floating point operations of matrix products, convolutions and attention.

The counts hold for the kernels that torch selects on a CPU. Kernels of a GPU can need other temporary memory. The
memory of the allocator, the libraries and the process is not counted.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode
from transformers import Trainer, TrainingArguments

from hf_federated._compat import enable_activation_checkpointing


@dataclass(frozen=True)
class StepCost:
    """
    The cost of a party's training step.

    Args:
        num_parameters (`int`): Number of parameters of the party. A shared parameter counts once.
        num_trainable (`int`): Number of trainable parameters.
        weights (`int`): Bytes of parameters and buffers.
        gradients (`int`): Bytes of the gradients of the trainable parameters.
        optimizer_state (`int`, *optional*): Bytes of the state of the optimizer. `None` if the optimizer cannot be
            created on this machine.
        activations (`int`): Bytes of all other tensors that are alive at the end of the forward pass of a micro-batch.
        peak (`int`): Largest number of bytes that are alive at the same time, without the state of the optimizer.
        flops (`int`): Floating point operations of forward and backward pass of a micro-batch.
        forward_flops (`int`): Floating point operations of the forward pass.
    """

    num_parameters: int
    num_trainable: int
    weights: int
    gradients: int
    optimizer_state: int | None
    activations: int
    peak: int
    flops: int
    forward_flops: int

    @property
    def total(self) -> int:
        """Largest number of bytes that are alive at the same time, with the state of the optimizer."""
        return self.peak + (self.optimizer_state or 0)


class LiveBytes(TorchDispatchMode):
    """
    Count the bytes of the tensors that operations create and that are alive.

    Args:
        known (`Iterable[torch.Tensor]`): Tensors that are not counted, such as the parameters.

    Attributes:
        live (`int`): Bytes that are alive.
        peak (`int`): The largest value of `live`.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._count(value)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, num_bytes)

    def _free(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live -= num_bytes


# A pass of a party: `run()` runs the forward pass and returns a function that runs the backward pass.
Pass = Callable[[], Callable[[], None]]


def step_cost(module: nn.Module, args: TrainingArguments, build: Callable[[], Pass]) -> StepCost:
    """
    Compute the cost of a training step.

    Args:
        module (`torch.nn.Module`): All modules of the party, on the meta device. Their tensors become fake tensors.
        args (`TrainingArguments`): The training arguments: optimizer, mixed precision and gradient accumulation.
        build (`Callable[[], Callable]`): Creates the inputs and returns the pass of a micro-batch. It is called with
            fake tensors enabled.
    """
    state = optimizer_state_bytes(module, args)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        make_fake(module)
        module.train()
        run = build()
        tensors = [*module.parameters(), *module.buffers()]
        live, counter = LiveBytes(tensors), FlopCounterMode(display=False)
        with live, counter, _autocast(args):
            backward = run()
            activations, forward_flops = live.live, counter.get_total_flops()
            backward()
            flops = counter.get_total_flops()
            del backward
            if args.gradient_accumulation_steps > 1:  # the next micro-batch starts with the gradients of the first
                run()()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    weights = sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
    return StepCost(
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        num_trainable=sum(parameter.numel() for parameter in trained),
        weights=weights,
        gradients=sum(parameter.nbytes for parameter in trained),
        optimizer_state=state,
        activations=activations,
        peak=weights + live.peak,
        flops=flops,
        forward_flops=forward_flops,
    )


def checkpoint_activations(model: Any) -> None:
    """
    Enable activation checkpointing for the computation of a cost.

    The reentrant variant needs the memory of the other variant, which does not free tensors under a dispatch mode.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The model.
    """
    model.enable_input_require_grads()  # without gradients of its inputs, the reentrant variant has no backward pass
    enable_activation_checkpointing(model, {"use_reentrant": True})


def _autocast(args: TrainingArguments) -> Any:
    if not (args.bf16 or args.fp16):
        return nullcontext()
    return torch.autocast("cpu", torch.bfloat16 if args.bf16 else torch.float16)


def make_fake(module: nn.Module) -> None:
    """Replace all parameters and buffers by fake tensors on the CPU. A fake tensor mode must be active."""
    replaced: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in replaced:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            replaced[id(tensor)] = empty
        return replaced[id(tensor)]

    for owner in module.modules():
        for tensors in (owner.named_parameters, owner.named_buffers):
            for name, tensor in list(tensors(recurse=False, remove_duplicate=False)):
                setattr(owner, name, fake(tensor))


def optimizer_state_bytes(module: nn.Module, args: TrainingArguments) -> int | None:
    """
    Compute the bytes of the optimizer's state.

    The optimizer takes a step on one small tensor for each dtype and number of dimensions, and the sizes of its state
    are scaled to the shapes of the parameters.

    Args:
        module (`torch.nn.Module`): The trained module.
        args (`TrainingArguments`): The training arguments.

    Returns:
        `int`, *optional*: The bytes, or `None` if the optimizer cannot be created on this machine.
    """
    total = 0
    known: dict[tuple[int, torch.dtype], list[tuple[tuple[int, ...], int]]] = {}
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        key = (parameter.ndim, parameter.dtype)
        if key not in known:
            try:
                known[key] = _state_layout(*key, args)
            except (ImportError, RuntimeError, ValueError, TypeError):
                return None
        for dimensions, item_size in known[key]:
            total += math.prod(parameter.shape[dimension] for dimension in dimensions) * item_size
    return total


# Sizes of the dimensions of a small tensor, all different.
_SIZES = (3, 5, 7, 11, 13, 17)


def _state_layout(ndim: int, dtype: torch.dtype, args: TrainingArguments) -> list[tuple[tuple[int, ...], int]]:
    """Return the dimensions of the parameter that each tensor of the optimizer's state has, and its item size."""
    parameter = nn.Parameter(torch.zeros(_SIZES[:ndim], dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    model = nn.Module()
    model.register_parameter("weight", parameter)
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
    optimizer = cls([parameter], **kwargs)
    optimizer.step()
    layout = []
    for value in tree_iter(optimizer.state[parameter]):
        if isinstance(value, torch.Tensor):
            dimensions = tuple(_SIZES.index(size) for size in value.shape if size in _SIZES[:ndim])
            layout.append((dimensions, value.element_size()))
    return layout


def model_pass(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Pass:
    """
    Return the pass of a model that computes its loss.

    Args:
        model (`torch.nn.Module`): The model.
        inputs (`Mapping[str, torch.Tensor]`): The keyword arguments of the model, with labels.
    """
    return lambda: model(**inputs).loss.backward


def token_ids(shape: tuple[int, ...]) -> torch.Tensor:
    """Return token ids or labels of a batch."""
    return torch.zeros(shape, dtype=torch.int64)
