"""A trainer that joins a federation over a network behaves as a trainer: callbacks, logs and the progress bar."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from federations import settings_of
from tiny import arguments, rows, tiny_model
from transformers import ProgressCallback, TrainerCallback

from hf_federated import FederatedConfig, FederatedTrainer
from hf_federated.clients import client_seed
from hf_federated.distributed.process_group import process_group
from hf_federated.engines import EngineContext, NetworkEngine, Plan
from hf_federated.messages import ClientUpdate, Fit


NUM_ROUNDS, NUM_EXAMPLES, BATCH_SIZE = 3, 10, 4


class Events(TrainerCallback):
    """Records the events of a loop and the logged values."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.logs: list[dict[str, float]] = []
        self.ended = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append((state.global_step, state.max_steps))

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))

    def on_train_end(self, args, state, control, **kwargs):
        self.ended += 1


class Bars(ProgressCallback):
    """Keeps the positions of the progress bar."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: list[tuple[int, int]] = []

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        self.positions.append((self.training_bar.n, self.training_bar.total))


@pytest.fixture
def joined(tmp_path) -> tuple[FederatedTrainer, Events, Events, list[ClientUpdate]]:
    """A client that has trained in three rounds, its events, those of its local training, and its updates."""
    outer, inner, updates = Events(), Events(), []
    args = arguments(tmp_path, disable_tqdm=False, logging_strategy="steps", per_device_train_batch_size=BATCH_SIZE)
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=args,
        train_dataset={"north": rows(NUM_EXAMPLES)},
        federation=FederatedConfig(num_rounds=NUM_ROUNDS),
        callbacks=[outer, Bars()],
        client_callbacks=[inner],
    )
    engine = NetworkEngine(["north"], address="127.0.0.1:0", insecure=True, join_timeout=20)
    settings = settings_of(trainer)
    state = {name: value.detach().clone() for name, value in trainer.exchange.tensors.items()}
    engine.transport.start(["north"], settings)

    def serve() -> None:
        engine._note(engine.transport.receive(20))
        engine.start(EngineContext(lambda: None, {}, "data", process_group()))
        for round in range(NUM_ROUNDS):
            plan = Plan(
                round, ("north",), lambda name, round=round: Fit(round, name, client_seed(42, name, round), state)
            )
            updates.extend(engine.run(plan))
        engine.transport.stop()

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    trainer.join(engine.transport.address, client_id="north", insecure=True, connect_timeout=10)
    server.join(timeout=20)
    return trainer, outer, inner, updates


def test_callbacks_trackers_and_the_progress_bar_work_on_a_client(joined):
    trainer, outer, inner, updates = joined
    assert [type(update) for update in updates] == [ClientUpdate] * NUM_ROUNDS
    # A step of the loop is a round. Local training has ceil(10 / 4) steps.
    assert outer.steps == [(round + 1, NUM_ROUNDS) for round in range(NUM_ROUNDS)] and outer.ended == 1
    assert [step for step, _ in inner.steps] == [1, 2, 3] * NUM_ROUNDS
    # The trackers of `report_to` receive what callbacks receive.
    losses = [entry["loss"] for entry in outer.logs if "loss" in entry]
    assert losses == pytest.approx([update.metrics["loss"] for update in updates], abs=1e-4)
    assert trainer.state.log_history[-1]["train_loss"] > 0
    bars = next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Bars))
    assert bars.positions == [(round + 1, NUM_ROUNDS) for round in range(NUM_ROUNDS)]


def test_client_ends_with_the_states_that_it_needs_and_without_checkpoints(joined):
    trainer, *_ = joined
    output_dir = Path(trainer.args.output_dir)
    assert not list(output_dir.glob("checkpoint-*"))
    assert [path.name for path in (output_dir / "client_states").iterdir()] == ["north"]
