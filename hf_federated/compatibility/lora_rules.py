"""`LORA_RULES`: what does not work with methods that combine LoRA factors or change base weights."""

from __future__ import annotations

from . import features as f
from .rule import Rule


LORA_RULES: tuple[Rule, ...] = (
    Rule(
        f.NEEDS_LORA,
        f.NO_ADAPTER,
        "the method combines LoRA factors",
        "Wrap the model with `peft.get_peft_model`, or use aggregation='fedavg'.",
    ),
    Rule(
        f.NEEDS_LORA,
        f.OTHER_ADAPTER,
        "the change of a module is not the scaled product of two factors",
        "Use LoRA, or aggregation='fedavg'.",
    ),
    Rule(
        f.NEEDS_LORA,
        f.ONE_FACTOR,
        "the method needs both factors",
        "Train both factors and select them with `exchange`, or use aggregation='fedavg'.",
        checked_by="LoraAggregation.check_exchange",
    ),
    Rule(
        f.ONE_RANK,
        f.OWN_RANKS,
        "the factors of all clients must have the same shapes",
        "Use aggregation='stacked_lora', or leave `peft_config` out.",
    ),
    Rule(
        f.CHANGES_BASIS,
        f.CARRIED_OPTIMIZER,
        "the moments of the optimizer belong to the former factors",
        "Set client_optimizer_state='reset'.",
    ),
    # ---- Changed base weights of LoRA modules
    Rule(
        f.CHANGES_BASE,
        f.ALL_EXCHANGE,
        "clients would send the base weights",
        "Leave `exchange` out.",
    ),
    Rule(
        f.CHANGES_BASE,
        f.ANY_DISTILLATION,
        "the distillation compares models with the same base weights",
        "Leave `distillation` out, or use aggregation='fedit'.",
    ),
    Rule(
        f.CHANGES_BASE,
        f.EXCHANGE_DTYPE,
        "rounded changes would give server and clients other base weights",
        "Leave `exchange_dtype` out.",
    ),
    Rule(
        f.CHANGES_BASE,
        f.SENDS_DOWN,
        "the step would change what is added to the base weights",
        "Leave the postprocessor out, or use aggregation='fedit'.",
    ),
    Rule(
        f.CHANGES_BASE,
        f.ANOMALIES,
        "the change of the global model is divided between factors and base weights",
        "Leave `report_anomalies` and AnomalyReport out.",
    ),
    Rule(
        f.CHANGES_BASE,
        f.EVALUATE_CLIENTS,
        "the request of an evaluation would contain the base weights",
        "Pass an `eval_dataset` of the server.",
    ),
)
