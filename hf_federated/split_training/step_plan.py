"""Assignment of examples to clients and optimizer steps."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from datasets import Dataset as HFDataset
from torch.utils.data import BatchSampler, Dataset

from ..utils.random import derived_seed


# The batches of a client in an optimizer step, each a list of indices of examples.
ExampleBatches = list[list[int]]
# The batches of every client that takes part in an optimizer step.
StepBatches = dict[str, list[Any]]


@dataclass(eq=False, repr=False)
class SplitSteps(Dataset[StepBatches]):
    """
    Dataset with one item per optimizer step: the batches of every client that takes part in the step.

    The items can be read in any order. A resumed run skips the steps before its checkpoint.

    Args:
        datasets (`Mapping[str, Sequence]`): The dataset of each client.
        collate (`Mapping[str, Callable]`): The data collator of each client.
        batch_size (`int`): Number of examples in a batch.
        num_batches (`int`): Number of batches that a client accumulates in a step.
        simultaneous (`bool`): Whether all clients take part in each step. Otherwise one client takes part in each
            step. A client that has used all its examples in an epoch takes no part in the remaining steps of the
            epoch, so every example is used once.
        steps_per_turn (`int`, *optional*): If one client takes part in each step: number of steps of a client before
            the next client continues. By default its full epoch.
        seed (`int`): Seed of the order of the examples. A single client has the order of `Trainer` with this seed.
        shuffle (`bool`): Whether the examples are shuffled in each epoch.
        drop_last (`bool`): Whether to drop the last incomplete batch.
        steps_per_client (`Mapping[str, int]`, *optional*): Steps of every client in an epoch, for a networked run. The
            items contain the batches of the clients in `datasets` only.

    Raises:
        ValueError: If a client has too few examples for a batch.
    """

    datasets: Mapping[str, Sequence[Any]]
    collate: Mapping[str, Callable[[list[Any]], Any]]
    batch_size: int
    num_batches: int
    _: KW_ONLY
    simultaneous: bool
    steps_per_turn: int | None
    seed: int
    shuffle: bool
    drop_last: bool
    steps_per_client: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        steps = {
            client_id: count_steps(len(dataset), self.batch_size, self.num_batches, self.drop_last)
            for client_id, dataset in self.datasets.items()
        }
        for client_id, num_steps in steps.items():
            if not num_steps:
                raise ValueError(
                    f"Client {client_id!r} has {len(self.datasets[client_id])} examples, too few for a batch of "
                    f"{self.batch_size} examples. Lower the batch size, or set dataloader_drop_last=False."
                )
        steps = dict(steps if self.steps_per_client is None else self.steps_per_client)
        self.num_clients = len(steps)
        self._plan = StepPlan(steps, self.simultaneous, self.steps_per_turn)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Set the order of the examples of an epoch. The order depends on the seed and the epoch number only."""
        self._batches: dict[str, list[ExampleBatches]] = {}
        for client_id, dataset in self.datasets.items():
            order = list(range(len(dataset)))
            if self.shuffle:
                # A single client has the order of accelerate's `SeedableRandomSampler`.
                seed = self.seed if self.num_clients == 1 else derived_seed(self.seed, "rows", client_id)
                order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
            batches: Any = BatchSampler(order, self.batch_size, self.drop_last)
            steps: Any = BatchSampler(batches, self.num_batches, drop_last=False)
            self._batches[client_id] = list(steps)

    def __len__(self) -> int:
        return len(self._plan)

    @property
    def num_examples(self) -> int:
        """Number of examples of all clients in an epoch."""
        return sum(len(dataset) for dataset in self.datasets.values())

    def num_examples_of_step(self, index: int) -> dict[str, int]:
        """
        Number of examples of each client that takes part in a step, equal in every epoch.

        A batch may pack several examples into one long sequence. The result counts the examples.

        Args:
            index (`int`): Index of the step in an epoch.
        """
        return {
            client_id: sum(map(len, self._batches[client_id][client_step]))
            for client_id, client_step in self._plan[index].items()
            if client_id in self.datasets
        }

    def count_single_client_periods(self, average_every: int, num_steps: int) -> tuple[int, int]:
        """
        Count the averaging periods of the first epoch, and the periods in which a single client trains.

        Args:
            average_every (`int`): Optimizer steps from one average to the next.
            num_steps (`int`): Optimizer steps of the run.

        Returns:
            `tuple[int, int]`: The number of periods with a single client, and the number of all periods.
        """
        starts = range(0, min(num_steps, len(self)), average_every)
        periods = [range(start, min(start + average_every, num_steps)) for start in starts]
        trained = [set().union(*map(self._plan.participants, period)) for period in periods]
        return sum(len(clients) == 1 for clients in trained), len(periods)

    def __getitem__(self, index: int) -> StepBatches:
        step = self._plan[index]
        return {client_id: self._fetch(client_id, step[client_id]) for client_id in step if client_id in self.datasets}

    def _fetch(self, client_id: str, client_step: int) -> list[Any]:
        dataset, collate = self.datasets[client_id], self.collate[client_id]
        batches = self._batches[client_id][client_step]
        if isinstance(dataset, HFDataset):
            return [collate(dataset.__getitems__(batch)) for batch in batches]
        return [collate([dataset[index] for index in batch]) for batch in batches]


def count_steps(num_examples: int, batch_size: int, num_batches: int, drop_last: bool) -> int:
    """Number of optimizer steps of a dataset, with `num_batches` batches per step."""
    num_all_batches = num_examples // batch_size if drop_last else -(-num_examples // batch_size)
    return -(-num_all_batches // num_batches)


class StepPlan:
    """
    Clients that take part in each step of an epoch, each with the index of the step among the client's steps.

    Each step is computed on access. The memory does not depend on the number of steps that a remote client reports.

    Args:
        num_steps (`Mapping[str, int]`): Steps of each client in an epoch.
        simultaneous (`bool`): Whether all clients take part in each step. Otherwise one client takes part in each
            step.
        steps_per_turn (`int`, *optional*): If one client takes part in each step: number of steps of a client before
            the next client continues. By default its full epoch.
    """

    def __init__(self, num_steps: Mapping[str, int], simultaneous: bool, steps_per_turn: int | None = None) -> None:
        self._num_steps = dict(num_steps)
        self._simultaneous = simultaneous
        self._longest = max(self._num_steps.values(), default=0)
        self._turn = steps_per_turn or max(self._longest, 1)

    def __len__(self) -> int:
        return self._longest if self._simultaneous else sum(self._num_steps.values())

    def __getitem__(self, index: int) -> dict[str, int]:
        step = range(len(self))[index]
        if self._simultaneous:
            return {client_id: step for client_id, num_steps in self._num_steps.items() if step < num_steps}
        rounds = range(-(-self._longest // self._turn))
        round_index = bisect.bisect_right(rounds, step, key=self._num_steps_before) - 1
        remaining, done = step - self._num_steps_before(round_index), round_index * self._turn
        turns = [min(max(num_steps - done, 0), self._turn) for num_steps in self._num_steps.values()]
        ends = list(itertools.accumulate(turns))
        number = bisect.bisect_right(ends, remaining)
        return {list(self._num_steps)[number]: done + remaining - ends[number] + turns[number]}

    def participants(self, step: int) -> list[str]:
        """Clients that take part in a step of the run, whose epochs have the same steps."""
        return list(self[step % len(self)])

    def _num_steps_before(self, round_index: int) -> int:
        """Number of steps before a round of turns."""
        return sum(min(num_steps, round_index * self._turn) for num_steps in self._num_steps.values())
