"""Scaffold: control variates against client drift."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..messages import ClientUpdate, Disclosure, Fit
from ..methods import Accumulator, ClientPart
from ..utils.arguments import require
from ..utils.weighted_mean import State, wide_dtype
from .base import Aggregation
from .update_statistics import step_towards


class ControlVariatePart(ClientPart):
    """Add `c − c_i` to the gradients and average the uncorrected gradients. The client keeps `c_i`."""

    _server: State
    _own: State
    _sum: State
    _num_steps = 0

    def receive(self, message: Fit) -> None:
        trained = {name for name, value in message.state.items() if value.is_floating_point()}
        if missing := trained - message.extra.keys():
            raise ValueError(f"the server sent no control variate of {min(missing)!r}")
        for name, value in message.extra.items() if message.round == 0 else ():
            # The tensors of a dry run have no values.
            if not value.is_meta and value.any():
                raise ValueError(f"the control variate of {name!r} is not zero in the first round")
        self._server = message.extra
        zeros = {name: torch.zeros_like(value) for name, value in message.extra.items()}
        own = self.memory.get("control", zeros)
        self._own = {name: own[name].to(value) for name, value in zeros.items()}
        self._sum = {name: value.clone() for name, value in zeros.items()}

    @torch.no_grad()
    def on_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._num_steps += 1
        for name, parameter in parameters.items():
            if parameter.grad is None:
                continue
            self._sum[name] += parameter.grad.to(self._sum[name])
            parameter.grad += (self._server[name] - self._own[name]).to(parameter.grad)

    def send(self, update: ClientUpdate) -> ClientUpdate:
        if self._num_steps == 0:
            raise RuntimeError(
                "Scaffold received no gradient in this local training, so it cannot compute a control variate. Check "
                "that the client trains at least one step."
            )
        own = {name: value / self._num_steps for name, value in self._sum.items()}
        self.memory["control"] = own
        changes = {name: value - self._own[name] for name, value in own.items()}
        return dataclasses.replace(update, extra={**update.extra, **changes})


class Scaffold(Aggregation):
    """
    Scaffold: control variates correct the drift of the clients.

    [SCAFFOLD: Stochastic Controlled Averaging for Federated Learning](https://arxiv.org/abs/1910.06378) (Karimireddy
    et al., ICML 2020), algorithm 1.

    Clients train with the corrected gradient `g − c_i + c`. `g` is the gradient of the client, `c_i` the control
    variate of the client and `c` the control variate of the server.

    The client adds the correction `c − c_i` to the gradient, before gradient clipping and before the client optimizer.
    The new control variate of a client is the mean of its uncorrected gradients over the local steps of the round. For
    plain SGD without clipping, this mean equals option II of the paper, `c_i⁺ = c_i − c + (x − y_i) / (K η_l)`. Unlike
    option II, the mean is also valid for momentum, adaptive optimizers and learning-rate schedules. The server then
    computes

    `x ← x + η_g · mean(y_i − x)` and `c ← c + (|S| / N) · mean(c_i⁺ − c_i)`.

    Every exchanged floating tensor has a control variate. The control variate of a tensor that is not trained stays
    zero. The traffic is twice the traffic of [`FedAvg`], and each client keeps one float32 copy of its parameters in
    the client store.

    | paper | here |
    |---|---|
    | `η_g` | `server_lr` |
    | `η_l`, `K` | `TrainingArguments`, `local_steps` or `local_epochs` |
    | `c`, `c_i` | state of the server and of each client, initially zero |
    | `S`, `N` | updates of the round, all clients |

    Args:
        server_lr (`float`, *optional*, defaults to `1.0`):
            Step size `η_g` towards the mean, positive.
        weighting (`str`, *optional*, defaults to `"uniform"`):
            Weight of the parameters of an update: `"uniform"` as in the paper, `"examples"` or `"tokens"`. Control
            variates are always averaged uniformly.

    Raises:
        ValueError: If `server_lr` is not positive or `weighting` is unknown.
        RuntimeError: In local training, if no optimizer step had a gradient.

    Requirements:
        The client optimizer keeps the gradients until its step. LOMO and AdaLomo do not.

    Relations:
        - [`FedAvg`] with `weighting="uniform"` gives the same first round, because all control variates are zero.

    Example:

    ```python
    >>> from hf_federated import Scaffold

    >>> Scaffold(server_lr=0.5)
    Scaffold(server_lr=0.5)
    ```
    """

    name: ClassVar[str] = "scaffold"
    needs_gradients: ClassVar[bool] = True
    client_part: ClassVar[type[ClientPart]] = ControlVariatePart
    disclosures = (Disclosure("change of the control variate", "exchanged parameter"),)

    def __init__(self, server_lr: float = 1.0, weighting: str = "uniform") -> None:
        super().__init__(weighting)
        require("server_lr", server_lr, server_lr > 0, "positive")
        self.server_lr = server_lr
        self._num_clients = 0
        self._control: State = {}

    def setup(self, num_rounds: int, num_clients: int) -> None:
        self._num_clients = num_clients
        self._control = {}

    def fit_extra(self, state: State) -> State:
        kept = self._control
        # Tensors restored from a checkpoint are on the CPU.
        self._control = {
            name: kept[name].to(value.device) if kept else torch.zeros_like(value, dtype=wide_dtype(value.dtype))
            for name, value in state.items()
            if value.is_floating_point()
        }
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
        return step_towards(mean, state, self.server_lr)

    def state_dict(self) -> dict[str, Any]:
        return {"control": self._control}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._control = dict(state["control"])
