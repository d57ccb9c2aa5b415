"""Clients of a networked run that send something else than what they should: it is refused, and nobody waits."""

from __future__ import annotations

import dataclasses
import logging
import threading

import pytest
import torch
from networked import Run, identity
from split_runs import LORA, STRATEGIES, clients_of

from hf_federated import SplitConfig
from hf_federated.messages.serialization import pack
from hf_federated.security.envelope import PeerEnvelopes
from hf_federated.split import Wire
from hf_federated.split_training.messages import (
    Begin,
    Fetch,
    Finish,
    Join,
    Send,
    Step,
    as_tensor,
    read_message,
)


def config_of(strategy):
    return SplitConfig(strategy=strategy, average_every=None if strategy == "serial" else 2)


def attacked(tmp_path, strategy, attack, until=None, **changes):
    """A run whose second client does something else than a step; the first may wait for an event before its own."""
    run = Run(tmp_path, clients_of(2, 2), config_of(strategy), LORA, **changes)
    first = run.trainers["client 0"]
    if until is not None:
        first.training_step = lambda *args: until.wait(30) and type(first).training_step(first, *args)
    trainer = run.trainers["client 1"]
    trainer.training_step = lambda *args: attack(run, trainer, *args)
    run.train()
    return run


@pytest.mark.parametrize("strategy", ["serial", "client_batch"])
def test_a_client_that_did_not_begin_a_step_moves_nothing(strategy, tmp_path):
    def intrude(run, trainer, *args):
        step = trainer.state.global_step
        trainer.model.train().boundary.begin_step(step)
        tokens = torch.tensor([[3, 4, 5]])
        for send in (
            lambda: trainer.model(tokens, labels=tokens),
            lambda: run.server.answer("client 1", Step("client 1", step, 1.0).to_bytes()),
        ):
            with pytest.raises(ValueError, match="did not begin step 0"):
                send()
        tried.set()
        raise RuntimeError("refused")

    # Otherwise the step may be over before.
    tried = threading.Event()
    run = attacked(tmp_path, strategy, intrude, until=tried)
    assert str(run.errors["client 1"]) == "refused" and run.server.step <= 1


def test_gradients_of_a_client_that_are_not_finite_reach_nobody(tmp_path):
    def poison(run, trainer, *args):
        type(trainer).training_step(trainer, *args)
        run.server.answer("client 1", Step("client 1", 0, float("nan")).to_bytes())

    run = attacked(tmp_path, "client_batch", poison)
    assert "of client 'client 1' are not finite at step 0" in str(run.errors["client 1"])
    assert "client 'client 1' is gone" in str(run.errors["client 0"]) and run.server.step == 0


@pytest.mark.parametrize("state", ["names", "shapes"])
def test_parameters_of_another_model_are_not_averaged(state, tmp_path):
    def send_others(run, trainer, *args):
        client = trainer._federation.client
        own = {"w": torch.ones(1)} if state == "names" else dict.fromkeys(client.state(), torch.ones(1))
        client.state = lambda: own
        return type(trainer).training_step(trainer, *args)

    run = attacked(tmp_path, "client_batch", send_others)
    assert "what client 'client 1' sent" in str(run.errors["client 0"])


