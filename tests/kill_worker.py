"""Trains in a forked process that may kill itself, for `test_resume.py`.

Importing torch and transformers takes seconds, so one process imports them once and forks for every run. It reads a
request a line from its standard input, `{"directory", "scenario", "moment", "resume"}`, and answers with a line that
holds the exit code of the run: 0, or -9 where the run killed itself.
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
from peft import LoraConfig, PeftModel, PromptEncoderConfig, get_peft_model
from tiny import arguments, rows, tiny_model
from torch import nn
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState

import hf_federated.trainer.mixin
import hf_federated.trainer.saving
from hf_federated import Aggregation, FedAUX, FedDRS, FederatedConfig, FederatedTrainer, FedOpt, LocalOnly, Scaffold
from hf_federated.clients import Student
from hf_federated.distillation import pseudo_sampler


NUM_ROUNDS = 3
RUN_DIR = "run"
FINAL_DIR = "final"
LOG_FILE = "log_history.json"


def kill() -> None:
    """No cleaning up, no `finally`: as a machine that goes off."""
    os.kill(os.getpid(), signal.SIGKILL)


# ---- What is trained


def adapted(config: Any) -> PeftModel:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return get_peft_model(tiny_model(), config)


def client_model(client_id: str) -> nn.Module:
    """A model of the client's own, of one or two layers."""
    number = int(client_id.split()[1])
    return tiny_model(seed=number, num_hidden_layers=1 + number % 2, problem_type="single_label_classification")


