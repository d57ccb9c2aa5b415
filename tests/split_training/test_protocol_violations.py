"""Clients of a networked run that violate the protocol: the server rejects the message, and no other client waits."""

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
from hf_federated.security.peer_envelopes import PeerEnvelopes
from hf_federated.split import Wire
from hf_federated.split_training.messages import (
    BeginStep,
    EndStep,
    FetchEnvelope,
    Finish,
    Join,
    PartParameters,
    SendEnvelope,
    SendEnvelopeReply,
    as_tensor,
    read_message,
)
from hf_federated.split_training.part_exchange import PartExchange


def config_of(strategy):
    """A run that ends if a client fails, so that the errors of the other clients show the reason."""
    return SplitConfig(strategy=strategy, average_every=None if strategy == "serial" else 2, min_clients=1.0)


def train_with_attack(tmp_path, strategy, attack, until=None, micro_batches_in_flight=8, **changes):
    """
    Train a run whose second client runs `attack` instead of a step. The first client can wait for an event before its
    step.
    """
    split = dataclasses.replace(config_of(strategy), micro_batches_in_flight=micro_batches_in_flight)
    run = Run(tmp_path, clients_of(2, 2), split, LORA, **changes)
    first = run.trainers["client 0"]
    if until is not None:
        first.training_step = lambda *args: until.wait(30) and type(first).training_step(first, *args)
    trainer = run.trainers["client 1"]
    trainer.training_step = lambda *args: attack(run, trainer, *args)
    run.train()
    return run


@pytest.mark.parametrize("strategy", ["serial", "client_batch"])
def test_messages_of_a_step_that_the_client_did_not_begin_are_rejected(strategy, tmp_path):
    def intrude(run, trainer, *args):
        step = trainer.state.global_step
        trainer.model.train().boundary.begin_step(step)
        tokens = torch.tensor([[3, 4, 5]])
        for send in (
            lambda: trainer.model(tokens, labels=tokens),
            lambda: run.server.answer("client 1", EndStep("client 1", step, 1.0).to_bytes()),
        ):
            with pytest.raises(ValueError, match="sent a message of step 0, but did not begin this step"):
                send()
        tried.set()
        raise RuntimeError("refused")

    # The first client waits, so that the step cannot end earlier.
    tried = threading.Event()
    run = train_with_attack(tmp_path, strategy, intrude, until=tried)
    assert str(run.errors["client 1"]) == "refused" and run.server.step <= 1


def test_nan_gradient_norm_is_rejected_before_the_step(tmp_path):
    def poison(run, trainer, *args):
        type(trainer).training_step(trainer, *args)
        run.server.answer("client 1", EndStep("client 1", 0, float("nan")).to_bytes())

    run = train_with_attack(tmp_path, "client_batch", poison)
    for error in run.errors.values():
        assert "gradients of client 'client 1' are not finite at step 0" in str(error)
    assert len(run.errors) == 2 and run.server.step == 0


@pytest.mark.parametrize("state", ["names", "shapes"])
def test_parameters_with_wrong_names_or_shapes_are_not_averaged(state, tmp_path, caplog, monkeypatch):
    def send_others(run, trainer, *args):
        client = trainer.active_run.client
        wrong_state = {"w": torch.ones(1)} if state == "names" else dict.fromkeys(client.state(), torch.ones(1))
        client.state = lambda: wrong_state
        return type(trainer).training_step(trainer, *args)

    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    train_with_attack(tmp_path, "client_batch", send_others)
    assert "The parameters of client 'client 1' were refused" in caplog.text
    assert "The average is computed without this client" in caplog.text


