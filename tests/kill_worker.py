"""Train in a forked process that can kill itself, for `test_resume.py`.

Importing torch and transformers takes seconds, so one process imports them once and forks for each run. The process
reads one request per line from its standard input, `{"directory", "scenario", "moment", "resume"}`. It answers each
request with one line that holds the exit code of the run: 0, or -9 if the run killed itself.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from float16 import Float16Trainer
from peft import LoraConfig, PeftModel, PromptEncoderConfig, get_peft_model
from tiny import arguments, rows, tiny_model
from torch import nn
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState

import hf_federated.trainer.mixin
import hf_federated.trainer.saving
from hf_federated import (
    Aggregation,
    FedAUX,
    FedDRS,
    FederatedConfig,
    FederatedTrainer,
    FedOpt,
    LocalOnly,
    Scaffold,
    federate,
)
from hf_federated.clients import Student
from hf_federated.distillation import pseudo_sampler
from hf_federated.testing.processes import prepare_forks
from hf_federated.trainer.federation import Federation


NUM_ROUNDS = 3
RUN_DIR = "run"
FINAL_DIR = "final"
LOG_FILE = "log_history.json"


def kill() -> None:
    """Kill this process without cleanup or `finally` blocks, as a power failure does."""
    os.kill(os.getpid(), signal.SIGKILL)


# ---- Scenarios


def with_adapter(config: Any) -> PeftModel:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return get_peft_model(tiny_model(), config)


def client_model(client_id: str) -> nn.Module:
    """A client's own model, with one or two layers."""
    number = int(client_id.split()[1])
    return tiny_model(seed=number, num_hidden_layers=1 + number % 2, problem_type="single_label_classification")