def scenario(name: str) -> tuple[nn.Module, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The model, the fields of the federation, the training arguments and what else the trainer gets."""
    clients = {f"client {i}": rows(6 + 2 * i, seed=i) for i in range(4)}
    # The model would note it in its config on the first forward pass, of which a run resumed at its end has none.
    model: nn.Module = tiny_model(problem_type="single_label_classification")
    federation: dict[str, Any] = {"clients_per_round": 2, "client_optimizer_state": "carry"}
    args: dict[str, Any] = {"lr_scheduler_type": "cosine"}
    others: dict[str, Any] = {"train_dataset": clients}
    if name == "fedopt":
        federation["aggregation"] = FedOpt("momentum", server_lr=0.5, server_lr_scheduler="cosine")
    elif name == "scaffold_disk":
        federation |= {"aggregation": Scaffold(), "client_store": "disk"}
    elif name == "one_client":
        federation["clients_per_round"] = 1.0
        others = {"train_dataset": rows(12), "eval_dataset": rows(6, seed=9)}
        args |= {"eval_strategy": "steps", "train_sampling_strategy": "group_by_length"}
    elif name == "balanced":
        # Of 6 to 12 rows at most 7 are drawn, and what is carried on goes with other rows in each round.
        federation |= {"balance": "min", "max_rows_per_round": 7}
    elif name == "lora":
        model = adapted(LoraConfig(task_type="SEQ_CLS", r=2, lora_dropout=0.1, target_modules=["query", "value"]))
    elif name == "p_tuning":
        model = adapted(PromptEncoderConfig(task_type="SEQ_CLS", num_virtual_tokens=3, encoder_hidden_size=8))
    elif name in ("fedid", "adafd"):
        # In each round one client is asked for the first time.
        federation |= {"distillation": name, "client_optimizer_state": "reset"}
        others |= {"public_dataset": rows(10, seed=20), "client_model_init": client_model}
        if name == "fedid":
            federation |= {"client_store": "disk", "max_resident_clients": 1, "client_optimizer_state": "carry"}
            others["server_dataset"] = rows(6, seed=21)
    elif name == "fedaux":
        # In each round one client finds its scores, by the model as it was before the first.
        federation["distillation"] = FedAUX(dp_epsilon=0.5, dp_delta=1e-5)
        others["public_dataset"] = rows(10, seed=20)
    elif name == "feddrs":
        # Its last round needs what clients sent that it does not ask.
        federation["distillation"] = FedDRS(num_samples=3, sample_length=4, num_steps=3, server_lr=1e-3)
    elif name == "best":
        # So large a rate that some round is worse than one before it.
        args |= {"eval_strategy": "steps", "load_best_model_at_end": True, "save_total_limit": 1}
        args |= {"metric_for_best_model": "loss", "learning_rate": 0.1}
        args["restore_callback_states_from_checkpoint"] = True
        others |= {"eval_dataset": rows(8, seed=9), "callbacks": [EarlyStoppingCallback(early_stopping_patience=5)]}
    else:
        raise ValueError(f"There is no scenario {name!r}.")
    return model, federation, args, others


def train(name: str, resume: str | bool, client_callbacks: list[TrainerCallback]) -> None:
    """One run in the current directory: its checkpoints, its log and its final model."""
    model, federation, args, others = scenario(name)
    trainer = FederatedTrainer(
        model=model,
        args=arguments(RUN_DIR, save_strategy="steps", **args),
        federation=FederatedConfig(num_rounds=NUM_ROUNDS, **federation),
        client_callbacks=client_callbacks,
        **others,
    )
    trainer.train(resume_from_checkpoint=resume)
    torch.save(trainer.model.state_dict(), f"{FINAL_DIR}.pt")
    trainer.save_model(FINAL_DIR)
    with open(LOG_FILE, "w", encoding="utf-8") as file:
        json.dump(trainer.state.log_history, file)


# ---- When it dies


class KilledInClient(TrainerCallback):
    """Dies after some optimizer steps of clients."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_steps -= 1
        if self.num_steps == 0:
            kill()


def kill_around(owner: Any, name: str, is_time: Callable[..., bool], before: bool) -> None:
    """Replace a function of the library by one that dies before or after doing its work."""
    work = getattr(owner, name)

    def deadly(*args: Any, **kwargs: Any) -> Any:
        if not is_time(*args, **kwargs):
            return work(*args, **kwargs)
        if not before:
            work(*args, **kwargs)
        kill()

    setattr(owner, name, deadly)


def nth_call(number: int) -> Callable[..., bool]:
    calls = iter(range(1, 10**6))
    return lambda *args, **kwargs: next(calls) == number


def half_deleted(path: Any, **kwargs: Any) -> bool:
    """Whether an old checkpoint is being deleted, of which one file is now gone."""
    if not os.path.basename(path).startswith("old-checkpoint") or not os.path.isdir(path):
        return False
    os.remove(os.path.join(path, "trainer_state.json"))
    return True


def arm(moment: str | None) -> list[TrainerCallback]:
    """Prepare the death at a moment. Returns callbacks to run inside clients."""
    library = hf_federated.trainer.mixin
    if moment is None:
        pass
    elif moment.startswith("file event "):
        kill_at_file_event(int(moment.rpartition(" ")[2]))
    elif moment == "first round":
        return [KilledInClient(3)]
    elif moment == "client":
        # 2 clients of 2 to 3 steps a round, or one of 3: the 6th is in the second round or its end.
        return [KilledInClient(6)]
    elif moment == "aggregation":
        for algorithm in (Aggregation, FedOpt, LocalOnly, Scaffold):
            kill_around(algorithm, "aggregate", nth_call(2), before=False)
    elif moment == "exchange":
        # Server and two clients take three steps each in a round: in the second one.
        kill_around(Student, "step", nth_call(13), before=False)
    elif moment == "samples":
        # Two clients' samples of two kinds move three steps in a round: in the second one.
        kill_around(pseudo_sampler, "adversarial_loss", nth_call(20), before=False)
    elif moment == "last samples":
        # After the rounds all clients' once more.
        kill_around(pseudo_sampler, "adversarial_loss", nth_call(NUM_ROUNDS * 12 + 8), before=False)
    elif moment == "evaluation":
        kill_around(FederatedTrainer, "evaluate", nth_call(2), before=True)
    elif moment == "after model file":
        kill_around(library.FederatedMixin, "save_model", nth_call(2), before=False)
    elif moment == "before trainer_state.json":
        kill_around(TrainerState, "save_to_json", nth_call(3), before=True)
    elif moment == "before client states":
        kill_around(library.FederationRuntime, "save", nth_call(2), before=True)
    elif moment == "before rename":
        kill_around(hf_federated.trainer.saving, "publish", nth_call(2), before=True)
    elif moment == "after rename":
        kill_around(hf_federated.trainer.saving, "publish", nth_call(2), before=False)
    elif moment == "rotation":
        kill_around(shutil, "rmtree", half_deleted, before=True)
    elif moment == "after last round":
        kill_around(hf_federated.trainer.saving, "publish", nth_call(NUM_ROUNDS), before=False)
    else:
        raise ValueError(f"There is no moment {moment!r}.")
    return []


# What Python reports of the file system, as far as it can change it.
FILE_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "shutil.copyfile"}


def kill_at_file_event(number: int) -> None:
    """Die just before the run touches a file below its output directory for the n-th time."""
    root = os.path.abspath(RUN_DIR)
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in FILE_EVENTS or not isinstance(args[0], (str, os.PathLike)):
            return
        if event == "open" and isinstance(args[1], str) and args[1].startswith("r"):
            return
        # Deletions below a directory descriptor give the bare name.
        path = os.fspath(args[0])
        if os.path.abspath(path).startswith(root) or event in ("os.remove", "os.rmdir"):
            count += 1
            if count == number:
                kill()

    sys.addaudithook(hook)


def serve() -> None:
    """Answer requests until the input ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.dup2(2, 1)
                os.chdir(request["directory"])
                train(request["scenario"], request["resume"], arm(request["moment"]))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


if __name__ == "__main__":
    serve()
