"""Output folders of runs as a run leaves them, for tests of readers."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from hf_federated.reporting.run_log import (
    CLIENTS_NAME,
    LOG_NAME,
    ClientEntry,
    RoundEntry,
    RunEnd,
    RunStart,
    dump_clients,
    to_line,
)
from hf_federated.utils.journal import Journal
from hf_federated.utils.run_files import LOCK_FILE
from hf_federated.utils.storage import write_private


START = 1_000_000.0
SECONDS = 40.0


def write_run(
    folder: Path,
    num_rounds: int = 3,
    num_clients: int = 4,
    total: int | None = None,
    ended: str | None = "complete",
    names: list[str] | None = None,
    logs: dict[str, float] | None = None,
    **start: Any,
) -> None:
    """
    Write the files of a run whose round `r` takes 40 seconds and has the accuracy `1 - 1 / (r + 1)`.

    Args:
        folder (`Path`): The folder.
        num_rounds (`int`): Number of finished rounds.
        num_clients (`int`): Number of clients. Each receives 1000 and sends 500 bytes a round.
        total (`int`, *optional*): Number of rounds of the run. Defaults to `num_rounds`.
        ended (`str`, *optional*): How the run ended. `None` for a run of this process that lasts.
        names (`list[str]`, *optional*): Names of the first clients.
        logs (`dict[str, float]`, *optional*): Further logged values of each round.
        start (`Any`): Further fields of `RunStart`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clients = [*(names or []), *(f"site-{number}" for number in range(num_clients - len(names or [])))]
    lines = [RunStart(START, total or num_rounds, num_clients, "FedAvg", **start)]
    for number in range(1, num_rounds + 1):
        values = {"loss": 2 / number, "eval_accuracy": 1 - 1 / (number + 1), "eval_loss": 1 / number}
        lines.append(
            RoundEntry(
                number=number,
                time=START + SECONDS * number,
                seconds=SECONDS,
                logs=values | (logs or {}),
                num_done=num_clients,
                num_failed=0,
                bytes_down=1000 * num_clients * number,
                bytes_up=500 * num_clients * number,
            )
        )
    if ended is not None:
        lines.append(RunEnd(START + SECONDS * num_rounds, ended))
    Journal(folder / LOG_NAME).replace(map(to_line, lines))
    entry = ClientEntry("done", START, None, 0.5, num_rounds, 0, 1000 * num_rounds, 500 * num_rounds)
    rows = {name: ClientEntry(**vars(entry)) for name in clients}
    write_private(folder / CLIENTS_NAME, dump_clients(num_rounds, START + 1, rows))
    if ended is None and not (folder / LOCK_FILE).exists():
        (folder / LOCK_FILE).write_text(f"process {os.getpid()} on {socket.gethostname()}")
