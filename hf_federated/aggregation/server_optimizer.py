"""`ServerOptimizer`: an optimizer on the server that turns an estimate of the clients into a step.

The optimizers come from `torch.optim`. This module adds Yogi, which `torch.optim` does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from transformers import get_scheduler

from .._compat import set_last_lr
from ..utils.arguments import require, require_one_of
from ..utils.weighted_mean import State, wide_dtype


class Yogi(Optimizer):
    """
    Yogi without bias correction, as the server optimizer of Reddi et al. (2021, algorithm 2).

    The update is

    `m ← β1 m + (1 − β1) g`, `v ← v − (1 − β2) g² sign(v − g²)`, `x ← x − lr · m / (√v + τ)`.

    Args:
        params (`Iterable`): Parameters, or parameter groups.
        lr (`float`): Learning rate.
        betas (`tuple[float, float]`): `β1` and `β2`.
        eps (`float`): `τ` in the paper. The initial value of `v` is `τ²`.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch declares two overloads
        """Update every parameter from its gradient. `closure` is not called."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                gradient = parameter.grad
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.full_like(parameter, group["eps"] ** 2)
                square = gradient * gradient
                state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
                state["exp_avg_sq"].sub_((1 - beta2) * square * torch.sign(state["exp_avg_sq"] - square))
                parameter.sub_(group["lr"] * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"]))


SERVER_OPTIMIZERS = ("sgd", "momentum", "nesterov", "adam", "adamw", "yogi", "adagrad")
# Values of `transformers.SchedulerType` that need neither further arguments nor a metric.
SERVER_LR_SCHEDULERS = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
)


@dataclass(repr=False, eq=False)
class ServerOptimizer:
    """
    An optimizer that moves the global state towards an estimate, such as the mean of the clients.

    In each round, the optimizer takes one step on the pseudo-gradient `g = x − estimate`. It updates a copy of the
    global state in float32 or wider, so that small steps are not lost in half precision. Integer tensors are copied
    from the estimate.

    Args:
        server_optimizer, server_lr, server_momentum, server_betas, server_eps, server_weight_decay,
        server_lr_scheduler, server_warmup_rounds: As in [`FedOpt`].

    Raises:
        ValueError: If the optimizer or the scheduler is unknown, if a rate is out of range, or if the optimizer or the
            scheduler does not support an argument.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.aggregation import ServerOptimizer

    >>> optimizer = ServerOptimizer("sgd", server_lr=0.5)
    >>> optimizer.setup(num_rounds=1)
    >>> estimate = {"w": torch.ones(1)}
    >>> optimizer.step({"w": torch.zeros(1)}, estimate.__getitem__)
    {'w': tensor([0.5000])}
    ```
    """

    server_optimizer: str = "momentum"
    server_lr: float = 1.0
    server_momentum: float = 0.9
    server_betas: tuple[float, float] = (0.9, 0.99)
    server_eps: float = 1e-3
    server_weight_decay: float = 0.0
    server_lr_scheduler: str = "constant"
    server_warmup_rounds: int = 0

    def __post_init__(self) -> None:
        require_one_of("server_optimizer", self.server_optimizer, SERVER_OPTIMIZERS)
        require("server_lr", self.server_lr, self.server_lr > 0, "positive")
        require("server_momentum", self.server_momentum, 0 <= self.server_momentum < 1, "at least 0 and below 1")
        require_one_of("server_lr_scheduler", self.server_lr_scheduler, SERVER_LR_SCHEDULERS)
        if self.server_optimizer == "nesterov" and self.server_momentum == 0:
            raise ValueError("`server_momentum` is 0, but 'nesterov' needs momentum. Set server_optimizer='sgd'.")
        if self.server_optimizer == "yogi" and self.server_weight_decay:
            raise ValueError(
                "'yogi' does not support `server_weight_decay`. Set server_optimizer='adamw' for weight decay."
            )
        if self.server_warmup_rounds and self.server_lr_scheduler == "constant":
            raise ValueError(
                "`server_warmup_rounds` has no effect with server_lr_scheduler='constant'. Set a scheduler with "
                "warm-up, such as 'constant_with_warmup'."
            )
        self.server_betas = (float(self.server_betas[0]), float(self.server_betas[1]))
        self.setup(0)

    def setup(self, num_rounds: int) -> None:
        """Reset the optimizer for a new run of `num_rounds` rounds."""
        self._num_rounds = num_rounds
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._optimizer: Optimizer | None = None
        self._scheduler: Any = None
        self._saved: dict[str, Any] = {}

    def _build(self, state: State) -> Optimizer:
        self._parameters = {
            name: torch.nn.Parameter(value.to(wide_dtype(value.dtype), copy=True))
            for name, value in state.items()
            if value.is_floating_point()
        }
        parameters = list(self._parameters.values())
        lr, decay, eps = self.server_lr, self.server_weight_decay, self.server_eps
        optimizer: Optimizer
        if self.server_optimizer in ("sgd", "momentum", "nesterov"):
            momentum = 0.0 if self.server_optimizer == "sgd" else self.server_momentum
            nesterov = self.server_optimizer == "nesterov"
            optimizer = torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=decay)
        elif self.server_optimizer == "yogi":
            optimizer = Yogi(parameters, lr=lr, betas=self.server_betas, eps=eps)
        elif self.server_optimizer == "adagrad":
            optimizer = torch.optim.Adagrad(parameters, lr=lr, eps=eps, weight_decay=decay)
        else:
            adam = torch.optim.AdamW if self.server_optimizer == "adamw" else torch.optim.Adam
            optimizer = adam(parameters, lr=lr, betas=self.server_betas, eps=eps, weight_decay=decay)
        self._scheduler = get_scheduler(
            self.server_lr_scheduler,
            optimizer,
            num_warmup_steps=self.server_warmup_rounds,
            num_training_steps=self._num_rounds,
        )
        if saved := self._saved:
            for name, parameter in self._parameters.items():
                parameter.copy_(saved["parameters"][name])
            optimizer.load_state_dict(saved["optimizer"])
            self._scheduler.last_epoch = saved["scheduler"]["last_epoch"]
            set_last_lr(self._scheduler, saved["scheduler"]["last_lr"])
            self._saved = {}
        return optimizer

    @torch.no_grad()
    def step(self, state: State, estimate_of: Callable[[str], torch.Tensor]) -> State:
        """
        Take the step of one round.

        Args:
            state (`dict[str, torch.Tensor]`): The global state.
            estimate_of (`Callable[[str], torch.Tensor]`): Returns the estimate of a tensor by name, in the dtype of
                the tensor or a wider dtype.

        Returns:
            `dict[str, torch.Tensor]`: The new global state.
        """
        if self._optimizer is None:
            self._optimizer = self._build(state)
        for name, parameter in self._parameters.items():
            # A change of the global state between rounds, such as a distillation, overrides the wide copy.
            if state[name].is_meta or not torch.equal(parameter.to(state[name].dtype), state[name]):
                parameter.copy_(state[name])
            parameter.grad = state[name].to(parameter.dtype) - estimate_of(name).to(parameter.dtype)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._scheduler.step()
        return {
            name: self._parameters[name].to(value.dtype, copy=True) if name in self._parameters else estimate_of(name)
            for name, value in state.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, as scalars and tensors."""
        if self._optimizer is None:
            return self._saved
        return {
            "parameters": {name: parameter.detach() for name, parameter in self._parameters.items()},
            "optimizer": self._optimizer.state_dict(),
            "scheduler": {"last_epoch": self._scheduler.last_epoch, "last_lr": self._scheduler.get_last_lr()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        # The next call of `step` restores the state, because it knows the device of the global state.
        self.setup(self._num_rounds)
        self._saved = state
