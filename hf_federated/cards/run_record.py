"""`RunRecord`: the contents of the card of a federated run, as plain JSON values.

The record contains no client ids if the run has more than [`MAX_LISTED_CLIENTS`] clients.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from datasets import Dataset
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from ..adapters import Exchange
from ..audits import PseudoSampleAudit
from ..config import FederatedConfig
from ..data import FederatedDataset
from ..messages import ANNOUNCED_VALUES, Disclosure
from ..messages.ledger import Ledger
from ..reporting.metric_names import is_metric
from ..secure_aggregation import SecureAggregation
from ..utils.algorithm_names import SECURE_AGGREGATION_NAMES
from .card_record import CardArguments, CardRecord, CardRun, common_fields
from .facts import DataFacts
from .log_history import final_weight_logs, logs_by_step, to_json_value, training_seconds


MAX_LISTED_CLIENTS = 20

STATISTICS = ("mean", "worst", "best", "spread")


class FederatedRun(CardRun, Protocol):
    """Trainer attributes that the card of a federated run reads."""

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
    engine: Any
    num_dropped_examples: int | None

    def prepares_data(self) -> bool:
        """Whether the constructor of the trainer prepares its datasets."""


@dataclass(frozen=True)
class RunRecord(CardRecord):
    """
    Record of a federated run. Its arguments are those of [`CardRecord`] and the following.

    Args:
        federation (`dict[str, Any]`):
            The fields of `FederatedConfig`, with the class of the algorithm and its non-default settings, the seeds
            and the number of completed rounds.
        exchanged (`dict[str, Any]`):
            The contents of a message with parameters, and the total bytes of the run.
        rounds (`list[dict[str, Any]]`):
            The logged values of each round.
        client_results (`dict[str, dict[str, float]]`):
            Mean, worst, best and spread over clients of each metric.
        client_metrics (`dict[str, dict[str, float]]`):
            Metrics of each client, for up to 20 clients.
        public_data (`DataFacts`, *optional*):
            The public dataset whose predictions were exchanged.
        pseudo_samples (`dict[str, dict[str, float]]`):
            Results of a [`PseudoSampleAudit`] for each client.

    Example:

    ```python
    >>> from hf_federated.cards import RunRecord, render
    >>> record = RunRecord.from_trainer(trainer)  # doctest: +SKIP
    >>> record.save("run.json")  # doctest: +SKIP
    >>> print(render(RunRecord.load("run.json")))  # doctest: +SKIP

    ```
    """

    federation: dict[str, Any]
    exchanged: dict[str, Any]
    rounds: list[dict[str, Any]]
    client_results: dict[str, dict[str, Any]]
    client_metrics: dict[str, dict[str, Any]]
    public_data: DataFacts | None = None
    pseudo_samples: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def from_trainer(cls, trainer: FederatedRun, *args: Any, **kwargs: Any) -> RunRecord:
        """
        Create the record of a trainer's run.

        Args:
            trainer (`FederatedRun`):
                A `FederatedTrainer`. The record contains the values that were logged so far, also before or during
                training.
            args, kwargs:
                Arguments of `Trainer.create_model_card`. See [`CardArguments`].
        """
        log_history, final_logs = trainer.state.log_history, final_weight_logs(trainer)
        # For a federated evaluation set, `eval_dataset` holds the pooled examples of all clients. Clients on other
        # machines have their own evaluation examples.
        eval_clients = trainer.eval_clients
        uses_clients = eval_clients is not None and (trainer.eval_dataset is None or not eval_clients.is_remote)
        eval_data = eval_clients if uses_clients else trainer.eval_dataset
        common = common_fields(trainer, eval_data, "round", CardArguments(*args, **kwargs))
        common["train_data"] = replace(common["train_data"], num_dropped=trainer.num_dropped_examples)
        return cls(
            **common,
            federation=_federation(trainer),
            exchanged=_exchanged(trainer),
            rounds=logs_by_step(log_history, "round", ("loss", "grad_norm", "learning_rate")),
            client_results=_client_results(final_logs),
            client_metrics=_client_metrics(trainer.client_metrics, log_history, final_logs),
            public_data=None if trainer.public_dataset is None else DataFacts.from_data(trainer.public_dataset, None),
            pseudo_samples=_pseudo_samples(trainer),
        )


def _federation(trainer: FederatedRun) -> dict[str, Any]:
    log_history, distillation = trainer.state.log_history, trainer.distillation
    seed = trainer.federation.federation_seed
    config = trainer.federation.to_dict()
    if isinstance(limits := config["max_examples_per_client"], dict):
        # The number of examples of each client is not for the readers of a model.
        config["max_examples_per_client"] = f"one number for each of {len(limits)} clients"
    failed = [entry["federated/num_failed"] for entry in log_history if "federated/num_failed" in entry]
    return {
        **{key: to_json_value(value) for key, value in config.items()},
        "aggregation": type(trainer.aggregation).__name__,
        "aggregation_kwargs": to_json_value(trainer.aggregation.non_default_settings()),
        "distillation": None if distillation is None else type(distillation).__name__,
        "distillation_kwargs": {} if distillation is None else to_json_value(distillation.non_default_settings()),
        "federation_seed": trainer.run_args.seed if seed is None else seed,
        "postprocessors": [
            {
                "name": type(step).__name__,
                "settings": to_json_value({k: v for k, v in vars(step).items() if k[0] != "_"}),
            }
            for step in trainer.postprocessors
        ],
        "num_clients": len(trainer.clients),
        "num_rounds_run": trainer.state.global_step,
        # the log has the failures of each round; if a round was not logged, the total is unknown
        "num_failed": int(sum(failed)) if len(failed) == trainer.state.global_step else None,
        "seconds": training_seconds(log_history),
    }


def _exchanged(trainer: FederatedRun) -> dict[str, Any]:
    exchange, distillation = trainer.exchange, trainer.distillation
    returned = trainer.aggregation.exchanges_parameters
    sent = returned or (distillation is not None and distillation.sends_parameters)
    disclosures = trainer.aggregation.disclosures if distillation is None else distillation.disclosures
    secure = _secure_aggregation(trainer)
    if secure is not None:
        disclosures = tuple(replace(item, value=f"sum over the clients: {item.value}") for item in disclosures)
    if returned:
        disclosures = (*disclosures, *_vocabulary(trainer.model, exchange, is_summed=secure is not None))
    return {
        "kind": exchange.kind,
        "parameters_sent": sent,
        "parameters_returned": returned,
        "update_content": trainer.aggregation.update_content,
        "disclosures": [dataclasses.asdict(item) for item in disclosures],
        "secure_aggregation": secure,
        "announced": _announced(trainer),
        "compared_settings": list(trainer.engine.compared_settings),
        "public_passes": 1 if distillation is None else distillation.passes_per_round,
        "num_tensors": len(exchange.names),
        "num_values": exchange.num_values,
        "num_local_values": exchange.num_local_values,
        "dtypes": sorted({str(value.dtype).removeprefix("torch.") for value in exchange.parameters.values()}),
        "bytes_down": trainer.ledger.bytes_down,
        "bytes_up": trainer.ledger.bytes_up,
    }


def _announced(trainer: FederatedRun) -> list[str]:
    """Return what a client on another machine announces when it joins."""
    if trainer.engine.remote_clients is None:
        return []
    if trainer.federation.secure_aggregation is not None:
        return [ANNOUNCED_VALUES["examples_per_step"]]
    is_announced = {
        "class_counts": trainer.distillation is not None and trainer.distillation.reports_class_counts,
        "num_dropped_examples": trainer.prepares_data(),
    }
    return [value for field, value in ANNOUNCED_VALUES.items() if is_announced.get(field, True)]


def _secure_aggregation(trainer: FederatedRun) -> dict[str, Any] | None:
    """Return against whom the protocol of a run protects, and how."""
    config = trainer.federation
    if config.secure_aggregation is None:
        return None
    protocol = SECURE_AGGREGATION_NAMES.build(
        config.secure_aggregation, config.secure_aggregation_kwargs, SecureAggregation
    )
    return {
        "title": protocol.title or type(protocol).__name__,
        "masks": protocol.masks,
        "pins": protocol.pins,
        "bits": protocol.bits,
        "min_survivors": protocol.min_survivors,
        "num_colluding": protocol.settings().get("num_colluding", 0),
        "is_simulated": trainer.engine.remote_clients is None,
    }


def _vocabulary(model: Any, exchange: Exchange, is_summed: bool = False) -> tuple[Disclosure, ...]:
    """Return what the change of the word embeddings reveals, if clients train and send them."""
    table = model.get_input_embeddings() if isinstance(model, (PreTrainedModel, PeftModel)) else None
    if not isinstance(table, nn.Embedding) or not any(table.weight is value for value in exchange.trainable.values()):
        return ()
    head = model.get_output_embeddings()
    share, rows = "the exact set of tokens", "the changed rows of the word embeddings"
    if head is not None and head.weight is table.weight:
        share, rows = "most of the tokens", "the rows of the word embeddings that changed most"
    if is_summed:
        return (Disclosure(f"{share} in the examples of all clients of a sum, read from {rows}", "round"),)
    return (Disclosure(f"{share} in its examples, read from {rows}", "client"),)


def _pseudo_samples(trainer: FederatedRun) -> dict[str, dict[str, Any]]:
    callbacks = trainer.callback_handler.callbacks
    audit = next((callback for callback in callbacks if isinstance(callback, PseudoSampleAudit)), None)
    overlaps = {} if audit is None else audit.to_dict()
    if len(overlaps) > MAX_LISTED_CLIENTS:
        names = next(iter(overlaps.values()))
        means = {name: statistics.fmean(of_client[name] for of_client in overlaps.values()) for name in names}
        return {"all clients": to_json_value(means)}
    return to_json_value(overlaps)


def _client_results(entries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    for entry in entries:
        for key, value in entry.items():
            name, _, statistic = key.removeprefix("federated/").rpartition("_")
            if key.startswith("federated/eval_") and statistic in STATISTICS and is_metric(name):
                results.setdefault(name, {})[statistic] = to_json_value(value)
    return results


def _client_metrics(
    client_metrics: Mapping[str, Mapping[str, float]], log_history: list[dict[str, Any]], entries: list[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return each client's metrics; nothing for many clients, or if the metrics are not of the final weights."""
    evaluations = [entry for entry in log_history if _client_results([entry])]
    if len(client_metrics) > MAX_LISTED_CLIENTS or not evaluations or evaluations[-1] not in entries:
        return {}
    return {
        client_id: {key: to_json_value(value) for key, value in metrics.items() if is_metric(key)}
        for client_id, metrics in client_metrics.items()
    }
