"""LocalOnly: clients train separately and send no parameters."""

from __future__ import annotations

from typing import ClassVar

from ..utils.weighted_mean import State
from .base import Accumulator, Aggregation


class LocalOnly(Aggregation):
    """
    LocalOnly: local training without exchange of parameters, the baseline of a federation.

    Every client keeps its model and trains it from round to round. The model of the server does not change. With
    `evaluate_clients=True`, the model of each client is evaluated on the evaluation data of the client. Methods that
    exchange predictions (`distillation` of [`FederatedConfig`]) use this class as their aggregation.

    Requirements:
        No postprocessors, because clients send no parameters.

    Relations:
        - [`FedAvg`] averages the parameters of the clients.

    Example:

    ```python
    >>> from hf_federated import LocalOnly

    >>> LocalOnly()
    LocalOnly()
    ```
    """

    name: ClassVar[str] = "local_only"
    supports_late_updates: ClassVar[bool] = False
    exchanges_parameters: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__("examples")

    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        return state
