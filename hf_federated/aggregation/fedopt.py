"""FedOpt: an optimizer on the server, applied to the mean change of the clients.

The optimizers come from `torch.optim`. This module adds Yogi, which `torch.optim` does not have.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.optim import Optimizer
from transformers import get_scheduler

from .._compat import set_last_lr
from ..utils.arguments import require, require_one_of
from ..utils.weighted_mean import State, wide_dtype
from .base import Accumulator, Aggregation


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


class FedOpt(Aggregation):
    """
    FedOpt: an optimizer on the server, applied to the mean change of the clients.

    [Adaptive Federated Optimization](https://arxiv.org/abs/2003.00295) (Reddi et al., ICLR 2021), algorithms 1 and 2.
    All methods of [FedNLP](https://aclanthology.org/2022.findings-naacl.13/) (Lin et al., Findings of NAACL 2022)
    build on FedOpt.

    In each round, the server takes one optimizer step on the pseudo-gradient `g = x_t − Σ_i w_i x_i / Σ_i w_i`.

    | paper | here |
    |---|---|
    | SERVEROPT | `server_optimizer` |
    | CLIENTOPT, `η_l` | `optim` and `learning_rate` of `TrainingArguments` |
    | `η` | `server_lr` |
    | `β1`, `β2` | `server_betas`; for `"momentum"` and `"nesterov"`, `server_momentum` |
    | `τ` | `server_eps` |

    The optimizer updates a copy of the global state in float32 or wider, so that small server steps are not lost in
    half precision. Integer tensors are copied from the first update.

    Args:
        server_optimizer (`str`, *optional*, defaults to `"momentum"`):
            `"sgd"`, `"momentum"`, `"nesterov"`, `"adam"` (FedAdam), `"adamw"`, `"yogi"` (FedYogi) or `"adagrad"`
            (FedAdagrad). All optimizers except Yogi come from torch. Adam in torch corrects the bias of the moments,
            Adam in the paper does not.
        server_lr (`float`, *optional*, defaults to `1.0`):
            Learning rate of the server optimizer.
        server_momentum (`float`, *optional*, defaults to `0.9`):
            Momentum, for `"momentum"` and `"nesterov"`.
        server_betas (`tuple[float, float]`, *optional*, defaults to `(0.9, 0.99)`):
            Decay rates of the moments, for `"adam"`, `"adamw"` and `"yogi"`.
        server_eps (`float`, *optional*, defaults to `1e-3`):
            Adaptivity `τ`.
        server_weight_decay (`float`, *optional*, defaults to `0.0`):
            Weight decay, for all optimizers except `"yogi"`.
        server_lr_scheduler (`str`, *optional*, defaults to `"constant"`):
            Learning-rate schedule over the rounds, a `transformers.SchedulerType` without further arguments:
            `"linear"`, `"cosine"`, `"cosine_with_restarts"`, `"polynomial"`, `"constant"`, `"constant_with_warmup"` or
            `"inverse_sqrt"`.
        server_warmup_rounds (`int`, *optional*, defaults to `0`):
            Number of warm-up rounds. Needs a scheduler with warm-up.
        weighting (`str`, *optional*, defaults to `"examples"`):
            Weight of an update: `"examples"`, `"tokens"` or `"uniform"`, as in [`Aggregation`].

    Raises:
        ValueError: If the optimizer, the scheduler or `weighting` is unknown, if a rate is out of range, or if the
            optimizer or the scheduler does not support an argument.

    Requirements:
        None.

    Relations:
        - [`FedAvg`] takes the same step up to rounding as `server_optimizer="sgd"` with `server_lr=1.0`.
        - [`FedOpt.diloco`] builds the server of DiLoCo.

    Example:

    ```python
    >>> from hf_federated import FedOpt

    >>> FedOpt(server_optimizer="adam", server_lr=1e-2)
    FedOpt(server_optimizer='adam', server_lr=0.01)
    ```
    """

    name: ClassVar[str] = "fedopt"

    def __init__(
        self,
        server_optimizer: str = "momentum",
        server_lr: float = 1.0,
        server_momentum: float = 0.9,
        server_betas: tuple[float, float] = (0.9, 0.99),
        server_eps: float = 1e-3,
        server_weight_decay: float = 0.0,
        server_lr_scheduler: str = "constant",
        server_warmup_rounds: int = 0,
        weighting: str = "examples",
    ) -> None:
        super().__init__(weighting)
        require_one_of("server_optimizer", server_optimizer, SERVER_OPTIMIZERS)
        require("server_lr", server_lr, server_lr > 0, "positive")
        require("server_momentum", server_momentum, 0 <= server_momentum < 1, "at least 0 and below 1")
        require_one_of("server_lr_scheduler", server_lr_scheduler, SERVER_LR_SCHEDULERS)
        if server_optimizer == "nesterov" and server_momentum == 0:
            raise ValueError("`server_momentum` is 0, but 'nesterov' needs momentum. Set server_optimizer='sgd'.")
        if server_optimizer == "yogi" and server_weight_decay:
            raise ValueError(
                "'yogi' does not support `server_weight_decay`. Set server_optimizer='adamw' for weight decay."
            )
        if server_warmup_rounds and server_lr_scheduler == "constant":
            raise ValueError(
                "`server_warmup_rounds` has no effect with server_lr_scheduler='constant'. Set a scheduler with "
                "warm-up, such as 'constant_with_warmup'."
            )
        self.server_optimizer = server_optimizer
        self.server_lr = server_lr
        self.server_momentum = server_momentum
        self.server_betas = (float(server_betas[0]), float(server_betas[1]))
        self.server_eps = server_eps
        self.server_weight_decay = server_weight_decay
        self.server_lr_scheduler = server_lr_scheduler
        self.server_warmup_rounds = server_warmup_rounds
        self._num_rounds = 0
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._optimizer: Optimizer | None = None
        self._scheduler: Any = None
        self._saved: dict[str, Any] = {}

    @classmethod
    def diloco(cls, server_lr: float = 0.7, server_momentum: float = 0.9, weighting: str = "uniform") -> FedOpt:
        """
        Build the server of [DiLoCo](https://arxiv.org/abs/2311.08105) (Douillard et al., 2023), section 2.

        DiLoCo uses Nesterov momentum 0.9 and learning rate 0.7 on the server. Its clients train hundreds of local
        steps with AdamW, the default optimizer of `TrainingArguments`. Set `client_optimizer_state="carry"` in
        [`FederatedConfig`].

        Args:
            server_lr (`float`, *optional*, defaults to `0.7`): Learning rate of the server optimizer.
            server_momentum (`float`, *optional*, defaults to `0.9`): Nesterov momentum.
            weighting (`str`, *optional*, defaults to `"uniform"`): Weight of an update, as in [`Aggregation`].

        Returns:
            [`FedOpt`]: The algorithm.
        """
        return cls("nesterov", server_lr=server_lr, server_momentum=server_momentum, weighting=weighting)

    def setup(self, num_rounds: int, num_clients: int) -> None:
        self._num_rounds = num_rounds
        self._parameters, self._optimizer, self._scheduler = {}, None, None
        self._saved = {}

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
        return optimizer

    @torch.no_grad()
    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        if self._optimizer is None:
            self._optimizer = self._build(state)
            if self._saved:
                self._restore(self._optimizer, self._saved)
        mean = accumulator.mean
        for name, parameter in self._parameters.items():
            # A change of the global state between rounds, such as a distillation, overrides the wide copy.
            if not torch.equal(parameter.to(state[name].dtype), state[name]):
                parameter.copy_(state[name])
            parameter.grad = state[name].to(parameter.dtype) - mean.mean_of(name, wide=True).to(parameter.dtype)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._scheduler.step()
        return {
            name: self._parameters[name].to(value.dtype, copy=True) if name in self._parameters else mean.mean_of(name)
            for name, value in state.items()
        }

    def state_dict(self) -> dict[str, Any]:
        if self._optimizer is None:
            return self._saved
        return {
            "parameters": {name: parameter.detach() for name, parameter in self._parameters.items()},
            "optimizer": self._optimizer.state_dict(),
            "scheduler": {"last_epoch": self._scheduler.last_epoch, "last_lr": self._scheduler.get_last_lr()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # The next call of `aggregate` restores the state, because it knows the device of the global state.
        self._parameters, self._optimizer, self._scheduler = {}, None, None
        self._saved = state

    @torch.no_grad()
    def _restore(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(saved["parameters"][name])
        optimizer.load_state_dict(saved["optimizer"])
        self._scheduler.last_epoch = saved["scheduler"]["last_epoch"]
        set_last_lr(self._scheduler, saved["scheduler"]["last_lr"])
        self._saved = {}
