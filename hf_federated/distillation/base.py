"""Base class of the distillation algorithms.

Clients exchange predictions on public examples instead of parameters. Clients can therefore have different models and
tokenizers. All models must have the same labels in the same order. Some tasks predict a label for each word or each
token (`clients/positions.py`). For these tasks, a row of predictions is one word or one token of a public example. The
formulas describe one softmax and apply to each row. After the local training of the clients, a round has these steps
on the server:

```
cohort.predict(rows)       -> logits of each client for the public examples
ensemble(predictions)      -> targets of the server's model
train_server(ensemble)     -> the server's model learns the targets
broadcast(ensemble)        -> targets of the clients, or None
cohort.distill(targets)    -> the clients learn the targets
```

A subclass overrides the steps that its method changes. As with [`Aggregation`], the server and the clients share only
messages. Code that runs on a client may use only the constructor's arguments and the message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..messages import ClientUpdate, Disclosure, Feedback
from .client import DistillationClient
from .client_weights import weighted_mean
from .codec import PredictionCodec
from .cohort import Cohort
from .lazy_rows import LazyRows, concatenate_encoded, decode_lazily
from .losses import kl_divergence
from .requirements import Requirements
from .server import DistillationServer
from .settings import Settings
from .teachers import Teachers


Predictions = Mapping[str, torch.Tensor]
Targets = torch.Tensor | LazyRows

# Lower bound of a probability before its logarithm is encoded.
SMALLEST_PROBABILITY = 1e-9


@dataclass(kw_only=True, repr=False, eq=False)
class Distillation(Settings):
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
        train_on_labelled (`bool`, *optional*, defaults to `False`):
            Whether the server's model also trains on the server's labelled examples. It makes `server_epochs` passes
            over them after the passes over the public examples.
        top_k (`int`, *optional*):
            Number of classes per prediction that are sent. The remaining classes share one value. By default, all
            classes are sent. Predictions of words and tokens also stay in this form in memory, and each batch is
            expanded to all classes when it is needed. One exception: if clients learn the logits of the server's model
            ([`MHAT`], [`AdaFD`]), the server holds its logits of all public examples for all classes.

    Raises:
        ValueError: If a setting is out of range or the method does not use it.

    Requirements:
        - Data: the server and all clients have the same unlabelled public examples (`public_dataset`).
          `train_on_labelled=True` also needs labelled examples on the server (`server_dataset`).
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

    # Name in messages. Defaults to the name of the class.
    name: ClassVar[str] = ""
    # Exchange of parameters. `"kept"`: no parameters are exchanged. `"sent"`: clients start each round from the
    # server's parameters. `"averaged"`: like `"sent"`, and the server averages the clients' parameters.
    parameters: ClassVar[str] = "kept"
    # Class of the client side of the algorithm.
    client_class: ClassVar[type[DistillationClient]] = DistillationClient
    # Kind of the targets that the clients learn: `"logits"` or `"probabilities"`.
    broadcasts: ClassVar[str] = "logits"
    # Inherited settings that the method does not use. A value other than the default raises an error.
    ignores: ClassVar[tuple[str, ...]] = ()

    server_epochs: int = 1
    client_epochs: int = 1
    temperature: float = 1.0
    server_lr: float | None = None
    client_lr: float | None = None
    train_on_labelled: bool = False
    prediction_dtype: str = "float32"
    top_k: int | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def __post_init__(self) -> None:
        self._require(("server_epochs", "client_epochs"), lambda value: value >= 1, "at least 1")
        rates = ("temperature", "server_lr", "client_lr")
        self._require(rates, lambda value: value > 0, "positive", optional=True)
        self._refuse_without_effect(*self.ignores)
        self._codec = PredictionCodec(self.prediction_dtype, self.top_k)

    # ---- Properties of the method

    @property
    def requirements(self) -> Requirements:
        """Data and models that the method needs."""
        return Requirements(server_dataset=self.train_on_labelled)

    @property
    def disclosures(self) -> tuple[Disclosure, ...]:
        """Values that a client sends in addition to parameters, predictions and the fields of an update."""
        return ()

    @property
    def passes_per_round(self) -> int:
        """Number of times that a client sends predictions of each public example in a round."""
        return 1

    @property
    def ensembles_rows_independently(self) -> bool:
        """Whether `ensemble` computes each row of predictions independently of the other rows."""
        return True

    @property
    def sends_parameters(self) -> bool:
        """Whether clients start each round from the server's parameters."""
        return self.parameters != "kept"

    @property
    def returns_parameters(self) -> bool:
        """Whether the server averages the clients' parameters."""
        return self.parameters == "averaged"

    def client(self) -> DistillationClient:
        """Build the client side, which answers the messages for the clients of this process."""
        return self.client_class(self)

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

    def expected_extra(self, server: DistillationServer) -> dict[str, torch.Tensor]:
        """
        Names, shapes and dtypes of the tensors that clients send in addition to their parameters.

        Args:
            server ([`DistillationServer`]): The server's model and public examples.

        Returns:
            `dict[str, torch.Tensor]`: Example tensors, as in [`Aggregation.expected_extra`].
        """
        return {}

    def extra_shapes(self, num_rows: int, num_positions: int, num_classes: int) -> dict[str, tuple[int, ...]]:
        """
        Shapes of the tensors of `expected_extra`, float32, to compute the size of an update without a model.

        Args:
            num_rows (`int`): Number of public examples.
            num_positions (`int`): Number of predictions for all public examples.
            num_classes (`int`): Number of classes.
        """
        return {}

    def check_extra(self, extra: Mapping[str, torch.Tensor]) -> None:
        """
        Check the tensors that a client sent in addition to its parameters.

        The tensors already have the names, shapes and dtypes of `expected_extra`, and hold finite numbers.

        Args:
            extra (`Mapping[str, torch.Tensor]`): The tensors of the client.

        Raises:
            ValueError: If the method cannot use the tensors. The server then rejects the whole update of the client,
                including its parameters.
        """

    @property
    def reports_class_counts(self) -> bool:
        """Whether clients report their numbers of examples of each class."""
        return False

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

    def build_teachers(self, build: Callable[[], Teachers]) -> Teachers | None:
        """
        Build the store of the clients' models on the server, if the method needs one.

        Args:
            build (`Callable[[], Teachers]`): Builds an empty store.

        Returns:
            [`Teachers`], *optional*: The store, or `None` if the method does not use the clients' models.
        """
        return None

    def on_update(self, update: ClientUpdate, server: DistillationServer) -> None:
        """
        Called for each accepted update, in the process that received it.

        Args:
            update ([`ClientUpdate`]): The client's update.
            server ([`DistillationServer`]): The server's model and examples.
        """

    def setup(self, num_rounds: int) -> None:
        """
        Called once, before the first round or before the state of a checkpoint is loaded.

        Args:
            num_rounds (`int`): Number of rounds of the run.

        Raises:
            ValueError: If the method does not work with this number of rounds.
        """

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
        targets = self.broadcast(ensemble, server)
        if targets is not None:
            epochs_of_run = server.num_rounds * self.client_epochs
            losses = cohort.distill(server.all_rows, self.encode_targets(targets), self.client_epochs, epochs_of_run)
            logs["client_distillation_loss"] = sum(losses.values()) / len(losses)
        return logs

    def _ensemble_of_all(self, cohort: Cohort, server: DistillationServer) -> Targets:
        """
        The server's targets for all public examples.

        For words and tokens with `top_k`, each block of targets is computed when it is needed.
        """
        rows = server.all_rows
        if server.student.positions is None or self.top_k is None or not self.ensembles_rows_independently:
            predictions = cohort.predict(rows, server.shape)
            cohort.check_num_positions(server.num_agreed(rows))
            return self.ensemble(predictions, cohort)
        predictions_by_client = cohort.predict_lazily(rows, server.shape)
        num_agreed = server.num_agreed(rows)
        cohort.check_num_positions(num_agreed)
        return LazyRows(
            num_agreed,
            lambda indices: self.ensemble(
                {client_id: values[indices] for client_id, values in predictions_by_client.items()}, cohort
            ),
        )

    def train_server(self, targets: Targets, round: int, server: DistillationServer) -> dict[str, float]:
        """
        Train the server's model on targets of all public examples.

        With `train_on_labelled`, also train it on the server's labelled examples.

        Args:
            targets (`torch.Tensor` or `LazyRows`): Targets of shape `(rows, classes)`.
            round (`int`): Round number, from 0.
            server ([`DistillationServer`]): The server's model and examples.

        Returns:
            `dict[str, float]`: Losses for the log.
        """
        passes = self.server_epochs
        labelled_passes = passes if self.train_on_labelled else 0
        server.prepare(passes, labelled_passes)
        logs = {"server_distillation_loss": server.fit(targets, self.server_loss, passes, round)}
        if labelled_passes:
            logs["server_labelled_loss"] = server.fit_labelled(labelled_passes, round)
        return logs

    def ensemble(self, predictions: Predictions, cohort: Cohort) -> torch.Tensor:
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

    def state_dict(self) -> dict[str, Any]:
        """The state that the server keeps between rounds, as scalars and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`."""

    # ---- Both sides

    def encode(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode predictions of shape `(rows, classes)` for sending."""
        return self._codec.encode(logits)

    def decode(self, values: Mapping[str, torch.Tensor], num_classes: int) -> torch.Tensor:
        """Decode the return value of `encode` to a float32 tensor of shape `(rows, classes)`."""
        return self._codec.decode(values, num_classes)

    def concatenate_encoded(self, parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Concatenate encoded blocks of rows, at least one, as if `encode` had encoded all rows at once."""
        return concatenate_encoded(parts)

    def encode_targets(self, targets: Targets) -> dict[str, torch.Tensor]:
        """Encode the clients' targets, of shape `(rows, classes)`, for sending."""
        if isinstance(targets, LazyRows):
            return concatenate_encoded([self.encode_targets(block) for block in targets.blocks()])
        if self.broadcasts == "logits" or self.top_k is None:
            return self._codec.encode(targets)
        # The `top_k` classes keep their probabilities, and the remaining classes share the remaining probability.
        return self._codec.encode(targets.clamp(min=SMALLEST_PROBABILITY).log())

    def decode_targets(self, values: Mapping[str, torch.Tensor], num_classes: int) -> torch.Tensor:
        """
        Decode the return value of `encode_targets` to a float32 tensor of shape `(rows, classes)`.

        Probabilities of a row sum to 1.
        """
        targets = self._codec.decode(values, num_classes)
        if self.broadcasts == "logits":
            return targets
        if self.top_k is not None:
            return targets.softmax(-1)
        targets = targets.clamp(min=0)
        return targets / targets.sum(-1, keepdim=True)

    def unpack_targets(self, values: Mapping[str, torch.Tensor], num_classes: int) -> Targets:
        """Decode targets as `decode_targets` does. With `top_k`, decode each batch when it is needed."""
        if self.top_k is None:
            return self.decode_targets(values, num_classes)
        return decode_lazily(values, lambda part: self.decode_targets(part, num_classes))

    # ---- Client side

    def client_loss(self, logits: torch.Tensor, targets: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
        """
        A client's loss on a batch of public examples.

        Args:
            logits (`torch.Tensor`): Logits of the client's model, of shape `(rows, classes)`.
            targets (`torch.Tensor`): Broadcast targets of these examples, of the same shape.
            settings (`Mapping[str, Any]`): Settings of the message.
        """
        return kl_divergence(logits, targets, self.temperature)

    def feedback_loss(self, logits: torch.Tensor, message: Feedback) -> torch.Tensor:
        """
        A client's loss on the mini-batch that a [`Feedback`] message answers.

        Args:
            logits (`torch.Tensor`): Logits of the client's model, of shape `(rows, classes)`, with their graph.
            message ([`Feedback`]): The server's answer.

        Raises:
            NotImplementedError: If the method does not exchange mini-batches.
        """
        raise NotImplementedError(f"{type(self).__name__} does not exchange mini-batches.")
