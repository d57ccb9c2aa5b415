"""
`RingEncoding`: updates as vectors of integers whose sum gives the sum of the updates.

The values are fixed-point numbers with stochastic rounding, as in [LightSecAgg](https://arxiv.org/abs/2109.14236) (So
et al., MLSys 2022). The rounding gives no differential privacy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..messages import ClientUpdate
from ..methods import Contribution, WeightedSums
from ..utils.arguments import require
from ..utils.lazy_tensors import LazyTensors, Reader
from ..utils.random import derived_seed
from ..utils.weighted_mean import PIECE
from ..utils.weighted_sums import check_shapes, pieces_of
from .digits import NUMBER_BITS, Digits
from .ring import Ring


# Smallest number of bits of a value. Fewer bits are mostly noise of the rounding.
MIN_VALUE_BITS = 8
# Number of fractional bits of weights and losses. A weight of at least 2^-12 is exact.
FRACTION_BITS = 64
# Numbers of an update that are summed, with their number of fractional bits.
_STATISTICS = {
    "num_examples": 0,
    "num_tokens": 0,
    "num_steps": 0,
    "total_flos": 0,
    "loss": FRACTION_BITS,
    "loss_weight": FRACTION_BITS,
}


def statistics_of(update: ClientUpdate) -> dict[str, float]:
    """
    Return the numbers of an update that the server learns as sums.

    Args:
        update ([`ClientUpdate`]): The update.

    Returns:
        `dict[str, float]`: `num_examples`, `num_tokens`, `num_steps`, `total_flos`, `loss` (the mean loss times its
            weight) and `loss_weight` (the number of examples, at least 1). The last two are 0 if the update has no
            loss, if it is NaN or infinite, or if the product is out of range.
    """
    weight = max(update.num_examples, 1)
    loss = update.metrics.get("loss", math.nan) * weight
    is_usable = abs(loss) < _limit(FRACTION_BITS)
    return {
        "num_examples": update.num_examples,
        "num_tokens": update.num_tokens,
        "num_steps": update.num_steps,
        "total_flos": update.metrics.get("total_flos", 0.0),
        "loss": loss if is_usable else 0.0,
        "loss_weight": weight if is_usable else 0,
    }


class RingEncoding:
    """
    Encoding of contributions as vectors of integers, and decoding of their sum.

    A value `v` of a contribution becomes the integer `⌊v / step + u⌋` with `u` uniform in `[0, 1)`, so that it is
    unbiased, and `step = max_weight · clip / (2^(b−1) − 1)`. Values above `max_weight · clip` are clipped and counted.
    `b = bits − ⌈log2 num_clients⌉` bits remain for a value, so the sum of `num_clients` values does not overflow.

    The values are followed by exact sums: for each mean its weight and number of updates, the number of vectors, the
    number of clipped values, and the numbers of [`statistics_of`]. The sums hide the numbers of a client. Integers and
    weights of at least 2^-12 are exact.

    Both sides create the encoding with the same arguments. The vector of a contribution depends on the contribution,
    the statistics and the seed only, not on the number of threads or the machine.

    Args:
        shapes (`Mapping[str, Mapping[str, torch.Size]]`): Shapes of the floating tensors of each mean
            ([`Accumulator.shapes`]).
        num_clients (`int`): Largest number of contributions in a sum.
        max_weight (`float` or `Mapping[str, float]`): Largest weight of an update, for all means or by the names of
            all means. It sets the scale of the values. Weights are not limited: set `max_weight` of [`Aggregation`].
        clip (`float` or `Mapping[str, float]`, *optional*, defaults to `1.0`): Largest absolute value of a
            contribution relative to `max_weight`, for all means or by the names of means. Other means have the
            default.
        modulus (`int`, *optional*, defaults to `2**32`): Modulus of the [`Ring`]: `2**32`, `2**16` or `2**31 - 1`.

    Attributes:
        ring ([`Ring`]): The ring.
        value_bits (`int`): Number of bits of a value, `b`.
        steps (`dict[str, float]`): Difference of neighboring values of a contribution, by mean. A decoded sum of `n`
            contributions without clipped values differs from the sum by less than `n` steps in each value.
        num_values (`int`): Number of elements of a vector.

    Raises:
        ValueError: If an argument is out of range, or if fewer than 8 bits remain for a value.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated import FedAvg
    >>> from hf_federated.messages import ClientUpdate
    >>> from hf_federated.secure_aggregation.encoding import RingEncoding, statistics_of

    >>> state, algorithm = {"w": torch.zeros(2)}, FedAvg()
    >>> encoding = RingEncoding(algorithm.accumulator(state).shapes, num_clients=2, max_weight=100)
    >>> total = encoding.zeros()
    >>> for client_id, value, num in (("a", 0.5, 30), ("b", 0.25, 10)):
    ...     update = ClientUpdate(0, client_id, {"w": torch.full((2,), value)}, num, num_tokens=0, num_steps=1)
    ...     contribution = algorithm.accumulator(state).contribution(update, state)
    ...     encoding.add_(total, encoding.encode(contribution, statistics_of(update), seed=num))
    >>> contribution, statistics = encoding.decode(total, num_updates=2)
    >>> contribution["state"].weight, statistics["num_examples"]
    (40.0, 40)
    >>> accumulator = algorithm.accumulator(state)
    >>> accumulator.load_sums([contribution], state)
    >>> algorithm.aggregate(accumulator, state)["w"]
    tensor([0.4375, 0.4375])
    ```
    """

    def __init__(
        self,
        shapes: Mapping[str, Mapping[str, torch.Size]],
        num_clients: int,
        max_weight: float | Mapping[str, float],
        clip: float | Mapping[str, float] = 1.0,
        modulus: int = 2**32,
    ) -> None:
        require("num_clients", num_clients, num_clients >= 1, "at least 1")
        self.ring = Ring(modulus)
        self.num_clients = num_clients
        self.value_bits = self.ring.bits - (num_clients - 1).bit_length()
        if self.value_bits < MIN_VALUE_BITS:
            largest = 2 ** (self.ring.bits - MIN_VALUE_BITS)
            other = ", or the modulus 2**32 (32 bits)" if self.ring.bits == 16 else ""
            raise ValueError(
                f"num_clients={num_clients} leaves {self.value_bits} of {self.ring.bits} bits for a value, but at "
                f"least {MIN_VALUE_BITS} are required. Use at most {largest} clients in a sum{other}."
            )
        self._shapes = {mean: dict(tensors) for mean, tensors in shapes.items()}
        weights = dict(max_weight) if isinstance(max_weight, Mapping) else dict.fromkeys(self._shapes, max_weight)
        clips = dict.fromkeys(self._shapes, 1.0 if isinstance(clip, Mapping) else clip)
        clips.update(clip if isinstance(clip, Mapping) else {})
        for name, values in (("max_weight", weights), ("clip", clips)):
            if values.keys() != self._shapes.keys():
                raise ValueError(f"`{name}` has the means {sorted(values)}, but the means are {sorted(self._shapes)}.")
            for mean, value in values.items():
                require(f"{name}` of the mean `{mean}", value, 2**-100 <= value <= 2**100, "from 2**-100 to 2**100")
        # Largest absolute value by mean, and its integer.
        self._bounds = {mean: clips[mean] * weights[mean] for mean in self._shapes}
        self._largest = 2 ** (self.value_bits - 1) - 1
        self.steps = {mean: bound / self._largest for mean, bound in self._bounds.items()}
        self._digits = Digits(self.ring, num_clients)
        self._num_mean_values = sum(shape.numel() for tensors in self._shapes.values() for shape in tensors.values())
        num_numbers = 2 + len(_STATISTICS) + 2 * len(self._shapes)
        self.num_values = self._num_mean_values + num_numbers * self._digits.num_digits

    @property
    def num_bytes(self) -> int:
        """Number of bytes of a vector."""
        return self.num_values * self.ring.dtype.itemsize

    @property
    def max_error(self) -> dict[str, float]:
        """Bound of the errors of the values of a sum of `num_clients` contributions without clipping, by mean."""
        return {mean: self.num_clients * step for mean, step in self.steps.items()}

    def zeros(self) -> torch.Tensor:
        """Return the sum of no vectors."""
        return torch.zeros(self.num_values, dtype=self.ring.total_dtype)

    def add_(self, total: torch.Tensor, vector: torch.Tensor) -> None:
        """Add a vector to a sum that starts with [`~RingEncoding.zeros`], in place."""
        self.ring.add_(total, vector)

    def problem(self, vector: torch.Tensor) -> str | None:
        """Return why a received tensor cannot be added, or `None`."""
        return self.ring.problem(vector, self.num_values)

    # ---- Client

    @torch.no_grad()
    def encode(self, contribution: Contribution, statistics: Mapping[str, float], seed: int) -> torch.Tensor:
        """
        Encode a contribution. Lazy values are computed in pieces, so that the vector is the only large tensor.

        Args:
            contribution (`Mapping[str, WeightedSums]`): Return value of [`Accumulator.contribution`].
            statistics (`Mapping[str, float]`): Return value of [`statistics_of`].
            seed (`int`): Seed of the rounding. It need not be secret.

        Returns:
            `torch.Tensor` of shape `(num_values,)`: The vector, on the CPU.

        Raises:
            ValueError: If a value or number is NaN, infinite or out of range, or if the names or shapes are not those
                of the encoding. The message names the mean and the tensor.
        """
        if contribution.keys() != self._shapes.keys():
            raise ValueError(f"The means are {sorted(contribution)}, but {sorted(self._shapes)} are expected.")
        vector = torch.empty(self.num_values, dtype=self.ring.dtype)
        rounding = _Rounding(derived_seed(seed, "rounding"), self._largest)
        stop = 0
        for mean, tensors in self._shapes.items():
            values = contribution[mean].values
            check_shapes(values, tensors)
            for name in tensors:
                for piece in pieces_of(values, name, PIECE):
                    start, stop = stop, stop + len(piece)
                    if not rounding.round(piece, self._bounds[mean], vector[start:stop]):
                        raise ValueError(
                            f"The tensor {name!r} of the mean {mean!r} has NaN or infinite values, which cannot be "
                            "encoded. Lower the learning rate of the client."
                        )
                    self.ring.from_signed_(vector[start:stop])
        numbers = self._numbers(contribution, {**statistics, "num_clipped": rounding.num_clipped})
        digits = [digit for number in numbers for digit in self._digits.split(number)]
        vector[stop:] = torch.tensor(digits, dtype=self.ring.dtype)
        return vector

    def _numbers(self, contribution: Contribution, statistics: Mapping[str, float]) -> list[int]:
        """Return the integers of the block behind the values, in the order in which `decode` reads them."""
        numbers = [1, int(statistics["num_clipped"])]
        for mean in self._shapes:
            sums = contribution[mean]
            weight = _integer(f"The weight of the mean {mean!r}", sums.weight, FRACTION_BITS)
            if weight < 0 or (sums.num_updates and not weight):
                raise ValueError(f"The weight of the mean {mean!r} is {sums.weight}; it must be above 2**-64.")
            numbers += [weight, sums.num_updates]
        return numbers + [_integer(f"`{name}`", statistics[name], bits) for name, bits in _STATISTICS.items()]

    # ---- Server

    def decode(self, total: torch.Tensor, num_updates: int) -> tuple[dict[str, WeightedSums], dict[str, Any]]:
        """
        Decode a sum of vectors.

        Args:
            total (`torch.Tensor` of shape `(num_values,)`): The sum. It must not change while the values are used,
                which are computed from it each time they are read ([`LazyTensors`]).
            num_updates (`int`): Number of vectors in the sum.

        Returns:
            `tuple`: The sum of the contributions for [`Accumulator.load_sums`], and the sums of the numbers of
                [`statistics_of`] with `num_clipped`.

        Raises:
            ValueError: If the sum has another number of vectors, for example because a mask was not removed, or if a
                value is larger than this number of vectors allows.
        """
        require("num_updates", num_updates, 1 <= num_updates <= self.num_clients, f"from 1 to {self.num_clients}")
        elements, length = total[self._num_mean_values :].tolist(), self._digits.num_digits
        numbers = iter([self._digits.join(elements[at : at + length]) for at in range(0, len(elements), length)])
        if (num_vectors := next(numbers)) != num_updates:
            raise ValueError(
                f"The sum contains {num_vectors} vectors, but {num_updates} are expected. A mask was not removed, or "
                "a client sent wrong numbers."
            )
        self._check_values(total, num_updates)
        statistics: dict[str, Any] = {"num_clipped": next(numbers)}
        contribution, start = {}, 0
        for mean, tensors in self._shapes.items():
            weight = next(numbers) / 2**FRACTION_BITS
            contribution[mean] = WeightedSums(weight, next(numbers), self._values(total, start, mean))
            start += sum(shape.numel() for shape in tensors.values())
        for name, bits in _STATISTICS.items():
            statistics[name] = next(numbers) / 2**bits if bits else next(numbers)
        return contribution, statistics

    def _check_values(self, total: torch.Tensor, num_updates: int) -> None:
        """Check the range of the values of a sum. A value that a client draws from the whole ring is out of range."""
        largest = num_updates * self._largest
        for piece in total[: self._num_mean_values].split(PIECE) if self._num_mean_values else ():
            low, high = (int(value) for value in torch.aminmax(self.ring.to_signed(piece)))
            if max(-low, high) > largest:
                raise ValueError(
                    f"The sum has integers from {low} to {high}, but {num_updates} vectors can have at most "
                    f"{largest}. A client sent values out of range."
                )

    def _values(self, total: torch.Tensor, start: int, mean: str) -> LazyTensors:
        """Return the values of a mean that begins at an element of the sum."""
        starts, step = {}, self.steps[mean]
        for name, shape in self._shapes[mean].items():
            starts[name], start = start, start + shape.numel()

        def open(name: str) -> Reader:
            values = total[starts[name] : starts[name] + self._shapes[mean][name].numel()]
            return lambda first, last: self.ring.to_signed(values[first:last]).to(torch.float64).mul_(step)

        return LazyTensors(self._shapes[mean], open)


class _Rounding:
    """
    Stochastic rounding of pieces of float64 values to integers.

    Args:
        seed (`int`): Seed. The stream of integers of PCG64 is the same on all machines and in all versions of numpy.
        largest (`int`): Largest absolute integer.
    """

    def __init__(self, seed: int, largest: int) -> None:
        self._random = np.random.PCG64(seed)
        self._largest = largest
        self._buffer = torch.empty(PIECE, dtype=torch.float64)
        self.num_clipped = 0

    def round(self, piece: torch.Tensor, bound: float, output: torch.Tensor) -> bool:
        """
        Write the integers of values to `output`.

        Args:
            piece (`torch.Tensor` of shape `(n,)`): At least one and at most `PIECE` values.
            bound (`float`): The value of the largest integer. Larger values are clipped.
            output (`torch.Tensor` of shape `(n,)`): An integer tensor.

        Returns:
            `bool`: Whether all values are finite. If not, `output` does not change.
        """
        piece = piece.cpu().to(torch.float64)
        low, high = (float(value) for value in torch.aminmax(piece))
        if not math.isfinite(low) or not math.isfinite(high):
            return False
        if max(-low, high) > bound:
            self.num_clipped += int((piece.abs() > bound).sum())
        values = torch.mul(piece, self._largest / bound, out=self._buffer[: len(piece)])
        words = self._random.random_raw((len(piece) + 1) // 2).astype("<u8", copy=False).view("<u4")
        values.add_(torch.from_numpy(words[: len(piece)] * 2.0**-32)).floor_()
        # The sum of the largest integer and a number close to 1 can be rounded up.
        output.copy_(values.clamp_(-self._largest, self._largest))
        return True


def _limit(fraction_bits: int) -> int:
    """Return the bound of the absolute value of a number."""
    return 2 ** (NUMBER_BITS - 2 - fraction_bits)


def _integer(name: str, value: float, fraction_bits: int) -> int:
    """Return a number in units of `2^-fraction_bits`."""
    if not abs(value) < _limit(fraction_bits):  # also for NaN
        allowed = f"finite and below 2**{NUMBER_BITS - 2 - fraction_bits}"
        raise ValueError(f"{name} is {value}; its absolute value must be {allowed} to be encoded.")
    return round(value * 2**fraction_bits)