def test_more_micro_batches_than_announced_are_rejected(tmp_path):
    def call_model_twice(run, trainer, *args):
        compute_loss = type(trainer).compute_loss

        def call_twice(model, inputs, *args, **kwargs):
            return sum(compute_loss(trainer, model, dict(inputs), *args, **kwargs) for _ in range(2))

        trainer.compute_loss = call_twice
        return type(trainer).training_step(trainer, *args)

    run = train_with_attack(tmp_path, "client_batch", call_model_twice)
    assert "began step 0 with 1 micro-batches, but sent another one" in str(run.errors["client 1"])


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_client_cannot_report_more_examples_than_it_sent(strategy, tmp_path):
    def report_more(run, trainer, *args):
        run_step = trainer.active_run.run_step

        def run_step_with_more(step, batches, num_rows, *rest):
            return run_step(step, batches, {client_id: rows + 1 for client_id, rows in num_rows.items()}, *rest)

        trainer.active_run.run_step = run_step_with_more
        return type(trainer).training_step(trainer, *args)

    run = train_with_attack(tmp_path, strategy, report_more)
    assert "began step 0 with 3 examples, but sent 2" in str(run.errors["client 1"])
    assert not any(run.server.server_model.num_examples.values()) and run.server.step == 0


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Join("client 0", "other", 1, [], as_tensor(b"")), "settings of client and server differ"),
        (Join("client 0", "", 0, [], as_tensor(b"")), "too few examples for a step"),
        (Join("client 0", "", 10**12, [], as_tensor(b"")), "at most 10000000 are supported"),
        (BeginStep("client 1", 0, 1, 1), "in the name of 'client 1'"),
        (EndStep("client 0", 7, 1.0), "sent a message of step 7, which has not begun"),
        (EndStep("client 0", 0, 1.0), "sent a message of step 0, which has not begun"),
        (BeginStep("client 0", 0, 1, 1), "cannot begin step 0. The run has 0 steps"),
        (FetchEnvelope("client 0", 0, "client 7"), "requested a message of 'client 7', which is not another client"),
        (FetchEnvelope("client 0", 0, "client 0"), "requested a message of 'client 0', which is not another client"),
        (
            SendEnvelope("client 0", 0, "client 7", as_tensor(b"x")),
            "to 'client 7', which is not a client of this run",
        ),
    ],
    ids=["settings", "no step", "no end", "name", "step", "early", "begin", "sender", "self", "recipient"],
)
def test_invalid_control_messages_are_rejected(message, error, tmp_path, monkeypatch):
    warnings: list[str] = []
    monkeypatch.setattr("hf_federated.split_training.server.logger.warning", warnings.append)
    run = Run(tmp_path, clients_of(2, 2), config_of("serial"))
    if isinstance(message, Join) and not message.digest:
        message = dataclasses.replace(message, digest=run.server.digest)
    with pytest.raises(ValueError, match=error):
        run.server.answer("client 0", message.to_bytes())
    # The other clients may wait for the client, so the server logs the reason.
    assert len(warnings) == 1 and "A message of client 'client 0' was rejected" in warnings[0]
    run.train()
    assert not run.errors


def test_control_messages_validate_their_fields():
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
        EndStep("a", 0, -1.0)
    with pytest.raises(ValueError, match="accepts messages of the kinds"):
        read_message(pack({"kind": "labels", "fields": {"labels": torch.ones(2)}}))


# A step of several micro-batches.
STEPS = {"gradient_accumulation_steps": 3}


def send_micro_batch(trainer, num_batches, backward):
    """Begin a step of `num_batches` micro-batches, and send one of them with or without its gradient."""
    networked, boundary = trainer.networked_run, trainer.model.train().boundary
    step, tokens = trainer.state.global_step, torch.tensor([[3, 4, 5], [3, 4, 5]])
    networked.link.exchange(BeginStep(networked.client_id, step, num_batches, 2).to_bytes())
    boundary.begin_step(step, 6 if boundary.defers_backward else None)
    loss = trainer.model(tokens, labels=tokens).loss
    if backward:
        loss.backward()
        boundary.finish_backward()
    return tokens


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("num_micro_batches", [0, 1])
def test_step_cannot_end_before_its_micro_batches(num_micro_batches, strategy, tmp_path):
    """Without this check all clients would wait for each other."""

    def end_early(run, trainer, *args):
        step = trainer.state.global_step
        if num_micro_batches:
            send_micro_batch(trainer, 1, backward=False)
        else:
            run.server.answer("client 1", BeginStep("client 1", step, 1, 2).to_bytes())
        run.server.answer("client 1", EndStep("client 1", step, 1.0).to_bytes())

    run = train_with_attack(tmp_path, strategy, end_early, deadline=1.0 if strategy == "client_batch" else None)
    expected = f"with 1 micro-batches, but ended it after {num_micro_batches}, 0 of them with a gradient"
    assert expected in str(run.errors["client 1"])
    assert "client 'client 1' disconnected" in str(run.errors["client 0"])
    assert run.server.step == 0


