"""A server of a networked run says for whom the run waits."""

from __future__ import annotations

import threading

import pytest
from networked import Direct, Run
from split_runs import LORA, clients_of

from hf_federated import SplitConfig
from hf_federated.split_training.control import Join, Step, read_message


NOTICE_AFTER = 0.2


def holding(run_of, is_held, monkeypatch):
    """
    The notices of a run in which a message is held back until two of its notices were given.

    Args:
        run_of: Makes the run of a function that makes links.
        is_held: Whether a message is the one.
    """
    notices: list[str] = []
    told = threading.Event()

    def warning(text):
        notices.append(text)
        if len(notices) == 2:
            told.set()

    monkeypatch.setattr("hf_federated.split_training.server.logger.warning", warning)

    def links(server, client_id):
        def watch(blob):
            if is_held(read_message(blob)):
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
