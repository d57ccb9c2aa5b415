"""`RunRecord`: everything a card says about a run, as plain JSON values.

The record is taken from a trainer once. The card is a function of the record alone, so that a saved record renders to
the same text on any machine. It holds no rows of any data set, no paths, and above [`MAX_CLIENT_ROWS`] clients no
client ids.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import numbers
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from datasets import Dataset

from ..adapters import Exchange
from ..audits import PseudoSampleAudit
from ..config import FederatedConfig
from ..data import FederatedDataset
from ..ledger import Ledger
from .facts import DataFacts, ModelFacts


MAX_CLIENT_ROWS = 20

# Arguments that change what is learned; everything else of TrainingArguments changes where and how fast.
ARGUMENTS = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "optim",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "weight_decay",
    "max_grad_norm",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "bf16",
    "fp16",
    "seed",
    "data_seed",
)

SPREADS = ("mean", "worst", "best", "spread")

PACKAGES = ("hf-federated", "transformers", "torch", "accelerate", "datasets", "peft")


class FederatedRun(Protocol):
    """What a card reads of a trainer."""

    model: Any
    state: Any
    eval_dataset: Any
    federation: FederatedConfig
    clients: FederatedDataset
    ledger: Ledger
    aggregation: Any
    distillation: Any
    public_dataset: Dataset | None
    client_metrics: Mapping[str, Mapping[str, float]]
    eval_clients: FederatedDataset | None
    postprocessors: Sequence[Any]
    callback_handler: Any
    exchange: Exchange
    run_args: Any  # while rounds run, `args` holds those of the loop over rounds


@dataclass(frozen=True)
class RunRecord:
    """
    A federated run, as a card tells it.

    Args:
        title (`str`): Name of the model.
        metadata (`dict[str, Any]`): What the caller says for the card's header: `language`, `license`, `tags`,
            `tasks`, `dataset_tags`, `dataset`, `dataset_args`.
        model (`ModelFacts`): The model.
        train_data (`DataFacts`): The clients' data.
        eval_data (`DataFacts`, *optional*): The data of the global evaluation.
        federation (`dict[str, Any]`): The fields of `FederatedConfig`, with the algorithm's class and its non-default
            settings, the seeds, and how many rounds were run.
        exchanged (`dict[str, Any]`): What one message of parameters holds, and all bytes of the run.
        arguments (`dict[str, Any]`): Training arguments that change what is learned.
        rounds (`list[dict[str, Any]]`): What was logged of each round.
        results (`dict[str, Any]`): The metrics of the weights that the run ended with, and their round.
        client_results (`dict[str, dict[str, float]]`): Metric to mean, worst, best and spread over clients.
        client_metrics (`dict[str, dict[str, float]]`): Client id to metrics, up to 20 clients.
        versions (`dict[str, str]`): Package to version.
        public_data (`DataFacts`, *optional*): The rows whose predictions travelled.
        pseudo_samples (`dict[str, dict[str, float]]`): What a [`PseudoSampleAudit`] found, by client.

    Example:

    ```python
    >>> from hf_federated.cards import RunRecord, render
    >>> record = RunRecord.from_trainer(trainer)  # doctest: +SKIP
    >>> record.save("run.json")  # doctest: +SKIP
    >>> print(render(RunRecord.load("run.json")))  # doctest: +SKIP

    ```
    """

    title: str
    metadata: dict[str, Any]
    model: ModelFacts
    train_data: DataFacts
    eval_data: DataFacts | None
    federation: dict[str, Any]
    exchanged: dict[str, Any]
    arguments: dict[str, Any]
    rounds: list[dict[str, Any]]
    results: dict[str, Any]
    client_results: dict[str, dict[str, Any]]
    client_metrics: dict[str, dict[str, Any]]
    versions: dict[str, str]
    public_data: DataFacts | None = None
    pseudo_samples: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def from_trainer(
        cls,
        trainer: FederatedRun,
        language: str | list[str] | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> RunRecord:
        """
        Reads a trainer. The arguments are those of `Trainer.create_model_card`.

        Args:
            trainer (`FederatedRun`): A `FederatedTrainer`, trained or not: the record says what was logged so far.
        """
        dataset_name, final = _first(dataset_tags), _of_final_weights(trainer)
        return cls(
            title=model_name or Path(trainer.run_args.output_dir).name or trainer.model.__class__.__name__,
            metadata={
                "language": language,
                "license": license,
                "tags": _as_list(tags),
                "tasks": _as_list(tasks),
                "dataset_tags": _as_list(dataset_tags),
                "dataset": _as_list(dataset),
                "dataset_args": _as_list(dataset_args),
            },
            model=ModelFacts.of(trainer.model, finetuned_from),
            train_data=DataFacts.of(trainer.clients, dataset_name),
            eval_data=_eval_data(trainer, dataset_name),
            federation=_federation(trainer),
            exchanged=_exchanged(trainer),
            arguments={name: _plain(getattr(trainer.run_args, name)) for name in ARGUMENTS},
            rounds=_rounds(trainer.state.log_history),
            results=_results(trainer, final),
            client_results=_client_results(final),
            client_metrics=_client_metrics(trainer.client_metrics, trainer.state.log_history, final),
            versions=_versions(),
            public_data=None if trainer.public_dataset is None else DataFacts.of(trainer.public_dataset, None),
            pseudo_samples=_pseudo_samples(trainer),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the record as JSON."""
        text = json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False, ensure_ascii=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RunRecord:
        """Reads what [`~RunRecord.save`] wrote."""
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        values["model"] = ModelFacts(**values["model"])
        values["train_data"] = DataFacts(**values["train_data"])
        for name in ("eval_data", "public_data"):
            values[name] = None if values.get(name) is None else DataFacts(**values[name])
        return cls(**values)