def test_micro_batch_cannot_start_before_previous_gradient(tmp_path):
    def skip(run, trainer, *args):
        tokens = send_micro_batch(trainer, 2, backward=False)
        trainer.model(tokens, labels=tokens)

    run = train_with_attack(tmp_path, "client_batch", skip, deadline=1.0, micro_batches_in_flight=1, **STEPS)
    assert "before the gradients of the previous micro-batches. At most 1" in str(run.errors["client 1"])


def test_gradient_cannot_arrive_before_the_micro_batches_of_its_window(tmp_path):
    def hurry(run, trainer, *args):
        send_micro_batch(trainer, 2, backward=True)

    run = train_with_attack(tmp_path, "client_batch", hurry, deadline=1.0, **STEPS)
    assert "must first send the micro-batches before 2" in str(run.errors["client 1"])


def test_micro_batches_and_gradients_are_accepted_once_and_in_order(tmp_path):
    def repeat(run, trainer, *args):
        send_micro_batch(trainer, 3, backward=True)
        boundary = trainer.model.boundary
        for number in (0, 2):
            boundary.micro_step = number
            with pytest.raises(
                ValueError, match=f"Client 'client 1' sent micro-batch {number} at step 0, but micro-batch 1 is next"
            ):
                trainer.model(torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]]))
        boundary.micro_step = 1
        loss = trainer.model(torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).loss
        loss.backward(retain_graph=True)
        with pytest.raises(
            ValueError,
            match="Client 'client 1' sent a gradient of micro-batch 1 at step 0, but no such micro-batch waits",
        ):
            loss.backward()
        raise RuntimeError("refused")

    run = train_with_attack(tmp_path, "server_hierarchical", repeat, **STEPS)
    assert str(run.errors["client 1"]) == "refused"


def test_step_cannot_have_more_micro_batches_than_the_settings(tmp_path):
    def announce_more(run, trainer, *args):
        send_micro_batch(trainer, 4, backward=True)

    run = train_with_attack(tmp_path, "server_hierarchical", announce_more, **STEPS)
    error = "began step 0 with 4 micro-batches, but gradient_accumulation_steps is 3"
    assert error in str(run.errors["client 1"])


def test_server_keeps_the_activations_of_the_agreed_micro_batches_only(tmp_path):
    def send_without_gradients(run, trainer, *args):
        tokens = send_micro_batch(trainer, 3, backward=False)
        for _ in range(2):
            trainer.model(tokens, labels=tokens)

    run = train_with_attack(
        tmp_path, "server_hierarchical", send_without_gradients, micro_batches_in_flight=2, **STEPS
    )
    assert "before the gradients of the previous micro-batches. At most 2" in str(run.errors["client 1"])


def test_error_details_are_sent_to_the_faulty_client_only(tmp_path):
    def send_other_dtype(run, trainer, *args):
        trainer.model.boundary.wire = Wire("int8")
        return type(trainer).training_step(trainer, *args)

    run = train_with_attack(tmp_path, "client_batch", send_other_dtype)
    assert "expects wire dtype float32" in str(run.errors["client 1"])
    assert "client 'client 1' disconnected" in str(run.errors["client 0"])
    assert "wire" not in str(run.errors["client 0"])


