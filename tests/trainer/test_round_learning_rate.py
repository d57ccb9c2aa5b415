"""The learning rate of a round relative to the peak of its schedule equals that of the clients' schedules."""

from __future__ import annotations

import math

import pytest
from federations import build_federation
from tiny import arguments, rows

from hf_federated import FederatedCallback
from hf_federated.trainer.round_learning_rate import relative_learning_rate


def rates(directory, num_rounds=4, lr_schedule="global", **kwargs):
    rate = relative_learning_rate(arguments(directory, **kwargs), num_rounds, lr_schedule)
    return [rate(round) for round in range(num_rounds)]


def test_schedules_of_the_training_arguments(tmp_path):
    assert rates(tmp_path, lr_scheduler_type="linear") == [0.875, 0.625, 0.375, 0.125]
    assert rates(tmp_path, lr_scheduler_type="constant") == [1.0] * 4
    cosine = [0.5 * (1 + math.cos(math.pi * (round + 0.5) / 4)) for round in range(4)]
    assert rates(tmp_path, lr_scheduler_type="cosine") == pytest.approx(cosine)
    assert rates(tmp_path, lr_scheduler_type="linear", warmup_steps=0.5) == [0.25, 0.75, 0.75, 0.25]
    # The number of steps of a warmup in steps differs between clients.
    assert rates(tmp_path, lr_scheduler_type="linear", warmup_steps=100) == [0.875, 0.625, 0.375, 0.125]


def test_schedule_of_each_round_and_unknown_schedules_have_no_relative_rate(tmp_path):
    assert rates(tmp_path, lr_schedule="round", lr_scheduler_type="linear") == [1.0] * 4
    assert min(rates(tmp_path, num_rounds=10_000, lr_scheduler_type="cosine")) == 1e-3


@pytest.mark.parametrize(
    "schedule",
    [
        "cosine",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("linear", "polynomial", "constant_with_warmup")),
    ],
)
def test_rate_is_that_of_the_clients_in_the_middle_of_a_round(tmp_path, schedule):
    class Rates(FederatedCallback):
        def __init__(self):
            self.last: list[float] = []

        def on_round_end(self, args, state, control, round, **kwargs):
            self.last += [metrics["learning_rate"] for metrics in round.metrics.values()]

    recorder = Rates()
    trainer = build_federation(
        tmp_path,
        {"only": rows(80), "other": rows(80, seed=1)},
        num_rounds=5,
        learning_rate=1.0,
        lr_scheduler_type=schedule,
        trainer={"callbacks": [recorder]},
    )
    trainer.train()
    expected = relative_learning_rate(trainer.run_args, 5, "global")
    for round in range(5):
        # The metric is the rate of the last step of the round.
        assert recorder.last[2 * round] <= expected(round) + 0.01
        if round:
            assert recorder.last[2 * round - 1] >= expected(round) - 0.01
