"""A federation of one client that keeps its optimizer state equals the plain `Trainer`, bit for bit.

A round of the client corresponds to `local_epochs` epochs of the plain run. The tests compare the weights, the
optimizer state, the learning rate of every step, the order of the batches and the logged losses.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from language import masking_tokenizer
from tiny import arguments, rows, same_weights, tiny_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import BertForMaskedLM, DataCollatorForLanguageModeling, Trainer, TrainerCallback

from hf_federated import FederatedConfig, FederatedTrainer, federate
from hf_federated.messages.serialization import pack


NUM_ROUNDS = 3
# Three batches of 4, 4 and 2 examples.
NUM_EXAMPLES = 10


class LearningRateRecorder(TrainerCallback):
    """Records the learning rate of every optimizer step."""

    def __init__(self) -> None:
        self.learning_rates: list[float] = []

    def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs) -> None:
        self.learning_rates.append(optimizer.param_groups[0]["lr"])


def train_examples() -> Dataset:
    lengths = np.random.default_rng(0).integers(1, 9, NUM_EXAMPLES)
    return rows(NUM_EXAMPLES).add_column("length", lengths)


def trainer_arguments(directory: Path, **kwargs: Any) -> dict[str, Any]:
    """Build the keyword arguments of a trainer. `kwargs` are training arguments and arguments of the trainer."""
    trainer_only = ("model_init", "eval_dataset", "compute_metrics", "optimizer_cls_and_kwargs", "compute_loss_func")
    options = {name: kwargs.pop(name) for name in trainer_only if name in kwargs}
    if "model_init" not in options:
        options["model"] = tiny_model()
    return {"args": arguments(directory, **kwargs), "train_dataset": train_examples(), **options}


def train_plain(directory: Path, base: type[Trainer] = Trainer, epochs: int = NUM_ROUNDS, **kwargs: Any):
    recorder = LearningRateRecorder()
    trainer = base(**trainer_arguments(directory, num_train_epochs=epochs, **kwargs), callbacks=[recorder])
    trainer.train()
    return trainer, recorder


def train_one_client(
    directory: Path, base: type[Trainer] = Trainer, federation: dict[str, Any] | None = None, **kwargs: Any
):
    recorder = LearningRateRecorder()
    trainer = federate(base)(
        **trainer_arguments(directory, **kwargs),
        client_callbacks=[recorder],
        federation=FederatedConfig(
            **{"num_rounds": NUM_ROUNDS, "client_optimizer_state": "carry", **(federation or {})}
        ),
    )
    trainer.train()
    return trainer, recorder


def optimizer_of_client(trainer: FederatedTrainer) -> dict[str, Any]:
    return trainer.engine.worker.models.store.get("0")["optimizer"]


def logged_losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_equal_runs(tmp_path: Path, base: type[Trainer] = Trainer, local_epochs: int = 1, **kwargs: Any) -> None:
    plain, expected = train_plain(tmp_path / "plain", base, NUM_ROUNDS * local_epochs, **kwargs)
    one, actual = train_one_client(tmp_path / "one", base, {"local_epochs": local_epochs}, **kwargs)
    assert len(expected.learning_rates) >= NUM_ROUNDS
    assert actual.learning_rates == expected.learning_rates
    assert same_weights(one.model, plain.model)
    assert pack(optimizer_of_client(one)) == pack(plain.optimizer.state_dict())
    assert not same_weights(one.model, tiny_model())
    if local_epochs == 1:
        # The loss of a round is converted to a float32 tensor.
        assert logged_losses(one) == pytest.approx(logged_losses(plain), rel=1e-6)
        for name in ("learning_rate", "grad_norm"):
            values = [[entry[name] for entry in run.state.log_history if name in entry] for run in (one, plain)]
            assert values[0] == values[1] and len(values[0]) == NUM_ROUNDS


CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "cosine": {"lr_scheduler_type": "cosine"},
    "constant_with_warmup": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5},
    "linear with warmup": {"warmup_steps": 4},
    "warmup_stable_decay": {
        "lr_scheduler_type": "warmup_stable_decay",
        "warmup_steps": 2,
        "lr_scheduler_kwargs": {"num_decay_steps": 4},
    },
    "polynomial": {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}},
    "cosine_with_restarts": {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
    "inverse_sqrt": {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2},
    "cosine_with_min_lr": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3}},
    "sgd with momentum": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "adafactor": {"optim": "adafactor"},
    "rmsprop": {"optim": "rmsprop"},
    "adamw fused": {"optim": "adamw_torch_fused", "weight_decay": 0.1},
    "adamw": {"optim": "adamw_torch"},
    "adamw foreach": {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True})},
    "drop_last": {"dataloader_drop_last": True},
    "bf16": {"bf16": True},
    "neftune": {"neftune_noise_alpha": 5.0},
    "activation_checkpointing": {"activation_checkpointing": True},
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "sequential": {"train_sampling_strategy": "sequential"},
    "label_smoothing": {"label_smoothing_factor": 0.1},
    "data_seed": {"data_seed": 7},
    "no clipping": {"max_grad_norm": 0.0},
    "model_init": {"model_init": lambda: tiny_model(seed=3)},
    "compute_loss_func": {
        "compute_loss_func": lambda outputs, labels, num_items_in_batch=None: (
            nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch
        )
    },
    "evaluation": {"eval_strategy": "epoch", "eval_dataset": rows(6, seed=1)},
    "evaluation on start": {"eval_strategy": "epoch", "eval_on_start": True, "eval_dataset": rows(6, seed=1)},
}


# The code path of each of these cases is that of another case.
SLOW_CASES = {"constant_with_warmup", "polynomial", "inverse_sqrt", "cosine_with_min_lr", "cosine_with_restarts"}
SLOW_CASES |= {"rmsprop", "adamw foreach"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW_CASES else []) for case in CASES]
)
def test_one_client_equals_plain_trainer(tmp_path, case) -> None:
    assert_equal_runs(tmp_path, **CASES[case])


def test_one_client_with_data_loader_workers_equals_plain_trainer(tmp_path) -> None:
    assert_equal_runs(tmp_path, dataloader_num_workers=1)


@pytest.mark.parametrize("case", ["defaults", "accumulation", "cosine", "group_by_length"])
def test_rounds_of_two_local_epochs_equal_plain_trainer(tmp_path, case) -> None:
    assert_equal_runs(tmp_path, local_epochs=2, **CASES[case])


def test_local_steps_of_one_epoch_equal_plain_trainer(tmp_path) -> None:
    plain, expected = train_plain(tmp_path / "plain", lr_scheduler_type="cosine")
    one, actual = train_one_client(tmp_path / "one", federation={"local_steps": 3}, lr_scheduler_type="cosine")
    assert actual.learning_rates == expected.learning_rates
    assert same_weights(one.model, plain.model)


def test_max_steps_equals_plain_trainer(tmp_path) -> None:
    """The client takes `max_steps` steps in rounds of `local_steps`, which are one epoch here."""
    plain, expected = train_plain(tmp_path / "plain", max_steps=9, lr_scheduler_type="cosine")
    settings = {"local_steps": 3, "num_rounds": None}
    one, actual = train_one_client(tmp_path / "one", federation=settings, max_steps=9, lr_scheduler_type="cosine")
    assert one.federation.num_rounds == one.state.global_step == 9 // 3
    assert actual.learning_rates == expected.learning_rates and len(expected.learning_rates) == 9
    assert same_weights(one.model, plain.model)


class CustomLossTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = nn.functional.multi_margin_loss(outputs.logits, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class CustomLoaderTrainer(Trainer):
    def get_train_dataloader(self):
        dataset = self.train_dataset.remove_columns("length")
        return self.accelerator.prepare(DataLoader(dataset, batch_size=3, shuffle=True, collate_fn=self.data_collator))


class CustomStepTrainer(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs)) / 2
        self.accelerator.backward(loss)
        return loss.detach()


class CustomOptimizerTrainer(Trainer):
    def create_optimizer(self, model=None):
        if self.optimizer is None:
            self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=self.args.learning_rate)
        return self.optimizer


@pytest.mark.parametrize("base", [CustomLossTrainer, CustomLoaderTrainer, CustomStepTrainer, CustomOptimizerTrainer])
def test_custom_trainer_with_one_client_equals_plain_training(tmp_path, base) -> None:
    assert_equal_runs(tmp_path, base)


def test_without_federation_the_trainer_equals_its_parent_class(tmp_path) -> None:
    plain, _ = train_plain(tmp_path / "plain")
    trainer = FederatedTrainer(**trainer_arguments(tmp_path / "same", num_train_epochs=NUM_ROUNDS))
    trainer.train()
    assert trainer.federation is None
    assert isinstance(trainer.train_dataset, Dataset)
    assert trainer.state.global_step == plain.state.global_step == 9
    assert same_weights(trainer.model, plain.model)
    assert pack(trainer.optimizer.state_dict()) == pack(plain.optimizer.state_dict())
    with pytest.raises(AttributeError, match="no federation"):
        trainer.ledger  # noqa: B018


def test_reset_optimizer_state_differs_from_kept_state(tmp_path) -> None:
    carried, _ = train_one_client(tmp_path / "carried")
    reset, _ = train_one_client(tmp_path / "reset", federation={"client_optimizer_state": "reset"})
    assert not same_weights(carried.model, reset.model)


def test_lr_schedule_per_round_restarts_in_every_round(tmp_path) -> None:
    _, whole = train_one_client(tmp_path / "whole", warmup_steps=2)
    _, by_round = train_one_client(tmp_path / "round", federation={"lr_schedule": "round"}, warmup_steps=2)
    _, first = train_plain(tmp_path / "first", epochs=1, warmup_steps=2)
    assert by_round.learning_rates == first.learning_rates * NUM_ROUNDS
    assert whole.learning_rates != by_round.learning_rates


# ---- Shuffling


class BatchRecordingTrainer(Trainer):
    batches: list[list[list[int]]] = []

    def compute_loss(self, model, inputs, **kwargs):
        self.batches.append(inputs["input_ids"].tolist())
        return super().compute_loss(model, inputs, **kwargs)


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_rounds_shuffle_as_epochs_of_the_plain_trainer(tmp_path, strategy) -> None:
    plain, one = (type("Recorded", (BatchRecordingTrainer,), {"batches": []}) for _ in range(2))
    train_plain(tmp_path / "plain", plain, train_sampling_strategy=strategy)
    train_one_client(tmp_path / "one", one, train_sampling_strategy=strategy)
    assert one.batches == plain.batches
    first, second = one.batches[:3], one.batches[3:6]
    assert first != second
    assert sorted(sum(first, [])) == sorted(sum(second, []))


# ---- Mixed precision


def num_wrappers(function: Any) -> int:
    """Count how many times a function is wrapped."""
    count = 0
    while hasattr(function, "__wrapped__"):
        function, count = function.__wrapped__, count + 1
    return count


def test_autocast_is_not_nested_once_per_client(tmp_path) -> None:
    plain, _ = train_plain(tmp_path / "plain", bf16=True)
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path, bf16=True),
        train_dataset={str(i): rows(4, seed=i) for i in range(6)},
        federation=FederatedConfig(num_rounds=2),
    )
    trainer.train()
    assert num_wrappers(plain.model.forward) > 0
    assert num_wrappers(trainer.model.forward) <= num_wrappers(plain.model.forward)


# ---- State after training


def test_saved_training_arguments_are_those_of_the_user(tmp_path) -> None:
    kwargs = {"gradient_accumulation_steps": 2, "num_train_epochs": 7, "save_strategy": "steps", "save_total_limit": 2}
    trainer, _ = train_one_client(tmp_path, neftune_noise_alpha=5.0, logging_steps=500, **kwargs)
    trainer.save_model(str(tmp_path / "final"))
    expected = arguments(tmp_path, neftune_noise_alpha=5.0, logging_steps=500, **kwargs).to_dict()
    assert trainer.args.to_dict() == expected
    for directory in (tmp_path / f"checkpoint-{NUM_ROUNDS}", tmp_path / "final"):
        saved = torch.load(directory / "training_args.bin", weights_only=False)
        assert saved.to_dict() == expected


class FailingTrainer(Trainer):
    def compute_loss(self, *args, **kwargs):
        raise RuntimeError("out of luck")


class CountingTrainer(Trainer):
    """Records the number of frozen objects at each step."""

    counts: list[int] = []

    def compute_loss(self, *args, **kwargs):
        CountingTrainer.counts.append(gc.get_freeze_count())
        return super().compute_loss(*args, **kwargs)


def test_the_heap_is_frozen_while_clients_train(tmp_path, nothing_is_frozen) -> None:
    train_one_client(tmp_path, CountingTrainer)
    assert CountingTrainer.counts.pop() > 100_000 and gc.get_freeze_count() == 0


def test_the_heap_is_not_frozen_after_an_error(tmp_path, nothing_is_frozen) -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        train_one_client(tmp_path, FailingTrainer)
    assert gc.get_freeze_count() == 0


def test_objects_frozen_by_the_application_stay_frozen(tmp_path, nothing_is_frozen) -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    train_one_client(tmp_path)
    assert gc.get_freeze_count() > before / 2 > 0  # Freed objects are no longer counted.


@pytest.mark.parametrize("fails", [False, True])
def test_trainer_and_model_are_garbage_collected(tmp_path, fails) -> None:
    trainer = federate(FailingTrainer if fails else Trainer)(
        model=tiny_model(), args=arguments(tmp_path), train_dataset={"a": rows(4), "b": rows(4, seed=1)}
    )
    if fails:
        with pytest.raises(RuntimeError):
            trainer.train()
    else:
        trainer.train()
    references = [weakref.ref(trainer), weakref.ref(trainer.model)]
    del trainer
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_neftune_hooks_are_removed_after_training(tmp_path) -> None:
    one, _ = train_one_client(tmp_path, neftune_noise_alpha=5.0)
    assert not one.model.get_input_embeddings()._forward_hooks
    assert one.neftune_noise_alpha == 5.0


def test_seeded_collator_masks_one_client_as_the_plain_trainer(tmp_path) -> None:
    def options() -> dict[str, Any]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = BertForMaskedLM(tiny_model().config)
        return {
            "model": model,
            "train_dataset": rows(NUM_EXAMPLES).remove_columns("labels"),
            "eval_dataset": rows(5, seed=1).remove_columns("labels"),
            "data_collator": DataCollatorForLanguageModeling(masking_tokenizer(), seed=7, mlm_probability=0.5),
        }

    settings = {"num_train_epochs": NUM_ROUNDS, "eval_strategy": "epoch"}
    plain = Trainer(args=arguments(tmp_path / "plain", **settings), **options())
    plain.train()
    federation = FederatedConfig(num_rounds=NUM_ROUNDS, client_optimizer_state="carry")
    one = FederatedTrainer(args=arguments(tmp_path / "one", **settings), federation=federation, **options())
    one.train()
    assert same_weights(one.model, plain.model)
    losses = [[entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry] for run in (one, plain)]
    assert losses[0] == losses[1] and len(losses[0]) == NUM_ROUNDS
