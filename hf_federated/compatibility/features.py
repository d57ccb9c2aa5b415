"""The features of a federation that the rules name.

A feature is a predicate on the parts of a federation and not a list of names. A rule therefore also holds for the
methods and steps of other packages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peft import PeftModel, PeftType
from transformers.training_args import OptimizerNames

from ..aggregation import AGGREGATIONS, Aggregation, FedAvg, FedNova, LocalOnly, RobustAggregation
from ..aggregation.lora_factors import find_other_factors, find_pairs
from ..aggregation.robust import ClippedMean
from ..config import FederatedConfig
from ..distillation import DISTILLATIONS, Distillation
from ..engines import ClientEngine
from ..methods import ClientPart, Method
from ..postprocessing import GaussianNoise, Postprocessor
from ..secure_aggregation import SECURE_AGGREGATIONS
from ..server.collectors import COLLECTORS, SynchronousCollector
from .combination import Combination


# The groups of features, with their headings in the documentation.
AVERAGING, DISTILLATION, STEP, EXCHANGE = "Averaging", "Distillation", "Postprocessors", "Exchanged tensors"
MODEL, CLIENTS, COLLECTOR, ENGINE = "Models", "Clients", "Collectors", "Engines and launches"
SETTING, TRAINING, SECURE = "Fields of `FederatedConfig`", "Training arguments", "Secure aggregation"
GROUPS = (AVERAGING, DISTILLATION, STEP, EXCHANGE, MODEL, CLIENTS, COLLECTOR, ENGINE, SETTING, SECURE, TRAINING)


@dataclass(frozen=True)
class Feature:
    """
    A feature of a federation.

    Args:
        group (`str`): Group of the feature in the documentation.
        name (`str`): Description in the documentation, in Markdown.
        find (`Callable[[Combination], str]`): Returns the part of a federation that has the feature, for an error,
            such as `"balance='min'"`. Returns an empty text if the federation does not have the feature.
    """

    group: str
    name: str
    find: Callable[[Combination], str]

    @property
    def registered(self) -> list[str]:
        """Names of the registered methods and collectors that have the feature with their default settings."""
        combinations: dict[str, Combination] = {}
        if self.group == AVERAGING:
            combinations = {name: Combination(aggregation=cls()) for name, cls in AGGREGATIONS.items()}
        elif self.group == DISTILLATION:
            combinations = {name: Combination(distillation=cls()) for name, cls in DISTILLATIONS.items()}
        elif self.group == COLLECTOR:
            combinations = {name: Combination(collector=cls()) for name, cls in COLLECTORS.items()}
        elif self.group == SECURE:
            combinations = {name: Combination(secure_aggregation=cls()) for name, cls in SECURE_AGGREGATIONS.items()}
        return [name for name, combination in combinations.items() if self.find(combination)]


# ---- Methods

# What the server calls with each update.
_READERS = ("accept", "check", "check_update")


def _averaging(name: str, has: Callable[[Aggregation], Any]) -> Feature:
    return Feature(AVERAGING, name, lambda c: f"aggregation={c.aggregation.name!r}" if has(c.aggregation) else "")


def _distillation(name: str, has: Callable[[Distillation], Any]) -> Feature:
    def find(c: Combination) -> str:
        return "" if c.distillation is None or not has(c.distillation) else f"distillation={c.distillation.name!r}"

    return Feature(DISTILLATION, name, find)


def _averages_one_model(c: Combination) -> str:
    averages = c.averaging.exchanges_parameters and not c.averaging.trains_private_models
    return f"aggregation={c.averaging.name!r}" if averages else ""


ONE_MODEL = Feature(AVERAGING, "A method whose clients share one model", _averages_one_model)
OTHER_THAN_FEDAVG = _averaging(
    "A method other than `fedavg` with its default arguments",
    lambda method: type(method) not in (FedAvg, LocalOnly) or method.non_default_settings(),
)
NO_PARAMETERS = _averaging("A method that exchanges no parameters", lambda method: not method.exchanges_parameters)
PRIVATE_MODELS = _averaging("A method with private models of the clients", lambda method: method.trains_private_models)
KEEPS_TENSORS = _averaging("A method with local tensors", lambda method: method.keep_local is not None)
TRAINS_ON_SERVER = _averaging("A method whose server trains", lambda method: method.trains_on_server)
NEEDS_LORA = _averaging("A method for LoRA factors", lambda method: method.needs_lora)
ONE_RANK = _averaging("A method whose clients have one LoRA rank", lambda method: not method.supports_ranks)
CHANGES_BASE = _averaging("A method that changes the base weights of LoRA modules", lambda m: m.changes_base)
CHANGES_BASIS = _averaging("A method that factors LoRA products again", lambda method: method.changes_basis)
NEEDS_GRADIENTS = _averaging("A method that reads gradients", lambda method: method.needs_gradients)
OWN_STEPS = _averaging("A method with its own postprocessors", lambda method: method.postprocessors())
OWN_ENCODING = _averaging(
    "A method that encodes the exchanged parameters", lambda method: any(map(decodes, method.postprocessors()))
)
NOT_LATE = _averaging("A method that needs all updates in their round", lambda m: not m.supports_late_updates)
ROBUST = _averaging("A robust method", lambda method: isinstance(method, RobustAggregation))
ROBUST_OPTIMIZER = _averaging(
    "A robust method with `server_optimizer`",
    lambda method: isinstance(method, RobustAggregation) and method.server_optimizer,
)
ROBUST_WITHOUT_FACTORS = _averaging(
    "A robust method that keeps a momentum",
    lambda method: isinstance(method, RobustAggregation) and not method.supports_factors,
)
FEDNOVA = _averaging("FedNova", lambda method: isinstance(method, FedNova))

ANY_DISTILLATION = _distillation("Any distillation", lambda method: True)
PREDICTIONS_ONLY = _distillation(
    "A distillation whose clients send no parameters", lambda method: not method.returns_parameters
)
AVERAGES_PARAMETERS = _distillation("A distillation that averages", lambda method: method.returns_parameters)
SENDS_PARAMETERS = _distillation("A distillation that sends parameters", lambda method: method.sends_parameters)
LATE_DISTILLATION = _distillation("Any distillation", lambda method: not method.supports_late_updates)
INITIAL_MODEL = _distillation(
    "A distillation that compares examples", lambda method: method.requirements.initial_model
)
COUNTS_CLASSES = _distillation(
    "A distillation that counts the examples of each class", lambda method: method.reports_class_counts
)
UNSCALED_GRADIENTS = _distillation(
    "A distillation with gradients outside of training steps", lambda method: method.requirements.unscaled_gradients
)
FORWARD_DERIVATIVES = _distillation(
    "A distillation with forward derivatives", lambda method: method.requirements.forward_derivatives
)


def _sees_updates(method: Aggregation, model: Any) -> bool:
    """Whether the server needs the updates of single clients."""
    state = {} if model is None else {name: value for name, value in model.named_parameters() if value.requires_grad}
    # A copy, because a method may prepare a round.
    if not copy.copy(method).accumulator(state).is_linear:
        return True
    # The center of the server moves, and clients do not know it.
    return isinstance(method, ClippedMean) and type(method).center_of is not ClippedMean.center_of


NOT_A_SUM = Feature(
    AVERAGING,
    "A method that compares updates, or limits them around a center of the server",
    lambda c: f"aggregation={c.aggregation.name!r}" if _sees_updates(c.aggregation, c.model) else "",
)
OWN_MESSAGES = _averaging("A method with its own `messages`", lambda method: method.messages)
OWN_STATES = _averaging(
    "A method that overrides `state_for` or `expected_for`",
    lambda m: type(m).state_for is not Method.state_for or type(m).expected_for is not Method.expected_for,
)
READS_UPDATES = _averaging(
    "A method that overrides `accept`, `check` or `check_update`",
    lambda m: any(getattr(type(m), name) is not getattr(Aggregation, name) for name in _READERS),
)
# What a client half does with a batch.
_BATCH_READERS = ("inputs", "loss", "on_batch")


def _reads_batches(c: Combination) -> str:
    for method in c.methods:
        part = method.client_part
        if any(getattr(part, name) is not getattr(ClientPart, name) for name in _BATCH_READERS):
            return repr(method)
    return ""


READS_BATCHES = Feature(
    AVERAGING, "A method whose client half overrides `inputs`, `loss` or `on_batch`", _reads_batches
)
REFUSED_ENGINE = Feature(
    AVERAGING,
    "A method that lists engines in `refused_engines`",
    lambda c: next((repr(method) for method in c.methods if type(c.engine).__name__ in method.refused_engines), ""),
)


# ---- Steps, exchange and models


def decodes(step: Postprocessor) -> bool:
    """Whether the server decodes what the step encoded on the client."""
    return type(step).server_receive is not Postprocessor.server_receive


def step_feature(name: str, has: Callable[[Postprocessor], Any], with_own: bool = False) -> Feature:
    """A feature of a step that the user passed, or also of a step of the averaging algorithm."""

    def find(c: Combination) -> str:
        steps = [*c.postprocessors, *(c.aggregation.postprocessors() if with_own else ())]
        return next((type(step).__name__ for step in steps if has(step)), "")

    return Feature(STEP, name, find)


ANY_STEP = step_feature("Any postprocessor", lambda step: True)
ENCODES = step_feature("A postprocessor with `server_receive`, such as `QuantizeChanges`", decodes)
ANY_ENCODING = step_feature("A postprocessor with `server_receive`, also of the method", decodes, with_own=True)
SENDS_DOWN = step_feature(
    "A postprocessor with `server_send`, such as `QuantizeChanges`",
    lambda step: type(step).server_send is not Postprocessor.server_send,
)
ADDS_NOISE = step_feature(
    "A postprocessor with `adds_noise`, such as `GaussianNoise`", lambda step: step.adds_noise, True
)
DIFFERENT_NOISE = step_feature(
    "`GaussianNoise` without `reproducible=True`",
    lambda step: isinstance(step, GaussianNoise) and not step.reproducible,
    with_own=True,
)


def _setting(name: str, group: str, *values: Any) -> Feature:
    """A field of the configuration with one of the values, or with any value that is not the default."""
    default = getattr(FederatedConfig(), name)

    def find(c: Combination) -> str:
        value = getattr(c.config, name)
        return f"{name}={value!r}" if (value in values if values else value != default) else ""

    return Feature(group, f"`{name}={values[0]!r}`" if values else f"`{name}`", find)


EXCHANGE_DTYPE = _setting("exchange_dtype", STEP)
ALL_EXCHANGE = _setting("exchange", EXCHANGE, "all")
ADAPTER_EXCHANGE = _setting("exchange", EXCHANGE, "adapter")
FREEZE = _setting("freeze", EXCHANGE)
KEEP_LOCAL = Feature(
    EXCHANGE, "`keep_local`", lambda c: "" if c.keep_local is None else f"keep_local={c.keep_local!r}"
)
OTHER_KEEP_LOCAL = Feature(
    EXCHANGE,
    "`keep_local` with another value",
    lambda c: "" if c.config.keep_local in (None, c.keep_local) else f"keep_local={c.config.keep_local!r}",
)


def is_quantized(model: Any) -> bool:
    """Whether transformers loaded a model with quantized weights."""
    return getattr(getattr(model, "config", None), "quantization_config", None) is not None


PEFT = Feature(MODEL, "A PEFT model", lambda c: "a PEFT model" if isinstance(c.model, PeftModel) else "")
NO_ADAPTER = Feature(
    MODEL,
    "A model without an adapter",
    lambda c: "" if c.model is None or isinstance(c.model, PeftModel) else f"a {type(c.model).__name__}",
)
BOTH_FACTORS = Feature(
    MODEL,
    "LoRA modules of which both factors are trained",
    lambda c: next((f"LoRA modules such as {pair.a!r}" for pair in find_pairs(c.trained)), ""),
)
MORE_FACTORS = Feature(
    MODEL,
    "An adapter with more than two factors, such as AdaLoRA",
    lambda c: f"the adapter of {name!r}" if (name := find_other_factors(c.trained)) else "",
)


def _other_adapter(c: Combination) -> str:
    config = c.model.active_peft_config if isinstance(c.model, PeftModel) else None
    if config is None or (config.peft_type == PeftType.LORA and not config.use_dora):
        return ""
    return "an adapter of type " + ("DoRA" if config.peft_type == PeftType.LORA else config.peft_type.value)


def _one_factor(c: Combination) -> str:
    is_lora = isinstance(c.model, PeftModel) and not _other_adapter(c)
    return "LoRA modules with a frozen factor" if is_lora and not find_pairs(c.trained) else ""


OTHER_ADAPTER = Feature(
    MODEL, "An adapter other than LoRA, such as DoRA, AdaLoRA, LoHa, LoKr, VeRA or OFT", _other_adapter
)
ONE_FACTOR = Feature(MODEL, "LoRA modules of which one factor is frozen", _one_factor)
PROMPTS = Feature(
    MODEL,
    "Prompt learning, such as prompt tuning and prefix tuning",
    lambda c: (
        "prompt learning" if isinstance(c.model, PeftModel) and c.model.active_peft_config.is_prompt_learning else ""
    ),
)
QUANTIZED = Feature(
    MODEL, "A quantized base model (QLoRA)", lambda c: "a quantized model" if is_quantized(c.model) else ""
)


# A split trainer has no rounds and no other parts of a combination.
SPLIT = Feature(MODEL, "A split model (`SplitFederatedTrainer`)", lambda c: "")


def _models_of_clients(c: Combination) -> str:
    if c.participants is None or not c.participants.differ:
        return ""
    return "`clients`" if c.participants.client_model_init is None else "`client_model_init`"


OWN_MODELS = Feature(CLIENTS, "Clients with their own models (`clients`, `client_model_init`)", _models_of_clients)
OWN_RANKS = Feature(
    CLIENTS,
    "Clients with their own LoRA ranks (`peft_config` of `ClientSpec`)",
    lambda c: "`peft_config` of a ClientSpec" if c.participants is not None and c.participants.peft_configs else "",
)
SHARED_MODEL = Feature(
    CLIENTS,
    "Clients that share the server's model",
    lambda c: "" if c.participants is None or c.participants.differ else "one model for all clients",
)
STREAM = Feature(
    CLIENTS,
    "A client with a stream (`IterableDataset`)",
    lambda c: next(
        (f"the stream (IterableDataset) of client {name!r}" for name, size in c.num_examples.items() if size is None),
        "",
    ),
)


# ---- Collectors, engines and settings


OPEN_REQUESTS = Feature(
    COLLECTOR,
    "A collector whose requests stay open after a round",
    lambda c: f"collector={c.collector.name!r}" if c.collector.holds_requests else "",
)
OTHER_COLLECTOR = Feature(
    COLLECTOR,
    "A collector other than `synchronous`",
    lambda c: "" if type(c.collector) is SynchronousCollector else f"collector={c.collector.name!r}",
)
NO_OPEN_REQUESTS = Feature(
    ENGINE,
    "`RankEngine`, the engine of several processes",
    lambda c: "" if c.engine.holds_requests else type(c.engine).__name__,
)
LOCAL = Feature(
    ENGINE,
    "`LocalEngine`",
    lambda c: f"{type(c.engine).__name__}()" if c.engine.trains_here and c.engine.holds_requests else "",
)
REMOTE = Feature(
    ENGINE,
    "Clients on other machines (`NetworkEngine`, NVFlare)",
    lambda c: "" if c.engine.trains_here else type(c.engine).__name__,
)
ANY_ENGINE = Feature(ENGINE, "An engine in `refused_engines`", lambda c: type(c.engine).__name__)


def _processes(c: Combination) -> str:
    return f"a launch of {c.num_processes} processes" if c.num_processes > 1 else ""


PROCESSES = Feature(ENGINE, "Several processes", _processes)
CLIENT_PROCESSES = Feature(
    ENGINE,
    "A client on another machine in several processes",
    lambda c: _processes(c) if isinstance(c.engine, ClientEngine) else "",
)
DATA_PARALLEL = Feature(
    ENGINE,
    "Several processes with `parallelism='data'`",
    lambda c: f"{text} and parallelism='data'" if c.config.parallelism == "data" and (text := _processes(c)) else "",
)

SHARDED = Feature(ENGINE, "FSDP (`fsdp_version: 2`)", lambda c: "FSDP" if c.is_sharded else "")
SHARDED_FACTORS = Feature(
    ENGINE,
    "FSDP with LoRA modules of which both factors are trained",
    lambda c: f"FSDP with {text}" if c.is_sharded and (text := BOTH_FACTORS.find(c)) else "",
)

ANOMALIES = Feature(
    SETTING,
    "`report_anomalies`, `AnomalyReport`",
    lambda c: "AnomalyReport" if c.reports_anomalies else "",
)
BALANCE = _setting("balance", SETTING)
MAX_ROWS = _setting("max_rows_per_round", SETTING)
EVALUATE_CLIENTS = _setting("evaluate_clients", SETTING)
LOG_CLIENTS = _setting("log_clients", SETTING)
CLIENT_PARALLEL = _setting("parallelism", SETTING, "clients")
DEADLINE = _setting("round_deadline", SETTING)
CARRIED_OPTIMIZER = _setting("client_optimizer_state", SETTING, "carry")


SECURE_AGGREGATION = Feature(
    SECURE,
    "`secure_aggregation`",
    lambda c: "" if c.secure_aggregation is None else f"secure_aggregation={c.secure_aggregation.name!r}",
)
NO_MASKS = Feature(
    SECURE,
    "`secure_aggregation` with `masks=False`",
    lambda c: "masks=False" if c.secure_aggregation is not None and not c.secure_aggregation.masks else "",
)


def _argument(name: str, argument: str, has: Callable[[Any, FederatedConfig], Any]) -> Feature:
    def find(c: Combination) -> str:
        if c.args is None or not has(c.args, c.config):
            return ""
        value = getattr(c.args, argument)
        return f"{argument}={(OptimizerNames(value).value if argument == 'optim' else value)!r}"

    return Feature(TRAINING, name, find)


FLOAT16 = _argument("`fp16=True`", "fp16", lambda args, config: args.fp16)
NO_GRADIENTS = _argument(
    "`optim='lomo'` and `'adalomo'`",
    "optim",
    lambda args, config: args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO),
)
NOT_SGD = _argument(
    "An optimizer other than `optim='sgd'`", "optim", lambda args, config: args.optim != OptimizerNames.SGD
)
CARRIED_MOMENTUM = _argument(
    "Momentum with `client_optimizer_state='carry'`",
    "optim_args",
    lambda args, config: config.client_optimizer_state == "carry" and "momentum" in (args.optim_args or ""),
)


def _list_batches(c: Combination) -> str:
    examples: list[Any] = [{}]
    try:
        is_list = c.data_collator is not None and isinstance(c.data_collator(examples), list)
    except Exception:  # a collator of tensors needs their columns
        is_list = False
    return "a trainer whose batches are lists" if is_list else ""


LIST_BATCHES = Feature(TRAINING, "Batches that are lists of examples (`GRPOTrainer`, `RLOOTrainer`)", _list_batches)
