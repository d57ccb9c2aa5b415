"""Clients without a trainer, which return the received parameters, and the model that they return."""

from __future__ import annotations

import threading

import torch
from torch import nn

from hf_federated.messages import Announcement, ClientUpdate, Fit, read_message
from hf_federated.trainer.network_settings import NetworkSettings
from hf_federated.transport import GrpcConnection
from hf_federated.transport.framing import unframe


MEGABYTE = 10**6


class Payload(nn.Module):
    """A model that consists of one payload, in tensors of 1 MB."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(250, 1000) for _ in range(num_bytes // MEGABYTE))

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": sum(weight.sum() for weight in self.weights)}


def returning_client(address: str, settings: dict[str, str], name: str) -> None:
    """Answer with the received parameters, as a client that has trained."""
    announcement = Announcement(1, 1, 0, 1).to_bytes()
    with GrpcConnection(address, None, name, NetworkSettings(settings), announcement, insecure=True) as connection:
        reply: bytes | None = None
        while (blob := connection.receive(reply)) is not None:
            _, content = unframe(blob, state=str, keep=list, num_clients=int)
            message = read_message(bytes(content))
            assert isinstance(message, Fit)
            update = ClientUpdate(message.round, name, message.state, 1, 0, 1, {"loss": 1.0}, nonce=message.nonce)
            reply = update.to_bytes()
            del blob, content, message, update


def returning_clients(address: str, settings: dict[str, str], names: list[str]) -> None:
    """Run several clients in the threads of one process."""
    threads = [threading.Thread(target=returning_client, args=(address, settings, name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
