"""Who waits for whom in a networked run, how long, and what the server says of it."""

from __future__ import annotations

import threading
import time

import pytest
from networked import Direct, Run
from split_runs import LORA, clients_of, rows_of

from hf_federated import SplitConfig
from hf_federated.split_training.messages import Join, Step, read_message


NOTICE_AFTER = 0.2


def holding(run_of, is_held, monkeypatch):
    """
    The notices of a run from when a message is held back, which is until two were given. Before, a busy machine may
    have been slow.

    Args:
        run_of: Makes the run of a function that makes links.
        is_held: Whether a message is the one.
    """
    notices: list[str] = []
    held, told = threading.Event(), threading.Event()

    def warning(text):
        if held.is_set():
            notices.append(text)
        if len(notices) == 2:
            told.set()

    monkeypatch.setattr("hf_federated.split_training.server.logger.warning", warning)

    def links(server, client_id):
        def watch(blob):
            if is_held(read_message(blob)):
                held.set()
                assert told.wait(30)

        return Direct(server, client_id, watch)

    run = run_of(links)
    watcher = threading.Thread(target=run.server.wait, args=(NOTICE_AFTER,))
    watcher.start()
    run.train()
    watcher.join(30)
    assert not watcher.is_alive() and not run.errors
    return notices


@pytest.mark.parametrize(
    ("kind", "step", "found"), [(Join, None, "Step 0 waits for client 1,"), (Step, 1, "Step 1 waits for client 1,")]
)
def test_who_holds_a_run_up_is_named(kind, step, found, tmp_path, monkeypatch):
    def is_held(message):
        mine = isinstance(message, kind) and message.client_id == "client 1"
        return mine and (step is None or message.step == step)

    split = SplitConfig(strategy="client_batch")
    notices = holding(lambda links: Run(tmp_path, clients_of(4, 4), split, LORA, links=links), is_held, monkeypatch)
    assert sum(found in notice for notice in notices) >= 2
    assert not any("client 0" in notice for notice in notices if found in notice)


def test_who_has_its_turn_is_named(tmp_path, monkeypatch):
    def is_held(message):
        return isinstance(message, Step) and message.client_id == "client 0"

    split = SplitConfig(steps_per_turn=1)
    notices = holding(lambda links: Run(tmp_path, clients_of(2, 2), split, LORA, links=links), is_held, monkeypatch)
    assert all("Step 0 waits for client 0," in notice for notice in notices[:2])


def test_a_run_that_goes_on_is_not_spoken_of(tmp_path, monkeypatch):
    notices: list[str] = []
    monkeypatch.setattr("hf_federated.split_training.server.logger.warning", notices.append)
    run = Run(tmp_path, clients_of(4, 4), SplitConfig(strategy="client_batch"), LORA)
    watcher = threading.Thread(target=run.server.wait)
    watcher.start()
    run.train()
    watcher.join(30)
    assert not watcher.is_alive() and not notices


def test_a_step_goes_on_without_a_straggler(tmp_path):
    clients = clients_of(8, 8)
    slow = {"at": 1}

    def links(server, client_id):
        def wait(blob):
            message = read_message(blob)
            # Its gradient comes too late, once.
            if client_id == "client 1" and type(message).kind == "split_backward" and message.step == slow["at"]:
                slow["at"] = -1
                time.sleep(1.5)

        return Direct(server, client_id, wait)

    run = Run(tmp_path, clients, SplitConfig(strategy="client_batch"), LORA, deadline=0.5, links=links)
    run.train()
    assert not run.errors
    assert run.trainers["client 1"]._remote.num_late >= 1 and run.trainers["client 0"]._remote.num_late == 0
    assert run.server.step == 4 and run.server.bodies._rows["client 0"] == 8
    # What it did not train is not counted.
    assert run.server.bodies._rows["client 1"] == 8 - 2 * run.trainers["client 1"]._remote.num_late


def test_who_waits_for_a_straggler_is_none(tmp_path):
    clients = {"client 0": rows_of(0, 2), "client 1": rows_of(1, 4), "client 2": rows_of(2, 4)}

    def links(server, client_id):
        def wait(blob):
            message = read_message(blob)
            # The first waits for the others' second passage, at which the second waits for the third.
            if client_id == "client 2" and getattr(message, "micro_step", 0) == 1:
                given_up.wait(20)

        return Direct(server, client_id, wait)

    split, given_up = SplitConfig(strategy="client_batch"), threading.Event()
    run = Run(tmp_path, clients, split, LORA, deadline=1.5, links=links, gradient_accumulation_steps=2)
    end_step = run.server._step_together

    def end_and_tell(messages):
        given_up.set()
        return end_step(messages)

    run.server._step_together = end_and_tell
    run.train()
    assert not run.errors
    assert {own: trainer._remote.num_late for own, trainer in run.trainers.items()} == {
        "client 0": 0,
        "client 1": 0,
        "client 2": 1,
    }
