"""`fp16=True`: every client has its own gradient scaler, which is reset or carried with the optimizer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import build_federation
from float16 import Float16Trainer, ScaleRecorder
from tiny import arguments, rows, same_weights, tiny_model
from transformers import Trainer, TrainerCallback
from transformers.utils import logging

from hf_federated import FederatedCallback, FederatedConfig, FederatedTrainer, FedNova, FedProx, Scaffold
from hf_federated.messages import ClientUpdate
from hf_federated.messages.serialization import pack


# Three steps per epoch.
NUM_EXAMPLES = 12
NUM_ROUNDS = 4


class UpdateRecorder(FederatedCallback):
    """Records the updates that the server accepts, by client id."""

    def __init__(self) -> None:
        self.updates: dict[str, list[ClientUpdate]] = {}

    def on_client_end(self, args: Any, state: Any, control: Any, update: ClientUpdate, **kwargs: Any) -> None:
        self.updates.setdefault(update.client_id, []).append(update)


def kept_state(trainer: FederatedTrainer, client_id: str = "0") -> dict[str, Any]:
    return trainer.engine.worker.models.store.get(client_id)


def train_plain(directory: Path, **kwargs: Any) -> tuple[Trainer, ScaleRecorder]:
    recorder = ScaleRecorder()
    trainer = Float16Trainer(
        model=tiny_model(),
        args=arguments(directory, fp16=True, num_train_epochs=NUM_ROUNDS, **kwargs),
        train_dataset=rows(NUM_EXAMPLES),
        callbacks=[recorder],
    )
    trainer.train()
    return trainer, recorder


def train_clients(
    directory: Path,
    train_dataset: Any = None,
    base: type[Trainer] = Float16Trainer,
    federation: dict[str, Any] | None = None,
    client_callbacks: tuple[TrainerCallback, ...] = (),
    **kwargs: Any,
) -> tuple[FederatedTrainer, dict[str, list[ClientUpdate]]]:
    recorder = UpdateRecorder()
    trainer = build_federation(
        directory,
        rows(NUM_EXAMPLES) if train_dataset is None else train_dataset,
        num_rounds=NUM_ROUNDS,
        federation={"client_optimizer_state": "carry", **(federation or {})},
        trainer={"callbacks": [recorder], "client_callbacks": client_callbacks},
        base=base,
        **{"fp16": True, **kwargs},
    )
    trainer.train()
    return trainer, recorder.updates


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_one_client_in_float16_equals_plain_trainer(tmp_path, optim) -> None:
    plain, expected = train_plain(tmp_path / "plain", optim=optim, lr_scheduler_type="cosine")
    recorder = ScaleRecorder()
    one, _ = train_clients(tmp_path / "one", client_callbacks=(recorder,), optim=optim, lr_scheduler_type="cosine")
    # The scale falls in more steps than the first round has, and grows again later.
    assert sorted(expected.scales[:5], reverse=True) == expected.scales[:5]
    assert any(later > earlier for earlier, later in zip(expected.scales, expected.scales[1:], strict=False))
    assert recorder.scales == expected.scales and recorder.skipped == expected.skipped
    assert same_weights(one.model, plain.model) and not same_weights(one.model, tiny_model())
    state = kept_state(one)
    assert pack(state["optimizer"]) == pack(plain.optimizer.state_dict())
    assert state["scaler"]["scaler"] == plain.accelerator.scaler.state_dict()
    rates = [[entry["learning_rate"] for entry in run.state.log_history if "loss" in entry] for run in (one, plain)]
    assert rates[0] == rates[1] and len(set(rates[0])) > 1


def test_schedule_does_not_advance_in_skipped_steps(tmp_path) -> None:
    plain, recorder = train_plain(tmp_path / "plain", optim="sgd")
    one, updates = train_clients(tmp_path / "one", optim="sgd")
    num_skipped = sum(recorder.skipped)
    assert num_skipped > 3
    assert plain.lr_scheduler.last_epoch == plain.state.global_step - num_skipped
    assert kept_state(one)["scaler"]["num_skipped_steps"] == num_skipped
    # Skipped steps count as local steps, and the weight of an update is the number of examples.
    assert [(update.num_steps, update.num_examples) for update in updates["0"]] == [(3, NUM_EXAMPLES)] * NUM_ROUNDS


def test_scale_restarts_in_every_round_if_the_optimizer_state_is_reset(tmp_path) -> None:
    recorder = ScaleRecorder()
    reset, _ = train_clients(
        tmp_path, federation={"client_optimizer_state": "reset"}, client_callbacks=(recorder,), optim="sgd"
    )
    assert recorder.scales[::3] == [Float16Trainer.init_scale] * NUM_ROUNDS
    assert recorder.scales[1] == Float16Trainer.init_scale / 2
    assert kept_state(reset) == {}


def test_scaler_of_the_trainer_keeps_its_initial_state(tmp_path) -> None:
    trainer, _ = train_clients(tmp_path)
    assert trainer.accelerator.scaler.get_scale() == Float16Trainer.init_scale


class OverflowForClientA(Float16Trainer):
    """The gradients of the client whose first example has label 1 and token 31 are never finite."""

    init_scale = 2.0**10

    def compute_loss(self, model, inputs, **kwargs):
        loss = super().compute_loss(model, inputs, **kwargs)
        return loss * math.inf if (inputs["input_ids"] == 31).all() else loss


class FailAfterUnscale(TrainerCallback):
    """Raises an error between the overflow and the update of the scaler."""

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs) -> None:
        if any(parameter.grad is not None and not parameter.grad.isfinite().all() for parameter in model.parameters()):
            raise RuntimeError("interrupted")


@pytest.mark.parametrize("client_callbacks", [(), (FailAfterUnscale(),)], ids=["overflow", "interrupted"])
def test_update_does_not_depend_on_the_overflow_of_another_client(tmp_path, client_callbacks) -> None:
    overflowing = rows(8).map(lambda row: {"input_ids": [31] * len(row["input_ids"])})
    updates = {}
    for name, first in (("overflow", overflowing), ("finite", rows(8, seed=3))):
        _, recorded = train_clients(
            tmp_path / name,
            {"a": first, "b": rows(8, seed=1)},
            OverflowForClientA,
            client_callbacks=client_callbacks,
            federation={"num_rounds": 1},
        )
        updates[name] = recorded["b"][0].state
    assert updates["overflow"].keys() == updates["finite"].keys()
    assert all(torch.equal(updates["overflow"][name], updates["finite"][name]) for name in updates["finite"])


def test_clients_with_own_models_keep_their_scalers(tmp_path) -> None:
    """Each client has its own accelerator, whose scaler is not the scaler of the server's trainer."""
    data = {"0": rows(NUM_EXAMPLES), "1": rows(4)}
    own, _ = train_clients(tmp_path / "own", data, federation={"aggregation": "local_only"}, optim="sgd")
    scales = {client_id: own.engine.worker.models.get_state(client_id)["scaler"] for client_id in data}
    assert scales["0"]["scaler"]["scale"] < scales["1"]["scaler"]["scale"] < Float16Trainer.init_scale


