"""Which client trains on which rows at which step."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset as RowDataset
from torch.utils.data import Dataset

from ..utils.random import derived_seed


# What a client does in an optimizer step: batches, each with the numbers of its rows.
RowBatches = list[list[int]]
# What a step is made of: batches of every client that takes part in it.
StepBatches = dict[str, list[Any]]


class SplitSteps(Dataset[StepBatches]):
    """
    One item an optimizer step: the batches of every client that takes part in it.

    Items can be taken in any order, which is what skipping the steps before a checkpoint needs.

    Args:
        rows (`Mapping[str, Sequence]`): Each client's rows.
        collate (`Mapping[str, Callable]`): What makes a batch of a client's rows.
        batch_size (`int`): Rows of a batch.
        num_batches (`int`): Batches that a client accumulates in a step.
        together (`bool`): Whether all clients take a step together, else one after the other. A client that has no
            rows left in an epoch takes no part in the steps that follow, so every row is seen once.
        steps_per_turn (`int`, *optional*): One after the other: steps of a client before the next one's. By default
            all of its epoch.
        seed (`int`): Of the order of rows. A single client's order is that of `Trainer` with this seed.
        shuffle (`bool`): Whether rows are drawn in another order in each epoch.
        drop_last (`bool`): Whether rows that fill no batch are left out.
        steps_of (`Mapping[str, int]`, *optional*): Steps of every client in an epoch, where others are elsewhere.
            Items then hold the batches of those that are here.
    """

    def __init__(
        self,
        rows: Mapping[str, Sequence[Any]],
        collate: Mapping[str, Callable[[list[Any]], Any]],
        batch_size: int,
        num_batches: int,
        *,
        together: bool,
        steps_per_turn: int | None,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        steps_of: Mapping[str, int] | None = None,
    ) -> None:
        self.rows = rows
        self.collate = collate
        self.batch_size = batch_size
        self.num_batches = num_batches
        self.together = together
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        steps = {own: steps_of_rows(len(rows[own]), batch_size, num_batches, drop_last) for own in rows}
        idle = [client_id for client_id, number in steps.items() if not number]
        if idle:
            raise ValueError(f"Client {idle[0]!r} has {len(rows[idle[0]])} rows, of which no batch can be made.")
        steps = dict(steps if steps_of is None else steps_of)
        self.num_clients = len(steps)
        self._plan = StepPlan(steps, together, steps_per_turn)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of an epoch's rows, which follows from its number alone."""
        self._batches: dict[str, list[RowBatches]] = {}
        for client_id, own in self.rows.items():
            order = list(range(len(own)))
            if self.shuffle:
                # Of one client, as accelerate's `SeedableRandomSampler` draws it.
                seed = self.seed if self.num_clients == 1 else derived_seed(self.seed, "rows", client_id)
                order = torch.randperm(len(own), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
            size = self.batch_size
            number = batches_of_rows(len(own), size, self.drop_last)
            batches = [order[start * size :][:size] for start in range(number)]
            self._batches[client_id] = [
                batches[start:][: self.num_batches] for start in range(0, len(batches), self.num_batches)
            ]

    def __len__(self) -> int:
        return len(self._plan)

    @property
    def num_rows(self) -> int:
        """Rows of an epoch, of all clients."""
        return sum(len(own) for own in self.rows.values())

    def rows_of_step(self, index: int) -> dict[str, int]:
        """Rows of each client that takes part in a step, in every epoch; of a batch that is one long row, too."""
        found = {}
        for client_id, number in self._plan[index].items():
            if client_id in self.rows:
                size = self.batch_size * self.num_batches
                left = len(self.rows[client_id]) - number * size
                if self.drop_last:
                    left -= left % self.batch_size
                found[client_id] = min(left, size)
        return found

    def periods_of_one(self, average_every: int, num_steps: int) -> tuple[int, int]:
        """
        Between how many averages and the next one client alone trains, and how many such periods there are; of those
        that begin in the first epoch.

        Args:
            average_every (`int`): Optimizer steps from one average to the next.
            num_steps (`int`): Optimizer steps of the run.
        """
        starts = range(0, min(num_steps, len(self)), average_every)
        periods = [range(start, min(start + average_every, num_steps)) for start in starts]
        trained = [{own for step in each for own in self._plan[step % len(self)]} for each in periods]
        return sum(len(own) == 1 for own in trained), len(periods)

    def __getitem__(self, index: int) -> StepBatches:
        step = self._plan[index]
        return {client_id: self._fetch(client_id, step[client_id]) for client_id in step if client_id in self.rows}

    def _fetch(self, client_id: str, number: int) -> list[Any]:
        own, collate = self.rows[client_id], self.collate[client_id]
        batches = self._batches[client_id][number]
        if isinstance(own, RowDataset):
            return [collate(own.__getitems__(batch)) for batch in batches]
        return [collate([own[row] for row in batch]) for batch in batches]


def batches_of_rows(num_rows: int, batch_size: int, drop_last: bool) -> int:
    """Batches that rows make."""
    return num_rows // batch_size if drop_last else -(-num_rows // batch_size)


def steps_of_rows(num_rows: int, batch_size: int, num_batches: int, drop_last: bool) -> int:
    """Optimizer steps that rows make, of so many batches each."""
    return -(-batches_of_rows(num_rows, batch_size, drop_last) // num_batches)


class StepPlan:
    """
    Of each step of an epoch: the clients that take part in it, and which of its own steps it is for each.

    Steps are found when they are asked for: what a client says of itself takes no memory of others.

    Args:
        num_steps (`Mapping[str, int]`): Steps of each client in an epoch.
        together (`bool`): Every client's first step, every client's second one and so on; else one client a step.
        steps_per_turn (`int`, *optional*): One after the other: steps before it is the next client's turn; by default
            all of an epoch.
    """

    def __init__(self, num_steps: Mapping[str, int], together: bool, steps_per_turn: int | None = None) -> None:
        self._num_steps = dict(num_steps)
        self._together = together
        self._longest = max(self._num_steps.values(), default=0)
        self._turn = steps_per_turn or max(self._longest, 1)

    def __len__(self) -> int:
        return self._longest if self._together else sum(self._num_steps.values())

    def __getitem__(self, index: int) -> dict[str, int]:
        step = range(len(self))[index]
        if self._together:
            return {client_id: step for client_id, number in self._num_steps.items() if step < number}
        rounds = range(-(-self._longest // self._turn))
        own_round = bisect.bisect_right(rounds, step, key=self._before) - 1
        left, done = step - self._before(own_round), own_round * self._turn
        for client_id, number in self._num_steps.items():
            turn = min(max(number - done, 0), self._turn)
            if left < turn:
                return {client_id: done + left}
            left -= turn
        raise AssertionError("A step of the plan is some client's.")

    def _before(self, own_round: int) -> int:
        """Steps before everybody has its turn for another time."""
        return sum(min(number, own_round * self._turn) for number in self._num_steps.values())


def only_item(items: list[StepBatches]) -> StepBatches:
    """What collates a loader's batch of one step."""
    return items[0]
