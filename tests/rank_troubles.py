"""What goes wrong, or otherwise than usual, in runs of `rank_worker.py`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from hf_federated import FederatedCallback, FederatedDataset, FedOpt


SIZES = (11, 3, 7, 20, 5)


def is_last_process() -> bool:
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def differ(what: str, federation: dict[str, Any], args: dict[str, Any], others: dict[str, Any]) -> None:
    """What the last process has otherwise than the others."""
    clients = others["train_dataset"]
    if what == "seed":
        args["seed"] = 7
    elif what == "learning rate":
        args["learning_rate"] = 0.5
    elif what == "parallelism":
        federation["parallelism"] = "data"
    elif what == "aggregation":
        federation |= {"aggregation": FedOpt(server_lr=0.5), "aggregation_kwargs": None}
    elif what == "names":
        others["train_dataset"] = FederatedDataset.from_dict({f"my {name}": clients[name] for name in clients})
    elif what == "rows":
        turned = {name: clients[name].select(range(len(clients[name]) - 1, -1, -1)) for name in clients}
        others["train_dataset"] = FederatedDataset.from_dict(turned)
    elif what == "fingerprints":
        for number, name in enumerate(clients):
            clients[name]._fingerprint = f"made up {number}"
    elif what == "clients per round":
        federation["clients_per_round"] = 99
    elif what == "constructor":
        others["no_such_argument"] = True
    elif what == "place":
        args |= {"logging_first_step": True, "hub_token": "hf_of_this_process", "run_name": "of this process"}
    else:
        raise ValueError(f"Processes cannot differ in {what!r}.")


class Trouble(FederatedCallback):
    """Something goes wrong in one process, in the second round or at the end."""

    def __init__(self, kind: str, rank: int) -> None:
        self.kind = kind
        self.rank = rank

    def on_client_end(self, args, state, control, server=None, **kwargs):
        if server.round == 1 and dist.get_rank() != self.rank:
            time.sleep(1)  # Busy, and not waiting for anyone, when it happens.
        elif server.round == 1:
            if self.kind == "callback":
                raise ValueError("the callback gave up")
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, args, state, control, **kwargs):
        if self.kind == "end" and dist.get_rank() == self.rank:
            raise ValueError("the callback gave up at the end")


class SlowMain(TrainerCallback):
    """The main process finds a leftover and takes its time at the end."""

    def on_train_begin(self, args, state, control, **kwargs):
        if dist.get_rank() == 0:
            os.makedirs(os.path.join(args.output_dir, ".incomplete"), exist_ok=True)

    def on_train_end(self, args, state, control, **kwargs):
        if dist.get_rank() == 0:
            time.sleep(2)


class TroubleInClient(TrainerCallback):
    """The rows of client 3 are to blame, in the second round."""

    def __init__(self) -> None:
        self.num_trainings = 0

    def on_step_end(self, args, state, control, train_dataloader=None, **kwargs):
        if state.global_step == 1 and len(train_dataloader.dataset) == SIZES[3]:
            self.num_trainings += 1
            if self.num_trainings == 2:
                raise ValueError("these rows are bad")


class ClientStops(FederatedCallback):
    """A client's update ends the run. It is seen in one process only."""

    def on_client_end(self, args, state, control, update=None, **kwargs):
        if update.client_id == "client 3":
            control.should_training_stop = True


class ClientSaves(FederatedCallback):
    """A client's update in the first round asks for a checkpoint."""

    def on_client_end(self, args, state, control, update=None, server=None, **kwargs):
        if update.client_id == "client 3" and server.round == 0:
            control.should_save = True
            return control


class OneProcessStops(TrainerCallback):
    """A time limit that one process passes first, after two rounds."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and is_last_process():
            control.should_training_stop = True


class OneProcessSaves(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and is_last_process():
            control.should_save = True


class OneProcessEvaluates(TrainerCallback):
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
