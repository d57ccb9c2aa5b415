"""The worker process of the conformance kit."""

from __future__ import annotations

import os
import select
import signal

import pytest

from hf_federated.testing.processes import WorkerProcess


# Interrupts the process that asks, and does not answer in time. A forked process also keeps the file `alive` open.
WORKER = """
import json, os, signal, time
request = json.loads(input())
if request["interrupts"]:
    alive = open("alive", "w")
    os.fork()
    os.kill(request["pid"], signal.SIGUSR1)
    time.sleep(30)
print(json.dumps(request))
"""


def test_interruption_ends_all_processes_and_loses_no_answer(tmp_path, monkeypatch):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    os.mkfifo("alive")
    alive = os.open("alive", os.O_RDONLY | os.O_NONBLOCK)
    worker = WorkerProcess(["-c", WORKER])
    request = {"directory": str(tmp_path), "pid": os.getpid(), "interrupts": True}
    previous = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.ask(request)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert select.select([alive], [], [], 10)[0] and os.read(alive, 1) == b""  # no process has the file open
    os.close(alive)
    request["interrupts"] = False
    assert worker.ask(request) == request
    worker.stop()