@pytest.mark.parametrize("strategy", ["serial", "client_batch"])
def test_client_cannot_finish_at_a_future_step(strategy, tmp_path):
    """The server would not notice the disconnection of a finished client, and the other clients would wait forever."""

    def finish(run, trainer, *args):
        with pytest.raises(ValueError, match="finished at step 1000000, but the current step is 0"):
            run.server.answer("client 1", Finish("client 1", 10**6).to_bytes())
        tried.set()
        raise RuntimeError("gone")

    tried = threading.Event()
    if strategy == "serial":  # the turn of client 1 starts after step 0
        run = Run(tmp_path, clients_of(2, 2), config_of(strategy), LORA)
        with pytest.raises(ValueError, match="finished at step 1000000"):
            run.server.answer("client 1", Finish("client 1", 10**6).to_bytes())
        run.train()
        assert not run.errors
        return
    run = train_with_attack(tmp_path, strategy, finish, until=tried)
    assert "client 'client 1' disconnected" in str(run.errors["client 0"])


def test_client_that_leaves_before_all_joined_ends_the_run(tmp_path):
    server = Run(tmp_path, clients_of(2, 2), config_of("serial")).server
    server.answer("client 1", Finish("client 1", 0).to_bytes())
    assert server.wait().startswith("client 'client 1' left before all clients joined; 1 clients are left")


@pytest.mark.parametrize("where", ["load_checkpoint", "save_checkpoint", "save"])
def test_server_error_ends_run_and_details_stay_in_server_log(where, tmp_path, caplog, monkeypatch):
    run = Run(tmp_path, clients_of(2, 2), config_of("client_batch"), LORA)

    def fail(*args):
        raise OSError("No space left on device: '/srv/secret'")

    if where == "load_checkpoint":
        monkeypatch.setattr(run.server.server_model, "checkpoints", fail)
    else:
        monkeypatch.setattr(run.server.server_model, where, fail)
    # `caplog` receives only records that propagate.
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    run.train()
    assert "the server failed (OSError)" in run.server.wait()
    # The client that leaves first has finished before the body is saved.
    assert len(run.errors) == (1 if where == "save" else 2)
    for error in run.errors.values():
        assert "the server failed (OSError); see the log of the server" in str(error)
        assert "secret" not in str(error)
    assert caplog.text.count("The server failed, and the run ends.") == 1 and "/srv/secret" in caplog.text


def test_parameters_in_the_name_of_another_client_are_refused(tmp_path, monkeypatch, caplog):
    """They would replace the parameters of the other client in the mean."""
    send = PartExchange.send

    def send_as_client_2(parts, recipient, state, step, **kwargs):
        if parts.client.client_id != "client 1":
            return send(parts, recipient, state, step, **kwargs)
        payload = PartParameters("client 2", step, 1, dict(state)).to_bytes()
        encrypted = parts.require_envelopes().seal(recipient, f"step {step}", payload)
        message = SendEnvelope("client 1", step, recipient, as_tensor(encrypted))
        return parts.link.request(message, SendEnvelopeReply)

    monkeypatch.setattr(PartExchange, "send", send_as_client_2)
    run = Run(
        tmp_path, clients_of(2, 2, 2), SplitConfig(strategy="client_batch", average_every=1, min_clients=1.0), LORA
    )
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    run.train()
    assert not run.errors
    assert "The envelope of client 'client 1' holds parameters that claim to be from client 'client 2'" in caplog.text


def test_missing_fingerprint_of_peer_is_reported_before_the_first_step(tmp_path):
    run = Run(tmp_path, clients_of(2, 2), SplitConfig(strategy="client_batch", min_clients=1.0), LORA)
    elsewhere = {"client 7": identity("client 7").fingerprint}
    run.trainers["client 1"].envelopes = PeerEnvelopes(identity("client 1"), elsewhere, 2048)
    run.train()
    assert "The fingerprint of client 'client 0' of this run is not known" in str(run.errors["client 1"])
    assert "--peer client 0=FINGERPRINT" in str(run.errors["client 1"])
    assert run.server.step == 0


def test_fingerprints_of_clients_outside_the_run_are_ignored(tmp_path):
    run = Run(tmp_path, clients_of(2, 2), SplitConfig(strategy="client_batch"), LORA)
    for client_id, trainer in run.trainers.items():
        fingerprints = {name: identity(name).fingerprint for name in ("client 0", "client 1", "client 7")}
        trainer.envelopes = PeerEnvelopes(identity(client_id), fingerprints, 2048)
    run.train()
    assert not run.errors
