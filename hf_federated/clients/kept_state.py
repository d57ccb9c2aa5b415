"""The state that a client keeps between rounds, in addition to its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..messages import Fit
from ..messages.secure_aggregation import SecureFit


# Key of the memories of the client halves in the state of a client.
MEMORIES = "memories"
# Key of the memories of the postprocessors.
STEP_MEMORIES = "steps"
# Key of the tensors that the client keeps (`keep_local`).
LOCAL = "local"
# Keys of the round of the last local training and of the state before it, under secure aggregation.
_ROUND, _BEFORE = "round", "before"


def state_before(kept: Mapping[str, Any], message: Fit) -> dict[str, Any]:
    """
    Return the state of a client before a local training.

    Under secure aggregation, the request contains the round in which the last update of the client was counted. A
    client whose last update was not counted returns to the state before it.

    Args:
        kept (`Mapping[str, Any]`): The state after the last local training.
        message ([`Fit`]): The request.
    """
    if isinstance(message, SecureFit) and _ROUND in kept and kept[_ROUND] != message.accepted_round:
        kept = kept[_BEFORE]
    return {name: value for name, value in kept.items() if name not in (_ROUND, _BEFORE)}


def has_state_after(kept: Mapping[str, Any], message: Fit) -> bool:
    """
    Whether a client has the state after the local training of a request, for example if a session is repeated.

    A server that resumes a run returns the client to an earlier state.

    Args:
        kept (`Mapping[str, Any]`): The state of the client.
        message ([`Fit`]): The request.
    """
    return kept.get(_ROUND) == message.round


def with_note(state: dict[str, Any], round: int, before: dict[str, Any]) -> dict[str, Any]:
    """
    Add what [`state_before`] needs under secure aggregation.

    Args:
        state (`dict[str, Any]`): The state after a local training.
        round (`int`): Round of the local training, from 0.
        before (`dict[str, Any]`): The state before it.
    """
    return {**state, _ROUND: round, _BEFORE: before} if state or before else state
