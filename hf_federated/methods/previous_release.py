"""Support for methods that were written for version 0.1: subclasses with `local_hook`. It will be removed in 1.0."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ..messages import ClientUpdate, Fit
from ..utils.weighted_mean import State
from .client_part import ClientPart


def warn_of(cls: type, name: str, replacement: str) -> None:
    """Warn that a class overrides a method of version 0.1."""
    warnings.warn(
        f"{cls.__name__}.{name} is an interface of hf_federated 0.1 and will be ignored from 1.0 on. {replacement}",
        FutureWarning,
        stacklevel=4,
    )


def adapt_method(cls: Any) -> None:
    """Let a method with `local_hook` run its hook as a client half."""
    if "local_hook" in vars(cls):
        warn_of(cls, "local_hook", "Set `client_part` to a subclass of ClientPart.")
        cls.client_part = HookPart


class LocalHook:
    """Client half of an averaging algorithm in version 0.1. Write a [`ClientPart`] instead."""

    changes_loss: ClassVar[bool] = False

    def start(self, trainer: Any, exchange: Any, model: Any) -> None:
        """Called before local training if the algorithm trains private models."""

    def inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """As [`ClientPart.inputs`]."""
        return dict(inputs)

    def loss(self, loss: torch.Tensor, outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """As [`ClientPart.loss`]."""
        return loss

    def on_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """As [`ClientPart.on_gradients`]."""

    def on_step(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """As [`ClientPart.on_step`]."""

    def finish(self) -> tuple[State, dict[str, Any] | None]:
        """Return the tensors for `extra` of the update, and the state that the client keeps."""
        return {}, None


class HookPart(ClientPart):
    """Runs the `local_hook` of a method as a client half."""

    _hook: Any = None

    @property
    def changes_loss(self) -> bool:
        return self._hook is not None and self._hook.changes_loss

    @property
    def changes_gradients(self) -> bool:
        return self._hook is not None

    def receive(self, message: Fit) -> None:
        self._hook = self.method.local_hook(message, self.memory.get("kept"))
        if self._hook is None:
            return
        if self.context.open_private_model is not None:
            self._hook.start(*self.context.open_private_model(), self.context.model.trainer.model)
        for name in ("inputs", "loss", "on_gradients", "on_step"):
            setattr(self, name, getattr(self._hook, name))

    def send(self, update: ClientUpdate) -> ClientUpdate:
        if self._hook is None:
            return update
        extra, kept = self._hook.finish()
        self.memory.clear()
        if kept is not None:
            self.memory["kept"] = kept
        return dataclasses.replace(update, extra={**update.extra, **extra})
