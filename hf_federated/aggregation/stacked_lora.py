"""Stacked LoRA: the exact mean of the clients' products, truncated by its singular values."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..messages import ClientUpdate, Fit
from ..methods import Accumulator, ClientPart, Round, UpdateCollection
from ..utils.arguments import require
from ..utils.lora_modules import LoraModule, check_uniform, find_lora_modules, scaling_of
from ..utils.random import derived_seed
from ..utils.weighted_mean import State, Tensors
from .base_changes import UPDATES, BaseChangesAggregation, BasePart
from .lora_factors import FactorPair, factored_svd, find_pairs, pair_with_product
from .lora_inexactness import product_norm


# Names of the median and the maximum over the modules in the log.
TRUNCATION = "federated/lora_truncation"


class RankPart(BasePart):
    """Client half of [`StackedLora`]: train factors of the rank and the scale of the client."""

    # The layers whose scale was changed, and their former scale.
    _scaled: tuple[tuple[LoraModule, float], ...] = ()

    def receive(self, message: Fit) -> None:
        super().receive(message)
        own = self.context.model.exchange.trainable
        self._ranks = {pair: message.state[pair.a].shape[0] for pair in find_pairs(own)}
        config = self.context.peft_config
        for pair, rank in self._ranks.items() if config is not None else ():
            if rank != config.r:
                raise ValueError(f"{pair.a!r} has the rank {rank}, but `peft_config` of the client has r={config.r}")
        if config is not None:
            modules = find_lora_modules(self.context.model.trainer.model)
            self._scaled = tuple((modules[pair.a], modules[pair.a].scaling) for pair in self._ranks)
            for module, _ in self._scaled:
                module.layer.scaling[module.adapter] = scaling_of(config)

    def close(self) -> None:
        for module, scaling in self._scaled:
            module.layer.scaling[module.adapter] = scaling

    def place(self, state: State) -> State:
        # Rows of `A` and columns of `B` that are both zero have no gradient.
        own, padded = self.context.model.exchange.tensors, dict(super().place(state))
        for pair, rank in self._ranks.items():
            if rank < own[pair.a].shape[0]:
                padded |= pair.resized(state, own[pair.a].shape[0])
        return padded

    def send(self, update: ClientUpdate) -> ClientUpdate:
        update = super().send(update)
        state = dict(update.state)
        for pair, rank in self._ranks.items():
            if rank < state[pair.a].shape[0]:
                state |= pair.resized(state, rank)
        return dataclasses.replace(update, state=state)


class StackedLora(BaseChangesAggregation):
    """
    Stacked LoRA: the exact mean of the clients' products `B_i A_i`, truncated by its singular values.

    - [Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
      Resources](https://arxiv.org/abs/2402.11505) (FlexLoRA, Bai et al., NeurIPS 2024): clients have different ranks,
      and each client receives the leading singular vectors of the mean.
    - [FLoRIST: Singular Value Thresholding for Efficient and Accurate Federated Fine-Tuning of Large Language
      Models](https://arxiv.org/abs/2506.09199) (Ramesh and Dass, 2025): QR or singular value decompositions of the
      stacked factors, and a threshold on the energy of the singular values.
    - [FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank
      Adaptations](https://arxiv.org/abs/2409.05976) (Wang et al., NeurIPS 2024): the stacked factors are added to the
      base weights (`reset=True`).

    The mean of the changes of a module is `T = Σ_i w_i s_i B_i A_i = L R` with the stacked factors
    `L = [w_1 s_1 B_1, w_2 s_2 B_2, …]` and `R = [A_1; A_2; …]`, the shares `w_i` of the weights and the scales `s_i`.
    The QR decompositions `L = Q_L R_L` and `Rᵀ = Q_R R_R` and the singular values of the small matrix `R_L R_Rᵀ` give
    `T = U Σ Vᵀ`. The server keeps the `r` largest singular values: the nearest matrix of rank `r`. If the ranks of the
    clients have a sum of at most `r`, nothing is lost. `A` gets orthogonal rows, rotated to be as close as possible to
    the former `A`. Other exchanged tensors are averaged as in [`FedAvg`].

    With `reset=True`, the server adds the whole mean to the base weights, `W_0 ← W_0 + T`. The clients start from a
    new adapter with the product 0: the elements of `A` are uniform between `−1/√in` and `1/√in`, as in PEFT, and `B`
    is zero. A client receives the stacked factors of all rounds since its last one, or the base weights of the LoRA
    modules if these have fewer values. `save_model` and checkpoints contain the merged model. If the base weights
    cannot be written, for example because they are quantized, a second adapter has the changes, as in [`FedExLoRA`].

    `federated/lora_truncation` and `federated/lora_truncation_max` in the log are the median and the maximum over the
    modules of `‖s B A − T‖_F / ‖T − T_before‖_F`, the error of the truncation as a share of the change of the round.

    | papers | here |
    |---|---|
    | `R_i`, rank of a client | `peft_config` of [`ClientSpec`], or the rank of the server's model |
    | `τ`, energy threshold of FLoRIST | `energy` |

    Args:
        rank (`int`, *optional*):
            Number of singular values that the server keeps. Defaults to the rank of the server's model, and is at most
            this rank.
        energy (`float`, *optional*):
            Share of the sum of the squared singular values that is kept: the smallest number of singular values with
            this share, and at most `rank`. By default, all are kept.
        reset (`bool`, *optional*, defaults to `False`):
            Whether the server adds the mean to the base weights and starts a new adapter in each round.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the new adapters with `reset=True`.
        weighting (`str`, *optional*, defaults to `"examples"`):
            Weight of an update: `"examples"`, `"tokens"` or `"uniform"`, as in [`Aggregation`].
        max_residual_rank (`int`, *optional*):
            Largest rank of the second adapter with `reset=True`, as in [`FedExLoRA`].

    Raises:
        ValueError: If an argument is out of range or `reset=True` is combined with `rank` or `energy`. When the
            trainer is built, if the model has no LoRA module of which both factors are exchanged, a client has a
            higher rank than the server, or the model does not support `reset=True`, as in [`FedExLoRA`].

    Requirements:
        A PEFT model with LoRA. The server keeps the factors of a round in a temporary file. `collector="synchronous"`,
        and `client_optimizer_state="reset"`, because the moments of an optimizer belong to the former factors.

    Relations:
        - [`FedIT`] averages the factors, whose product is not the mean of the products.

    Example:

    ```python
    >>> from hf_federated import StackedLora

    >>> StackedLora(energy=0.99)
    StackedLora(energy=0.99)
    ```
    """

    name: ClassVar[str] = "stacked_lora"
    client_part: ClassVar[type[ClientPart]] = RankPart
    supports_late_updates: ClassVar[bool] = False
    changes_basis: ClassVar[bool] = True
    supports_ranks: ClassVar[bool] = True
    averages_both_factors: ClassVar[bool] = False

    def __init__(
        self,
        rank: int | None = None,
        energy: float | None = None,
        reset: bool = False,
        seed: int = 0,
        weighting: str = "examples",
        max_residual_rank: int | None = None,
    ) -> None:
        super().__init__(weighting, max_residual_rank)
        require("rank", rank, rank is None or rank >= 1, "at least 1")
        require("energy", energy, energy is None or 0 < energy <= 1, "above 0 and at most 1")
        if reset and (rank is not None or energy is not None):
            raise ValueError("`rank` and `energy` have no effect with reset=True, which keeps all. Leave them out.")
        self.changes_base = self.reset = reset
        self._round = 0
        self.seed = seed
        self.rank = rank
        self.energy = energy
        # Rank and scale of the clients that have their own.
        self._clients: dict[str, tuple[int, float]] = {}
        # The states of this round by rank and scale, with the global state from which they were computed.
        self._states: dict[tuple[int, float], tuple[State, State]] = {}
        self.truncation: dict[str, float] = {}

    # ---- Clients with their own ranks

    def check_model(self, model: nn.Module, peft_configs: Mapping[str, Any]) -> None:
        super().check_model(model, peft_configs)
        self._clients = {client_id: (config.r, scaling_of(config)) for client_id, config in peft_configs.items()}
        ranks = {module.rank for module in self._modules.values()}
        largest = min(ranks, default=0)
        if self.rank is not None and self.rank > largest:
            raise ValueError(
                f"rank={self.rank}, but the server's model has the rank {largest}. Set at most {largest}."
            )
        if peft_configs and len(ranks) > 1:
            raise ValueError(
                f"The LoRA modules of the server's model have the ranks {sorted(ranks)}, but `clients` sets the ranks "
                "of clients. Give all modules one rank."
            )
        for client_id, config in peft_configs.items():
            check_uniform(config, f"`peft_config` of client {client_id!r}")
            if config.r > largest:
                raise ValueError(
                    f"`peft_config` of client {client_id!r} has r={config.r}, but the server's model has the rank "
                    f"{largest}. Give the server's model the largest rank of the clients."
                )

    def begin(self, round: Round) -> None:
        self._states, self._round = {}, round.number

    def state_for(self, client_id: str, state: State) -> State:
        sent, own = super().state_for(client_id, state), self._own_factors(client_id, state)
        return {**sent, **own} if own else sent

    def expected_for(self, client_id: str, state: State) -> State:
        expected, own = super().expected_for(client_id, state), self._own_factors(client_id, state)
        return {**expected, **own} if own else expected

    def _own_factors(self, client_id: str, state: State) -> State:
        """Return the factors of a client with its own rank and scale."""
        if client_id not in self._clients:
            return {}
        key = self._clients[client_id]
        if key not in self._states or self._states[key][0] is not state:
            self._states[key] = state, self._truncated(state, *key)
        return self._states[key][1]

    def _truncated(self, state: State, rank: int, scaling: float) -> State:
        """Return the leading factors of the global products with a rank and a scale."""
        truncated: State = {}
        for pair in find_pairs(state):
            factor = self._scaling(pair) / scaling
            if rank == state[pair.a].shape[0]:
                b = state[pair.b] if factor == 1.0 else (factor * state[pair.b]).to(state[pair.b])
                truncated |= {pair.a: state[pair.a], pair.b: b}
                continue
            b, a = pair.matrices(state)
            u, s, v = factored_svd(factor * b, a, rank)
            truncated |= pair_with_product(pair, pair.resized(state, rank), u, s, v)
        return truncated

    def _scaling(self, pair: FactorPair) -> float:
        """Return the scale of a module of the server's model."""
        return self._modules[pair.a].scaling if self._modules else 1.0

    def whole_update(self, update: ClientUpdate, state: Tensors) -> ClientUpdate:
        update = super().whole_update(update, state)
        if update.client_id not in self._clients:
            return update
        whole, (_, scaling) = dict(update.state), self._clients[update.client_id]
        for pair in find_pairs(state):
            whole |= pair.resized(whole, state[pair.a].shape[0])
            if (factor := scaling / self._scaling(pair)) != 1.0:
                whole[pair.b] = (factor * whole[pair.b]).to(whole[pair.b])
        return dataclasses.replace(update, state=whole)

    # ---- Sums

    @torch.no_grad()
    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        updates = accumulator.collections[UPDATES]
        try:
            aggregated, errors = super().aggregate(accumulator, state), [0.0] if self.reset else []
            if self.reset:
                aggregated |= self._merge(updates, state)
            for pair in () if self.reset else find_pairs(state):
                factors, error = self._combine(updates, pair)
                aggregated |= factors
                errors.append(error)
        finally:
            updates.close()
        self.truncation = {TRUNCATION: statistics.median(errors), f"{TRUNCATION}_max": max(errors)}
        return {name: aggregated[name] for name in state}

    def finish(self, round: Round) -> State:
        state = super().finish(round)
        round.logs.update(self.truncation)
        return state

    def _merge(self, updates: UpdateCollection, state: State) -> State:
        """Add the mean of the products to the base weights, and return them with new factors."""
        factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        merged: State = {}
        for module in self._modules.values():
            pair = FactorPair(module.a, module.b)
            left, right = stacked_factors(updates, pair)
            factors[module.base] = module.scaling * left, right
            merged |= new_factors(pair, state, derived_seed(self.seed, "new adapter", self._round, module.base))
        return merged | self.change_base(len(updates), factors, state, updates.client_ids)

    def _combine(self, updates: UpdateCollection, pair: FactorPair) -> tuple[State, float]:
        """Return the new factors of a module, and the error of the truncation as a share of the change."""
        b, a = pair.matrices(updates.reference)
        u, s, v, change = svd_of_mean(updates, pair)
        kept = s.clone()
        kept[min(len(a) if self.rank is None else self.rank, num_kept(s, self.energy)) :] = 0
        factors = pair_with_product(pair, updates.reference, u[:, : len(a)], kept[: len(a)], v[:, : len(a)])
        error = float((s - kept).norm())
        return factors, error / change if change else 0.0  # The norm of a change of rounding errors can be 0.


def svd_of_mean(updates: UpdateCollection, pair: FactorPair) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """
    Return the singular vectors and values of `Σ_i w_i B_i A_i`, for the shares `w_i` of the weights.

    The stacked factors are decomposed, unless they have more values than the module.

    Args:
        updates ([`UpdateCollection`]): The factors of all clients, and their weights.
        pair ([`FactorPair`]): The module.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]`: `U`, the singular values in descending order and `V`,
            in float64, and the norm of the difference to the product of the global factors.
    """
    b, a = pair.matrices(updates.reference)
    total = sum(updates.weights.values())
    shares = {client_id: weight / total for client_id, weight in updates.weights.items()}
    if (len(shares) + 1) * len(a) >= min(len(b), a.shape[1]):
        product = torch.zeros(len(b), a.shape[1], dtype=torch.float64)
        for client_id, share in shares.items():
            product.addmm_(*pair.read(updates, client_id), alpha=share)
        u, s, vh = torch.linalg.svd(product, full_matrices=False)
        return u, s, vh.T, float(product.addmm_(b, a, alpha=-1).norm())
    left, right = stacked_factors(updates, pair)
    change = product_norm(torch.cat([left, -b], 1), torch.cat([right, a]))
    # The former rows of `A` fill the new `A` if the clients' factors have fewer rows.
    return *factored_svd(torch.cat([left, torch.zeros_like(b)], 1), torch.cat([right, a])), change


def stacked_factors(updates: UpdateCollection, pair: FactorPair) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return `L` and `R` with the product `Σ_i w_i B_i A_i`, for the shares `w_i` of the weights.

    Args:
        updates ([`UpdateCollection`]): The factors of `n` clients, and their weights.
        pair ([`FactorPair`]): The module.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `L` of shape `(out, n r)` and `R` of shape `(n r, in)`, in float64.
    """
    total = sum(updates.weights.values())
    factors = [(weight / total, *pair.read(updates, name)) for name, weight in updates.weights.items()]
    return torch.cat([share * b for share, b, _ in factors], 1), torch.cat([a for _, _, a in factors])


def new_factors(pair: FactorPair, state: Tensors, seed: int) -> State:
    """
    Return new factors with the product 0, as PEFT initializes them.

    Args:
        pair ([`FactorPair`]): The module. In an embedding, `A` is zero and `B` is normal.
        state (`Mapping[str, torch.Tensor]`): The factors, with their shapes and dtypes.
        seed (`int`): Seed of the values.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn, zero = (pair.b, pair.a) if "lora_embedding_A" in pair.a.split(".") else (pair.a, pair.b)
    values = torch.empty(state[drawn].shape)
    if drawn == pair.b:
        values.normal_(generator=generator)
    else:
        bound = values[0].numel() ** -0.5
        values.uniform_(-bound, bound, generator=generator)
    return {drawn: values.to(state[drawn]), zero: torch.zeros_like(state[zero])}


def num_kept(singular_values: torch.Tensor, energy: float | None) -> int:
    """
    Return the smallest number of singular values with a share of the energy.

    Args:
        singular_values (`torch.Tensor`): Singular values in descending order.
        energy (`float`, *optional*): Share of the sum of the squares. `None` keeps all.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.aggregation.stacked_lora import num_kept

    >>> num_kept(torch.tensor([2.0, 1.0, 0.5]), energy=0.9)
    2
    ```
    """
    if energy is None or not singular_values.any():
        return len(singular_values)
    shares = singular_values.square().cumsum(0) / singular_values.square().sum()
    return min(int((shares < energy).sum()) + 1, len(singular_values))
