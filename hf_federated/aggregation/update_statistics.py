"""Distances, norms, weighted sums and coordinate-wise statistics of the updates of a round.

The functions read an [`UpdateCollection`] in blocks and compute in float64. For a LoRA module with both factors, they
use the product `B A` (see `lora_factors`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..methods import UpdateCollection
from ..utils.shards import sum_over_shards
from ..utils.weighted_mean import PIECE, State, Tensors, WeightedMean, wide_dtype
from .lora_factors import (
    Statistic,
    add_gram,
    add_products,
    change_factors,
    combined_factors,
    coordinate_wise_factors,
    split_names,
)


# Number of bits of a computed weight. The last bits of a sum depend on the number of threads, and a result must not.
WEIGHT_BITS = 34


def gram_matrix(updates: UpdateCollection, center: Tensors | None = None) -> torch.Tensor:
    """
    Inner products `⟨x_i − x, x_j − x⟩` of the changes of all clients.

    Args:
        updates ([`UpdateCollection`]): The updates.
        center (`Mapping[str, torch.Tensor]`, *optional*): A further state, whose row follows the clients. Only for
            updates without LoRA modules.

    Returns:
        `torch.Tensor` of shape `(num_rows, num_rows)`, float64.
    """
    num_rows = len(updates) + (center is not None)
    gram = torch.zeros(num_rows, num_rows, dtype=torch.float64)
    names, pairs = split_names(updates.reference)
    for name in names:
        for start, stop, rows in updates.changes(name):
            if center is not None:
                rows = torch.cat([rows, _change(updates, center, name, start, stop)[None]])
            gram.addmm_(rows, rows.T)
    for pair in pairs:
        add_gram(gram, updates, pair)
    return gram


def _change(updates: UpdateCollection, state: Tensors, name: str, start: int, stop: int) -> torch.Tensor:
    """Return the change of some values of another state, as [`UpdateCollection.changes`] does."""
    new, old = (each[name].detach().reshape(-1)[start:stop].cpu().double() for each in (state, updates.reference))
    return new - old


def squared_norms(updates: UpdateCollection) -> torch.Tensor:
    """Squared norms `‖x_i − x‖²` of the changes of all clients, as a vector in float64."""
    return products_with(updates, None)


def products_with(updates: UpdateCollection, state: Tensors | None) -> torch.Tensor:
    """
    Inner products `⟨x_i − x, y − x⟩` of the changes of all clients with another change.

    Args:
        updates ([`UpdateCollection`]): The updates.
        state (`Mapping[str, torch.Tensor]`, *optional*): The state `y`. Defaults to the state `x_i` itself.

    Returns:
        `torch.Tensor` of shape `(num_clients,)`, float64.
    """
    products = torch.zeros(len(updates), dtype=torch.float64)
    names, pairs = split_names(updates.reference)
    for name in names:
        for start, stop, rows in updates.changes(name):
            if state is None:
                products += torch.linalg.vecdot(rows, rows)
            else:
                products += rows @ _change(updates, state, name, start, stop)
    for pair in pairs:
        add_products(products, updates, pair, state)
    return products


def squared_norm(state: Tensors, before: Tensors) -> float:
    """Squared norm `‖y − x‖²` of the change of one state in memory. LoRA modules count by their product."""
    names, pairs = split_names(before)
    total = float(distance(state, {name: before[name] for name in names})) ** 2
    for pair in pairs:
        left, right = change_factors(pair.matrices(before), pair.matrices(state))
        total += float(((left @ left.T) * (right @ right.T)).sum())
    return max(total, 0.0)


def squared_distances(gram: torch.Tensor) -> torch.Tensor:
    """Squared distances of all pairs of rows, from their inner products."""
    squares = gram.diagonal()
    distances = squares[:, None] + squares[None, :] - 2 * gram
    # Values whose squares overflow are infinitely far from all others.
    distances = torch.where(distances.isnan(), math.inf, distances).clamp(min=0)
    return distances.fill_diagonal_(0)


def rounded(weights: torch.Tensor) -> torch.Tensor:
    """Round weights to [`WEIGHT_BITS`] bits."""
    mantissa, exponent = torch.frexp(weights)
    return torch.ldexp((mantissa * 2**WEIGHT_BITS).round() / 2**WEIGHT_BITS, exponent)


def distance(state: Tensors, center: Tensors) -> torch.Tensor:
    """
    Distance of two states over all tensors of the center, in float64.

    Args:
        state (`Mapping[str, torch.Tensor]`): A state with the names of the center.
        center (`Mapping[str, torch.Tensor]`): Floating tensors.

    Returns:
        `torch.Tensor`: The distance, a scalar on the CPU.
    """
    total = torch.zeros((), dtype=torch.float64)
    for name, value in center.items():
        # GPUs of Apple do not support float64.
        device = "cpu" if value.device.type == "mps" else value.device
        square = torch.zeros((), dtype=torch.float64, device=device)
        # Pieces stay in the cache of a CPU, and a whole tensor in float64 needs memory.
        pieces = state[name].detach().reshape(-1).split(PIECE), value.detach().reshape(-1).split(PIECE)
        for new, old in zip(*pieces, strict=True):
            change = new.to(square) - old.to(square)
            square += change @ change
        total += square.cpu()
    return sum_over_shards(total).sqrt()


def clipping_scales(norms: torch.Tensor, largest: float) -> torch.Tensor:
    """Return `min(1, largest / norm)` for each norm."""
    return rounded((largest / norms).clamp(max=1.0).nan_to_num(nan=1.0))


def combine(updates: UpdateCollection, coefficients: Sequence[float], wide: torch.dtype = torch.float32) -> State:
    """
    Weighted sum of the changes, `x + Σ_i c_i (x_i − x)`.

    One client with the coefficient 1 gives exactly the state of this client. Integer tensors are the element-wise
    lower medians of the clients with a coefficient, as a minority cannot choose them.

    Args:
        updates ([`UpdateCollection`]): The updates.
        coefficients (`Sequence[float]`): The coefficients `c_i`, in the order of the rows.
        wide (`torch.dtype`, *optional*, defaults to `torch.float32`): Narrowest dtype of the sum.

    Returns:
        `dict[str, torch.Tensor]`: The sum in `wide` or a wider dtype, on the devices of the global state.
    """
    used = {client_id: value for client_id, value in zip(updates.client_ids, coefficients, strict=True) if value}
    reference = updates.reference
    if not used:
        return {name: _wide(value, value, wide) for name, value in reference.items()}
    if list(used.values()) == [1.0]:
        (client_id,) = used
        return {name: _wide(updates.read(client_id, name), value, wide) for name, value in reference.items()}
    names, pairs = split_names(reference)
    result: State = {name: updates.median_of_integers(name, list(used)) for name in updates.other_names}
    for name in names:
        before = reference[name].detach().cpu().reshape(-1)
        total = torch.empty_like(before, dtype=torch.promote_types(before.dtype, wide))
        for start, stop, rows in updates.changes(name, list(used)):
            part = before[start:stop].to(torch.float64, copy=True)
            # One addition after the other, in the order of the clients: the result has the same bits everywhere.
            for row, coefficient in zip(rows, used.values(), strict=True):
                part.add_(row, alpha=coefficient)
            total[start:stop] = part
        result[name] = total.view(reference[name].shape)
    for pair in pairs:
        result |= combined_factors(updates, pair, used)
    return {name: _wide(result[name], value, wide) for name, value in reference.items()}


def coordinate_wise(updates: UpdateCollection, statistic: Statistic) -> State:
    """
    A statistic of each coordinate over the clients.

    Integer tensors are element-wise lower medians.

    Args:
        updates ([`UpdateCollection`]): The updates.
        statistic (`Callable`): Maps values of shape `(num_clients, block)` to values of shape `(block,)`.

    Returns:
        `dict[str, torch.Tensor]`: The statistics in float32 or wider, on the devices of the global state.
    """
    reference = updates.reference
    names, pairs = split_names(reference)
    result: State = {name: updates.median_of_integers(name) for name in updates.other_names}
    for name in names:
        total = torch.empty(reference[name].numel(), dtype=wide_dtype(reference[name].dtype))
        for start, stop, rows in updates.blocks(name):
            total[start:stop] = statistic(rows)
        result[name] = total.view(reference[name].shape)
    for pair in pairs:
        result |= coordinate_wise_factors(updates, pair, statistic)
    return {name: _wide(result[name], value) for name, value in reference.items()}


def step_towards(mean: WeightedMean, state: State, step: float) -> State:
    """
    Move the floating tensors of a state by a step towards a mean, one wide tensor at a time.

    Args:
        mean ([`WeightedMean`]): The mean of the updates.
        state (`dict[str, torch.Tensor]`): The global state.
        step (`float`): Share of the distance. The result for 1 is the mean.

    Returns:
        `dict[str, torch.Tensor]`: The state, with the integer tensors of the mean.
    """
    if step == 1.0:
        return mean.finalize()
    result: State = {}
    for name, value in state.items():
        wide = mean.mean_of(name, wide=True)
        result[name] = torch.lerp(value.to(wide), wide, step).to(value.dtype) if value.is_floating_point() else wide
    return result


def _wide(value: torch.Tensor, reference: torch.Tensor, wide: torch.dtype = torch.float32) -> torch.Tensor:
    dtype = torch.promote_types(reference.dtype, wide) if reference.is_floating_point() else reference.dtype
    return value.to(reference.device, dtype)
