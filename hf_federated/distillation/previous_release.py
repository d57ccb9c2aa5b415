"""Support for distillations that were written for version 0.1. It will be removed in 1.0."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from ..messages import ClientUpdate, Distill, Feedback, Fit, Message, Metrics, Predict, Predictions
from ..methods import ClientContext
from ..methods.previous_release import warn_of
from .client import DistillationPart


def adapt_distillation(cls: Any) -> None:
    """Let a distillation of version 0.1 take part in the conversation of a round."""
    own = vars(cls)
    if not issubclass(cls.client_part, (LossPart, ClientClassPart)):
        cls.library_part = cls.client_part
    builds_client = "client" in own and len(inspect.signature(own["client"]).parameters) == 1
    if "client_class" in own or builds_client:
        warn_of(cls, "client", "Set `client_part` to a subclass of DistillationPart.")
        build = own["client"] if builds_client else lambda self: self.client_class(self)
        if builds_client:
            del cls.client
        cls.client_part = type("ClientOfPreviousRelease", (ClientClassPart,), {"build": staticmethod(build)})
    elif "client_loss" in own or "feedback_loss" in own:
        warn_of(cls, "client_loss", "Override this method in a subclass of DistillationPart, and set `client_part`.")
        cls.client_part = _loss_part(cls)
    if "expected_extra" in own:
        warn_of(cls, "expected_extra", "Override `update_extra`.")
        cls.update_extra = lambda self, state: self.expected_extra(self.server)
    if "on_update" in own:
        warn_of(cls, "on_update", "Override `accept`.")
        cls.accept = lambda self, round, update: self.on_update(update, self.server)


def read_former_name(method: Any) -> None:
    """Read the argument `train_on_labelled` of version 0.1."""
    former, value = method.train_on_labelled, method.train_on_labeled
    if value and former is False:
        raise ValueError(
            "`train_on_labeled` is True and its former name `train_on_labelled` is False. Set only `train_on_labeled`."
        )
    if former and not value:
        _warn_of_spelling("train_on_labelled", stacklevel=5)
        method.train_on_labeled = former
    method.train_on_labelled = method.train_on_labeled


def _warn_of_spelling(name: str, stacklevel: int = 3) -> None:
    new = name.replace("labelled", "labeled")
    warnings.warn(f"`{name}` will be removed in version 1.0. Use `{new}`.", FutureWarning, stacklevel=stacklevel)


def _former(name: str) -> Any:
    """Return a property that warns of its spelling and has the value of the attribute with the new spelling."""

    def value(self: Any) -> Any:
        _warn_of_spelling(name)
        return getattr(self, name.replace("labelled", "labeled"))

    return property(value)


class FormerServerNames:
    """The names of `DistillationServer` in version 0.1."""

    labelled = _former("labelled")
    fit_labelled = _former("fit_labelled")
    labelled_batch = _former("labelled_batch")


class LocalDistillation:
    """Part of a distillation in local training in version 0.1. Write a [`DistillationPart`] instead."""

    callbacks: Sequence[TrainerCallback] = ()
    frozen: Sequence[nn.Parameter] = ()

    def on_batch(self, trainer: Trainer, model: nn.Module, inputs: Mapping[str, Any], num_items: Any) -> None:
        """Called before the loss of a micro-batch is computed."""

    def finish(self, trainer: Trainer, metrics: dict[str, float]) -> dict[str, torch.Tensor]:
        """Return the tensors for `extra` of the update. The metrics may be changed in place."""
        return {}


class DistillationClient:
    """Client side of a distillation in version 0.1. Write a [`DistillationPart`] instead."""

    messages: ClassVar[tuple[type[Message], ...]] = (Predict, Distill, Feedback)

    def __init__(self, algorithm: Any) -> None:
        self.algorithm = algorithm

    def before_training(self, context: Any) -> None:
        """Called for each `Fit`, before the global state is written into the client's model."""

    def local_training(self, context: Any, round: int) -> LocalDistillation:
        """Return the part of the algorithm in a local training."""
        return LocalDistillation()

    def handle(self, message: Message, context: Any) -> Message:
        """Answer a message of one of the types in `messages`, with the methods that a subclass overrides."""
        part = _loss_part(type(self.algorithm))(context, self.algorithm)
        for name in ("predict", "distill", "take_feedback"):
            setattr(part, name, getattr(self, name, getattr(part, name)))
        return part.answer(message)


class LossPart(DistillationPart):
    """Uses `client_loss` and `feedback_loss` of the method."""

    def client_loss(self, logits: torch.Tensor, targets: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
        return self.method.client_loss(logits, targets, settings)

    def feedback_loss(self, logits: torch.Tensor, message: Feedback) -> torch.Tensor:
        return self.method.feedback_loss(logits, message)


def _loss_part(cls: Any) -> type[DistillationPart]:
    """Return the library's client half of a method, with the losses of the method."""
    return type("LossPartOfPreviousRelease", (LossPart, cls.library_part), {})


class LossMethods:
    """The losses of a client in version 0.1, which a subclass of a distillation calls with `super()`."""

    # The client half without the interfaces of version 0.1.
    library_part: ClassVar[type[DistillationPart]] = DistillationPart

    def client_loss(self, logits: torch.Tensor, targets: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
        """As [`DistillationPart.client_loss`]."""
        return self._library_half().client_loss(logits, targets, settings)

    def feedback_loss(self, logits: torch.Tensor, message: Feedback) -> torch.Tensor:
        """As [`DistillationPart.feedback_loss`]."""
        return self._library_half().feedback_loss(logits, message)

    def _library_half(self) -> DistillationPart:
        # The losses use no context.
        return self.library_part(ClientContext("", None), self)


class PreviousContext(ClientContext):
    """A context with the names of version 0.1."""

    state_changed = False

    @property
    def state(self) -> dict[str, Any]:
        """The memory."""
        return self.memory


class ClientClassPart(DistillationPart):
    """Runs the `DistillationClient` of a method as a client half."""

    build: Any
    _local: LocalDistillation

    def __init__(self, context: ClientContext, method: Any = None) -> None:
        super().__init__(PreviousContext(**vars(context)), method)
        self._client = self.build(method)

    def receive(self, message: Fit) -> None:
        self._client.before_training(self.context)
        self._local = self._client.local_training(self.context, message.round)
        self.callbacks, self.frozen = self._local.callbacks, self._local.frozen

    def on_batch(self, model: nn.Module, inputs: Mapping[str, Any], num_items: Any) -> None:
        self._local.on_batch(self.context.local_trainer, model, inputs, num_items)

    def send(self, update: ClientUpdate) -> ClientUpdate:
        metrics = dict(update.metrics)
        extra = self._local.finish(self.context.local_trainer, metrics)
        return dataclasses.replace(update, metrics=metrics, extra={**update.extra, **extra})

    def answer(self, message: Message) -> Predictions | Metrics | Message:
        return self._client.handle(message, self.context)
