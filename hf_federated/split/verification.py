"""Check that the parts of a split model compute what the whole model computes.

The check runs the first time that a process splits a model of a class, config, layout, cut and dtype, if all parts are
in the process and on one device. It compares the logits of a small random batch without padding, with left padding and
with a cache. It changes neither weights nor modes nor the state of a random generator.

The check cannot find a difference that only long sequences show, such as a sliding window of other blocks that is
longer than the batch. It does not run

- for parts that a client or a server loads without the other parts;
- for models on the meta device or on several devices;
- for layouts with a runner. The model classes that need a runner are written for other versions of `transformers`, in
  which the whole model may not run.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers.quantizers_utils import get_module_from_name

from .._compat import CACHE_NAME, cache_argument
from ..utils.random import preserved_generators
from .cut import ROLES, Role
from .layouts import PAGE
from .parts import Part


# Size of the batch. A longer batch is slower and shows no other differences, except those of longer sliding windows.
_BATCH_SIZE, _LENGTH, _PADDING, _STEPS = 2, 8, 3, 2
# The largest sliding window that the batch exceeds.
_LONGEST_WINDOW = 32
# Largest difference that rounding explains, relative to the largest logit. The parts run the operations of the whole
# model, so most differences are zero.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2}
_LARGEST_TOLERANCE = 6e-2

# What this process has checked: classes, configs, layouts, cuts and dtypes. Clear the set to repeat the checks.
verified: set[tuple[object, ...]] = set()


def verify_parts(parts: Mapping[Role, Part], config: PretrainedConfig, model: PreTrainedModel | None = None) -> None:
    """
    Check that the parts compute what the whole model computes, if this process has not checked such parts before.

    Args:
        parts (`Mapping[str, Part]`): All parts by role.
        config (`PretrainedConfig`): The config of the full model.
        model (`PreTrainedModel`, *optional*):
            The full model. By default a model of the class of the parts is created, which shares their parameters.

    Raises:
        ValueError: If a difference is larger than rounding explains.
    """
    head = parts["head"]
    devices = {parameter.device for part in parts.values() for parameter in part.parameters()}
    if head.layout.runner is not None or len(devices) > 1 or torch.device("meta") in devices:
        return
    # What decides how the parts compute.
    key = type(head.model), repr(config.to_dict()), repr(head.layout), head.cut, head.dtype
    if key in verified:
        return
    if model is None:
        model = _whole_model(parts, config)
    replaced: list[tuple[nn.Module, str, Any]] = [
        *((module, "training", False) for part in (model, *parts.values()) for module in part.modules()),
        # A PEFT model has its prefix outside of the base model.
        *((part, "prefix", None) for part in parts.values()),
        *_unrounded_buffers(parts.values(), model),
    ]
    with _replaced(replaced), preserved_generators(), torch.no_grad():
        with torch.autocast(next(iter(devices)).type, enabled=False):
            _compare(parts, model)
    verified.add(key)


def _compare(parts: Mapping[Role, Part], model: PreTrainedModel) -> None:
    """
    Compare the logits of the whole model and of the parts.

    Raises:
        ValueError: If a difference is larger than rounding explains.
    """
    ids, mask = check_batch(parts["head"])
    for name, given, tokens in (("without padding", None, torch.ones_like(mask)), ("with left padding", mask, mask)):
        expected = model(input_ids=ids, attention_mask=given, use_cache=False).logits
        _check(name, parts, expected, _run(parts, ids, given), tokens)
    with _errors_of_parts(parts):
        caches = {role: part.new_cache() for role, part in parts.items()}
    past = None
    start = 0
    for stop in range(ids.shape[1] - _STEPS, ids.shape[1] + 1):
        seen, new_ids = mask[:, :stop], ids[:, start:stop]
        output = model(input_ids=new_ids, attention_mask=seen, use_cache=True, **{cache_argument(model): past})
        past = output.get(CACHE_NAME)
        if past is None:  # the class has no cache
            return
        _check("with a cache", parts, output.logits, _run(parts, new_ids, seen, caches), mask[:, start:stop])
        start = stop


def _check(
    name: str, parts: Mapping[Role, Part], expected: torch.Tensor, actual: torch.Tensor, mask: torch.Tensor
) -> None:
    tokens = mask.bool()
    # Half-precision models with random weights can overflow.
    expected, actual = (torch.nan_to_num(logits.float())[tokens] for logits in (expected, actual))
    largest = float(expected.abs().max())
    difference = float((actual - expected).abs().max())
    allowed = TOLERANCES.get(parts["head"].dtype, _LARGEST_TOLERANCE) * largest
    if difference > allowed:
        raise ValueError(
            f"The parts of {type(parts['tail'].model).__name__} do not compute what the whole model computes: {name}, "
            f"the logits differ by {difference:.1e}, but rounding explains at most {allowed:.1e} (the largest logit "
            f"is {largest:.1e}). Either the layout does not describe the class: add what the class computes before "
            "the first block to head_settings or head_modules, and what it computes after the last block to "
            "tail_modules. Or the model was changed after its creation: make the change in the config or in a model "
            "class, from which the parts are created."
        )


def _run(
    parts: Mapping[Role, Part],
    ids: torch.Tensor,
    mask: torch.Tensor | None,
    caches: Mapping[Role, object] | None = None,
) -> torch.Tensor:
    """Run the parts one after the other, without messages."""
    states = ids
    with _errors_of_parts(parts):
        for role in ROLES:
            cache = None if caches is None else caches[role]
            states = parts[role](states, mask, None, cache, use_cache=cache is not None).logits
    return states


@contextlib.contextmanager
def _errors_of_parts(parts: Mapping[Role, Part]) -> Iterator[None]:
    """
    Replace the errors of a model class that runs as a part.

    Raises:
        ValueError: If the parts do not run, except for a lack of memory.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"The whole {type(parts['tail'].model).__name__} runs, but its parts do not ({type(error).__name__}: "
            f"{error}). Correct the layout, see {PAGE}. Models with linear attention need transformers 5.24 or later."
        ) from error


