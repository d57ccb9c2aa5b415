"""`RobustAggregation`: base class of the algorithms that limit the influence of hostile clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from ..messages import ClientUpdate
from ..methods import UpdateCollection
from ..utils.arguments import require
from ..utils.errors import RoundFailedError
from ..utils.robust_statistics import num_tolerated
from ..utils.weighted_mean import State, WeightedMean, wide_dtype
from .base import Accumulator, Aggregation
from .lora_factors import find_other_factors, find_pairs
from .server_optimizer import ServerOptimizer
from .update_statistics import clipping_scales, distance


UPDATES = "updates"


class RobustAggregation(Aggregation):
    """
    Base class of the algorithms that limit the influence of hostile clients.

    The server keeps the updates of a round in a temporary file ([`UpdateCollection`]) and reads it in blocks, so that
    memory does not grow with the cohort. The file has the size of the exchanged parameters times the cohort. A
    subclass overrides [`~RobustAggregation.estimate`]. An update has the weight 1, because a hostile client could
    report any number of examples.

    The estimate becomes the new global state, or the target of a server optimizer.

    Args:
        server_optimizer (`str`, *optional*):
            Name of a server optimizer, as in [`FedOpt`]. By default, the estimate becomes the global state.
        server_lr (`float`, *optional*, defaults to `1.0`):
            Learning rate of the server optimizer.
        server_kwargs (`dict`, *optional*):
            Further arguments of the server optimizer by their names in [`FedOpt`], such as `server_momentum`.
        max_memory_mb (`float`, *optional*, defaults to `256`):
            Memory for the values of all clients that the server compares at a time, in MB.
        weighting (`str`, *optional*, defaults to `"uniform"`):
            Weight of an update, as in [`Aggregation`].

    Raises:
        ValueError: If an argument is unknown or out of range. When the trainer is built, if the server optimizer is
            combined with LoRA modules whose factors are both trained.

    Requirements:
        The server sees every update, so secure aggregation is not possible.

    Relations:
        - [`CoordinateMedian`], [`TrimmedMean`], [`GeometricMedian`], [`Krum`], [`NormBoundedMean`],
          [`CenteredClipping`] and [`FLTrust`] are the algorithms.

    Example:

    ```python
    >>> from hf_federated.aggregation import RobustAggregation
    >>> from hf_federated.aggregation.update_statistics import coordinate_wise

    >>> class Largest(RobustAggregation):
    ...     def estimate(self, updates):
    ...         return coordinate_wise(updates, lambda values: values.amax(0))
    ```
    """

    # Whether the algorithm supports LoRA modules whose factors are both exchanged.
    supports_factors: ClassVar[bool] = True

    def __init__(
        self,
        server_optimizer: str | None = None,
        server_lr: float = 1.0,
        server_kwargs: Mapping[str, Any] | None = None,
        max_memory_mb: float = 256,
        weighting: str = "uniform",
    ) -> None:
        super().__init__(weighting)
        require("max_memory_mb", max_memory_mb, max_memory_mb > 0, "positive")
        if server_optimizer is None and (server_lr != 1.0 or server_kwargs):
            raise ValueError(
                "`server_lr` and `server_kwargs` have no effect without a server optimizer. Set "
                "server_optimizer='sgd', or leave them out."
            )
        self.server_optimizer = server_optimizer
        self.server_lr = server_lr
        self.server_kwargs = dict(server_kwargs) if server_kwargs else None
        self.max_memory_mb = max_memory_mb
        self._optimizer: ServerOptimizer | None = None
        if server_optimizer is not None:
            try:
                self._optimizer = ServerOptimizer(server_optimizer, server_lr, **(server_kwargs or {}))
            except TypeError as error:
                raise ValueError(f"Invalid `server_kwargs`: {error}. [`FedOpt`] lists the arguments.") from error

    def check_exchange(self, state: State, num_sampled: int) -> None:
        self.check_cohort(num_sampled, ValueError)
        if name := find_other_factors(state):
            raise ValueError(
                f"aggregation={self.name!r} compares changes of parameters, but the change of the adapter of {name!r} "
                "is a product of more than two factors. Use LoRA, or aggregation='fedavg'."
            )
        pairs = find_pairs(state)
        freeze_a = (
            f"Freeze the factors A, for example with `parameter.requires_grad_('lora_A' not in name)` for all named "
            f"parameters before the trainer is built. The {len(pairs)} factors B are then ordinary tensors"
        )
        if pairs and not self.supports_factors:
            raise ValueError(
                f"aggregation={self.name!r} does not support LoRA modules whose factors are both trained, such as "
                f"{pairs[0].a!r}: the factors have no meaning apart. {freeze_a}. Or use "
                "aggregation='geometric_median', which supports both factors."
            )
        if pairs and self.server_optimizer is not None:
            raise ValueError(
                f"server_optimizer={self.server_optimizer!r} steps on single tensors, but LoRA factors such as "
                f"{pairs[0].a!r} have no meaning apart. Leave `server_optimizer` out. Or: {freeze_a}."
            )

    def check_cohort(self, num_clients: int, error: type[Exception]) -> None:
        """
        Check that the algorithm is defined for a number of clients.

        Args:
            num_clients (`int`): Number of clients of a cohort, or of the updates of a round.
            error (`type[Exception]`): Class of the error to raise.
        """

    def setup(self, num_rounds: int, num_clients: int) -> None:
        if self._optimizer is not None:
            self._optimizer.setup(num_rounds)

    def accumulator(self, state: State, extra: State | None = None) -> Accumulator:
        accumulator = super().accumulator(state, extra)
        accumulator.collections[UPDATES] = UpdateCollection(state, self.max_memory_mb)
        return accumulator

    def accumulate(self, accumulator: Accumulator, update: ClientUpdate) -> None:
        accumulator.collections[UPDATES].add(update.client_id, update.state, self.weight(update))
        if update.extra:
            accumulator.extra.add(update.extra, 1.0)

    @torch.no_grad()
    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        updates = accumulator.collections[UPDATES]
        try:
            self.check_cohort(len(updates), RoundFailedError)
            estimate = self.estimate(updates)
        finally:
            updates.close()
        return self.move_towards(state, estimate.__getitem__)

    def estimate(self, updates: UpdateCollection) -> State:
        """
        Compute the robust estimate of the new state from all updates of a round.

        Args:
            updates ([`UpdateCollection`]): The updates. `updates.reference` is the global state.

        Returns:
            `dict[str, torch.Tensor]`: The estimate, in float32 or wider.
        """
        raise NotImplementedError

    def move_towards(self, state: State, estimate_of: Callable[[str], torch.Tensor]) -> State:
        """
        Return the estimate as the new global state, or take a step of the server optimizer towards it.

        Args:
            state (`dict[str, torch.Tensor]`): The global state.
            estimate_of (`Callable[[str], torch.Tensor]`): Returns the estimate of a tensor by name.
        """
        if self._optimizer is not None:
            return self._optimizer.step(state, estimate_of)
        return {name: estimate_of(name).to(value.dtype) for name, value in state.items()}

    def state_dict(self) -> dict[str, Any]:
        return {} if self._optimizer is None else {"optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["optimizer"])


class ClippedMean(RobustAggregation):
    """
    Base class of the algorithms that average limited changes.

    If the limit of a change does not depend on the other updates of the round, the server adds the limited changes to
    a sum and keeps no update. Integer tensors keep their global values.
    """

    # The center of the round, by name of the floating tensors, in float32 or wider, and the limit around it.
    _round_center: State
    _round_limit: float

    def limit(self, state: State) -> float | None:
        """
        Return the largest distance of an update from the center, if the server limits each update on arrival.

        If not, return `None`. The server then keeps the updates for [`estimate`].
        """
        raise NotImplementedError

    def center_of(self, state: State) -> State:
        """Return the center around which updates are limited. The default is the global state."""
        return {name: value.to(wide_dtype(value.dtype)) for name, value in state.items() if value.is_floating_point()}

    def accumulator(self, state: State, extra: State | None = None) -> Accumulator:
        if (limit := self.limit(state)) is None:
            return super().accumulator(state, extra)
        accumulator = Aggregation.accumulator(self, state, extra)
        self._round_center, self._round_limit = self.center_of(state), limit
        accumulator.means["state"] = WeightedMean(self._round_center)
        return accumulator

    @torch.no_grad()
    def accumulate(self, accumulator: Accumulator, update: ClientUpdate) -> None:
        if accumulator.collections:
            super().accumulate(accumulator, update)
            return
        center = self._round_center
        scale = float(clipping_scales(distance(update.state, center), self._round_limit))
        limited = {
            name: value if scale == 1.0 else torch.lerp(center[name], value, scale)
            for name, value in ((name, update.state[name].to(center[name].dtype)) for name in center)
        }
        Aggregation.accumulate(self, accumulator, dataclasses.replace(update, state=limited))

    @torch.no_grad()
    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        if accumulator.collections:
            return super().aggregate(accumulator, state)
        self._round_center = {}
        return self.move_towards(
            state,
            lambda name: accumulator.mean.mean_of(name, wide=True) if state[name].is_floating_point() else state[name],
        )


def check_num_hostile(num_hostile: float) -> None:
    """
    Check a number of hostile clients.

    Args:
        num_hostile (`int` or `float`): A count, or a share of the cohort below one half.

    Raises:
        ValueError: If the value is neither a count nor a share below one half.
    """
    is_count = isinstance(num_hostile, int) and not isinstance(num_hostile, bool) and num_hostile >= 0
    is_share = isinstance(num_hostile, float) and 0 <= num_hostile < 0.5
    allowed = "a count, or a share of the cohort of at least 0 and below 0.5"
    require("num_hostile", num_hostile, is_count or is_share, allowed)


def count_hostile(num_hostile: float, num_clients: int) -> int:
    """
    Return the number of hostile clients that an algorithm tolerates.

    A share is rounded up, but stays below half of the clients.

    Args:
        num_hostile (`int` or `float`): A count, or a share of the cohort.
        num_clients (`int`): Number of clients.
    """
    return num_hostile if isinstance(num_hostile, int) else num_tolerated(num_clients, num_hostile)
