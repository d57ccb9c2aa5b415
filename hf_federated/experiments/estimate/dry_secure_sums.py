"""Secure aggregation in a dry round: the messages of the clients have their sizes, and no values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from hf_federated.messages.secure_aggregation import UnmaskShares
from hf_federated.methods import Accumulator, Contribution, WeightedSums
from hf_federated.secure_aggregation import SecureAggregation
from hf_federated.secure_aggregation.encoding import RingEncoding
from hf_federated.secure_aggregation.masks import ClientMasks, MaskPlace, RosterView, ServerMasks


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

    def neighbours_of(self, client_id: str, clients: Sequence[str], roster: bytes) -> tuple[str, ...]:
        return self._protocol.neighbours_of(client_id, clients, roster)

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

    def split(self, place: MaskPlace, members: Collection[str], threshold: int, num_values: int) -> dict[str, bytes]:
        return self._masks.split(place, members, threshold, num_values)

    def add(self, values: torch.Tensor, place: MaskPlace, keys: Mapping[str, bytes]) -> None:
        pass

    def remove(self, values: torch.Tensor) -> None:
        pass

    def reveal(
        self, survivors: Collection[str], lost: Collection[str], parts: Mapping[str, bytes]
    ) -> dict[str, dict[str, bytes] | torch.Tensor]:
        return self._masks.reveal(survivors, lost, parts)


class _DryUnmasking(ServerMasks):
    def remove(self, total: torch.Tensor, view: RosterView, replies: Mapping[str, UnmaskShares]) -> None:
        pass


class _DryEncoding:
    """Vectors of the right size, without values."""

    def __init__(self, encoding: RingEncoding, accumulator: Accumulator) -> None:
        self._encoding, self._shapes = encoding, accumulator.shapes

    def zeros(self) -> torch.Tensor:
        return torch.empty(self._encoding.num_values, dtype=self._encoding.ring.total_dtype, device="meta")

    def add_(self, total: torch.Tensor, vector: torch.Tensor) -> None:
        pass

    def problem(self, vector: torch.Tensor) -> str | None:
        return None

    def encode(self, contribution: Contribution, statistics: Mapping[str, float], seed: int) -> torch.Tensor:
        return torch.empty(self._encoding.num_values, dtype=self._encoding.ring.dtype, device="meta")

    def decode(self, total: torch.Tensor, num_updates: int) -> tuple[dict[str, WeightedSums], dict[str, Any]]:
        sums = {
            mean: WeightedSums(
                float(num_updates),
                num_updates,
                {name: torch.zeros(shape, device="meta") for name, shape in shapes.items()},
            )
            for mean, shapes in self._shapes.items()
        }
        names = ("num_clipped", "num_examples", "num_tokens", "num_steps", "total_flos", "loss", "loss_weight")
        return sums, dict.fromkeys(names, 0)
