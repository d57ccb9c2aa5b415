"""Worker that runs a federation over a network: one process for the server and one for each client.

The worker imports the libraries once and forks for every party, like `rank_worker.py`, whose scenarios it uses. It
reads one request per line from its standard input:
`{"directory", "scenario", "resume", "kill", "absent", "differ"}`. Process 0 is the server, process i is the i-th
client. It answers with one line that contains the exit code of every process, and the seconds until the last process
ended.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

import torch
from rank_worker import NUM_ROUNDS, RUN_DIR, RoundRecorder, scenario, wait, write_notes
from tiny import arguments
from transformers import TrainerCallback

from hf_federated import FederatedCallback, FederatedConfig, FederatedDataset, FederatedTrainer
from hf_federated.clients.state_history import StateHistory
from hf_federated.engines import NetworkEngine


TIMEOUT = 150
HEARTBEAT_TIMEOUT = 4.0
REJOIN_TIMEOUT = 30.0


class KillInRound(FederatedCallback):
    """Kills this process in a round, before the first training step of the client or after its reply was accepted."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_client_end(self, args, state, control, server=None, **kwargs):
        if server.round == self.round:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_before_reply(number: int) -> None:
    """Kill this client when its reply with the given number is on disk and not yet sent."""
    record, replies = StateHistory.record, []

    def record_and_kill(self: StateHistory, name: str, reply: bytes) -> None:
        record(self, name, reply)
        replies.append(name)
        if len(replies) == number + 1:
            os.kill(os.getpid(), signal.SIGKILL)

    StateHistory.record = record_and_kill


class KillInStep(TrainerCallback):
    """Kills a client in the given local training, in its last step."""

    def __init__(self, training: int) -> None:
        self.training = training
        self.trainings = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainings += 1

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainings == self.training + 1 and state.global_step == state.max_steps:
            os.kill(os.getpid(), signal.SIGKILL)


def train(number: int, request: dict[str, Any]) -> None:
    """Run one party in the current directory, and write the model and the notes of the server."""
    name, address, kill = request["scenario"], request["address"], request.get("kill") or {}
    model, federation, args, trainer_args = scenario(name)
    federation.pop("parallelism", None)
    federation |= request.get("federation", {})
    clients = trainer_args.pop("train_dataset")
    eval_clients = trainer_args.get("eval_dataset")
    if number and number == request.get("differ"):
        args["learning_rate"] = 0.5
    training_arguments = arguments(RUN_DIR if number == 0 else f"client-{number}", save_strategy="steps", **args)
    recorder = RoundRecorder()
    is_killed = kill.get("party") == number
    callbacks: list[TrainerCallback] = [recorder] if number == 0 else []
    if is_killed and number == 0:
        callbacks.append(KillInRound(kill["round"]))
    config = FederatedConfig(**{"num_rounds": NUM_ROUNDS, **federation})
    common = {"model": model, "args": training_arguments, "federation": config, "callbacks": callbacks, **trainer_args}
    if number == 0:
        if isinstance(eval_clients, FederatedDataset):
            common["eval_dataset"] = eval_clients.pooled_examples()
        engine = NetworkEngine(
            list(clients),
            address=address,
            insecure=True,
            num_to_start=len(clients) - len(request.get("absent", [])),
            join_timeout=60,
            rejoin_timeout=request.get("rejoin_timeout", REJOIN_TIMEOUT),
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
        )
        trainer = FederatedTrainer(engine=engine, **common)
        trainer.train(resume_from_checkpoint=request.get("resume", False))
        write_notes(0, trainer, recorder)
        return
    client_id = list(clients)[number - 1]
    # Clients do not have the examples of the server.
    common.pop("server_dataset", None)
    if isinstance(eval_clients, FederatedDataset):
        common["eval_dataset"] = eval_clients.select_clients([client_id])
    if is_killed and kill.get("before_reply"):
        kill_before_reply(kill["round"])
    kills_in_step = is_killed and not kill.get("before_reply")
    trainer = FederatedTrainer(
        train_dataset={client_id: clients[client_id]},
        client_callbacks=[KillInStep(kill["round"])] if kills_in_step else [],
        **common,
    )
    trainer.join(address, client_id=client_id, insecure=True, connect_timeout=60, reconnect_timeout=20)


def run_party(number: int, request: dict[str, Any]) -> int:
    os.chdir(request["directory"])
    log = os.open(f"rank-{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        train(number, request)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def fork(number: int, request: dict[str, Any]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = run_party(number, request)
            atexit._run_exitfuncs()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return child


def serve() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            request["address"] = f"127.0.0.1:{free.getsockname()[1]}"
        started = time.monotonic()
        deadline = started + TIMEOUT
        parties = [number for number in range(request["num_parties"]) if number not in request.get("absent", [])]
        children = {number: fork(number, request) for number in parties}
        killed = (request.get("kill") or {}).get("party")
        codes: dict[int, int] = {}
        if killed in children:
            codes[killed] = wait(children[killed], deadline)
            if not request["kill"].get("stays_away"):
                children[killed] = fork(killed, {**request, "kill": None, "resume": killed == 0})
                codes = {}
        codes |= {number: wait(child, deadline) for number, child in children.items() if number not in codes}
        answer = {"codes": [codes[number] for number in parties], "seconds": time.monotonic() - started}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
