"""Small training runs of split models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, TaskType
from tiny import supported_names
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, TrainingArguments

from hf_federated import SplitConfig, SplitFederatedTrainer, SplitModel


VOCABULARY = 40
STRATEGIES = ("serial", "client_batch", "server_hierarchical")
LORA = LoraConfig(task_type=TaskType.CAUSAL_LM, r=2, target_modules=["q_proj", "v_proj"])
PREFIX = PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)


def whole_model(**settings: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=2,
            max_position_embeddings=64,
            **settings,
        )
        return LlamaForCausalLM(config)


def rows_of(seed: int, num_rows: int = 6, length: int = 7) -> Dataset:
    ids = torch.randint(3, VOCABULARY, (num_rows, length), generator=torch.Generator().manual_seed(seed)).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def clients_of(*num_rows: int) -> dict[str, Dataset]:
    return {f"client {number}": rows_of(number, rows) for number, rows in enumerate(num_rows)}


def arguments(directory: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(**supported_names({**settings, **changes}))


def split_trainer(
    directory: Path,
    clients: Any,
    split: SplitConfig | None = None,
    adapter: Any = None,
    model: Any = None,
    eval_dataset: Any = None,
    **changes: Any,
) -> SplitFederatedTrainer:
    split = SplitConfig() if split is None else split
    model = whole_model() if model is None else model
    if adapter is not None:
        model = SplitModel.from_model(model, split.head_blocks, split.tail_blocks, wire_dtype=split.wire_dtype)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model.add_adapter(copy.deepcopy(adapter))
    args = arguments(directory, **changes)
    return SplitFederatedTrainer(model, args, train_dataset=clients, eval_dataset=eval_dataset, split=split)


def trained_values(model: SplitModel) -> dict[str, torch.Tensor]:
    """Copy the trained parameters of the model after a run."""
    return {
        name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert (value - right[name]).abs().max() <= tolerance, name
