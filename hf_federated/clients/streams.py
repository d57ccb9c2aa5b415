"""Clients whose examples are a stream: each round continues after the last example of the client's previous round.

The position in the stream is a part of the client's state. It is in the client store and in checkpoints, so a resumed
run reads the same examples as an uninterrupted run. A stream that ends starts again, as epochs of `Trainer` do.

The position is exact: it is the position after the last batch that the client trained on, although data loaders read
ahead. Most streams continue from their own `state_dict`. Other streams have no exact state: a
`datasets.IterableDataset` with a shuffle buffer (with datasets before 5.2, every `datasets.IterableDataset`), and a
`torch.utils.data.IterableDataset` without `state_dict` and `load_state_dict`. They start the epoch again and skip the
examples that the client already trained on, so they must yield the same examples in the same order each time.

Streams are read in the training process, and not by several processes for one client.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import datasets
import torch

from .._compat import has_exact_state


@dataclass(frozen=True)
class StreamPosition:
    """
    A position in a stream.

    Args:
        epoch (`int`): Number of times that the stream ended.
        num_examples (`int`): Number of examples of this epoch before the position.
        state (`dict[str, Any]`, *optional*): The `state_dict` of the stream at the position. `None` if the stream has
            no exact state.
    """

    epoch: int = 0
    num_examples: int = 0
    state: dict[str, Any] | None = None


class ClientStream(torch.utils.data.IterableDataset[Any]):
    """
    The stream of a client in one round. It replaces the client's dataset in the trainer of the client.

    Args:
        client_id (`str`): Id of the client, for error messages.
        dataset (`datasets.IterableDataset` or `torch.utils.data.IterableDataset`): The examples. Its position does not
            change.
        kept (`dict[str, Any]`, *optional*): The return value of [`~ClientStream.position`] after the last round.
    """

    def __init__(self, client_id: str, dataset: Any, kept: dict[str, Any] | None = None) -> None:
        self._client_id = client_id
        self._dataset = dataset
        self._next = StreamPosition(**(kept or {}))
        # The position after each batch that the data loader has read of the current epoch, and the number of batches
        # that the trainer has used.
        self._after_batch = {0: self._next}
        self._num_used = 0
        # The number of examples in these batches, and the number that the trainer has used of earlier epochs.
        self._examples_until_batch = {0: 0}
        self._num_examples = 0
        self._batch_size = 0
        of_datasets = isinstance(dataset, datasets.IterableDataset)
        self._keeps_state = has_exact_state(dataset) if of_datasets else _has_state(dataset)

    # Trainers distinguish the types of datasets, and read columns and features.
    @property  # type: ignore[misc]  # `object` declares an attribute
    def __class__(self) -> Any:
        return type(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: data loaders count the epochs of one round, and the stream counts its epochs over the run."""

    def position(self) -> dict[str, Any]:
        """Return the position after the last batch that the trainer used, as the client keeps it."""
        return asdict(self._after_batch[self._num_used])

    @property
    def num_examples(self) -> int:
        """Number of examples that the trainer has used. An example counts again if the stream started again."""
        return self._num_examples + self._examples_until_batch[self._num_used]

    def batches(self, loader: Any) -> Iterator[Any]:
        """
        Iterate over the batches of one epoch, or of the rest of an epoch.

        Args:
            loader (`Any`): The data loader of this stream.

        Raises:
            ValueError: If the stream has no example, or none that fills a batch of a loader that drops the last batch.
        """
        self._batch_size = loader.batch_size
        # The rest of an epoch may have no batch. The next epoch then follows.
        for _ in range(2):
            self._num_examples, self._num_used, self._examples_until_batch = self.num_examples, 0, {0: 0}
            for batch in loader:
                self._num_used += 1
                yield batch
            if self._num_used:
                return
        raise ValueError(
            f"The stream of client {self._client_id!r} has too few examples for one batch of {self._batch_size}. Pass "
            "more examples, or leave the client out."
        )

    def __iter__(self) -> Iterator[Any]:
        start = self._next
        examples = self._open(start)
        first = next(examples, None)
        if first is None and start.num_examples:  # the last round used all examples of the epoch
            start = StreamPosition(start.epoch + 1)
            examples = self._open(start)
            first = next(examples, None)
        if first is None:
            raise ValueError(f"The stream of client {self._client_id!r} has no example. Leave the client out.")
        self._after_batch = {0: start}
        self._examples_until_batch = {0: 0}
        number = 0
        for number, example in enumerate(itertools.chain([first], examples), start=1):
            if number % self._batch_size == 0:
                read = StreamPosition(start.epoch, start.num_examples + number, self._state())
                self._after_batch[number // self._batch_size] = read
                self._examples_until_batch[number // self._batch_size] = number
                for batch in [batch for batch in self._after_batch if batch < self._num_used]:
                    del self._after_batch[batch], self._examples_until_batch[batch]
            yield example
        self._next = StreamPosition(start.epoch + 1)
        last_batch = math.ceil(number / self._batch_size)
        self._after_batch[last_batch] = self._next
        self._examples_until_batch[last_batch] = number

    def _open(self, position: StreamPosition) -> Iterator[Any]:
        """Iterate over the examples after a position."""
        self._reading = copy.copy(self._dataset)
        if callable(set_epoch := getattr(self._reading, "set_epoch", None)):
            set_epoch(position.epoch)
        if position.state is None:
            return itertools.islice(self._reading, position.num_examples, None)
        self._reading.load_state_dict(position.state)
        return iter(self._reading)

    def _state(self) -> dict[str, Any] | None:
        return copy.deepcopy(self._reading.state_dict()) if self._keeps_state else None


def _has_state(dataset: Any) -> bool:
    """Whether a stream of torch has the two methods that save and load its position."""
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
