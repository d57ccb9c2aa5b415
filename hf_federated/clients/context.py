"""`ClientContext`: the interface of a client for the client side of an algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .models import ClientModel
from .student import Student


@dataclass
class ClientContext:
    """
    A client, as the client side of a distillation algorithm sees it.

    Args:
        client_id (`str`): Id of the client.
        model ([`ClientModel`]): The client's model and trainer.
        seed (`int`): Seed of the federation.
        state (`dict[str, Any]`): State that the algorithm keeps on this client between rounds, as scalars and tensors.
            It is changed in place.
        open_dataset (`Callable[[], Dataset]`): Opens the client's encoded training examples.
        state_changed (`bool`, *optional*, defaults to `False`): Set it to `True` to keep a change of `state` that was
            made while answering a message other than `Fit`.
    """

    client_id: str
    model: ClientModel
    seed: int
    state: dict[str, Any]
    open_dataset: Callable[[], Any]
    state_changed: bool = False

    @property
    def student(self) -> Student:
        """
        The client's model on the public examples.

        Raises:
            TypeError: If there are no public examples.
        """
        if self.model.student is None:
            raise TypeError("This client has no public examples: pass `public_dataset` to the trainer.")
        return self.model.student
