"""The features of a federation whose pairs `test_compatibility.py` walks, and tiny federations with two of them."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from conformance import Answer, Question
from peft import AdaLoraConfig, LoraConfig, PromptTuningConfig, get_peft_model, prepare_model_for_kbit_training
from sharded import sharded_arguments
from tiny import arguments, rows, tiny_model
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig
from transformers.utils import logging

from hf_federated import (
    AGGREGATIONS,
    DISTILLATIONS,
    Aggregation,
    ClientSpec,
    ClipUpdate,
    Distillation,
    FedAvg,
    FederatedConfig,
    FederatedDataset,
    FederatedTrainer,
    GaussianNoise,
    NetworkEngine,
    Postprocessor,
    QuantizeChanges,
)
from hf_federated.clients.participants import Participants
from hf_federated.compatibility import RULES, Combination, Rule
from hf_federated.engines import Engine, LocalEngine, RankEngine
from hf_federated.messages import Message
from hf_federated.secure_aggregation import SECURE_AGGREGATIONS, SecureAggregation
from hf_federated.server.collectors import UpdateCollector
from hf_federated.utils.algorithm_names import (
    AGGREGATION_NAMES,
    COLLECTOR_NAMES,
    DISTILLATION_NAMES,
    SECURE_AGGREGATION_NAMES,
)


CLIENTS = {"north": rows(4), "south": rows(3, seed=1), "west": rows(4, seed=2)}


@dataclass(frozen=True)
class Parts:
    """
    Arguments of a federated trainer.

    Args:
        federation (`Mapping[str, Any]`): Fields of `FederatedConfig`.
        training (`Mapping[str, Any]`): Training arguments.
        trainer (`Mapping[str, Any]`): Further arguments of the trainer.
        model (`Callable[[], Any]`, *optional*): Builds the model.
        engine (`Callable[[], Engine]`, *optional*): Builds the engine.
        num_processes (`int`): Number of processes of the launch.
        is_sharded (`bool`): Whether FSDP2 divides the model over the processes.
    """

    federation: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[], Any] | None = None
    engine: Callable[[], Engine] | None = None
    num_processes: int = 1
    is_sharded: bool = False

    def __or__(self, other: Parts) -> Parts:
        """The parts of both. The other parts have precedence, and the postprocessors follow each other."""
        steps = [*self.trainer.get("postprocessors", ()), *other.trainer.get("postprocessors", ())]
        return Parts(
            {**self.federation, **other.federation},
            {**self.training, **other.training},
            {**self.trainer, **other.trainer, **({"postprocessors": steps} if steps else {})},
            other.model or self.model,
            other.engine or self.engine,
            max(self.num_processes, other.num_processes),
            self.is_sharded or other.is_sharded,
        )

    @property
    def is_networked(self) -> bool:
        """Whether the clients are on other machines."""
        return self.engine is network_engine


@dataclass(frozen=True)
class Feature:
    """
    A feature of a federation.

    Args:
        group (`str`): The group of the feature.
        parts ([`Parts`]): Arguments that have the feature.
        bases (`Sequence[Parts]`): What the feature needs in addition, if the other feature does not set it. The first
            base with which the pair works is used.
        runs (`bool`): Whether a federation with the feature runs on this machine.
    """

    group: str
    parts: Parts
    bases: Sequence[Parts] = (Parts(),)
    runs: bool = True


# Features of these groups exclude each other.
EXCLUSIVE = (
    "averaging",
    "distillation",
    "codec",
    "exchange",
    "keep_local",
    "model",
    "clients",
    "collector",
    "secure aggregation",
    "engine",
    "launch",
)


# ---- Models


def client_model(client_id: str) -> Any:
    """A client's own model, with another number of layers than the server's model."""
    return tiny_model(num_hidden_layers=1)


def with_lora(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))


def lora_model() -> Any:
    return with_lora(tiny_model())


def lora_client_model(client_id: str) -> Any:
    return with_lora(client_model(client_id))


def frozen_factors_model() -> Any:
    model = lora_model()
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    return model


def adalora_model() -> Any:
    config = {"init_r": 2, "target_r": 1, "target_modules": ["query"], "total_step": 9}
    return get_peft_model(tiny_model(), AdaLoraConfig(task_type="SEQ_CLS", **config))


def dora_model() -> Any:
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"], use_dora=True)
    return get_peft_model(tiny_model(), config)


def prompt_model() -> Any:
    return get_peft_model(tiny_model(), PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2))


def quantized_model() -> Any:
    """A model in 8 bits with LoRA. With 4 bits, bitsandbytes cannot train on some CPUs after an evaluation."""
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["classifier", "pooler"])
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        # The CPU backend of bitsandbytes needs hidden sizes of at least 64.
        tiny_model(hidden_size=64, intermediate_size=64).save_pretrained(folder)
        base = AutoModelForSequenceClassification.from_pretrained(
            folder, quantization_config=config, device_map={"": "cpu"}
        )
    logging.enable_progress_bar()
    return with_lora(prepare_model_for_kbit_training(base, use_gradient_checkpointing=False))


def network_engine(address: str = "127.0.0.1:0") -> NetworkEngine:
    return NetworkEngine(list(CLIENTS), address=address, insecure=True, join_timeout=60.0)


# ---- Methods and steps of a user


class OwnMessages(FedAvg):
    messages: ClassVar[tuple[type[Message], ...]] = (Question, Answer)


class OwnStates(FedAvg):
    def state_for(self, client_id: str, state: Any) -> Any:
        return dict(state)


class OwnAccept(FedAvg):
    def accept(self, round: Any, update: Any) -> None:
        super().accept(round, update)


class RefusesRanks(FedAvg):
    refused_engines: ClassVar[dict[str, str]] = {
        "RankEngine": "it needs one process. Use the engine that the method names."
    }


class NotLate(FedAvg):
    supports_late_updates: ClassVar[bool] = False


class OnTheWayDown(Postprocessor):
    def server_send(self, message: Any, memory: Any) -> Any:
        return message


class OnTheSums(Postprocessor):
    def on_sums(self, sums: Any, round: Any, memory: Any) -> Any:
        return sums


# ---- The features

FEATURES: dict[str, Feature] = {}


def add(group: str, name: str, *bases: Parts, runs: bool = True, **parts: Any) -> None:
    FEATURES[name] = Feature(group, Parts(**parts), bases or (Parts(),), runs)


def add_methods(group: str, field: str, names: Sequence[str], others: Mapping[str, dict[str, Any]]) -> None:
    for name in names:
        parts = others.get(name, {})
        add(group, name, **{**parts, "federation": {field: name, **parts.get("federation", {})}})


PUBLIC = {"public_dataset": rows(4, seed=5).remove_columns("labels")}
LABELED = {"server_dataset": rows(4, seed=6)}
OWN_MODELS = {"client_model_init": client_model}
AVERAGING = {
    "fednova": {"training": {"optim": "sgd"}},
    "krum": {"federation": {"aggregation_kwargs": {"num_hostile": 0}}},
    "mutual_kd": {"trainer": OWN_MODELS},
    "fltrust": {"trainer": LABELED},
    **{name: {"model": lora_model} for name, cls in AGGREGATIONS.items() if cls.needs_lora},
}
DISTILLATION = {name: {"trainer": PUBLIC} for name in DISTILLATIONS}
SHORT = {"num_samples": 3, "sample_length": 4, "num_steps": 2}
DISTILLATION["feddrs"] = {"federation": {"distillation_kwargs": SHORT}}
DISTILLATION["fedid"] = {"trainer": {**PUBLIC, **LABELED}}
EVALUATED = FederatedDataset.from_dict({name: rows(3, seed=9) for name in CLIENTS})
# Methods whose clients may have their own models.
KEEPS_MODELS = Parts(federation={"aggregation": "mutual_kd"}), Parts(federation={"aggregation": "local_only"})
LORA = Parts(model=lora_model)

add_methods("averaging", "aggregation", list(AGGREGATIONS), AVERAGING)
for name, method in {
    "norm_bounded_mean with max_norm": ("norm_bounded_mean", {"max_norm": 1.0}),
    "median with server_optimizer": ("median", {"server_optimizer": "sgd"}),
}.items():
    add("averaging", name, federation={"aggregation": method[0], "aggregation_kwargs": method[1]})
RESET = {"aggregation": "stacked_lora", "aggregation_kwargs": {"reset": True}}
add("averaging", "stacked_lora with reset", federation=RESET, model=lora_model)
for cls in (OwnMessages, OwnStates, OwnAccept, RefusesRanks, NotLate):
    add("averaging", cls.__name__, federation={"aggregation": f"{cls.__module__}:{cls.__name__}"})
add_methods("distillation", "distillation", list(DISTILLATIONS), DISTILLATION)
for step in (ClipUpdate(1.0), GaussianNoise(1e-3), QuantizeChanges(), OnTheWayDown(), OnTheSums()):
    add("step", type(step).__name__, trainer={"postprocessors": [step]})
add("step", "reproducible noise", trainer={"postprocessors": [GaussianNoise(1e-3, reproducible=True)]})
add("step", "exchange_dtype", federation={"exchange_dtype": "bfloat16"})
add("codec", "exchange_codec", federation={"exchange_codec": "int8"})
for name, direction in {"topk": "up", "powersgd": "down"}.items():
    settings = {"exchange_codec": name, "exchange_codec_kwargs": {"direction": direction}}
    add("codec", f"exchange_codec {direction}", federation=settings)
# Refused without another feature.
add("step", "noise after a codec", runs=False, trainer={"postprocessors": [QuantizeChanges(), GaussianNoise(1e-3)]})
add("exchange", "exchange='trainable'", federation={"exchange": "trainable"})
add("exchange", "exchange='adapter'", LORA, federation={"exchange": "adapter"})
add("exchange", "exchange='all'", federation={"exchange": "all"})
add("exchange", "pattern of exchange", federation={"exchange": "*"})
add("keep_local", "keep_local", federation={"keep_local": "*classifier*"})
add("keep_local", "keep_local='head'", federation={"keep_local": "head"})
add("freeze", "freeze", federation={"freeze": "embeddings"})
add("model", "no adapter", model=tiny_model)
add("model", "LoRA", model=lora_model)
add("model", "LoRA with frozen factors", model=frozen_factors_model)
add("model", "AdaLoRA", model=adalora_model)
add("model", "DoRA", model=dora_model)
add("model", "quantized", model=quantized_model)
add("clients", "client_model_init", *KEEPS_MODELS, trainer=OWN_MODELS)
specs = {name: ClientSpec(model=functools.partial(client_model, name)) for name in CLIENTS}
add("clients", "clients", *KEEPS_MODELS, trainer={"clients": specs})
ranks = {"north": ClientSpec(peft_config=LoraConfig(r=1))}
add(
    "clients", "ranks", Parts(federation={"aggregation": "stacked_lora"}, model=lora_model), trainer={"clients": ranks}
)
add("clients", "shared model", trainer={"client_model_init": None})
streams = {name: dataset.to_iterable_dataset() for name, dataset in CLIENTS.items()}
add("examples", "streams", trainer={"train_dataset": streams}, federation={"local_steps": 1})
add("collector", "fedbuff", federation={"collector": "fedbuff", "collector_kwargs": {"buffer_size": 3}})
add("engine", "serialized", engine=functools.partial(LocalEngine, serialize=True))
add("engine", "1 rank", engine=RankEngine)
add("engine", "gRPC", engine=network_engine)
add("launch", "2 ranks, data", federation={"parallelism": "data"}, num_processes=2)
add("launch", "2 ranks, clients", federation={"parallelism": "clients"}, num_processes=2)
add("launch", "2 ranks, FSDP", num_processes=2, is_sharded=True)
# Refused without another feature.
shards = {"num_processes": 2, "is_sharded": True}
add("launch", "2 ranks, FSDP and clients", runs=False, federation={"parallelism": "clients"}, **shards)
add("launch", "2 ranks, FSDP and prompts", runs=False, model=prompt_model, **shards)
add("launch", "2 ranks, FSDP and LoRA", num_processes=2, is_sharded=True, model=lora_model)
secure = {"max_weight": 8, "min_survivors": 2, "pins": "none"}
for name in SECURE_AGGREGATIONS:
    settings = {"secure_aggregation": name, "secure_aggregation_kwargs": secure}
    add("secure aggregation", name, federation=settings)
settings = {"secure_aggregation": "secagg", "secure_aggregation_kwargs": {**secure, "masks": False}}
add("secure aggregation", "no masks", federation=settings)
add("config", "balance", federation={"balance": "min"})
add("config", "max_rows_per_round", federation={"max_rows_per_round": 2})
evaluation = {"trainer": {"eval_dataset": EVALUATED}, "training": {"eval_strategy": "epoch"}}
add("config", "evaluate_clients", federation={"evaluate_clients": True}, **evaluation)
add("config", "log_clients", federation={"log_clients": True})
add("config", "report_anomalies", federation={"report_anomalies": True})
add("config", "max_update_ratio", federation={"max_update_ratio": 5.0})
add("config", "round_deadline", federation={"round_deadline": 60.0})
add("config", "client_optimizer_state='carry'", federation={"client_optimizer_state": "carry"})
add("config", "lr_schedule='round'", federation={"lr_schedule": "round"})
add("config", "local_steps", federation={"local_steps": 1})
add("config", "min_clients", federation={"min_clients": 2})
add("config", "server_device", federation={"server_device": "cpu"})
add("config", "client_store='disk'", federation={"client_store": "disk"})
add("config", "max_resident_clients", federation={"max_resident_clients": 1})
add("training", "optim='adamw_torch'", training={"optim": "adamw_torch"})
carried = {"federation": {"client_optimizer_state": "carry"}}
add("training", "carried momentum", training={"optim": "sgd", "optim_args": "momentum=0.9"}, **carried)
add("training", "fp16", runs=False, training={"fp16": True})  # a GPU
add("training", "batches that are lists", runs=False, trainer={"data_collator": list})  # a trainer that takes lists
add("training", "lomo", runs=False, training={"optim": "lomo"})  # the package lomo-optim


# ---- Pairs


def pairs() -> Iterator[tuple[str, str]]:
    """All pairs of features that one federation can have."""
    names = list(FEATURES)
    for number, first in enumerate(names):
        for second in names[number + 1 :]:
            groups = {FEATURES[first].group, FEATURES[second].group}
            if len(groups) == 2 or not groups.issubset(EXCLUSIVE):
                yield first, second


NAMES = {
    "aggregation": (AGGREGATION_NAMES, Aggregation),
    "distillation": (DISTILLATION_NAMES, Distillation),
    "collector": (COLLECTOR_NAMES, UpdateCollector),
    "secure_aggregation": (SECURE_AGGREGATION_NAMES, SecureAggregation),
}


@functools.cache
def _model_of(build: Callable[[], Any]) -> Any:
    return build()


@functools.cache
def _arguments_of(settings: str) -> Any:
    return arguments("unused", **json.loads(settings))


@functools.cache
def _method_of(field: str, name: str | None, settings: str) -> Any:
    """The methods do not run, so several combinations share them. A search for entry points takes milliseconds."""
    names, base = NAMES[field]
    return None if name is None else names.build(name, json.loads(settings), base)


def combination(parts: Parts) -> Combination:
    """The parts as the constructor of the trainer compares them."""
    config, trainer = FederatedConfig(**parts.federation), parts.trainer
    if parts.engine is None and parts.num_processes > 1:
        engine: Engine = RankEngine()
    else:
        engine = LocalEngine() if parts.engine is None else parts.engine()
    methods = {
        name: _method_of(name, getattr(config, name), json.dumps(getattr(config, f"{name}_kwargs"))) for name in NAMES
    }
    num_examples = {} if parts.is_networked or "train_dataset" not in trainer else dict.fromkeys(CLIENTS)
    return Combination(
        config=config,
        args=_arguments_of(json.dumps(parts.training)),
        **methods,
        postprocessors=trainer.get("postprocessors", ()),
        engine=engine,
        num_processes=parts.num_processes,
        is_sharded=parts.is_sharded,
        participants=Participants(
            clients=trainer.get("clients", {}), client_model_init=trainer.get("client_model_init")
        ),
        num_examples=num_examples,
        reports_anomalies=config.report_anomalies,
        model=_model_of(parts.model or tiny_model),
        data_collator=trainer.get("data_collator"),
    )


@functools.cache
def find_pair(first: str, second: str) -> tuple[Parts, Rule | None]:
    """The parts of a pair, and the rule that refuses them."""
    found: list[tuple[Parts, Rule | None]] = []
    for base in FEATURES[first].bases:
        for other_base in FEATURES[second].bases:
            parts = base | other_base | FEATURES[first].parts | FEATURES[second].parts
            combined = combination(parts)
            broken = [rule for rule in RULES if rule.applies_to(combined)]
            # Checks of the exchanged tensors follow the other rules, and checks of the launch precede them.
            broken.sort(key=lambda rule: 0 if "check_launch" in rule.checked_by else 1 + bool(rule.checked_by))
            found.append((parts, broken[0] if broken else None))
            if not broken:
                return found[-1]
    return found[0]


def build(
    parts: Parts, directory: str | os.PathLike[str], address: str | None = None, client_id: str | None = None
) -> FederatedTrainer:
    """
    Build the trainer of a federation of one round.

    Args:
        parts ([`Parts`]): The arguments of the trainer.
        directory (`str` or `os.PathLike`): Output directory.
        address (`str`, *optional*): Address of the server of a federation over a network.
        client_id (`str`, *optional*): The client, for the trainer of a client of a federation over a network.
    """
    trainer = {"train_dataset": CLIENTS, **parts.trainer}
    if parts.federation.get("exchange") == "adapter":
        if trainer.get("client_model_init"):
            trainer["client_model_init"] = lora_client_model
        if any(spec.has_own_model for spec in trainer.get("clients", {}).values()):
            models = {name: functools.partial(lora_client_model, name) for name in CLIENTS}
            trainer["clients"] = {name: ClientSpec(model=model) for name, model in models.items()}
    if parts.is_networked:
        clients = trainer.pop("train_dataset")
        evaluated = trainer.pop("eval_dataset", None)
        if client_id is None:
            trainer["engine"] = network_engine() if address is None else network_engine(address)
            trainer |= {} if evaluated is None else {"eval_dataset": evaluated.pooled_examples()}
        else:
            trainer["train_dataset"] = {client_id: clients[client_id]}
            trainer.pop("server_dataset", None)
            if "clients" in trainer:
                specs = trainer["clients"]
                trainer["clients"] = {client_id: specs[client_id]} if client_id in specs else {}
            trainer |= {} if evaluated is None else {"eval_dataset": evaluated.select_clients([client_id])}
    elif parts.engine is not None:
        trainer["engine"] = parts.engine()
    build_arguments = sharded_arguments if parts.is_sharded else arguments
    return FederatedTrainer(
        model=(parts.model or tiny_model)(),
        args=build_arguments(directory, **parts.training),
        federation=FederatedConfig(**{"num_rounds": 1, **parts.federation}),
        **trainer,
    )
