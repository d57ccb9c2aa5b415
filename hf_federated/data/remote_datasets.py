"""The datasets of clients on other machines: their ids and announced sizes, without examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from .client_datasets import ClientData, ClientDatasets


if TYPE_CHECKING:
    # The messages import torch, which takes seconds.
    from ..messages import Announcement


class RemoteDatasets(ClientDatasets):
    """
    Datasets of clients on other machines.

    Args:
        client_ids (`Iterable[str]`): Ids of the clients.
        announced (`Mapping[str, Announcement]`): What each client announced that has joined.
        field (`str`, *optional*, defaults to `"num_examples"`): The field of the announcement with the size of the
            datasets.
    """

    def __init__(
        self, client_ids: Iterable[str], announced: Mapping[str, Announcement], field: str = "num_examples"
    ) -> None:
        super().__init__(list(client_ids), features=None)
        self._announced = announced
        self._field = field

    def num_rows(self) -> list[int | None]:
        announced = [self._announced.get(client_id) for client_id in self.client_ids]
        return [None if each is None else getattr(each, self._field) for each in announced]

    def open(self, client_id: str) -> ClientData:
        raise TypeError(
            f"The examples of client {client_id!r} are on another machine. Only the client itself can read its"
            " examples."
        )

    def select(self, client_ids: Sequence[str]) -> ClientDatasets:
        return RemoteDatasets(client_ids, self._announced, self._field)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise a `TypeError`, because the examples are on another machine."""
        raise TypeError(
            "The examples of the clients are on another machine. Only the client itself can read its examples."
        )

    transform = filter = take = pooled = _refuse
