"""Functions in `optimizers=` build the optimizer and the schedule of each local training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from federations import CLIENTS, build_federation
from tiny import arguments, rows, same_weights, tiny_model
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)
from transformers import Trainer, TrainerCallback

from hf_federated import FederatedTrainer
from hf_federated.messages.serialization import pack


# Three steps per epoch.
NUM_EXAMPLES = 12
NUM_ROUNDS = 3


def build_sgd(model):
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def build_adamw(model):
    head = list(model.classifier.parameters())
    return AdamW([{"params": list(model.bert.parameters())}, {"params": head, "lr": 0.05}], lr=1e-2)


PAIRS: dict[str, tuple[Any, Any]] = {
    "exponential": (build_sgd, lambda optimizer, num_steps: ExponentialLR(optimizer, gamma=0.8)),
    "steps": (build_sgd, lambda optimizer, num_steps: StepLR(optimizer, step_size=2, gamma=0.5)),
    "one cycle": (build_adamw, lambda optimizer, num_steps: OneCycleLR(optimizer, [0.1, 0.2], total_steps=num_steps)),
    "lambda": (build_adamw, lambda optimizer, num_steps: LambdaLR(optimizer, lambda step: 1 - step / num_steps)),
    "linear": (build_sgd, lambda optimizer, num_steps: LinearLR(optimizer, 1.0, 0.1, total_iters=num_steps)),
    "chained": (
        build_sgd,
        lambda optimizer, num_steps: ChainedScheduler([LinearLR(optimizer, total_iters=3), StepLR(optimizer, 2, 0.5)]),
    ),
    "default schedule": (build_sgd, None),
}


class RateRecorder(TrainerCallback):
    """Records the learning rates of every step."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []

    def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs) -> None:
        self.rates.append([group["lr"] for group in optimizer.param_groups])


