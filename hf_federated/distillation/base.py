"""Base class of the distillation algorithms.

Clients exchange predictions on public examples instead of parameters. Clients can therefore have different models and
tokenizers. All models must have the same labels in the same order. Some tasks predict a label for each word or each
token (`clients/positions.py`). For these tasks, a row of predictions is one word or one token of a public example. The
formulas apply to each row. After the local training of the clients, a round has these steps on the server:

```
cohort.predict(rows)       -> logits of each client for the public examples
ensemble(predictions)      -> targets of the server's model
train_server(ensemble)     -> the server's model learns the targets
broadcast(ensemble)        -> targets of the clients, or None
cohort.distill(targets)    -> the clients learn the targets
```

A subclass overrides the steps that its method changes. The client half is a [`DistillationPart`]. The two halves share
only messages, which `encoding` encodes and decodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..messages import Distill, Feedback, Message, Predict, Predictions
from ..methods import ClientPart, Method, Round
from ..utils.weighted_mean import Tensors, WeightedMean
from .alignment import Alignment
from .client import DistillationPart
from .client_weights import weighted_mean
from .codec import PredictionCodec
from .cohort import Cohort, RunOnMain
from .encoding import Encoding, Targets
from .lazy_rows import LazyRows
from .losses import kl_divergence
from .previous_release import LossMethods, adapt_distillation, read_former_name
from .requirements import Requirements
from .server import DistillationServer
from .settings import Settings


# Logits by client.
ClientLogits = Tensors


@dataclass(kw_only=True, repr=False, eq=False)
class Distillation(LossMethods, Settings, Method):
    """
    Base class of the distillation algorithms.

    By default, the server's model learns the mean of the clients' logits, and the clients learn the logits of the
    server's model.

    Subclasses are dataclasses (`@dataclass(kw_only=True, repr=False, eq=False)`). Their fields are the settings of the
    algorithm.

    Args:
        server_epochs (`int`, *optional*, defaults to `1`):
            Number of passes of the server's model over the public examples in a round.
        client_epochs (`int`, *optional*, defaults to `1`):
            Number of passes of a client's model over the public examples in a round.
        temperature (`float`, *optional*, defaults to `1.0`):
            Softmax temperature `T` of the distillation loss. Methods whose loss has no temperature refuse it.
        server_lr (`float`, *optional*):
            Learning rate of the server's distillation. Defaults to the learning rate of the training arguments.
        client_lr (`float`, *optional*):
            Learning rate of the clients' distillation. Defaults to the learning rate of the training arguments.
        prediction_dtype (`str`, *optional*, defaults to `"float32"`):
            Dtype in which predictions are sent: `"float32"`, `"float16"`, `"bfloat16"` or `"int8"`.
        train_on_labeled (`bool`, *optional*, defaults to `False`):
            Whether the server's model also trains on the server's labeled examples. It makes `server_epochs` passes
            over them after the passes over the public examples.
        top_k (`int`, *optional*):
            Number of classes per prediction that are sent. The remaining classes share one value. By default, all
            classes are sent. Predictions of words and tokens also stay in this form in memory, and each batch is
            expanded to all classes when it is needed. One exception: if clients learn the logits of the server's model
            ([`MHAT`], [`AdaFD`]), the server holds its logits of all public examples for all classes.
        train_on_labelled (`bool`, *optional*): Former name of `train_on_labeled`.

    Raises:
        ValueError: If a setting is out of range or the method does not use it.

    Requirements:
        - Data: the server and all clients have the same unlabeled public examples (`public_dataset`).
          `train_on_labeled=True` also needs labeled examples on the server (`server_dataset`).
        - Models: any architectures with the same labels in the same order.
        - Tasks: classification, tagging and token prediction.
        - Sent: predictions on the public examples, in both directions. No parameters.

    Relations:
        - [`MHAT`] and [`FedED`] weigh clients by their number of examples, and [`AdaFD`] weighs clients by their
          training loss. The default `ensemble` is the unweighted mean.
        - [`FedMD`], [`DSFL`] and [`Cronus`] send the ensemble itself to the clients. The default `broadcast` sends the
          logits of the server's model.

    Example:

    ```python
    >>> from dataclasses import dataclass
    >>> from hf_federated import Distillation

    >>> @dataclass(kw_only=True, repr=False, eq=False)
    ... class FirstClientOnly(Distillation):
    ...     name = "first"
    ...
    ...     def ensemble(self, predictions, cohort):
    ...         return next(iter(predictions.values()))

    >>> FirstClientOnly(server_epochs=2)
    FirstClientOnly(server_epochs=2)
    ```
    """

    messages: ClassVar[tuple[type[Message], ...]] = (Predict, Predictions, Distill, Feedback)
    client_part: ClassVar[type[ClientPart]] = DistillationPart
    # Exchange of parameters. `"kept"`: no parameters are exchanged. `"sent"`: clients start each round from the
    # server's parameters. `"averaged"`: like `"sent"`, and the server averages the clients' parameters.
    parameters: ClassVar[str] = "kept"
    # Kind of the targets that the clients learn: `"logits"` or `"probabilities"`.
    broadcasts: ClassVar[str] = "logits"
    # Whether `ensemble` computes each row of predictions independently of the other rows.
    ensembles_rows_independently = True
    # Whether clients report their numbers of examples of each class.
    reports_class_counts = False
    # Whether the server stores the models of the clients.
    needs_teachers: ClassVar[bool] = False
    # How the predictions of a client correspond to those of the server's model.
    alignment: ClassVar[Alignment] = Alignment()
    aliases: ClassVar[Mapping[str, str]] = {"train_on_labelled": "train_on_labeled"}
    # Inherited settings that the method does not use. A value other than the default raises an error.
    ignores: ClassVar[tuple[str, ...]] = ()

    server_epochs: int = 1
    client_epochs: int = 1
    temperature: float = 1.0
    server_lr: float | None = None
    client_lr: float | None = None
    train_on_labeled: bool = False
    prediction_dtype: str = "float32"
    top_k: int | None = None
    train_on_labelled: bool | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adapt_distillation(cls)

    def __post_init__(self) -> None:
        read_former_name(self)
        self._require(("server_epochs", "client_epochs"), lambda value: value >= 1, "at least 1")
        self._require(("temperature", "server_lr", "client_lr"), lambda value: value > 0, "positive", optional=True)
        self._refuse_without_effect(*self.ignores)
        self.encoding = Encoding(PredictionCodec(self.prediction_dtype, self.top_k), self.broadcasts)
        self._server: DistillationServer | None = None
        self._run_on_main: RunOnMain = lambda label, find: find()

    # ---- Properties of the method

    @property
    def requirements(self) -> Requirements:
        """Data and models that the method needs."""
        return Requirements(server_dataset=self.train_on_labeled)

    @property
    def passes_per_round(self) -> int:
        """Number of times that a client sends predictions of each public example in a round."""
        return 1

    @property
    def sends_parameters(self) -> bool:
        """Whether clients start each round from the server's parameters."""
        return self.parameters != "kept"

    @property
    def returns_parameters(self) -> bool:
        """Whether the server averages the clients' parameters."""
        return self.parameters == "averaged"

    def check_model(self, model: nn.Module) -> None:
        """
        Check that the method works with a model.

        Args:
            model (`torch.nn.Module`): The server's model.

        Raises:
            ValueError: If the method does not work with the model.
        """

    def check_unit(self, unit: str, num_classes: int) -> None:
        """
        Check that the method's formula holds for predictions of words or tokens.

        Args:
            unit (`str`): Unit of a prediction: a `"word"` of a public example, or a `"token"` of the vocabulary.
            num_classes (`int`): Number of tags, or number of tokens of the vocabulary.

        Raises:
            ValueError: If the formula does not hold. The message names an alternative.
        """

    # ---- Server side

    def class_counts(self, dataset: Any, num_classes: int, tokenizer: Any) -> list[int]:
        """
        Count a client's training examples of each class. A client on another machine announces the numbers.

        Args:
            dataset (`datasets.Dataset`): The client's encoded training examples.
            num_classes (`int`): Number of classes of the model.
            tokenizer (`PreTrainedTokenizerBase`): The client's tokenizer.
        """
        raise NotImplementedError(f"{self!r} does not use the numbers of examples of each class.")

    def check_report(self, metrics: Mapping[str, float], num_classes: int) -> None:
        """
        Check the metrics of a client's local training.

        Args:
            metrics (`Mapping[str, float]`): The metrics that the client sent.
            num_classes (`int`): Number of classes of the server's model.

        Raises:
            ValueError: If the method cannot use the metrics. The client is then excluded from the distillation of the
                round.
        """

    def setup(self, num_rounds: int) -> None:
        """
        Called once, before the first round or before the state of a checkpoint is loaded.

        Args:
            num_rounds (`int`): Number of rounds of the run.

        Raises:
            ValueError: If the method does not work with this number of rounds.
        """

    def start(self, server: DistillationServer, run_on_main: RunOnMain) -> None:
        """
        Start a run.

        Args:
            server ([`DistillationServer`]): The server's model and examples.
            run_on_main (`Callable`): As in [`~hf_federated.distillation.Cohort`].
        """
        self._server, self._run_on_main = server, run_on_main
        self.setup(server.num_rounds)

    @property
    def server(self) -> DistillationServer:
        """
        The server's model and examples.

        Raises:
            RuntimeError: If no run has started in this process.
        """
        if self._server is None:
            raise RuntimeError(f"{self!r} has no server before a run starts, and none on a client.")
        return self._server

    # ---- The conversation of a round

    def after(self, round: Round) -> None:
        server, student = self.server, self.server.student
        # Raises an error with the name of the model if the server's model does not predict classes.
        num_classes = student.num_classes
        cohort = Cohort(
            round=round.number,
            metrics=dict(round.metrics),
            ask=lambda phase, clients, message_for: round.ask(phase, message_for, clients),
            decode=self.encoding.decode,
            seed=server.seed,
            min_clients=round.min_clients,
            rejected=round.rejected,
            extra=WeightedMean() if round.sums is None else round.sums.extra,
            teachers=server.teachers,
            positions=student.positions,
            run_on_main=self._run_on_main,
            alignment=self.alignment,
        )
        cohort.check_reports(lambda metrics: self.check_report(metrics, num_classes))
        logs = self.distill(cohort, server)
        if student.positions is not None:
            # Less than the number of positions if a tokenizer of the cohort drops words.
            logs["public_positions"] = server.num_agreed(server.all_rows)
        round.logs.update({f"federated/{name}": value for name, value in logs.items()})
        round.state = server.read()

    # ---- The distillation

    def distill(self, cohort: Cohort, server: DistillationServer) -> dict[str, float]:
        """
        Run the distillation of a round.

        Args:
            cohort ([`Cohort`]): The clients, after their local training.
            server ([`DistillationServer`]): The server's model and public examples.

        Returns:
            `dict[str, float]`: Values for the log. The trainer adds the prefix `federated/` to their names.
        """
        ensemble = self._ensemble_of_all(cohort, server)
        logs = self.train_server(ensemble, cohort.round, server)
        if (targets := self.broadcast(ensemble, server)) is not None:
            losses = cohort.distill(
                server.all_rows,
                self.alignment.encode_targets(targets, self.encoding),
                self.client_epochs,
                server.num_rounds * self.client_epochs,
            )
            logs["client_distillation_loss"] = sum(losses.values()) / len(losses)
        return logs

    def _ensemble_of_all(self, cohort: Cohort, server: DistillationServer) -> Targets:
        """
        The server's targets for all public examples.

        For words and tokens with `top_k`, each block of targets is computed when it is needed.
        """
        rows = server.all_rows
        is_lazy = self.top_k is not None and self.ensembles_rows_independently and self.alignment.is_identity
        if server.student.positions is None or not is_lazy:
            predictions = cohort.predict(rows, server.shape)
            cohort.check_num_positions(server.num_agreed(rows))
            return self.ensemble(predictions, cohort)
        predictions_by_client = cohort.predict_lazily(rows, server.shape)
        num_agreed = server.num_agreed(rows)
        cohort.check_num_positions(num_agreed)

        def ensemble(indices: torch.Tensor) -> torch.Tensor:
            selected = {client_id: values[indices] for client_id, values in predictions_by_client.items()}
            return self.ensemble(selected, cohort)

        return LazyRows(num_agreed, ensemble)

    def train_server(self, targets: Targets, round: int, server: DistillationServer) -> dict[str, float]:
        """
        Train the server's model on targets of all public examples.

        With `train_on_labeled`, also train it on the server's labeled examples.

        Args:
            targets (`torch.Tensor` or `LazyRows`): Targets of shape `(rows, classes)`.
            round (`int`): Round number, from 0.
            server ([`DistillationServer`]): The server's model and examples.

        Returns:
            `dict[str, float]`: Losses for the log.
        """
        passes = self.server_epochs
        server.prepare(passes, passes if self.train_on_labeled else 0)
        logs = {"server_distillation_loss": server.fit(targets, self.server_loss, passes, round)}
        if self.train_on_labeled:
            logs["server_labelled_loss"] = server.fit_labeled(passes, round)
        return logs

    def ensemble(self, predictions: ClientLogits, cohort: Cohort) -> torch.Tensor:
        """
        Combine the clients' predictions into the targets of the server's model.

        Args:
            predictions (`Mapping[str, torch.Tensor]`): Logits by client, each of shape `(rows, classes)`.
            cohort ([`Cohort`]): The clients and the metrics that they reported.

        Returns:
            `torch.Tensor`: Targets of shape `(rows, classes)`.
        """
        return weighted_mean(predictions, dict.fromkeys(predictions, 1.0))

    def server_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """
        The server's loss on a batch of public examples.

        Args:
            logits (`torch.Tensor`): Logits of the server's model, of shape `(rows, classes)`.
            targets (`torch.Tensor`): Rows of the ensemble, of the same shape.
        """
        return kl_divergence(logits, targets, self.temperature)

    def broadcast(self, ensemble: Any, server: DistillationServer) -> Any:
        """
        The targets that the clients learn.

        Args:
            ensemble (`torch.Tensor` or `LazyRows`): Targets of the server's model. `LazyRows` for words and tokens
                with `top_k`.
            server ([`DistillationServer`]): The server's model and public examples.

        Returns:
            `torch.Tensor` or `LazyRows`, *optional*: Targets of shape `(rows, classes)`, or `None` if the clients
            learn nothing.
        """
        return server.predict()
