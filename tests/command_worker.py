"""Worker that runs commands of `hf-federated`, each in its own process.

The worker imports the libraries once and forks for every command. It reads one request per line from its standard
input: `{"directory", "commands", "signal", "streams"}`.

- `commands` maps the name of a party to the arguments of its command.
- The output of a party is written to `<party>.log`. With `streams`, its standard error is written to `<party>.err`.
- `signal` sends a signal to a party when a file exists: `{"party", "file", "number", "again"}`. With `again`, the
  party is then started with these arguments.

The worker answers with the exit codes by party.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from hf_federated.cli.main import main
from hf_federated.experiments import train_recipe
from hf_federated.experiments.network import commands
from hf_federated.testing.processes import prepare_forks, wait


assert commands and train_recipe  # imported before the fork, because the import takes seconds
TIMEOUT = 150


def fork(party: str, arguments: list[str], streams: bool = False) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            log = os.open(f"{party}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(os.open(f"{party}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND) if streams else log, 2)
            code = main(arguments)
            atexit._run_exitfuncs()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return child


def run(request: dict[str, Any]) -> dict[str, int]:
    os.chdir(request["directory"])
    deadline = time.monotonic() + TIMEOUT
    streams = request.get("streams", False)
    children = {party: fork(party, arguments, streams) for party, arguments in request["commands"].items()}
    codes: dict[str, int] = {}
    if disturbance := request.get("signal"):
        party, file = disturbance["party"], Path(disturbance["file"])
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(children[party], disturbance["number"])
        if "again" in disturbance:
            wait(children[party], deadline)
            children[party] = fork(party, disturbance["again"])
    return codes | {party: wait(child, deadline) for party, child in children.items()}


if __name__ == "__main__":
    prepare_forks()
    # A terminal sends Ctrl-C to this process too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
