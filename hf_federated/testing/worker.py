"""The worker process of the conformance kit, `python -m hf_federated.testing.worker`, which forks for each run."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..security.certificates import create_certificates
from .processes import fork, fork_ranks, free_address, serve, wait
from .runs import TIMEOUT, Request, run_party, run_rank
from .scenario import CLIENTS


def answer(values: Mapping[str, Any]) -> dict[str, Any]:
    """
    Run a scenario.

    Args:
        values (`Mapping[str, Any]`): The fields of a [`~hf_federated.testing.runs.Request`].

    Returns:
        `dict[str, Any]`: The exit codes of all processes of the run, as `codes`.
    """
    request = Request(**values)
    # The forked processes import the module of the method, so that each of them has new module variables.
    sys.path += [entry for entry in request.path if entry not in sys.path]
    deadline = time.monotonic() + TIMEOUT
    if request.engine == "network":
        certificates = os.path.join(request.directory, "certificates")
        create_certificates(certificates, ["127.0.0.1"], CLIENTS, rsa_bits=2048)
        run: Callable[[int], None] = functools.partial(
            run_party, request=request, address=free_address(), certificates=certificates
        )
        children = [
            fork(functools.partial(run, number), request.directory, f"rank-{number}.log")
            for number in range(1 if request.only_built else 1 + len(CLIENTS))
        ]
    else:
        children = fork_ranks(functools.partial(run_rank, request=request), request.directory, request.num_processes)
    return {"codes": [wait(child, deadline) for child in children]}


if __name__ == "__main__":
    serve(answer)
