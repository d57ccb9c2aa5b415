"""Worker that runs a federation over a network: one process for the server and one for each client.

The worker imports the libraries once and forks for every party, like `rank_worker.py`, whose scenarios it uses. It
reads one request per line from its standard input:
`{"directory", "scenario", "num_parties", "resume", "kill", "absent", "late", "twin", "faults", "differ", "slow",
"buffer_size", "memory", "sharded"}`.
Process 0 is the server, process i is the i-th client. It answers with one line that contains the exit code of every
process, and the seconds until the last process ended.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import secure_memory
from network_faults import run_proxy
from rank_worker import GRPO_CLIENTS, grpo_trainer, scenario, sft_trainer, write_notes
from sharded import sharded_arguments
from tiny import arguments
from transformers import TrainerCallback

from hf_federated import FederatedCallback, FederatedConfig, FederatedDataset, FederatedTrainer
from hf_federated.clients.state_history import StateHistory
from hf_federated.engines import NetworkEngine
from hf_federated.server.collectors import BufferedCollector
from hf_federated.testing.processes import fork, free_address, serve, wait
from hf_federated.testing.runs import RUN_DIR, RoundRecorder
from hf_federated.testing.scenario import NUM_ROUNDS
from hf_federated.trainer.join import STATES_DIR


TIMEOUT = 150
# File in the directory of the run.
TWIN_ENDED = "twin-ended"
# Seconds that a client that was killed may run on when all other parties have ended.
OVERTIME = 2.0
HEARTBEAT_TIMEOUT = 4.0
REJOIN_TIMEOUT = 30.0


class KillInRound(FederatedCallback):
    """Kills this process in a round, before the first training step of the client or after its reply was accepted."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_client_end(self, args, state, control, round=None, **kwargs):
        if round.number == self.round:
            os.kill(os.getpid(), signal.SIGKILL)

    # Under secure aggregation, the server has no update of a single client.
    on_aggregate = on_client_end


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


class DelayInRound(TrainerCallback):
    """Delays one local training of a client, so that the reply comes after the deadline of the round."""

    def __init__(self, training: int, seconds: float) -> None:
        self.training, self.seconds = training, seconds
        self.trainings = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainings += 1
        if self.trainings == self.training + 1:
            time.sleep(self.seconds)


class AwaitCondition(FederatedCallback):
    """Delays a round of the server until a condition holds."""

    def __init__(self, round: int, condition: Callable[[], bool]) -> None:
        self.round, self.condition = round, condition

    def on_round_begin(self, args, state, control, round=None, **kwargs):
        deadline = time.monotonic() + 60
        while round.number == self.round and not self.condition():
            assert time.monotonic() < deadline, "the condition does not hold"
            time.sleep(0.01)


def train(number: int, request: dict[str, Any]) -> None:
    """Run one party in the current directory, and write the model and the notes of the server."""
    name, address, kill = request["scenario"], request["address"], request.get("kill") or {}
    if "memory" in request:
        watch_memory(number, request["memory"])
    if name in ("sft", "grpo"):
        train_trl(name, number, address)
        return
    model, federation, args, trainer_args = scenario(name)
    federation.pop("parallelism", None)
    federation |= request.get("federation", {})
    if "buffer_size" in request:
        federation["collector"] = BufferedCollector(request["buffer_size"])
    clients = trainer_args.pop("train_dataset")
    clients = clients.select_clients(list(clients)[: request["num_parties"] - 1])
    eval_clients = trainer_args.get("eval_dataset")
    if number and number == request.get("differ"):
        args["learning_rate"] = 0.5
    folder = RUN_DIR if number == 0 else f"client-{number}"
    if request.get("is_twin"):
        folder += "-twin"
    # The server has one process and the whole model.
    build_arguments = sharded_arguments if request.get("sharded") and number else arguments
    training_arguments = build_arguments(folder, save_strategy="steps", **args)
    recorder = RoundRecorder()
    is_killed = kill.get("party") == number and "round" in kill
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
            num_to_start=max(len(clients) - len(request.get("absent", [])) - ("late" in request), 1),
            join_timeout=60,
            rejoin_timeout=request.get("rejoin_timeout", REJOIN_TIMEOUT),
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
        )
        if late := request.get("late"):
            client_id = list(clients)[late["party"] - 1]
            callbacks.append(AwaitCondition(late["round"], lambda: engine.transport.is_connected(client_id)))
        if "twin" in request:
            callbacks.append(AwaitCondition(1, Path(TWIN_ENDED).exists))
        trainer = FederatedTrainer(engine=engine, **common)
        trainer.train(resume_from_checkpoint=request.get("resume", False))
        write_notes(0, trainer, recorder)
        return
    client_id = list(clients)[number - 1]
    # Clients do not have the examples of the server.
    common.pop("server_dataset", None)
    common["clients"] = {name: spec for name, spec in common.get("clients", {}).items() if name == client_id}
    if isinstance(eval_clients, FederatedDataset):
        common["eval_dataset"] = eval_clients.select_clients([client_id])
    if is_killed and kill.get("before_reply"):
        kill_before_reply(kill["round"])
    client_callbacks: list[TrainerCallback] = []
    if is_killed and not kill.get("before_reply"):
        client_callbacks.append(KillInStep(kill["round"]))
    if (slow := request.get("slow")) and slow["party"] == number:
        client_callbacks.append(DelayInRound(slow["round"], slow["seconds"]))
    trainer = FederatedTrainer(
        train_dataset={client_id: clients[client_id]}, client_callbacks=client_callbacks, **common
    )
    trainer.join(
        request.get("proxy", address),
        client_id=client_id,
        insecure=True,
        connect_timeout=request.get("connect_timeout", 60),
        reconnect_timeout=request.get("reconnect_timeout", 20),
    )


