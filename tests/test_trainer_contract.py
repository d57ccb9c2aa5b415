"""A round is the outer trainer's step: what follows for counting, logging, evaluating, saving and callbacks."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import ROW_LENGTH, arguments, rows, same_weights, tiny_model
from transformers import (
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
)

from hf_federated import FederatedConfig, FederatedDataset, FederatedTrainer, Ledger, federate


CLIENTS = {"north": rows(8), "south": rows(4, seed=1), "west": rows(6, seed=2)}
EVAL_ROWS = rows(8, seed=3)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def build(
    directory: Path,
    train_dataset: Any = None,
    federation: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    **kwargs: Any,
) -> FederatedTrainer:
    """A federation of four rounds; `kwargs` are training arguments."""
    return FederatedTrainer(
        **{"model": tiny_model(), "args": arguments(directory, **kwargs), **(trainer or {})},
        train_dataset=CLIENTS if train_dataset is None else train_dataset,
        federation=FederatedConfig(**{"num_rounds": 4, **(federation or {})}),
    )


def steps_with(trainer: Trainer, key: str) -> list[int]:
    """The steps of the log entries that have a key."""
    return [entry["step"] for entry in trainer.state.log_history if key in entry]


def checkpoints(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("checkpoint-*"))


# ---- Rounds as steps


def test_state_counts_rounds(tmp_path) -> None:
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
    ids=lambda value: str(value),
)
def test_steps_and_ratios_count_rounds(tmp_path, kwargs, expected) -> None:
    values = {f"{kind}_{name}": value for kind in ("logging", "eval", "save") for name, value in kwargs.items()}
    trainer = build(tmp_path, trainer={"eval_dataset": EVAL_ROWS}, **values)
    trainer.train()
    assert steps_with(trainer, "loss") == expected
    assert steps_with(trainer, "eval_loss") == expected
    # As Trainer does, it saves at the end of training if it saves at steps at all.
    saved = expected if not expected or expected[-1] == 4 or kwargs["strategy"] != "steps" else [*expected, 4]
    assert checkpoints(tmp_path) == [f"checkpoint-{step}" for step in saved]


def test_logging_first_step(tmp_path) -> None:
    trainer = build(tmp_path, logging_strategy="steps", logging_steps=3, logging_first_step=True)
    trainer.train()
    assert steps_with(trainer, "loss") == [1, 3]


def test_epochs_of_the_arguments_are_rounds_without_a_federation(tmp_path) -> None:
    trainer = FederatedTrainer(tiny_model(), arguments(tmp_path, num_train_epochs=2), train_dataset=CLIENTS)
    trainer.train()
    assert trainer.federation == FederatedConfig(num_rounds=2, federation_seed=42)
    assert trainer.state.max_steps == 2
    assert trainer.ledger.rounds()[-1]["num_clients"] == 3
    explicit = build(tmp_path / "explicit", federation={"num_rounds": 2})
    explicit.train()
    assert same_weights(trainer.model, explicit.model)


def test_training_twice_starts_a_second_run_from_the_first_ones_model(tmp_path) -> None:
    trainer = build(tmp_path, federation={"aggregation": "fedopt", "client_optimizer_state": "carry"})
    trainer.train()
    after_one = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    assert trainer.state.global_step == 4
    assert len(trainer.ledger.rounds()) == 4
    second = tiny_model()
    second.load_state_dict(after_one)
    again = build(
        tmp_path / "again",
        federation={"aggregation": "fedopt", "client_optimizer_state": "carry"},
        trainer={"model": second},
    )
    again.train()
    assert same_weights(trainer.model, again.model)


# ---- Evaluating


def test_early_stopping_counts_rounds(tmp_path) -> None:
    class Worse(Trainer):
        """Every evaluation is worse than the one before."""

        def evaluate(self, *args, **kwargs):
            metrics = super().evaluate(*args, **kwargs)
            metrics["eval_loss"] = float(self.state.global_step)
            return metrics

    trainer = federate(Worse)(
        model=tiny_model(),
        args=arguments(
            tmp_path,
            eval_strategy="steps",
            save_strategy="steps",
            load_best_model_at_end=True,
            metric_for_best_model="loss",
        ),
        train_dataset=CLIENTS,
        eval_dataset=EVAL_ROWS,
        federation=FederatedConfig(num_rounds=9),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    assert trainer.state.global_step == 3
    assert trainer.state.best_global_step == 1
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    best = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-1")
    assert same_weights(trainer.model, best)


def test_best_model_is_loaded_at_the_end(tmp_path) -> None:
    trainer = build(
        tmp_path,
        trainer={"eval_dataset": EVAL_ROWS},
        eval_strategy="steps",
        save_strategy="steps",
        save_total_limit=1,
        load_best_model_at_end=True,
        learning_rate=0.1,
    )
    trainer.train()
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    best = min(losses, key=lambda step: losses[step])
    assert trainer.state.best_global_step == best
    assert f"checkpoint-{best}" in checkpoints(tmp_path)
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / f"checkpoint-{best}")
    assert same_weights(trainer.model, saved)
    assert trainer.evaluate()["eval_loss"] == losses[best]


def test_save_total_limit_keeps_the_last(tmp_path) -> None:
    build(tmp_path, save_strategy="steps", save_total_limit=2).train()
    assert checkpoints(tmp_path) == ["checkpoint-3", "checkpoint-4"]


def test_evaluation_data_by_name(tmp_path) -> None:
    trainer = build(
        tmp_path, trainer={"eval_dataset": {"dev": EVAL_ROWS, "test": rows(4, seed=5)}}, eval_strategy="epoch"
    )
    trainer.train()
    assert steps_with(trainer, "eval_dev_loss") == steps_with(trainer, "eval_test_loss") == [1, 2, 3, 4]


def test_a_federated_eval_dataset_is_evaluated_as_all_rows_together(tmp_path) -> None:
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


def test_evaluate_clients_by_hand(tmp_path) -> None:
    data = {"right": [1, 1, 1, 1], "half": [1, 1, 0, 0], "wrong": [0, 0, 0, 1]}
    eval_clients = FederatedDataset.from_dict(
        {name: rows(4, seed=i).remove_columns("labels").add_column("labels", labels)
         for i, (name, labels) in enumerate(data.items())}
    )  # fmt: skip

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


def test_evaluate_clients_at_every_evaluation(tmp_path) -> None:
    trainer = build(
        tmp_path,
        trainer={"eval_dataset": FederatedDataset.from_dict(CLIENTS), "compute_metrics": accuracy},
        federation={"evaluate_clients": True, "num_rounds": 2},
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="federated/eval_accuracy_worst",
    )  # fmt: skip
    with pytest.raises(KeyError, match="metric_for_best_model"):
        trainer.train()
    trainer.args.metric_for_best_model = "accuracy"
    trainer.train()
    assert steps_with(trainer, "federated/eval_accuracy_mean") == [1, 2]
    entries = [entry for entry in trainer.state.log_history if "federated/eval_loss_worst" in entry]
    assert all(entry["federated/eval_loss_best"] <= entry["federated/eval_loss_worst"] for entry in entries)


def test_evaluating_clients_changes_nothing_in_training(tmp_path) -> None:
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


def test_evaluating_and_predicting_before_training(tmp_path) -> None:
    trainer = build(tmp_path, trainer={"eval_dataset": EVAL_ROWS, "compute_metrics": accuracy})
    plain = Trainer(tiny_model(), arguments(tmp_path), eval_dataset=EVAL_ROWS, compute_metrics=accuracy)
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    assert np.array_equal(trainer.predict(EVAL_ROWS).predictions, plain.predict(EVAL_ROWS).predictions)
    trainer.train()
    assert trainer.state.global_step == 4


# ---- Logs


def test_logged_loss_is_the_clients_mean_by_rows(tmp_path) -> None:
    trainer = build(tmp_path, federation={"log_clients": True})
    trainer.train()
    weights = {name: data.num_rows for name, data in CLIENTS.items()}
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    for entry in entries:
        mean = sum(weights[name] * entry[f"client/{name}/loss"] for name in CLIENTS) / sum(weights.values())
        assert entry["loss"] == pytest.approx(mean, rel=1e-6)
        for name in ("grad_norm", "learning_rate"):
            assert entry[name] == pytest.approx(statistics.fmean(entry[f"client/{c}/{name}"] for c in CLIENTS))
        assert [entry[f"client/{name}/num_steps"] for name in CLIENTS] == [2, 1, 2]
    assert all(entry["federated/num_clients"] == 3 and entry["federated/num_failed"] == 0 for entry in entries)


def test_logged_learning_rate_is_that_of_the_last_local_step(tmp_path) -> None:
    # Two steps a round, eight in all, from 0.01 down to 0; the second step of round r is number 2r + 1 from 0.
    trainer = build(tmp_path, train_dataset={"a": rows(8), "b": rows(8, seed=1)})
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == pytest.approx([0.01 * (1 - (2 * round + 1) / 8) for round in range(4)])


def test_bytes_in_the_log_are_the_ledgers(tmp_path) -> None:
    trainer = build(tmp_path)
    trainer.train()
    rounds = trainer.ledger.rounds()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    for number, entry in enumerate(entries, start=1):
        for direction in ("bytes_up", "bytes_down"):
            assert entry[f"federated/{direction}"] == sum(row[direction] for row in rounds[:number])
    model_bytes = sum(parameter.nbytes for parameter in trainer.model.parameters())
    assert 3 * model_bytes < rounds[0]["bytes_down"] < 3 * 1.2 * model_bytes


@pytest.mark.parametrize("include", ["no", "all", "non_padding"])
def test_flos_and_tokens_of_one_client_are_the_plain_trainers(tmp_path, include) -> None:
    options = {"include_num_input_tokens_seen": include}
    plain = Trainer(tiny_model(), arguments(tmp_path / "plain", num_train_epochs=4, **options), train_dataset=rows(10))
    plain.train()
    one = build(tmp_path / "one", train_dataset=rows(10), **options)
    one.train()
    assert one.state.total_flos == plain.state.total_flos > 0
    assert one.state.num_input_tokens_seen == plain.state.num_input_tokens_seen
    tokens = [[entry.get("num_input_tokens_seen") for entry in run.state.log_history] for run in (one, plain)]
    assert tokens[0] == tokens[1]
    if include != "no":
        assert one.state.num_input_tokens_seen == 4 * 10 * ROW_LENGTH


def test_throughput_counts_the_rows_of_all_clients(tmp_path) -> None:
    trainer = build(tmp_path, federation={"clients_per_round": 2, "local_epochs": 3})
    trainer.train()
    end = trainer.state.log_history[-1]
    sampled = [client for round in range(4) for client in trainer._runtime._sampler(round)]
    num_rows = 3 * sum(CLIENTS[client].num_rows for client in sampled)
    assert end["train_samples_per_second"] == pytest.approx(num_rows / end["train_runtime"], abs=1e-3)
    assert end["train_steps_per_second"] == pytest.approx(4 / end["train_runtime"], rel=0.01)


def test_throughput_of_local_steps_counts_the_rows_that_were_seen(tmp_path) -> None:
    trainer = build(tmp_path, train_dataset={"a": rows(40), "b": rows(40)}, federation={"local_steps": 2})
    trainer.train()
    end = trainer.state.log_history[-1]
    # 4 rounds of 2 clients with 2 batches of 4 rows.
    assert end["train_samples_per_second"] == pytest.approx(64 / end["train_runtime"], abs=1e-3)


def test_tensorboard_gets_rounds_as_steps(tmp_path, monkeypatch) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    build(
        tmp_path, trainer={"eval_dataset": EVAL_ROWS}, eval_strategy="epoch", report_to=["tensorboard"]
    ).train()  # fmt: skip
    runs = {path.parent for path in (tmp_path / "board").rglob("events.out.tfevents*")}
    assert len(runs) == 1
    events = event_accumulator.EventAccumulator(str(runs.pop()))
    events.Reload()
    for tag in ("train/loss", "train/grad_norm", "eval/loss", "train/federated/bytes_up"):
        assert [scalar.step for scalar in events.Scalars(tag)] == [1, 2, 3, 4]


# ---- Saving


def test_saved_model_loads_and_says_how_it_was_trained(tmp_path) -> None:
    trainer = build(tmp_path, federation={"aggregation": "fedprox", "aggregation_kwargs": {"mu": 0.1}})
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


def test_pushing_without_a_network_fails_as_the_parents(tmp_path) -> None:
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


# ---- Other trainers


def test_a_users_trainer_keeps_its_own_loss(tmp_path) -> None:
    class Halved(Trainer):
        """Half the loss of its parent."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return (loss[0] / 2, loss[1]) if return_outputs else loss / 2

    options = {"learning_rate": 1e-9, "logging_strategy": "steps"}
    losses = []
    for base in (Trainer, Halved):
        trainer = federate(base)(
            model=tiny_model(), args=arguments(tmp_path, **options), train_dataset=CLIENTS,
            federation=FederatedConfig(num_rounds=1),
        )  # fmt: skip
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert federate(Halved).__name__ == "FederatedHalved"
    assert federate(Halved) is federate(Halved)
    assert losses[1] == pytest.approx(losses[0] / 2, rel=1e-4)


