"""Checks of what clients cause in a server's body: hidden states and gradients that are not finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils import get_total_norm

from ..utils.finite_values import is_finite


class ClientFaultError(ValueError):
    """
    Raised if the messages of some clients make a computation for several clients impossible.

    Args:
        client_ids (`Sequence[str]`): The clients that cause the error.
        text (`str`): The error, as a clause that names the clients.
        is_recoverable (`bool`, *optional*, defaults to `True`): Whether the computation can be repeated without these
            clients.
    """

    def __init__(self, client_ids: Sequence[str], text: str, is_recoverable: bool = True) -> None:
        super().__init__(text)
        self.client_ids = list(client_ids)
        self.is_recoverable = is_recoverable


def norm(tensor: torch.Tensor) -> float:
    """Return the norm of a tensor. The squares of float32 values would overflow above 1e19."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def overflow_error(
    client_ids: Sequence[str], received: Sequence[torch.Tensor], answers: Sequence[torch.Tensor]
) -> ClientFaultError:
    """
    Name the clients whose hidden states or gradients lead to gradients that are not finite.

    Args:
        client_ids (`Sequence[str]`): The clients of a server batch.
        received (`Sequence[torch.Tensor]`): The received gradient of each client.
        answers (`Sequence[torch.Tensor]`): The gradient for each client.
    """
    faulty = [client_id for client_id, answer in zip(client_ids, answers, strict=True) if not is_finite(answer)]
    if not faulty or len(faulty) == len(client_ids):
        norms = [norm(gradient) for gradient in received]
        faulty = [client_ids[norms.index(max(norms))]]
    return ClientFaultError(
        faulty,
        "The received gradients lead to gradients of the server's blocks that are not finite. They are from client "
        f"{', '.join(map(repr, faulty))}.",
        is_recoverable=False,
    )


def check_outputs(client_ids: Sequence[str], outputs: Sequence[torch.Tensor]) -> None:
    """
    Reject the clients of a server batch whose hidden states overflow in the body.

    A gradient of zero times NaN is NaN, so the graph of the batch would be of no use to the other clients.

    Args:
        client_ids (`Sequence[str]`): The clients of the server batch.
        outputs (`Sequence[torch.Tensor]`): The hidden states of each client behind the body.

    Raises:
        ClientFaultError: If hidden states of one of several clients are not finite.
    """
    if len(client_ids) > 1 and not are_finite(outputs):
        faulty = [client_id for client_id, states in zip(client_ids, outputs, strict=True) if not is_finite(states)]
        raise ClientFaultError(
            faulty, f"the hidden states of client {', '.join(map(repr, faulty))} overflow in the server's blocks"
        )


def are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all values are finite. A norm of all tensors is faster than separate checks of hundreds of adapters."""
    if bool(get_total_norm(tensors).isfinite()):
        return True
    # The norm may overflow although all values are finite.
    return all(map(is_finite, tensors))