def watch_memory(number: int, lost: int) -> None:
    """Write the secrets of secure aggregation of a client, or search them in the memory of the server."""
    if number == 0:
        secure_memory.search_when_the_masks_are_removed()
    else:
        secure_memory.record_secrets(number, number == lost)


def train_trl(name: str, number: int, address: str) -> None:
    """Run one party of `SFTTrainer` or `GRPOTrainer`. Their constructors need a dataset, which the server lacks."""
    build, clients = (sft_trainer, ["north", "south"]) if name == "sft" else (grpo_trainer, [*GRPO_CLIENTS])
    if number:
        client_id = clients[number - 1]
        trainer = build([], f"client-{number}", [client_id])
        trainer.join(address, client_id=client_id, insecure=True, connect_timeout=60)
        return
    recorder = RoundRecorder()
    engine = NetworkEngine(clients, address=address, insecure=True, join_timeout=60)
    trainer = build([recorder], clients=[], engine=engine)
    trainer.train()
    write_notes(0, trainer, recorder)


def start_party(number: int, request: dict[str, Any], environment: dict[str, str] | None = None) -> int:
    """Start the process of a party, and return its id."""
    return fork(lambda: train(number, request), request["directory"], f"rank-{number}.log", environment)


def has_checkpoint(request: dict[str, Any], step: str = "*") -> bool:
    return any(Path(request["directory"], RUN_DIR).glob(f"checkpoint-{step}"))


def wait_for_all(children: dict[int, int], killed: int | None, deadline: float) -> dict[int, int]:
    """Wait for the exit codes of all parties. A killed client that returns after the end of the run is stopped."""
    codes = {number: wait(child, deadline) for number, child in children.items() if number != killed}
    if killed in children:
        overtime = time.monotonic() + OVERTIME if killed else deadline
        codes[killed] = wait(children[killed], min(overtime, deadline))
    return codes


def start_again(killed: int, child: int, request: dict[str, Any], deadline: float) -> tuple[int, int | None]:
    """Wait until a party is killed, and start it again. Return its exit code and the id of its second process."""
    kill = request["kill"]
    if "after" in kill:
        code = wait(child, time.monotonic() + kill["after"])
    else:
        code = wait(child, deadline)
    if code != -signal.SIGKILL or kill.get("stays_away"):
        return code, None
    resume = killed == 0 and has_checkpoint(request) and (kill.get("resume_from") or True)
    return code, start_party(killed, {**request, "kill": None, "resume": resume})


def run_second_process(number: int, request: dict[str, Any], deadline: float) -> int:
    """Start a second process of a client when the first has replied, and wait until it ends. The server waits too."""
    while not Path(request["directory"], f"client-{number}", STATES_DIR).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    code = wait(start_party(number, {**request, "is_twin": True, "connect_timeout": 1}), deadline)
    Path(request["directory"], TWIN_ENDED).touch()
    return code


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run all parties of a federation."""
    started = time.monotonic()
    deadline = started + TIMEOUT
    late, faults = request.get("late", {}), request.get("faults")
    away = {*request.get("absent", []), late.get("party")}
    parties = [number for number in range(request["num_parties"]) if number not in away]
    if faults:
        request["proxy"] = free_address()
        run_faults = functools.partial(run_proxy, faults, request["proxy"], request["address"], request["directory"])
        proxy = fork(run_faults, request["directory"], "proxy.log")
    children = {number: start_party(number, request) for number in parties}
    if late:
        while not has_checkpoint(request, late["round"]) and time.monotonic() < deadline:
            time.sleep(0.01)
        children[late["party"]] = start_party(late["party"], request)
    answer: dict[str, Any] = {}
    if "twin" in request:
        answer["twin"] = run_second_process(request["twin"], request, deadline)
    killed = (request.get("kill") or {}).get("party")
    codes: dict[int, int] = {}
    if killed in children:
        codes[killed], second = start_again(killed, children.pop(killed), request, deadline)
        answer["is_killed"] = codes[killed] == -signal.SIGKILL
        if second is not None:
            children[killed] = second
    codes |= wait_for_all(children, killed, deadline)
    if faults:
        os.kill(proxy, signal.SIGKILL)
        os.waitpid(proxy, 0)
    return {"codes": [codes[number] for number in sorted(codes)], "seconds": time.monotonic() - started, **answer}


if __name__ == "__main__":
    serve(lambda request: run({**request, "address": free_address()}))
