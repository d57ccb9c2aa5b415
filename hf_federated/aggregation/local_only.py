"""LocalOnly: nobody sends parameters. What is left of a federation without communication, and the base of those in
which only predictions travel."""

from __future__ import annotations

from typing import ClassVar

from ..utils.weighted_mean import State
from .base import Accumulator, Aggregation


class LocalOnly(Aggregation):
    """
    Every client trains a model of its own from round to round, and the server's model stays as it is.

    It is the baseline that a federation has to beat: with `evaluate_clients=True` each client's own model is evaluated
    on its own rows. Methods that exchange predictions (`distillation` of [`FederatedConfig`]) put it in the place of
    an average.

    Example:

    ```python
    >>> from hf_federated import LocalOnly

    >>> LocalOnly()
    LocalOnly()
    ```
    """

    name: ClassVar[str] = "local_only"
    exchanges_parameters: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__("examples")

    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        return state