def test_more_passages_than_were_said_are_refused(tmp_path):
    def twice(run, trainer, *args):
        compute_loss = type(trainer).compute_loss

        def call_twice(model, inputs, *args, **kwargs):
            return sum(compute_loss(trainer, model, dict(inputs), *args, **kwargs) for _ in range(2))

        trainer.compute_loss = call_twice
        return type(trainer).training_step(trainer, *args)

    run = attacked(tmp_path, "client_batch", twice)
    assert "began step 0 with 1 passages, and another came" in str(run.errors["client 1"])


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_a_client_has_no_more_weight_than_rows_that_crossed(strategy, tmp_path):
    def say_more(run, trainer, *args):
        run_step = trainer._federation.run_step

        def run_step_with_more(step, batches, num_rows, *rest):
            return run_step(step, batches, {own: rows + 1 for own, rows in num_rows.items()}, *rest)

        trainer._federation.run_step = run_step_with_more
        return type(trainer).training_step(trainer, *args)

    run = attacked(tmp_path, strategy, say_more)
    assert "began step 0 with 3 rows, and 2 crossed" in str(run.errors["client 1"])
    assert not any(run.server.bodies._rows.values()) and run.server.step == 0


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Join("client 0", "other", 1, [], as_tensor(b"")), "settings of client and server differ"),
        (Join("client 0", "", 0, [], as_tensor(b"")), "too few rows for a step"),
        (Join("client 0", "", 10**12, [], as_tensor(b"")), "at most 10000000 are planned"),
        (Begin("client 1", 0, 1, 1), "in the name of 'client 1'"),
        (Step("client 0", 7, 1.0), "was not begun"),
        (Step("client 0", 0, 1.0), "was not begun"),
        (Begin("client 0", 0, 1, 1), "cannot begin step 0 of 0"),
        (Fetch("client 0", 0, "nobody"), "waits for an envelope of 'nobody', who writes none"),
        (Fetch("client 0", 0, "client 0"), "waits for an envelope of 'client 0', who writes none"),
        (Send("client 0", 0, "nobody", as_tensor(b"x")), "takes no part"),
    ],
    ids=["settings", "no step", "no end", "name", "step", "early", "begin", "sender", "self", "recipient"],
)
def test_messages_at_the_wrong_time_are_refused(message, error, tmp_path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr("hf_federated.split_training.server.logger.warning", told.append)
    run = Run(tmp_path, clients_of(2, 2), config_of("serial"))
    if isinstance(message, Join) and not message.digest:
        message = dataclasses.replace(message, digest=run.server.digest)
    with pytest.raises(ValueError, match=error):
        run.server.answer("client 0", message.to_bytes())
    # Others wait for who cannot join, and the server's log says why.
    assert ["cannot join" in own for own in told] == [True] * isinstance(message, Join)
    run.train()
    assert not run.errors


def test_fields_of_control_messages_are_checked():
    good = {"client_id": "a", "digest": "d", "num_steps": 1, "checkpoints": []}
    good["introduction"] = as_tensor(b"")
    for name, value in (
        ("num_steps", -1),
        ("checkpoints", ["2"]),
        ("introduction", torch.zeros(2)),
        ("digest", None),
    ):
        with pytest.raises(ValueError, match=name):
            Join(**{**good, name: value})
    with pytest.raises(ValueError, match="squared_norm"):
        Step("a", 0, -1.0)
    with pytest.raises(ValueError, match="takes messages of the kinds"):
        read_message(pack({"kind": "labels", "fields": {"labels": torch.ones(2)}}))


def passage(trainer, num_batches, backward):
    """A client begins a step of so many passages and makes one of them, with its gradient or without."""
    remote, boundary = trainer._remote, trainer.model.train().boundary
    step, tokens = trainer.state.global_step, torch.tensor([[3, 4, 5], [3, 4, 5]])
    remote._link.exchange(Begin(remote.client_id, step, num_batches, 2).to_bytes())
    boundary.begin_step(step, 6 if boundary.defers_backward else None)
    loss = trainer.model(tokens, labels=tokens).loss
    if backward:
        loss.backward()
        boundary.finish_backward()
    return tokens


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("num_passages", [0, 1])
def test_a_step_is_not_ended_before_its_passages(num_passages, strategy, tmp_path):
    def end_early(run, trainer, *args):
        step = trainer.state.global_step
        if num_passages:
            passage(trainer, 1, backward=False)
        else:
            run.server.answer("client 1", Begin("client 1", step, 1, 2).to_bytes())
        run.server.answer("client 1", Step("client 1", step, 1.0).to_bytes())

    # Before, all waited for one another, and a deadline found nobody missing.
    run = attacked(tmp_path, strategy, end_early, deadline=1.0 if strategy == "client_batch" else None)
    found = f"with 1 passages and ends it after {num_passages}, of which 0 had a gradient"
    assert found in str(run.errors["client 1"])
    assert "client 'client 1' is gone" in str(run.errors["client 0"])
    assert run.server.step == 0


def test_a_passage_waits_for_the_gradient_of_the_one_before_it(tmp_path):
    def skip(run, trainer, *args):
        tokens = passage(trainer, 2, backward=False)
        trainer.model(tokens, labels=tokens)

    run = attacked(tmp_path, "client_batch", skip, deadline=1.0)
    assert "came at step 0 before the gradient of the one before it" in str(run.errors["client 1"])


def test_gradients_and_passages_come_once_and_in_order(tmp_path):
    def repeat(run, trainer, *args):
        passage(trainer, 3, backward=True)
        boundary = trainer.model.boundary
        for number in (0, 2):
            boundary._micro_step = number
            with pytest.raises(ValueError, match=f"Passage {number} of client 'client 1' came .* 1 is the next"):
                trainer.model(torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]]))
        boundary._micro_step = 1
        loss = trainer.model(torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).loss
        loss.backward(retain_graph=True)
        with pytest.raises(ValueError, match="No passage 1 of client 'client 1' waits for its gradient"):
            loss.backward()
        raise RuntimeError("refused")

    assert str(attacked(tmp_path, "server_hierarchical", repeat).errors["client 1"]) == "refused"


