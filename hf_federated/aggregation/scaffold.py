"""Scaffold: control variates against client drift.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning (ICML 2020), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..messages import Disclosure, Fit
from ..utils.weighted_mean import State, wide_dtype
from .base import Accumulator, Aggregation, LocalHook


class Scaffold(Aggregation):
    """
    Clients train on `g − c_i + c`: their gradient, less what their own data usually adds, plus the federation's.

    The correction is added to the gradient, before clipping and before the client optimizer. A client's new control
    variate is the mean of its own, uncorrected gradients over the round's steps. For plain SGD without clipping that
    is the paper's option II, `c_i⁺ = c_i − c + (x − y_i) / (K η_l)`, exactly; unlike that formula it also holds for
    momentum, adaptive optimizers and learning-rate schedules. The server then takes

    `x ← x + η_g · mean(y_i − x)` and `c ← c + (|S| / N) · mean(c_i⁺ − c_i)`.

    Every floating value exchanged has a control variate; those that do not train keep theirs at zero. Traffic is twice
    that of [`FedAvg`], and each client keeps one float32 copy of its parameters in the client store.

    | paper | here |
    |---|---|
    | `η_g` | `server_lr` |
    | `η_l`, `K` | `TrainingArguments`, `local_steps` or `local_epochs` |
    | `c`, `c_i` | kept by the server and by each client, zero at the start |
    | `S`, `N` | the round's updates, all clients |

    Args:
        server_lr (`float`, *optional*, defaults to `1.0`):
            Step towards the mean.
        weighting (`str`, *optional*, defaults to `"uniform"`):
            Of the parameters, as in the paper; `"examples"` and `"tokens"` are possible. Control variates are always
            averaged uniformly.

    Raises:
        ValueError: If `server_lr` is not positive.

    Example:

    ```python
    >>> from hf_federated import Scaffold

    >>> Scaffold(server_lr=0.5)
    Scaffold(server_lr=0.5)
    ```
    """

    name: ClassVar[str] = "scaffold"
    needs_gradients: ClassVar[bool] = True

    def __init__(self, server_lr: float = 1.0, weighting: str = "uniform") -> None:
        super().__init__(weighting)
        if server_lr <= 0:
            raise ValueError(f"`server_lr` is {server_lr}; it must be positive.")
        self.server_lr = server_lr
        self._num_clients = 0
        self._control: State = {}

    @property
    def disclosures(self) -> tuple[Disclosure, ...]:
        return (Disclosure("change of the control variate", "exchanged parameter"),)

    def setup(self, num_rounds: int, num_clients: int) -> None:
        self._num_clients = num_clients
        self._control = {}

    def fit_extra(self, state: State) -> State:
        if not self._control:
            self._control = {
                name: torch.zeros_like(value, dtype=wide_dtype(value.dtype))
                for name, value in state.items()
                if value.is_floating_point()
            }
        # What a checkpoint held is on the CPU.
        self._control = {name: value.to(state[name].device) for name, value in self._control.items()}
        return dict(self._control)

    def expected_extra(self, state: State) -> State:
        return self.fit_extra(state)

    @torch.no_grad()
    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        mean, change = accumulator.mean, accumulator.extra
        share = accumulator.num_updates / self._num_clients
        self._control = {
            name: (value + share * change.mean_of(name, wide=True)).to(value.dtype)
            for name, value in self._control.items()
        }
        if self.server_lr == 1.0:
            return mean.finalize()
        return {name: self._step_towards(value, mean.mean_of(name, wide=True)) for name, value in state.items()}

    def _step_towards(self, value: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point():
            return mean
        return torch.lerp(value.to(mean), mean, self.server_lr).to(value.dtype)

    def state_dict(self) -> dict[str, Any]:
        return {"control": self._control}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._control = dict(state["control"])

    def local_hook(self, message: Fit, kept: dict[str, Any] | None) -> LocalHook | None:
        return ControlVariateHook(message.extra, (kept or {}).get("control"))


class ControlVariateHook(LocalHook):
    """Adds `c − c_i` to the gradients and averages what they were before."""

    def __init__(self, server_control: State, own_control: State | None) -> None:
        self._server = server_control
        self._own = {
            name: torch.zeros_like(value) if own_control is None else own_control[name].to(value)
            for name, value in server_control.items()
        }
        self._sum: State = {name: torch.zeros_like(value) for name, value in server_control.items()}
        self._num_steps = 0

    @torch.no_grad()
    def on_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._num_steps += 1
        for name, parameter in parameters.items():
            if parameter.grad is None:
                continue
            self._sum[name] += parameter.grad.to(self._sum[name])
            parameter.grad += (self._server[name] - self._own[name]).to(parameter.grad)

    def finish(self) -> tuple[State, dict[str, Any] | None]:
        if self._num_steps == 0:
            raise RuntimeError(
                "Scaffold saw no gradient in this local training, so it has no control variate to send."
            )
        own = {name: value / self._num_steps for name, value in self._sum.items()}
        return {name: value - self._own[name] for name, value in own.items()}, {"control": own}
