"""
Hostile clients of a networked split model.

One of three clients is a real client behind a link that changes its messages. Every attack must end in the same way:

- named: the log of the server or of a client, or the error of the hostile client, contains its name,
- survived: the honest clients finish the run without an error,
- bounded: the attack moves the weights at most `BOUND` times as far as the training of the honest clients alone does.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from networked import DirectLink, Run
from split_attacks import ATTACKS, HOSTILE, HostileLink, with_fields
from split_runs import LORA, STRATEGIES, clients_of

from hf_federated import SplitConfig
from hf_federated.split.messages import Backward, Forward
from hf_federated.split_training.messages import (
    BeginStep,
    EndStep,
    FetchEnvelope,
    FetchEnvelopeReply,
    PartParameters,
    SendEnvelope,
    as_tensor,
    read_message,
)


# With the serial strategy the hostile client trains the shared body in its own steps.
BOUND = {"serial": 1.5, "client_batch": 1.0, "server_hierarchical": 1.0}


def config_of(strategy: str) -> SplitConfig:
    return SplitConfig(
        strategy=strategy,
        average_every=None if strategy == "serial" else 2,
        steps_per_turn=1 if strategy == "serial" else None,
    )


def train(
    directory: Path,
    strategy: str,
    clients: list[str],
    links: Any = DirectLink,
    prepare: Callable[[Run], None] = lambda run: None,
    **changes: Any,
) -> Run:
    """Train a run with SGD, so that a wrong scale of the gradients shows in the weights."""
    data = {name: rows for name, rows in clients_of(6, 6, 6).items() if name in clients}
    settings = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.5, "logging_strategy": "no", **changes}
    run = Run(directory, data, config_of(strategy), LORA, links=links, **settings)
    prepare(run)
    run.train()
    return run


HONEST = ["client 0", "client 2"]


@pytest.fixture(scope="module")
def honest_runs(tmp_path_factory) -> Callable[[str], tuple[dict, dict]]:
    """Initial and trained parameters of the parties in a run of the honest clients alone."""

    @functools.cache
    def train_honest(strategy: str) -> tuple[dict, dict]:
        directory = tmp_path_factory.mktemp(strategy)
        untrained = train(directory / "untrained", strategy, HONEST, learning_rate=0.0).values()
        run = train(directory / "honest", strategy, HONEST)
        assert not run.errors
        return untrained, run.values()

    return train_honest


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((left[name].double() - right[name].double()).norm()) ** 2 for name in left))


def relative_shifts(run: Run, honest: tuple[dict, dict]) -> dict[str, float]:
    """Distance of each honest party from the run of the honest clients, relative to the movement in that run."""
    before, expected = honest
    values = run.values()
    parties = [*HONEST, *(name for name in expected if name.startswith("server") and HOSTILE not in name)]
    return {name: distance(values[name], expected[name]) / distance(before[name], expected[name]) for name in parties}


@pytest.fixture
def log(caplog, monkeypatch) -> Iterator[Any]:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    yield caplog


def check_attack(run: Run, honest: tuple[dict, dict], log: Any, must_be_named: bool = True) -> None:
    assert set(run.errors) <= {HOSTILE}, run.errors
    named = f"{log.text} {run.errors.get(HOSTILE)}"
    assert not must_be_named or f"lient {HOSTILE!r}" in named or f"{HOSTILE} for" in named, named
    assert run.server.step == run.server.server_model.max_steps and run.server.finished.is_set()
    shifts = relative_shifts(run, honest)
    assert max(shifts.values()) <= BOUND[run.server.split.strategy], shifts


def run_attack(name: str, strategy: str, tmp_path: Path) -> Run:
    return train(
        tmp_path,
        strategy,
        [*HONEST, HOSTILE],
        links=lambda server, client_id: HostileLink(server, client_id, ATTACKS[name]),
    )


# One attack of each group. The slow tests run all attacks.
FAST = [
    "name of another client",
    "past step",
    "text in a number",
    "garbage",
    "hidden states that overflow",
    "gradients of 1e30",
    "gradients that overflow",
    "norm of 1e15 after honest steps",
    "norm of nan",
    "disconnection within a step",
    "parameters that cannot be decrypted",
    "parameters of a step in the far future",
]


# With client_batch all clients share a body and a batch, so that an attack can reach most.
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ATTACKS]
)
@pytest.mark.sampled(4)
def test_attack_is_named_and_survived_with_a_shared_batch(name, honest_runs, tmp_path, log):
    check_attack(run_attack(name, "client_batch", tmp_path), honest_runs("client_batch"), log)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["serial", "server_hierarchical"])
@pytest.mark.parametrize("name", list(ATTACKS))
def test_attack_is_named_and_survived(name, strategy, honest_runs, tmp_path, log):
    check_attack(run_attack(name, strategy, tmp_path), honest_runs(strategy), log)


# ---- Attacks on the parameters that clients send each other, which the server cannot read

PARAMETER_ATTACKS: dict[str, Callable[[PartParameters], bytes]] = {
    "1e30": lambda message: dataclasses.replace(
        message, state={name: torch.full_like(value, 1e30) for name, value in message.state.items()}
    ).to_bytes(),
    "nan": lambda message: with_fields(
        message.to_bytes(), state={name: value * math.nan for name, value in message.state.items()}
    ),
    "a billion examples": lambda message: dataclasses.replace(
        message, num_rows=10**9, state={name: value + 1.0 for name, value in message.state.items()}
    ).to_bytes(),
    "wrong shapes": lambda message: dataclasses.replace(
        message, state={name: value[:1] for name, value in message.state.items()}
    ).to_bytes(),
    "no parameters": lambda message: dataclasses.replace(message, state={}).to_bytes(),
    "another name": lambda message: dataclasses.replace(message, client_id="client 2").to_bytes(),
    "garbage": lambda message: b"parameters",
}


@pytest.mark.parametrize("strategy", [pytest.param("serial", marks=pytest.mark.slow), "client_batch"])
@pytest.mark.parametrize(
    "name", ["1e30", *(pytest.param(name, marks=pytest.mark.slow) for name in PARAMETER_ATTACKS if name != "1e30")]
)
def test_hostile_parameters_are_left_out_by_name(name, strategy, honest_runs, tmp_path, log):
    if strategy == "serial" and name == "a billion examples":
        pytest.skip("clients that continue with the parts of the previous client do not average")

    def attack_parameters(run: Run) -> None:
        envelopes = run.trainers[HOSTILE].envelopes
        seal = envelopes.seal

        def seal_hostile(recipient: str, purpose: str, payload: bytes) -> bytes:
            return seal(recipient, purpose, PARAMETER_ATTACKS[name](PartParameters.from_bytes(payload)))

        envelopes.seal = seal_hostile

    run = train(tmp_path, strategy, [*HONEST, HOSTILE], prepare=attack_parameters)
    check_attack(run, honest_runs(strategy), log)


# ---- Attacks that the server cannot see at once


@pytest.mark.parametrize("strategy", ["serial", "client_batch"])
def test_client_that_never_fetches_parameters_harms_no_other_client(strategy, tmp_path, log):
    class Link(DirectLink):
        def exchange(self, blob: bytes) -> bytes:
            message = read_message(blob)
            if self.client_id != HOSTILE or not isinstance(message, FetchEnvelope):
                return super().exchange(blob)
            sender = HOSTILE if strategy == "serial" else message.sender
            return FetchEnvelopeReply(HOSTILE, message.step, sender, as_tensor(b"")).to_bytes()

    run = train(tmp_path, strategy, [*HONEST, HOSTILE], links=Link, num_train_epochs=2)
    assert run.errors.keys() <= {HOSTILE} and not run.server.state.removed
    assert run.server.step == run.server.server_model.max_steps
    assert f"Client {HOSTILE!r} did not fetch the message of client 'client 0'" in log.text


def test_norm_of_zero_moves_the_weights_within_the_bound(honest_runs, tmp_path, log):
    """A client without trained parameters reports a norm of 0, so the server accepts it."""

    def report_zero(link, message, blob):
        return with_fields(blob, squared_norm=0.0) if isinstance(message, EndStep) else None

    run = train(
        tmp_path, "client_batch", [*HONEST, HOSTILE], lambda server, name: HostileLink(server, name, report_zero)
    )
    assert not run.errors
    check_attack(run, honest_runs("client_batch"), log, must_be_named=False)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        pytest.param(strategy, kind, marks=[] if (strategy, kind) == ("client_batch", Backward) else pytest.mark.slow)
        for strategy in STRATEGIES
        for kind in (BeginStep, Forward, Backward, EndStep, SendEnvelope)
    ],
)
def test_client_that_never_answers_is_named_after_the_deadline(strategy, kind, honest_runs, tmp_path, log):
    released = threading.Event()

    def links(server, client_id):
        def fall_silent(link, message, blob):
            if isinstance(message, kind):
                released.wait(60)
                raise ConnectionError("gone")

        return HostileLink(server, client_id, fall_silent)

    def release_after_the_run(run: Run) -> None:
        def release() -> None:
            run.server.wait()
            released.set()

        threading.Thread(target=release, daemon=True).start()

    run = train(tmp_path, strategy, [*HONEST, HOSTILE], links, release_after_the_run, deadline=0.7)
    check_attack(run, honest_runs(strategy), log)
