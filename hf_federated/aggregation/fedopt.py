"""FedOpt: an optimizer on the server, applied to the mean change of the clients."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ..utils.weighted_mean import State
from .base import Accumulator, Aggregation
from .server_optimizer import ServerOptimizer


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
        self._optimizer = ServerOptimizer(
            server_optimizer,
            server_lr,
            server_momentum,
            server_betas,
            server_eps,
            server_weight_decay,
            server_lr_scheduler,
            server_warmup_rounds,
        )
        # The constructor of the optimizer has checked the settings.
        vars(self).update(dataclasses.asdict(self._optimizer))

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
        self._optimizer.setup(num_rounds)

    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        return self._optimizer.step(state, lambda name: accumulator.mean.mean_of(name, wide=True))

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)
