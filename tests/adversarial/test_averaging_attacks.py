"""One hostile client of an averaging federation is named, and the model ends as if this client had failed."""

from __future__ import annotations

import math

import pytest
from federations import CLIENTS, build_federation
from hostile import STATE_ATTACKS, UPDATE_ATTACKS, Attack, HostileEngine, changed, fail, honest, metrics_with
from tiny import same_weights

from hf_federated import FederatedCallback


HOSTILE, OTHER = "south", "north"


class Failures(FederatedCallback):
    """Records the rejected clients of each round."""

    def __init__(self) -> None:
        self.rejected: list[dict[str, str]] = []

    def on_round_end(self, args, state, control, round, **kwargs) -> None:
        self.rejected.append(dict(round.rejected))


def run(directory, attack: Attack, **federation):
    """Train two rounds with a hostile client. Return the trainer and the rejected clients of each round."""
    failures = Failures()
    trainer = build_federation(
        directory,
        CLIENTS,
        federation=federation,
        trainer={"callbacks": [failures], "engine": HostileEngine(attack, HOSTILE, OTHER)},
    )
    trainer.train()
    return trainer, failures.rejected


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The models of a run in which the client fails, and of a run in which it is honest."""
    failed = run(tmp_path_factory.mktemp("failed"), Attack("", fail, ""))[0]
    cooperative = run(tmp_path_factory.mktemp("honest"), Attack("", honest, ""))[0]
    return failed.model, cooperative.model


@pytest.mark.parametrize("attack", [*UPDATE_ATTACKS, *STATE_ATTACKS], ids=lambda attack: attack.name)
@pytest.mark.sampled(18)
def test_attack_is_named_and_the_model_does_not_move(tmp_path, outcomes, attack, caplog):
    trainer, rejected = run(tmp_path, attack)
    failed, cooperative = outcomes
    assert trainer.state.global_step == 2
    assert same_weights(trainer.model, failed if attack.refused else cooperative)
    names = ["stranger"] if attack.name == "an unknown client answers" else [HOSTILE, OTHER]
    assert any(attack.named in text and any(name in text for name in names) for text in caplog.messages)
    for round, reasons in enumerate(rejected):
        assert list(reasons) == ([HOSTILE] if attack.refused else [])
        assert all(f"Client {HOSTILE!r}, round {round + 1}" in text for text in reasons.values())
        assert all(attack.named in text and len(text) < 2000 for text in reasons.values())
    log = next(entry for entry in trainer.state.log_history if "federated/num_failed" in entry)
    assert log["federated/num_failed"] == len(rejected[0])


@pytest.mark.parametrize("loss", [math.nan, math.inf, -1e300, 1e300], ids=str)
def test_absurd_loss_is_left_out_of_the_mean_and_named(tmp_path, loss, caplog):
    trainer, rejected = run(tmp_path, Attack("", metrics_with(loss=loss, own=loss), ""))
    assert rejected == [{}, {}]
    lines = [text for text in caplog.messages if "The means over clients leave this out" in text]
    assert len(lines) == 2  # one for each round, with both metrics
    for round, line in enumerate(lines):
        assert line.startswith(f"Client {HOSTILE!r}, round {round + 1}: ")
        assert f"`loss` is {loss:g}" in line and f"`own` is {loss:g}" in line
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert all(0.1 < value < 2 for value in losses)


def test_weight_of_an_update_is_limited_by_tokens(tmp_path):
    claims_tokens = next(attack for attack in UPDATE_ATTACKS if "tokens" in attack.name)
    _, rejected = run(tmp_path, claims_tokens, aggregation_kwargs={"weighting": "tokens"})
    assert [list(reasons) for reasons in rejected] == [[HOSTILE]] * 2


def test_update_without_tokens_is_a_failure_of_its_client(tmp_path):
    attack = Attack("", changed(num_tokens=0), "")
    _, rejected = run(tmp_path, attack, aggregation_kwargs={"weighting": "tokens"})
    assert "reports 0 tokens" in rejected[0][HOSTILE]
