"""Clients whose sampler cannot be set to an epoch: each round continues after the last batch of the previous round.

`Trainer` shuffles with a sampler that has `set_epoch`, and each round sets another epoch. Other samplers start anew
whenever they are built: a sampler in the order of the examples, `train_sampling_strategy="group_by_length"`, and
`RepeatSampler` of TRL, which repeats each prompt for several completions. With `local_steps`, such a sampler would
yield the same first batches in every round.

The position in the sampler is a part of the client's state. It is in the client store and in checkpoints, so a resumed
run reads the same batches as an uninterrupted run. A sampler draws its order when an epoch starts. The position
therefore has the states of the random number generators at the start of the epoch, and the number of batches after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import skip_first_batches
from torch.utils.data import DataLoader


# Keys of the position in the state of a client.
_NUM_BATCHES, _OWN, _GLOBAL = "num_batches", "own_generators", "global_generator"


class SamplerPosition:
    """
    The position of a client in its sampler, in one round.

    Args:
        loader (`Any`): The data loader of the client. Its sampler cannot be set to an epoch.
        kept (`dict[str, Any]`, *optional*): The return value of [`~SamplerPosition.state`] after the last round.
    """

    def __init__(self, loader: Any, kept: dict[str, Any] | None = None) -> None:
        kept = kept or {}
        # The number of batches that the trainer has used of the current epoch.
        self._num_batches = int(kept.get(_NUM_BATCHES, 0))
        # The states of the generators at the start of the current epoch.
        self._own: list[torch.Tensor] = kept.get(_OWN, [])
        self._global: torch.Tensor | None = kept.get(_GLOBAL)
        values = [value for sampler in _samplers(loader) for value in getattr(sampler, "__dict__", {}).values()]
        self._generators = list(dict.fromkeys(value for value in values if isinstance(value, torch.Generator)))
        self._length = len(loader)
        for generator, state in zip(self._generators, self._own, strict=False):
            generator.set_state(state)

    def batches(self, loader: Any) -> Iterator[Any]:
        """
        Iterate over as many batches as an epoch has: the rest of the current epoch, and the start of the next one.

        Args:
            loader (`Any`): The data loader of the client.
        """
        num_left = self._length
        while num_left > 0:
            for batch in self._rest_of_epoch(loader):
                self._num_batches += 1
                num_left -= 1
                if self._num_batches == self._length:
                    self._end_epoch()
                yield batch
                if not num_left or not self._num_batches:
                    break
            else:  # a loader with fewer batches than its length
                self._end_epoch()
                return

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch that the trainer used. Empty if the client need not keep it."""
        if self._num_batches:
            kept = {_NUM_BATCHES: self._num_batches, _OWN: self._own}
            return kept if self._global is None else {**kept, _GLOBAL: self._global}
        return {_OWN: self._own} if self._own else {}

    def _rest_of_epoch(self, loader: Any) -> Iterator[Any]:
        if not self._num_batches:
            self._own = [generator.get_state() for generator in self._generators]
            self._global = None if self._own else torch.get_rng_state()
            return iter(loader)
        if not isinstance(loader, DataLoader):
            return _started(itertools.islice(loader, self._num_batches, None), self._global)
        rest: Any = skip_first_batches(loader, self._num_batches)
        if (state := vars(loader).get("gradient_state")) is not None:  # a data loader of accelerate
            rest.gradient_state = state
        return _started(iter(rest), self._global)

    def _end_epoch(self) -> None:
        self._num_batches, self._global = 0, None
        self._own = [generator.get_state() for generator in self._generators]


def _started(batches: Iterator[Any], generator_state: torch.Tensor | None) -> Iterator[Any]:
    """Read the first batch, for which a sampler draws its order, and leave the global generator unchanged."""
    with _global_generator(generator_state):
        first = next(batches, None)
    if first is not None:
        yield first
        yield from batches


@contextmanager
def _global_generator(state: torch.Tensor | None) -> Iterator[None]:
    before = torch.get_rng_state()
    if state is not None:
        torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def _samplers(loader: Any) -> list[Any]:
    """The samplers of a data loader, and the samplers inside of these. A trainer may wrap its data loader."""
    candidates = [loader, *getattr(loader, "__dict__", {}).values()]
    found: list[Any] = []
    for data_loader in [each for each in candidates if isinstance(each, DataLoader)][:1]:
        pending = [data_loader.batch_sampler, data_loader.sampler]
        while pending:
            sampler = pending.pop()
            if sampler is not None and all(sampler is not other for other in found):
                found.append(sampler)
                pending += [getattr(sampler, "batch_sampler", None), getattr(sampler, "sampler", None)]
    return found
