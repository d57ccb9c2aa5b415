"""One round is one step of the trainer: step counts, logging, evaluation, saving and callbacks."""

from __future__ import annotations

import functools
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import CLIENTS, build_federation
from peft import LoraConfig, PromptEncoderConfig, get_peft_model
from tiny import arguments, rows, same_weights, tiny_model
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
)

from hf_federated import FederatedConfig, FederatedDataset, FederatedTrainer, Ledger, federate


EVAL_ROWS = rows(8, seed=3)

build = functools.partial(build_federation, num_rounds=4)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def steps_with(trainer: Trainer, key: str) -> list[int]:
    """Steps of the log entries that contain a key."""
    return [entry["step"] for entry in trainer.state.log_history if key in entry]


def checkpoints(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("checkpoint-*"))


# ---- Rounds as steps


def test_global_step_counts_rounds(tmp_path) -> None:
    trainer = build(tmp_path)
    output = trainer.train()
    assert output.global_step == trainer.state.global_step == trainer.state.max_steps == 4
    assert trainer.state.epoch == 4.0
    assert trainer.state.num_train_epochs == 4
    assert output.training_loss == pytest.approx(
        statistics.fmean(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    )


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"strategy": "epoch"}, [1, 2, 3, 4]),
        ({"strategy": "steps"}, [1, 2, 3, 4]),
        ({"strategy": "steps", "steps": 500}, [1, 2, 3, 4]),
        ({"strategy": "steps", "steps": 2}, [2, 4]),
        ({"strategy": "steps", "steps": 3}, [3]),
        ({"strategy": "steps", "steps": 0.5}, [2, 4]),
        ({"strategy": "no"}, []),
    ],
    ids=str,
)
def test_steps_and_ratios_count_rounds(tmp_path, kwargs, expected) -> None:
    values = {f"{kind}_{name}": value for kind in ("logging", "eval", "save") for name, value in kwargs.items()}
    trainer = build(tmp_path, trainer={"eval_dataset": EVAL_ROWS}, **values)
    trainer.train()
    assert steps_with(trainer, "loss") == expected
    # As `Trainer` does with steps, the trainer also evaluates and saves after the last step.
    with_last = sorted({*expected, 4}) if kwargs["strategy"] == "steps" else expected
    assert steps_with(trainer, "eval_loss") == with_last
    assert checkpoints(tmp_path) == [f"checkpoint-{step}" for step in with_last]


def test_logging_first_step_logs_the_first_round(tmp_path) -> None:
    trainer = build(tmp_path, logging_strategy="steps", logging_steps=3, logging_first_step=True)
    trainer.train()
    assert steps_with(trainer, "loss") == [1, 3]


def test_num_train_epochs_sets_the_rounds_without_a_federation(tmp_path) -> None:
    trainer = FederatedTrainer(tiny_model(), arguments(tmp_path, num_train_epochs=2), train_dataset=CLIENTS)
    trainer.train()
    assert trainer.federation == FederatedConfig(num_rounds=2, federation_seed=42)
    assert trainer.state.max_steps == 2
    assert trainer.ledger.rounds()[-1]["num_clients"] == 3
    explicit = build(tmp_path / "explicit", federation={"num_rounds": 2})
    explicit.train()
    assert same_weights(trainer.model, explicit.model)


def test_second_train_call_starts_a_new_run_from_the_trained_model(tmp_path) -> None:
    trainer = build(tmp_path, federation={"aggregation": "fedopt", "client_optimizer_state": "carry"})
    trainer.train()
    after_first_run = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    assert trainer.state.global_step == 4
    assert len(trainer.ledger.rounds()) == 4
    second = tiny_model()
    second.load_state_dict(after_first_run)
    again = build(
        tmp_path / "again",
        federation={"aggregation": "fedopt", "client_optimizer_state": "carry"},
        trainer={"model": second},
    )
    again.train()
    assert same_weights(trainer.model, again.model)


# ---- Evaluation


