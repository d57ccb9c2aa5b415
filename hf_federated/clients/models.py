"""The models that clients train: one shared model, or one model per client.

Algorithms that exchange parameters use [`SharedModel`]: clients take turns on the federated trainer's model, and each
message brings the parameters. Algorithms that exchange predictions use [`OwnModels`]: each client has its own model,
possibly with a different architecture and tokenizer, and keeps it from round to round. These models are in memory up
to a limit; the remaining models are in the client store.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from ..adapters import Exchange
from ..messages.validation import first_non_finite
from .store import ClientStore
from .student import Student


@dataclass(eq=False)
class ClientModel:
    """
    A client's model together with its trainer.

    Args:
        trainer (`transformers.Trainer`): The trainer from which the client's local trainers are copied.
        exchange ([`Exchange`]): Reads and writes the exchanged parameters of the model.
        args (`TrainingArguments`): The client's training arguments for the whole run.
        student ([`Student`], *optional*): The model on the public examples, if there are public examples.
        initial (`Mapping[str, torch.Tensor]`, *optional*): The exchanged parameters before the first round, if they
            are needed later.
    """

    trainer: Trainer
    exchange: Exchange
    args: TrainingArguments
    student: Student | None = None
    initial: Mapping[str, torch.Tensor] | None = None

    def restore_on_failure(self) -> AbstractContextManager[None]:
        """
        Return a context manager that restores the model after an error.

        Here it does nothing, because the next message overwrites a shared model.
        """
        return nullcontext()


class ClientModels(ABC):
    """
    Provides the model of each client and keeps the state of clients.

    Args:
        store ([`ClientStore`]): Storage for the state of clients.
    """

    def __init__(self, store: ClientStore) -> None:
        self.store = store

    @abstractmethod
    def open(self, client_id: str) -> ClientModel:
        """Return the model of a client as its last training left it."""

    @abstractmethod
    def get_state(self, client_id: str) -> dict[str, Any]:
        """Return the client's state in addition to its model: the states of its optimizer and of the algorithm."""

    @abstractmethod
    def set_state(self, client_id: str, state: dict[str, Any]) -> None:
        """Replace the client's state."""

    @property
    def num_changes(self) -> int | None:
        """
        Number of possible changes of the states so far. While the number stays the same, `save` writes the same files.

        `None` if changes are not counted.
        """
        return None

    def __contains__(self, client_id: object) -> bool:
        """Whether there is a state for a client."""
        return client_id in self.store

    def clear(self) -> None:
        """Delete the states of all clients."""
        self.store.clear()

    def save(self, directory: Path) -> dict[str, str]:
        """Write all states into a directory. See [`ClientStore.save`]."""
        return self.store.save(directory)

    def load(self, directory: Path, digests: Mapping[str, str]) -> None:
        """Read states from a directory. See [`ClientStore.load`]."""
        self.store.load(directory, digests)


class SharedModel(ClientModels):
    """
    One model that all clients use in turn. Each message brings the values of its exchanged parameters.

    Args:
        trainer (`transformers.Trainer`): The federated trainer.
        exchange ([`Exchange`]): Reads and writes the exchanged parameters of the trainer's model.
        args (`TrainingArguments`): The user's training arguments. While clients train, `trainer.args` count rounds
            instead.
        store ([`ClientStore`]): Storage for the state of clients.
        student ([`Student`], *optional*): The model on the public examples, if there are public examples.
        initial (`Mapping[str, torch.Tensor]`, *optional*): The exchanged parameters before the first round, if they
            are needed later.
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

    def get_state(self, client_id: str) -> dict[str, Any]:
        return self.store.get(client_id)

    def set_state(self, client_id: str, state: dict[str, Any]) -> None:
        if state:
            self.store.set(client_id, state)

    @property
    def num_changes(self) -> int | None:
        return self.store.num_changes


class OwnModel(ClientModel):
    """
    A client's own model while it is in memory.

    Args:
        trainer (`transformers.Trainer`): The client's trainer, with the client's model, tokenizer and arguments.
        exchange ([`Exchange`]): Reads and writes the trainable parameters of the model.
        student ([`Student`], *optional*): The model on the public examples, if there are public examples.
        kept (`dict[str, Any]`): The client's state in addition to the model.
    """

    def __init__(self, trainer: Trainer, exchange: Exchange, student: Student | None, kept: dict[str, Any]) -> None:
        super().__init__(trainer, exchange, trainer.args, student)
        self.kept = kept
        # The logits of a mini-batch whose server reply is pending, with the identity of the request.
        self.pending: tuple[Any, torch.Tensor] | None = None

    @contextmanager
    def restore_on_failure(self) -> Iterator[None]:
        # Drop the pending forward pass: training changes the parameters that it was computed with.
        self.pending = None
        before = self.exchange.read()
        try:
            yield
            if name := first_non_finite(self.exchange.tensors):
                raise diverged(name)
        except BaseException:
            self.exchange.write(before)
            raise


def diverged(name: str) -> FloatingPointError:
    """Return the error of a client whose training produced NaN or infinite values in a tensor."""
    return FloatingPointError(
        f"Local training produced NaN or infinite values in {name!r}. Lower the client's learning rate, "
        "clip its gradients (`max_grad_norm`), or check its data."
    )


class OwnModels(ClientModels):
    """
    One model per client. The most recently used models are in memory.

    Args:
        build (`Callable[[str], tuple[Trainer, Exchange, Student | None]]`):
            Builds the trainer of a client as it is before the first round. The result must not depend on the time of
            the call.
        store ([`ClientStore`]): Storage for the models that are not in memory, and for checkpoints.
        max_resident (`int`, *optional*): Maximum number of models in memory. By default all models stay in memory.
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
        self._num_opened = 0

    def open(self, client_id: str) -> OwnModel:
        self._num_opened += 1
        if client_id in self._resident:
            self._resident.move_to_end(client_id)
            return self._resident[client_id]
        while self._max_resident is not None and len(self._resident) >= self._max_resident:
            oldest = next(iter(self._resident))
            self._write_to_store(oldest)
            del self._resident[oldest]
        trainer, exchange, student = self._build(client_id)
        state = self.store.get(client_id)
        if state:
            exchange.restore(state["model"], client_id)
            if student is not None:
                student.load_state_dict(state["student"])
        model = OwnModel(trainer, exchange, student, state.get("kept", {}))
        self._resident[client_id] = model
        return model

    def _write_to_store(self, client_id: str) -> None:
        model = self._resident[client_id]
        # Copy: later training steps change the optimizer's state in place.
        student = {} if model.student is None else model.student.state_dict()
        other_state = copy.deepcopy({"student": student, "kept": model.kept})
        self.store.set(client_id, {"model": model.exchange.read(), **other_state})

    def get_state(self, client_id: str) -> dict[str, Any]:
        return self.open(client_id).kept

    def set_state(self, client_id: str, state: dict[str, Any]) -> None:
        self.open(client_id).kept = state

    @property
    def num_changes(self) -> int | None:
        # The caller of `open` can change the model, by training, a distillation or a write of parameters.
        in_store = self.store.num_changes
        return None if in_store is None else self._num_opened + in_store

    def __contains__(self, client_id: object) -> bool:
        return client_id in self._resident or super().__contains__(client_id)

    def clear(self) -> None:
        self._resident.clear()
        super().clear()

    def save(self, directory: Path) -> dict[str, str]:
        for client_id in self._resident:
            self._write_to_store(client_id)
        return super().save(directory)

    def load(self, directory: Path, digests: Mapping[str, str]) -> None:
        self._resident.clear()
        super().load(directory, digests)
