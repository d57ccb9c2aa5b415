"""Repeat the dataset preparation of a trainer's constructor for every client.

Some trainers tokenize, pack or score their examples in the constructor, for example those of TRL and of
sentence-transformers. Such a trainer is constructed with the dataset of one client. The calls that prepare this
dataset are recorded, and repeated for the dataset of every other client on first access. No second trainer is
constructed, because its constructor would change the shared model.

The constructors of all other trainers get a placeholder instead of a dataset. A constructor may pass the placeholder
on, read its columns, and call methods such as `map`. These calls are recorded and repeated for the dataset of every
client. A constructor must not read examples of the placeholder, because a computation on the examples of one client
cannot be repeated for the other clients.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from datasets import Dataset, IterableDataset
from transformers import TrainingArguments
from transformers.utils import logging

from ..clients import UnsupportedTrainerError
from ..data import FederatedDataset
from ..data.torch_datasets import is_stream


if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


logger = logging.get_logger(__name__)

# Methods of a trainer that take a dataset and return the prepared dataset.
PREPARATIONS = ("_prepare_dataset", "_precompute_ref_logps", "preprocess_dataset")
# Preparations that depend on the weights of the model and must therefore run before any training.
WEIGHT_DEPENDENT = {"_precompute_ref_logps"}
# Methods of a dataset that return the prepared dataset.
TRANSFORMS = {
    *("map", "filter", "sort", "shuffle", "cast", "cast_column"),
    *("select_columns", "remove_columns", "rename_column", "rename_columns"),
}
# What all clients have in common.
METADATA = {"column_names", "features"}


class Preparation:
    """
    The preparation of one dataset in a constructor.

    Args:
        dataset (`Any`): The dataset that the constructor gets.

    Attributes:
        prepared (`Any`): The dataset that the constructor has prepared.
        steps (`list[Callable[[Any], Any]]`): Functions that take the dataset of a client and return the prepared
            dataset. They are called one after the other.
        reads_weights (`bool`): Whether a step depends on the weights of the model.
    """

    def __init__(self, dataset: Any) -> None:
        self.prepared = dataset
        self.steps: list[Callable[[Any], Any]] = []
        self.reads_weights = False

    def __call__(self, dataset: Any) -> Any:
        """Prepare the dataset of a client."""
        for step in self.steps:
            dataset = step(dataset)
        return dataset

    def take(self, dataset: Any, like: Preparation | None = None) -> bool:
        """
        Take over the recorded calls of a placeholder that the constructor has transformed.

        Args:
            dataset (`Any`): The dataset of the trainer after the construction.
            like ([`Preparation`], *optional*): The preparation of the training examples. A constructor that
                transforms its training examples transforms its evaluation examples in the same way.

        Returns:
            `bool`: Whether the dataset is the prepared dataset, so that the steps can be repeated.
        """
        # `isinstance` would see the type that the placeholder pretends to be.
        if type(dataset) is DatasetPlaceholder and type(self.prepared) is DatasetPlaceholder:
            self.prepared, self.steps = dataset, list(dataset.steps)
        if dataset is self.prepared:
            return True
        if like is None or type(like.prepared) is not DatasetPlaceholder or not like.steps:
            return False
        repeated = like(self.prepared)
        if (len(repeated), repeated[:1]) != (len(dataset), dataset[:1]):
            return False
        self.prepared, self.steps = dataset, like.steps
        return True


class DatasetPlaceholder:
    """
    Replaces the training dataset while a trainer is constructed.

    It has the type, the columns and the number of examples of the clients' datasets. A call of a method in
    `TRANSFORMS` returns another placeholder, which has recorded the call. Every other access raises
    [`UnsupportedTrainerError`].

    Args:
        trainer_class (`type`): The class that is constructed.
        clients ([`FederatedDataset`]): The clients' training examples.
        steps (`Sequence[Callable[[Any], Any]]`, *optional*): The recorded calls.
    """

    def __init__(
        self, trainer_class: type, clients: FederatedDataset, steps: Sequence[Callable[[Any], Any]] = ()
    ) -> None:
        self._trainer_class = trainer_class
        self._clients = clients
        self._type = Dataset if clients.is_remote else type(clients[next(iter(clients))])
        self._num_examples = sum(number or 0 for number in clients.num_rows.values())
        self.steps = list(steps)

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
        if issubclass(self._type, (Dataset, IterableDataset)):
            if name == "cache_files":
                return []  # The files of one client are not the files of the other clients.
            if name in TRANSFORMS:
                return functools.partial(self._record, name)
            if name in METADATA and not self._clients.is_remote:
                return getattr(self._first, name)
        raise constructor_data_error(self._trainer_class, f"it accesses {name!r}")

    def _record(self, name: str, *args: Any, **kwargs: Any) -> DatasetPlaceholder:
        step = operator.methodcaller(name, *args, **kwargs)
        return DatasetPlaceholder(self._trainer_class, self._clients, [*self.steps, step])

    @functools.cached_property
    def _first(self) -> Any:
        """The dataset of the first client after the recorded calls."""
        dataset = self._clients[next(iter(self._clients))]
        for step in self.steps:
            dataset = step(dataset)
        return dataset

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
                preparation.steps.append(lambda rows: getattr(self, name)(rows, *args, **kwargs))
                preparation.reads_weights |= name in WEIGHT_DEPENDENT
                break
        return result


def count_dropped(dataset: Any, prepared: Any, args: TrainingArguments) -> int:
    """
    Count the examples that a preparation has dropped.

    The trainers of TRL drop examples of which `max_length` would cut off all tokens that have a loss.

    Args:
        dataset (`Any`): The examples of a client.
        prepared (`Any`): The prepared examples.
        args (`TrainingArguments`): The training arguments.

    Returns:
        `int`: Number of dropped examples; 0 for streams and with packing, which also reduces the number of examples.
    """
    if is_stream(dataset) or is_stream(prepared) or getattr(args, "packing", False):
        return 0
    return max(len(dataset) - len(prepared), 0)


def check_dropped(client_id: str, dataset: Any, prepared: Any, args: TrainingArguments) -> int:
    """
    Count the examples of a client that the preparation has dropped, and name the client.

    Args:
        client_id (`str`): Id of the client.
        dataset (`Any`): The examples of the client.
        prepared (`Any`): The prepared examples.
        args (`TrainingArguments`): The training arguments.

    Returns:
        `int`: Number of dropped examples, as [`count_dropped`] returns it.

    Raises:
        ValueError: If no example is left.
    """
    if is_stream(dataset) or is_stream(prepared) or len(prepared) >= len(dataset):
        return 0
    max_length = getattr(args, "max_length", None)
    reason = "the trainer filters its examples" if max_length is None else f"they are too long for {max_length=}"
    if not len(prepared):
        advice = "Change the filter" if max_length is None else "Set a larger `max_length`"
        raise ValueError(
            f"Client {client_id!r}: all {len(dataset)} examples were dropped, because {reason}. {advice}, or leave "
            "this client out."
        )
    if num_dropped := count_dropped(dataset, prepared, args):
        logger.warning(
            f"Client {client_id!r}: {num_dropped} of {len(dataset)} examples were dropped, because {reason}. They do "
            "not count for the weight of the client."
        )
    return num_dropped


class PreparedClients(Mapping[str, Any]):
    """
    The prepared datasets of the clients. Each dataset is prepared once, on first access.

    Args:
        args (`TrainingArguments`): The training arguments.
        preparation ([`Preparation`]): The recorded preparation of the first client's dataset.
        clients ([`FederatedDataset`]): The datasets that the user passed.
        prepared (`Mapping[str, Any]`, *optional*): Prepared datasets by client id.
    """

    def __init__(
        self,
        args: TrainingArguments,
        preparation: Preparation,
        clients: FederatedDataset,
        prepared: Mapping[str, Any] | None = None,
    ) -> None:
        self._args = args
        self._preparation = preparation
        self._clients = clients
        self._prepared = dict(prepared or {})
        # The number of examples that the preparation has dropped so far.
        self.num_dropped = 0
        for client_id, dataset in self._prepared.items():
            self.num_dropped += check_dropped(client_id, clients[client_id], dataset, args)
        if preparation.reads_weights:
            for client_id in clients:
                self[client_id]

    def __getitem__(self, client_id: str) -> Any:
        if client_id not in self._prepared:
            dataset = self._clients[client_id]
            prepared = self._preparation(dataset)
            self.num_dropped += check_dropped(client_id, dataset, prepared, self._args)
            self._prepared[client_id] = prepared
        return self._prepared[client_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)