def is_metric(key: str) -> bool:
    """Whether a logged key is a result of a global evaluation, and not its speed."""
    return key.startswith("eval_") and not key.endswith(("_runtime", "_per_second", "_time"))


def _eval_data(trainer: FederatedRun, name: str | None) -> DataFacts | None:
    # of a federated evaluation set, `eval_dataset` is the pooled rows
    clients = trainer.eval_clients
    data = trainer.eval_dataset if clients is None else clients
    return None if data is None else DataFacts.of(data, name)


def _federation(trainer: FederatedRun) -> dict[str, Any]:
    logged, distillation = trainer.state.log_history, trainer.distillation
    seed = trainer.federation.federation_seed
    failed = [entry["federated/num_failed"] for entry in logged if "federated/num_failed" in entry]
    return {
        **{key: _plain(value) for key, value in trainer.federation.to_dict().items()},
        "aggregation": type(trainer.aggregation).__name__,
        "aggregation_kwargs": _plain(trainer.aggregation.non_default_settings()),
        "distillation": None if distillation is None else type(distillation).__name__,
        "distillation_kwargs": {} if distillation is None else _plain(distillation.non_default_settings()),
        "federation_seed": trainer.run_args.seed if seed is None else seed,
        "postprocessors": [
            {"name": type(step).__name__, "settings": _plain({k: v for k, v in vars(step).items() if k[0] != "_"})}
            for step in trainer.postprocessors
        ],
        "num_clients": len(trainer.clients),
        "num_rounds_run": trainer.state.global_step,
        # the log counts failures, so that a round which was not logged leaves the number unknown
        "num_failed": int(sum(failed)) if len(failed) == trainer.state.global_step else None,
        "seconds": _plain(next((entry["train_runtime"] for entry in logged[::-1] if "train_runtime" in entry), None)),
    }


def _exchanged(trainer: FederatedRun) -> dict[str, Any]:
    exchange, distillation = trainer.exchange, trainer.distillation
    returned = trainer.aggregation.exchanges_parameters
    sent = returned or (distillation is not None and distillation.sends_parameters)
    return {
        "kind": exchange.kind,
        "parameters_sent": sent,
        "parameters_returned": returned,
        "beside": "" if distillation is None else distillation.sent_beside,
        "num_tensors": len(exchange.names),
        "num_values": exchange.num_values,
        "dtypes": sorted({str(value.dtype).removeprefix("torch.") for value in exchange.parameters.values()}),
        "bytes_down": trainer.ledger.bytes_down,
        "bytes_up": trainer.ledger.bytes_up,
        "class_counts": distillation is not None and distillation.needs_class_counts,
    }


