"""Which model a client trains: the one that all share in turn, or one of its own.

Where parameters are exchanged, clients take turns on the federated trainer's model, and what they exchange is swapped.
Where only predictions are, each client has a model of its own, perhaps of another architecture with another tokenizer,
which it keeps from round to round: in memory as long as there is room, else in the client store.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from ..adapters import Exchange
from ..messages.validation import first_non_finite
from .store import ClientStore
from .student import Student


class ClientModel:
    """
    A model in the hands of a client.

    Args:
        trainer (`transformers.Trainer`): Of which the client's local trainers are copies.
        exchange ([`Exchange`]): Reads and writes its model.
        args (`TrainingArguments`): The client's, for the whole run.
        student ([`Student`], *optional*): The model over the public rows, where there are any.
        initial (`Mapping[str, torch.Tensor]`, *optional*): What it exchanges, as it was before the first round, where
            that is needed later.
    """

    def __init__(
        self,
        trainer: Trainer,
        exchange: Exchange,
        args: TrainingArguments,
        student: Student | None = None,
        initial: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.trainer = trainer
        self.exchange = exchange
        self.args = args
        self.student = student
        self.initial = initial

    def restored_on_failure(self) -> AbstractContextManager[None]:
        """Whatever the body raises leaves the model as it was, where it is not overwritten by the next message."""
        return nullcontext()


class ClientModels(ABC):
    """
    Hands each client its model, and keeps what clients keep.

    Args:
        store ([`ClientStore`]): Where they keep it.
    """

    def __init__(self, store: ClientStore) -> None:
        self.store = store

    @abstractmethod
    def open(self, client_id: str) -> ClientModel:
        """The client's model, as the client left it."""

    @abstractmethod
    def kept(self, client_id: str) -> dict[str, Any]:
        """What the client keeps beside its model: the state of its optimizer, of the algorithm."""

    @abstractmethod
    def keep(self, client_id: str, state: dict[str, Any]) -> None:
        """Replace it."""

    def __contains__(self, client_id: object) -> bool:
        """Whether a client keeps anything here."""
        return client_id in self.store

    def clear(self) -> None:
        """Forget every client."""
        self.store.clear()

    def save(self, directory: Path) -> dict[str, str]:
        """As [`ClientStore.save`]."""
        return self.store.save(directory)

    def load(self, directory: Path, digests: Mapping[str, str]) -> None:
        """As [`ClientStore.load`]."""
        self.store.load(directory, digests)


class SharedModel(ClientModels):
    """
    One model for all clients in turn; each gets its values with the message.

    Args:
        trainer (`transformers.Trainer`): The federated trainer.
        exchange ([`Exchange`]): Of its model.
        args (`TrainingArguments`): The user's. Those of the trainer are of rounds while these run.
        store ([`ClientStore`]): What clients keep.
        student ([`Student`], *optional*): The model over the public rows, where there are any.
        initial (`Mapping[str, torch.Tensor]`, *optional*): What they exchange, as it was before the first round, where
            that is needed later.
    """

    def __init__(
        self,
        trainer: Trainer,
        exchange: Exchange,
        args: TrainingArguments,
        store: ClientStore,
        student: Student | None = None,
        initial: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(store)
        self._model = ClientModel(trainer, exchange, args, student, initial)

    def open(self, client_id: str) -> ClientModel:
        return self._model

    def kept(self, client_id: str) -> dict[str, Any]:
        return self.store.get(client_id)

    def keep(self, client_id: str, state: dict[str, Any]) -> None:
        if state:
            self.store.set(client_id, state)


class OwnModel(ClientModel):
    """
    A client's own model while it is in memory.

    Args:
        trainer (`transformers.Trainer`): The client's, with its model, tokenizer and arguments.
        exchange ([`Exchange`]): Reads and writes what trains of it.
        student ([`Student`], *optional*): The model over the public rows, where there are any.
        kept (`dict[str, Any]`): What the client keeps beside its model.
    """

    def __init__(self, trainer: Trainer, exchange: Exchange, student: Student | None, kept: dict[str, Any]) -> None:
        super().__init__(trainer, exchange, trainer.args, student)
        self.kept = kept
        # The forward pass of a mini-batch that waits for the server's answer, under what asked for it.
        self.pending: tuple[Any, torch.Tensor] | None = None

    @contextmanager
    def restored_on_failure(self) -> Iterator[None]:
        # Its answer never came, and a forward pass is no use once the parameters have moved.
        self.pending = None
        before = self.exchange.read()
        try:
            yield
            if name := first_non_finite(self.exchange.tensors):
                raise FloatingPointError(
                    f"Training left NaN or infinite values in {name!r}. Lower this client's learning rate, clip its "
                    "gradients (`max_grad_norm`), or look at its data."
                )
        except BaseException:
            self.exchange.write(before)
            raise


class OwnModels(ClientModels):
    """
    A model of its own for each client, the last used of them in memory.

    Args:
        build (`Callable[[str], tuple[Trainer, Exchange, Student]]`):
            Makes a client's trainer, as it is before the first round. What it makes of a client must not depend on
            when it is called.
        store ([`ClientStore`]): For the models that are not in memory, and for checkpoints.
        max_resident (`int`, *optional*): Models in memory at a time; all by default.
    """

    def __init__(
        self,
        build: Callable[[str], tuple[Trainer, Exchange, Student | None]],
        store: ClientStore,
        max_resident: int | None = None,
    ) -> None:
        super().__init__(store)
        self._build = build
        self._max_resident = max_resident
        self._resident: OrderedDict[str, OwnModel] = OrderedDict()

    def open(self, client_id: str) -> OwnModel:
        if client_id in self._resident:
            self._resident.move_to_end(client_id)
            return self._resident[client_id]
        while self._max_resident is not None and len(self._resident) >= self._max_resident:
            self._put_away(next(iter(self._resident)))
        trainer, exchange, student = self._build(client_id)
        state = self.store.get(client_id)
        if state:
            exchange.restore(state["model"], client_id)
            if student is not None:
                student.load_state_dict(state["student"])
        model = OwnModel(trainer, exchange, student, state.get("kept", {}))
        self._resident[client_id] = model
        return model

    def _put_away(self, client_id: str) -> None:
        self._write(client_id)
        del self._resident[client_id]

    def _write(self, client_id: str) -> None:
        model = self._resident[client_id]
        # The model may go on training, and an optimizer's state is changed in place.
        student = {} if model.student is None else model.student.state_dict()
        beside = copy.deepcopy({"student": student, "kept": model.kept})
        self.store.set(client_id, {"model": model.exchange.read(), **beside})

    def kept(self, client_id: str) -> dict[str, Any]:
        return self.open(client_id).kept

    def keep(self, client_id: str, state: dict[str, Any]) -> None:
        self.open(client_id).kept = state

    def __contains__(self, client_id: object) -> bool:
        return client_id in self._resident or super().__contains__(client_id)

    def clear(self) -> None:
        self._resident.clear()
        super().clear()

    def save(self, directory: Path) -> dict[str, str]:
        for client_id in self._resident:
            self._write(client_id)
        return super().save(directory)

    def load(self, directory: Path, digests: Mapping[str, str]) -> None:
        self._resident.clear()
        super().load(directory, digests)
