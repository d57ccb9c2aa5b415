"""`EngineContext`: the federation that an engine runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..clients import ClientWorker
from ..distributed.process_group import ProcessGroup
from ..messages import KINDS, Message
from ..messages.serialization import MAX_TENSORS


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
        kinds (`Mapping[str, type[Message]]`, *optional*): The kinds of messages that engine and clients read, as from
            [`~hf_federated.messages.kinds_of`]. Defaults to the messages of this library.
        max_tensors (`int`, *optional*): Largest number of tensors of a message.
        keeps_ranks (`bool`, *optional*, defaults to `False`): Whether each client stays on one rank in all rounds,
            because the server keeps memories of the client there.
        is_sharded (`bool`, *optional*, defaults to `False`): Whether each rank holds a shard of all states.
    """

    build_worker: Callable[[], ClientWorker]
    costs: Mapping[str, float]
    parallelism: str
    processes: ProcessGroup
    saved_clients: Callable[[], list[Path]] = list
    kinds: Mapping[str, type[Message]] = field(default_factory=lambda: KINDS)
    max_tensors: int = MAX_TENSORS
    keeps_ranks: bool = False
    is_sharded: bool = False
