"""State that a distillation must not change or depend on: random generators, labels, gradients and client order."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from distillation_setup import SIZES, Recorder, client_model, client_weights, distillation_trainer, same_clients
from tiny import rows, same_weights, tiny_model

from hf_federated import FederatedCallback
from hf_federated.messages import Predict, Predictions


METHODS = ["adafd", "cronus", "dsfl", "feded", "fedid", "fedmd", "mhat"]


def generator_states():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


class GeneratorRecorder(FederatedCallback):
    """Record the states of the global generators before and after each distillation."""

    trainer = None

    def __init__(self) -> None:
        self.before: list[object] = []
        self.after: list[object] = []

    def on_aggregate(self, args, state, control, **kwargs):
        self.before.append(generator_states())

    def on_round_end(self, args, state, control, **kwargs):
        self.after.append(generator_states())


@pytest.mark.parametrize("method", ["adafd", "fedid"])
def test_distillation_does_not_use_the_global_generators(tmp_path, method):
    recorder = GeneratorRecorder()
    distillation_trainer(tmp_path, method, record=recorder, federation={"max_resident_clients": 1}).train()
    assert recorder.before == recorder.after and len(recorder.before) == 2


def relabeled(data: Dataset, column: str = "labels") -> Dataset:
    """The same examples with wrong labels, in a column with the given name."""
    return data.remove_columns("labels").add_column(column, [1 - label for label in data["labels"]])


@pytest.mark.parametrize(
    ("column", "args"),
    [
        ("labels", {}),
        ("label", {}),
        ("label_ids", {}),
        # The user declares this column as a label, but the model's forward has an argument with the same name.
        ("position_ids", {"label_names": ["labels", "position_ids"]}),
    ],
)
def test_models_do_not_receive_labels_of_public_examples(tmp_path, column, args):
    public = relabeled(rows(10, seed=5), column)
    trainer = distillation_trainer(tmp_path, "dsfl", public_dataset=public, federation={"num_rounds": 1}, args=args)
    trainer.train()
    for student in students_of(trainer):
        assert list(student.inputs([0, 1])) == ["input_ids"]


def students_of(trainer):
    """The students of the server and of all clients."""
    models = trainer.engine.worker.models
    students = [trainer.distillation.server.student]
    return students + [models.open(client_id).student for client_id in SIZES]


def first_predictions(trainer, record):
    trainer.train()
    return {
        reply.client_id: reply.values["values"]
        for message, reply in zip(record.sent, record.received, strict=True)
        if isinstance(message, Predict) and message.round == 0 and isinstance(reply, Predictions)
    }


def test_first_predictions_depend_on_the_client_only(tmp_path):
    def build(name, **kwargs):
        record = Recorder()
        return distillation_trainer(
            tmp_path / name, "dsfl", record=record, federation={"num_rounds": 1}, **kwargs
        ), record

    expected = first_predictions(*build("all"))
    fewer = first_predictions(*build("fewer", train_dataset={key: rows(SIZES[key], seed=ord(key)) for key in "bc"}))
    other_server = first_predictions(*build("server", model=tiny_model(seed=9, hidden_size=8)))
    assert sorted(fewer) == ["b", "c"]
    for found in (fewer, other_server):
        assert all(torch.equal(value, expected[client_id]) for client_id, value in found.items())


class ReverseClients(FederatedCallback):
    """Process the clients of a cohort in reverse order."""

    trainer = None

    def on_round_begin(self, args, state, control, **kwargs):
        self.trainer.engine.own_clients = lambda cohort: list(reversed(cohort))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sampled(3)
def test_order_of_replies_does_not_change_the_result(tmp_path, method):
    forwards = distillation_trainer(tmp_path / "a", method, federation={"num_rounds": 1})
    backwards = distillation_trainer(tmp_path / "b", method, federation={"num_rounds": 1}, record=ReverseClients())
    for trainer in (forwards, backwards):
        trainer.train()
    assert same_weights(forwards.model, backwards.model) and same_clients(forwards, backwards)
    assert forwards.ledger.to_dict() == backwards.ledger.to_dict()


def test_server_labels_affect_clients_through_feedback_only(tmp_path):
    trainers = [
        distillation_trainer(
            tmp_path / str(number),
            "fedid",
            {"feedback": feedback},
            federation={"num_rounds": 1},
            server_dataset=rows(6, seed=6) if number % 2 else relabeled(rows(6, seed=6)),
        )
        for number, feedback in enumerate(["none", "none", "chain_rule", "chain_rule"])
    ]
    for trainer in trainers:
        trainer.train()
    assert same_clients(trainers[0], trainers[1])
    assert not same_clients(trainers[2], trainers[3])
    assert same_weights(trainers[0].model, trainers[1].model)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sampled(3)
def test_no_gradients_graphs_or_virtual_steps_remain(tmp_path, method):
    weights: dict[str, torch.Tensor] = {}

    class WeightsRecorder(FederatedCallback):
        def on_round_end(self, args, state, control, round, **kwargs):
            weights.update(round.state)

    trainer = distillation_trainer(tmp_path, method)
    trainer.add_callback(WeightsRecorder())
    trainer.train()
    models = trainer.engine.worker.models
    for client_id in SIZES:
        model = models.open(client_id)
        assert model.pending is None
        assert all(parameter.grad is None for parameter in model.trainer.model.parameters())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert all(torch.equal(weights[name], value) for name, value in trainer.exchange.read().items())


@pytest.mark.parametrize(
    ("method", "kwargs"),
    [
        ("adafd", {"server_epochs": 2, "client_epochs": 3}),
        ("dsfl", {"server_epochs": 3}),
        ("fedid", {"public_epochs": 2}),
        ("feded", {"server_epochs": 2}),
    ],
)
@pytest.mark.sampled(2)
def test_distillation_learning_rates_reach_zero_at_the_last_step(tmp_path, method, kwargs):
    trainer = distillation_trainer(tmp_path, method, kwargs)
    trainer.train()
    # With FedED, only the server distills.
    for student in students_of(trainer)[: 1 if method == "feded" else None]:
        scheduler = student._trainer.lr_scheduler
        assert scheduler.get_last_lr() == [0.0] * len(scheduler.base_lrs)
        assert scheduler.lr_lambdas[0](scheduler.last_epoch - 1) > 0


@pytest.mark.parametrize("args", [{"bf16": True}, {"gradient_checkpointing": True}, {"max_grad_norm": 0.0}])
def test_distillation_uses_precision_and_checkpointing_of_the_training_arguments(tmp_path, args):
    trainer = distillation_trainer(tmp_path, "fedid", federation={"num_rounds": 1}, args=args)
    trainer.train()
    assert trainer.state.log_history[0]["federated/num_failed"] == 0
    assert not same_weights(trainer.model, tiny_model())
    before = {client_id: dict(client_model(client_id).named_parameters()) for client_id in SIZES}
    for client_id, weights in client_weights(trainer).items():
        assert any(not torch.equal(value, before[client_id][name]) for name, value in weights.items())
