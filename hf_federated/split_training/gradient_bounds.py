"""
Bounds of what a client reports about its gradients, relative to the other clients and to its own first step.

All parties of a step clip their gradients by one norm. A client that reports a norm of 1e30, or sends gradients of
this size, would stop the training of all parties. The server does not know the head and tail of a client, but it knows
which scale their gradients have: gradients and hidden states at the cut layers determine it. The last two
numbers below have no unit, so that one bound fits all models.

- Size of the hidden states: the root of the mean square.
- Sensitivity of the loss ([`~split.BodyServer.sensitivity`]): gradient times hidden states at the cut layer.
- Ratio of the reported norm to the scale of the norm ([`~split.BodyServer.take_boundary_scale`]).

A number is refused if it exceeds `MAX_RATIO` times the median of the largest numbers of the other clients. A median
does not follow a minority, and the numbers of the client itself do not count, so that the bound does not grow with a
client that sends larger and larger numbers. With fewer than two other clients the reference is the largest of: a
typical number, the number of the client in its first step, and the number of the other client.

The bounds do not refuse small numbers: a client without trained parameters reports a norm of 0. A client can still
report a wrong norm within the bound.
"""

from __future__ import annotations

import functools
import math
import statistics
import threading
from collections.abc import Callable, Mapping

from ..split.client_faults import ClientFaultError


# Largest accepted multiple of the reference. In runs of randomly initialized models of 4 to 6 blocks, with and without
# LoRA, clients differed by a factor of 3 in a step, and a client by a factor of 25 during a run.
MAX_RATIO = 50.0
# In these runs the sensitivity was between 0.2 and 32, and the ratio of the norm between 0.004 and 1.
_TYPICAL_SIZE = 20.0
_TYPICAL_SENSITIVITY = 20.0
_TYPICAL_NORM = 0.1


class GradientBounds:
    """
    Bounds of the clients' gradients, for a run.

    Example:

    ```python
    >>> from hf_federated.split_training.gradient_bounds import GradientBounds

    >>> bounds = GradientBounds()
    >>> bounds.check_squared_norms(0, {"north": 4.0, "south": 1e30}, {"north": 8.0, "south": 8.0})
    Traceback (most recent call last):
    hf_federated.split.client_faults.ClientFaultError: client 'south' reports gradients of norm 1e+15 at step 0, ...
    ```
    """

    def __init__(self) -> None:
        self._sizes = _Reference(_TYPICAL_SIZE)
        self._sensitivities = _Reference(_TYPICAL_SENSITIVITY)
        self._norms = _Reference(_TYPICAL_NORM)

    def check_states(self, step: int, sizes: Mapping[str, float]) -> None:
        """
        Check the hidden states that clients send, and record their sizes.

        Args:
            step (`int`): The optimizer step, for the error.
            sizes (`Mapping[str, float]`): Root mean square of each client's hidden states, by client id.

        Raises:
            ClientFaultError: If hidden states are too large. Nothing is recorded.
        """
        self._sizes.check(sizes, functools.partial(_size_error, step, "hidden states"))

    def check_gradients(self, step: int, sensitivities: Mapping[str, float]) -> None:
        """
        Check the gradients that clients send at the cut layer, and record their sensitivities.

        Args:
            step (`int`): The optimizer step, for the error.
            sensitivities (`Mapping[str, float]`): The sensitivity of each client's micro-batch, by client id.

        Raises:
            ClientFaultError: If a gradient is too large. Nothing is recorded.
        """
        self._sensitivities.check(sensitivities, functools.partial(_size_error, step, "gradients"))

    def check_squared_norms(self, step: int, squared_norms: Mapping[str, float], scales: Mapping[str, float]) -> None:
        """
        Check the norms that clients report, and record them.

        Args:
            step (`int`): The optimizer step, for the error.
            squared_norms (`Mapping[str, float]`): The reported squared norms, by client id.
            scales (`Mapping[str, float]`): The scale of each client's squared norm.

        Raises:
            ClientFaultError: If a norm is too large. Nothing is recorded.
        """
        norms = {client_id: math.sqrt(value) for client_id, value in squared_norms.items()}
        roots = {client_id: math.sqrt(scales[client_id]) for client_id in norms}
        # Without a gradient at the cut layers, the gradients of the parameters are 0 up to rounding.
        values = {
            client_id: 0.0 if not norm else norm / roots[client_id] if roots[client_id] else math.inf
            for client_id, norm in norms.items()
        }

        def norm_error(client_id: str, value: float, limit: float) -> str:
            return (
                f"client {client_id!r} reports gradients of norm {norms[client_id]:.3g} at step {step}, but at most "
                f"{limit * roots[client_id]:.3g} is expected from its gradients at the cut layers"
            )

        self._norms.check(values, norm_error)


def _size_error(step: int, name: str, client_id: str, value: float, limit: float) -> str:
    return (
        f"client {client_id!r} sent {name} of step {step} of size {value:.3g}, but at most {limit:.3g} is expected "
        f"from the {name} of the other clients"
    )


class _Reference:
    """First and largest number of each client."""

    def __init__(self, typical: float) -> None:
        self._typical = typical
        # Bodies of several clients compute in parallel.
        self._lock = threading.Lock()
        self._first: dict[str, float] = {}
        self._largest: dict[str, float] = {}

    def limit(self, client_id: str, values: Mapping[str, float]) -> float:
        """Return the largest accepted number of a client, from the history and the numbers of the other clients."""
        with self._lock:
            previous, first = dict(self._largest), self._first.get(client_id, 0.0)
        largest = {name: max(value, previous.get(name, 0.0)) for name, value in values.items()}
        others = [value for name, value in {**previous, **largest}.items() if name != client_id and value > 0]
        if len(others) < 2:
            return MAX_RATIO * max(self._typical, first, *others)
        # The larger of two middle numbers: a hostile client that sends tiny numbers must not exclude honest clients.
        return MAX_RATIO * statistics.median_high(others)

    def check(self, values: Mapping[str, float], error_of: Callable[[str, float, float], str]) -> None:
        """
        Check numbers and record them.

        Args:
            values (`Mapping[str, float]`): The numbers, by client id.
            error_of (`Callable`): Returns the error for the id of a client, its number and the largest number.

        Raises:
            ClientFaultError: If a number is too large.
        """
        for client_id, value in values.items():
            limit = self.limit(client_id, values)
            if not value <= limit:
                raise ClientFaultError([client_id], error_of(client_id, value, limit))
        with self._lock:
            for client_id, value in values.items():
                if value > 0:
                    self._first.setdefault(client_id, value)
                    self._largest[client_id] = max(value, self._largest.get(client_id, 0.0))
