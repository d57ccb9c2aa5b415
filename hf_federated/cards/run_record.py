"""`RunRecord`: everything a card says about a federated run, as plain JSON values.

Above [`MAX_CLIENT_ROWS`] clients it holds no client ids.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from datasets import Dataset

from ..adapters import Exchange
from ..audits import PseudoSampleAudit
from ..config import FederatedConfig
from ..data import FederatedDataset
from ..messages.ledger import Ledger
from .facts import DataFacts
from .logged import is_metric, of_final_weights, plain, rows_by_step, training_seconds
from .record import CardArguments, CardRecord, CardRun, common_fields


MAX_CLIENT_ROWS = 20

SPREADS = ("mean", "worst", "best", "spread")


class FederatedRun(CardRun, Protocol):
    """What a card reads of a trainer."""

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


@dataclass(frozen=True)
class RunRecord(CardRecord):
    """
    A federated run, as a card tells it. The arguments of [`CardRecord`], and

    Args:
        federation (`dict[str, Any]`): The fields of `FederatedConfig`, with the algorithm's class and its non-default
            settings, the seeds, and how many rounds were run.
        exchanged (`dict[str, Any]`): What one message of parameters holds, and all bytes of the run.
        rounds (`list[dict[str, Any]]`): What was logged of each round.
        client_results (`dict[str, dict[str, float]]`): Metric to mean, worst, best and spread over clients.
        client_metrics (`dict[str, dict[str, float]]`): Client id to metrics, up to 20 clients.
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
        Reads a trainer.

        Args:
            trainer (`FederatedRun`): A `FederatedTrainer`, trained or not: the record says what was logged so far.
            args, kwargs: Those of `Trainer.create_model_card`: see [`CardArguments`].
        """
        logged, final = trainer.state.log_history, of_final_weights(trainer)
        # of a federated evaluation set, `eval_dataset` is the pooled rows
        eval_data = trainer.eval_dataset if trainer.eval_clients is None else trainer.eval_clients
        return cls(
            **common_fields(trainer, eval_data, "round", CardArguments(*args, **kwargs)),
            federation=_federation(trainer),
            exchanged=_exchanged(trainer),
            rounds=rows_by_step(logged, "round", ("loss", "grad_norm", "learning_rate")),
            client_results=_client_results(final),
            client_metrics=_client_metrics(trainer.client_metrics, logged, final),
            public_data=None if trainer.public_dataset is None else DataFacts.of(trainer.public_dataset, None),
            pseudo_samples=_pseudo_samples(trainer),
        )


def _federation(trainer: FederatedRun) -> dict[str, Any]:
    logged, distillation = trainer.state.log_history, trainer.distillation
    seed = trainer.federation.federation_seed
    failed = [entry["federated/num_failed"] for entry in logged if "federated/num_failed" in entry]
    return {
        **{key: plain(value) for key, value in trainer.federation.to_dict().items()},
        "aggregation": type(trainer.aggregation).__name__,
        "aggregation_kwargs": plain(trainer.aggregation.non_default_settings()),
        "distillation": None if distillation is None else type(distillation).__name__,
        "distillation_kwargs": {} if distillation is None else plain(distillation.non_default_settings()),
        "federation_seed": trainer.run_args.seed if seed is None else seed,
        "postprocessors": [
            {"name": type(step).__name__, "settings": plain({k: v for k, v in vars(step).items() if k[0] != "_"})}
            for step in trainer.postprocessors
        ],
        "num_clients": len(trainer.clients),
        "num_rounds_run": trainer.state.global_step,
        # the log counts failures, so that a round which was not logged leaves the number unknown
        "num_failed": int(sum(failed)) if len(failed) == trainer.state.global_step else None,
        "seconds": training_seconds(logged),
    }


def _exchanged(trainer: FederatedRun) -> dict[str, Any]:
    exchange, distillation = trainer.exchange, trainer.distillation
    returned = trainer.aggregation.exchanges_parameters
    sent = returned or (distillation is not None and distillation.sends_parameters)
    return {
        "kind": exchange.kind,
        "parameters_sent": sent,
        "parameters_returned": returned,
        "sends_back": trainer.aggregation.sends_back,
        "beside": "" if distillation is None else distillation.sent_beside,
        "public_passes": 1 if distillation is None else distillation.public_passes,
        "told_outside": "" if distillation is None else distillation.told_outside,
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
    return plain(found) if len(found) <= MAX_CLIENT_ROWS else {"all clients": plain(_mean_of(found))}


def _mean_of(rows: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    names = next(iter(rows.values()))
    return {name: statistics.fmean(row[name] for row in rows.values()) for name in names}


def _client_results(entries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        for key, value in entry.items():
            name, _, statistic = key.removeprefix("federated/").rpartition("_")
            if key.startswith("federated/eval_") and statistic in SPREADS and is_metric(name):
                found.setdefault(name, {})[statistic] = plain(value)
    return found


def _client_metrics(
    client_metrics: Mapping[str, Mapping[str, float]], log_history: list[dict[str, Any]], entries: list[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Each client's metrics, unless they are many, or of other weights than those that the run ended with."""
    spreads = [entry for entry in log_history if _client_results([entry])]
    if len(client_metrics) > MAX_CLIENT_ROWS or not spreads or spreads[-1] not in entries:
        return {}
    return {
        client_id: {key: plain(value) for key, value in metrics.items() if is_metric(key)}
        for client_id, metrics in client_metrics.items()
    }
