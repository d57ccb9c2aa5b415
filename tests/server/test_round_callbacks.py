"""Callbacks: plain callbacks run once a round, federated callbacks at the events of a round, and others in clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny import arguments, rows, same_weights, tiny_model
from transformers import Trainer, TrainerCallback

from hf_federated import (
    AggregationCallback,
    FedAvg,
    FederatedCallback,
    FederatedConfig,
    FederatedTrainer,
    FedOpt,
    Round,
    federate,
)
from hf_federated.messages import ClientUpdate


CLIENTS = {"north": rows(8), "south": rows(4, seed=1)}
TRAINER_EVENTS = (
    "train_begin", "epoch_begin", "step_begin", "step_end", "evaluate", "log", "save", "epoch_end", "train_end"
)  # fmt: skip
ROUND_EVENTS = ("round_begin", "client_begin", "client_end", "aggregate", "distill", "round_end")


def recording(base: type[TrainerCallback], events: Sequence[str]) -> Any:
    """Build a callback that records the name of each event, with the client or, if there is none, the step."""

    def method(name: str) -> Any:
        def on_event(self, args, state, control, **kwargs) -> None:
            client = kwargs["update"].client_id if "update" in kwargs else kwargs.get("client_id")
            self.events.append((name, client or state.global_step))
            self.kwargs.append((name, kwargs))

        return on_event

    recorder = type("Recorder", (base,), {f"on_{name}": method(name) for name in events})()
    recorder.events, recorder.kwargs = [], []
    return recorder


def train(
    directory: Path,
    callbacks: Sequence[TrainerCallback] = (),
    client_callbacks: Sequence[TrainerCallback] = (),
    federation: dict[str, Any] | None = None,
    base: type[Trainer] = Trainer,
    **kwargs: Any,
) -> FederatedTrainer:
    """Train two rounds of two clients with evaluation, logging and saving in every round."""
    strategies = {"eval_strategy": "steps", "save_strategy": "steps", "logging_strategy": "steps"}
    trainer = federate(base)(
        model=tiny_model(),
        args=arguments(directory, **{**strategies, **kwargs}),
        train_dataset=CLIENTS,
        eval_dataset=rows(4, seed=2),
        callbacks=list(callbacks),
        client_callbacks=client_callbacks,
        federation=FederatedConfig(**{"num_rounds": 2, **(federation or {})}),
    )
    trainer.train()
    return trainer


def test_plain_callback_receives_its_events_once_a_round(tmp_path) -> None:
    recorder = recording(TrainerCallback, TRAINER_EVENTS)
    train(tmp_path, [recorder])
    rounds = [
        [("epoch_begin", r), ("step_begin", r), ("step_end", r + 1), ("log", r + 1), ("log", r + 1)]
        + [("evaluate", r + 1), ("save", r + 1), ("epoch_end", r + 1)]
        for r in range(2)
    ]
    assert recorder.events == [("train_begin", 0), *rounds[0], *rounds[1], ("log", 2), ("train_end", 2)]


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_events_of_a_round_fire_in_order(tmp_path, strategy) -> None:
    recorder = recording(FederatedCallback, [*ROUND_EVENTS, "evaluate", "save", "step_end"])
    strategies = {f"{kind}_strategy": strategy for kind in ("eval", "save", "logging")}
    train(tmp_path, [recorder], **strategies)
    clients = [("client_begin", "north"), ("client_end", "north"), ("client_begin", "south"), ("client_end", "south")]
    rounds = [
        [("round_begin", r), *clients, ("aggregate", r), ("distill", r)]
        + [("step_end", r + 1), ("evaluate", r + 1), ("save", r + 1), ("round_end", r + 1)]
        for r in range(2)
    ]
    assert recorder.events == [*rounds[0], *rounds[1]]


def test_events_of_a_round_receive_the_round_and_the_model(tmp_path) -> None:
    recorder = recording(FederatedCallback, ROUND_EVENTS)
    trainer = train(tmp_path, [recorder])
    for name, kwargs in recorder.kwargs:
        round = kwargs["round"]
        assert isinstance(round, Round)
        assert round.cohort == ("north", "south")
        assert kwargs["model"] is trainer.model
        assert isinstance(kwargs.get("update"), ClientUpdate) == (name == "client_end")


def test_callback_can_stop_training_after_a_round(tmp_path) -> None:
    class Stop(FederatedCallback):
        def on_aggregate(self, args, state, control, **kwargs):
            control.should_training_stop = True
            return control

    trainer = train(tmp_path, [Stop()])
    assert trainer.state.global_step == 1
    assert (tmp_path / "checkpoint-1").is_dir()


def test_client_callbacks_receive_events_of_local_steps(tmp_path) -> None:
    recorder = recording(TrainerCallback, ["train_begin", "step_end", "log", "evaluate", "save", "train_end"])
    trainer = train(tmp_path, client_callbacks=[recorder])
    # Eight examples give two steps, four examples give one. A client logs at its last step and at its end.
    north = [("train_begin", 0), ("step_end", 1), ("step_end", 2), ("log", 2), ("log", 2), ("train_end", 2)]
    south = [("train_begin", 0), ("step_end", 1), ("log", 1), ("log", 1), ("train_end", 1)]
    assert recorder.events == [*north, *south] * 2
    assert trainer.state.global_step == 2


def test_client_callback_can_stop_local_training_early(tmp_path) -> None:
    class OneStep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True

    recorder = recording(FederatedCallback, ["client_end"])
    trainer = train(tmp_path, [recorder], client_callbacks=[OneStep()])
    assert [kwargs["update"].num_steps for _, kwargs in recorder.kwargs] == [1] * 4
    assert trainer.state.global_step == 2


def test_callbacks_of_the_parent_class_run_inside_clients(tmp_path) -> None:
    class Installed(TrainerCallback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_step_end(self, args, state, control, **kwargs) -> None:
            self.steps.append(state.max_steps)

    class Installing(Trainer):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            self.installed = Installed()
            self.add_callback(self.installed)

    trainer = train(tmp_path, base=Installing)
    # Two rounds of two clients with 2 and 1 local steps, and the 2 rounds.
    assert sorted(trainer.installed.steps) == [1, 1, 2, 2, 2, 2, 2, 2]


def test_aggregation_callback_replaces_the_configured_algorithm(tmp_path) -> None:
    algorithm = FedOpt("adam", server_lr=0.1)
    from_callback = train(tmp_path / "given", [AggregationCallback(algorithm)])
    from_config = train(
        tmp_path / "named",
        federation={"aggregation": "fedopt", "aggregation_kwargs": {"server_optimizer": "adam", "server_lr": 0.1}},
    )
    default = train(tmp_path / "default")
    assert from_callback.aggregation is algorithm
    assert isinstance(default.aggregation, FedAvg)
    assert same_weights(from_callback.model, from_config.model)
    assert not same_weights(from_callback.model, default.model)


def test_weights_set_by_a_callback_after_aggregation_are_used_in_the_next_round(tmp_path) -> None:
    class SetsZero(FederatedCallback):
        def on_distill(self, args, state, control, round, **kwargs) -> None:
            round.state = {name: value * 0 for name, value in round.state.items()}

    class SumRecorder(TrainerCallback):
        sums: list[float] = []

        def on_train_begin(self, args, state, control, model, **kwargs) -> None:
            self.sums.append(sum(parameter.abs().sum().item() for parameter in model.parameters()))

    recorder = SumRecorder()
    trainer = train(tmp_path, [SetsZero()], client_callbacks=[recorder])
    assert recorder.sums[0] == recorder.sums[1] > 0
    assert recorder.sums[2:] == [0, 0]
    assert all(not parameter.any() for parameter in trainer.model.parameters())
