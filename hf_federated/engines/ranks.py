"""`RankEngine`: a federation over the processes of one `accelerate launch`.

Every process runs the same rounds and holds the same global state. With `parallelism="data"` they train each client
together, as accelerate trains any model: its batches are spread over them and gradients are averaged at every step.
With `parallelism="clients"` each process trains whole clients on its own, and they meet once a round, to sum up one
payload each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..aggregation import Accumulator
from ..clients import ClientWorker
from ..distributed.process_group import Processes
from ..messages import ClientFailure, Message, message_from_tree
from .base import Plan
from .local import LocalEngine


T = TypeVar("T")


def assign(costs: Mapping[str, float], num_ranks: int, homes: Mapping[str, int]) -> dict[str, int]:
    """
    Which process trains which client, so that all finish at about the same time: the longest first, each to the
    process with the least to do (Graham, Bounds on Multiprocessing Timing Anomalies, 1969: within 4/3 of the best).

    Args:
        costs (`Mapping[str, float]`): What each client is expected to take, in any unit.
        num_ranks (`int`): How many processes there are.
        homes (`Mapping[str, int]`): Clients that must go to a certain process.

    Returns:
        `dict[str, int]`: The process of each client, in the order of `costs`. The same in every process.

    Example:

    ```python
    >>> from hf_federated.engines.ranks import assign

    >>> assign({"a": 3, "b": 1, "c": 2}, num_ranks=2, homes={})
    {'a': 0, 'b': 1, 'c': 1}
    ```
    """
    loads = [0.0] * num_ranks
    ranks = {client_id: homes[client_id] for client_id in costs if client_id in homes}
    for client_id, rank in ranks.items():
        loads[rank] += costs[client_id]
    for client_id in sorted(costs.keys() - ranks.keys(), key=lambda client_id: (-costs[client_id], client_id)):
        ranks[client_id] = loads.index(min(loads))
        loads[ranks[client_id]] += costs[client_id]
    return {client_id: ranks[client_id] for client_id in costs}


class WatchPeers(TrainerCallback):
    """
    Ends a client's training when another process has failed, instead of letting it go on for nothing.

    Args:
        processes ([`Processes`]): Of the launch.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._processes.look_for_failure()


class RankEngine(LocalEngine):
    """
    Clients over the processes of a launch.

    A client that keeps something between rounds stays with the process that has it, so nothing but the payload and a
    few numbers a client ever crosses.

    Args:
        worker ([`~hf_federated.clients.ClientWorker`]): Answers the messages of this process's clients.
        processes ([`Processes`]): Of the launch.
        parallelism (`str`): `"data"` or `"clients"`.
        costs (`Mapping[str, float]`): What each client of the federation is expected to take, in any unit. Others,
            which only evaluate, count as their mean.
    """

    def __init__(
        self, worker: ClientWorker, processes: Processes, parallelism: str, costs: Mapping[str, float]
    ) -> None:
        super().__init__(worker)
        self.processes = processes
        self.bytes_reduced = 0
        self._spreads_clients = parallelism == "clients"
        self._costs = costs
        self._mean_cost = sum(costs.values()) / len(costs)
        self._homes: dict[str, int] = {}

    def _ranks_of(self, cohort: Sequence[str]) -> dict[str, int]:
        costs = {client_id: self._costs.get(client_id, self._mean_cost) for client_id in cohort}
        return assign(costs, self.processes.world_size, self._homes)

    def _own_clients(self, cohort: Sequence[str]) -> Sequence[str]:
        if not self._spreads_clients:
            return cohort
        return [client_id for client_id, rank in self._ranks_of(cohort).items() if rank == self.processes.rank]

    def _deliver(self, message: Message) -> Message:
        if not self._spreads_clients:
            return super()._deliver(message)
        # Otherwise gradients would be averaged over the processes at every step: centralised training.
        with self.processes.independent(as_main=True):
            return super()._deliver(message)

    def _execute(self, plan: Plan, dispatch: Callable[[str], Message]) -> Iterator[tuple[str, Message]]:
        for client_id, reply in super()._execute(plan, dispatch):
            # The processes cannot agree to go on without a client that failed in the middle of a common step.
            if isinstance(reply, ClientFailure) and not self._spreads_clients:
                if lost := self.processes.lost_peer(self.last_error):
                    raise lost from self.last_error
                raise RuntimeError(f"Client {client_id!r}, round {plan.round}: {reply.error}") from self.last_error
            yield client_id, reply
            del reply

    def gather(self, plan: Plan, found: Mapping[str, T]) -> dict[str, T]:
        if not self._spreads_clients:
            return super().gather(plan, found)
        own = self._own_clients(plan.cohort)
        told = {
            "found": dict(found),
            "bytes": {client_id: self.ledger.account(plan.round, client_id) for client_id in own},
            "kept": [client_id for client_id in own if client_id in self.worker.models],
        }
        together: dict[str, T] = {}
        for rank, theirs in enumerate(self.processes.gather(f"{plan.phase} of clients, round {plan.round}", told)):
            together.update(theirs["found"])
            self._homes.update(dict.fromkeys(theirs["kept"], rank))
            for client_id, (down, up) in theirs["bytes"].items():
                self.ledger.set_account(plan.round, client_id, bytes_down=down, bytes_up=up)
        return super().gather(plan, together)

    def collect(self, plan: Plan, on_dispatch: Callable[[str], None] | None = None) -> dict[str, Message]:
        replies = super().collect(plan, on_dispatch)
        trees = self.gather(plan, {client_id: reply.to_tree() for client_id, reply in replies.items()})
        return {client_id: message_from_tree(tree) for client_id, tree in trees.items()}

    def reduce(
        self,
        plan: Plan,
        accumulator: Accumulator,
        state: Mapping[str, torch.Tensor],
        extra: Mapping[str, torch.Tensor],
    ) -> None:
        if not self._spreads_clients:
            return
        means = ((accumulator.mean, state), (accumulator.extra, extra))
        first = accumulator.first_client
        told = self.processes.gather(
            f"sum of updates, round {plan.round}",
            {
                "first": len(plan.cohort) if first is None else plan.cohort.index(first),
                "weights": [mean.total_weight for mean, _ in means],
                "counts": [mean.num_updates for mean, _ in means],
            },
        )
        saw_first = min(range(len(told)), key=lambda rank: told[rank]["first"])
        for position, (mean, reference) in enumerate(means):
            weight = sum(theirs["weights"][position] for theirs in told)
            count = sum(theirs["counts"][position] for theirs in told)
            if count == 0:
                continue
            sums, others = mean.as_part_of(weight, count, reference)
            self.bytes_reduced += self.processes.sum_(sums)
            self.processes.broadcast_(others, saw_first)
        accumulator.first_client = plan.cohort[told[saw_first]["first"]]

    def reset(self) -> None:
        super().reset()
        self._homes = {}
        self.bytes_reduced = 0

    def save(self, directory: Path) -> dict[str, str]:
        # With `parallelism="data"` every process keeps the same.
        return super().save(directory) if self._spreads_clients or self.processes.is_main else {}

    def load(self, directory: Path, digests: Mapping[str, str]) -> None:
        if not self._spreads_clients:
            super().load(directory, digests)
            return
        costs = {client_id: self._costs[client_id] for client_id in sorted(digests)}
        self._homes = assign(costs, self.processes.world_size, {})
        own = [client_id for client_id, rank in self._homes.items() if rank == self.processes.rank]
        super().load(directory, {client_id: digests[client_id] for client_id in own})
