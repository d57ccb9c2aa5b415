"""What a trainer does to its data in its constructor, done to every client's data, once.

Some trainers tokenize, pack or score their rows when they are built: TRL's and those of sentence-transformers. A
federated trainer is built with one client's rows in the place of all; what the constructor does with them is noted
and done again with the rows of each other client, when these are first asked for. No second trainer is ever built: its
constructor would change the shared model.

Of other trainers the constructor gets a stand-in for the rows. It may hand it on and no more: what it did with one
client's rows could not be done again with another's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..clients import UnsupportedTrainerError
from ..data import FederatedDataset


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


class StandIn:
    """
    In the place of the training data while a trainer is built. It has the type and the number of rows of the clients'
    data, which `Trainer` looks at, and refuses everything else.

    Args:
        trainer_class (`type`): Whose constructor gets it.
        clients ([`FederatedDataset`]): Whose rows it stands for.
    """

    def __init__(self, trainer_class: type, clients: FederatedDataset) -> None:
        self._trainer_class = trainer_class
        self._type = type(clients[next(iter(clients))])
        self._num_rows = sum(rows or 0 for rows in clients.num_rows.values())

    # Code that asks for a type before it prepares rows would otherwise leave them as they are, without a word.
    @property  # type: ignore[misc]  # `object` declares an attribute
    def __class__(self) -> Any:
        return self._type

    def __len__(self) -> int:
        # Streams count as none, but `Trainer` refuses data without a length.
        return self._num_rows

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise uses_its_data(self._trainer_class, f"it asks for {name!r}")

    def __getitem__(self, key: Any) -> Any:
        raise uses_its_data(self._trainer_class, f"it reads {key!r}")

    def __iter__(self) -> Iterator[Any]:
        raise uses_its_data(self._trainer_class, "it goes over the rows")


def uses_its_data(trainer_class: type, how: str) -> UnsupportedTrainerError:
    """The error of a trainer that does something with its data in its constructor."""
    return UnsupportedTrainerError(
        f"The constructor of {trainer_class.__name__} does something with its data ({how}), which would reach no "
        "client: each has rows of its own. Do it to the clients' data before the trainer is built, with "
        "`FederatedDataset.map` or a `filter` of each client's data set, and pass what follows from the data, such as "
        "class weights, as an argument."
    )


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
