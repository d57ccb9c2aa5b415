"""CenteredClipping: a mean of momenta, limited around the previous change."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..messages import ClientUpdate, Fit
from ..methods import ClientPart, UpdateCollection
from ..utils.arguments import require
from ..utils.robust_statistics import median
from ..utils.weighted_mean import State, wide_dtype
from .robust import ClippedMean
from .update_statistics import clipping_scales, combine, gram_matrix


class MomentumPart(ClientPart):
    """Replace the change of the trained parameters by its momentum over the rounds of the client."""

    _message: Fit
    _names: Collection[str] = ()

    def receive(self, message: Fit) -> None:
        self._message = message

    @property
    def changes_gradients(self) -> bool:
        return self._message.settings["client_momentum"] > 0

    def on_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._names = parameters.keys()

    def send(self, update: ClientUpdate) -> ClientUpdate:
        momentum, previous = self._message.settings["client_momentum"], self.memory.get("momentum")
        if momentum == 0:
            return update
        changes: State = {}
        state = dict(update.state)
        for name in self._names:
            value = state[name]
            before = self._message.state[name].to(value.device, wide_dtype(value.dtype))
            change = value.to(before) - before
            if previous is not None:
                change = momentum * previous[name].to(change) + (1 - momentum) * change
            state[name] = (before + change).to(value)
            changes[name] = change
        self.memory["momentum"] = changes
        return dataclasses.replace(update, state=state)


class CenteredClipping(ClippedMean):
    """
    CenteredClipping: a mean of the clients' momenta, limited around the previous change of the global state.

    [Learning from History for Byzantine Robust Optimization](https://arxiv.org/abs/2012.10333) (Karimireddy et al.,
    ICML 2021), algorithms 1 and 2.

    Each client sends a momentum `m_i ← (1 − β) Δ_i + β m_i` of its changes `Δ_i = x_i − x` instead of the change. In
    its first round, `m_i = Δ_i`. The client keeps the momentum of its trained parameters in the client store. The
    server computes, from the previous `v`,

    `v ← v + (1 / n) Σ_i (m_i − v) · min(1, τ / ‖m_i − v‖)` and then `x ← x + v`.

    Hostile changes that are small in every round, but always point in the same direction, are limited too, because
    `v` remembers the direction of the honest clients.

    With a fixed `radius` and one iteration, the server keeps only a sum. Otherwise, it keeps all updates of the round
    in a temporary file. The paper has a fixed radius; the median distance as the default is an addition. Integer
    tensors keep their global values with a sum, and are element-wise lower medians otherwise.

    | paper | here |
    |---|---|
    | `β` | `client_momentum` |
    | `τ` | `radius` |
    | `L`, number of iterations | `num_iterations` |
    | `v` | state of the server, initially zero |
    | `η` | `server_lr` with `server_optimizer="sgd"` |
    | one gradient | the local training of [`FederatedConfig`] |

    Args:
        radius (`float`, *optional*):
            Largest distance `τ` of a momentum from `v`. Defaults to the median distance in each iteration.
        client_momentum (`float`, *optional*, defaults to `0.9`):
            Momentum `β` on the clients. Set it to 0 if most clients take part in few rounds, because an old momentum
            points to an old model.
        num_iterations (`int`, *optional*, defaults to `1`):
            Number of iterations `L` in a round.
        server_optimizer (`str`, *optional*):
            Name of a server optimizer, as in [`FedOpt`]. By default, `x + v` becomes the global state.
        server_lr (`float`, *optional*, defaults to `1.0`):
            Learning rate of the server optimizer.
        server_kwargs (`dict`, *optional*):
            Further arguments of the server optimizer by their names in [`FedOpt`], such as `server_momentum`.
        max_memory_mb (`float`, *optional*, defaults to `256`):
            Memory for the values of all clients that the server compares at a time, in MB.

    Raises:
        ValueError: If an argument is unknown or out of range, or if both factors of a LoRA module are trained. A
            momentum of the product `B A` is no product of factors.

    Requirements:
        Fewer than half of the clients of a cohort are hostile (the proof of the paper asks for at most one tenth).
        Clients take part in most rounds, unless `client_momentum=0`. The client optimizer keeps the gradients until
        its step. LOMO and AdaLomo do not. All updates have equal weight: the numbers of examples that clients announce
        have no influence.

    Relations:
        - [`NormBoundedMean`] limits the changes around zero and keeps no history.
        - With a large `radius` and `client_momentum=0`, the result is the mean, as with [`FedAvg`] and
          `weighting="uniform"`.

    Example:

    ```python
    >>> from hf_federated import CenteredClipping

    >>> CenteredClipping(radius=1.0, num_iterations=3)
    CenteredClipping(radius=1.0, num_iterations=3)
    ```
    """

    name: ClassVar[str] = "centered_clipping"
    needs_gradients: ClassVar[bool] = True
    client_part: ClassVar[type[ClientPart]] = MomentumPart
    supports_factors: ClassVar[bool] = False

    def __init__(
        self,
        radius: float | None = None,
        client_momentum: float = 0.9,
        num_iterations: int = 1,
        server_optimizer: str | None = None,
        server_lr: float = 1.0,
        server_kwargs: Mapping[str, Any] | None = None,
        max_memory_mb: float = 256,
    ) -> None:
        super().__init__(server_optimizer, server_lr, server_kwargs, max_memory_mb)
        require("radius", radius, radius is None or radius > 0, "positive")
        require("client_momentum", client_momentum, 0 <= client_momentum < 1, "at least 0 and below 1")
        require("num_iterations", num_iterations, num_iterations >= 1, "at least 1")
        self.radius = radius
        self.client_momentum = client_momentum
        self.num_iterations = num_iterations
        # `v` of the floating tensors. Empty before the first round.
        self._center: State = {}

    def setup(self, num_rounds: int, num_clients: int) -> None:
        super().setup(num_rounds, num_clients)
        self._center = {}

    def fit_settings(self) -> dict[str, Any]:
        return {"client_momentum": self.client_momentum}

    def setting_ranges(self) -> dict[str, tuple[float, float]]:
        return {"client_momentum": (self.client_momentum, self.client_momentum)}

    def limit(self, state: State) -> float | None:
        return self.radius if self.num_iterations == 1 else None

    def center_of(self, state: State) -> State:
        center = super().center_of(state)
        # A `v` that was restored from a checkpoint is on the CPU.
        return {
            name: value + self._center[name].to(value) if self._center else value for name, value in center.items()
        }

    def estimate(self, updates: UpdateCollection) -> State:
        before = updates.reference
        center = {
            name: before[name].cpu().double() + self._center[name].cpu().double() if self._center else before[name]
            for name in updates.floating_names
        }
        coefficients, rest = centered_weights(gram_matrix(updates, center), self.radius, self.num_iterations)
        result = combine(updates, coefficients.tolist(), wide=torch.float64)
        for name, value in self._center.items():
            result[name] = result[name] + rest * value.to(result[name])
        return result

    def move_towards(self, state: State, estimate_of: Any) -> State:
        for name, value in state.items():
            if value.is_floating_point():
                estimate = estimate_of(name)
                self._center[name] = (estimate - value.to(estimate)).to(wide_dtype(value.dtype))
        return super().move_towards(state, estimate_of)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "center": self._center}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._center = dict(state["center"])


def centered_weights(gram: torch.Tensor, radius: float | None, num_iterations: int) -> tuple[torch.Tensor, float]:
    """
    Write the result of the iterations as `Σ_i c_i m_i + r v`.

    Args:
        gram (`torch.Tensor` of shape `(num_clients + 1, num_clients + 1)`, float64): Inner products of the momenta
            and, in the last row, of the previous `v`.
        radius (`float`, *optional*): `τ`. Defaults to the median distance in each iteration.
        num_iterations (`int`): `L`.

    Returns:
        `tuple[torch.Tensor, float]`: The weights `c_i` of shape `(num_clients,)` and the weight `r`.
    """
    num_clients = len(gram) - 1
    weights = torch.zeros(num_clients + 1, dtype=torch.float64)
    weights[-1] = 1.0
    for _ in range(num_iterations):
        product = gram @ weights
        squares = gram.diagonal() - 2 * product + weights @ product
        distances = squares[:-1].clamp(min=0).sqrt()
        scales = clipping_scales(distances, float(median(distances)) if radius is None else radius)
        weights = weights * (1 - scales.mean())
        weights[:-1] += scales / num_clients
    return weights[:-1], float(weights[-1])
