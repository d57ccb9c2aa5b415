"""One hostile client of a distillation is named, and the models end as if this client had failed in that phase."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from distillation_setup import client_weights, distillation_trainer
from hostile import LOSS_ATTACKS, PREDICTION_ATTACKS, UPDATE_ATTACKS, Attack, HostileEngine, fail, honest
from tiny import same_weights

from hf_federated import FederatedCallback


HOSTILE, OTHER = "b", "a"


class Failures(FederatedCallback):
    """Records the rejected clients of each round."""

    def __init__(self) -> None:
        self.rejected: list[dict[str, str]] = []

    def on_round_end(self, args, state, control, round, **kwargs) -> None:
        self.rejected.append(dict(round.rejected))


def run(directory, method: str, attack: Attack, **kwargs):
    """Train with a hostile client. Return the trainer and the rejected clients of each round."""
    trainer = distillation_trainer(directory, method, kwargs, engine=HostileEngine(attack, HOSTILE, OTHER))
    failures = Failures()
    trainer.add_callback(failures)
    trainer.train()
    return trainer, failures.rejected


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The trainers of runs in which the client fails in a phase, and of a run in which it is honest."""
    directory = tmp_path_factory.mktemp("reference")
    trainers = {
        phase: run(directory / phase, "dsfl", Attack("", fail, "", phase))[0]
        for phase in ("training", "prediction", "distillation")
    }
    return {**trainers, "honest": run(directory / "honest", "dsfl", Attack("", honest, ""))[0]}


def every_third(attacks: list[Attack]) -> list[Any]:
    """Mark all attacks but every third as slow. A run takes seconds."""
    return [
        pytest.param(attack, marks=[pytest.mark.slow] if number % 3 else []) for number, attack in enumerate(attacks)
    ]


@pytest.mark.parametrize(
    "attack",
    [
        # The tests of averaging send the same attacks to the same checks.
        *(pytest.param(attack, marks=pytest.mark.slow) for attack in UPDATE_ATTACKS),
        *every_third(PREDICTION_ATTACKS),
        *every_third(LOSS_ATTACKS),
    ],
    ids=lambda attack: f"{attack.phase}-{attack.name}",
)
@pytest.mark.sampled(7)
def test_attack_is_named_and_the_models_do_not_move(tmp_path, outcomes, attack, caplog):
    trainer, rejected = run(tmp_path, "dsfl", attack)
    reference = outcomes[attack.phase if attack.refused else "honest"]
    assert trainer.state.global_step == 2
    assert same_weights(trainer.model, reference.model)
    for client_id in (OTHER, "c"):
        own, expected = client_weights(trainer)[client_id], client_weights(reference)[client_id]
        assert all(own[name].equal(expected[name]) for name in expected)
    names = ["stranger"] if attack.name == "an unknown client answers" else [HOSTILE, OTHER]
    assert any(attack.named in text and any(name in text for name in names) for text in caplog.messages)
    for round, reasons in enumerate(rejected):
        assert list(reasons) == ([HOSTILE] if attack.refused else [])
        assert all(f"Client {HOSTILE!r}, round {round + 1}" in text for text in reasons.values())
        assert all(attack.named in text and len(text) < 2000 for text in reasons.values())


FEEDBACK_ATTACKS = [dataclasses.replace(attack, phase="feedback") for attack in LOSS_ATTACKS[-3:]]


@pytest.mark.parametrize("attack", FEEDBACK_ATTACKS, ids=lambda attack: attack.name)
def test_attack_on_the_feedback_of_fedid_is_named(tmp_path, attack):
    trainer, rejected = run(tmp_path, "fedid", attack)
    assert trainer.state.global_step == 2
    assert all(attack.named in reasons[HOSTILE] and list(reasons) == [HOSTILE] for reasons in rejected)


@pytest.mark.parametrize("value", [-1.0, 1e12, float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("method", ["fedkd", "adafd"])
def test_absurd_report_of_a_client_is_named(tmp_path, method, value):
    def lie(request, reply, knowledge):
        lies = {name: value for name in reply.metrics if name not in ("loss", "grad_norm", "learning_rate")}
        return [(knowledge.own, dataclasses.replace(reply, metrics={**reply.metrics, **lies, "class_count_0": value}))]

    trainer, rejected = run(tmp_path, method, Attack("", lie, ""))
    assert trainer.state.global_step == len(rejected) and all(list(reasons) == [HOSTILE] for reasons in rejected)


def test_flipped_predictions_move_the_server_at_most_as_far_as_its_own_training(tmp_path, outcomes):
    """A well-formed lie is not named. The server's optimizer bounds what it can do."""
    flip = changed_flipped()
    trainer, rejected = run(tmp_path, "dsfl", Attack("", flip, "", "prediction"))
    assert rejected == [{}, {}]
    start = distillation_trainer(tmp_path, "dsfl").model.state_dict()

    def distance(model, other) -> float:
        return sum(float((model[name] - other[name]).double().square().sum()) for name in other) ** 0.5

    honest_model = outcomes["honest"].model.state_dict()
    assert distance(trainer.model.state_dict(), start) < 2 * distance(honest_model, start)


def changed_flipped():
    def act(request, reply, knowledge):
        values = {name: -value if value.is_floating_point() else value for name, value in reply.values.items()}
        return [(knowledge.own, dataclasses.replace(reply, values=values))]

    return act