def _pseudo_samples(trainer: FederatedRun) -> dict[str, dict[str, Any]]:
    callbacks = trainer.callback_handler.callbacks
    audit = next((callback for callback in callbacks if isinstance(callback, PseudoSampleAudit)), None)
    found = {} if audit is None else audit.to_dict()
    return _plain(found) if len(found) <= MAX_CLIENT_ROWS else {"all clients": _plain(_mean_of(found))}


def _mean_of(rows: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    names = next(iter(rows.values()))
    return {name: statistics.fmean(row[name] for row in rows.values()) for name in names}


def _rounds(log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a round, of everything logged with its step; the first of several values counts."""
    rows: dict[int, dict[str, Any]] = {}
    for entry in log_history:
        if "train_runtime" in entry:
            break  # the run's summary; an evaluation after it is of the final weights, not of a round
        row = rows.setdefault(entry["step"], {"round": entry["step"]})
        for key, value in entry.items():
            if is_metric(key) or key.startswith("federated/") or key in ("loss", "grad_norm", "learning_rate"):
                row.setdefault(key, _plain(value))
    return [rows[step] for step in sorted(rows)]


def _of_final_weights(trainer: FederatedRun) -> list[dict[str, Any]]:
    """What was logged by the last evaluation of the weights that the run ended with."""
    logged, state = trainer.state.log_history, trainer.state
    summaries = [position for position, entry in enumerate(logged) if "train_runtime" in entry]
    during, after = (logged[: summaries[-1]], logged[summaries[-1] :]) if summaries else (logged, [])
    steps = [entry["step"] for entry in after if any(map(is_metric, entry))]
    if steps:
        return [entry for entry in after if entry["step"] == steps[-1]]
    steps = [entry["step"] for entry in during if any(map(is_metric, entry))]
    if _ends_with_best(trainer):
        steps = [step for step in steps if step == state.best_global_step]
    return [entry for entry in during if steps and entry["step"] == steps[-1]]


def _ends_with_best(trainer: FederatedRun) -> bool:
    """Whether the run is over and its weights are those of the best round."""
    over = any("train_runtime" in entry for entry in trainer.state.log_history)
    return over and trainer.run_args.load_best_model_at_end and trainer.state.best_global_step is not None


def _results(trainer: FederatedRun, entries: list[dict[str, Any]]) -> dict[str, Any]:
    metrics = {key: _plain(value) for entry in entries for key, value in entry.items() if is_metric(key)}
    if not metrics:
        return {}
    best = _ends_with_best(trainer)
    return {
        "round": trainer.state.best_global_step if best else entries[-1]["step"],
        "best_by": trainer.run_args.metric_for_best_model if best else None,
        "metrics": metrics,
    }


def _client_results(entries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        for key, value in entry.items():
            name, _, statistic = key.removeprefix("federated/").rpartition("_")
            if key.startswith("federated/eval_") and statistic in SPREADS and is_metric(name):
                found.setdefault(name, {})[statistic] = _plain(value)
    return found


def _client_metrics(
    client_metrics: Mapping[str, Mapping[str, float]], log_history: list[dict[str, Any]], entries: list[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Each client's metrics, unless they are many, or of other weights than those that the run ended with."""
    spreads = [entry for entry in log_history if _client_results([entry])]
    if len(client_metrics) > MAX_CLIENT_ROWS or not spreads or spreads[-1] not in entries:
        return {}
    return {
        client_id: {key: _plain(value) for key, value in metrics.items() if is_metric(key)}
        for client_id, metrics in client_metrics.items()
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
            versions[package] = "not installed"
    return versions


def _plain(value: Any) -> Any:
    """A value as JSON holds it; numbers that are not finite become words."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):  # also numpy's, which are no Python floats
        return float(value) if math.isfinite(value) else str(float(value))
    return str(value)


def _as_list(value: str | list[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _first(value: str | list[str] | None) -> str | None:
    return next(iter(_as_list(value)), None)
