"""Callbacks whose schedule covers the training: inside a client they see the position of the client in the run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerState

from .._compat import follows_steps_of_run


class RunPositionCallback:
    """
    Calls the events of a callback with the steps of all rounds, which a learning-rate schedule with `"global"` counts.

    Args:
        callback (`TrainerCallback`): The callback.
        round (`int`): Round number, from 0.
        num_rounds (`int`): Number of rounds of the run.
    """

    def __init__(self, callback: TrainerCallback, round: int, num_rounds: int) -> None:
        self._callback = callback
        self._round = round
        self._num_rounds = num_rounds

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._callback, name)
        return self._with_position(value) if name.startswith("on_") else value

    def _with_position(self, event: Callable[..., Any]) -> Callable[..., Any]:
        def call(args: Any, state: TrainerState, control: Any, **kwargs: Any) -> Any:
            position = copy.copy(state)
            position.global_step = state.global_step + self._round * state.max_steps
            position.max_steps = state.max_steps * self._num_rounds
            return event(args, position, control, **kwargs)

        return call


def at_round(callbacks: Sequence[TrainerCallback], round: int, num_rounds: int) -> list[Any]:
    """Return callbacks of which those with a schedule over the training see the position in the run."""
    return [
        RunPositionCallback(callback, round, num_rounds) if follows_steps_of_run(callback) else callback
        for callback in callbacks
    ]
