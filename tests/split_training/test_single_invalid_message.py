"""Clients of a networked run with one invalid message.

The client receives the error, and no other client waits for it.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time

import pytest
import torch
from networked import DirectLink, Run, unbundled
from split_runs import LORA, STRATEGIES, clients_of

from hf_federated import SplitConfig
from hf_federated.split.messages import Backward, Forward
from hf_federated.split_training import StepPlan
from hf_federated.split_training.messages import (
    BeginStep,
    Bundle,
    EndStep,
    FetchEnvelope,
    Finish,
    Join,
    JoinReply,
    SendEnvelope,
    as_tensor,
    read_message,
)
from hf_federated.split_training.pending_messages import RequestBatch


class ReplacingLink(DirectLink):
    """Link on which client 1 sends different messages in place of some messages."""

    def __init__(self, server, client_id, replace):
        super().__init__(server, client_id)
        self.replace = replace

    def exchange(self, blob):
        if self.client_id != "client 1":
            return super().exchange(blob)
        answers = []
        for sent in unbundled(blob):
            answer = self.replace(self.server, read_message(sent))
            answers.append(super().exchange(sent) if answer is None else answer)
        return answers[0] if len(answers) == 1 else Bundle("client 1", list(map(as_tensor, answers))).to_bytes()


def train_with_replaced_messages(tmp_path, strategy, replace, clients=2, **changes):
    def links(server, client_id):
        return ReplacingLink(server, client_id, replace)

    # The run ends if a client fails, so that the errors of the other clients show the reason.
    split = SplitConfig(strategy=strategy, steps_per_turn=1 if strategy == "serial" else None, min_clients=1.0)
    run = Run(tmp_path, clients_of(*[4] * clients), split, LORA, links=links, **changes)
    run.train()
    return run


@pytest.mark.parametrize("strategy", ["serial", "client_batch"])
def test_client_that_leaves_before_sending_parameters_is_named(strategy, tmp_path):
    """Without this error client 0 would wait for the parameters forever."""

    def leave(server, message):
        if isinstance(message, SendEnvelope) and message.step == server.server_model.max_steps:
            server.answer("client 1", Finish("client 1", message.step).to_bytes())
            raise RuntimeError("gone")

    run = train_with_replaced_messages(tmp_path, strategy, leave)
    assert "client 'client 1' left before it sent its parameters to 'client 0'" in str(run.errors["client 0"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_client_cannot_begin_a_step_twice(strategy, tmp_path):
    def begin_again(server, message):
        if isinstance(message, EndStep):
            server.answer("client 1", BeginStep("client 1", message.step, 9, 10**9).to_bytes())

    run = train_with_replaced_messages(tmp_path, strategy, begin_again)
    assert "'client 1' began step" in str(run.errors["client 1"]) and "twice" in str(run.errors["client 1"])
    assert "client 'client 1' disconnected" in str(run.errors["client 0"])
    assert max(run.server.server_model.num_examples.values()) <= 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_step_can_begin_after_the_last_step(strategy, tmp_path):
    rejected_steps = []

    def begin_after_end(server, message):
        if isinstance(message, Finish):
            for step, error in ((message.step, "but the last step is"), (message.step + 1, "cannot begin step")):
                with pytest.raises(ValueError, match=error):
                    server.answer("client 1", BeginStep("client 1", step, 1, 2).to_bytes())
            rejected_steps.append(message.step)

    run = train_with_replaced_messages(tmp_path, strategy, begin_after_end)
    assert not run.errors and rejected_steps == [run.server.server_model.max_steps] == [run.server.step]
    with pytest.raises(ValueError, match="sent a request after it finished"):
        run.server.answer("client 1", FetchEnvelope("client 1", run.server.step, "client 0").to_bytes())


@pytest.mark.parametrize(
    ("kind", "changes", "error"),
    [
        (Backward, {"num_targets": None}, "sent a gradient without its number of target tokens"),
        (Forward, {"training": False}, "sent training=False"),
        (Forward, {"autocast": "bfloat16"}, "and autocast=bfloat16"),
    ],
)
def test_message_that_cannot_be_batched_fails_for_its_sender_only(kind, changes, error, tmp_path):
    def change(server, message):
        if isinstance(message, kind):
            return server.answer("client 1", dataclasses.replace(message, **changes).to_bytes())

    run = train_with_replaced_messages(tmp_path, "client_batch", change, clients=3)
    assert error in str(run.errors["client 1"])
    for client_id in ("client 0", "client 2"):
        assert "client 'client 1' disconnected" in str(run.errors[client_id])


@pytest.mark.parametrize("disconnects_at_once", [False, True])
def test_client_with_overflowing_gradients_is_named_to_all_clients(disconnects_at_once, tmp_path):
    def send_huge_gradient(server, message):
        if not isinstance(message, Backward):
            return None
        huge = {name: torch.full_like(values, 3e38) for name, values in message.gradient.items()}
        blob = dataclasses.replace(message, gradient=huge).to_bytes()
        if not disconnects_at_once:
            return server.answer("client 1", blob)
        while "client 0" not in server.steps.batches.get(("backward", 0), RequestBatch()).messages:
            time.sleep(0.01)
        # With the lock held, no other thread continues before client 1 is disconnected.
        with server.state.condition:
            try:
                return server.answer("client 1", blob)
            finally:
                server.client_lost("client 1")

    run = train_with_replaced_messages(tmp_path, "client_batch", send_huge_gradient)
    assert "sent gradients of step 0 of size" in str(run.errors["client 0"])
    assert "client 'client 1'" in str(run.errors["client 0"])


def test_answered_message_cannot_be_sent_again(tmp_path):
    def send_twice(server, message):
        if isinstance(message, Forward):
            server.answer("client 1", message.to_bytes())

    run = train_with_replaced_messages(tmp_path, "client_batch", send_twice)
    assert "Client 'client 1' sent micro-batch 0 at step 0, but micro-batch 1 is next" in str(run.errors["client 1"])


def test_damaged_server_checkpoint_is_reported_in_server_log_only(tmp_path, caplog, monkeypatch):
    changes = {"save_strategy": "steps", "save_steps": 1}
    Run(tmp_path, clients_of(4, 4), SplitConfig(strategy="client_batch"), LORA, **changes).train()
    newest = max(tmp_path.glob("server/checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    for path in newest.rglob("training.safetensors"):
        path.write_bytes(path.read_bytes()[:-10])
    run = Run(tmp_path, clients_of(4, 4), SplitConfig(strategy="client_batch"), LORA, **changes)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    run.train(resume=True)
    assert len(run.errors) == 2
    for error in run.errors.values():
        assert "see the log of the server" in str(error) and str(tmp_path) not in str(error)
    assert "training.safetensors" in caplog.text


def test_client_rejects_inconsistent_clients_in_server_reply(tmp_path):
    def drop_introduction(server, message):
        if isinstance(message, Join):
            joined = JoinReply.from_bytes(server.answer("client 1", message.to_bytes()))
            introductions = {"client 1": joined.introductions["client 1"]}
            return dataclasses.replace(joined, introductions=introductions).to_bytes()

    run = train_with_replaced_messages(tmp_path, "client_batch", drop_introduction)
    error = str(run.errors["client 1"])
    assert "names the clients ['client 0', 'client 1'] with introductions of ['client 1']" in error


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loss_can_call_model_without_gradients(strategy, tmp_path):
    run = Run(tmp_path, clients_of(4, 4), SplitConfig(strategy=strategy), LORA, gradient_accumulation_steps=2)
    for trainer in run.trainers.values():

        def call_without_gradients(model, inputs, *args, trainer=trainer, **kwargs):
            with torch.no_grad():
                model(inputs["input_ids"])
            return type(trainer).compute_loss(trainer, model, inputs, *args, **kwargs)

        trainer.compute_loss = call_without_gradients
    run.train()
    assert not run.errors and run.server.step == run.server.server_model.max_steps


def test_pending_message_cannot_be_sent_again(tmp_path):
    is_pending, errors = threading.Event(), []

    def hold(server, message):
        # Client 1 sends its message again while its first message waits for client 0.
        def send_again():
            while ("step", 0) not in server.steps.batches:
                time.sleep(0.001)
            try:
                server.answer("client 1", message.to_bytes())
            except ValueError as error:
                errors.append(str(error))
            is_pending.set()

        if isinstance(message, EndStep) and message.step == 0:
            threading.Thread(target=send_again).start()

    def links(server, client_id):
        def wait(blob):
            message = read_message(blob)
            if client_id == "client 0" and isinstance(message, EndStep) and message.step == 0:
                assert is_pending.wait(30)

        return (
            DirectLink(server, client_id, wait) if client_id == "client 0" else ReplacingLink(server, client_id, hold)
        )

    run = Run(tmp_path, clients_of(4, 4), SplitConfig(strategy="client_batch"), LORA, links=links)
    run.train()
    assert not run.errors and errors == ["Client 'client 1' sent step 0 of step 0 twice."]


def test_run_ends_if_all_clients_wait_at_the_deadline(tmp_path):
    """The protocol excludes this state. If it occurred, the server would restart the deadline forever."""
    server = Run(tmp_path, clients_of(2, 2), SplitConfig(strategy="client_batch"), LORA, deadline=1.0).server
    for number, client_id in enumerate(server.client_ids):
        server.steps.batches["forward", number] = RequestBatch()
        server.steps.batches["forward", number].messages[client_id] = None
    with server.state.condition:
        server.steps.plan = StepPlan({"client 0": 1, "client 1": 1}, simultaneous=True)
        server.steps.continue_without([])
    assert server.wait() == "client 0, client 1 wait for each other at step 0"
