"""Runs in two processes with FSDP2 or with plain data parallelism, which `rank_worker.py` forks for
`engines/test_sharded_model.py`.

A request has the fields `directory`, `model` and `sharded`, and optionally `federation`, `args`, `max_norm`,
`poisoned_client`, `resume`, `kill_round` and `declares_gpus`.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import time
from collections.abc import Iterable
from typing import Any

import torch
from language import tokenizer
from peft import LoraConfig, get_peft_model
from sharded import sharded_arguments
from tiny import arguments, rows, tiny_model
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
)

from hf_federated import (
    ClipUpdate,
    FederatedCallback,
    FederatedConfig,
    FederatedDataset,
    FederatedTrainer,
    Postprocessor,
)
from hf_federated.messages import ClientUpdate, Fit
from hf_federated.testing.processes import fork_ranks, wait
from hf_federated.testing.runs import RUN_DIR, KillInRound


NUM_RANKS = 2
TIMEOUT = 150
SMALL = {
    "vocab_size": 33,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
RANKS = {"lora": 3, "lora of rank 1": 1}
SIZES = {"a": 8, "b": 12, "c": 8}


def build_model(name: str) -> nn.Module:
    """Build a model. `"large"` has parameters of even shapes, the other models have empty shards and unequal ones."""
    if name == "buffer":
        model = tiny_model()
        model.classifier.register_buffer("scale", torch.ones(2))
        return model
    if name == "large":
        return tiny_model(hidden_size=64, intermediate_size=128, num_labels=4)
    model: nn.Module = tiny_model(num_labels=3, type_vocab_size=1, problem_type="single_label_classification")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        if name == "tied":
            # An embedding that is also the output layer.
            model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **SMALL))
        elif name in ("lora", "lora of rank 1"):
            modules = {"target_modules": ["query", "value"], "modules_to_save": ["classifier"]}
            model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=RANKS[name], **modules))
            for parameter_name, parameter in model.named_parameters():
                if "lora_B" in parameter_name:
                    nn.init.normal_(parameter, std=0.1)
    return model


def build_data(name: str) -> dict[str, Any]:
    """Build the arguments of the trainer with the examples."""
    clients = {client: rows(size, seed=number) for number, (client, size) in enumerate(SIZES.items())}
    evaluated = {client: rows(4, seed=10 + number) for number, client in enumerate(SIZES)}
    if name != "tied":
        return {"train_dataset": clients, "eval_dataset": FederatedDataset.from_dict(evaluated)}
    return {
        "train_dataset": {client: dataset.remove_columns("labels") for client, dataset in clients.items()},
        "data_collator": DataCollatorForLanguageModeling(tokenizer(), mlm=False),
    }


def values_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The values that this process holds."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in values_of(tensors))


def num_bytes_in_memory() -> int:
    """The bytes of all tensors of this process that anything refers to. Tensors that share memory count once."""
    gc.collect()
    tensors = values_of(each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter, DTensor))
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def tensors_of(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [tensor for value in tree for tensor in tensors_of(value)] if isinstance(tree, (list, tuple)) else []


class Poison(Postprocessor):
    """Puts NaN into the update of a client: with shards, into the shard of the second process only."""

    def __init__(self, client_id: str, rank: int) -> None:
        self.client_id, self.rank = client_id, rank

    def client_send(self, update: ClientUpdate, message: Fit, memory: Any) -> ClientUpdate:
        name = "bert.pooler.dense.weight"
        if update.client_id == self.client_id and self.rank == 1:
            update.state[name][-1] = math.nan
        return update


class Sizes(TrainerCallback):
    """Counts the values and bytes of a process in the training of a client."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self.trains_all = False

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **kwargs: Any
    ) -> None:
        parameters = list(model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self.found = {
            "values": sum(value.numel() for value in values_of(parameters)),
            "parameters": num_bytes(parameters),
            "gradients": num_bytes(gradients),
            "optimizer": num_bytes(tensors_of(list(optimizer.state.values()))),
            "all tensors": num_bytes_in_memory(),
        }
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.trains_all = {id(each) for each in trained} == {id(each) for each in parameters if each.requires_grad}


class ServerSizes(FederatedCallback):
    """Counts the bytes of the global state and of the sum of the updates in a process."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def on_round_begin(self, *args: Any, round: Any, **kwargs: Any) -> None:
        self.found["server"] = num_bytes(tensors_of(round.state))


def build_arguments(request: dict[str, Any]) -> TrainingArguments:
    values = {"learning_rate": 1e-2, **request.get("args", {})}
    if not request["sharded"]:
        return arguments(RUN_DIR, **values)
    layer = "LlamaDecoderLayer" if request["model"] == "tied" else "BertLayer"
    return sharded_arguments(RUN_DIR, layer, declares_gpus=request.get("declares_gpus", True), **values)


def postprocessors(request: dict[str, Any]) -> list[Postprocessor]:
    if "max_norm" in request:
        return [ClipUpdate(request["max_norm"])]
    if "poisoned_client" in request:
        # Without shards, every process has the whole update.
        return [Poison(request["poisoned_client"], int(os.environ["RANK"]) if request["sharded"] else 1)]
    return []


def build_trainer(request: dict[str, Any], callbacks: list[TrainerCallback], **kwargs: Any) -> FederatedTrainer:
    """Build the trainer of a request. Further arguments override those of the request."""
    sizes = [callback for callback in callbacks if isinstance(callback, Sizes)]
    return FederatedTrainer(
        **{
            "model": build_model(request["model"]),
            "args": build_arguments(request),
            "federation": FederatedConfig(**{"num_rounds": 2, **request.get("federation", {})}),
            "callbacks": [callback for callback in callbacks if callback not in sizes],
            "client_callbacks": sizes,
            "postprocessors": postprocessors(request),
            **build_data(request["model"]),
            **kwargs,
        }
    )


def train(rank: int, request: dict[str, Any]) -> None:
    sizes, server_sizes = Sizes(), ServerSizes()
    callbacks: list[TrainerCallback] = [sizes, server_sizes]
    if (kill_round := request.get("kill_round")) is not None:
        callbacks.append(KillInRound(kill_round))
    trainer = build_trainer(request, callbacks)
    trainer.train(resume_from_checkpoint=request.get("resume", False))
    trainer.save_model("model")
    total = sum(parameter.numel() for parameter in trainer.model.parameters())
    server = num_bytes(tensors_of(trainer.aggregation.state_dict()))
    notes = {
        "log": trainer.state.log_history,
        "ledger": trainer.ledger.to_dict(),
        "sizes": {**sizes.found, **server_sizes.found, "server optimizer": server},
        "total": total,
        "trains_all": sizes.trains_all,
        "is_sharded": isinstance(trainer.model, FSDPModule),
        "client_metrics": trainer.client_metrics,
    }
    with open(f"rank-{rank}.json", "w", encoding="utf-8") as file:
        json.dump(notes, file)


def run_sharded(request: dict[str, Any]) -> dict[str, Any]:
    """Run a request in two processes. Return their exit codes, and the seconds until the last one ended."""
    started = time.monotonic()
    children = fork_ranks(functools.partial(train, request=request), request["directory"], NUM_RANKS)
    codes = [wait(child, deadline=started + TIMEOUT) for child in children]
    return {"codes": codes, "seconds": time.monotonic() - started}
