"""Training arguments with which a launch of several processes on a CPU shards the tiny model with FSDP2."""

from __future__ import annotations

import os
from typing import Any

from accelerate.state import PartialState
from accelerate.utils import DistributedType
from tiny import arguments
from transformers import TrainingArguments


def sharded_arguments(
    output_dir: str | os.PathLike[str],
    layer: str = "BertLayer",
    declares_gpus: bool = True,
    **kwargs: Any,
) -> TrainingArguments:
    """
    Training arguments of a launch that shards its model.

    accelerate shards models on accelerators only. The processes are therefore declared as GPUs; gloo and `fully_shard`
    work on a CPU.
    """
    args = arguments(output_dir, fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": layer}, **kwargs)
    args.device  # noqa: B018 - sets up accelerate
    if declares_gpus:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return args
