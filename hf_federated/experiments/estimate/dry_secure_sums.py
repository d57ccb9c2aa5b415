"""Secure aggregation in a dry round: the messages of the clients have their sizes, and no values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from hf_federated.clients.secure_answers import SecureAnswers
from hf_federated.messages.secure_aggregation import MaskedUpdate, SecureFit, SubmitMasked, UnmaskShares
from hf_federated.methods import Accumulator, Contribution, WeightedSums
from hf_federated.secure_aggregation import SecureAggregation
from hf_federated.secure_aggregation.client_session import ClientSession
from hf_federated.secure_aggregation.coded_masks import CodedMasks
from hf_federated.secure_aggregation.content import digest
from hf_federated.secure_aggregation.encoding import RingEncoding
from hf_federated.secure_aggregation.masks import ClientMasks, MaskPlace, RosterView, ServerMasks
from hf_federated.security.masks import SEAL_BYTES


class DryProtocol(SecureAggregation):
    """
    A protocol whose vectors are on the meta device.

    Args:
        protocol ([`SecureAggregation`]): The protocol.
    """

    def __init__(self, protocol: SecureAggregation) -> None:
        vars(self).update(vars(protocol))
        self._protocol = protocol

    def settings(self) -> dict[str, Any]:
        return self._protocol.settings()

    def threshold_of(self, num_clients: int) -> int:
        return self._protocol.threshold_of(num_clients)

    def neighbors_of(self, client_id: str, clients: Sequence[str], roster: bytes) -> tuple[str, ...]:
        return self._protocol.neighbors_of(client_id, clients, roster)

    def client_masks(self) -> ClientMasks:
        return _DryMasks(self._protocol.client_masks())

    def server_masks(self) -> ServerMasks:
        return _DryUnmasking()

    def encoding(self, accumulator: Accumulator, num_clients: int) -> Any:
        return _DryEncoding(self._protocol.encoding(accumulator, num_clients), accumulator)


class _DryMasks(ClientMasks):
    """Secrets of the right sizes, which mask nothing."""

    def __init__(self, masks: ClientMasks) -> None:
        self._masks = masks
        self.public_key, self.commitment = masks.public_key, masks.commitment

    def split(
        self, place: MaskPlace, members: Collection[str], threshold: int, num_values: int
    ) -> dict[str, bytes | memoryview]:
        return dict.fromkeys(members, bytes(self.part_bytes(len(members), threshold, num_values)))

    def part_bytes(self, num_members: int, threshold: int, num_values: int) -> int:
        return self._masks.part_bytes(num_members, threshold, num_values)

    def add(self, values: torch.Tensor, place: MaskPlace, keys: Mapping[str, bytes]) -> None:
        pass

    def remove(self, values: torch.Tensor) -> None:
        pass

    def reveal(
        self, survivors: Collection[str], lost: Collection[str], parts: Mapping[str, bytes]
    ) -> dict[str, dict[str, bytes] | torch.Tensor]:
        if isinstance(self._masks, CodedMasks):
            # The sum of parts has the size of a part.
            size = len(next(iter(parts.values())))
            return {"mask_sum": torch.empty(size, dtype=torch.uint8, device="meta").view(torch.int32)}
        return self._masks.reveal(survivors, lost, parts)


class _DrySession(ClientSession):
    """A session whose envelopes have their sizes, and no contents."""

    def _seal(self, name: str, part: bytes | memoryview) -> torch.Tensor:
        return torch.empty(len(part) + SEAL_BYTES, dtype=torch.uint8, device="meta")

    def _submit(self, request: SubmitMasked) -> MaskedUpdate:
        # The parts of all clients have the same size.
        self._parts |= dict.fromkeys(request.envelopes, self._parts[self.client_id])
        return MaskedUpdate(self.round, self.client_id, self.session, self._read())


class DryAnswers(SecureAnswers):
    """Answers of clients that mask nothing, and whose requests have no values."""

    session_class = _DrySession

    def digest_of(self, request: SecureFit) -> bytes:
        return digest(request.round)


class _DryUnmasking(ServerMasks):
    def remove(self, total: torch.Tensor, view: RosterView, replies: Mapping[str, UnmaskShares]) -> None:
        pass


class _DryEncoding:
    """Vectors of the right size, without values."""

    def __init__(self, encoding: RingEncoding, accumulator: Accumulator) -> None:
        self._encoding, self._shapes = encoding, accumulator.shapes
        self._reference = accumulator.reference

    def zeros(self) -> torch.Tensor:
        return torch.empty(self._encoding.num_values, dtype=self._encoding.ring.total_dtype, device="meta")

    def add_(self, total: torch.Tensor, vector: torch.Tensor) -> None:
        pass

    def problem(self, vector: torch.Tensor) -> str | None:
        return None

    def encode(self, contribution: Contribution, statistics: Mapping[str, float], seed: int) -> torch.Tensor:
        return torch.empty(self._encoding.num_values, dtype=self._encoding.ring.dtype, device="meta")

    def _device(self, mean: str, name: str) -> torch.device | str:
        """Return the device of the values to which those of a mean are added."""
        return self._reference[name].device if mean == "state" else "cpu"

    def decode(self, total: torch.Tensor, num_updates: int) -> tuple[dict[str, WeightedSums], dict[str, Any]]:
        sums = {
            # The zeros of a tensor share one number.
            mean: WeightedSums(
                float(num_updates),
                num_updates,
                {
                    name: torch.zeros((), device=self._device(mean, name)).expand(shape)
                    for name, shape in shapes.items()
                },
            )
            for mean, shapes in self._shapes.items()
        }
        names = ("num_clipped", "num_examples", "num_tokens", "num_steps", "total_flos", "loss", "loss_weight")
        return sums, dict.fromkeys(names, 0)
