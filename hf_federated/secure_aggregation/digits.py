"""`Digits`: exact sums of large integers in a ring of few bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .ring import Ring


# Number of bits of an integer, with its sign.
NUMBER_BITS = 128
MAX_DIGIT_BITS = 16


class Digits:
    """
    Signed integers of 128 bits as digits in a ring, so that the digits of all clients can be added.

    A digit has so few bits that the sum of the digits of all clients stays below the modulus. The sum of the integers
    follows from the sums of the digits and has no limit. The last digit contains the sign.

    Args:
        ring ([`Ring`]): The ring.
        num_clients (`int`): Largest number of integers in a sum. At most half of the modulus.

    Attributes:
        num_digits (`int`): Number of elements of an integer.

    Example:

    ```python
    >>> from hf_federated.secure_aggregation.digits import Digits
    >>> from hf_federated.secure_aggregation.ring import Ring

    >>> digits = Digits(Ring(2**32), num_clients=2)
    >>> left, right = digits.split(10**30), digits.split(-3)
    >>> digits.join([first + second for first, second in zip(left, right)]) == 10**30 - 3
    True
    ```
    """

    def __init__(self, ring: Ring, num_clients: int) -> None:
        self._ring = ring
        self._bits = min(MAX_DIGIT_BITS, ring.bits - (num_clients - 1).bit_length())
        self.num_digits = math.ceil(NUMBER_BITS / self._bits)

    def split(self, number: int) -> list[int]:
        """
        Return the digits of an integer as elements of a vector, the lowest digit first.

        Args:
            number (`int`): An integer of at least -2^126 and below 2^126.

        Raises:
            ValueError: If the integer is out of range.
        """
        limit = 2 ** (NUMBER_BITS - 2)
        if not -limit <= number < limit:
            raise ValueError(f"{number} is out of range; it must be at least -2**126 and below 2**126.")
        last = self._bits * (self.num_digits - 1)
        digits = [number >> start & (2**self._bits - 1) for start in range(0, last, self._bits)]
        return [self._element(digit) for digit in (*digits, number >> last)]

    def join(self, digits: Sequence[int]) -> int:
        """
        Return the sum of integers from the sums of their digits.

        Args:
            digits (`Sequence[int]`): Sums of the return values of `split`, modulo the ring.
        """
        unsigned = [digit % self._ring.modulus for digit in digits]
        unsigned[-1] = self._signed(unsigned[-1])
        return sum(digit << number * self._bits for number, digit in enumerate(unsigned))

    def _signed(self, value: int) -> int:
        return value - self._ring.modulus if value > (self._ring.modulus - 1) // 2 else value

    def _element(self, digit: int) -> int:
        reduced = digit % self._ring.modulus
        return reduced if self._ring.is_field else self._signed(reduced)
