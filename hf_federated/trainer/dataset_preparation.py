"""Repeat the dataset preparation of a trainer's constructor for every client.

Some trainers tokenize, pack or score their examples in the constructor, for example those of TRL and of
sentence-transformers. Such a trainer is constructed with the dataset of one client. The calls that prepare this
dataset are recorded, and repeated for the dataset of every other client on first access. No second trainer is
constructed, because its constructor would change the shared model.

The constructors of all other trainers get a placeholder instead of a dataset. A constructor may pass the placeholder
on, but must not read examples from it, because a computation on the examples of one client cannot be repeated for the
other clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..clients import UnsupportedTrainerError
from ..data import FederatedDataset
from ..data.torch_datasets import is_stream


if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


# Methods that take a dataset and return the prepared dataset.
PREPARATIONS = ("_prepare_dataset", "_precompute_ref_logps", "preprocess_dataset")
# Preparations that depend on the weights of the model and must therefore run before any training.
WEIGHT_DEPENDENT = {"_precompute_ref_logps"}


class Preparation:
    """
    The preparation of one dataset in a constructor.

    Args:
        dataset (`Any`): The dataset that the constructor gets.
    """

    def __init__(self, dataset: Any) -> None:
        self.prepared = dataset
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []


class DatasetPlaceholder:
    """
    Replaces the training dataset while a trainer is constructed.

    It has the type and the number of examples of the clients' datasets, which `Trainer` reads. Every other access
    raises [`UnsupportedTrainerError`].

    Args:
        trainer_class (`type`): The class that is constructed.
        clients ([`FederatedDataset`]): The clients' training examples.
    """

    def __init__(self, trainer_class: type, clients: FederatedDataset) -> None:
        self._trainer_class = trainer_class
        self._type = type(clients[next(iter(clients))])
        self._num_examples = sum(number or 0 for number in clients.num_rows.values())

    # A constructor that checks the type of its dataset would otherwise skip the preparation without an error.
    @property  # type: ignore[misc]  # `object` declares an attribute
    def __class__(self) -> Any:
        return self._type

    def __len__(self) -> int:
        # A stream counts as 0 examples, because `Trainer` refuses a dataset without a length.
        return self._num_examples

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise constructor_data_error(self._trainer_class, f"it accesses {name!r}")

    def __getitem__(self, key: Any) -> Any:
        raise constructor_data_error(self._trainer_class, f"it reads {key!r}")

    def __iter__(self) -> Iterator[Any]:
        raise constructor_data_error(self._trainer_class, "it iterates over the examples")


def constructor_data_error(trainer_class: type, reason: str) -> UnsupportedTrainerError:
    """Build the error for a trainer whose constructor uses its dataset."""
    return UnsupportedTrainerError(
        f"The constructor of {trainer_class.__name__} uses its dataset ({reason}). This cannot be repeated for the "
        "datasets of the clients. Transform the clients' datasets before you build the trainer, with "
        "`FederatedDataset.map` or `FederatedDataset.filter`. Pass values that are computed from "
        "the data, such as class weights, as arguments."
    )


@contextmanager
def accept_stream(trainer: Any, args: Any, dataset: Any) -> Iterator[None]:
    """
    Construct a trainer with the stream of a client, which has no length.

    `Trainer` refuses such a dataset without `max_steps`. In a federation, `local_steps` defines the number of steps.

    Args:
        trainer (`transformers.Trainer`): The trainer, whose constructor may replace the training arguments.
        args (`TrainingArguments`, *optional*): The training arguments.
        dataset (`Any`): The dataset that the constructor gets.
    """
    if args is None or not is_stream(dataset) or args.max_steps > 0:
        yield
        return
    max_steps, args.max_steps = args.max_steps, 1
    try:
        yield
        trainer.args.max_steps = max_steps
    finally:
        args.max_steps = max_steps


class PreparingMixin(_Base):
    """Records how a constructor prepares its datasets, and repeats the preparation."""

    _preparations: list[Preparation] | None = None

    @classmethod
    def prepares_data(cls) -> bool:
        """Whether the constructor of the trainer prepares its datasets."""
        parents = cls.__mro__[cls.__mro__.index(PreparingMixin) + 1 :]
        return any(name in vars(parent) for parent in parents for name in PREPARATIONS)

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return self._record_call("_prepare_dataset", dataset, args, kwargs)

    def _precompute_ref_logps(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return self._record_call("_precompute_ref_logps", dataset, args, kwargs)

    def preprocess_dataset(self, dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Call `preprocess_dataset` of the parent class and record the call."""
        return self._record_call("preprocess_dataset", dataset, args, kwargs)

    def _record_call(self, name: str, dataset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the parent class, and record the call if it prepares a dataset of the constructor."""
        result = getattr(super(), name)(dataset, *args, **kwargs)
        for preparation in self._preparations or ():
            if preparation.prepared is dataset:
                preparation.prepared = result
                preparation.calls.append((name, args, kwargs))
                break
        return result

    def prepare_client(self, preparation: Preparation, dataset: Any) -> Any:
        """Prepare the dataset of a client with the recorded calls."""
        for name, args, kwargs in preparation.calls:
            dataset = getattr(self, name)(dataset, *args, **kwargs)
        return dataset


class PreparedClients(Mapping[str, Any]):
    """
    The prepared datasets of the clients. Each dataset is prepared once, on first access.

    Args:
        trainer ([`PreparingMixin`]): The trainer that prepares the datasets.
        preparation ([`Preparation`]): The recorded preparation of the first client's dataset.
        clients ([`FederatedDataset`]): The datasets that the user passed.
        prepared (`Mapping[str, Any]`, *optional*): Prepared datasets by client id.
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
        if any(name in WEIGHT_DEPENDENT for name, _, _ in preparation.calls):
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
