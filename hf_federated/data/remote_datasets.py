"""The datasets of clients on other machines: their ids and announced sizes, without examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from datasets import Dataset, Features

from .client_datasets import ClientData, ClientDatasets


class RemoteDatasets(ClientDatasets):
    """
    Datasets of clients on other machines.

    Args:
        client_ids (`Iterable[str]`): Ids of the clients.

    Attributes:
        announced (`dict[str, int | None]`): Number of examples of each client that has joined. `None` for a stream.
    """

    def __init__(self, client_ids: Iterable[str]) -> None:
        super().__init__(list(client_ids))
        self.announced: dict[str, int | None] = {}

    @property
    def features(self) -> Features | None:
        return None

    def num_rows(self) -> list[int | None]:
        return [self.announced.get(client_id) for client_id in self.client_ids]

    def open(self, client_id: str) -> ClientData:
        self._refuse(f"The examples of client {client_id!r} are")

    def transform(self, function: Callable[[Any], Any], label: str | None = None) -> ClientDatasets:
        self._refuse("The examples of the clients are")

    def filter(self, function: Callable[..., Any] | None, **kwargs: Any) -> tuple[ClientDatasets, list[str]]:
        self._refuse("The examples of the clients are")

    def take(self, rows: Mapping[str, np.ndarray]) -> ClientDatasets:
        self._refuse("The examples of the clients are")

    def select(self, client_ids: Sequence[str]) -> ClientDatasets:
        selected = RemoteDatasets(client_ids)
        selected.announced = {name: self.announced[name] for name in client_ids if name in self.announced}
        return selected

    def pooled(self) -> Dataset:
        self._refuse("The examples of the clients are")

    def _refuse(self, subject: str) -> NoReturn:
        raise TypeError(f"{subject} on another machine. Only the client itself can read its examples.")
