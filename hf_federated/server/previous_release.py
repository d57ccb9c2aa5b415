"""`ServerState`: the view that callbacks of version 0.1 have on a round. It will be removed in 1.0."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from ..methods import Round


# How each attribute of version 0.1 is read, and the attribute to use instead.
_ATTRIBUTES: dict[str, tuple[Callable[[Round], Any], str]] = {
    "weights": (lambda round: round.state, "round.state"),
    "aggregated": (lambda round: round.state, "round.state"),
    "expected_state": (lambda round: round.state, "round.state"),
    "round": (lambda round: round.number, "round.number"),
    "cohort": (lambda round: round.cohort, "round.cohort"),
    "rejected": (lambda round: round.rejected, "round.rejected"),
    "logs": (lambda round: round.logs, "round.logs"),
    "min_clients": (lambda round: round.min_clients, "round.min_clients"),
    "client_metrics": (lambda round: round.metrics, "round.metrics"),
    "accumulators": (lambda round: [] if round.sums is None else [round.sums], "round.sums"),
}
_FIXED = {"num_rounds": "args", "client_ids": "trainer.clients", "device": "the device of round.state"}


class ServerState:
    """
    Keyword `server` of the events in version 0.1: a view on the [`Round`].

    Each access warns with a `FutureWarning` that names the attribute of the keyword `round` to use instead.

    Args:
        round ([`Round`]): The round.
        fixed (`Any`): `num_rounds`, `client_ids` and `device` of the run.
    """

    def __init__(self, round: Round, **fixed: Any) -> None:
        vars(self).update(_round=round, _fixed=fixed)

    def __getattr__(self, name: str) -> Any:
        if name in _ATTRIBUTES:
            read, replacement = _ATTRIBUTES[name]
            _warn(name, replacement)
            return read(self._round)
        if name in _FIXED:
            _warn(name, _FIXED[name])
            return self._fixed[name]
        raise AttributeError(f"{name!r} is no attribute of the server in a round. Use the keyword `round`.")

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weights":
            raise AttributeError(f"{name!r} of the server cannot be set. Write a Method instead of a callback.")
        _warn(name, "a Method instead of a callback")
        self._round.state = value


def _warn(name: str, replacement: str) -> None:
    warnings.warn(
        f"`server.{name}` of a callback is an interface of hf_federated 0.1 and will be removed in 1.0. Use "
        f"{replacement}.",
        FutureWarning,
        stacklevel=3,
    )
