"""Baselines of a federation: centralized training on the pooled data, and local training of every client alone.

Both baselines start from the same model, use the plain `transformers.Trainer` with the same training arguments
(learning rate and schedule, batch size, optimizer, frozen layers), and are evaluated on the same examples. They differ
from the federation, and from each other, in the number of epochs:

- *centralized* trains for the expected number of epochs of an example in the federation:
  `num_rounds × local_epochs × (clients per round / clients)`. If every client participates in every round, this is the
  number of epochs of the federation.
- *local* trains each client for the number of epochs of a client that participates in every round:
  `num_rounds × local_epochs`. If clients are sampled, this is more than a client trains in the federation, so the
  comparison favors the baseline.

If clients use only a part of their examples in a round (`max_rows_per_round`, `balance`), the number of epochs is
scaled by this part.
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
from hf_federated.clients.sampling import limit_examples
from hf_federated.config import FederatedConfig
from hf_federated.data import FederatedDataset
from hf_federated.experiments.predictions import MAIN_TEST
from hf_federated.experiments.scoring import Scorer


# Training arguments of a run that is not evaluated, saved or reported during its training.
WITHOUT_OUTPUTS: dict[str, Any] = {
    "eval_strategy": "no",
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "load_best_model_at_end": False,
    "push_to_hub": False,
}


@dataclass(frozen=True)
class BaselineResult:
    """
    Results of a baseline.

    Args:
        name (`str`): `"centralized"` or `"local"`.
        metrics (`dict[str, float]`): Metrics on the evaluation dataset. For `"local"`, means over clients.
        spread (`dict[str, float]`): Population standard deviation of each metric over clients. Empty for
            `"centralized"`.
        num_clients (`int`): Number of trained models.
        num_epochs (`float`): Number of epochs of each model.
        seconds (`float`): Wall-clock time of training and evaluation, in seconds.
        clients (`dict[str, dict[str, float]]`): For `"centralized"`, metrics on the evaluation examples of each
            client, if these are given.
        further_tests (`dict[str, dict[str, float]]`): Metrics on each additional test split, by name. For `"local"`,
            means over clients.
    """

    name: str
    metrics: dict[str, float]
    spread: dict[str, float]
    num_clients: int
    num_epochs: float
    seconds: float
    clients: dict[str, dict[str, float]] = field(default_factory=dict)
    further_tests: dict[str, dict[str, float]] = field(default_factory=dict)


def fraction_of_examples_drawn(
    federation: FederatedConfig, args: TrainingArguments, num_examples: Mapping[str, int]
) -> float:
    """
    Fraction of the examples of the sampled cohorts that is used for training, over all rounds of a run.

    Args:
        federation ([`FederatedConfig`]): The configuration, with `num_rounds` resolved.
        args (`transformers.TrainingArguments`): Provides the seed if `federation.federation_seed` is `None`.
        num_examples (`Mapping[str, int]`): Number of examples of each client.
    """
    seed = args.seed if federation.federation_seed is None else federation.federation_seed
    sampler = ClientSampler(list(num_examples), federation.clients_per_round, seed)
    limit = RowLimit(num_examples, federation.balance, federation.max_rows_per_round)
    num_drawn = num_total = 0
    for round in range(federation.num_rounds or 1):
        cohort = sampler(round)
        max_examples = limit(cohort)
        num_drawn += sum(limit_examples(num_examples[client_id], max_examples) for client_id in cohort)
        num_total += sum(num_examples[client_id] for client_id in cohort)
    return num_drawn / num_total


def expected_client_epochs(
    federation: FederatedConfig, args: TrainingArguments, examples_per_client: float, fraction_drawn: float = 1.0
) -> float:
    """
    Number of epochs of a client that participates in every round.

    Args:
        federation ([`FederatedConfig`]): The configuration, with `num_rounds` resolved.
        args (`transformers.TrainingArguments`): Provides the batch size if the length of a round is set by
            `local_steps`.
        examples_per_client (`float`): Mean number of examples of a client.
        fraction_drawn (`float`, *optional*, defaults to 1.0): Fraction of its examples that a client uses in a round.
    """
    num_rounds = federation.num_rounds or 1
    if federation.local_steps is None:
        return num_rounds * federation.local_epochs * fraction_drawn
    examples_per_round = federation.local_steps * args.train_batch_size * args.gradient_accumulation_steps
    return num_rounds * examples_per_round / examples_per_client


class Baselines:
    """
    Trains the baselines of a federation.

    Args:
        model (`transformers.PreTrainedModel`): The initial model of all baselines. It is copied and not modified.
        args (`transformers.TrainingArguments`): The training arguments of the federation.
        federation ([`FederatedConfig`]): The configuration, with `num_rounds` resolved.
        clients ([`FederatedDataset`]): The training clients.
        eval_dataset (`datasets.Dataset`): The evaluation dataset.
        trainer_class (`type`, *optional*, defaults to `transformers.Trainer`): Class of the trainer.
        eval_clients (`Mapping[str, Dataset]`, *optional*): Evaluation examples by client. The centralized model is
            evaluated on each client.
        further_tests (`Mapping[str, Dataset]`, *optional*): Additional test splits by name. All models are evaluated
            on each split.
        trainer_kwargs (*optional*): Additional arguments of `trainer_class` (`data_collator`, `compute_metrics`, …).
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
        # Recipes do not load streaming datasets, so the number of examples of each client is known.
        num_examples = {client_id: length or 0 for client_id, length in clients.num_rows.items()}
        examples_per_client = float(np.mean(list(num_examples.values())))
        fraction_drawn = fraction_of_examples_drawn(federation, args, num_examples)
        self.local_epochs = expected_client_epochs(federation, args, examples_per_client, fraction_drawn)
        num_sampled = ClientSampler(list(clients), federation.clients_per_round, seed=0).num_sampled
        self.centralized_epochs = self.local_epochs * num_sampled / len(clients)

    def centralized(self, scorer: Scorer | None = None) -> BaselineResult:
        """
        Train one model on the examples of all clients.

        Args:
            scorer ([`~hf_federated.experiments.scoring.Scorer`], *optional*): Keeps the predictions for test examples.
        """
        start = time.perf_counter()
        trainer = self._fit("centralized", self.clients.to_dataset(), self.centralized_epochs, show_progress=True)
        metrics = self._evaluate(trainer, scorer)
        clients = {client_id: metrics_of(trainer.evaluate(rows)) for client_id, rows in self.eval_clients.items()}
        further_tests = self._evaluate_further_tests(trainer, scorer)
        seconds = time.perf_counter() - start
        return BaselineResult("centralized", metrics, {}, 1, self.centralized_epochs, seconds, clients, further_tests)

    def local(
        self,
        num_clients: int | None = None,
        on_client: Callable[[str, dict[str, float]], None] | None = None,
        scorer: Scorer | None = None,
    ) -> BaselineResult:
        """
        Train one model per client, on the examples of this client only.

        Args:
            num_clients (`int`, *optional*): Number of clients, sampled with `args.seed`. Defaults to all clients.
            on_client (`Callable`, *optional*): Called with the id and the metrics of each client after its evaluation.
            scorer ([`~hf_federated.experiments.scoring.Scorer`], *optional*): Keeps the predictions for test examples.
        """
        start = time.perf_counter()
        ids = list(self.clients)
        if num_clients is not None and num_clients < len(ids):
            sampled = np.random.default_rng(self.args.seed).choice(len(ids), num_clients, replace=False)
            ids = [ids[position] for position in sorted(sampled)]
        results, further_results = [], []
        for client_id in ids:
            trainer = self._fit("local", self.clients[client_id], self.local_epochs, show_progress=False)
            results.append(self._evaluate(trainer, scorer))
            further_results.append(self._evaluate_further_tests(trainer, scorer))
            if on_client is not None:
                on_client(client_id, results[-1])
        spread = {name: float(np.std([result[name] for result in results])) for name in results[0]}
        further_means = {name: _means([result[name] for result in further_results]) for name in self.further_tests}
        seconds = time.perf_counter() - start
        return BaselineResult(
            "local", _means(results), spread, len(ids), self.local_epochs, seconds, further_tests=further_means
        )

    def _evaluate(
        self, trainer: Trainer, scorer: Scorer | None, split: str = MAIN_TEST, dataset: Dataset | None = None
    ) -> dict[str, float]:
        dataset = self.eval_dataset if dataset is None else dataset
        return metrics_of(trainer.evaluate(dataset) if scorer is None else scorer.evaluate(trainer, split, dataset))

    def _evaluate_further_tests(self, trainer: Trainer, scorer: Scorer | None) -> dict[str, dict[str, float]]:
        return {name: self._evaluate(trainer, scorer, name, dataset) for name, dataset in self.further_tests.items()}

    def _fit(self, name: str, dataset: Dataset, num_epochs: float, show_progress: bool) -> Trainer:
        """Train a copy of the model on `dataset` and return its trainer."""
        quiet = self.args.disable_tqdm or not show_progress
        args = dataclasses.replace(
            self.args,
            output_dir=str(Path(self.args.output_dir or "trainer_output") / "baselines" / name),
            num_train_epochs=num_epochs,
            max_steps=-1,
            disable_tqdm=quiet,
            **WITHOUT_OUTPUTS,
        )
        trainer = self.trainer_class(
            model=copy.deepcopy(self.model), args=args, train_dataset=dataset, **self.trainer_kwargs
        )
        if quiet:
            trainer.remove_callback(PrinterCallback)
        trainer.train()
        return trainer


def metrics_of(evaluated: dict[str, float]) -> dict[str, float]:
    """The metrics returned by `evaluate`, without durations and without the prefix `eval_`."""
    return {
        name.removeprefix("eval_"): value
        for name, value in evaluated.items()
        if name.startswith("eval_") and not name.endswith(("_runtime", "_per_second"))
    }


def _means(results: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([result[name] for result in results])) for name in results[0]}