def test_seq2seq_trainer_generates_in_its_evaluation(tmp_path) -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    model = BartForConditionalGeneration(
        BartConfig(
            vocab_size=32, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=32,
        )
    )  # fmt: skip
    data = {
        name: dataset.remove_columns("labels").add_column("labels", dataset["input_ids"][:])
        for name, dataset in CLIENTS.items()
    }
    trainer = federate(Seq2SeqTrainer)(
        model=model,
        args=Seq2SeqTrainingArguments(
            **{**arguments(tmp_path).to_dict(), "predict_with_generate": True, "generation_max_length": 5}
        ),
        train_dataset=data,
        eval_dataset=FederatedDataset.from_dict(data),
        compute_metrics=lambda prediction: {"length": prediction.predictions.shape[1]},
        federation=FederatedConfig(num_rounds=2, evaluate_clients=True),
    )
    trainer.train()
    metrics = trainer.evaluate()
    assert isinstance(trainer, Seq2SeqTrainer)
    assert metrics["eval_length"] == metrics["federated/eval_length_mean"] == 5


def test_federate_refuses_what_is_no_trainer() -> None:
    assert federate(Trainer) is FederatedTrainer
    with pytest.raises(TypeError, match="subclass of transformers.Trainer"):
        federate(dict)
    with pytest.raises(TypeError, match="FederatedTrainer is federated already"):
        federate(FederatedTrainer)


def test_ordinary_callbacks_see_rounds(tmp_path) -> None:
    class Count(TrainerCallback):
        def __init__(self) -> None:
            self.events: list[tuple[str, int]] = []

        def on_train_begin(self, args, state, control, **kwargs) -> None:
            self.events.append(("train_begin", state.global_step))

        def on_epoch_begin(self, args, state, control, **kwargs) -> None:
            self.events.append(("epoch_begin", state.global_step))

        def on_step_end(self, args, state, control, **kwargs) -> None:
            self.events.append(("step_end", state.global_step))

        def on_log(self, args, state, control, **kwargs) -> None:
            self.events.append(("log", state.global_step))

        def on_train_end(self, args, state, control, **kwargs) -> None:
            self.events.append(("train_end", state.global_step))

    count = Count()
    build(tmp_path, trainer={"callbacks": [count]}, federation={"num_rounds": 2}).train()
    rounds = [[("epoch_begin", r), ("step_end", r + 1), ("log", r + 1)] for r in range(2)]
    assert count.events == [("train_begin", 0), *rounds[0], *rounds[1], ("log", 2), ("train_end", 2)]