def check_batch(head: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Create the batch of a check.

    Args:
        head ([`Part`]): The client's first blocks.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Random token ids, and a mask in which the first sequence has padding on
        the left. If the batch is long enough, the sequences exceed the sliding window.
    """
    embedding = head.model.get_submodule(head.layout.embedding)
    weight = next(embedding.parameters())
    window = getattr(head.model.config, "sliding_window", None) or 0
    length = window + _STEPS if _LENGTH <= window <= _LONGEST_WINDOW else _LENGTH
    length = max(min(length, head.max_positions or length), _STEPS + 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(weight), (_BATCH_SIZE, length), generator=generator).to(weight.device)
    mask = torch.ones_like(ids)
    mask[0, : min(_PADDING, length - _STEPS - 1)] = 0
    return ids, mask


def _whole_model(parts: Mapping[Role, Part], config: PretrainedConfig) -> PreTrainedModel:
    """Create the whole model with the parameters and buffers of the parts."""
    with init_empty_weights(include_buffers=False):
        model = type(parts["head"].model)(copy.deepcopy(config))
    for part in parts.values():
        for name, value in part.model.state_dict(keep_vars=True).items():
            owner, attribute = get_module_from_name(model, part.original_name(name))
            setattr(owner, attribute, value)
    return model


@contextlib.contextmanager
def _replaced(values: Iterable[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """
    Replace attributes of modules inside the context, and restore them on exit.

    Args:
        values (`Iterable[tuple[torch.nn.Module, str, Any]]`): Module, name and new value of each attribute.
    """
    with contextlib.ExitStack() as stack:
        for module, name, value in values:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield


def _unrounded_buffers(parts: Iterable[Part], model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """
    Find the rounded buffers of the whole model, and the buffers of the parts that replace them.

    `.to(torch.bfloat16)` rounds the rotary frequencies of a model, and the parts create them again in float32. The
    rounding can change the logits of a small model by 10 %.
    """
    buffers = dict(model.named_buffers())
    for part in parts:
        for name, buffer in part.model.named_buffers():
            original = part.original_name(name)
            rounded = buffers.get(original, buffer)
            if rounded.dtype != buffer.dtype and torch.equal(buffer.to(rounded.dtype), rounded):
                yield *get_module_from_name(model, original), buffer
