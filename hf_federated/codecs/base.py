"""`Codec`: the interface of everything that turns tensors into the tensors that are sent."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ..utils.constructor_settings import ConstructorSettings
from ..utils.weighted_mean import Tensors


# The shape of each tensor, by name.
Shapes = Mapping[str, Sequence[int]]
# The dtype and the shape of each encoded tensor, by name.
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class Codec(ConstructorSettings, ABC):
    """
    Encoding of floating-point tensors for sending: updates, predictions, hidden states and gradients.

    A subclass overrides [`~Codec.layout`], [`~Codec.compress`] and [`~Codec.decode`]. The dtypes and shapes of encoded
    tensors depend only on the names and shapes of the tensors, so that a receiver checks them before it decodes, and
    the size of a message is known before it is sent.

    With a `memory`, `encode` feeds back the error: it adds what the previous call lost, and keeps what this call
    loses.

    `v = x + e`, `e ← v − decode(encode(v))`

    The sum of the decoded tensors then differs from the sum of the tensors only by the last `e`
    ([Seide et al., 2014](https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html),
    [Karimireddy et al., 2019](https://arxiv.org/abs/1901.09847)).

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.codecs import Codec

    >>> class RoundToIntegers(Codec):
    ...     def layout(self, shapes):
    ...         return {name: (torch.int8, tuple(shape)) for name, shape in shapes.items()}
    ...
    ...     def compress(self, tensors):
    ...         return {name: value.round().to(torch.int8) for name, value in tensors.items()}
    ...
    ...     def decode(self, encoded, reference):
    ...         return {name: value.to(reference[name].dtype) for name, value in encoded.items()}

    >>> codec, memory, change = RoundToIntegers(), {}, {"w": torch.tensor([0.4, 3.0])}
    >>> [codec.encode(change)["w"].tolist() for _ in range(3)]
    [[0, 3], [0, 3], [0, 3]]
    >>> [codec.encode(change, memory)["w"].tolist() for _ in range(3)]
    [[0, 3], [1, 3], [0, 3]]
    >>> codec.num_bytes({"w": (2,)})
    2
    ```
    """

    # What the tensors are, for error messages.
    content: ClassVar[str] = "tensors"

    @property
    def is_exact(self) -> bool:
        """Whether float32 values are sent without a loss. `exchange_codec` then changes no message."""
        return False

    @abstractmethod
    def layout(self, shapes: Shapes) -> Layout:
        """
        Return the dtype and the shape of each encoded tensor.

        Args:
            shapes (`Mapping[str, Sequence[int]]`): The shape of each tensor, by name.
        """

    @abstractmethod
    def compress(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Encode tensors without a memory. The arguments are those of [`~Codec.encode`]."""

    def compress_next(self, tensors: Tensors, memory: dict[str, Any]) -> dict[str, torch.Tensor]:
        """
        Encode tensors without feedback, with what earlier calls left in `memory`. Calls `compress` by default.

        Args:
            tensors (`Mapping[str, torch.Tensor]`): As for [`~Codec.encode`].
            memory (`dict`): Changed by assignment. The key `residual` belongs to [`~Codec.encode`].
        """
        return self.compress(tensors)

    @abstractmethod
    def decode(self, encoded: Tensors, reference: Tensors) -> dict[str, torch.Tensor]:
        """
        Decode what [`~Codec.encode`] returned.

        Args:
            encoded (`Mapping[str, torch.Tensor]`): The received tensors. They are untrusted input.
            reference (`Mapping[str, torch.Tensor]`): Tensors with the names, shapes and dtypes of the encoded ones,
                possibly on the meta device.

        Returns:
            `dict[str, torch.Tensor]`: The decoded tensors, by the names of `reference`.

        Raises:
            ValueError: If the names, dtypes or shapes of `encoded` differ from [`~Codec.layout`].
        """

    def encode(self, tensors: Tensors, memory: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
        """
        Encode tensors for sending.

        Args:
            tensors (`Mapping[str, torch.Tensor]`): Floating-point tensors on any device.
            memory (`dict`, *optional*): Keeps `residual`, the tensors `e` of the error feedback. By default, there is
                no error feedback.

        Returns:
            `dict[str, torch.Tensor]`: CPU tensors with the dtypes and shapes of [`~Codec.layout`]. Tensors on the meta
            device, which have no values, are encoded to tensors on the meta device.
        """
        if any(value.is_meta for value in tensors.values()):
            return self.empty({name: value.shape for name, value in tensors.items()})
        if memory is None:
            return self.compress(tensors)
        residual = memory.get("residual", {})
        wanted = {name: value + residual[name] if name in residual else value for name, value in tensors.items()}
        encoded = self.compress_next(wanted, memory)
        decoded = self.decode(encoded, wanted)
        memory["residual"] = {name: value - decoded[name] for name, value in wanted.items()}
        return encoded

    def num_bytes(self, shapes: Shapes) -> int:
        """
        Return the size in bytes of the encoded tensors, without the header of the message.

        Args:
            shapes (`Mapping[str, Sequence[int]]`): The shape of each tensor, by name.
        """
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.layout(shapes).values())

    def empty(self, shapes: Shapes) -> dict[str, torch.Tensor]:
        """
        Return the encoded tensors on the meta device, to compute the size of a message.

        Args:
            shapes (`Mapping[str, Sequence[int]]`): The shape of each tensor, by name.
        """
        layout = self.layout(shapes)
        return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in layout.items()}

    def check(self, encoded: Any, shapes: Shapes) -> None:
        """
        Check the names, dtypes and shapes of received tensors.

        Args:
            encoded (`Any`): What was received.
            shapes (`Mapping[str, Sequence[int]]`): The shape of each tensor before it was encoded, by name.

        Raises:
            ValueError: If `encoded` differs from [`~Codec.layout`].
        """
        if not isinstance(encoded, Mapping):
            raise ValueError(f"Encoded {self.content} are a {type(encoded).__name__}; expected a mapping of tensors.")
        layout = self.layout(shapes)
        if encoded.keys() != layout.keys():
            raise ValueError(
                f"Encoded {self.content} hold {sorted(map(str, encoded))}; {self} sends {sorted(layout)} for "
                f"{self._describe(shapes)}."
            )
        for name, (dtype, shape) in layout.items():
            given, is_tensor = encoded[name], isinstance(encoded[name], torch.Tensor)
            if is_tensor and given.dtype == dtype and tuple(given.shape) == shape:
                continue
            found = f"{given.dtype} of shape {tuple(given.shape)}" if is_tensor else f"a {type(given).__name__}"
            raise ValueError(
                f"{name!r} of encoded {self.content} is {found}; {self} sends {dtype} of shape {shape} for "
                f"{self._describe(shapes)}."
            )

    def _describe(self, shapes: Shapes) -> str:
        """Describe the shapes in an error message."""
        return f"{len(shapes)} {self.content}"
