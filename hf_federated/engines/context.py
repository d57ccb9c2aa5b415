"""`EngineContext`: the federation that an engine runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..clients import ClientWorker
from ..distributed.process_group import ProcessGroup


@dataclass(frozen=True)
class EngineContext:
    """
    The federation that an engine runs.

    Args:
        build_worker (`Callable[[], ClientWorker]`): Builds the worker that answers messages in this process. An engine
            whose clients are in other processes does not call it.
        costs (`Mapping[str, float]`): Expected cost of each client in a round, in any unit.
        parallelism (`str`): `parallelism` of [`FederatedConfig`], `"data"` or `"clients"`.
        processes ([`~hf_federated.distributed.process_group.ProcessGroup`]): The processes of the launch.
        saved_clients (`Callable[[], list[Path]]`): Returns the folders with the client states in all checkpoints of
            the run.
    """

    build_worker: Callable[[], ClientWorker]
    costs: Mapping[str, float]
    parallelism: str
    processes: ProcessGroup
    saved_clients: Callable[[], list[Path]] = list
