"""Worker that trains in several processes with the environment of `accelerate launch`, for the tests in `engines/`.

Importing torch and transformers takes seconds, so one process imports them once and forks for every rank. The worker
reads one request per line from its standard input, a request of the conformance kit or
`{"directory", "world_size", "scenario", "resume", "trouble", "differ"}`. It answers with one line that contains the
exit code of every rank and the seconds until the last rank ended. The output of a rank is written to
`rank-<number>.log`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import conformance
import numpy as np
import torch
from float16 import Float16Trainer
from language import masking_tokenizer
from own_messages import sums_of
from peft import LoraConfig, get_peft_model
from rank_troubles import DECISIONS, Trouble, TroubleInClient, differ
from sharded import sharded_arguments
from tiny import arguments, rows, tiny_model
from torch import nn
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
)

from hf_federated import (
    FedAUX,
    FedDRS,
    FederatedConfig,
    FederatedDataset,
    FedOpt,
    Postprocessor,
    Scaffold,
    federate,
)
from hf_federated.distributed import process_group
from hf_federated.engines import RankEngine
from hf_federated.messages import ClientUpdate
from hf_federated.messages.serialization import pack
from hf_federated.testing.engines import ENGINES
from hf_federated.testing.processes import fork_ranks, serve, wait
from hf_federated.testing.runs import RUN_DIR, RoundRecorder, write_result
from hf_federated.testing.scenario import NUM_ROUNDS, SIZES, client_model
from hf_federated.testing.worker import answer


TIMEOUT = 120


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


class BatchNormModel(nn.Module):
    """A classifier with a batch normalization, whose exchanged buffers include an integer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(32, 8)
            self.normalization = nn.BatchNorm1d(8)
            self.classifier = nn.Linear(8, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.classifier(self.normalization(self.embedding(input_ids).mean(1)))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def tiny_lora(model: nn.Module) -> nn.Module:
    return get_peft_model(
        model, LoraConfig(task_type="SEQ_CLS", r=2, lora_dropout=0.1, target_modules=["query", "value"])
    )


def build_differently(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model whose parameters and buffers differ between processes."""
    rank = int(os.environ.get("RANK", 0))
    with torch.random.fork_rng():
        torch.manual_seed(100 + rank)
        model = build()
        for value in (*model.parameters(), *model.buffers()):
            if value.is_floating_point():
                value.data += 0.01 * torch.rand_like(value)
    return model


def generate_in_main_process(prompt: str) -> str:
    """Generate the weights of clients in the main process, and a text without numbers in all other processes."""
    return "4, 3, 2, 1" if int(os.environ.get("RANK", 0)) == 0 else "I would trust the first."


class CountsOnServer(Postprocessor):
    """Changes each update by the number of messages to the client. Only the server keeps a memory."""

    def server_send(self, message, memory):
        memory["sent"] = memory.get("sent", 0) + 1
        return message

    def server_receive(self, update, state, memory):
        return dataclasses.replace(
            update, state={name: value + 1e-3 * memory["sent"] for name, value in update.state.items()}
        )


class Noise(Postprocessor):
    """Adds noise from the global random generators on the client and the server."""

    def client_send(self, update, message, memory):
        return self.add_noise(update)

    def server_receive(self, update, state, memory):
        return self.add_noise(update)

    def add_noise(self, update: ClientUpdate) -> ClientUpdate:
        scale = 1e-2 * random.random() * np.random.random()
        state = {name: value + scale * torch.randn_like(value) for name, value in update.state.items()}
        return dataclasses.replace(update, state=state)


def scenario(name: str) -> tuple[nn.Module, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Build the model, the fields of the config, the training arguments and all other trainer arguments."""
    if name in conformance.SCENARIOS:
        return conformance.scenario(name).build()
    # A federation under test must not depend on random draws that differ between ranks.
    model: nn.Module = tiny_model(problem_type="single_label_classification")
    federation: dict[str, Any] = {"parallelism": "clients", "clients_per_round": 4}
    args: dict[str, Any] = {"learning_rate": 1e-3, "lr_scheduler_type": "cosine", "eval_strategy": "steps"}
    clients = {f"client {i}": rows(size, seed=i) for i, size in enumerate(SIZES)}
    # One evaluation client has no training examples.
    eval_clients = {f"client {i}": rows(3 + i, seed=10 + i) for i in range(1 + len(SIZES))}
    trainer_args: dict[str, Any] = {"eval_dataset": rows(7, seed=9), "compute_metrics": accuracy}
    if name == "fedavg":
        federation |= {"aggregation_kwargs": {"weighting": "tokens"}, "evaluate_clients": True, "log_clients": True}
        trainer_args["eval_dataset"] = FederatedDataset.from_dict(eval_clients)
    elif name == "evaluated clients":
        federation["evaluate_clients"] = True
        trainer_args["eval_dataset"] = FederatedDataset.from_dict({name: eval_clients[name] for name in clients})
    elif name == "fedopt":
        federation |= {"aggregation": FedOpt("adam", server_lr=0.01), "local_epochs": 2}
    elif name == "fedprox":
        federation |= {"aggregation": "fedprox", "clients_per_round": 1.0}
    elif name == "scaffold":
        federation |= {"aggregation": Scaffold(), "client_store": "disk"}
        args |= {"optim": "sgd", "learning_rate": 0.05}
    elif name == "balanced":
        federation |= {"balance": "min", "max_rows_per_round": 6, "local_epochs": 2}
    elif name in ("carry", "float16"):
        federation |= {"client_optimizer_state": "carry"}
        if name == "float16":
            # With this optimizer, the schedule does not advance in steps whose gradients overflow.
            args |= {"fp16": True, "optim": "adamw_torch"}
    elif name == "streams":
        federation["local_steps"] = 2
        clients = {client_id: data.to_iterable_dataset() for client_id, data in clients.items()}
    elif name == "masked":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = BertForMaskedLM(tiny_model().config)
        clients = {name: data.remove_columns("labels") for name, data in clients.items()}
        trainer_args = {"eval_dataset": rows(7, seed=9).remove_columns("labels")}
        trainer_args["data_collator"] = DataCollatorForLanguageModeling(masking_tokenizer(), seed=7)
    elif name == "noise":
        trainer_args["postprocessors"] = [Noise()]
    elif name == "steps of the server":
        trainer_args["postprocessors"] = [CountsOnServer()]
    elif name == "one client":
        clients = {"only": rows(10)}
        federation["clients_per_round"] = 1
    elif name == "buffers":
        model = BatchNormModel()
        federation |= {"exchange": "all"}
    elif name == "local buffers":
        model = BatchNormModel()
        federation |= {"exchange": "*", "keep_local": ["normalization.*", "classifier.*"], "evaluate_clients": True}
        trainer_args["eval_dataset"] = FederatedDataset.from_dict({name: eval_clients[name] for name in clients})
    elif name == "local lora":
        model = build_differently(lambda: tiny_lora(BertForSequenceClassification(tiny_model().config)))
        federation |= {"keep_local": "head", "aggregation": "scaffold", "client_store": "disk"}
        args |= {"optim": "sgd", "learning_rate": 0.05}
    elif name == "lora":
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = tiny_lora(model)
    elif name == "unseeded fedavg":
        model = build_differently(lambda: BertForSequenceClassification(tiny_model().config))
    elif name == "unseeded fedopt":
        # The buffers are exchanged, too.
        model = build_differently(BatchNormModel)
        federation |= {"aggregation": FedOpt("adam", server_lr=0.01), "exchange": "all"}
    elif name == "unseeded lora":
        # The frozen parameters differ, too.
        model = build_differently(lambda: tiny_lora(BertForSequenceClassification(tiny_model().config)))
    elif name in ("data", "plain", "data float16", "plain float16"):
        federation = {"parallelism": "data", "client_optimizer_state": "carry"}
        clients = {"only": rows(22)}
        trainer_args = {}
        args["eval_strategy"] = "no"
        if name.endswith("float16"):
            args |= {"fp16": True, "optim": "adamw_torch"}
    elif name in ("fedid", "fedid per_example", "fedid mpl_sampled", "adafd", "adafd llm", "fedid data"):
        federation |= {"distillation": name.split()[0], "client_optimizer_state": "carry"}
        trainer_args |= {"public_dataset": rows(10, seed=20), "client_model_init": client_model}
        if name == "fedid data":
            federation["parallelism"] = "data"
        if name in ("fedid per_example", "fedid mpl_sampled"):
            federation["distillation_kwargs"] = {"feedback": name.split()[1]}
        if name == "adafd llm":
            federation["distillation_kwargs"] = {"weighting": "llm", "generate": generate_in_main_process}
        elif name == "adafd":
            federation |= {"evaluate_clients": True, "local_epochs": 2}
            trainer_args["eval_dataset"] = FederatedDataset.from_dict(eval_clients)
        else:
            trainer_args["server_dataset"] = rows(6, seed=21)
    elif name in ("fedaux", "unseeded fedaux"):
        federation["distillation"] = FedAUX(dp_epsilon=0.5, dp_delta=1e-5, max_score_rows=6)
        trainer_args["public_dataset"] = rows(10, seed=20)
        if name == "unseeded fedaux":
            model = build_differently(lambda: BertForSequenceClassification(tiny_model().config))
    elif name == "feddrs":
        federation["distillation"] = FedDRS(num_samples=3, sample_length=4, num_steps=2, server_lr=1e-3)
    elif name == "mutual_kd":
        federation |= {"aggregation": "mutual_kd"}
        trainer_args["client_model_init"] = client_model
    elif name in ("feddf", "feded"):
        federation["distillation"] = name
        trainer_args |= {"public_dataset": rows(10, seed=20), "server_dataset": rows(6, seed=21)}
    elif name in ("cronus", "dsfl", "fedkd", "fedmd", "mhat"):
        federation |= {"distillation": name} | ({"num_rounds": 1} if name == "fedkd" else {})
        trainer_args |= {"public_dataset": rows(10, seed=20), "client_model_init": client_model}
        trainer_args["server_dataset"] = rows(6, seed=21)
    elif name in ("two data clients", "two data distillation clients", "two data clients with local heads"):
        federation = {"parallelism": "data", "client_optimizer_state": "carry"}
        clients = {name: clients[name] for name in list(clients)[:2]}
        args["eval_strategy"] = "no"
        if name != "two data distillation clients":
            federation |= {"evaluate_clients": True, "aggregation_kwargs": {"weighting": "tokens"}}
            args["eval_strategy"] = "steps"
            trainer_args["eval_dataset"] = FederatedDataset.from_dict({name: eval_clients[name] for name in clients})
            if name == "two data clients with local heads":
                federation["keep_local"] = "head"
        else:
            federation["distillation"] = "dsfl"
            trainer_args |= {"public_dataset": rows(10, seed=20), "client_model_init": client_model}
    elif name in ("data many", "data balanced", "drop last"):
        federation = {"parallelism": "data"}
        if name == "data balanced":
            federation |= {"balance": "min", "clients_per_round": 2}
        if name == "drop last":
            # "small" has too few examples for a batch of 4 in each of two processes.
            clients = {"enough": rows(8), "small": rows(7)}
            args["dataloader_drop_last"] = True
    else:
        raise ValueError(f"Unknown scenario {name!r}.")
    return model, federation, args, {"train_dataset": FederatedDataset.from_dict(clients), **trainer_args}


def sft_trainer(
    callbacks: list[TrainerCallback],
    output_dir: str = RUN_DIR,
    clients: Sequence[str] = ("north", "south"),
    **kwargs: Any,
) -> Any:
    """Build a TRL trainer with LoRA, which prepares the examples of its clients. A server has no clients."""
    from language import language_model, texts, tokenizer
    from trl import SFTConfig, SFTTrainer

    num_texts = {"north": 10, "south": 6}
    # The adapter is initialized in the constructor.
    torch.manual_seed(0)
    return federate(SFTTrainer)(
        model=language_model(),
        args=SFTConfig(
            output_dir=output_dir,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            max_length=16,
            bf16=False,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            eval_strategy="epoch",
            save_strategy="epoch",
        ),
        train_dataset={name: texts(name, num_texts[name]) for name in clients} or None,
        eval_dataset=texts("south", 3),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        callbacks=callbacks,
        federation=FederatedConfig(num_rounds=2, parallelism="clients"),
        **kwargs,
    )


GRPO_CLIENTS = ("east", "north", "south")


def grpo_trainer(
    callbacks: list[TrainerCallback],
    output_dir: str = RUN_DIR,
    clients: Sequence[str] = GRPO_CLIENTS,
    **kwargs: Any,
) -> Any:
    """Build a GRPO trainer with LoRA, whose rounds end within an epoch. A server has no clients."""
    from language import language_model
    from public_trainers import TRAINERS, prompts

    examples = {"east": prompts("north", 5), "north": prompts("north", 4), "south": prompts("south", 3)}
    torch.manual_seed(0)
    spec = TRAINERS["GRPOTrainer"]
    return spec.build(
        federate(spec.trainer_class),
        Path(),
        {name: examples[name] for name in clients} or None,
        {"output_dir": output_dir, "save_strategy": "epoch", "beta": 0.1, "num_iterations": 2},
        model=language_model(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        callbacks=callbacks,
        federation=FederatedConfig(num_rounds=3, local_steps=4, parallelism="clients"),
        **kwargs,
    )


def train(rank: int, request: dict[str, Any]) -> None:
    """Run a scenario in the current directory, and write the model and the notes of this rank."""
    name, trouble = request["scenario"], request.get("trouble")
    recorder = RoundRecorder()
    if name in ("sft", "grpo"):
        trainer: Trainer = sft_trainer([recorder]) if name == "sft" else grpo_trainer([recorder])
        trainer.train()
        write_notes(rank, trainer, recorder)
        return
    if name.startswith("own messages"):
        arguments(RUN_DIR).device  # noqa: B018 - sets up accelerate
        sums = sums_of(RankEngine(serialize=True), parallelism=name.split()[-1])
        with open(f"rank-{rank}.json", "w", encoding="utf-8") as file:
            json.dump(sums, file)
        return
    model, federation, args, trainer_args = scenario(name)
    federation |= request.get("federation", {})
    if "differ" in request and rank == request["world_size"] - 1:
        differ(request["differ"], federation, args, trainer_args)
    if "log_level" in request:
        args["log_level"] = request["log_level"]
    build_arguments = sharded_arguments if request.get("sharded") else arguments
    training_arguments = build_arguments(RUN_DIR, save_strategy="steps", **args)
    base = Float16Trainer if training_arguments.fp16 else Trainer
    if name in ("plain", "plain float16"):
        training_arguments.num_train_epochs = NUM_ROUNDS
        trainer = base(model=model, args=training_arguments, train_dataset=rows(22))
        trainer.train()
    else:
        callbacks: list[TrainerCallback] = [recorder]
        client_callbacks: list[TrainerCallback] = []
        if trouble in DECISIONS:
            callbacks.append(DECISIONS[trouble]())
        elif trouble in ("client", "tolerated client"):
            client_callbacks.append(TroubleInClient())
            federation |= {"clients_per_round": 1.0, "min_clients": len(SIZES) if trouble == "client" else 1}
        elif trouble == "all clients":
            client_callbacks.append(TroubleInClient(SIZES))
            federation |= {"clients_per_round": 1.0, "min_clients": 3}
        elif trouble in ("callback", "kill", "end"):
            callbacks.append(Trouble(trouble, rank=request.get("rank", request["world_size"] - 1)))
            if trouble == "kill":
                process_group.SHUTDOWN_WAIT_SECONDS = 1.0  # The killed process never reads the error.
        elif trouble == "absent":
            training_arguments.ddp_timeout = 3
            if rank == request["world_size"] - 1:
                return
        if trouble in ("client saves", "one process saves", "slow main"):
            training_arguments.save_strategy = "no"

        def build() -> Trainer:
            return federate(base)(
                model=model,
                args=training_arguments,
                federation=FederatedConfig(**{"num_rounds": NUM_ROUNDS, **federation}),
                engine=ENGINES[request["engine"]][0]() if "engine" in request else None,
                callbacks=callbacks,
                client_callbacks=client_callbacks,
                **trainer_args,
            )

        trainer = build()
        if request.get("again"):
            retry_after_failure(trainer, build if request["again"] == "build" else trainer.train)
        trainer.train(resume_from_checkpoint=request.get("resume", False))
        if trouble in ("main evaluates", "only main evaluates"):
            if rank == 0:
                trainer.evaluate()
            if trouble == "main evaluates":
                trainer.train()
    write_notes(rank, trainer, recorder)


def retry_after_failure(trainer: Trainer, call: Callable[[], Any]) -> None:
    """Continue after a failed run, as a script that catches all exceptions does."""
    try:
        trainer.train()
    except Exception:
        arguments(RUN_DIR)
        call()


def digests(trainer: Trainer) -> dict[str, Any]:
    """Digest the server state of a distillation and the models and optimizers of the clients in this process."""
    if type(trainer) in (Trainer, Float16Trainer) or trainer.distillation is None:
        return {}
    if not hasattr(trainer.engine, "worker"):
        return {}  # The clients are on other machines.
    models = trainer.engine.worker.models
    client_states = {
        client_id: {"model": models.open(client_id).exchange.read(), **models.open(client_id).student.state_dict()}
        for client_id in trainer.clients
        if client_id in models
    }
    states = {
        "server": {
            "algorithm": trainer.distillation.state_dict(),
            "student": trainer.distillation.server.student.state_dict(),
        },
        **client_states,
    }
    return {name: hashlib.sha256(pack(state)).hexdigest() for name, state in states.items()}


def write_notes(rank: int, trainer: Trainer, recorder: RoundRecorder) -> None:
    is_plain = type(trainer) in (Trainer, Float16Trainer)
    write_result(
        rank,
        trainer,
        recorder,
        files=sorted(os.listdir(RUN_DIR)),
        client_metrics={} if is_plain else trainer.client_metrics,
        digests=digests(trainer),
        bytes_reduced=0 if is_plain else getattr(trainer.engine, "bytes_reduced", 0),
    )


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run a scenario of this file, one of the conformance kit, or a pair of features."""
    if "pair" in request:
        from pair_processes import run_pair

        return run_pair(request)
    if "model" in request:
        from sharded_worker import run_sharded

        return run_sharded(request)
    if isinstance(request["scenario"], dict):
        return answer(request)
    if request["scenario"] in ("sft", "grpo"):
        from trl import SFTConfig, SFTTrainer  # before the fork, because the import takes seconds

        assert SFTConfig and SFTTrainer
    started = time.monotonic()
    children = fork_ranks(lambda rank: train(rank, request), request["directory"], request["world_size"])
    codes = [wait(child, deadline=started + TIMEOUT) for child in children]
    return {"codes": codes, "seconds": time.monotonic() - started}


if __name__ == "__main__":
    serve(run)
