"""Scaffold: control variates against option II of the paper and a reference loop."""

from __future__ import annotations

import pytest
import torch
from client_parts import received, sent
from reference import assert_close, distance, loss_over_accumulated_examples, mean, smooth_model, train, weights
from tiny import arguments, rows, same_weights, tiny_model
from torch import nn

from hf_federated import FedAvg, FederatedCallback, FederatedConfig, FederatedTrainer, Scaffold
from hf_federated.messages import ClientUpdate, Fit
from hf_federated.messages.serialization import pack, unpack


CLIENTS = {"a": rows(4), "b": rows(4, seed=1), "c": rows(4, seed=2)}
LEARNING_RATE = 0.5
NUM_STEPS = 3


class Recorder(FederatedCallback):
    """Record the global state, the extra tensors and the updates of each round."""

    def __init__(self) -> None:
        self.rounds: list[dict] = []

    def on_round_begin(self, args, state, control, round=None, **kwargs):
        self.rounds.append({"x": round.state, "updates": {}, "extra": None})

    def on_client_end(self, args, state, control, update, round=None, **kwargs):
        self.rounds[-1]["extra"] = self.trainer.aggregation.fit_extra(round.state)
        self.rounds[-1]["updates"][update.client_id] = update


def federated(tmp_path, algorithm, num_rounds=2, clients_per_round=1.0, **kwargs):
    recorder = Recorder()
    trainer = FederatedTrainer(
        model=smooth_model(),
        args=arguments(
            tmp_path,
            **{"optim": "sgd", "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
            | kwargs,
        ),
        compute_loss_func=loss_over_accumulated_examples,
        train_dataset=CLIENTS,
        callbacks=[recorder],
        federation=FederatedConfig(
            num_rounds=num_rounds,
            clients_per_round=clients_per_round,
            local_epochs=NUM_STEPS,
            aggregation=algorithm,
        ),
    )
    recorder.trainer = trainer
    trainer.train()
    return trainer, recorder.rounds


def kept(trainer, client_id):
    """Return the control variate in the client store, or `None` before the first round of the client."""
    state = trainer.engine.worker.models.store.get(client_id)
    return state["memories"]["0 scaffold"]["control"] if state else None


def zeros():
    return {name: torch.zeros_like(value) for name, value in weights(smooth_model()).items()}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def reference(cohorts, server_lr=1.0):
    """Algorithm 1 with option II and full batches."""
    x, c = weights(smooth_model()), zeros()
    own = {client_id: zeros() for client_id in CLIENTS}
    trajectory = []
    for cohort in cohorts:
        trained, changes = [], []
        for client_id in cohort:
            correction = {name: c[name] - own[client_id][name] for name in c}
            y = train(x, CLIENTS[client_id], NUM_STEPS, sgd, correction=correction)
            new = {n: own[client_id][n] - c[n] + (x[n] - y[n]) / (NUM_STEPS * LEARNING_RATE) for n in c}
            changes.append({name: new[name] - own[client_id][name] for name in c})
            own[client_id] = new
            trained.append(y)
        average, change = mean(trained), mean(changes)
        x = {name: x[name] + server_lr * (average[name] - x[name]) for name in x}
        c = {name: c[name] + len(cohort) / len(CLIENTS) * change[name] for name in c}
        trajectory.append({"x": x, "c": c, "own": dict(own)})
    return trajectory


# ---- Federated runs


def test_client_control_variate_equals_option_ii_of_the_paper(tmp_path):
    trainer, rounds = federated(tmp_path, Scaffold(), num_rounds=2)
    previous = {client_id: zeros() for client_id in CLIENTS}
    for round in rounds:
        x, c = round["x"], round["extra"]
        for client_id, update in round["updates"].items():
            y = update.state
            change = {n: -c[n] + (x[n] - y[n]) / (NUM_STEPS * LEARNING_RATE) for n in c}
            assert_close(update.extra, change)
            previous[client_id] = {n: previous[client_id][n] + change[n] for n in c}
    for client_id in CLIENTS:
        assert_close(kept(trainer, client_id), previous[client_id])
        assert distance(previous[client_id], zeros()) > 1e-2


def test_server_control_variate_is_the_mean_of_the_clients(tmp_path):
    trainer, _ = federated(tmp_path, Scaffold(), num_rounds=2)
    average = mean([kept(trainer, client_id) for client_id in CLIENTS])
    assert_close(trainer.aggregation.state_dict()["control"], average)


def test_two_rounds_equal_the_reference(tmp_path):
    trainer, rounds = federated(tmp_path, Scaffold(), num_rounds=2)
    first, second = reference([CLIENTS, CLIENTS])
    assert_close(rounds[1]["x"], first["x"])
    assert_close(rounds[1]["extra"], first["c"])
    assert_close(weights(trainer.model), second["x"])
    assert_close(trainer.aggregation.state_dict()["control"], second["c"])


def test_rounds_with_sampled_clients_equal_the_reference(tmp_path):
    trainer, rounds = federated(tmp_path, Scaffold(server_lr=0.5), num_rounds=3, clients_per_round=2)
    cohorts = [list(round["updates"]) for round in rounds]
    assert (
        len({tuple(cohort) for cohort in cohorts}) > 1
    )  # so that a client state is kept over rounds without the client
    last = reference(cohorts, server_lr=0.5)[-1]
    assert_close(weights(trainer.model), last["x"])
    assert_close(trainer.aggregation.state_dict()["control"], last["c"])
    for client_id in CLIENTS:
        took_part = any(client_id in cohort for cohort in cohorts)
        assert (kept(trainer, client_id) is not None) == took_part
        if took_part:
            assert_close(kept(trainer, client_id), last["own"][client_id])


def test_accumulated_batches_count_as_one_step(tmp_path):
    trainer, _ = federated(tmp_path, Scaffold(), per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert_close(weights(trainer.model), reference([CLIENTS, CLIENTS])[-1]["x"])


def test_first_round_equals_fedavg_with_uniform_weights(tmp_path):
    models = []
    for aggregation in (Scaffold(), FedAvg("uniform")):
        trainer = FederatedTrainer(
            model=tiny_model(),
            args=arguments(tmp_path),
            train_dataset={"a": rows(8), "b": rows(5, seed=1)},
            federation=FederatedConfig(num_rounds=1, aggregation=aggregation),
        )
        trainer.train()
        models.append(trainer.model)
    assert same_weights(*models)


def test_frozen_parameters_have_zero_control_variates(tmp_path):
    model = smooth_model()
    model.bert.embeddings.requires_grad_(False)
    trainer = FederatedTrainer(
        model=model,
        args=arguments(tmp_path, optim="sgd"),
        train_dataset=CLIENTS,
        federation=FederatedConfig(num_rounds=2, aggregation="scaffold", exchange="all"),
    )
    trainer.train()
    control = trainer.aggregation.state_dict()["control"]
    frozen = [name for name in control if name.startswith("bert.embeddings")]
    assert frozen and all(not control[name].any() for name in frozen)
    assert control["classifier.weight"].any()


# ---- Server side and client side alone


def updates(state, extras):
    return [
        ClientUpdate(0, str(i), state, num_examples=1 + i, num_tokens=0, num_steps=1, extra=extra)
        for i, extra in enumerate(extras)
    ]


def test_server_control_variate_survives_serialization():
    state = {"w": torch.ones(2), "half": torch.ones(2, dtype=torch.bfloat16), "count": torch.tensor(1)}
    algorithm = Scaffold()
    algorithm.setup(num_rounds=2, num_clients=4)
    extra = algorithm.fit_extra(state)
    assert {name: value.dtype for name, value in extra.items()} == {"w": torch.float32, "half": torch.float32}
    assert all(not value.any() for value in extra.values())
    accumulator = algorithm.accumulator(state)
    for update in updates(
        state, [{"w": torch.ones(2), "half": torch.ones(2)}, {"w": torch.zeros(2), "half": torch.ones(2)}]
    ):
        accumulator.add(update)
    result = algorithm.aggregate(accumulator, state)
    assert {name: value.dtype for name, value in result.items()} == {name: v.dtype for name, v in state.items()}
    # Two of four clients took part. The mean changes are 1/2 and 1.
    resumed = Scaffold()
    resumed.setup(num_rounds=2, num_clients=4)
    resumed.load_state_dict(unpack(pack(algorithm.state_dict())))
    for instance in (algorithm, resumed):
        control = instance.fit_extra(state)
        assert control["w"].tolist() == [0.25, 0.25] and control["half"].tolist() == [0.5, 0.5]


def test_control_variates_are_averaged_uniformly_with_any_weighting():
    algorithm = Scaffold(weighting="examples")
    algorithm.setup(num_rounds=1, num_clients=2)
    state = {"w": torch.zeros(1)}
    algorithm.fit_extra(state)
    accumulator = algorithm.accumulator(state)
    for update in updates(state, [{"w": torch.tensor([2.0])}, {"w": torch.tensor([4.0])}]):
        accumulator.add(update)
    algorithm.aggregate(accumulator, state)
    assert algorithm.state_dict()["control"]["w"].item() == 3.0


def test_setup_resets_the_control_variate():
    algorithm = Scaffold()
    algorithm.load_state_dict({"control": {"w": torch.ones(1)}})
    algorithm.setup(num_rounds=1, num_clients=1)
    assert not algorithm.fit_extra({"w": torch.zeros(1)})["w"].any()


def test_training_without_a_gradient_raises_an_error():
    part = received(Scaffold(), Fit(0, "a", 0, {}, extra={"w": torch.zeros(1)}))
    with pytest.raises(RuntimeError, match="received no gradient"):
        sent(part)


def test_client_averages_its_uncorrected_gradients():
    server, own = {"w": torch.tensor([10.0])}, {"control": {"w": torch.tensor([1.0])}}
    part = received(Scaffold(), Fit(1, "a", 0, {}, extra=server), own)
    parameter = nn.Parameter(torch.zeros(1))
    for gradient in (2.0, 6.0):
        parameter.grad = torch.tensor([gradient])
        part.on_gradients({"w": parameter})
        assert parameter.grad.item() == gradient + 10.0 - 1.0
    change = sent(part).extra
    assert part.memory["control"]["w"].item() == (2.0 + 6.0) / 2
    assert change["w"].item() == (2.0 + 6.0) / 2 - 1.0


def test_server_learning_rate_must_be_positive():
    with pytest.raises(ValueError, match="`server_lr` is 0.0; it must be positive"):
        Scaffold(server_lr=0.0)
