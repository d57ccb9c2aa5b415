"""`SecureAggregation`: the settings that all protocols of secure aggregation share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar

from ..methods import Accumulator
from ..utils.arguments import require, require_count, require_one_of
from ..utils.constructor_settings import ConstructorSettings
from .encoding import RingEncoding
from .masks import ClientMasks, ServerMasks


PINS = ("required", "none")
BITS = (16, 32)


class SecureAggregation(ConstructorSettings, ABC):
    """
    Base class of the protocols of secure aggregation.

    Use a protocol if the owners of the data do not trust the server with the update of a single client.

    The server learns the sum of the updates of a round, the clients in it, and the sums of their numbers of examples,
    tokens and steps. It learns no single update. All parties pass the same arguments.

    Args:
        max_weight (`float`, *optional*): Largest weight of an update, such as its number of examples. A client with
            more examples counts as this number. Required unless the aggregation weights all clients alike.
        clip (`float` or `dict[str, float]`, *optional*, defaults to `1.0`): Largest absolute value of an update times
            `weight / max_weight`, for all means of the aggregation or by the name of a mean (`"state"`, `"extra"`).
            Larger values are clipped and counted.
        bits (`int`, *optional*, defaults to `32`): Number of bits of a value on the wire, 16 or 32. The sum of N
            values needs ⌈log2 N⌉ of them.
        min_survivors (`int`, *optional*, defaults to `3`): Smallest number of clients in a sum. A client refuses a
            smaller sum.
        pins (`str`, *optional*, defaults to `"required"`): `"required"`: each client knows the fingerprints of the
            other clients' certificates. `"none"`: it accepts any certificate, so a dishonest server can pretend to be
            the other clients. Clients in one process need no fingerprints.
        masks (`bool`, *optional*, defaults to `True`): Whether updates are masked. `False` gives the same result
            without secrecy, for simulations.

    Raises:
        ValueError: If an argument is not allowed.

    Example:

    ```python
    >>> from hf_federated import FederatedConfig, SecAgg

    >>> FederatedConfig(secure_aggregation=SecAgg(max_weight=2000)).secure_aggregation
    SecAgg(max_weight=2000)
    ```
    """

    # Name in `secure_aggregation` of the configuration.
    name: ClassVar[str] = ""
    # Name of the paper, for cards and logs.
    title: ClassVar[str] = ""

    def __init__(
        self,
        max_weight: float | None = None,
        clip: float | dict[str, float] = 1.0,
        bits: int = 32,
        min_survivors: int = 3,
        pins: str = "required",
        masks: bool = True,
    ) -> None:
        is_weight = max_weight is None or (isinstance(max_weight, Real) and 0 < max_weight < 2**40)
        require("max_weight", max_weight, is_weight, "positive and below 2**40")
        clips = clip.values() if isinstance(clip, Mapping) else [clip]
        are_clips = all(isinstance(value, Real) and 0 < value < 2**40 for value in clips)
        require("clip", clip, are_clips, "positive and below 2**40")
        if bits not in BITS:
            raise ValueError(f"`bits` is {bits!r}; allowed are {', '.join(map(str, BITS))}.")
        require_count("min_survivors", min_survivors, 2)
        require_one_of("pins", pins, PINS)
        require("masks", masks, isinstance(masks, bool), "True or False")
        self.max_weight, self.clip, self.bits = max_weight, clip, bits
        self.min_survivors, self.pins, self.masks = min_survivors, pins, masks

    @abstractmethod
    def threshold_of(self, num_clients: int) -> int:
        """
        Return the number of survivors that the server needs to remove the masks.

        Args:
            num_clients (`int`): Number of clients of a session.

        Raises:
            ValueError: If there are too few clients for the settings.
        """

    def neighbors_of(self, client_id: str, clients: Sequence[str], roster: bytes) -> tuple[str, ...]:
        """
        Return the clients with which a client shares its secrets. By default, all other clients.

        Args:
            client_id (`str`): Id of the client.
            clients (`Sequence[str]`): Sorted ids of the clients of a session.
            roster (`bytes`): Digest of their keys.
        """
        return tuple(name for name in clients if name != client_id)

    @abstractmethod
    def client_masks(self) -> ClientMasks:
        """Draw the secrets of a client for a session."""

    @abstractmethod
    def server_masks(self) -> ServerMasks:
        """Return the server side of the masks."""

    @property
    def largest_weight(self) -> float:
        """Largest weight of an update. Without `max_weight`, the aggregation gives all updates the weight 1."""
        return 1.0 if self.max_weight is None else float(self.max_weight)

    @property
    def modulus(self) -> int:
        """Modulus of the ring of the vectors that clients send."""
        return 2**self.bits

    def encoding(self, accumulator: Accumulator, num_clients: int) -> RingEncoding:
        """
        Return the encoding of contributions to sums.

        Args:
            accumulator ([`~hf_federated.aggregation.Accumulator`]): An accumulator of the aggregation.
            num_clients (`int`): Largest number of clients in a sum.
        """
        shapes = accumulator.shapes
        # `extra` is a uniform mean.
        weights = {name: 1.0 if name == "extra" else self.largest_weight for name in shapes}
        return RingEncoding(shapes, num_clients, weights, self.clip, self.modulus)

    def agreed(self) -> dict[str, Any]:
        """Return the settings that the signatures of the clients cover."""
        return {"protocol": self.name or type(self).__name__, **self.settings()}