# ---- Algorithms that change gradients


class ScaledTrainer(Trainer):
    """Scales the loss and computes in float32. All scales are powers of two, so scaling does not round."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


@pytest.mark.parametrize(
    "algorithm", [FedProx(proximal_weight=0.5), Scaffold(), FedNova(proximal_weight=0.5)], ids=lambda item: item.name
)
def test_algorithms_change_unscaled_gradients(tmp_path, algorithm) -> None:
    settings: dict[str, Any] = {"optim": "sgd", "max_grad_norm": 0.0, "fp16": False, "learning_rate": 0.1}
    data = {"a": rows(8), "b": rows(8, seed=1)}
    runs = [
        train_clients(tmp_path / base.__name__, data, base, {"aggregation": algorithm}, **settings)
        for base in (Trainer, ScaledTrainer)
    ]
    (plain, plain_updates), (scaled, scaled_updates) = runs
    assert same_weights(scaled.model, plain.model)
    for client_id in data:
        for update, expected in zip(scaled_updates[client_id], plain_updates[client_id], strict=True):
            assert pack(update.extra) == pack(expected.extra)


def test_normalizer_of_fednova_counts_no_skipped_steps(tmp_path) -> None:
    federation = {"aggregation": FedNova(), "local_steps": 12}
    settings = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": 0.5}
    trainer, updates = train_clients(tmp_path, federation=federation, **settings)
    num_skipped = kept_state(trainer)["scaler"]["num_skipped_steps"]
    normalizers = [float(update.extra["normalizer"]) for update in updates["0"]]
    assert num_skipped > 3
    assert sum(normalizers) == 0.5 * (12 * NUM_ROUNDS - num_skipped)


def test_control_variates_are_means_over_the_steps_that_did_not_overflow(tmp_path) -> None:
    """With plain SGD and no clipping, the mean gradient is the change of the parameters, as in option II."""
    federation = {"aggregation": Scaffold(), "local_steps": 12, "num_rounds": 1}
    settings = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": 0.5, "max_grad_norm": 0.0}
    trainer, updates = train_clients(tmp_path, federation=federation, **settings)
    num_steps = 12 - kept_state(trainer)["scaler"]["num_skipped_steps"]
    assert 0 < num_steps < 9
    (update,) = updates["0"]
    start = dict(tiny_model().named_parameters())
    for name, control in update.extra.items():
        expected = (start[name] - update.state[name]) / (0.5 * num_steps)
        torch.testing.assert_close(control, expected, rtol=1e-3, atol=1e-5)


# ---- Refused models


def test_parameters_in_float16_are_refused(tmp_path) -> None:
    words = "parameters in float16 .'bert.embeddings.word_embeddings.weight'.*dtype=torch.float32"
    with pytest.raises(ValueError, match=words):
        build_federation(tmp_path, trainer={"model": tiny_model().half()}, base=Float16Trainer, fp16=True)
    frozen = tiny_model()
    frozen.bert.half().requires_grad_(False)
    build_federation(tmp_path, trainer={"model": frozen}, base=Float16Trainer, fp16=True)


# ---- Few steps


def test_warning_if_all_steps_of_a_client_overflow(tmp_path, caplog) -> None:
    logging.warning_once.cache_clear()
    trainer, updates = train_clients(tmp_path, federation={"client_optimizer_state": "reset", "local_steps": 1})
    assert len(updates["0"]) == NUM_ROUNDS
    assert same_weights(trainer.model, tiny_model())
    assert "overflowed in all of its steps" in caplog.text and "'carry'" in caplog.text


# ---- On a GPU


def gpu_settings() -> dict[str, Any]:
    if torch.cuda.device_count() != 1:
        pytest.skip(f"The test needs one visible GPU, but there are {torch.cuda.device_count()}.")
    # The fused attention kernels of a GPU may add gradients in any order.
    return {"model": tiny_model(attn_implementation="eager"), "train_dataset": rows(NUM_EXAMPLES)}


@pytest.mark.gpu
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_one_client_in_float16_on_a_gpu_equals_plain_trainer(tmp_path, optim) -> None:
    settings = {"fp16": True, "use_cpu": False, "optim": optim, "num_train_epochs": NUM_ROUNDS}
    plain = Trainer(args=arguments(tmp_path / "plain", **settings), **gpu_settings())
    assert plain.accelerator.scaler.is_enabled()
    plain.train()
    federation = FederatedConfig(num_rounds=NUM_ROUNDS, client_optimizer_state="carry")
    one = FederatedTrainer(args=arguments(tmp_path / "one", **settings), federation=federation, **gpu_settings())
    one.train()
    assert same_weights(one.model, plain.model)
    state = kept_state(one)
    assert pack(state["optimizer"]) == pack(plain.optimizer.state_dict())
    assert state["scaler"]["scaler"] == plain.accelerator.scaler.state_dict()


@pytest.mark.gpu
def test_resumed_run_in_float16_on_a_gpu_equals_uninterrupted_run(tmp_path) -> None:
    def train(directory: Path, num_rounds: int, resume: bool = False) -> FederatedTrainer:
        settings = {"fp16": True, "use_cpu": False, "save_strategy": "steps", "lr_scheduler_type": "constant"}
        federation = FederatedConfig(num_rounds=num_rounds, client_optimizer_state="carry")
        trainer = FederatedTrainer(args=arguments(directory, **settings), federation=federation, **gpu_settings())
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = train(tmp_path / "whole", NUM_ROUNDS)
    train(tmp_path / "resumed", 2)
    resumed = train(tmp_path / "resumed", NUM_ROUNDS, resume=True)
    assert same_weights(resumed.model, whole.model)
    assert pack(kept_state(resumed)) == pack(kept_state(whole))
