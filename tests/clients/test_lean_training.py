"""The lean loop of local training gives the bits of `Trainer.train()`. `Trainer` does every customized training."""

from __future__ import annotations

import functools
import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from language import masking_tokenizer
from peft import LoraConfig, get_peft_model
from tiny import arguments, rows, same_weights, tiny_model
from torch.optim import SGD, RMSprop
from transformers import (
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    default_data_collator,
)

from hf_federated import ClientPart, FederatedCallback, FederatedConfig, FederatedTrainer, federate
from hf_federated.aggregation import FedAvg
from hf_federated.clients.lean_training import LEAN
from hf_federated.messages.serialization import pack
from hf_federated.reporting.run_log import LOG_NAME


SIZES = (1, 3, 6, 9, 12)


class Updates(FederatedCallback):
    """Keeps a copy of every update."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_client_end(self, args, state, control, update, **kwargs) -> None:
        # The speed of a training is not the same in two runs.
        metrics = {name: value for name, value in update.metrics.items() if "second" not in name}
        metrics.pop("train_runtime", None)
        counts = (update.client_id, update.num_examples, update.num_tokens, update.num_steps)
        self.seen.append({"counts": counts, "metrics": repr(metrics), "bytes": pack([update.state, update.extra])})


def clients(sizes: tuple[int, ...] = SIZES) -> dict[str, Dataset]:
    return {f"c{i}": rows(size, seed=i) for i, size in enumerate(sizes)}


def build(directory: Path, loop: str, settings: dict[str, Any], base: type[Trainer] = Trainer) -> tuple[Any, Updates]:
    """Build a trainer. `settings` are training arguments, and other arguments of the trainer under `trainer`."""
    settings = {"federation": {}, "trainer": {}, **settings}
    federation = {"num_rounds": 3, "local_loop": loop, **settings.pop("federation")}
    other = {"model": tiny_model, "train_dataset": clients, **settings.pop("trainer")}
    updates = Updates()
    trainer = federate(base)(
        model=other.pop("model")(),
        args=arguments(directory, **settings),
        train_dataset=other.pop("train_dataset")(),
        federation=FederatedConfig(**federation),
        callbacks=[updates],
        **{name: value() for name, value in other.items()},
    )
    return trainer, updates


def train(directory: Path, loop: str, settings: dict[str, Any], base: type[Trainer] = Trainer) -> tuple[Any, Updates]:
    trainer, updates = build(directory, loop, settings, base)
    trainer.train()
    return trainer, updates


def counts(trainer: Any) -> dict[str, int]:
    return trainer.engine.worker.local_loops


def assert_same(first: tuple[Any, Updates], second: tuple[Any, Updates]) -> None:
    (one, updates), (other, expected) = first, second
    assert same_weights(one.model, other.model)
    assert updates.seen == expected.seen != []
    for client_id in one.clients:
        a, b = (each.engine.worker.models.get_state(client_id) for each in (one, other))
        assert pack(a) == pack(b)


def causal_with_lora():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    return get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", lora_dropout=0.1, fan_in_fan_out=True))


def causal_texts() -> dict[str, Dataset]:
    return {
        name: data.remove_columns("labels").add_column("labels", data["input_ids"]) for name, data in clients().items()
    }


CAUSAL = {"trainer": {"model": causal_with_lora, "train_dataset": causal_texts}}

FAST: dict[str, dict[str, Any]] = {
    "two epochs, weight decay, warm-up": {"weight_decay": 0.1, "warmup_steps": 3, "federation": {"local_epochs": 2}},
    "accumulation, cosine": {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "cosine",
    },
    "local steps, accumulation, carry": {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "federation": {"local_steps": 2, "client_optimizer_state": "carry"},
    },
    "bf16, tokens": {"bf16": True, "include_num_input_tokens_seen": "non_padding"},
    "scaffold, SGD, accumulation": {
        "optim": "sgd",
        "optim_args": "momentum=0.9",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "federation": {"aggregation": "scaffold"},
    },
    "LoRA with dropout": CAUSAL,
}
SLOW: dict[str, dict[str, Any]] = {
    "defaults": {},
    "constant": {"lr_scheduler_type": "constant"},
    "stable decay": {
        "lr_scheduler_type": "warmup_stable_decay",
        "warmup_steps": 2,
        "lr_scheduler_kwargs": {"num_decay_steps": 4},
    },
    "schedule per round": {"federation": {"lr_schedule": "round"}},
    "SGD": {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.1},
    "optimizer class": {"trainer": {"optimizer_cls_and_kwargs": lambda: (SGD, {"lr": 0.1, "momentum": 0.5})}},
    "AdamW without fusion": {"optim": "adamw_torch"},
    "without clipping": {"max_grad_norm": 0.0},
    "last batch dropped": {"dataloader_drop_last": True, "per_device_train_batch_size": 1},
    "sequential": {"train_sampling_strategy": "sequential"},
    "local steps": {"federation": {"local_steps": 2}},
    "local steps, sequential": {"train_sampling_strategy": "sequential", "federation": {"local_steps": 2}},
    "carry": {"federation": {"client_optimizer_state": "carry"}},
    "carry, SGD": {"optim": "sgd", "optim_args": "momentum=0.9", "federation": {"client_optimizer_state": "carry"}},
    "all tokens": {"include_num_input_tokens_seen": "all"},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "progress bar": {"disable_tqdm": False},
    "data seed": {"data_seed": 7},
    "without NaN filter": {"logging_nan_inf_filter": False},
    "drawn rows": {"federation": {"max_rows_per_round": 5}},
    "cohort": {"federation": {"clients_per_round": 2}},
    "fedprox": {"federation": {"aggregation": "fedprox", "aggregation_kwargs": {"mu": 0.1}}},
    "fednova": {"optim": "sgd", "optim_args": "momentum=0.9", "federation": {"aggregation": "fednova"}},
    "local parameters": {"federation": {"keep_local": ["classifier.*"]}},
    "LoRA, accumulation": {**CAUSAL, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
@pytest.mark.sampled(3)
def test_updates_states_and_weights_are_those_of_trainer(tmp_path, name):
    settings = {**FAST, **SLOW}[name]
    lean = train(tmp_path / "lean", "auto", settings)
    reference = train(tmp_path / "trainer", "trainer", settings)
    assert counts(lean[0]) == {LEAN: len(lean[1].seen)}
    assert counts(reference[0]) == {}
    assert_same(lean, reference)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in FAST if FAST[name] is not CAUSAL])
def test_updates_on_a_gpu_are_those_of_trainer(tmp_path, name):
    if torch.cuda.device_count() != 1:
        pytest.skip(f"The test needs one visible GPU, but there are {torch.cuda.device_count()}.")
    # The fused attention kernels of a GPU may add gradients in any order.
    model = functools.partial(tiny_model, attn_implementation="eager")
    settings = {**FAST[name], "use_cpu": False, "trainer": {"model": model}}
    lean = train(tmp_path / "lean", "auto", settings)
    assert counts(lean[0]) == {LEAN: len(lean[1].seen)}
    assert_same(lean, train(tmp_path / "trainer", "trainer", settings))


def test_masks_are_drawn_anew_in_each_step(tmp_path):
    def masked() -> dict[str, Dataset]:
        return {name: data.remove_columns("labels") for name, data in clients((3, 9)).items()}

    def model() -> BertForMaskedLM:
        config = tiny_model().config
        torch.manual_seed(0)
        return BertForMaskedLM(config)

    collator = DataCollatorForLanguageModeling(masking_tokenizer(), mlm_probability=0.5)
    settings = {
        "federation": {"local_epochs": 2},
        "trainer": {"model": model, "train_dataset": masked, "data_collator": lambda: collator},
    }
    lean = train(tmp_path / "lean", "auto", settings)
    assert counts(lean[0]) == {LEAN: 6}
    assert_same(lean, train(tmp_path / "trainer", "trainer", settings))


def test_examples_that_a_transform_draws_are_read_anew(tmp_path):
    def noisy() -> dict[str, Dataset]:
        def add_noise(batch: dict[str, Any]) -> dict[str, Any]:
            noise = torch.randint(0, 5, (1, 1))
            return {**batch, "input_ids": (torch.tensor(batch["input_ids"]) // 2 + noise).tolist()}

        return {name: data.with_transform(add_noise) for name, data in clients((3, 9)).items()}

    settings = {"trainer": {"train_dataset": noisy}}
    lean = train(tmp_path / "lean", "auto", settings)
    assert counts(lean[0]) == {LEAN: 6}
    assert_same(lean, train(tmp_path / "trainer", "trainer", settings))


@pytest.mark.slow
def test_resumed_run_may_change_the_loop(tmp_path):
    settings = {"save_strategy": "epoch", "federation": {"client_optimizer_state": "carry", "local_steps": 2}}
    reference = train(tmp_path / "trainer", "trainer", settings)
    for first, second in (("trainer", "auto"), ("auto", "trainer")):
        directory = tmp_path / first
        train(directory, first, {**settings, "federation": {**settings["federation"], "num_rounds": 3}})
        resumed, updates = build(directory, second, settings)
        resumed.train(resume_from_checkpoint=str(directory / "checkpoint-1"))
        assert updates.seen == reference[1].seen[len(SIZES) :]
        assert same_weights(resumed.model, reference[0].model)


def test_client_that_fails_in_its_training_does_not_change_the_next_client(tmp_path):
    def with_a_wrong_label() -> dict[str, Dataset]:
        data = clients((9, 9, 5))
        labels = [7 if row == 8 else 0 for row in range(9)]  # the model has two classes
        return {**data, "c1": data["c1"].remove_columns("labels").add_column("labels", labels)}

    settings = {"trainer": {"train_dataset": with_a_wrong_label}, "federation": {"min_clients": 1}}
    lean = train(tmp_path / "lean", "auto", settings)
    assert counts(lean[0]) == {LEAN: 9}
    assert len(lean[1].seen) == 6
    assert_same(lean, train(tmp_path / "trainer", "trainer", settings))


@pytest.mark.parametrize("is_filtered", [True, False])
def test_loss_that_is_not_finite_is_counted_as_in_trainer(tmp_path, is_filtered):
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        value = torch.nn.functional.cross_entropy(outputs["logits"], labels)
        # The gradients stay finite.
        return value + (float("nan") if len(labels) == 2 else 0.0)

    settings = {
        "logging_nan_inf_filter": is_filtered,
        "trainer": {"compute_loss_func": lambda: loss, "train_dataset": lambda: clients((4, 10))},
    }
    lean = train(tmp_path / "lean", "auto", settings)
    reference = train(tmp_path / "trainer", "trainer", settings)
    assert counts(lean[0]) == {LEAN: 6}
    assert ("nan" in "".join(entry["metrics"] for entry in lean[1].seen)) != is_filtered
    assert_same(lean, reference)


# ---- Customized trainings


class OwnLoss(Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


class OnlyBelow(OwnLoss):
    """Defines nothing. Its base class does."""


class OwnStep(Trainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


class OwnOptimizer(Trainer):
    def create_optimizer(self, *args, **kwargs):
        return super().create_optimizer(*args, **kwargs)


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        return super().get_train_dataloader()


class OwnConstructor(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class OwnHelper(Trainer):
    helper = None


class CountingCollator:
    """A collator with a state."""

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        return default_data_collator(features)


class OwnPart(ClientPart):
    """A client half from outside of the library."""


class OwnAverage(FedAvg):
    client_part = OwnPart


class Silent(TrainerCallback):
    """A callback of the user."""


CUSTOMIZED: dict[str, tuple[type[Trainer], dict[str, Any], str]] = {
    "compute_loss": (OwnLoss, {}, "the class OwnLoss has its own 'compute_loss'"),
    "base class": (OnlyBelow, {}, "the class OwnLoss has its own 'compute_loss'"),
    "training_step": (OwnStep, {}, "the class OwnStep has its own 'training_step'"),
    "create_optimizer": (OwnOptimizer, {}, "the class OwnOptimizer has its own 'create_optimizer'"),
    "data loader": (OwnLoader, {}, "the class OwnLoader has its own 'get_train_dataloader'"),
    "constructor": (OwnConstructor, {}, "the class OwnConstructor has its own '__init__'"),
    "attribute": (OwnHelper, {}, "the class OwnHelper has its own 'helper'"),
    "callback": (Trainer, {"trainer": {"client_callbacks": lambda: [Silent()]}}, "the callback Silent receives"),
    "collator": (Trainer, {"trainer": {"data_collator": CountingCollator}}, "the collator CountingCollator may keep"),
    "optim": (Trainer, {"optim": "adafactor"}, "optim='adafactor'"),
    "optimizer class": (
        Trainer,
        {"trainer": {"optimizer_cls_and_kwargs": lambda: (RMSprop, {"lr": 0.1})}},
        "`optimizer_cls_and_kwargs` with the class RMSprop",
    ),
    "optimizers": (
        Trainer,
        {"trainer": {"optimizers": lambda: (lambda model: SGD(model.parameters(), lr=0.1), None)}},
        "`optimizers` has functions",
    ),
    "method": (Trainer, {"federation": {"aggregation": f"{__name__}:OwnAverage"}}, "the client half OwnPart is not"),
    "NEFTune": (Trainer, {"neftune_noise_alpha": 1.0}, "neftune_noise_alpha=1.0"),
    "group by length": (
        Trainer,
        {"train_sampling_strategy": "group_by_length"},
        "train_sampling_strategy='group_by_length'",
    ),
    "workers": (Trainer, {"dataloader_num_workers": 1}, "dataloader_num_workers=1"),
    "split batches": (
        Trainer,
        {"accelerator_config": {"use_seedable_sampler": False}},
        "`accelerator_config` changes the order of the examples",
    ),
}


@pytest.mark.parametrize("name", CUSTOMIZED)
@pytest.mark.sampled(6)
def test_customized_training_uses_the_loop_of_trainer(tmp_path, name):
    base, settings, reason = CUSTOMIZED[name]
    settings = {"federation": {}, "trainer": {}, **settings}
    settings["federation"] = {**settings["federation"], "num_rounds": 1}
    settings["trainer"] = {"train_dataset": lambda: clients((1, 5)), **settings["trainer"]}
    trainer, updates = train(tmp_path, "auto", settings, base)
    ((found, number),) = counts(trainer).items()
    assert found.startswith(reason)
    assert number == len(updates.seen) == 2


def test_replaced_method_of_the_trainer_uses_the_loop_of_trainer(tmp_path):
    trainer, updates = build(tmp_path, "auto", {"federation": {"num_rounds": 1}})
    calls = []

    def compute_loss(self, *args, **kwargs):
        calls.append(args)
        return type(self).compute_loss(self, *args, **kwargs)

    trainer.compute_loss = types.MethodType(compute_loss, trainer)
    trainer.train()
    assert list(counts(trainer)) == [
        "the trainer has its own attribute 'compute_loss', which is a method of its class"
    ]
    assert len(calls) > len(updates.seen)


@pytest.mark.parametrize("owner", [Trainer, FederatedTrainer])
def test_replaced_method_of_a_class_uses_the_loop_of_trainer(tmp_path, monkeypatch, owner):
    _, updates = train(tmp_path / "before", "auto", {"federation": {"num_rounds": 1}})
    original = owner.compute_loss
    monkeypatch.setattr(owner, "compute_loss", lambda self, *args, **kwargs: original(self, *args, **kwargs))
    trainer, _ = train(tmp_path / "after", "auto", {"federation": {"num_rounds": 1}})
    ((reason, number),) = counts(trainer).items()
    assert f"{owner.__name__}" in reason and number == len(updates.seen)


def test_log_of_a_run_counts_the_trainings(tmp_path):
    train(tmp_path, "auto", {"federation": {"num_rounds": 1}})
    end = json.loads((tmp_path / LOG_NAME).read_text().splitlines()[-1])
    assert end["local_loops"] == {LEAN: len(SIZES)}
