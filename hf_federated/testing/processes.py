"""A process that imports the libraries once and forks for each run, because the imports take seconds."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers.utils import logging

from .tiny import tiny_model


# Seconds between two looks at a process.
_INTERVAL = 0.01


class WorkerProcess:
    """
    A process that answers requests, one line of JSON each.

    Args:
        command (`Sequence[str]`, *optional*): Arguments of Python. Defaults to the worker of the conformance kit.

    Example:

    ```python
    >>> from hf_federated.testing.processes import WorkerProcess

    >>> worker = WorkerProcess(["-c", "print(input())"])
    >>> worker.ask({"directory": "run"})
    {'directory': 'run'}
    >>> worker.stop()

    ```
    """

    def __init__(self, command: Sequence[str] = ("-m", "hf_federated.testing.worker")) -> None:
        self._command = [sys.executable, *command]
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: Mapping[str, Any]) -> Any:
        """
        Send a request and return the answer. The first request starts the process.

        Args:
            request (`Mapping[str, Any]`): The request. The folder `directory` is created if necessary.

        Raises:
            RuntimeError: If the process ends instead of answering. Its error output shows the reason.
        """
        if self._process is None:
            # An empty entry is the folder of the script.
            path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            atexit.register(self.stop)
        Path(request["directory"]).mkdir(parents=True, exist_ok=True)
        stdin, stdout = self._process.stdin, self._process.stdout
        line = ""
        try:
            if stdin is not None and stdout is not None:
                stdin.write(json.dumps(request) + "\n")
                stdin.flush()
                line = stdout.readline()
        finally:
            # After a Ctrl-C, too: the next request must not get the answer to this one.
            if not line:
                self.stop()
        if not line:
            raise RuntimeError(f"The process {' '.join(self._command)} ended. Its error output shows the reason.")
        return json.loads(line)

    def stop(self) -> None:
        """End the process, and all processes that it has forked."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the process has ended
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            atexit.unregister(self.stop)
            self._process = None


def serve(answer: Callable[[dict[str, Any]], Any]) -> None:
    """
    Answer the requests of a [`WorkerProcess`] until its input ends.

    Args:
        answer (`Callable[[dict], Any]`): Returns the answer to a request, as JSON values.
    """
    prepare_forks()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


def prepare_forks() -> None:
    """
    Do once what each forked process would do again.

    The first `save_pretrained` builds a table of the names of weights. A garbage collection of the imported objects
    takes half a second, and writes to every page of memory that the processes share.
    """
    torch.set_num_threads(1)
    logging.disable_progress_bar()  # The thread of a progress bar must not exist when the process forks.
    with TemporaryDirectory() as folder:
        tiny_model().save_pretrained(folder)
    logging.enable_progress_bar()
    gc.collect()
    gc.freeze()


def fork(run: Callable[[], None], directory: str, log: str, environment: Mapping[str, str] | None = None) -> int:
    """
    Start a process that calls a function, and return its id.

    Args:
        run (`Callable[[], None]`): The function. Its exception ends the process with the code 1.
        directory (`str`): Working directory of the process.
        log (`str`): Name of the file with the output of the process. A traceback is its last entry.
        environment (`Mapping[str, str]`, *optional*): Further environment variables.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.chdir(directory)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(environment or {})
        try:
            run()
            code = 0
        except BaseException:
            traceback.print_exc()
        atexit._run_exitfuncs()
    finally:
        sys.stdout.flush()
        os._exit(code)


def fork_ranks(run: Callable[[int], None], directory: str, num_processes: int) -> list[int]:
    """
    Start the processes of a launch, with the environment of `accelerate launch`, and return their ids.

    Args:
        run (`Callable[[int], None]`): Called with the rank.
        directory (`str`): As in [`fork`]. The output of a rank is in `rank-<number>.log`.
        num_processes (`int`): Number of processes.
    """
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_address().partition(":")[2],
        "ACCELERATE_USE_CPU": "true",
    }
    common |= {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
    children = []
    for rank in range(num_processes):
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} if num_processes > 1 else {}
        children.append(fork(functools.partial(run, rank), directory, f"rank-{rank}.log", environment))
    return children


def wait(child: int, deadline: float) -> int:
    """
    Wait for the exit code of a process.

    Args:
        child (`int`): Id of the process.
        deadline (`float`): Time, as `time.monotonic()` measures it, at which the process is killed.
    """
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_INTERVAL)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def free_address() -> str:
    """Return an address of this machine with a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"