def test_early_stopping_counts_rounds(tmp_path) -> None:
    ranks = itertools.count()
    trainer = build(
        tmp_path,
        federation={"num_rounds": 9},
        trainer={
            "eval_dataset": EVAL_ROWS,
            # Every evaluation is worse than the previous evaluation.
            "compute_metrics": lambda prediction: {"rank": next(ranks)},
            "callbacks": [EarlyStoppingCallback(early_stopping_patience=2)],
        },
        eval_strategy="steps",
        save_strategy="steps",
        load_best_model_at_end=True,
        metric_for_best_model="rank",
        greater_is_better=False,
    )
    trainer.train()
    assert trainer.state.global_step == 3
    assert trainer.state.best_global_step == 1
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    best = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-1")
    assert same_weights(trainer.model, best)


def build_model(kind: str) -> nn.Module:
    """Build a tiny model, with an adapter if `kind` is `"lora"` or `"p-tuning"`."""
    configs = {
        "lora": LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]),
        "p-tuning": PromptEncoderConfig(task_type="SEQ_CLS", num_virtual_tokens=3, encoder_hidden_size=8),
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return get_peft_model(tiny_model(), configs[kind]) if kind in configs else tiny_model()


@pytest.mark.parametrize("kind", ["full", "lora", "p-tuning"])
def test_load_best_model_at_end_loads_the_best_round(tmp_path, kind) -> None:
    trainer = build(
        tmp_path,
        federation={"num_rounds": 3},
        trainer={"model": build_model(kind), "eval_dataset": EVAL_ROWS},
        eval_strategy="steps",
        save_strategy="steps",
        save_total_limit=1,
        load_best_model_at_end=True,
        # With these arguments, the best round is not the last round.
        greater_is_better=True,
        metric_for_best_model="loss",
    )
    trainer.train()
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    best = max(losses, key=lambda step: losses[step])
    assert best < 3
    assert trainer.state.best_global_step == best
    assert checkpoints(tmp_path) == [f"checkpoint-{best}", "checkpoint-3"]
    assert trainer.evaluate()["eval_loss"] == losses[best]
    if kind == "full":
        saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / f"checkpoint-{best}")
        assert same_weights(trainer.model, saved)


def test_save_total_limit_keeps_the_last_checkpoints(tmp_path) -> None:
    build(tmp_path, save_strategy="steps", save_total_limit=2).train()
    assert checkpoints(tmp_path) == ["checkpoint-3", "checkpoint-4"]


def test_evaluation_datasets_by_name_are_all_evaluated(tmp_path) -> None:
    trainer = build(
        tmp_path, trainer={"eval_dataset": {"dev": EVAL_ROWS, "test": rows(4, seed=5)}}, eval_strategy="epoch"
    )
    trainer.train()
    assert steps_with(trainer, "eval_dev_loss") == steps_with(trainer, "eval_test_loss") == [1, 2, 3, 4]


def test_federated_eval_dataset_is_evaluated_as_one_dataset(tmp_path) -> None:
    clients = FederatedDataset.from_dict(CLIENTS)
    trainer = build(tmp_path, trainer={"eval_dataset": clients, "compute_metrics": accuracy})
    metrics = trainer.evaluate()
    plain = Trainer(
        tiny_model(),
        arguments(tmp_path / "plain"),
        eval_dataset=clients.to_dataset(),
        compute_metrics=accuracy,
    ).evaluate()
    for name in ("eval_loss", "eval_accuracy"):
        assert metrics[name] == plain[name]
    assert not any(name.startswith("federated/") for name in metrics)


def test_evaluate_accepts_a_federated_dataset_as_one_dataset(tmp_path) -> None:
    clients = FederatedDataset.from_dict({"a": rows(6, seed=1), "b": rows(10, seed=2)})
    trainer = FederatedTrainer(tiny_model(), arguments(tmp_path), train_dataset=clients)
    assert trainer.evaluate(clients)["eval_loss"] == trainer.evaluate(clients.to_dataset())["eval_loss"]


