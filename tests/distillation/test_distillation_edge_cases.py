"""Clients that a distillation leaves out, and unusual inputs that a distillation accepts."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import pytest
import torch
from datasets import Dataset
from distillation_setup import (
    NUM_PUBLIC,
    SIZES,
    Recorder,
    client_model,
    client_weights,
    distillation_trainer,
    same_clients,
)
from peft import LoraConfig, get_peft_model
from tiny import rows, same_weights, tiny_model
from transformers import AutoModelForSequenceClassification, TrainerCallback

from hf_federated import (
    DSFL,
    FederatedCallback,
    FederatedDataset,
    FederatedTrainer,
)
from hf_federated.adapters import Exchange
from hf_federated.messages import ClientUpdate, Predict, Predictions
from hf_federated.utils.errors import RoundFailedError


# ---- Clients that fail


class SetBiasesToNaN(FederatedCallback):
    """Set biases in the models of clients to NaN just before the clients predict."""

    def __init__(self, *client_ids: str) -> None:
        self.client_ids = client_ids
        self.rejected: list[dict[str, str]] = []
        self.trainer: FederatedTrainer | None = None

    def on_aggregate(self, args, state, control, **kwargs):
        for client_id in self.client_ids:
            model = self.trainer.engine.worker.models.open(client_id).trainer.model
            model.classifier.bias.data.fill_(math.nan)

    def on_round_end(self, args, state, control, round=None, **kwargs):
        self.rejected.append(round.rejected)


def trainer_with_nan_clients(tmp_path, method, *client_ids, **kwargs):
    """Build a trainer whose given clients predict NaN. Returns the trainer and the callback."""
    callback = SetBiasesToNaN(*client_ids)
    trainer = distillation_trainer(tmp_path, method, record=callback, **kwargs)
    return trainer, callback


@pytest.mark.parametrize("method", ["dsfl", "fedid", "adafd"])
def test_client_with_nan_predictions_is_left_out_and_named(tmp_path, method):
    trainer, callback = trainer_with_nan_clients(tmp_path, method, "b", federation={"num_rounds": 1})
    trainer.train()
    assert list(callback.rejected[0]) == ["b"]
    assert "Client 'b', round 1" in callback.rejected[0]["b"] and "NaN" in callback.rejected[0]["b"]
    weights = client_weights(trainer)
    assert all(value.isfinite().all() for client_id in "ac" for value in weights[client_id].values())
    assert all(value.isfinite().all() for value in trainer.exchange.read().values())
    assert trainer.state.log_history[0]["federated/num_failed"] == 1


def test_left_out_client_does_not_affect_the_result(tmp_path):
    """Neither the ensemble nor its weights include the client."""
    trainer, _ = trainer_with_nan_clients(tmp_path / "a", "dsfl", "b", federation={"num_rounds": 1})
    trainer.train()
    without = distillation_trainer(
        tmp_path / "b",
        "dsfl",
        federation={"num_rounds": 1},
        train_dataset={client_id: rows(SIZES[client_id], seed=ord(client_id)) for client_id in "ac"},
    )
    without.train()
    assert same_weights(trainer.model, without.model)
    weights, expected = client_weights(trainer), client_weights(without)
    assert all(torch.equal(weights[key][name], expected[key][name]) for key in "ac" for name in weights[key])


@pytest.mark.parametrize("method", ["dsfl", "fedid"])
def test_round_fails_when_fewer_than_min_clients_are_left(tmp_path, method):
    trainer, _ = trainer_with_nan_clients(tmp_path, method, "a", "b", federation={"min_clients": 2})
    with pytest.raises(RoundFailedError, match="Round 1: 1 clients are left for distillation, and min_clients=2.*'b'"):
        trainer.train()
    # The server keeps the model of the last finished aggregation.
    assert same_weights(trainer.model, tiny_model())


class UnableToPredict(DSFL.client_part):
    """Fails when the server asks for predictions."""

    def answer(self, message):
        if isinstance(message, Predict):
            raise OSError("the disk is full")
        return super().answer(message)


class WithoutPredictions(DSFL):
    client_part = UnableToPredict


@pytest.mark.parametrize(("min_clients", "asked"), [(3, "a"), (2, "ab"), (1, "abc")])
def test_no_further_client_is_asked_once_too_few_clients_are_left(tmp_path, min_clients, asked):
    recorder = Recorder()
    trainer = distillation_trainer(
        tmp_path, WithoutPredictions(), record=recorder, federation={"min_clients": min_clients}
    )
    message = (
        f"Round 1: {min_clients - 1} clients are left for distillation, and min_clients={min_clients}. The last "
        f"failure: Client '{asked[-1]}', round 1, prediction: OSError: the disk is full"
    )
    with pytest.raises(RoundFailedError) as error:
        trainer.train()
    assert str(error.value) == message
    assert [sent.client_id for sent in recorder.sent if isinstance(sent, Predict)] == list(asked)


class ReplaceMetrics(SetBiasesToNaN):
    """Replace metrics in the training report of client `b`."""

    def __init__(self, **metrics) -> None:
        super().__init__()
        self.metrics = metrics

    def on_round_begin(self, args, state, control, **kwargs):
        worker = self.trainer.engine.worker
        handle = worker.handle

        def handled(message):
            reply = handle(message)
            if isinstance(reply, ClientUpdate) and reply.client_id == "b":
                metrics = {**reply.metrics, **self.metrics}
                reported = {name: value for name, value in metrics.items() if value is not ABSENT}
                reply = dataclasses.replace(reply, metrics=reported)
            return reply

        worker.handle = handled


ABSENT = object()


@pytest.mark.parametrize(
    ("weighting", "loss"),
    [
        # All weightings check a loss with the same function.
        pytest.param(weighting, loss, marks=[] if weighting == "enwc" or loss is ABSENT else [pytest.mark.slow])
        for weighting in ("enwc", "rnwc", "llm")
        for loss in (math.nan, math.inf, -0.5, ABSENT)
    ],
)
@pytest.mark.sampled(3)
def test_client_with_an_invalid_loss_is_left_out_and_named(tmp_path, weighting, loss):
    kwargs = {"weighting": weighting, **({"generate": lambda prompt: "1, 1"} if weighting == "llm" else {})}
    record = ReplaceMetrics(min_epoch_loss=loss)
    trainer = distillation_trainer(tmp_path, "adafd", kwargs, record=record, federation={"num_rounds": 1})
    trainer.train()
    assert list(record.rejected[0]) == ["b"]
    reported = None if loss is ABSENT else loss
    assert f"Client 'b', round 1: it reports {reported!r} as the smallest mean loss" in record.rejected[0]["b"]
    assert list(trainer.distillation.weights) == ["a", "c"]
    assert sum(trainer.distillation.weights.values()) == pytest.approx(1)


def test_invalid_loss_is_accepted_when_the_weights_do_not_use_it(tmp_path):
    record = ReplaceMetrics(min_epoch_loss=-1.0)
    trainer = distillation_trainer(
        tmp_path, "adafd", {"weighting": "size"}, record=record, federation={"num_rounds": 1}
    )
    trainer.train()
    assert record.rejected == [{}]


INVALID_COUNTS = [
    {"class_count_1": ABSENT},
    {"class_count_0": ABSENT, "class_count_1": ABSENT},
    {"class_count_2": 1.0},
    {"class_count_x": 1.0},
    {"class_count_0": -1.0},
    {"class_count_0": math.nan},
    {"class_count_0": math.inf},
]


@pytest.mark.parametrize("counts", INVALID_COUNTS)
@pytest.mark.sampled(4)
def test_client_with_invalid_class_counts_is_left_out_and_named(tmp_path, counts):
    record = ReplaceMetrics(**counts)
    distillation_trainer(tmp_path, "fedkd", record=record).train()
    assert list(record.rejected[0]) == ["b"]
    assert "Client 'b', round 1: it reports {" in record.rejected[0]["b"]
    assert "as its numbers of examples of each class" in record.rejected[0]["b"]


@pytest.mark.parametrize(
    "counts", [INVALID_COUNTS[0], *(pytest.param(counts, marks=pytest.mark.slow) for counts in INVALID_COUNTS[1:])]
)
def test_weighting_by_size_does_not_use_class_counts(tmp_path, counts):
    record = ReplaceMetrics(**counts)
    distillation_trainer(tmp_path, "fedkd", {"weighting": "size"}, record=record).train()
    assert record.rejected == [{}]


class Diverge(TrainerCallback):
    """Set weights of a model with three layers to infinity at the end of its training."""

    def on_train_end(self, args, state, control, model=None, **kwargs):
        if model.config.num_hidden_layers == 3:
            model.classifier.weight.data.fill_(math.inf)


def test_client_model_is_restored_when_local_training_diverges(tmp_path):
    models = {"a": 1, "b": 3, "c": 1}
    record = Recorder()
    trainer = distillation_trainer(
        tmp_path,
        "dsfl",
        record=record,
        client_model_init=lambda client_id: tiny_model(num_hidden_layers=models[client_id]),
        client_callbacks=[Diverge()],
    )
    trainer.train()
    assert not any(isinstance(reply, Predictions) and reply.client_id == "b" for reply in record.received)
    before = Exchange(tiny_model(num_hidden_layers=3)).read()
    after = client_weights(trainer)["b"]
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(("method", "kwargs"), [("fedmd", {"client_lr": 1e30}), ("fedid", {"client_lr": 1e30})])
def test_client_weights_stay_finite_when_distillation_diverges(tmp_path, method, kwargs):
    args = {"optim": "sgd", "max_grad_norm": 0.0}
    trainer = distillation_trainer(tmp_path, method, kwargs, args=args, client_model_init=client_model)
    with pytest.raises(RoundFailedError):
        trainer.train()
    for client_id, weights in client_weights(trainer).items():
        student = trainer.engine.worker.models.open(client_id).student
        assert all(parameter.grad is None for parameter in student.model.parameters())
        if method == "fedmd":
            assert all(value.isfinite().all() for value in weights.values())


def test_non_finite_gradient_changes_neither_model_nor_optimizer(tmp_path):
    trainer = distillation_trainer(tmp_path, "dsfl", federation={"num_rounds": 1})
    trainer.train()
    model = trainer.engine.worker.models.open("a")
    before, state = model.exchange.read(), copy.deepcopy(model.student.state_dict())
    logits = model.student.forward(model.student.inputs([0, 1]))
    with pytest.raises(FloatingPointError, match="client_lr"):
        model.student.step(logits.sum() * math.nan)
    after = model.exchange.read()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for number, values in state["optimizer"]["state"].items():
        for name, value in values.items():
            assert torch.equal(value, model.student.state_dict()["optimizer"]["state"][number][name])
    assert state["scheduler"] == model.student.state_dict()["scheduler"]


def test_diverging_server_raises_an_error(tmp_path):
    trainer = distillation_trainer(tmp_path, "mhat", {"server_lr": 1e30}, args={"optim": "sgd", "max_grad_norm": 0.0})
    with pytest.raises(FloatingPointError, match="`server_lr`"):
        trainer.train()


def test_client_without_evaluation_data_is_left_out_of_the_ensemble(tmp_path):
    def accuracy(prediction):
        return {"f1": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    record = SetBiasesToNaN()
    trainer = distillation_trainer(
        tmp_path,
        "adafd",
        {"weighting": "llm", "generate": lambda prompt: "1, 1", "clients_evaluate": True},
        eval_dataset=FederatedDataset.from_dict({"a": rows(4), "c": rows(4)}),
        compute_metrics=accuracy,
        federation={"num_rounds": 1},
        record=record,
    )
    trainer.train()
    assert list(record.rejected[0]) == ["b"] and "has no evaluation examples" in record.rejected[0]["b"]
    assert trainer.distillation.weights == {"a": 0.5, "c": 0.5}


# ---- Accepted inputs


@pytest.mark.parametrize("method", ["fedid", "adafd", "feded"])
def test_distillation_with_one_client_trains_the_server(tmp_path, method):
    trainer = distillation_trainer(tmp_path, method, train_dataset={"a": rows(8)})
    trainer.train()
    assert not same_weights(trainer.model, tiny_model())


def test_client_ids_may_contain_any_characters(tmp_path):
    ids = ["../up", "ümlaut — 東京", "a b/c\\d", "weight/a", "0"]
    federation = {"client_store": "disk", "max_resident_clients": 2, "num_rounds": 1}
    trainer = distillation_trainer(
        tmp_path,
        "adafd",
        train_dataset={client_id: rows(4, seed=number) for number, client_id in enumerate(ids)},
        client_model_init=lambda client_id: tiny_model(seed=len(client_id)),
        federation=federation,
        args={"save_strategy": "epoch"},
    )
    trainer.train()
    assert {path.parent for path in tmp_path.rglob("*") if "東京" in path.name or "up" == path.name} == set()
    assert sorted(trainer.distillation.weights) == sorted(ids)
    entry = trainer.state.log_history[0]
    assert sum(entry[f"federated/weight/{client_id}"] for client_id in ids) == pytest.approx(1)


def test_adapters_of_clients_share_the_frozen_base_model(tmp_path):
    base = tiny_model()

    def adapted():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return get_peft_model(
                copy.deepcopy(base), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
            )

    trainer = distillation_trainer(
        tmp_path, "fedid", different_models=False, model=adapted(), server_dataset=rows(6, seed=6)
    )
    trainer.train()
    models = [trainer.engine.worker.models.open(client_id).trainer.model for client_id in SIZES]
    parameters = [dict(model.named_parameters()) for model in (trainer.model, *models)]
    for name, parameter in parameters[0].items():
        identities = {id(model_parameters[name]) for model_parameters in parameters}
        assert len(identities) == (4 if parameter.requires_grad else 1), name
    values = client_weights(trainer)
    assert not torch.equal(*(next(value for name, value in values[key].items() if "lora_B" in name) for key in "ab"))
    trainer.save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "adapter_model.safetensors").stat().st_size < 20_000


@pytest.mark.parametrize("args", [{}, {"bf16_full_eval": True}])
def test_clients_evaluate_their_own_models(tmp_path, args):
    eval_rows = {client_id: rows(6, seed=40 + number) for number, client_id in enumerate(SIZES)}
    trainer = distillation_trainer(
        tmp_path,
        "dsfl",
        eval_dataset=FederatedDataset.from_dict(eval_rows),
        federation={"evaluate_clients": True},
        args={"eval_strategy": "epoch", **args},
    )
    trainer.train()
    for client_id, dataset in eval_rows.items():
        model = trainer.engine.worker.models.open(client_id).trainer.model.eval()
        with torch.no_grad():
            found = model(input_ids=torch.tensor(dataset["input_ids"]), labels=torch.tensor(dataset["labels"]))
        assert trainer.client_metrics[client_id]["eval_loss"] == pytest.approx(float(found.loss), rel=1e-4)


def test_trained_server_model_can_be_saved_loaded_and_used_for_prediction(tmp_path):
    trainer = distillation_trainer(tmp_path, "fedid", args={"save_strategy": "epoch", "eval_strategy": "epoch"})
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert same_weights(loaded, trainer.model)
    predictions = trainer.predict(rows(8, seed=7))
    with torch.no_grad():
        expected = loaded.eval()(input_ids=torch.tensor(rows(8, seed=7)["input_ids"])).logits
    torch.testing.assert_close(torch.tensor(predictions.predictions), expected)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(predictions.metrics["test_loss"])


def test_generate_function_is_saved_by_name(tmp_path):
    def generate(prompt: str) -> str:
        return "1, 1, 1"

    def build():
        return distillation_trainer(
            tmp_path, "adafd", {"weighting": "llm", "generate": generate}, args={"save_strategy": "epoch"}
        )

    trainer = build()
    trainer.train()
    saved = json.loads((tmp_path / "checkpoint-2" / "federated_config.json").read_text())
    assert saved["distillation_kwargs"]["generate"].endswith("<locals>.generate")
    assert "0x" not in repr(trainer.distillation)
    build().train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    with pytest.raises(ValueError, match="it must be a function that maps a prompt"):
        distillation_trainer(tmp_path, "adafd", {"weighting": "llm", "generate": 3})
    with pytest.raises(ValueError, match="there is no model with this name.*pass the function itself"):
        distillation_trainer(tmp_path, "adafd", saved["distillation_kwargs"])


def test_second_train_call_starts_from_initial_client_models(tmp_path):
    trainer = distillation_trainer(tmp_path / "a", "dsfl", federation={"num_rounds": 1, "client_store": "disk"})
    trainer.train()
    first = client_weights(trainer)
    trained = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    # The server continues from its model, as a `Trainer` does. The clients start from their initial models.
    fresh = distillation_trainer(tmp_path / "b", "dsfl", federation={"num_rounds": 1})
    fresh.model.load_state_dict(trained)
    fresh.train()
    assert same_clients(trainer, fresh) and same_weights(trainer.model, fresh.model)
    assert all(
        torch.equal(first[key][name], value)
        for key, weights in client_weights(trainer).items()
        for name, value in weights.items()
    )
    assert trainer.ledger.to_dict() == fresh.ledger.to_dict()


def test_public_dataset_smaller_than_a_batch(tmp_path):
    assert NUM_PUBLIC > 1
    distillation_trainer(
        tmp_path, "fedid", public_dataset=Dataset.from_dict(rows(1)[:1]), federation={"num_rounds": 1}
    ).train()
