"""Clients that continue in their sampler: each round starts after the last batch of the client's previous round.

With `local_steps`, a round can end within an epoch. The next round of the client then reads the rest of this epoch,
and the next epochs follow. A client therefore reads the same batches as one long run of `Trainer`. If the number of
batches is no multiple of `gradient_accumulation_steps`, the last step of an epoch has fewer micro-batches, as in
`Trainer`.

The position is a part of the client's state. It is in the client store and in checkpoints, so a resumed run reads the
same batches as an uninterrupted run. It is two numbers: the epoch, and the number of its batches that the client has
used. The epoch defines the order of the default sampler. Other samplers draw their order from random number generators
when an epoch starts: a shuffle without accelerate's sampler, `train_sampling_strategy="group_by_length"`, batch
samplers of sentence-transformers, and `RepeatSampler` of TRL, which repeats each prompt for several completions. Their
position also has the states of the generators at the start of the epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import skip_first_batches
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from .lean_loader import LeanLoader
from .sampling import has_epochs, set_epoch


# Keys of the position in the state of a client.
_EPOCH, _NUM_BATCHES, _OWN, _GLOBAL = "epoch", "num_batches", "own_generators", "global_generator"


class SamplerPosition:
    """
    The position of a client in its sampler, in one round.

    Args:
        loader (`Any`): The data loader of the client. It has a length.
        args (`TrainingArguments`): The client's own copy of the arguments. The trainer of the client reads
            `gradient_accumulation_steps` from it, which this class changes for the last step of an epoch.
        kept (`dict[str, Any]`, *optional*): The return value of [`~SamplerPosition.state`] after the last round.
    """

    def __init__(self, loader: Any, args: TrainingArguments, kept: dict[str, Any] | None = None) -> None:
        kept = kept or {}
        self._args = args
        self._accumulation = args.gradient_accumulation_steps
        self._length = len(loader)
        # Rounds of whole epochs count their epochs themselves.
        self.counts_epochs = args.max_steps > 0
        self._epoch = int(kept.get(_EPOCH, 0))
        # The number of batches that the trainer has used of the current epoch.
        self._num_batches = int(kept.get(_NUM_BATCHES, 0))
        # The batches of the current epoch that the trainer has not used.
        self._rest: Iterator[Any] | None = None
        # The states of the generators at the start of the current epoch.
        self._own: list[torch.Tensor] = kept.get(_OWN, [])
        self._global: torch.Tensor | None = kept.get(_GLOBAL)
        self._has_epochs = has_epochs(loader)
        self._generators = _generators(loader)
        for generator, state in zip(self._generators, self._own, strict=False):
            generator.set_state(state)
        if self._num_batches >= self._length:  # the client has fewer examples than before
            self._end_epoch()

    @property
    def is_within_epoch(self) -> bool:
        """Whether the current epoch has begun and has further batches."""
        return self._num_batches > 0

    def batches(self, loader: Any) -> Iterator[Any]:
        """
        Iterate over the next batches of the current epoch, up to its end.

        `Trainer` ends a step after `gradient_accumulation_steps` batches, and at the end of its epoch, whose length
        does not change. If the rest of an epoch ends with a shorter step, this method yields the other batches first,
        and the batches of the shorter step in the next call.

        Args:
            loader (`Any`): The data loader of the client.
        """
        if self._rest is None:
            self._rest = self._open(loader)
        first = next(self._rest, None)
        if first is None and self._num_batches:  # the epoch had fewer batches than the length of the loader
            self._end_epoch()
            return self.batches(loader)
        number = self._length - self._num_batches
        self._args.gradient_accumulation_steps = self._accumulation
        if self._num_batches and (shorter := number % self._accumulation):
            number -= shorter
            if not number:
                number = self._args.gradient_accumulation_steps = shorter
        return iter(()) if first is None else self._read(itertools.chain([first], self._rest), number)

    def close(self) -> None:
        """End the workers of the data loader. A garbage collection would wait several seconds for each of them."""
        self._rest = None

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch that the trainer used. Empty if the client need not keep it."""
        kept: dict[str, Any] = {_EPOCH: self._epoch} if self.counts_epochs else {}
        if self._num_batches:
            kept[_NUM_BATCHES] = self._num_batches
        if self._own:
            kept[_OWN] = self._own
        return kept if self._global is None else {**kept, _GLOBAL: self._global}

    def _read(self, batches: Iterator[Any], number: int) -> Iterator[Any]:
        for batch in itertools.islice(batches, number):
            number -= 1
            self._num_batches += 1
            if self._num_batches == self._length:
                self._end_epoch()
            yield batch
        if number:  # fewer batches than the length of the loader
            self._end_epoch()

    def _open(self, loader: Any) -> Iterator[Any]:
        """Iterate over the batches of the current epoch after the position."""
        if self.counts_epochs:
            set_epoch(loader, self._epoch)
        if not self._num_batches:
            self._own = [generator.get_state() for generator in self._generators]
            self._global = None if self._own or self._has_epochs else torch.get_rng_state()
            return iter(loader)
        return _rest(loader, self._epoch, self._num_batches, self._global)

    def _end_epoch(self) -> None:
        self._epoch += 1
        self._num_batches, self._global, self._rest = 0, None, None
        self._own = [generator.get_state() for generator in self._generators]


def _rest(loader: Any, epoch: int, num_batches: int, generator_state: torch.Tensor | None) -> Iterator[Any]:
    """
    Iterate over the batches of an epoch after the first ones.

    Data loaders and samplers draw random numbers when an epoch starts. They draw them again here, and the global
    generator stays unchanged.
    """
    with _global_generator(generator_state):
        if isinstance(loader, LeanLoader):
            batches = loader.iterate_after(num_batches)
        elif isinstance(loader, DataLoader):
            rest: Any = skip_first_batches(loader, num_batches)
            # Before accelerate 1.15, the new data loader starts at epoch 0.
            set_epoch(rest, epoch)
            if (state := vars(loader).get("gradient_state")) is not None:  # a data loader of accelerate
                rest.gradient_state = state
            batches = iter(rest)
        else:
            batches = itertools.islice(loader, num_batches, None)
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


def _generators(loader: Any) -> list[torch.Generator]:
    """The random number generators of the samplers of a data loader, except those that an epoch seeds."""
    samplers = [sampler for sampler in _samplers(loader) if not isinstance(sampler, SeedableRandomSampler)]
    values = [value for sampler in samplers for value in getattr(sampler, "__dict__", {}).values()]
    return list(dict.fromkeys(value for value in values if isinstance(value, torch.Generator)))


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