def test_what_one_client_sends_wrongly_is_said_to_it_alone(tmp_path):
    def send_other_dtype(run, trainer, *args):
        trainer.model.boundary.wire = Wire("int8")
        return type(trainer).training_step(trainer, *args)

    run = attacked(tmp_path, "client_batch", send_other_dtype)
    assert "this wire carries float32" in str(run.errors["client 1"])
    assert "client 'client 1' is gone" in str(run.errors["client 0"])
    assert "wire" not in str(run.errors["client 0"])


@pytest.mark.parametrize("strategy", ["serial", "client_batch"])
def test_nobody_is_done_before_the_last_step(strategy, tmp_path):
    def finish(run, trainer, *args):
        with pytest.raises(ValueError, match="ends at step 1000000, and this is 0"):
            run.server.answer("client 1", Finish("client 1", 10**6).to_bytes())
        tried.set()
        raise RuntimeError("gone")

    # Who was done was not missed when it was gone: the others waited for ever.
    tried = threading.Event()
    if strategy == "serial":  # of which the second client's turn comes later
        run = Run(tmp_path, clients_of(2, 2), config_of(strategy), LORA)
        with pytest.raises(ValueError, match="ends at step 1000000"):
            run.server.answer("client 1", Finish("client 1", 10**6).to_bytes())
        run.train()
        assert not run.errors
        return
    run = attacked(tmp_path, strategy, finish, until=tried)
    assert "client 'client 1' is gone" in str(run.errors["client 0"])


def test_a_client_that_leaves_before_all_are_there_ends_the_run(tmp_path):
    server = Run(tmp_path, clients_of(2, 2), config_of("serial")).server
    server.answer("client 1", Finish("client 1", 0).to_bytes())
    assert server.wait() == "client 'client 1' left before everybody was there"


@pytest.mark.parametrize("where", ["load_checkpoint", "save_checkpoint", "save"])
def test_an_error_of_the_servers_own_ends_the_run_and_stays_in_its_log(where, tmp_path, caplog, monkeypatch):
    run = Run(tmp_path, clients_of(2, 2), config_of("client_batch"), LORA)

    def fail(*args):
        raise OSError("No space left on device: '/srv/secret'")

    if where == "load_checkpoint":
        monkeypatch.setattr(run.server.bodies, "checkpoints", fail)
    else:
        monkeypatch.setattr(run.server.bodies, where, fail)
    # transformers' loggers tell nobody else.
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    run.train()
    assert "the server failed (OSError)" in run.server.wait()
    # The one that leaves first is done before the body is saved.
    assert len(run.errors) == (1 if where == "save" else 2)
    for error in run.errors.values():
        assert "the server failed (OSError), and its log says why" in str(error)
        assert "secret" not in str(error)
    assert caplog.text.count("The server cannot go on.") == 1 and "/srv/secret" in caplog.text


def test_a_peer_whose_fingerprint_is_missing_is_named_before_the_first_step(tmp_path):
    run = Run(tmp_path, clients_of(2, 2), SplitConfig(strategy="client_batch"), LORA)
    elsewhere = {"client 7": identity("client 7").fingerprint}
    run.trainers["client 1"]._envelopes = PeerEnvelopes(identity("client 1"), elsewhere, 2048)
    run.train()
    assert "'client 0' takes part and its fingerprint is not known" in str(run.errors["client 1"])
    assert "--peer client 0=FINGERPRINT" in str(run.errors["client 1"])
    assert run.server.step == 0


def test_fingerprints_of_clients_that_take_no_part_are_left_alone(tmp_path):
    run = Run(tmp_path, clients_of(2, 2), SplitConfig(strategy="client_batch"), LORA)
    for own, trainer in run.trainers.items():
        known = {name: identity(name).fingerprint for name in ("client 0", "client 1", "client 7")}
        trainer._envelopes = PeerEnvelopes(identity(own), known, 2048)
    run.train()
    assert not run.errors
