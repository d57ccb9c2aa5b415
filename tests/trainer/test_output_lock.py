"""A second process that trains in the same output directory is refused, and a killed process leaves no lock."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from federations import build_federation
from split_runs import clients_of, split_trainer

from hf_federated import SplitConfig
from hf_federated.reporting.run_log import CLIENTS_NAME, LOG_NAME
from hf_federated.trainer.output_lock import LOCK_FILE, OutputDirInUseError, output_dir_lock
from hf_federated.utils.file_lock import FileLock, FileLockedError


HOLDER = """
    import os, sys, time
    from pathlib import Path
    from hf_federated.utils.file_lock import FileLock

    lock = FileLock(Path(sys.argv[1]))
    lock.acquire()
    # A worker of a data loader is a forked process, which outlives its killed parent for seconds.
    if os.fork() == 0:
        os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, with a forked child, that holds the lock of `tmp_path`."""
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path / LOCK_FILE)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    yield process
    process.kill()
    process.wait()
    os.kill(child, signal.SIGKILL)


def test_second_process_is_refused_until_the_first_is_killed(holder, tmp_path):
    trainer = build_federation(tmp_path, save_strategy="steps")
    words = f"output directory '{tmp_path}': process {holder.pid} on {socket.gethostname()}"
    with pytest.raises(OutputDirInUseError, match=words):
        trainer.train()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    trainer.train()
    assert trainer.state.global_step == 2
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-1", "checkpoint-2", LOG_NAME, CLIENTS_NAME}


def test_split_training_is_refused_too(holder, tmp_path):
    with pytest.raises(OutputDirInUseError, match=f"process {holder.pid} on"):
        split_trainer(tmp_path, clients_of(2, 2), SplitConfig(strategy="client_batch"), max_steps=1).train()


def test_process_may_hold_the_lock_of_a_directory_twice(tmp_path):
    with output_dir_lock(tmp_path), output_dir_lock(tmp_path / "." / ".." / tmp_path.name):
        with pytest.raises(FileLockedError, match=f"process {os.getpid()} on "):
            FileLock(tmp_path / LOCK_FILE).acquire()
    assert not (tmp_path / LOCK_FILE).exists()


def test_lock_is_released_after_an_error(tmp_path):
    with pytest.raises(KeyError), output_dir_lock(tmp_path):
        raise KeyError
    FileLock(tmp_path / LOCK_FILE).acquire()


def test_lock_file_of_a_killed_process_does_not_matter(tmp_path):
    (tmp_path / LOCK_FILE).write_text("process 1 on elsewhere, with a longer text than that of this process " * 3)
    with output_dir_lock(tmp_path):
        text = (tmp_path / LOCK_FILE).read_text()
    assert text == f"process {os.getpid()} on {socket.gethostname()}"


def test_directory_without_locks_is_used_with_a_warning(tmp_path, monkeypatch):
    warnings: list[str] = []
    monkeypatch.setattr("hf_federated.trainer.output_lock.logger.warning", warnings.append)
    (tmp_path / "file").touch()
    with output_dir_lock(tmp_path / "file" / "run"):
        pass
    assert len(warnings) == 1 and "cannot be locked" in warnings[0]
