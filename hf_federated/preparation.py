"""What a trainer does to its data in its constructor, done to every client's data, once.

Some trainers tokenize, pack or score their rows when they are built: TRL's and those of sentence-transformers. A
federated trainer is built with one client's rows in the place of all; what the constructor does with them is noted
and done again with the rows of each other client, when these are first asked for. No second trainer is ever built: its
constructor would change the shared model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .data import FederatedDataset


if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


# Methods that take a data set and return it prepared.
PREPARATIONS = ("_prepare_dataset", "_precompute_ref_logps", "preprocess_dataset")
# Those of them that depend on the weights, and so cannot wait until the first round is over.
USES_WEIGHTS = {"_precompute_ref_logps"}


class Preparation:
    """
    What became of one data set in a constructor.

    Args:
        example (`Any`): The data set that the constructor gets.
    """

    def __init__(self, example: Any) -> None:
        self.prepared = example
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    @property
    def uses_weights(self) -> bool:
        """Whether it must be done before any training."""
        return any(name in USES_WEIGHTS for name, _, _ in self.calls)


class PreparingMixin(_Base):
    """Notes what a constructor does to its data sets, and does it again."""

    _preparations: list[Preparation] | None = None

    @classmethod
    def prepares_data(cls) -> bool:
        """Whether the constructor of the trainer does anything to its rows."""
        parents = cls.__mro__[cls.__mro__.index(PreparingMixin) + 1 :]
        return any(name in vars(parent) for parent in parents for name in PREPARATIONS)

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_dataset(dataset, *args, **kwargs)
        return self._note("_prepare_dataset", dataset, result, args, kwargs)

    def _precompute_ref_logps(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._precompute_ref_logps(dataset, *args, **kwargs)
        return self._note("_precompute_ref_logps", dataset, result, args, kwargs)

    def preprocess_dataset(self, dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The parent's."""
        result = super().preprocess_dataset(dataset, *args, **kwargs)
        return self._note("preprocess_dataset", dataset, result, args, kwargs)

    def _note(self, name: str, dataset: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for preparation in self._preparations or ():
            if preparation.prepared is dataset:
                preparation.prepared = result
                preparation.calls.append((name, args, kwargs))
                break
        return result

    def prepare_client(self, preparation: Preparation, dataset: Any) -> Any:
        """Do to a client's data set what was done to the example."""
        for name, args, kwargs in preparation.calls:
            dataset = getattr(self, name)(dataset, *args, **kwargs)
        return dataset


class PreparedClients(Mapping[str, Any]):
    """
    The clients' data sets as the trainer wants them, each prepared once, when it is first asked for.

    Args:
        trainer ([`PreparingMixin`]): Prepares them.
        preparation ([`Preparation`]): What was done to the first client's.
        clients ([`FederatedDataset`]): As the user gave them.
        prepared (`Mapping[str, Any]`, *optional*): Clients that are prepared already.
    """

    def __init__(
        self,
        trainer: PreparingMixin,
        preparation: Preparation,
        clients: FederatedDataset,
        prepared: Mapping[str, Any] | None = None,
    ) -> None:
        self._trainer = trainer
        self._preparation = preparation
        self._clients = clients
        self._prepared = dict(prepared or {})
        if preparation.uses_weights:
            for client_id in clients:
                self[client_id]

    def __getitem__(self, client_id: str) -> Any:
        if client_id not in self._prepared:
            self._prepared[client_id] = self._trainer.prepare_client(self._preparation, self._clients[client_id])
        return self._prepared[client_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)
