"""`SHARDING_RULES`: what does not work with FSDP, under which each process holds shards of all states."""

from __future__ import annotations

from . import features as f
from .rule import Rule


SHARDING_RULES: tuple[Rule, ...] = (
    Rule(
        f.ROBUST,
        f.SHARDED,
        "the method compares whole updates, and each process holds shards of them",
        "Use a method that computes value by value, such as aggregation='fedavg', or plain data parallelism.",
    ),
    Rule(
        f.ANY_DISTILLATION,
        f.SHARDED,
        "distillation was not tested with shards",
        "Leave `distillation` out, or use plain data parallelism.",
    ),
    Rule(
        f.NEEDS_LORA,
        f.SHARDED,
        "the method combines whole factors, and each process holds shards of them",
        "Use aggregation='fedavg', or plain data parallelism.",
    ),
    Rule(
        f.NO_PARAMETERS,
        f.SHARDED,
        "FSDP shards one model, but each client keeps its own model",
        "Use a method that averages parameters, such as aggregation='fedavg', or plain data parallelism.",
    ),
    Rule(
        f.ANY_ENCODING,
        f.SHARDED,
        "an encoding depends on whole tensors, and each process holds shards of them",
        "Set exchange_dtype='bfloat16' in place of the postprocessor, or use plain data parallelism.",
    ),
    Rule(
        f.ADDS_NOISE,
        f.SHARDED,
        "the processes would add the same or unknown noise to different shards",
        "Leave the noise out, or use plain data parallelism.",
    ),
    Rule(
        f.ANOMALIES,
        f.SHARDED_FACTORS,
        "the report compares products of whole factors, and each process holds shards of them",
        "Leave `report_anomalies` and AnomalyReport out, or use plain data parallelism.",
    ),
    Rule(
        f.MORE_FACTORS,
        f.SHARDED,
        "AdaLoRA adds a term of whole factors to the loss, and each process holds shards of them",
        "Use LoRA, or plain data parallelism.",
    ),
    Rule(
        f.PROMPTS,
        f.SHARDED,
        "PEFT reads the embeddings outside of the forward pass, in which FSDP gathers them",
        "Use LoRA, or plain data parallelism.",
    ),
    Rule(
        f.QUANTIZED,
        f.SHARDED,
        "shards of quantized weights were not tested, and weights in 8 bits cannot be sharded",
        "Load the model without quantization, or use plain data parallelism.",
    ),
    Rule(
        f.CLIENT_PARALLEL,
        f.SHARDED,
        "each process would train other clients, but FSDP shards one model over all processes",
        "Set parallelism='data'.",
    ),
    Rule(
        f.SECURE_AGGREGATION,
        f.SHARDED,
        "the protocol encodes whole updates, and each process holds shards of them",
        "Leave `secure_aggregation` out, or use plain data parallelism.",
    ),
    Rule(
        f.FLOAT16,
        f.SHARDED,
        "the scaler of a client was not tested with shards",
        "Use bf16=True.",
    ),
)
