"""`LeanLoader`: the batches of the data loader that `Trainer` builds for a client, without building one.

A data loader of torch, prepared by accelerate, costs a small client more than a training step. The order of the
examples and the use of the random number generators are those of the prepared data loader: the sampler is
accelerate's, the loader draws one number from the global generator for the seeds of worker processes, and it collates
one batch ahead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, Sampler


class LeanLoader:
    """
    Iterates over the batches of a client in the process of the training.

    Args:
        dataset (`datasets.Dataset`): The examples, with the columns of the collator only.
        read (`Callable[[Iterator[list[int]]], Iterator[Any]]`): Returns the batches of lists of
            positions.
        sampler (`torch.utils.data.Sampler`): The order of the examples.
        batch_size (`int`): Number of examples of a batch.
        drop_last (`bool`): Whether the last batch of an epoch is dropped if it is smaller.
    """

    def __init__(
        self,
        dataset: Any,
        read: Callable[[Iterator[list[int]]], Iterator[Any]],
        sampler: Sampler[int],
        batch_size: int,
        drop_last: bool,
    ) -> None:
        self.dataset = dataset
        self.batch_sampler = BatchSampler(sampler, batch_size, drop_last)
        self._read = read

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that seeds the shuffling."""
        if callable(setter := getattr(self.batch_sampler.sampler, "set_epoch", None)):
            setter(epoch)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        return self.iterate_after(0)

    def iterate_after(self, num_batches: int) -> Iterator[Any]:
        """
        Iterate over the batches of an epoch after the first ones, which are not collated.

        Args:
            num_batches (`int`): Number of batches to leave out.
        """
        torch.empty((), dtype=torch.int64).random_()
        ahead = self._read(itertools.islice(self.batch_sampler, num_batches, None))
        current = next(ahead, None)
        for following in ahead:
            yield current
            current = following
        if current is not None:
            yield current
