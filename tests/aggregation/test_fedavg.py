"""FedAvg: `Σ n_i x_i / Σ n_i`, in the accumulator and in a federated run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import arguments, rows, same_weights, tiny_model

from hf_federated import FedAvg, FederatedCallback, FederatedConfig, FederatedTrainer
from hf_federated.messages import ClientUpdate


def updates(num: int = 4, dtype: torch.dtype = torch.float64) -> list[ClientUpdate]:
    generator = np.random.default_rng(0)
    return [
        ClientUpdate(
            round=0,
            client_id=str(i),
            state={
                "w": torch.tensor(generator.normal(size=(2, 3))).to(dtype),
                "count": torch.tensor(100 + i),
            },
            num_examples=3 + 5 * i,
            num_tokens=1000 - 70 * i,
            num_steps=1 + i,
        )
        for i in range(num)
    ]


@pytest.mark.parametrize(
    ("weighting", "weight_of"),
    [
        ("examples", lambda update: update.num_examples),
        ("tokens", lambda update: update.num_tokens),
        ("uniform", lambda update: 1),
    ],
)
def test_aggregate_equals_the_weighted_mean(weighting, weight_of):
    algorithm = FedAvg(weighting)
    replies = updates()
    accumulator = algorithm.accumulator(replies[0].state)
    for update in replies:
        accumulator.add(update)
    state = {"w": torch.full((2, 3), 9.0, dtype=torch.float64), "count": torch.tensor(0)}
    result = algorithm.aggregate(accumulator, state)
    weights = [weight_of(update) for update in replies]
    expected = sum(n * update.state["w"].numpy() for n, update in zip(weights, replies, strict=True)) / sum(weights)
    np.testing.assert_allclose(result["w"].numpy(), expected, rtol=0, atol=1e-14)
    assert result["count"].item() == 100 and result["count"].dtype == torch.int64


def test_single_update_is_returned_bit_for_bit():
    (update,) = updates(1, torch.float32)
    accumulator = FedAvg().accumulator(update.state)
    accumulator.add(update)
    assert torch.equal(FedAvg().aggregate(accumulator, update.state)["w"], update.state["w"])


def test_bfloat16_mean_is_rounded_once():
    replies = updates(dtype=torch.bfloat16)
    accumulator = FedAvg().accumulator(replies[0].state)
    for update in replies:
        accumulator.add(update)
    result = FedAvg().aggregate(accumulator, replies[0].state)["w"]
    total = sum(update.num_examples for update in replies)
    exact = sum(update.num_examples * update.state["w"].double() for update in replies) / total
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, exact.float().bfloat16())


@pytest.mark.parametrize(("weighting", "field"), [("examples", "num_examples"), ("tokens", "num_tokens")])
def test_update_without_weight_is_rejected_with_the_client_id(weighting, field):
    update = ClientUpdate(
        0, "north", {"w": torch.ones(1)}, **{"num_examples": 1, "num_tokens": 1, field: 0}, num_steps=1
    )
    with pytest.raises(ValueError, match=f"Client 'north' reports 0 {weighting}.*weighting='uniform'"):
        FedAvg(weighting).accumulator(update.state).add(update)


def test_unknown_weighting_raises_an_error_with_the_allowed_values():
    with pytest.raises(ValueError, match="`weighting` is 'steps'; allowed are 'examples', 'tokens', 'uniform'"):
        FedAvg("steps")


def test_settings_and_repr_contain_only_non_default_values():
    assert repr(FedAvg()) == "FedAvg()"
    assert FedAvg("uniform").settings() == FedAvg("uniform").non_default_settings() == {"weighting": "uniform"}


class UpdateRecorder(FederatedCallback):
    """Record every update of the first round."""

    def __init__(self) -> None:
        self.updates: list[ClientUpdate] = []

    def on_client_end(self, args, state, control, update, round=None, **kwargs):
        if round.number == 0:
            self.updates.append(update)


@pytest.mark.parametrize(
    ("weighting", "weights"), [("examples", [8, 4]), ("tokens", [8 * 6, 4 * 6]), ("uniform", [1, 1])]
)
def test_federated_model_is_the_mean_of_the_client_models(tmp_path, weighting, weights):
    recorder = UpdateRecorder()
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset={"a": rows(8), "b": rows(4, seed=1)},
        callbacks=[recorder],
        federation=FederatedConfig(num_rounds=1, aggregation_kwargs={"weighting": weighting}),
    )
    trainer.train()
    a, b = recorder.updates
    model = trainer.model.state_dict()
    for name in a.state:
        mean = (weights[0] * a.state[name].double() + weights[1] * b.state[name].double()) / sum(weights)
        torch.testing.assert_close(model[name].double(), mean, rtol=0, atol=1e-7)
    assert not same_weights(trainer.model, tiny_model())
