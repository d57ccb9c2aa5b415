"""A session of secure aggregation without a trainer: clients and a server that exchange messages in one process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hf_federated.messages import ClientFailure, Message, RefusedRequestError
from hf_federated.messages.secure_aggregation import MaskedUpdate, SecureFit
from hf_federated.secure_aggregation import SecureAggregation
from hf_federated.secure_aggregation.client_session import ClientSession
from hf_federated.secure_aggregation.content import fit_digest
from hf_federated.secure_aggregation.credentials import Credentials, simulated_identity
from hf_federated.secure_aggregation.ring import Ring
from hf_federated.secure_aggregation.server_session import ServerSession


# Names of the phases in which a client can be lost.
PHASES = ("keys", "shares", "masked update", "signature", "unmasking")


def names(number: int) -> list[str]:
    return [f"client {number:02d}" for number in range(number)]


def updates(number: int, num_values: int = 50, seed: int = 0, modulus: int = 2**32) -> dict[str, torch.Tensor]:
    """Integers of the whole ring, so that sums wrap around."""
    generator, ring = torch.Generator().manual_seed(seed), Ring(modulus)
    low, high = (0, modulus) if ring.is_field else (-modulus // 2, modulus // 2)
    return {
        name: torch.randint(low, high, (num_values,), generator=generator).to(ring.dtype) for name in names(number)
    }


def sum_of(values: Collection[torch.Tensor], modulus: int = 2**32) -> torch.Tensor:
    """The sum in Python integers, in the form of a sum of the ring."""
    ring = Ring(modulus)
    sums = [sum(column) % modulus for column in zip(*(value.tolist() for value in values), strict=True)]
    half = modulus if ring.is_field else modulus // 2
    return torch.tensor([value - modulus if value >= half else value for value in sums], dtype=ring.total_dtype)


def request_for(client_id: str, num_clients: int, session: str = "s", round: int = 0) -> SecureFit:
    return SecureFit(round, client_id, seed=0, state={"w": torch.zeros(3)}, session=session, num_clients=num_clients)


@dataclass
class Exchange:
    """
    Runs a session.

    Args:
        protocol: The protocol.
        values: The encoded update of each client.
        lost: The phase before which each lost client is lost.
        change: Called with each request before its client answers it, to change it.
        consent: Called with a client and the survivors before the client signs them.
        min_clients: Smallest number of clients of a sum.
        spoil: Changes the last reply of a client, by client id.
    """

    protocol: SecureAggregation
    values: Mapping[str, torch.Tensor]
    lost: Mapping[str, str] = field(default_factory=dict)
    change: Callable[[Message], Message] = lambda request: request
    consent: Callable[[str, Sequence[str]], None] = lambda client_id, survivors: None
    min_clients: int = 2
    spoil: Mapping[str, Callable[[Message], Message]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        identity = simulated_identity()
        pins = dict.fromkeys(self.values, identity.fingerprint)
        self.clients: dict[str, ClientSession] = {}
        self.credentials: dict[str, Credentials] = {}
        self.refusals: dict[str, str] = {}
        # The sessions change these tensors in place.
        self.encoded = {name: values.clone() for name, values in self.values.items()}
        self.server = ServerSession(self.protocol, "s", 0, self.min_clients)
        for name, values in self.values.items():
            request = request_for(name, len(self.values))
            self.credentials[name] = Credentials(identity, pins)
            self.clients[name] = ClientSession(
                self.protocol,
                request,
                fit_digest(request),
                self.credentials[name],
                len(values),
                lambda name=name: self.encoded[name],
                lambda survivors, name=name: self.consent(name, survivors),
            )

    def is_lost(self, client_id: str, phase: str) -> bool:
        return client_id in self.lost and PHASES.index(self.lost[client_id]) <= PHASES.index(phase)

    def ask(self, phase: str, clients: Collection[str], message_for: Callable[[str], Message]) -> dict[str, Message]:
        replies: dict[str, Message] = {}
        for name in clients:
            if self.is_lost(name, phase):
                replies[name] = ClientFailure(0, name, "the client is lost")
                continue
            try:
                replies[name] = self.clients[name].answer(self.change(message_for(name)))
            except RefusedRequestError as error:
                self.refusals[name] = str(error)
                replies[name] = ClientFailure(0, name, str(error))
        return replies

    def advertise(self) -> None:
        replies: dict[str, Message] = {
            name: ClientFailure(0, name, "the client is lost") if self.is_lost(name, "keys") else session.advertise()
            for name, session in self.clients.items()
        }
        self.server.add_keys(replies)

    def run(self) -> torch.Tensor:
        """Return the sum that the server learns."""
        server = self.server
        self.advertise()
        server.add_shares(self.ask("shares", server.advertised, server.share_keys))
        self.masked = self.ask("masked update", server.sharing, server.submit)
        self.first_masked: MaskedUpdate | None = None
        ring = Ring(self.protocol.modulus)
        total = torch.zeros(len(next(iter(self.values.values()))), dtype=ring.total_dtype)
        outcomes: dict[str, str | None] = {}
        for name, reply in self.masked.items():
            outcomes[name] = None if isinstance(reply, MaskedUpdate) else "lost"
            if isinstance(reply, MaskedUpdate):
                ring.add_(total, reply.masked)
                self.first_masked = self.first_masked or reply
        server.set_survivors(outcomes)
        server.add_signatures(self.ask("signature", server.survivors, server.confirm))
        self.shares = shares = self.ask("unmasking", server.signing, server.unmask)
        server.remove_masks(total, {name: self.spoil.get(name, lambda reply: reply)(shares[name]) for name in shares})
        return total
