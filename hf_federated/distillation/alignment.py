"""`Alignment`: how the predictions of a client correspond to those of the server's model."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from ..utils.weighted_mean import Tensors
from .encoding import Encoding, Targets


# Encoded targets, the same for all clients or as a function of the client id.
EncodedTargets = Tensors | Callable[[str], Tensors]


class Alignment:
    """
    Maps predictions between a client's model and the server's model, on the server.

    This class is the identity: all models have the same classes in the same order. If they predict words, words that
    a tokenizer drops are left out of the exchange ([`~hf_federated.clients.positions.Positions`]). A method whose
    clients have other classes or another vocabulary sets `alignment` to an instance of a subclass.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.distillation import Alignment

    >>> class ReversedClasses(Alignment):
    ...     def to_server(self, client_id, logits):
    ...         return logits.flip(-1)
    ...
    ...     def to_client(self, client_id, targets):
    ...         return targets.flip(-1)

    >>> ReversedClasses().to_server("north", torch.tensor([[0.0, 1.0]]))
    tensor([[1., 0.]])
    ```
    """

    # Whether clients may have another vocabulary than the server, if the task predicts tokens.
    supports_other_vocabularies: ClassVar[bool] = False

    @property
    def is_identity(self) -> bool:
        """Whether all clients receive the same targets."""
        return type(self) is Alignment

    def encode_targets(self, targets: Targets, encoding: Encoding) -> EncodedTargets:
        """Encode targets of the server for the clients: once for all clients, or as a function of the client id."""
        if self.is_identity:
            return encoding.encode_targets(targets)
        rows = targets[torch.arange(len(targets))]
        return lambda client_id: encoding.encode_targets(self.to_client(client_id, rows))

    def client_shape(self, client_id: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """
        Return the shape of a client's predictions.

        Args:
            client_id (`str`): Id of the client.
            shape (`tuple[int, ...]`): Shape `(rows, classes)` of the predictions of the server's model for the same
                public examples.
        """
        return shape

    def to_server(self, client_id: str, logits: torch.Tensor) -> torch.Tensor:
        """
        Map a client's predictions to the classes of the server's model.

        Args:
            client_id (`str`): Id of the client.
            logits (`torch.Tensor`): Logits of the client, of the shape of `client_shape`.

        Returns:
            `torch.Tensor`: Finite logits of shape `(rows, classes)` of the server's model.

        Raises:
            ValueError: If the logits cannot be mapped. The client is then excluded from the rest of the round.
        """
        return logits

    def to_client(self, client_id: str, targets: torch.Tensor) -> torch.Tensor:
        """
        Map targets of the server to the classes of a client's model.

        Args:
            client_id (`str`): Id of the client.
            targets (`torch.Tensor`): Targets of shape `(rows, classes)` of the server's model.

        Returns:
            `torch.Tensor`: Targets of the shape of `client_shape`.
        """
        return targets