def scenario(name: str) -> tuple[nn.Module, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The model, the fields of `FederatedConfig`, the training arguments and the other arguments of the trainer."""
    clients = {f"client {i}": rows(6 + 2 * i, seed=i) for i in range(4)}
    # Without `problem_type`, the first forward pass writes it into the config. A run that resumes after its last round
    # has no forward pass, so its config would differ.
    model: nn.Module = tiny_model(problem_type="single_label_classification")
    federation: dict[str, Any] = {"clients_per_round": 2, "client_optimizer_state": "carry"}
    args: dict[str, Any] = {"lr_scheduler_type": "cosine"}
    trainer_kwargs: dict[str, Any] = {"train_dataset": clients}
    if name == "fedopt":
        federation["aggregation"] = FedOpt("momentum", server_lr=0.5, server_lr_scheduler="cosine")
    elif name == "scaffold_disk":
        federation |= {"aggregation": Scaffold(), "client_store": "disk"}
    elif name == "one_client":
        federation["clients_per_round"] = 1.0
        trainer_kwargs = {"train_dataset": rows(12), "eval_dataset": rows(6, seed=9)}
        args |= {"eval_strategy": "steps", "train_sampling_strategy": "group_by_length"}
    elif name == "balanced":
        # The clients have 6 to 12 examples, and a round draws at most 7 of them. The carried optimizer state therefore
        # continues on other examples in each round.
        federation |= {"balance": "min", "max_rows_per_round": 7}
    elif name == "fp16":
        # The loss scale changes in most steps, and with this optimizer the schedule does not advance when it falls.
        args |= {"fp16": True, "optim": "adamw_torch"}
    elif name == "streams":
        federation["local_steps"] = 2
        streams = {client_id: data.to_iterable_dataset(num_shards=2) for client_id, data in clients.items()}
        streams["client 1"] = streams["client 1"].shuffle(seed=0, buffer_size=3)
        trainer_kwargs = {"train_dataset": streams}
    elif name == "lora":
        model = with_adapter(LoraConfig(task_type="SEQ_CLS", r=2, lora_dropout=0.1, target_modules=["query", "value"]))
    elif name == "local_head":
        # One client trains for the first time in each round.
        model = with_adapter(LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))
        federation |= {"keep_local": "head", "client_store": "disk"}
    elif name == "p_tuning":
        model = with_adapter(PromptEncoderConfig(task_type="SEQ_CLS", num_virtual_tokens=3, encoder_hidden_size=8))
    elif name in ("fedid", "adafd"):
        # One client participates for the first time in each round.
        federation |= {"distillation": name, "client_optimizer_state": "reset"}
        trainer_kwargs |= {"public_dataset": rows(10, seed=20), "client_model_init": client_model}
        if name == "fedid":
            federation |= {"client_store": "disk", "max_resident_clients": 1, "client_optimizer_state": "carry"}
            trainer_kwargs["server_dataset"] = rows(6, seed=21)
    elif name == "fedaux":
        # One client computes its scores in each round, with the model from before the first round.
        federation["distillation"] = FedAUX(dp_epsilon=0.5, dp_delta=1e-5)
        trainer_kwargs["public_dataset"] = rows(10, seed=20)
    elif name == "feddrs":
        # The last round needs earlier updates of clients outside its cohort.
        federation["distillation"] = FedDRS(num_samples=3, sample_length=4, num_steps=3, server_lr=1e-3)
    elif name == "best":
        # The learning rate is so large that some round is worse than an earlier round.
        args |= {"eval_strategy": "steps", "load_best_model_at_end": True, "save_total_limit": 1}
        args |= {"metric_for_best_model": "loss", "learning_rate": 0.1}
        args["restore_callback_states_from_checkpoint"] = True
        trainer_kwargs["eval_dataset"] = rows(8, seed=9)
        trainer_kwargs["callbacks"] = [EarlyStoppingCallback(early_stopping_patience=5)]
    else:
        raise ValueError(f"There is no scenario {name!r}.")
    return model, federation, args, trainer_kwargs


def train(name: str, resume: str | bool, client_callbacks: list[TrainerCallback]) -> None:
    """Run a scenario in the current directory and write its checkpoints, its log and its final model."""
    model, federation, args, trainer_kwargs = scenario(name)
    trainer_class = federate(Float16Trainer) if args.get("fp16") else FederatedTrainer
    trainer = trainer_class(
        model=model,
        args=arguments(RUN_DIR, save_strategy="steps", **args),
        federation=FederatedConfig(num_rounds=NUM_ROUNDS, **federation),
        client_callbacks=client_callbacks,
        **trainer_kwargs,
    )
    trainer.train(resume_from_checkpoint=resume)
    torch.save(trainer.model.state_dict(), f"{FINAL_DIR}.pt")
    trainer.save_model(FINAL_DIR)
    with open(LOG_FILE, "w", encoding="utf-8") as file:
        json.dump(trainer.state.log_history, file)


# ---- Kill moments


class KilledInClient(TrainerCallback):
    """Kill the process after a number of optimizer steps of clients."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_steps -= 1
        if self.num_steps == 0:
            kill()


def kill_around(owner: Any, name: str, should_kill: Callable[..., bool], before: bool) -> None:
    """Replace a function of the library with one that kills the process before or after the original call."""
    original = getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if not should_kill(*args, **kwargs):
            return original(*args, **kwargs)
        if not before:
            original(*args, **kwargs)
        kill()

    setattr(owner, name, replacement)


def nth_call(number: int) -> Callable[..., bool]:
    calls = iter(range(1, 10**6))
    return lambda *args, **kwargs: next(calls) == number


def half_delete_old_checkpoint(path: Any, **kwargs: Any) -> bool:
    """Delete one file if `path` is an old checkpoint, and return whether it is."""
    if not os.path.basename(path).startswith("old-checkpoint") or not os.path.isdir(path):
        return False
    os.remove(os.path.join(path, "trainer_state.json"))
    return True


def prepare_kill(moment: str | None) -> list[TrainerCallback]:
    """Prepare the kill at a moment. Returns callbacks to run inside clients."""
    library = hf_federated.trainer.mixin
    if moment is None:
        pass
    elif moment.startswith("file event "):
        kill_at_file_event(int(moment.rpartition(" ")[2]))
    elif moment == "first round":
        return [KilledInClient(3)]
    elif moment == "client":
        # A round has two clients with 2 to 3 steps or one client with 3 steps, so step 6 lies in the second round.
        return [KilledInClient(6)]
    elif moment == "aggregation":
        for algorithm in (Aggregation, FedOpt, LocalOnly, Scaffold):
            kill_around(algorithm, "aggregate", nth_call(2), before=False)
    elif moment == "exchange":
        # The server and two clients take three steps each per round, so step 13 lies in the second round.
        kill_around(Student, "step", nth_call(13), before=False)
    elif moment == "samples":
        # The samples of two clients, of two kinds, take three steps per round, so call 20 lies in the second round.
        kill_around(pseudo_sampler, "adversarial_loss", nth_call(20), before=False)
    elif moment == "last samples":
        # The samples of all clients move again after the last round.
        kill_around(pseudo_sampler, "adversarial_loss", nth_call(NUM_ROUNDS * 12 + 8), before=False)
    elif moment == "evaluation":
        kill_around(FederatedTrainer, "evaluate", nth_call(2), before=True)
    elif moment == "after model file":
        kill_around(library.FederatedMixin, "save_model", nth_call(2), before=False)
    elif moment == "before trainer_state.json":
        kill_around(TrainerState, "save_to_json", nth_call(3), before=True)
    elif moment == "before client states":
        kill_around(Federation, "save", nth_call(2), before=True)
    elif moment == "before rename":
        kill_around(hf_federated.trainer.saving, "publish", nth_call(2), before=True)
    elif moment == "after rename":
        kill_around(hf_federated.trainer.saving, "publish", nth_call(2), before=False)
    elif moment == "rotation":
        kill_around(shutil, "rmtree", half_delete_old_checkpoint, before=True)
    elif moment == "after last round":
        kill_around(hf_federated.trainer.saving, "publish", nth_call(NUM_ROUNDS), before=False)
    else:
        raise ValueError(f"There is no moment {moment!r}.")
    return []


# Audit events of Python that can change the file system.
FILE_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "shutil.copyfile"}


def kill_at_file_event(number: int) -> None:
    """Kill the process just before the run touches a file below its output directory for the `number`-th time."""
    root = os.path.abspath(RUN_DIR)
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in FILE_EVENTS or not isinstance(args[0], (str, os.PathLike)):
            return
        if event == "open" and isinstance(args[1], str) and args[1].startswith("r"):
            return
        # Deletions relative to a directory descriptor report the bare file name.
        path = os.fspath(args[0])
        if os.path.abspath(path).startswith(root) or event in ("os.remove", "os.rmdir"):
            count += 1
            if count == number:
                kill()

    sys.addaudithook(hook)


def serve() -> None:
    """Answer requests until the input ends."""
    prepare_forks()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.dup2(2, 1)
                os.chdir(request["directory"])
                train(request["scenario"], request["resume"], prepare_kill(request["moment"]))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


if __name__ == "__main__":
    serve()
