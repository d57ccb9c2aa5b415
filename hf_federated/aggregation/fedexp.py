"""FedExP: a server step that is larger if the changes of the clients point in different directions."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..messages import ClientUpdate
from ..methods import Accumulator
from ..utils.arguments import require
from ..utils.weighted_mean import State, WeightedMean
from .base import Aggregation
from .update_statistics import distance, rounded, step_towards


SQUARED_NORM = "squared_norm"


class FedExP(Aggregation):
    """
    FedExP: FedAvg with a server step that extrapolates beyond the mean.

    [FedExP: Speeding Up Federated Averaging via Extrapolation](https://arxiv.org/abs/2301.09604) (Jhunjhunwala et al.,
    ICLR 2023), algorithm 1.

    `x ← x + η_g Δ̄` with the changes `Δ_i = x_i − x` of the `M` clients of the round, their mean `Δ̄`, and
    `η_g = max(1, Σ_i ‖Δ_i‖² / (2 M (‖Δ̄‖² + ε)))`. With weights `w_i`, `Σ_i w_i ‖Δ_i‖² / Σ_i w_i` replaces
    `Σ_i ‖Δ_i‖² / M`. The norms contain all exchanged floating tensors.

    The paper evaluates the average of the last two global states (section 4). This average is not implemented.

    | paper | here |
    |---|---|
    | `−Δ_i^(t)` | `Δ_i`: the paper subtracts the changes |
    | `η_g^(t)` | step of the server, computed in each round |
    | `ε` | `epsilon` |

    Args:
        epsilon (`float`, *optional*, defaults to `1e-3`):
            Constant `ε`, positive. It has the scale of a squared norm and limits the step if the changes cancel.
        weighting (`str`, *optional*, defaults to `"uniform"`):
            Weight of an update in both means: `"uniform"` as in the paper, `"examples"` or `"tokens"`.

    Raises:
        ValueError: If `epsilon` is not positive or `weighting` is unknown.

    Requirements:
        None.

    Relations:
        - [`FedAvg`] with the same `weighting` is the case `η_g = 1`, for example with one client.
        - [`FedOpt`] has a learning rate on the server that the user sets.

    Example:

    ```python
    >>> from hf_federated import FedExP

    >>> FedExP(epsilon=0.01)
    FedExP(epsilon=0.01)
    ```
    """

    name: ClassVar[str] = "fedexp"

    def __init__(self, epsilon: float = 1e-3, weighting: str = "uniform") -> None:
        super().__init__(weighting)
        require("epsilon", epsilon, epsilon > 0, "positive")
        self.epsilon = epsilon

    def accumulator(self, state: State, extra: State | None = None) -> Accumulator:
        accumulator = super().accumulator(state, extra)
        accumulator.means[SQUARED_NORM] = WeightedMean({SQUARED_NORM: torch.zeros((), dtype=torch.float64)})
        return accumulator

    def accumulate(self, accumulator: Accumulator, update: ClientUpdate) -> None:
        super().accumulate(accumulator, update)
        squared = distance(update.state, _floating(accumulator.reference)).square()
        # The sum of rounded values does not depend on the order of the clients.
        accumulator.means[SQUARED_NORM].add({SQUARED_NORM: rounded(squared)}, self.weight(update))

    @torch.no_grad()
    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        center, mean = _floating(accumulator.reference), accumulator.mean
        # One wide tensor at a time.
        parts = [distance({name: mean.mean_of(name, wide=True)}, {name: center[name]}).square() for name in center]
        squared = float(rounded(torch.stack(parts).sum()))
        mean_square = float(accumulator.means[SQUARED_NORM].mean_of(SQUARED_NORM))
        # The step is `η_g`.
        return step_towards(mean, state, max(1.0, mean_square / (2 * (squared + self.epsilon))))


def _floating(state: State) -> State:
    return {name: value for name, value in state.items() if value.is_floating_point()}
