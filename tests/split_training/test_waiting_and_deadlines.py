"""Waiting for clients in a networked run: warnings of the server and deadlines."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from networked import DirectLink, Run
from split_runs import LORA, clients_of, rows_of

from hf_federated import SplitConfig
from hf_federated.split_training.envelope_relay import EnvelopeRelay
from hf_federated.split_training.messages import (
    EndStep,
    FetchEnvelope,
    Join,
    PeerRemovedReply,
    SendEnvelope,
    as_tensor,
    read_message,
)
from hf_federated.split_training.run_state import ClientRemovedError, RunState
from hf_federated.split_training.step_plan import StepPlan


NOTICE_AFTER = 0.2


def collect_notices(create_run, is_held, monkeypatch):
    """
    Collect the warnings of a run from the time when a message is held back until the second warning.

    Earlier warnings are not collected, because they may result from a slow machine.

    Args:
        create_run: Creates the run from a function that creates links.
        is_held: Whether a message is held back.
    """
    notices: list[str] = []
    held, enough_notices = threading.Event(), threading.Event()

    def warning(text):
        if held.is_set():
            notices.append(text)
        if len(notices) == 2:
            enough_notices.set()

    monkeypatch.setattr("hf_federated.split_training.server.logger.warning", warning)

    def links(server, client_id):
        def watch(blob):
            if is_held(read_message(blob)):
                held.set()
                assert enough_notices.wait(30)

        return DirectLink(server, client_id, watch)

    run = create_run(links)
    watcher = threading.Thread(target=run.server.wait, args=(NOTICE_AFTER,))
    watcher.start()
    run.train()
    watcher.join(30)
    assert not watcher.is_alive() and not run.errors
    return notices


@pytest.mark.parametrize(
    ("kind", "step", "expected"),
    [
        (Join, None, "Step 0 has been waiting for client 1 for"),
        (EndStep, 1, "Step 1 has been waiting for client 1 for"),
    ],
)
def test_client_that_delays_the_run_is_named_in_log(kind, step, expected, tmp_path, monkeypatch):
    def is_held(message):
        mine = isinstance(message, kind) and message.client_id == "client 1"
        return mine and (step is None or message.step == step)

    def create_run(links):
        return Run(tmp_path, clients_of(4, 4), SplitConfig(strategy="client_batch"), LORA, links=links)

    notices = collect_notices(create_run, is_held, monkeypatch)
    assert sum(expected in notice for notice in notices) >= 2
    assert not any("client 0" in notice for notice in notices if expected in notice)


def test_serial_client_whose_turn_it_is_is_named_in_log(tmp_path, monkeypatch):
    def is_held(message):
        return isinstance(message, EndStep) and message.client_id == "client 0"

    def create_run(links):
        return Run(tmp_path, clients_of(2, 2), SplitConfig(steps_per_turn=1), LORA, links=links)

    notices = collect_notices(create_run, is_held, monkeypatch)
    assert all("Step 0 has been waiting for client 0 for" in notice for notice in notices[:2])


def test_run_without_delay_logs_no_warning(tmp_path, monkeypatch):
    notices: list[str] = []
    monkeypatch.setattr("hf_federated.split_training.server.logger.warning", notices.append)
    run = Run(tmp_path, clients_of(4, 4), SplitConfig(strategy="client_batch"), LORA)
    watcher = threading.Thread(target=run.server.wait)
    watcher.start()
    run.train()
    watcher.join(30)
    assert not watcher.is_alive() and not notices


def test_step_continues_without_late_client_after_deadline(tmp_path):
    clients = clients_of(8, 8)
    slow = {"at": 1}

    def links(server, client_id):
        def wait(blob):
            message = read_message(blob)
            # The gradient is late once.
            if client_id == "client 1" and type(message).kind == "split_backward" and message.step == slow["at"]:
                slow["at"] = -1
                time.sleep(1.5)

        return DirectLink(server, client_id, wait)

    run = Run(tmp_path, clients, SplitConfig(strategy="client_batch"), LORA, deadline=0.5, links=links)
    run.train()
    assert not run.errors
    num_late = {client_id: trainer.networked_run.num_late for client_id, trainer in run.trainers.items()}
    assert num_late["client 1"] >= 1 and num_late["client 0"] == 0
    assert run.server.step == 4 and run.server.server_model.num_examples["client 0"] == 8
    # Examples of skipped steps are not counted.
    assert run.server.server_model.num_examples["client 1"] == 8 - 2 * num_late["client 1"]


def test_clients_that_wait_for_a_late_client_are_not_late(tmp_path):
    clients = {"client 0": rows_of(0, 2), "client 1": rows_of(1, 4), "client 2": rows_of(2, 4)}

    def links(server, client_id):
        def wait(blob):
            message = read_message(blob)
            # Client 0 waits at the end of the step. Client 1 waits for the second micro-batch of client 2.
            if client_id == "client 2" and getattr(message, "micro_step", 0) == 1:
                step_ended.wait(20)

        return DirectLink(server, client_id, wait)

    split, step_ended = SplitConfig(strategy="client_batch"), threading.Event()
    run = Run(tmp_path, clients, split, LORA, deadline=1.5, links=links, gradient_accumulation_steps=2)
    train_step = run.server.server_model.train_step

    def train_step_and_signal(*args):
        step_ended.set()
        return train_step(*args)

    run.server.server_model.train_step = train_step_and_signal
    run.train()
    assert not run.errors
    assert {client_id: trainer.networked_run.num_late for client_id, trainer in run.trainers.items()} == {
        "client 0": 0,
        "client 1": 0,
        "client 2": 1,
    }


CLIENTS = ["client 0", "client 1", "client 2"]


def relay_at(step: int, strategy: str) -> EnvelopeRelay:
    """A relay of three clients at a step of a run of six steps, with a short deadline."""
    split = SplitConfig(strategy=strategy, average_every=None if strategy == "serial" else 2)
    relay = EnvelopeRelay(RunState(CLIENTS, min_clients=1), split, deadline=0.05)
    relay.plan, relay.last_step = StepPlan(dict.fromkeys(CLIENTS, 2), strategy != "serial"), 6
    relay.state.step = step
    return relay


def request(relay: EnvelopeRelay, step: int, sender: str, recipient: str) -> Any:
    with relay.state.condition:
        return relay.deliver(FetchEnvelope(recipient, step, sender))


@pytest.mark.parametrize(
    ("strategy", "step", "sender"),
    [
        ("serial", 0, "client 0"),
        ("serial", 3, "client 1"),
        ("serial", 4, "client 0"),
        ("serial", 9, "client 1"),
        ("client_batch", 0, "client 0"),
        ("client_batch", 3, "client 0"),
        ("client_batch", 4, "client 1"),
        ("client_batch", 8, "client 0"),
    ],
)
def test_request_for_parameters_that_no_client_sends_is_refused(strategy, step, sender):
    """A client that waits for other clients sends nothing. A deadline for such a request would remove this client."""
    relay = relay_at(4, strategy)
    with pytest.raises(ValueError, match=rf"requested a message of client '{sender}' of step {step}, but the clients"):
        request(relay, step, sender, "client 2")
    assert not relay.state.removed


def test_client_is_not_removed_before_it_can_send_its_parameters():
    relay = relay_at(3, "client_batch")
    thread = threading.Thread(target=request, args=(relay, 4, "client 0", "client 2"))
    thread.start()
    time.sleep(0.2)
    with relay.state.condition:
        relay.store(SendEnvelope("client 0", 4, "client 2", as_tensor(b"x")))
    thread.join(10)
    assert not thread.is_alive() and not relay.state.removed
    with pytest.raises(ValueError, match="of step 4 again"):
        request(relay, 4, "client 0", "client 2")


def test_client_that_waits_for_the_average_without_sending_its_parameters_is_removed():
    relay = relay_at(4, "client_batch")
    errors: list[Exception] = []

    def wait_for_average() -> None:
        try:
            request(relay, 4, "client 0", "client 2")
        except ClientRemovedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait_for_average)
    thread.start()
    assert isinstance(request(relay, 4, "client 2", "client 0"), PeerRemovedReply)
    thread.join(10)
    assert list(relay.state.removed) == ["client 2"] and len(errors) == 1


def test_deadline_counts_after_a_computation_of_the_awaited_client(tmp_path):
    """The other client looks for missing clients while the body computes for client 1, which then falls silent."""

    def links(server, client_id):
        def fall_silent(blob):
            if client_id == "client 1" and type(read_message(blob)).kind == "split_backward":
                over.wait(20)
                raise ConnectionError("gone")

        return DirectLink(server, client_id, fall_silent)

    over = threading.Event()
    run = Run(tmp_path, clients_of(4, 4), SplitConfig(steps_per_turn=1), LORA, deadline=0.4, links=links)
    body = run.server.server_model.body_servers["client 1"]
    forward_batch = body.forward_batch

    def compute_slowly(messages):
        time.sleep(0.3)
        return forward_batch(messages)

    body.forward_batch = compute_slowly
    threading.Thread(target=lambda: (run.server.wait(), over.set()), daemon=True).start()
    started_at = time.monotonic()
    run.train()
    assert set(run.errors) == {"client 1"} and time.monotonic() - started_at < 15
