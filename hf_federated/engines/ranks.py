"""`RankEngine`: a federation over the processes of one `accelerate launch`.

Every process runs the same rounds and holds the same global state. With `parallelism="data"` the processes train each
client together: the client's batches are split over the processes, and gradients are averaged at every step, as in any
training with accelerate. With `parallelism="clients"` each process trains whole clients, and the processes reduce one
payload per round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..aggregation import Accumulator
from ..distributed.process_group import ProcessGroup
from ..messages import ClientFailure, Message, message_from_tree
from .context import EngineContext
from .local import LocalEngine
from .requests import Plan


T = TypeVar("T")


def assign(costs: Mapping[str, float], num_ranks: int, fixed: Mapping[str, int]) -> dict[str, int]:
    """
    Assign clients to ranks so that all ranks finish at about the same time.

    Longest processing time first (Graham, Bounds on Multiprocessing Timing Anomalies, 1969): the clients in descending
    order of cost, each to the rank with the lowest load. The largest load is within 4/3 of the optimum.

    Args:
        costs (`Mapping[str, float]`): Expected cost of each client, in any unit.
        num_ranks (`int`): Number of ranks.
        fixed (`Mapping[str, int]`): Clients with a given rank.

    Returns:
        `dict[str, int]`: Rank of each client, in the order of `costs`. The same in every process.

    Example:

    ```python
    >>> from hf_federated.engines.ranks import assign

    >>> assign({"a": 3, "b": 1, "c": 2}, num_ranks=2, fixed={})
    {'a': 0, 'b': 1, 'c': 1}
    ```
    """
    loads = [0.0] * num_ranks
    ranks = {client_id: fixed[client_id] for client_id in costs if client_id in fixed}
    for client_id, rank in ranks.items():
        loads[rank] += costs[client_id]
    for client_id in sorted(costs.keys() - ranks.keys(), key=lambda client_id: (-costs[client_id], client_id)):
        ranks[client_id] = loads.index(min(loads))
        loads[ranks[client_id]] += costs[client_id]
    return {client_id: ranks[client_id] for client_id in costs}


def raise_common_failure(processes: ProcessGroup, failure: ClientFailure, error: Exception | None) -> NoReturn:
    """
    Raise the failure of a client that several ranks train together.

    If a client fails in the middle of a common step, the ranks are out of step and cannot continue.

    Args:
        processes ([`~hf_federated.distributed.process_group.ProcessGroup`]): The processes of the launch.
        failure ([`ClientFailure`]): The reply of the client in this process.
        error (`Exception`, *optional*): The error behind the failure.

    Raises:
        PeerFailedError: If another process failed first.
        RuntimeError: Otherwise.
    """
    if lost := processes.to_peer_failed_error(error):
        raise lost from error
    reason = failure.error if error is None else f"{type(error).__name__}: {error}"
    raise RuntimeError(f"Client {failure.client_id!r}, round {failure.round + 1}: {reason}") from error


class WatchPeers(TrainerCallback):
    """
    Ends a client's training when another process has failed.

    Args:
        processes ([`~hf_federated.distributed.process_group.ProcessGroup`]): The processes of the launch.
    """

    def __init__(self, processes: ProcessGroup) -> None:
        self._processes = processes

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._processes.raise_if_peer_failed()


class RankEngine(LocalEngine):
    """
    Runs the clients on the ranks of a launch, which share the work as `parallelism` of [`FederatedConfig`] defines.

    A client stays on its rank if the rank keeps a state of the client or memories of postprocessors. The ranks
    therefore exchange one payload per round and a few numbers per client.

    Args:
        serialize (`bool`, *optional*, defaults to `False`): As in [`LocalEngine`].

    Attributes:
        bytes_reduced (`int`): Bytes of payload that this process has contributed to reductions in this run.
    """

    # The ranks agree on plans only.
    holds_requests: ClassVar[bool] = False

    def __init__(self, serialize: bool = False) -> None:
        super().__init__(serialize)
        self.bytes_reduced = 0

    def check_launch(self, num_processes: int) -> None:
        """Accept any number of processes."""

    def start(self, context: EngineContext) -> None:
        super().start(context)
        self.processes = context.processes
        self.bytes_reduced = 0
        self._spreads_clients = context.parallelism == "clients"
        self._is_sharded = context.is_sharded
        self._costs = context.costs
        self._mean_cost = sum(context.costs.values()) / len(context.costs)
        # The rank of each client of which the rank keeps a state or memories.
        self._fixed = assign(self._costs, self.processes.world_size, {}) if context.keeps_ranks else {}

    def _ranks_of(self, cohort: Sequence[str]) -> dict[str, int]:
        # A client without training examples, which only evaluates, has no cost.
        costs = {client_id: self._costs.get(client_id, self._mean_cost) for client_id in cohort}
        return assign(costs, self.processes.world_size, self._fixed)

    def own_clients(self, cohort: Sequence[str]) -> Sequence[str]:
        if not self._spreads_clients:
            return cohort
        return [client_id for client_id, rank in self._ranks_of(cohort).items() if rank == self.processes.rank]

    def run(self, plan: Plan, on_dispatch: Callable[[str], None] | None = None) -> Generator[Message, None, None]:
        self._plan_name = f"{plan.phase}, round {plan.round}"
        if self._spreads_clients and plan.deadline is not None:
            # Each rank waits for its share of the replies; the shares are rounded up.
            own = len(self.own_clients(plan.cohort))
            plan = replace(plan, min_replies=math.ceil(plan.min_replies * own / max(len(plan.cohort), 1)))
        return super().run(plan, on_dispatch)

    def _is_over(self, until: float | None, enough: int, num_replies: int) -> bool:
        is_over = partial(super()._is_over, until, enough, num_replies)
        if until is None or self._spreads_clients:
            return is_over()
        # The ranks train each client together, and their clocks differ.
        return self.processes.run_on_main(f"{self._plan_name}: deadline after {num_replies} replies", is_over)

    def _deliver(self, message: Message) -> Message:
        if not self._spreads_clients:
            return super()._deliver(message)
        # Otherwise the ranks would average gradients at every step, which is centralized training.
        with self.processes.independent(as_main=True):
            return super()._deliver(message)

    def _receive(self, clients: Set[str] | None, until: float | None) -> tuple[str, Message] | None:
        arrived = super()._receive(clients, until)
        if arrived is not None and isinstance(arrived[1], ClientFailure):
            if not self._spreads_clients and self.processes.world_size > 1:
                raise_common_failure(self.processes, arrived[1], self.last_error)
        return arrived

    def gather(self, plan: Plan, results: Mapping[str, T]) -> dict[str, T]:
        if not self._spreads_clients:
            return super().gather(plan, results)
        own = self.own_clients(plan.cohort)
        part = {
            "results": dict(results),
            "bytes": {client_id: self.ledger.account(plan.round, client_id) for client_id in own},
            "kept": [client_id for client_id in own if client_id in self.worker.models],
        }
        combined: dict[str, T] = {}
        for rank, received in enumerate(self.processes.gather(f"{plan.phase} of clients, round {plan.round}", part)):
            combined.update(received["results"])
            self._fixed.update(dict.fromkeys(received["kept"], rank))
            for client_id, (down, up) in received["bytes"].items():
                self.ledger.set_account(plan.round, client_id, bytes_down=down, bytes_up=up)
        return super().gather(plan, combined)

    def collect(self, plan: Plan, on_dispatch: Callable[[str], None] | None = None) -> dict[str, Message]:
        replies = super().collect(plan, on_dispatch)
        trees = self.gather(plan, {client_id: reply.to_tree() for client_id, reply in replies.items()})
        return {client_id: message_from_tree(tree, self.kinds) for client_id, tree in trees.items()}

    def reduce(self, plan: Plan, accumulator: Accumulator) -> None:
        if not self._spreads_clients:
            return
        first, means = accumulator.first_client, accumulator.means
        parts = self.processes.gather(
            f"sum of updates, round {plan.round}",
            {
                "first": len(plan.cohort) if first is None else plan.cohort.index(first),
                "means": {name: (mean.total_weight, mean.num_updates) for name, mean in means.items()},
                "collections": {name: updates.weights for name, updates in accumulator.collections.items()},
            },
        )
        for rank, part in enumerate(parts):
            if part["means"].keys() != means.keys():
                raise ValueError(
                    f"The accumulator has the means {sorted(means)} on this rank and {sorted(part['means'])} on rank "
                    f"{rank}. Create all means in `accumulator()`, before the first update."
                )
        for name, mean in means.items():
            totals = [part["means"][name] for part in parts]
            num_updates = sum(number for _, number in totals)
            if num_updates == 0:
                continue
            sums, copies = mean.reduction_tensors(sum(weight for weight, _ in totals), num_updates)
            self.bytes_reduced += self.processes.sum_(sums)
            contributing = [rank for rank, (_, number) in enumerate(totals) if number]
            self.processes.broadcast_(copies, min(contributing, key=lambda rank: parts[rank]["first"]))
        for name, updates in accumulator.collections.items():
            for rank, part in enumerate(parts):
                for client_id, weight in part["collections"][name].items():
                    for piece in updates.transfer(client_id, weight):
                        self.bytes_reduced += piece.nbytes if rank == self.processes.rank else 0
                        self.processes.broadcast_([piece], rank)
        earliest = min(part["first"] for part in parts)
        accumulator.first_client = plan.cohort[earliest] if earliest < len(plan.cohort) else None

    def shared(self, label: str, compute: Callable[[], T]) -> T:
        return self.processes.run_on_main(label, compute)

    def sum_(self, plan: Plan, tensors: Sequence[torch.Tensor]) -> None:
        if self._spreads_clients:
            self.bytes_reduced += self.processes.sum_(tensors)

    def save(self, directory: Path) -> dict[str, str]:
        # With `parallelism="data"` every rank holds the same client states, unless it holds shards.
        saves = self._spreads_clients or self._is_sharded or self.processes.is_main
        return super().save(directory) if saves else {}

    def load(self, directory: Path, digests: Mapping[str, str]) -> None:
        if not self._spreads_clients:
            super().load(directory, digests)
            return
        self._fixed |= self._ranks_of(sorted(digests))
        super().load(directory, {client_id: digests[client_id] for client_id in self.own_clients(sorted(digests))})
