"""Robust averaging in a federated trainer: training on the server, momentum on clients, LoRA, and refused setups."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from federations import build_federation
from peft import LoraConfig, get_peft_model
from reference import assert_close, loss_over_accumulated_examples, smooth_model, train, weights
from tiny import arguments, rows, same_weights, tiny_model

from hf_federated import FederatedCallback, FederatedConfig, FederatedTrainer, FLTrust


CLIENTS = {name: rows(4, seed=number) for number, name in enumerate(("a", "b", "c", "d", "e"))}
NUM_STEPS = 2
LEARNING_RATE = 0.1


class Recorder(FederatedCallback):
    """Records the global state before each round, the updates, and the update of the server."""

    def __init__(self):
        self.rounds = []

    def on_round_begin(self, args, state, control, round, **kwargs):
        self.rounds.append({"x": {n: v.clone() for n, v in round.state.items()}, "updates": {}})

    def on_client_end(self, args, state, control, update, **kwargs):
        self.rounds[-1]["updates"][update.client_id] = update.state


def federated(tmp_path, aggregation, num_rounds=2, server_dataset=None):
    recorder = Recorder()
    trainer = FederatedTrainer(
        model=smooth_model(),
        args=arguments(
            tmp_path, optim="sgd", learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_grad_norm=0.0
        ),
        compute_loss_func=loss_over_accumulated_examples,
        train_dataset=CLIENTS,
        server_dataset=server_dataset,
        callbacks=[recorder],
        federation=FederatedConfig(num_rounds=num_rounds, local_epochs=NUM_STEPS, **aggregation),
    )
    trainer.train()
    return recorder.rounds


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


# ---- FLTrust


class RecordingFLTrust(FLTrust):
    def __init__(self):
        super().__init__()
        self.updates = []

    def on_server_update(self, update):
        self.updates.append(update)
        super().on_server_update(update)


def test_the_server_trains_without_the_public_examples_of_a_distillation(tmp_path):
    trainer = build_federation(
        tmp_path,
        CLIENTS,
        num_rounds=1,
        federation={"aggregation": "fltrust", "distillation": "feddf"},
        trainer={"server_dataset": rows(4, seed=9), "public_dataset": rows(4, seed=5).remove_columns("labels")},
    )
    trainer.train()
    assert not same_weights(trainer.model, tiny_model())


def test_server_trains_the_global_model_as_a_client_would(tmp_path):
    algorithm, server_dataset = RecordingFLTrust(), rows(4, seed=9)
    rounds = federated(tmp_path, {"aggregation": algorithm}, server_dataset=server_dataset)
    assert len(algorithm.updates) == 2
    for round, update in zip(rounds, algorithm.updates, strict=True):
        assert_close(update.state, train(round["x"], server_dataset, NUM_STEPS, sgd))
        for client_id, state in round["updates"].items():
            assert_close(state, train(round["x"], CLIENTS[client_id], NUM_STEPS, sgd))


def test_fltrust_needs_examples_on_the_server(tmp_path):
    with pytest.raises(ValueError, match="aggregation='fltrust' needs `server_dataset`"):
        build_federation(tmp_path, CLIENTS, federation={"aggregation": "fltrust"})
    with pytest.raises(ValueError, match="aggregation='fltrust' uses `server_dataset`"):
        build_federation(tmp_path, CLIENTS, trainer={"server_dataset": rows(4)})
    with pytest.raises(ValueError, match="Pass a `datasets.Dataset`"):
        build_federation(
            tmp_path, CLIENTS, federation={"aggregation": "fltrust"}, trainer={"server_dataset": [{"input_ids": [1]}]}
        )


def test_failed_training_of_the_server_ends_the_run_with_its_error(tmp_path):
    broken = Dataset.from_dict({"input_ids": [[1, 2]], "attention_mask": [[1, 1]], "labels": [99]})
    trainer = build_federation(
        tmp_path, CLIENTS, federation={"aggregation": "fltrust"}, trainer={"server_dataset": broken}
    )
    with pytest.raises(RuntimeError, match="Round 1: the server could not train on `server_dataset`"):
        trainer.train()


# ---- Momentum on the clients


def test_clients_send_the_momentum_of_their_changes(tmp_path):
    kwargs = {"aggregation": "centered_clipping", "aggregation_kwargs": {"client_momentum": 0.8, "radius": 100.0}}
    rounds = federated(tmp_path, kwargs, num_rounds=3)
    momentum = {}
    for round in rounds:
        for client_id, state in round["updates"].items():
            trained = train(round["x"], CLIENTS[client_id], NUM_STEPS, sgd)
            change = {name: value - round["x"][name] for name, value in trained.items()}
            if client_id in momentum:
                change = {name: 0.8 * momentum[client_id][name] + 0.2 * value for name, value in change.items()}
            momentum[client_id] = change
            assert_close(state, {name: round["x"][name] + value for name, value in change.items()})


# ---- LoRA


def lora(freeze_a=False):
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))
    for name, parameter in model.named_parameters():
        if freeze_a and "lora_A" in name:
            parameter.requires_grad = False
    return model


@pytest.mark.parametrize("aggregation", ["median", "geometric_median", "krum", "norm_bounded_mean"])
def test_adapters_train_with_robust_averaging(tmp_path, aggregation):
    trainer = build_federation(tmp_path, CLIENTS, federation={"aggregation": aggregation}, trainer={"model": lora()})
    before = weights(trainer.model)
    trainer.train()
    changed = [name for name, value in weights(trainer.model).items() if not torch.equal(value, before[name])]
    assert any("lora_A" in name for name in changed) and any("lora_B" in name for name in changed)
    assert not any("base_layer" in name for name in changed)


@pytest.mark.parametrize(
    "federation",
    [
        {"aggregation": "median", "aggregation_kwargs": {"server_optimizer": "adam"}},
        {"aggregation": "centered_clipping"},
    ],
)
def test_setups_that_need_a_frozen_factor_are_refused_before_training(tmp_path, federation):
    with pytest.raises(ValueError, match="Freeze the factors A"):
        build_federation(tmp_path, CLIENTS, federation=federation, trainer={"model": lora()})
    build_federation(tmp_path, CLIENTS, federation=federation, trainer={"model": lora(freeze_a=True)}).train()


# ---- Size of the cohort


def test_cohort_that_is_too_small_is_refused_before_training(tmp_path):
    federation = {"aggregation": "krum", "aggregation_kwargs": {"num_hostile": 1}, "clients_per_round": 4}
    with pytest.raises(ValueError, match="num_hostile=1 of 'krum' needs 2f \\+ 3 = 5 updates, but there are 4"):
        build_federation(tmp_path, CLIENTS, federation=federation)
