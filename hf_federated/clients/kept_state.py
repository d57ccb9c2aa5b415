"""The state that a client keeps between rounds, in addition to its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..messages import Fit
from ..messages.secure_aggregation import SecureFit
from ..utils.weighted_mean import State


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


def state_after(
    trainer: Any, local: State, memories: Mapping[str, dict[str, Any]], carries_optimizer: bool
) -> dict[str, Any]:
    """
    Return the state of a client after a local training, without the memories of the postprocessors.

    Args:
        trainer (`transformers.Trainer`): The trainer of the local training.
        local (`dict[str, torch.Tensor]`): The tensors that the client keeps.
        memories (`Mapping[str, dict[str, Any]]`): The memories of the client halves.
        carries_optimizer (`bool`): Whether the client keeps the state of its optimizer.
    """
    scaler, stream = trainer.local_training.scaler, trainer.local_training.stream
    state: dict[str, Any] = {LOCAL: local} if local else {}
    if carries_optimizer:
        state["optimizer"] = trainer.optimizer.state_dict()
        if scaler is not None:
            state["scaler"] = scaler.state_dict()
    else:
        # The optimizer and its schedule form a reference cycle. Free the moments without a garbage collection.
        trainer.optimizer.state.clear()
    if stream is not None:
        state["stream"] = stream.position()
    if kept := {key: memory for key, memory in memories.items() if memory}:
        state[MEMORIES] = kept
    return state


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
