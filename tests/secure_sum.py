"""A toy secure sum: pairwise masks without dropouts, so that the server learns only the sum of the contributions.

The masks are those of [Practical Secure Aggregation](https://dl.acm.org/doi/10.1145/3133956.3133982) (Bonawitz et al.,
CCS 2017), section 4, without the shares for clients that drop out. It is a toy: the keys follow from the seed that
the server knows, so that runs can be compared. A real protocol draws the keys from `os.urandom`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from hf_federated import Aggregation, ClientPart, FedAvg, Round, RoundFailedError
from hf_federated.messages import ClientUpdate, Fit, Message
from hf_federated.methods import Accumulator, WeightedSums
from hf_federated.utils.weighted_mean import State


UNIT = 2.0**-32  # of the fixed-point numbers
HALF = np.uint64(32)


@dataclass(frozen=True)
class Question(Message):
    kind: ClassVar[str] = "question"
    answered_by: ClassVar[str] = "answer"
    max_per_round: ClassVar[int] = 2
    subject: str  # "key" or "rounds"


@dataclass(frozen=True)
class Answer(Message):
    kind: ClassVar[str] = "answer"
    value: torch.Tensor


class SecureSumPart(ClientPart):
    """Send a masked sum in place of the trained state. The client keeps its key and its number of rounds."""

    def answer(self, message: Question) -> Message:
        if message.subject == "rounds":
            return Answer(message.round, message.client_id, torch.tensor(self.memory["rounds"]))
        seed = f"{self.context.seed} {message.client_id} {message.round}".encode()
        self.memory["key"] = torch.from_numpy(np.frombuffer(hashlib.sha256(seed).digest(), np.uint8).copy())
        public = self._private_key().public_key().public_bytes_raw()
        return Answer(message.round, message.client_id, torch.from_numpy(np.frombuffer(public, np.uint8).copy()))

    def receive(self, message: Fit) -> None:
        self._message = message

    def send(self, update: ClientUpdate) -> ClientUpdate:
        self.memory["rounds"] = self.memory.get("rounds", 0) + 1
        state, peers = self._message.state, self._message.extra
        sums = FedAvg(self.method.weighting).accumulator(state).contribution(update, state)["state"]
        plain = torch.cat([torch.tensor([sums.weight]).double(), *(value.flatten() for value in sums.values.values())])
        masked = torch.round(plain / UNIT).to(torch.int64).numpy().view(np.uint64)
        for client_id in peers.keys() - {update.client_id}:
            mask = self._mask(peers[client_id], len(masked))  # sums of uint64 wrap around
            masked = masked + mask if update.client_id < client_id else masked - mask
        # Float64 holds sums of 32 bits exactly. The server checks the state, so the client returns the received one.
        halves = {"low": masked & np.uint64(2**32 - 1), "high": masked >> HALF}
        extra = {name: torch.from_numpy(half.astype(np.float64)) for name, half in halves.items()}
        return dataclasses.replace(update, state=dict(state), extra=extra)

    def _private_key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self.memory["key"].numpy().tobytes())

    def _mask(self, peer: torch.Tensor, length: int) -> np.ndarray:
        secret = self._private_key().exchange(X25519PublicKey.from_public_bytes(peer.numpy().tobytes()))
        key = HKDF(SHA256(), 32, None, b"mask").derive(secret)
        stream = Cipher(ChaCha20(key, bytes(16)), None).encryptor().update(bytes(8 * length))
        return np.frombuffer(stream, np.uint64)


class SecureSum(Aggregation):
    """FedAvg in which the server sees only the sum of the clients. A client that fails ends the round."""

    messages: ClassVar[tuple[type[Message], ...]] = (Question, Answer)
    client_part: ClassVar[type[ClientPart]] = SecureSumPart

    def begin(self, round: Round) -> None:
        replies = round.ask("keys", lambda client_id: Question(round.number, client_id, "key"))
        self._keys = {client_id: reply.value for client_id, reply in replies.items() if isinstance(reply, Answer)}
        for client_id in set(round.clients) - self._keys.keys():
            round.exclude(client_id, f"client {client_id!r} sent no key")

    def fit_extra(self, state: State) -> State:
        return self._keys

    def expected_extra(self, state: State) -> State:
        length = 1 + sum(value.numel() for value in state.values() if value.is_floating_point())
        return {"low": torch.zeros(length).double(), "high": torch.zeros(length).double()}

    def finish(self, round: Round) -> State:
        if round.collected.num_updates < len(self._keys):
            raise RoundFailedError(f"Round {round.number + 1}: a client failed, so the masks do not cancel.")
        replies = round.ask("confirmation", lambda client_id: Question(round.number, client_id, "rounds"))
        rounds = [float(reply.value) for reply in replies.values() if isinstance(reply, Answer)]
        round.logs["federated/rounds_of_clients"] = sum(rounds)
        return super().finish(round)

    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        count = accumulator.num_updates
        low, high = (np.rint(accumulator.extra.mean_of(name).numpy() * count) for name in ("low", "high"))
        total = (low.astype(np.uint64) + (high.astype(np.uint64) << HALF)).view(np.int64) * UNIT
        floating = {name: value for name, value in state.items() if value.is_floating_point()}
        parts = torch.from_numpy(total[1:]).split([value.numel() for value in floating.values()])
        values = {name: part.view_as(floating[name]) for name, part in zip(floating, parts, strict=True)}
        plain = FedAvg(self.weighting).accumulator(state)
        plain.load_sums([{"state": WeightedSums(total[0], count, values), "extra": plain.extra.sums()}], state)
        return plain.mean.finalize()