def train_one_client(directory: Path, optimizers: Any, recorder: RateRecorder, **federation: Any) -> FederatedTrainer:
    trainer = build_federation(
        directory,
        rows(NUM_EXAMPLES),
        num_rounds=NUM_ROUNDS,
        federation={"client_optimizer_state": "carry", **federation},
        trainer={"optimizers": optimizers, "client_callbacks": [recorder]},
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.sampled(4)
def test_one_client_equals_plain_trainer_with_the_built_objects(tmp_path, pair) -> None:
    build_optimizer, build_scheduler = PAIRS[pair]
    model = tiny_model()
    optimizer = build_optimizer(model)
    num_steps = NUM_ROUNDS * NUM_EXAMPLES // 4
    scheduler = None if build_scheduler is None else build_scheduler(optimizer, num_steps)
    expected, actual = RateRecorder(), RateRecorder()
    plain = Trainer(
        model,
        arguments(tmp_path / "plain", num_train_epochs=NUM_ROUNDS),
        train_dataset=rows(NUM_EXAMPLES),
        optimizers=(optimizer, scheduler),
        callbacks=[expected],
    )
    plain.train()
    one = train_one_client(tmp_path / "one", PAIRS[pair], actual)
    assert len(expected.rates) == num_steps and actual.rates == expected.rates
    assert same_weights(one.model, plain.model) and not same_weights(one.model, tiny_model())
    kept = one.engine.worker.models.store.get("0")["optimizer"]
    assert pack(kept) == pack(plain.optimizer.state_dict())


@pytest.mark.parametrize("pair", ["exponential", "one cycle"])
def test_schedule_of_one_round_restarts_in_every_round(tmp_path, pair) -> None:
    recorder, first = RateRecorder(), RateRecorder()
    train_one_client(tmp_path / "rounds", PAIRS[pair], recorder, lr_schedule="round")
    train_one_client(tmp_path / "first", PAIRS[pair], first, num_rounds=1)
    assert len(first.rates) == 3 and recorder.rates == first.rates * NUM_ROUNDS


def test_every_local_training_has_a_new_optimizer(tmp_path) -> None:
    built = []

    def build(model):
        built.append(SGD(model.parameters(), lr=0.1, momentum=0.9))
        return built[-1]

    trainer = {"optimizers": (build, None)}
    custom = build_federation(tmp_path / "function", trainer=trainer)
    custom.train()
    assert len({id(optimizer) for optimizer in built}) == len(CLIENTS) * 2
    # The class and its arguments build the same optimizer, except for the parameter groups with weight decay.
    trainer = {"optimizer_cls_and_kwargs": (SGD, {"lr": 0.1, "momentum": 0.9})}
    by_class = build_federation(tmp_path / "class", trainer=trainer)
    by_class.train()
    assert same_weights(custom.model, by_class.model)


def test_parameters_among_the_arguments_of_a_class_reach_every_client(tmp_path) -> None:
    model = tiny_model()
    groups = [{"params": list(model.classifier.parameters())}]
    trainer = {"model": model, "optimizer_cls_and_kwargs": (SGD, {"lr": 0.1, "params": groups})}
    recorder = RateRecorder()
    trainer = build_federation(tmp_path, trainer={**trainer, "client_callbacks": [recorder]})
    trainer.train()
    # Trainer's own optimizer has two groups of parameters, with and without weight decay.
    assert {len(rates) for rates in recorder.rates} == {1}
    assert torch.equal(trainer.model.bert.pooler.dense.weight, tiny_model().bert.pooler.dense.weight)


def test_resumed_run_equals_uninterrupted_run(tmp_path) -> None:
    def train(directory: str, num_rounds: int, resume: bool = False) -> FederatedTrainer:
        trainer = build_federation(
            tmp_path / directory,
            num_rounds=num_rounds,
            federation={"client_optimizer_state": "carry", "clients_per_round": 2},
            trainer={"optimizers": PAIRS["exponential"]},
            save_strategy="steps",
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = train("whole", 4)
    train("resumed", 2)
    assert same_weights(train("resumed", 4, resume=True).model, whole.model)


def test_function_receives_the_model_of_each_client(tmp_path) -> None:
    models = []

    def build(model):
        models.append(model)
        return build_sgd(model)

    trainer = build_federation(
        tmp_path, federation={"aggregation": "local_only"}, trainer={"optimizers": (build, None)}, num_rounds=1
    )
    trainer.train()
    assert len({id(model) for model in models}) == len(CLIENTS)


def test_trainer_without_federation_accepts_functions_and_objects(tmp_path) -> None:
    plain_model = tiny_model()
    optimizer = build_sgd(plain_model)
    models = []
    for name, model, optimizers in (
        ("functions", tiny_model(), PAIRS["exponential"]),
        ("objects", plain_model, (optimizer, ExponentialLR(optimizer, gamma=0.8))),
    ):
        trainer = FederatedTrainer(
            model=model, args=arguments(tmp_path / name), train_dataset=rows(8), optimizers=optimizers
        )
        trainer.train()
        models.append(trainer.model)
    assert trainer.federation is None
    assert same_weights(*models) and not same_weights(models[0], tiny_model())


# ---- Refused input


@pytest.mark.parametrize(
    ("optimizers", "words"),
    [
        ((AdamW, None), "the class AdamW.*optimizer_cls_and_kwargs="),
        ((None, LinearLR), "the class LinearLR.*lambda optimizer, num_training_steps"),
    ],
)
def test_classes_are_refused(tmp_path, optimizers, words) -> None:
    with pytest.raises(ValueError, match=words):
        build_federation(tmp_path, trainer={"optimizers": optimizers})


def test_objects_are_refused_in_a_federation(tmp_path) -> None:
    model = tiny_model()
    optimizer = build_sgd(model)
    alternatives = "`optimizers=.lambda model.*`optimizer_cls_and_kwargs=.*override `create_optimizer`"
    with pytest.raises(ValueError, match=f"one SGD, but every client needs its own.*{alternatives}"):
        build_federation(tmp_path, trainer={"model": model, "optimizers": (optimizer, None)})
    with pytest.raises(ValueError, match="one StepLR, but every client needs its own"):
        scheduler = StepLR(optimizer, 1)
        build_federation(tmp_path, trainer={"model": model, "optimizers": (build_sgd, scheduler)})


def test_two_definitions_of_the_optimizer_are_refused(tmp_path) -> None:
    trainer = {"optimizers": (build_sgd, None), "optimizer_cls_and_kwargs": (SGD, {"lr": 0.1})}
    with pytest.raises(ValueError, match="both define the optimizer"):
        build_federation(tmp_path, trainer=trainer)


def test_function_that_returns_the_same_optimizer_again_is_refused(tmp_path) -> None:
    model = tiny_model()
    optimizer = build_sgd(model)
    trainer = build_federation(tmp_path, trainer={"model": model, "optimizers": (lambda model: optimizer, None)})
    with pytest.raises(ValueError, match="returned the same SGD.*Build a new optimizer in each call"):
        trainer.train()


@pytest.mark.parametrize(
    ("optimizers", "words"),
    [
        ((lambda model: None, None), "type NoneType. It must return a torch.optim.Optimizer"),
        ((None, lambda optimizer, num_steps: None), "type NoneType. It must return a torch.optim.lr_scheduler"),
        (
            (None, lambda optimizer, num_steps: ReduceLROnPlateau(optimizer)),
            "type ReduceLROnPlateau.*depend on the step only",
        ),
    ],
)
def test_functions_that_return_other_objects_are_refused(tmp_path, optimizers, words) -> None:
    trainer = build_federation(tmp_path, trainer={"optimizers": optimizers})
    with pytest.raises(ValueError, match=words):
        trainer.train()
