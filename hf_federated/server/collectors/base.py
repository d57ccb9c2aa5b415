"""`UpdateCollector`: how the server obtains the updates of a round."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ...config import FederatedConfig
from ...engines import Engine
from ...methods import Accumulator, Method, Round
from ...utils.constructor_settings import ConstructorSettings
from ..bound_update import BoundUpdate
from ..client_metrics import RoundSummary
from ..fit_requests import FitSettings
from ..progress import RoundProgress


@dataclass(frozen=True)
class Collected:
    """
    The updates of a round.

    Args:
        sums ([`Accumulator`]): Sums of the accepted updates of all processes.
        summary ([`RoundSummary`]): Sums and means of the metrics of the accepted updates.
        rejected (`dict[str, str]`): Reasons of the clients that failed or whose update was rejected, by client id.
    """

    sums: Accumulator
    summary: RoundSummary
    rejected: dict[str, str]


@dataclass(frozen=True)
class CollectorContext:
    """
    What a collector works with in a run.

    Args:
        engine ([`Engine`]): Runs the clients.
        fit ([`FitSettings`]): Settings of the requests of local training.
        progress ([`~hf_federated.server.progress.RoundProgress`]): Shows how far a round is.
        bound ([`~hf_federated.server.bound_update.BoundUpdate`]): Rejects updates with a change that is too large.
        deadline (`float`, *optional*): Seconds after which a round does not wait for more than `min_clients` clients.
        fire (`Callable`, *optional*): `fire(event, **kwargs)` calls the trainer's callbacks.
        on_dispatch (`Callable[[str], None]`, *optional*): Called with the id of a client whose message is sent.
        output_dir (`pathlib.Path`, *optional*): Output directory of the run.
        first_needed (`Callable[[], int]`, *optional*): Returns the first round that a resumed run can repeat.
    """

    engine: Engine
    fit: FitSettings
    progress: RoundProgress
    bound: BoundUpdate
    deadline: float | None = None
    fire: Callable[..., Any] = field(default_factory=lambda: lambda event, **kwargs: None)
    on_dispatch: Callable[[str], None] | None = None
    output_dir: Path | None = None
    first_needed: Callable[[], int] = field(default_factory=lambda: lambda: 0)


class UpdateCollector(ConstructorSettings, ABC):
    """
    Obtains the updates of a round: sends the requests of local training, checks the replies and sums the updates.

    `collector` of [`FederatedConfig`] names a collector.
    """

    # Name in `collector` of the configuration.
    name: ClassVar[str] = ""
    # Whether requests stay open after a round, which some engines do not support.
    holds_requests: ClassVar[bool] = False
    # Number of accepted updates with which a round ends. By default, a round waits for its cohort.
    buffer_size: float = math.inf

    def check(
        self,
        engine: Engine,
        methods: Sequence[Method],
        config: FederatedConfig | None = None,
        min_clients: int = 1,
    ) -> None:
        """
        Check that the collector works with an engine and with the methods. It is called when the trainer is built.

        Args:
            engine ([`Engine`]): The engine that runs the clients.
            methods (`Sequence[Method]`): The methods of the federation.
            config ([`FederatedConfig`], *optional*): The configuration.
            min_clients (`int`, *optional*, defaults to `1`): Smallest number of valid updates of a round.

        Raises:
            ValueError: If the engine, a method or a setting is not supported. The message names an alternative.
        """
        if self.buffer_size < min_clients:
            raise ValueError(
                f"buffer_size={self.buffer_size} is below min_clients={min_clients}, so every round would fail. Lower "
                "`min_clients`, or raise `buffer_size`."
            )

    def start(self, context: CollectorContext) -> None:
        """
        Start a run, before the state of a checkpoint is loaded.

        Args:
            context ([`CollectorContext`]): What the collector works with.
        """
        self.context = context

    @abstractmethod
    def collect(self, round: Round) -> Collected:
        """
        Obtain the updates of a round.

        Args:
            round ([`Round`]): The round, after `begin` of its methods. The methods add updates to `round.sums`.

        Raises:
            RoundFailedError: If the server accepted fewer than `min_clients` updates.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the collector keeps between rounds, as scalars and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - most collectors keep no state
        """Restore the state that `state_dict` returned."""
