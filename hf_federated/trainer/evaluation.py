"""Evaluation and prediction: the overrides of a federated trainer, and evaluation over ranks.

With `parallelism="clients"`, each rank predicts a share of the batches, and all ranks compute the metrics.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import send_to_device
from transformers import Trainer
from transformers.trainer_utils import has_length

from ..clients import fresh_collator
from ..data import FederatedDataset
from ..distributed.process_group import ProcessGroup
from .base import RoleMixin
from .federation import Federation


# Batches that each rank predicts between two exchanges of predictions.
BATCHES_PER_EXCHANGE = 4
# If a trainer class overrides one of these methods, every rank predicts all batches, because the override may do more
# than predict.
PREDICTION_METHODS = ("evaluation_loop", "prediction_step", "compute_loss")
# Packages whose overrides only predict.
KNOWN_PACKAGES = ("transformers", "hf_federated")


class EvaluationMixin(RoleMixin):
    """Overrides of the methods that evaluate and predict."""

    data_collator: Any

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """
        Build the evaluation data loader of the parent class.

        With several clients, a collator with a seed restarts its random generator in each evaluation.
        """
        # A federation of one client equals `Trainer`, whose evaluations continue the random generator of training.
        if self._setup is None or len(self.clients) == 1:
            return super().get_eval_dataloader(*args, **kwargs)
        user_collator, self.data_collator = self.data_collator, fresh_collator(self.data_collator)
        try:
            return super().get_eval_dataloader(*args, **kwargs)
        finally:
            self.data_collator = user_collator

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """
        Evaluate as `Trainer.evaluate`, and with `evaluate_clients=True` also each client on its own examples.

        Args:
            eval_dataset (`Dataset` or [`FederatedDataset`], *optional*): As in `Trainer.evaluate`. A federated dataset
                is evaluated as one dataset of the examples of all clients.
            args, kwargs: Further arguments of the method of the parent class: `ignore_keys` and `metric_key_prefix` of
                `Trainer`, `max_length` of `Seq2SeqTrainer`.

        Returns:
            `dict[str, float]`: The metrics of the parent class over all examples. With `evaluate_clients=True`, also
            `federated/<metric>_mean`, `_worst`, `_best` and `_spread` (population standard deviation) over the metrics
            of the clients. The metrics of each client are in `client_metrics`.
        """
        if isinstance(eval_dataset, FederatedDataset):
            eval_dataset = eval_dataset.pooled_examples()
        setup = self._setup
        if setup is None or self.local_training is not None:
            return super().evaluate(eval_dataset, *args, **kwargs)
        with setup.processes.fail_together(), setup.independent():
            metrics = super().evaluate(eval_dataset, *args, **kwargs)
            if eval_dataset is not None or not setup.config.evaluate_clients:
                return metrics
            if self._running is None:
                self._running = Federation(setup, self._user_args, None)
            spread = self._running.evaluate_clients()
            self.log(dict(spread))
            return {**metrics, **spread}

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """
        Predict as `Trainer.predict`.

        With `parallelism="clients"` the processes share the batches, and every process returns all predictions.
        """
        if self._setup is None:
            return super().predict(*args, **kwargs)
        with self._setup.independent():
            return super().predict(*args, **kwargs)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """
        Run the evaluation loop of the parent class.

        With `parallelism="clients"` each process predicts a share of the batches, and every process computes the
        metrics from all predictions.
        """
        setup = self._setup
        if setup is None:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        with setup.independent(as_main=True):
            if not setup.spreads_clients or self.local_training is not None or not can_spread(self, dataloader):
                return super().evaluation_loop(dataloader, *args, **kwargs)
            with spread_over_ranks(self, setup.processes, dataloader) as spread:
                return super().evaluation_loop(spread, *args, **kwargs)


def can_spread(trainer: Trainer, dataloader: Any) -> bool:
    """
    Whether ranks may share the batches of an evaluation and get the results of one process.

    Args:
        trainer (`transformers.Trainer`): The federated trainer.
        dataloader (`Any`): The evaluation's batches, the same in all ranks.
    """
    if not has_length(dataloader) or len(dataloader) < 2:
        return False
    own = [base for base in type(trainer).__mro__ if base.__module__.partition(".")[0] not in KNOWN_PACKAGES]
    if any(method in vars(base) for base in own for method in PREDICTION_METHODS):
        return False
    # Sampled generations depend on all earlier draws of the random generator.
    samples = vars(trainer).get("_gen_kwargs", {}).get("do_sample")
    if samples is None and getattr(trainer.args, "predict_with_generate", False):
        samples = trainer.model.generation_config.do_sample
    return not samples


class SpreadLoader(DataLoaderStateMixin):
    """
    A data loader that reads ahead, so that ranks can predict several batches at the same time.

    The trainer reads from the gradient state of accelerate whether a batch is the last. The wrapped data loader
    reaches its end too early, so this data loader replaces it in the gradient state.

    Args:
        dataloader (`Any`): The evaluation's batches, the same in all ranks.
        window (`int`): Number of batches to read ahead.
        gradient_state (`accelerate.state.GradientState`): The gradient state of the trainer's accelerator.
    """

    def __init__(self, dataloader: Any, window: int, gradient_state: GradientState) -> None:
        self._dataloader = dataloader
        self._window_size = window
        self.gradient_state = gradient_state
        self.window: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._dataloader)
        num_left = len(self)
        while window := list(islice(batches, self._window_size)):
            self.window = window
            self.begin()
            for batch in window:
                num_left -= 1
                self.end_of_dataloader = num_left == 0
                yield batch
            self.end()

    def __len__(self) -> int:
        return len(self._dataloader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataloader, name)


class SpreadPredictions:
    """
    Replacement of `prediction_step` that predicts this rank's share of a window and gathers the predictions.

    Args:
        trainer (`transformers.Trainer`): The federated trainer.
        processes ([`~hf_federated.distributed.process_group.ProcessGroup`]): The ranks.
        loader ([`SpreadLoader`]): The evaluation's batches.
    """

    def __init__(self, trainer: Trainer, processes: ProcessGroup, loader: SpreadLoader) -> None:
        self._trainer = trainer
        self._processes = processes
        self._loader = loader
        self._predict = trainer.prediction_step
        self._preprocess = trainer.preprocess_logits_for_metrics
        self._predictions: deque[Any] = deque()

    def __call__(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """The loss, logits and labels of the next batch, as `Trainer.prediction_step` returns them."""
        if not self._predictions:
            own = {
                str(number): self._predict_batch(model, batch, prediction_loss_only, ignore_keys)
                for number, batch in enumerate(self._loader.window)
                if number % self._processes.world_size == self._processes.rank
            }
            parts = self._processes.gather("predictions of an evaluation", own)
            combined = {number: predictions for part in parts for number, predictions in part.items()}
            self._predictions.extend(combined[str(number)] for number in range(len(self._loader.window)))
        return send_to_device(self._predictions.popleft(), self._trainer.args.device)

    def _predict_batch(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any) -> Any:
        loss, logits, labels = self._predict(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        if logits is not None and self._preprocess is not None:
            logits = self._preprocess(logits, labels)
        return loss, logits, labels


@contextmanager
def spread_over_ranks(trainer: Any, processes: ProcessGroup, dataloader: Any) -> Iterator[SpreadLoader]:
    """
    Share the batches of an evaluation among ranks inside the context.

    Each rank predicts a share of the batches. The evaluation loop of the parent trainer then runs in every rank over
    the predictions of all batches, so losses and metrics equal those of one process, bit for bit.

    Args:
        trainer (`transformers.Trainer`): The federated trainer.
        processes ([`~hf_federated.distributed.process_group.ProcessGroup`]): The ranks.
        dataloader (`Any`): The evaluation's batches, the same in all ranks.

    Yields:
        [`SpreadLoader`]: The data loader to evaluate on.
    """
    loader = SpreadLoader(dataloader, BATCHES_PER_EXCHANGE * processes.world_size, trainer.accelerator.gradient_state)
    predictions = SpreadPredictions(trainer, processes, loader)
    preprocess = trainer.preprocess_logits_for_metrics
    # Logits can be large, so they are preprocessed before they are gathered.
    trainer.prediction_step, trainer.preprocess_logits_for_metrics = predictions, None
    try:
        yield loader
    finally:
        del trainer.prediction_step
        trainer.preprocess_logits_for_metrics = preprocess
