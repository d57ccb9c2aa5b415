"""How far the product of averaged LoRA factors is from the average of the products, in each round.

With the factors `B_i A_i` of the clients and their weights `w_i` (with the sum 1), the ideal product of a module is
`T = Σ_i w_i B_i A_i`. The mean of the factors gives `B̄ Ā` instead. The inexactness of a module is
`‖B̄ Ā − T‖_F / ‖T − T_before‖_F`, the error as a share of the change of the round. `T_before` is the product of the
global factors. The scale `lora_alpha / r` cancels.

No term is computed as a difference of large products:

- `T − B̄ Ā = E` with `E = Σ_i w_i (B_i − B̄) (A_i − Ā)`;
- `T − T_before = E + (B̄ − B) Ā + B (Ā − A)`.

A norm comes from the factors, `‖L R‖² = Σ (Lᵀ L) ∘ (R Rᵀ)`, unless the factors of all clients have more values than
the module.
"""

from __future__ import annotations

import statistics

import torch

from ..messages import ClientUpdate
from ..methods import Accumulator, UpdateCollection
from ..utils.shards import ACTIVE
from ..utils.weighted_mean import Tensors
from .base import Aggregation
from .lora_factors import FactorPair, find_pairs


# Name of the collection of LoRA factors in an accumulator.
FACTORS = "lora_factors"
# Names of the median and the maximum over the modules in the log.
MEDIAN, MAXIMUM = "federated/lora_inexactness", "federated/lora_inexactness_max"


def exchanged_pairs(method: Aggregation, expected: Tensors) -> list[FactorPair]:
    """
    Return the LoRA modules of which clients send both factors. Empty if a process has shards of the factors.

    Args:
        method ([`Aggregation`]): The averaging algorithm.
        expected (`Mapping[str, torch.Tensor]`): The state that the server expects in an update.
    """
    if ACTIVE:
        return []
    # The tensors of a dry round have no values.
    floating = [name for name, value in expected.items() if value.is_floating_point() and not value.is_meta]
    is_averaged = method.averages_both_factors and method.update_content == "parameters"
    return find_pairs(floating) if is_averaged else []


def add_collection(sums: Accumulator, state: Tensors, pairs: list[FactorPair]) -> None:
    """
    Let an accumulator keep the LoRA factors of its updates, unless the algorithm keeps the updates itself.

    Args:
        sums ([`Accumulator`]): An empty accumulator.
        state (`Mapping[str, torch.Tensor]`): The global state.
        pairs (`list[FactorPair]`): The LoRA modules.
    """
    if pairs and not sums.collections:
        factors = {name: state[name] for pair in pairs for name in (pair.a, pair.b)}
        sums.collections[FACTORS] = UpdateCollection(factors)


def add_factors(sums: Accumulator, update: ClientUpdate, method: Aggregation) -> None:
    """Add the LoRA factors of an update to the collection from [`add_collection`], if there is one."""
    if FACTORS in sums.collections and update.client_id not in (kept := sums.collections[FACTORS]).client_ids:
        kept.add(update.client_id, update.state, method.weight(update))


def measure(sums: Accumulator, pairs: list[FactorPair]) -> dict[str, float]:
    """
    Return the median and the maximum of the inexactness over the modules, by the name in the log.

    The accumulator then no longer has the collection from [`add_collection`].

    Args:
        sums ([`Accumulator`]): The accepted updates of all processes.
        pairs (`list[FactorPair]`): The LoRA modules.
    """
    updates = next(iter(sums.collections.values()), None)
    if updates is None or not pairs or not len(updates):
        return {}
    values = [inexactness(updates, pair) for pair in pairs]
    if FACTORS in sums.collections:
        sums.collections.pop(FACTORS).clear()
    return {MEDIAN: statistics.median(values), MAXIMUM: max(values)}


def inexactness(updates: UpdateCollection, pair: FactorPair) -> float:
    """
    Return the inexactness of a module. It is 0 if the factors did not change.

    Args:
        updates ([`UpdateCollection`]): The factors of all clients, and their weights.
        pair ([`FactorPair`]): The module.
    """
    b, a = pair.matrices(updates.reference)
    total = sum(updates.weights.values())
    weights = {client_id: weight / total for client_id, weight in updates.weights.items()}
    mean_b, mean_a = torch.zeros_like(b), torch.zeros_like(a)
    for client_id, weight in weights.items():
        b_i, a_i = pair.read(updates, client_id)
        mean_b.add_(b_i - b, alpha=weight)
        mean_a.add_(a_i - a, alpha=weight)
    change_b, change_a = mean_b, mean_a
    mean_b, mean_a = b + change_b, a + change_a
    lefts, rights = [], []
    is_stacked = len(weights) * a.shape[0] < min(b.shape[0], a.shape[1])
    error = torch.zeros(0 if is_stacked else b.shape[0], a.shape[1], dtype=torch.float64)
    for client_id, weight in weights.items():
        b_i, a_i = pair.read(updates, client_id)
        if is_stacked:
            lefts.append(weight * (b_i - mean_b))
            rights.append(a_i - mean_a)
        else:
            error.addmm_(b_i - mean_b, a_i - mean_a, alpha=weight)
    left, right = torch.cat([change_b, b], 1), torch.cat([mean_a, change_a])
    if is_stacked:
        error_norm = product_norm(torch.cat(lefts, 1), torch.cat(rights))
        change_norm = product_norm(torch.cat([*lefts, left], 1), torch.cat([*rights, right]))
    else:
        error_norm, change_norm = float(error.norm()), float(error.addmm_(left, right).norm())
    return error_norm / change_norm if change_norm and len(weights) > 1 else 0.0


def product_norm(left: torch.Tensor, right: torch.Tensor) -> float:
    """
    Return the Frobenius norm of a product from its factors.

    Args:
        left (`torch.Tensor` of shape `(out, r)`): The left factor.
        right (`torch.Tensor` of shape `(r, in)`): The right factor.
    """
    return float(((left.T @ left) * (right @ right.T)).sum().clamp(min=0).sqrt())
