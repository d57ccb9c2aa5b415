"""Clients in threads of one process, as in a notebook, evaluate and train as they do alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import build_federation
from split_runs import clients_of, rows_of, split_trainer
from tiny import rows, same_weights, tiny_model
from transformers import TrainerCallback


class Pause(TrainerCallback):
    """
    Calls a function at the given occurrence of an event.

    Args:
        event (`str`): Name of the event of `TrainerCallback`.
        occurrence (`int`): Number of the event, from 1.
        function (`Callable`): The function.
    """

    def __init__(self, event: str, occurrence: int, function: Callable[[], Any]) -> None:
        self.num_events = 0

        def on_event(*args: Any, **kwargs: Any) -> None:
            self.num_events += 1
            if self.num_events == occurrence:
                function()

        setattr(self, event, on_event)


class Interruption:
    """Runs a function in a thread until the function calls `hold`, and to its end after the context."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._held, self._released = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._held.wait(60)

    def hold(self) -> None:
        self._held.set()
        assert self._released.wait(60)

    def __enter__(self) -> Interruption:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._released.set()
        if self._thread.ident is not None:
            self._thread.join(60)
        assert self._held.is_set() and not self._thread.is_alive()


def federated(directory: Path, **kwargs: Any) -> tuple[Any, Callable[[int], Any]]:
    return build_federation(directory, **kwargs), rows


def split(directory: Path) -> tuple[Any, Callable[[int], Any]]:
    trainer = split_trainer(directory, clients_of(4), per_device_eval_batch_size=4)
    return trainer, lambda num_rows: rows_of(9, num_rows)


@pytest.mark.parametrize("create", [federated, split])
def test_client_keeps_all_predictions_while_another_client_is_at_its_last_batch(create, tmp_path):
    """At the last batch, accelerate removes the examples that repeat earlier examples."""
    (first, examples), (second, _) = create(tmp_path / "first"), create(tmp_path / "second")
    expected = first.predict(examples(9))
    with Interruption(lambda: second.predict(examples(5))) as interruption:
        first.add_callback(Pause("on_prediction_step", 1, interruption.start))
        second.add_callback(Pause("on_prediction_step", 2, interruption.hold))
        output = first.predict(examples(9))
    assert output.metrics["test_loss"] == expected.metrics["test_loss"]
    assert len(expected.predictions) == 9
    assert np.array_equal(output.predictions, expected.predictions)
    assert np.array_equal(output.label_ids, expected.label_ids)


def test_client_takes_all_steps_while_another_client_accumulates_gradients(tmp_path):
    """accelerate skips a step of the optimizer while gradients are accumulated."""
    clients = {"north": rows(16)}

    def trainer(name: str, *callbacks: TrainerCallback) -> Any:
        model = tiny_model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        settings = {"model": model, "client_callbacks": callbacks}
        return build_federation(
            tmp_path / name, clients, num_rounds=1, trainer=settings, gradient_accumulation_steps=2, max_grad_norm=0.0
        )

    alone = trainer("alone")
    alone.train()
    with Interruption(lambda: second.train()) as interruption:
        first = trainer("first", Pause("on_pre_optimizer_step", 1, interruption.start))
        second = trainer("second", Pause("on_substep_end", 1, interruption.hold))
        first.train()
    assert same_weights(first.model, alone.model)
    assert same_weights(second.model, alone.model)