def test_client_evaluation_equals_values_computed_by_hand(tmp_path) -> None:
    labels_by_client = {"right": [1, 1, 1, 1], "half": [1, 1, 0, 0], "wrong": [0, 0, 0, 1]}
    eval_clients = FederatedDataset.from_dict(
        {
            name: rows(4).remove_columns("labels").add_column("labels", labels)
            for name, labels in labels_by_client.items()
        }
    )

    class AlwaysOne(Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            return loss, torch.tensor([[0.0, 1.0]]).expand_as(logits), labels

    trainer = federate(AlwaysOne)(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset=CLIENTS,
        eval_dataset=eval_clients,
        compute_metrics=accuracy,
        federation=FederatedConfig(evaluate_clients=True),
    )
    metrics = trainer.evaluate()
    accuracies = {"right": 1.0, "half": 0.5, "wrong": 0.25}
    assert {name: values["eval_accuracy"] for name, values in trainer.client_metrics.items()} == accuracies
    mean = (1.0 + 0.5 + 0.25) / 3
    assert metrics["eval_accuracy"] == (4 + 2 + 1) / 12
    assert metrics["federated/eval_accuracy_mean"] == pytest.approx(mean)
    assert metrics["federated/eval_accuracy_worst"] == 0.25
    assert metrics["federated/eval_accuracy_best"] == 1.0
    assert metrics["federated/eval_accuracy_spread"] == pytest.approx(
        (sum((value - mean) ** 2 for value in accuracies.values()) / 3) ** 0.5
    )
    losses = [values["eval_loss"] for values in trainer.client_metrics.values()]
    assert metrics["federated/eval_loss_worst"] == max(losses)
    assert metrics["federated/eval_loss_best"] == min(losses)


def test_evaluate_clients_runs_at_every_evaluation(tmp_path) -> None:
    trainer = build(
        tmp_path,
        trainer={"eval_dataset": FederatedDataset.from_dict(CLIENTS), "compute_metrics": accuracy},
        federation={"evaluate_clients": True},
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    assert steps_with(trainer, "federated/eval_accuracy_mean") == [2, 4]
    entries = [entry for entry in trainer.state.log_history if "federated/eval_loss_worst" in entry]
    assert all(entry["federated/eval_loss_best"] < entry["federated/eval_loss_worst"] for entry in entries)
    assert set(trainer.client_metrics) == set(CLIENTS)


def test_client_evaluation_does_not_change_training(tmp_path) -> None:
    clients = FederatedDataset.from_dict(CLIENTS)
    runs = [
        build(
            tmp_path / str(evaluate_clients),
            trainer={"eval_dataset": clients},
            federation={"evaluate_clients": evaluate_clients},
            eval_strategy="epoch",
        )
        for evaluate_clients in (False, True)
    ]
    for run in runs:
        run.train()
    assert same_weights(runs[0].model, runs[1].model)


def test_evaluation_and_prediction_work_before_training(tmp_path) -> None:
    trainer = build(tmp_path, trainer={"eval_dataset": EVAL_ROWS, "compute_metrics": accuracy})
    plain = Trainer(tiny_model(), arguments(tmp_path), eval_dataset=EVAL_ROWS, compute_metrics=accuracy)
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    assert np.array_equal(trainer.predict(EVAL_ROWS).predictions, plain.predict(EVAL_ROWS).predictions)
    trainer.train()
    assert trainer.state.global_step == 4


# ---- Saving


def test_saved_model_loads_with_its_federated_config_and_ledger(tmp_path) -> None:
    trainer = build(tmp_path, federation={"aggregation": "fedprox", "aggregation_kwargs": {"proximal_weight": 0.1}})
    trainer.train()
    trainer.save_model()
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert same_weights(loaded, trainer.model)
    assert FederatedConfig.from_pretrained(tmp_path) == trainer.federation
    assert Ledger.load(tmp_path).to_dict() == trainer.ledger.to_dict()
    checkpoint = tmp_path / "elsewhere"
    trainer.save_model(str(checkpoint))
    assert {"config.json", "model.safetensors", "federated_config.json", "federated_ledger.json"} <= {
        path.name for path in checkpoint.iterdir()
    }


def test_checkpoints_can_be_loaded_as_models(tmp_path) -> None:
    trainer = build(tmp_path, save_strategy="steps")
    trainer.train()
    assert checkpoints(tmp_path) == [f"checkpoint-{number}" for number in (1, 2, 3, 4)]
    last = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-4")
    assert same_weights(last, trainer.model)
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert (state["global_step"], state["max_steps"]) == (2, 4)


def test_push_without_network_raises_the_error_of_the_parent_class(tmp_path) -> None:
    errors = []
    for cls in (Trainer, FederatedTrainer):
        with pytest.raises(Exception) as raised:
            cls(
                tiny_model(),
                arguments(tmp_path, push_to_hub=True, hub_model_id="someone/model"),
                train_dataset=rows(4) if cls is Trainer else CLIENTS,
            )
        errors.append(raised.type)
    assert errors[0] is errors[1]
