"""What every distillation algorithm is made of.

Clients send predictions of public rows instead of parameters, so each may have a model and a tokenizer of its own; the
one contract is the order of the labels. Where words are tagged, or tokens predicted, "rows" of predictions are words
or tokens of public rows (`clients/positions.py`): what is said of one softmax holds of each of them. A round on the
server, after the clients' local training, is

```
cohort.predict(rows)       -> each client's logits of the public rows
ensemble(predictions)      -> what is learned of them
train_server(ensemble)     -> the server's model learns it
broadcast(ensemble)        -> what the clients learn in turn, if anything
cohort.distill(targets)    -> they learn it
```

and a subclass overrides those steps in which its method differs. As with [`Aggregation`], the two sides share nothing
but messages: what runs on a client uses the constructor's arguments and the message, nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..config import name_functions
from ..messages import ClientUpdate, Disclosure, Feedback
from .client import DistillationClient
from .codec import PredictionCodec
from .cohort import Cohort
from .losses import kl_divergence
from .packed import PackedRows, joined, packed
from .requirements import Requirements
from .server import DistillationServer
from .teachers import Teachers


Predictions = Mapping[str, torch.Tensor]
Targets = torch.Tensor | PackedRows

# Below it a probability counts as this, where its logarithm travels.
SMALLEST_PROBABILITY = 1e-9


@dataclass(kw_only=True, repr=False, eq=False)
class Distillation:
    """
    Base of the distillation algorithms: the server learns the mean of the clients' logits, the clients the server's.

    Subclasses are dataclasses (`@dataclass(kw_only=True, repr=False, eq=False)`) whose fields are their settings.

    Args:
        server_epochs (`int`, *optional*, defaults to `1`):
            Passes of the server over the public rows in a round.
        client_epochs (`int`, *optional*, defaults to `1`):
            Passes of a client over the public rows in a round.
        temperature (`float`, *optional*, defaults to `1.0`):
            `T` of softmax where the method has one.
        server_lr (`float`, *optional*):
            Of the server's distillation; that of the training arguments by default.
        client_lr (`float`, *optional*):
            Of the clients' distillation; that of the training arguments by default.
        prediction_dtype (`str`, *optional*, defaults to `"float32"`):
            How predictions travel: `"float32"`, `"float16"`, `"bfloat16"` or `"int8"`.
        train_on_labelled (`bool`, *optional*, defaults to `False`):
            Whether the server also learns its own labelled rows, in as many passes after those over the public ones.
        top_k (`int`, *optional*):
            How many classes of a row travel, with what the others have in common; all by default. Of tags and tokens
            they are kept so too, and become rows of all classes a batch at a time; whole are only what the server's
            model says of all public rows, where clients learn that ([`MHAT`], [`AdaFD`]).

    Raises:
        ValueError: If a setting is out of range, or the method has no use for it.

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

    name: ClassVar[str] = ""
    # What happens to the clients' parameters: each client keeps its own (`"kept"`), clients start from the server's
    # (`"sent"`), or clients start from the server's and the server averages the results (`"averaged"`).
    parameters: ClassVar[str] = "kept"
    # The client side of the algorithm.
    client_class: ClassVar[type[DistillationClient]] = DistillationClient
    # What the clients learn: `"logits"` or `"probabilities"`.
    broadcasts: ClassVar[str] = "logits"
    # Settings of this class that have no place in the method: they are refused rather than without effect.
    ignores: ClassVar[tuple[str, ...]] = ()

    server_epochs: int = 1
    client_epochs: int = 1
    temperature: float = 1.0
    server_lr: float | None = None
    client_lr: float | None = None
    train_on_labelled: bool = False
    prediction_dtype: str = "float32"
    top_k: int | None = None

    def __post_init__(self) -> None:
        for name in ("server_epochs", "client_epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")
        for name in ("temperature", "server_lr", "client_lr"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"`{name}` is {value}; it must be positive.")
        self._refuse_without_effect(*self.ignores)
        self._codec = PredictionCodec(self.prediction_dtype, self.top_k)

    # ---- What it is

    @property
    def requirements(self) -> Requirements:
        """What the method needs of a federation."""
        return Requirements(server_dataset=self.train_on_labelled)

    @property
    def disclosures(self) -> tuple[Disclosure, ...]:
        """The values that leave a client in addition to parameters, predictions and the fields of an update."""
        return ()

    @property
    def passes_per_round(self) -> int:
        """How often a client sends predictions of each public example in a round."""
        return 1

    @property
    def ensembles_rows_alone(self) -> bool:
        """Whether `ensemble` gives the same result for some examples alone as for these examples among all."""
        return True

    @property
    def sends_parameters(self) -> bool:
        """Whether clients start from the server's parameters."""
        return self.parameters != "kept"

    @property
    def returns_parameters(self) -> bool:
        """Whether the server averages the clients' parameters."""
        return self.parameters == "averaged"

    def client(self) -> DistillationClient:
        """The client side, which answers the clients' messages in this process."""
        return self.client_class(self)

    def check_model(self, model: nn.Module) -> None:
        """
        Refuse a model that the method does not work with.

        Args:
            model (`torch.nn.Module`): The server's.

        Raises:
            ValueError: If so.
        """

    def check_unit(self, unit: str, num_classes: int) -> None:
        """
        Refuse predictions of words or tokens, if the method's formula does not hold for them.

        Args:
            unit (`str`): What a prediction is about: a `"word"` of a public row, or a `"token"` of the vocabulary.
            num_classes (`int`): Tags, or tokens of the vocabulary.

        Raises:
            ValueError: If so. The message names what to take instead.
        """

    def settings(self) -> dict[str, Any]:
        """All settings and their values."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.init}

    def non_default_settings(self) -> dict[str, Any]:
        """The settings whose values are not the defaults."""
        return {
            item.name: getattr(self, item.name)
            for item in dataclasses.fields(self)
            if item.init and getattr(self, item.name) != item.default
        }

    def _refuse_without_effect(self, *names: str, beside: str = "") -> None:
        """Refuse settings that are given and would do nothing, be it for another one."""
        for name in sorted(self.non_default_settings().keys() & set(names)):
            because = f" with {beside}" if beside else ""
            raise ValueError(f"`{name}` would have no effect on {type(self).__name__}{because}: leave it out.")

    def __repr__(self) -> str:
        settings = name_functions(self.non_default_settings())
        arguments = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        return f"{type(self).__name__}({arguments})"

    # ---- Server side

    def expected_extra(self, server: DistillationServer) -> dict[str, torch.Tensor]:
        """
        What clients send beside their parameters, as [`Aggregation.expected_extra`] says it.

        Args:
            server ([`DistillationServer`]): The server's model and rows.
        """
        return {}

    def check_extra(self, extra: Mapping[str, torch.Tensor]) -> None:
        """
        Refuse what a client sent beside its parameters. It has the names, shapes and dtypes of `expected_extra`, and
        finite numbers.

        Args:
            extra (`Mapping[str, torch.Tensor]`): The client's.

        Raises:
            ValueError: If the method cannot use it. The client's update is then refused, and its parameters with it.
        """

    def check_report(self, metrics: Mapping[str, float], num_classes: int) -> None:
        """
        Refuse what a client reported of its local training.

        Args:
            metrics (`Mapping[str, float]`): The client's, as it sent them.
            num_classes (`int`): Classes of the server's model.

        Raises:
            ValueError: If the method cannot use it. The client is then left out of the round's distillation.
        """

    def build_teachers(self, build: Callable[[], Teachers]) -> Teachers | None:
        """
        The store of the clients' models on the server, for a method that needs one.

        Args:
            build (`Callable[[], Teachers]`): Builds an empty store.
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
            num_rounds (`int`): Rounds of the run.

        Raises:
            ValueError: If the method does not work with so many.
        """

    def distill(self, cohort: Cohort, server: DistillationServer) -> dict[str, float]:
        """
        A round's distillation.

        Args:
            cohort ([`Cohort`]): The clients, after their local training.
            server ([`DistillationServer`]): The server's model and rows.

        Returns:
            `dict[str, float]`: What goes into the log, under `federated/`.
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
        """What the server learns of all public rows; of a vocabulary, made of some of them where it is needed."""
        rows = server.all_rows
        if server.student.positions is None or self.top_k is None or not self.ensembles_rows_alone:
            predictions = cohort.predict(rows, server.shape)
            cohort.check_agreed(server.num_agreed(rows))
            return self.ensemble(predictions, cohort)
        small = cohort.predict_packed(rows, server.shape)
        num_agreed = server.num_agreed(rows)
        cohort.check_agreed(num_agreed)
        return PackedRows(
            num_agreed,
            lambda places: self.ensemble({client_id: values[places] for client_id, values in small.items()}, cohort),
        )

    def train_server(self, targets: Targets, round: int, server: DistillationServer) -> dict[str, float]:
        """
        Let the server's model learn targets of all public rows, and its own labelled rows if it shall.

        Args:
            targets (`torch.Tensor` or `PackedRows`): Of shape `(rows, classes)`.
            round (`int`): Round number, from 0.
            server ([`DistillationServer`]): The server's model and rows.

        Returns:
            `dict[str, float]`: For the log.
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
        What the server learns of the clients' predictions.

        Args:
            predictions (`Mapping[str, torch.Tensor]`): Logits by client, each of shape `(rows, classes)`.
            cohort ([`Cohort`]): The clients, with what they reported.

        Returns:
            `torch.Tensor`: Of shape `(rows, classes)`.
        """
        return weighted_mean(predictions, dict.fromkeys(predictions, 1.0))

    def server_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """
        The server's loss on a batch.

        Args:
            logits (`torch.Tensor`): The server's, of shape `(rows, classes)`.
            targets (`torch.Tensor`): Rows of the ensemble, of the same shape.
        """
        return kl_divergence(logits, targets, self.temperature)

    def broadcast(self, ensemble: Any, server: DistillationServer) -> Any:
        """
        What the clients learn in turn.

        Args:
            ensemble (`torch.Tensor` or `PackedRows`): What the server learned; packed of tags and tokens with `top_k`.
            server ([`DistillationServer`]): The server's model and rows.

        Returns:
            `torch.Tensor` or `PackedRows`, *optional*: Of shape `(rows, classes)`; `None` if nothing goes back.
        """
        return server.predict()

    def state_dict(self) -> dict[str, Any]:
        """What the server keeps between rounds, as scalars and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    # ---- Both sides

    def encode(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """Predictions of shape `(rows, classes)` as they travel."""
        return self._codec.encode(logits)

    def decode(self, values: Mapping[str, torch.Tensor], num_classes: int) -> torch.Tensor:
        """What `encode` wrote, of shape `(rows, classes)` and float32."""
        return self._codec.decode(values, num_classes)

    def joined(self, parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """What `encode` made of blocks of rows, at least one, as it would have made it of all of them."""
        return joined(parts)

    def encode_targets(self, targets: Targets) -> dict[str, torch.Tensor]:
        """What is broadcast, of shape `(rows, classes)`, as it travels."""
        if isinstance(targets, PackedRows):
            return joined([self.encode_targets(block) for block in targets.blocks()])
        if self.broadcasts == "logits" or self.top_k is None:
            return self._codec.encode(targets)
        # The likeliest classes keep their probabilities, and the others share what is left.
        return self._codec.encode(targets.clamp(min=SMALLEST_PROBABILITY).log())

    def decode_targets(self, values: Mapping[str, torch.Tensor], num_classes: int) -> torch.Tensor:
        """What `encode_targets` wrote, of shape `(rows, classes)` and float32; probabilities add up to one."""
        targets = self._codec.decode(values, num_classes)
        if self.broadcasts == "logits":
            return targets
        if self.top_k is not None:
            return targets.softmax(-1)
        targets = targets.clamp(min=0)
        return targets / targets.sum(-1, keepdim=True)

    def unpack_targets(self, values: Mapping[str, torch.Tensor], num_classes: int) -> Targets:
        """The same as `decode_targets`; where only some classes travelled, a batch at a time."""
        if self.top_k is None:
            return self.decode_targets(values, num_classes)
        return packed(values, lambda part: self.decode_targets(part, num_classes))

    # ---- Client side

    def client_loss(self, logits: torch.Tensor, targets: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
        """
        A client's loss on a batch of public rows.

        Args:
            logits (`torch.Tensor`): The client's, of shape `(rows, classes)`.
            targets (`torch.Tensor`): What was broadcast of these rows, of the same shape.
            settings (`Mapping[str, Any]`): Those of the message.
        """
        return kl_divergence(logits, targets, self.temperature)

    def feedback_loss(self, logits: torch.Tensor, message: Feedback) -> torch.Tensor:
        """
        A client's loss on the mini-batch that a [`Feedback`] answers.

        Args:
            logits (`torch.Tensor`): The client's, of shape `(rows, classes)`, with their graph.
            message ([`Feedback`]): The server's answer.
        """
        raise NotImplementedError(f"{type(self).__name__} does not exchange mini-batches.")


def weighted_mean(predictions: Predictions, weights: Mapping[str, float]) -> torch.Tensor:
    """
    The weighted mean of tensors, in their order, added up in float64.

    Args:
        predictions (`Mapping[str, torch.Tensor]`): By client, of one shape.
        weights (`Mapping[str, float]`): By client; they need not add up to one.

    Returns:
        `torch.Tensor`: Of that shape, float32.
    """
    total = sum(weights[client_id] for client_id in predictions)
    mean = sum(value.to(torch.float64) * (weights[client_id] / total) for client_id, value in predictions.items())
    assert isinstance(mean, torch.Tensor)
    return mean.to(torch.float32)


def sizes(cohort: Cohort) -> dict[str, float]:
    """How many rows each client trained on."""
    return {client_id: row["num_examples"] for client_id, row in cohort.metrics.items()}
