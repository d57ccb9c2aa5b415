"""Clients of a networked run that do as they should but for one message: it is theirs to hear, and nobody waits."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time

import pytest
import torch
from networked import Direct, Run
from split_runs import LORA, STRATEGIES, clients_of

from hf_federated import SplitConfig
from hf_federated.split.messages import Backward, Forward
from hf_federated.split_training import RunFailedError
from hf_federated.split_training.messages import Begin, Fetch, Finish, Join, Joined, Send, Step, read_message
from hf_federated.split_training.pending_messages import Gathering


class Instead(Direct):
    """A link on which one client sends something else in place of some messages."""

    def __init__(self, server, client_id, instead):
        super().__init__(server, client_id)
        self.instead = instead

    def exchange(self, blob):
        message = read_message(blob) if self.client_id == "client 1" else None
        answer = None if message is None else self.instead(self.server, message)
        return super().exchange(blob) if answer is None else answer


def with_instead(tmp_path, strategy, instead, clients=2, **changes):
    def links(server, client_id):
        return Instead(server, client_id, instead)

    split = SplitConfig(strategy=strategy, steps_per_turn=1 if strategy == "serial" else None)
    run = Run(tmp_path, clients_of(*[4] * clients), split, LORA, links=links, **changes)
    run.train()
    return run


@pytest.mark.parametrize("strategy", ["serial", "client_batch"])
def test_who_leaves_before_it_wrote_to_others_ends_the_run_by_name(strategy, tmp_path):
    def leave(server, message):
        if isinstance(message, Send) and message.step == server.bodies.max_steps:
            server.answer("client 1", Finish("client 1", message.step).to_bytes())
            raise RuntimeError("gone")

    # The other waited for its part for ever, and was the one that the log named.
    run = with_instead(tmp_path, strategy, leave)
    assert "client 'client 1' left before it wrote to 'client 0'" in str(run.errors["client 0"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_is_begun_once(strategy, tmp_path):
    def begin_again(server, message):
        if isinstance(message, Step):
            server.answer("client 1", Begin("client 1", message.step, 9, 10**9).to_bytes())

    run = with_instead(tmp_path, strategy, begin_again)
    assert "'client 1' began step" in str(run.errors["client 1"]) and "already" in str(run.errors["client 1"])
    assert "client 'client 1' is gone" in str(run.errors["client 0"])
    assert max(run.server.bodies._rows.values()) <= 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_is_trained_after_the_last_step(strategy, tmp_path):
    refused = []

    def go_on(server, message):
        if isinstance(message, Finish):
            for step, error in ((message.step, "is behind the last"), (message.step + 1, "cannot begin step")):
                with pytest.raises(ValueError, match=error):
                    server.answer("client 1", Begin("client 1", step, 1, 2).to_bytes())
            refused.append(message.step)

    run = with_instead(tmp_path, strategy, go_on)
    assert not run.errors and refused == [run.server.bodies.max_steps] == [run.server.step]
    with pytest.raises(ValueError, match="said that it is done"):
        run.server.answer("client 1", Fetch("client 1", run.server.step, "client 0").to_bytes())


@pytest.mark.parametrize(
    ("kind", "changes", "error"),
    [
        (Backward, {"num_targets": None}, "does not say of how many targets"),
        (Forward, {"training": False}, "sends training=False"),
        (Forward, {"autocast": "bfloat16"}, "and autocast=bfloat16"),
    ],
)
def test_who_sends_what_fits_nobody_elses_is_the_one_that_hears_it(kind, changes, error, tmp_path):
    def change(server, message):
        if isinstance(message, kind):
            return server.answer("client 1", dataclasses.replace(message, **changes).to_bytes())

    run = with_instead(tmp_path, "client_batch", change, clients=3)
    assert error in str(run.errors["client 1"])
    for other in ("client 0", "client 2"):
        assert "client 'client 1' is gone" in str(run.errors[other])


@pytest.mark.parametrize("gone_at_once", [False, True])
def test_who_breaks_everybodys_gradients_is_named(gone_at_once, tmp_path):
    def explode(server, message):
        if not isinstance(message, Backward):
            return None
        huge = {name: torch.full_like(values, 3e38) for name, values in message.gradient.items()}
        blob = dataclasses.replace(message, gradient=huge).to_bytes()
        if not gone_at_once:
            return server.answer("client 1", blob)
        while "client 0" not in server._gathered.get(("backward", 0), Gathering()).messages:
            time.sleep(0.01)
        # Nobody else wakes up before this client is gone.
        with server._changed:
            try:
                return server.answer("client 1", blob)
            finally:
                server.client_lost("client 1")

    run = with_instead(tmp_path, "client_batch", explode)
    assert "not finite; the longest is that of client 'client 1'" in str(run.errors["client 0"])


def test_a_message_that_was_answered_is_not_taken_again(tmp_path):
    def again(server, message):
        if isinstance(message, Forward):
            server.answer("client 1", message.to_bytes())

    run = with_instead(tmp_path, "client_batch", again)
    assert "Passage 0 of client 'client 1' came at step 0, and 1 is the next" in str(run.errors["client 1"])


def test_a_damaged_checkpoint_of_the_servers_is_for_its_log(tmp_path, caplog, monkeypatch):
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
        assert "and its log says why" in str(error) and str(tmp_path) not in str(error)
    assert "training.safetensors" in caplog.text


def test_a_client_is_told_if_the_server_names_others_than_take_part(tmp_path):
    def forget_one(server, message):
        if isinstance(message, Join):
            joined = Joined.from_bytes(server.answer("client 1", message.to_bytes()))
            introductions = {"client 1": joined.introductions["client 1"]}
            return dataclasses.replace(joined, introductions=introductions).to_bytes()

    run = with_instead(tmp_path, "client_batch", forget_one)
    assert "The server names other clients than those that take part" in str(run.errors["client 1"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_may_look_at_the_model_without_a_gradient(strategy, tmp_path):
    run = Run(tmp_path, clients_of(4, 4), SplitConfig(strategy=strategy), LORA, gradient_accumulation_steps=2)
    for trainer in run.trainers.values():

        def look_first(model, inputs, *args, trainer=trainer, **kwargs):
            with torch.no_grad():
                model(inputs["input_ids"])
            return type(trainer).compute_loss(trainer, model, inputs, *args, **kwargs)

        trainer.compute_loss = look_first
    run.train()
    assert not run.errors and run.server.step == run.server.bodies.max_steps


def test_a_message_that_waits_is_not_sent_again_beside_it(tmp_path):
    waits, refused = threading.Event(), []

    def hold(server, message):
        # By the second client, whose first message waits for the first client's.
        def send_again():
            while ("step", 0) not in server._gathered:
                time.sleep(0.001)
            try:
                server.answer("client 1", message.to_bytes())
            except ValueError as error:
                refused.append(str(error))
            waits.set()

        if isinstance(message, Step) and message.step == 0:
            threading.Thread(target=send_again).start()

    def links(server, client_id):
        def wait(blob):
            message = read_message(blob)
            if client_id == "client 0" and isinstance(message, Step) and message.step == 0:
                assert waits.wait(30)

        return Direct(server, client_id, wait) if client_id == "client 0" else Instead(server, client_id, hold)

    run = Run(tmp_path, clients_of(4, 4), SplitConfig(strategy="client_batch"), LORA, links=links)
    run.train()
    assert not run.errors and refused == ["Client 'client 1' sent step 0 of step 0 again."]


def test_a_deadline_at_which_everybody_waits_ends_the_run(tmp_path):
    """It cannot come to this by messages that are taken; if it did, clocks would be set back for ever."""
    server = Run(tmp_path, clients_of(2, 2), SplitConfig(strategy="client_batch"), LORA, deadline=1.0).server
    for number, own in enumerate(server.client_ids):
        server._gathered["forward", number] = Gathering()
        server._gathered["forward", number].messages[own] = None
    with server._changed, pytest.raises(RunFailedError, match="client 0, client 1 wait for one another at step 0"):
        server._go_on_without(server.client_ids)
