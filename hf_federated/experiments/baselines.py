"""What a federation is compared with: training on the pooled rows, and every client on its own.

Both start from the same model, train with the plain `transformers.Trainer` under the same arguments (learning rate and
its curve, batch size, optimizer, frozen layers), and are evaluated on the same rows. What differs is the budget:

- *centralized* makes as many passes over the pooled rows as the federation is expected to make over a row:
  `num_rounds × local_epochs × (clients a round / clients)`. With every client in every round these are the
  federation's epochs.
- *local only*: a client makes the passes of one that is sampled in every round: `num_rounds × local_epochs`. That is
  more than it makes in the federation when clients are sampled; the comparison favours the baseline.

Where clients draw a part of their rows in a round (`max_rows_per_round`, `balance`), a pass counts as that part.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments

from hf_federated.adapters import freeze_layers
from hf_federated.clients import ClientSampler, RowLimit
from hf_federated.clients.sampling import at_most
from hf_federated.config import FederatedConfig
from hf_federated.data import FederatedDataset


@dataclass(frozen=True)
class BaselineResult:
    """
    How a baseline did.

    Args:
        name (`str`): `"centralized"` or `"local"`.
        metrics (`dict[str, float]`): Metrics on the evaluation rows; means over clients for `"local"`.
        spread (`dict[str, float]`): Population standard deviation of each metric over clients; empty for one model.
        num_clients (`int`): Models trained.
        num_epochs (`float`): Passes over the rows of each.
        seconds (`float`): Wall-clock time of training and evaluating.
        clients (`dict[str, dict[str, float]]`):
            Of one model, its metrics on each client's evaluation rows, if there are such.
        further_tests (`dict[str, dict[str, float]]`):
            Metrics on further rows, by their name; means over clients for `"local"`.
    """

    name: str
    metrics: dict[str, float]
    spread: dict[str, float]
    num_clients: int
    num_epochs: float
    seconds: float
    clients: dict[str, dict[str, float]] = field(default_factory=dict)
    further_tests: dict[str, dict[str, float]] = field(default_factory=dict)


def share_of_rows_drawn(federation: FederatedConfig, args: TrainingArguments, num_rows: Mapping[str, int]) -> float:
    """
    Which part of the rows of a round's cohort is trained on, over all rounds of the run.

    Args:
        federation ([`FederatedConfig`]): With `num_rounds` resolved.
        args (`transformers.TrainingArguments`): For the seed, if the federation has none of its own.
        num_rows (`Mapping[str, int]`): Rows of each client.
    """
    seed = args.seed if federation.federation_seed is None else federation.federation_seed
    sampler = ClientSampler(list(num_rows), federation.clients_per_round, seed)
    limit = RowLimit(num_rows, federation.balance, federation.max_rows_per_round)
    drawn = total = 0
    for round in range(federation.num_rounds or 1):
        cohort = sampler(round)
        max_rows = limit(cohort)
        drawn += sum(at_most(num_rows[client_id], max_rows) for client_id in cohort)
        total += sum(num_rows[client_id] for client_id in cohort)
    return drawn / total


def passes_over_a_client(
    federation: FederatedConfig, args: TrainingArguments, rows_a_client: float, share_drawn: float = 1.0
) -> float:
    """
    Passes over its rows of a client that is sampled in every round.

    Args:
        federation ([`FederatedConfig`]): With `num_rounds` resolved.
        args (`transformers.TrainingArguments`): For the batch size, if a round is counted in `local_steps`.
        rows_a_client (`float`): Mean number of rows of a client.
        share_drawn (`float`, *optional*, defaults to 1.0): The part of its rows that it draws in a round.
    """
    assert federation.num_rounds is not None, "num_rounds is resolved when a FederatedTrainer is made"
    if federation.local_steps is None:
        return federation.num_rounds * federation.local_epochs * share_drawn
    rows_a_round = federation.local_steps * args.train_batch_size * args.gradient_accumulation_steps
    return federation.num_rounds * rows_a_round / rows_a_client


class Baselines:
    """
    Trains the baselines of a federation.

    Args:
        model (`transformers.PreTrainedModel`): The model that all start from. It is copied, not trained.
        args (`transformers.TrainingArguments`): The federation's arguments.
        federation ([`FederatedConfig`]): With `num_rounds` resolved.
        clients ([`FederatedDataset`]): The training clients.
        eval_dataset (`datasets.Dataset`): The rows to evaluate on.
        trainer_class (`type`, *optional*, defaults to `transformers.Trainer`): The plain trainer.
        eval_clients (`Mapping[str, Dataset]`, *optional*): By client, rows to evaluate the centralized model on too.
        further_tests (`Mapping[str, Dataset]`, *optional*): By name, further rows to evaluate every model on.
        trainer_kwargs (*optional*): Passed on to it (`data_collator`, `compute_metrics`, …).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        federation: FederatedConfig,
        clients: FederatedDataset,
        eval_dataset: Dataset,
        trainer_class: type[Trainer] = Trainer,
        eval_clients: Mapping[str, Dataset] | None = None,
        further_tests: Mapping[str, Dataset] | None = None,
        **trainer_kwargs: Any,
    ) -> None:
        self.model = copy.deepcopy(model)
        if federation.freeze is not None:
            freeze_layers(self.model, federation.freeze)
        self.args = args
        self.clients = clients
        self.eval_dataset = eval_dataset
        self.eval_clients = eval_clients or {}
        self.further_tests = further_tests or {}
        self.trainer_class = trainer_class
        self.trainer_kwargs = trainer_kwargs
        # A recipe reads no streams, so each client has a number of rows.
        num_rows = {client_id: rows or 0 for client_id, rows in clients.num_rows.items()}
        rows_a_client = float(np.mean(list(num_rows.values())))
        share_drawn = share_of_rows_drawn(federation, args, num_rows)
        self.local_epochs = passes_over_a_client(federation, args, rows_a_client, share_drawn)
        sampled = ClientSampler(list(clients), federation.clients_per_round, seed=0).num_sampled
        self.centralized_epochs = self.local_epochs * sampled / len(clients)

    def centralized(self) -> BaselineResult:
        """Trains one model on the rows of all clients."""
        start = time.perf_counter()
        trainer = self._fit("centralized", self.clients.to_dataset(), self.centralized_epochs, show_progress=True)
        metrics = _evaluate(trainer, self.eval_dataset)
        clients = {client_id: _evaluate(trainer, rows) for client_id, rows in self.eval_clients.items()}
        further = self._further(trainer)
        seconds = time.perf_counter() - start
        return BaselineResult("centralized", metrics, {}, 1, self.centralized_epochs, seconds, clients, further)

    def local(
        self, num_clients: int | None = None, on_client: Callable[[str, dict[str, float]], None] | None = None
    ) -> BaselineResult:
        """
        Trains a model for each client on nothing but its own rows.

        Args:
            num_clients (`int`, *optional*): How many clients, drawn with the run's seed. All by default.
            on_client (`Callable`, *optional*): Called with a client's id and metrics once it is evaluated.
        """
        start = time.perf_counter()
        ids = list(self.clients)
        if num_clients is not None and num_clients < len(ids):
            drawn = np.random.default_rng(self.args.seed).choice(len(ids), num_clients, replace=False)
            ids = [ids[position] for position in sorted(drawn)]
        results, further = [], []
        for client_id in ids:
            trainer = self._fit("local", self.clients[client_id], self.local_epochs, show_progress=False)
            results.append(_evaluate(trainer, self.eval_dataset))
            further.append(self._further(trainer))
            if on_client is not None:
                on_client(client_id, results[-1])
        spread = {name: float(np.std([result[name] for result in results])) for name in results[0]}
        means_of_further = {name: _means([result[name] for result in further]) for name in self.further_tests}
        seconds = time.perf_counter() - start
        means = _means(results)
        return BaselineResult(
            "local", means, spread, len(ids), self.local_epochs, seconds, further_tests=means_of_further
        )

    def _further(self, trainer: Trainer) -> dict[str, dict[str, float]]:
        return {name: _evaluate(trainer, rows) for name, rows in self.further_tests.items()}

    def _fit(self, name: str, rows: Dataset, num_epochs: float, show_progress: bool) -> Trainer:
        """The trainer of a copy of the model, trained on `rows`."""
        quiet = self.args.disable_tqdm or not show_progress
        args = dataclasses.replace(
            self.args,
            output_dir=str(Path(self.args.output_dir or "trainer_output") / "baselines" / name),
            num_train_epochs=num_epochs,
            eval_strategy="no",
            save_strategy="no",
            logging_strategy="no",
            load_best_model_at_end=False,
            push_to_hub=False,
            report_to="none",
            disable_tqdm=quiet,
        )
        trainer = self.trainer_class(
            model=copy.deepcopy(self.model), args=args, train_dataset=rows, **self.trainer_kwargs
        )
        if quiet:
            trainer.remove_callback(PrinterCallback)
        trainer.train()
        return trainer


def _evaluate(trainer: Trainer, rows: Dataset) -> dict[str, float]:
    """A trainer's metrics on rows, without the `eval_` prefix."""
    return {
        key.removeprefix("eval_"): value
        for key, value in trainer.evaluate(rows).items()
        if not key.endswith(("_runtime", "_per_second")) and key != "epoch"
    }


def _means(results: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([result[name] for result in results])) for name in results[0]}
