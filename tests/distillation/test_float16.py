"""Distillation with `fp16=True`: the steps on public and labeled examples scale their losses."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from distillation_setup import client_model, same_clients
from float16 import Float16Trainer
from tiny import arguments, rows, same_weights, tiny_model
from transformers import Trainer

from hf_federated import FederatedConfig, FederatedTrainer, federate
from hf_federated.clients import Student
from hf_federated.messages.serialization import pack


QUICK = ["dsfl", "feddf"]
THOROUGH = ["adafd", "cronus", "fedaux", "feded", "fedkd", "fedmd", "mhat"]
# Clients of the other methods have their own models.
SHARED_MODEL = ("fedaux", "feddf", "feded")


class ScaledTrainer(Trainer):
    """Scales the loss and computes in float32. All scales are powers of two, so scaling does not round."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


def train(
    directory: Path, base: type[Trainer], method: str, num_rounds: int = 2, resume: bool = False, **kwargs: Any
) -> FederatedTrainer:
    models = {} if method in SHARED_MODEL else {"client_model_init": client_model}
    trainer = federate(base)(
        model=tiny_model(),
        args=arguments(directory, save_strategy="steps", optim="adamw_torch", **kwargs),
        train_dataset={"a": rows(8), "b": rows(8, seed=1)},
        public_dataset=rows(8, seed=2),
        server_dataset=rows(6, seed=3),
        federation=FederatedConfig(num_rounds=num_rounds, distillation=method, client_optimizer_state="carry"),
        **models,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("method", [*QUICK, *(pytest.param(method, marks=pytest.mark.slow) for method in THOROUGH)])
def test_scaled_losses_give_the_same_models_as_losses_in_float32(tmp_path, method) -> None:
    """Without clipping, because a scaler without autocast hides the unscaled gradients from the local training."""
    plain, scaled = (
        train(tmp_path / base.__name__, base, method, num_rounds=1, max_grad_norm=0.0)
        for base in (Trainer, ScaledTrainer)
    )
    assert same_weights(scaled.model, plain.model) and same_clients(scaled, plain)
    assert not same_weights(plain.model, tiny_model())


@pytest.mark.parametrize("method", ["dsfl", "feddf"])
def test_resumed_run_in_float16_equals_uninterrupted_run(tmp_path, method) -> None:
    whole = train(tmp_path / "whole", Float16Trainer, method, fp16=True)
    # This is the state of a run that was stopped after its first round.
    shutil.copytree(tmp_path / "whole" / "checkpoint-1", tmp_path / "resumed" / "checkpoint-1")
    resumed = train(tmp_path / "resumed", Float16Trainer, method, resume=True, fp16=True)
    assert same_weights(resumed.model, whole.model) and same_clients(resumed, whole)
    files = [
        {path.name: path.read_bytes() for path in (directory / "checkpoint-2" / "federated").rglob("*.safetensors")}
        for directory in (tmp_path / "whole", tmp_path / "resumed")
    ]
    assert files[0] == files[1] and files[0]


# ---- Single steps


def build_student(directory: Path, init_scale: float | None = None) -> Student:
    trainer = Trainer(tiny_model(), arguments(directory, optim="sgd"), train_dataset=rows(4))
    if init_scale is not None:
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    student = Student(trainer, rows(4))
    student.prepare(10)
    return student


def loss_of(student: Student) -> torch.Tensor:
    return student.forward(student.inputs([0, 1])).square().mean()


def test_overflow_lowers_the_scale_and_changes_no_parameter(tmp_path) -> None:
    # The scale is the largest power of two in float32. The gradient of the loss, times this scale, overflows.
    student = build_student(tmp_path, init_scale=2.0**127)
    student.step(1e4 * loss_of(student))
    assert same_weights(student.model, tiny_model())
    assert student.state_dict()["scaler"]["scale"] == 2.0**126
    student.step(1e-4 * loss_of(student))
    assert not same_weights(student.model, tiny_model())


def test_step_after_a_loss_of_nan_is_possible(tmp_path) -> None:
    student = build_student(tmp_path, init_scale=2.0**10)
    with pytest.raises(FloatingPointError, match="A distillation step has the loss nan"):
        student.step(loss_of(student) * math.nan)
    assert same_weights(student.model, tiny_model())
    student.step(loss_of(student))
    assert not same_weights(student.model, tiny_model())


def test_gradients_that_overflow_at_every_scale_raise_an_error(tmp_path) -> None:
    student = build_student(tmp_path, init_scale=4.0)
    logits = []

    def overflowing_loss() -> torch.Tensor:
        # The loss is finite, and the derivative of the square root at 0 is infinite.
        logits.append(student.forward(student.inputs([0])))
        return (logits[-1] - logits[-1].detach()).square().sum().sqrt()

    for expected in (2.0, 1.0):
        student.step(overflowing_loss())
        assert student.state_dict()["scaler"]["scale"] == expected
    with pytest.raises(FloatingPointError, match="gradient norm nan"):
        student.step(overflowing_loss())
    assert same_weights(student.model, tiny_model())


def test_state_has_no_scaler_without_a_loss_scale(tmp_path) -> None:
    assert sorted(build_student(tmp_path).state_dict()) == ["optimizer", "scheduler"]


def test_state_restores_the_scale(tmp_path) -> None:
    student, other = (build_student(tmp_path, init_scale=2.0**127) for _ in range(2))
    student.step(1e4 * loss_of(student))
    state = student.state_dict()
    fresh = Student(other._trainer, rows(4))
    fresh.load_state_dict(state)
    fresh.prepare(10)
    assert pack(fresh.state_dict()) == pack(state)
