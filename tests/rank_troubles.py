"""Failures, deviations of one process and control decisions for runs of `rank_worker.py`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from hf_federated import FederatedCallback, FederatedDataset, FedOpt
from hf_federated.testing.scenario import SIZES


def is_last_process() -> bool:
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def differ(setting: str, federation: dict[str, Any], args: dict[str, Any], trainer_kwargs: dict[str, Any]) -> None:
    """Change one setting of the last process so that it differs from the other processes."""
    clients = trainer_kwargs["train_dataset"]
    if setting == "seed":
        args["seed"] = 7
    elif setting == "learning rate":
        args["learning_rate"] = 0.5
    elif setting == "parallelism":
        federation["parallelism"] = "data"
    elif setting == "aggregation":
        federation |= {"aggregation": FedOpt(server_lr=0.5), "aggregation_kwargs": None}
    elif setting == "names":
        trainer_kwargs["train_dataset"] = FederatedDataset.from_dict({f"my {name}": clients[name] for name in clients})
    elif setting == "rows":
        reversed_clients = {name: clients[name].select(range(len(clients[name]) - 1, -1, -1)) for name in clients}
        trainer_kwargs["train_dataset"] = FederatedDataset.from_dict(reversed_clients)
    elif setting == "fingerprints":
        for number, name in enumerate(clients):
            clients[name]._fingerprint = f"made up {number}"
    elif setting == "clients per round":
        federation["clients_per_round"] = 99
    elif setting == "constructor":
        trainer_kwargs["no_such_argument"] = True
    elif setting == "place":
        args |= {"logging_first_step": True, "hub_token": "hf_of_this_process", "run_name": "of this process"}
    else:
        raise ValueError(f"Processes cannot differ in {setting!r}.")


class Trouble(FederatedCallback):
    """Fail in one process, in the second round or at the end of training."""

    def __init__(self, kind: str, rank: int) -> None:
        self.kind = kind
        self.rank = rank

    def on_client_end(self, args, state, control, round=None, **kwargs):
        if round.number == 1 and dist.get_rank() != self.rank:
            time.sleep(1)  # This process is busy and not in a collective operation when the failure happens.
        elif round.number == 1:
            if self.kind == "callback":
                raise ValueError("the callback gave up")
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, args, state, control, **kwargs):
        if self.kind == "end" and dist.get_rank() == self.rank:
            raise ValueError("the callback gave up at the end")


class SlowMain(TrainerCallback):
    """Create a leftover `.incomplete` folder in the main process and delay the main process at the end."""

    def on_train_begin(self, args, state, control, **kwargs):
        if dist.get_rank() == 0:
            os.makedirs(os.path.join(args.output_dir, ".incomplete"), exist_ok=True)

    def on_train_end(self, args, state, control, **kwargs):
        if dist.get_rank() == 0:
            time.sleep(2)


class TroubleInClient(TrainerCallback):
    """Fail when a client trains for the second time: client 3, or clients with other numbers of examples."""

    def __init__(self, sizes: Sequence[int] = SIZES[3:4]) -> None:
        self.num_trainings = dict.fromkeys(sizes, 0)

    def on_step_end(self, args, state, control, train_dataloader=None, **kwargs):
        size = len(train_dataloader.dataset)
        if state.global_step == 1 and size in self.num_trainings:
            self.num_trainings[size] += 1
            if self.num_trainings[size] == 2:
                raise ValueError("these rows are bad")


class ClientStops(FederatedCallback):
    """Stop the run at the update of client 3, which only one process sees."""

    def on_client_end(self, args, state, control, update=None, **kwargs):
        if update.client_id == "client 3":
            control.should_training_stop = True


class ClientSaves(FederatedCallback):
    """Request a checkpoint at the update of client 3 in the first round."""

    def on_client_end(self, args, state, control, update=None, round=None, **kwargs):
        if update.client_id == "client 3" and round.number == 0:
            control.should_save = True
            return control


class OneProcessStops(TrainerCallback):
    """Stop in one process only, after two rounds. One process can also reach a time limit before the others."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and is_last_process():
            control.should_training_stop = True


class OneProcessSaves(TrainerCallback):
    """Request a checkpoint in one process only, after two rounds."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and is_last_process():
            control.should_save = True


class OneProcessEvaluates(TrainerCallback):
    """Request an evaluation in one process only, after two rounds."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate = state.global_step == 2 and is_last_process()


DECISIONS = {
    "slow main": SlowMain,
    "client stops": ClientStops,
    "client saves": ClientSaves,
    "one process stops": OneProcessStops,
    "one process saves": OneProcessSaves,
    "one process evaluates": OneProcessEvaluates,
}
