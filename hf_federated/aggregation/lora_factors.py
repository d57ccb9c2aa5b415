"""LoRA factors in robust aggregation: the change of a module is the change of the product `B A`, not of `A` and `B`.

Different factors can have the same product, so distances, norms and medians of `A` and `B` have no meaning apart. The
functions here use the product `P = B A` of each module. The scale `lora_alpha / r` is the same for all clients and
left out.

- Inner products of changes come from the factors: `⟨L_i R_i, L_j R_j⟩ = Σ (L_iᵀ L_j) ∘ (R_i R_jᵀ)`. No matrix of the
  size of the module is computed.
- A weighted sum of products is computed from the stacked factors or as a matrix of the size of one module, depending
  on what is smaller, and factored again to rank `r` by a truncated singular value decomposition. The truncation is the
  nearest matrix of rank `r`; the sum of the products of several clients has a higher rank.
- A coordinate-wise statistic is computed on the matrices of one module, in blocks, and factored again in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..methods import UpdateCollection
from ..utils.random import isolated_rng
from ..utils.weighted_mean import State, Tensors


# Parts of the dotted names of the factors, from PEFT.
FACTORS = {"lora_A": "lora_B", "lora_embedding_A": "lora_embedding_B"}
# Parts of the names of adapters whose change is a product of more than two factors.
OTHER_FACTORS = ("lora_E", "hada_w1_a", "lokr_w1", "lokr_w1_a")
# Up to this size of the smaller dimension, singular values are computed exactly.
EXACT_SIZE = 1024

# `B` and `A` of a module, or the left and the right factor of a change.
Factors = tuple[torch.Tensor, torch.Tensor]
# Maps values of all clients, of shape `(num_clients, num_values)`, to one value for each column.
Statistic = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class FactorPair:
    """
    Names of the two exchanged factors of a LoRA module.

    Args:
        a (`str`): Name of `A`, of shape `(r, in)`.
        b (`str`): Name of `B`, of shape `(out, r)`.
    """

    a: str
    b: str

    def matrices(self, state: Tensors) -> Factors:
        """Return `B` of shape `(out, r)` and `A` of shape `(r, in)` in float64, on the CPU."""
        return self.as_matrices(state[self.b], state[self.a])

    def read(self, updates: UpdateCollection, client_id: str) -> Factors:
        """Return the factors of a client, as [`~FactorPair.matrices`] does."""
        return self.as_matrices(updates.read(client_id, self.b), updates.read(client_id, self.a))

    def as_matrices(self, b: torch.Tensor, a: torch.Tensor) -> Factors:
        """Return the factors as matrices in float64, on the CPU. The factors of a convolution have more axes."""
        a, b = a.detach().cpu().double(), b.detach().cpu().double()
        return b.reshape(b.shape[0], -1), a.reshape(a.shape[0], -1)

    def resized(self, state: Tensors, rank: int) -> State:
        """
        Return the factors with the first rows of `A` and columns of `B`, or with further ones that are zero.

        Args:
            state (`Mapping[str, torch.Tensor]`): The factors.
            rank (`int`): Number of rows and columns.
        """
        a, b = state[self.a][:rank], state[self.b][:, :rank]
        missing = rank - a.shape[0]
        rows, columns = a.new_zeros(missing, *a.shape[1:]), b.new_zeros(b.shape[0], missing, *b.shape[2:])
        return {self.a: torch.cat([a, rows]), self.b: torch.cat([b, columns], 1)}

    def write(self, reference: Tensors, b: torch.Tensor, a: torch.Tensor) -> State:
        """
        Return two matrices as factors by name. Missing rows of `A` and columns of `B` are zero.

        Args:
            reference (`Mapping[str, torch.Tensor]`): A state with the shapes, dtypes and devices of the factors.
            b (`torch.Tensor` of shape `(out, k)`): `B`, with at most `r` columns.
            a (`torch.Tensor` of shape `(k, in)`): `A`.
        """
        missing = reference[self.a].shape[0] - a.shape[0]
        b, a = torch.nn.functional.pad(b, (0, missing)), torch.nn.functional.pad(a, (0, 0, 0, missing))
        values = {self.a: a, self.b: b}
        return {name: value.reshape(reference[name].shape).to(reference[name]) for name, value in values.items()}


def find_pairs(names: Iterable[str]) -> list[FactorPair]:
    """
    Find the LoRA modules whose factors are both exchanged.

    If only one factor is exchanged, for example because `A` is frozen, the change of the module is linear in it, and
    the factor is an ordinary tensor.

    Args:
        names (`Iterable[str]`): Names of the exchanged tensors.

    Example:

    ```python
    >>> from hf_federated.aggregation.lora_factors import find_pairs

    >>> find_pairs(["query.lora_A.default.weight", "query.lora_B.default.weight", "classifier.weight"])
    [FactorPair(a='query.lora_A.default.weight', b='query.lora_B.default.weight')]
    ```
    """
    known = set(names)
    pairs = []
    for name in sorted(known):
        parts = name.split(".")
        for first, second in FACTORS.items():
            other = ".".join(second if part == first else part for part in parts)
            if first in parts and other in known:
                pairs.append(FactorPair(a=name, b=other))
    return pairs


def split_names(state: Tensors) -> tuple[list[str], list[FactorPair]]:
    """Return the names of the floating tensors that are no LoRA factors, and the pairs of LoRA factors."""
    floating = [name for name, value in state.items() if value.is_floating_point()]
    pairs = find_pairs(floating)
    factors = {name for pair in pairs for name in (pair.a, pair.b)}
    return [name for name in floating if name not in factors], pairs


def find_other_factors(names: Iterable[str]) -> str | None:
    """Return the name of a tensor of an adapter with more than two factors, such as AdaLoRA, or `None`."""
    return next((name for name in names if not set(OTHER_FACTORS).isdisjoint(name.split("."))), None)


# ---- Inner products


def add_gram(gram: torch.Tensor, updates: UpdateCollection, pair: FactorPair) -> None:
    """
    Add the inner products of the changes of a module to a Gram matrix.

    Args:
        gram (`torch.Tensor` of shape `(num_clients, num_clients)`, float64): Changed in place.
        updates ([`UpdateCollection`]): The updates.
        pair ([`FactorPair`]): The module.
    """
    before, clients = pair.matrices(updates.reference), updates.client_ids
    rank, size = before[1].shape[0], before[0].shape[0] + before[1].shape[1]
    # Two groups of factors and two matrices of inner products of the factors are in memory.
    group = min(updates.block_bytes // (4 * 16 * rank * size), math.isqrt(updates.block_bytes // (64 * rank**2)))
    group = max(1, min(len(clients), group))
    for first in range(0, len(clients), group):
        lefts, rights = _stack(updates, pair, before, clients[first : first + group])
        for second in range(0, first + 1, group):
            others = clients[second : second + group]
            left, right = (lefts, rights) if second == first else _stack(updates, pair, before, others)
            inner = (lefts @ left.T) * (rights @ right.T)
            inner = inner.view(-1, 2 * rank, len(others), 2 * rank).sum((1, 3))
            gram[first : first + group, second : second + group] += inner
            if second != first:
                gram[second : second + group, first : first + group] += inner.T


def add_products(products: torch.Tensor, updates: UpdateCollection, pair: FactorPair, state: Tensors | None) -> None:
    """
    Add the inner products of the changes of a module with one other change.

    Args:
        products (`torch.Tensor` of shape `(num_clients,)`, float64): Changed in place.
        updates ([`UpdateCollection`]): The updates.
        pair ([`FactorPair`]): The module.
        state (`Mapping[str, torch.Tensor]`, *optional*): The other state. Defaults to the client's own state.
    """
    before = pair.matrices(updates.reference)
    other = None if state is None else change_factors(before, pair.matrices(state))
    for row, client_id in enumerate(updates.client_ids):
        left, right = change_factors(before, pair.read(updates, client_id))
        other_left, other_right = other or (left, right)
        products[row] += ((left @ other_left.T) * (right @ other_right.T)).sum()


def _stack(updates: UpdateCollection, pair: FactorPair, before: Factors, client_ids: Sequence[str]) -> Factors:
    """
    Return the [`change_factors`] of some clients.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Left factors of shape `(num_clients · 2r, out)` and right factors of shape
            `(num_clients · 2r, in)`.
    """
    factors = [change_factors(before, pair.read(updates, client_id)) for client_id in client_ids]
    return torch.cat([left for left, _ in factors]), torch.cat([right for _, right in factors])


def change_factors(before: Factors, after: Factors) -> Factors:
    """
    Write the change of a product as a product, `B' A' − B A = (B' − B) A' + B (A' − A) = Lᵀ R`.

    Args:
        before, after (`tuple[torch.Tensor, torch.Tensor]`): `B` of shape `(out, r)` and `A` of shape `(r, in)`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `L` of shape `(2r, out)` and `R` of shape `(2r, in)`.
    """
    return torch.cat([(after[0] - before[0]).T, before[0].T]), torch.cat([after[1], after[1] - before[1]])


# ---- New factors


def combined_factors(updates: UpdateCollection, pair: FactorPair, coefficients: Mapping[str, float]) -> State:
    """
    Return the factors of `P + Σ_i c_i (P_i − P)`, truncated to rank `r`.

    Args:
        updates ([`UpdateCollection`]): The updates.
        pair ([`FactorPair`]): The module.
        coefficients (`Mapping[str, float]`): The coefficients `c_i` that are not 0, by client id.
    """
    b, a = pair.matrices(updates.reference)
    rest = 1.0 - sum(coefficients.values())
    terms = [(b, a, rest)] if rest else []
    num_terms = len(terms) + len(coefficients)

    def factors() -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        yield from terms
        for client_id, coefficient in coefficients.items():
            yield *pair.read(updates, client_id), coefficient

    rank, num_out, num_in = a.shape[0], b.shape[0], a.shape[1]
    if num_terms * rank < min(num_out, num_in):
        lefts, rights = zip(*((coefficient * left, right) for left, right, coefficient in factors()), strict=True)
        u, s, v = factored_svd(torch.cat(lefts, 1), torch.cat(rights), rank)
    else:
        product = torch.zeros(num_out, num_in, dtype=torch.float64)
        for left, right, coefficient in factors():
            product.addmm_(left, right, alpha=coefficient)
        u, s, v = _truncated_svd(product, rank)
    return _to_pair(updates, pair, u, s, v)


def coordinate_wise_factors(updates: UpdateCollection, pair: FactorPair, statistic: Statistic) -> State:
    """
    Return the factors of a coordinate-wise statistic of the products, truncated to rank `r`.

    Args:
        updates ([`UpdateCollection`]): The updates.
        pair ([`FactorPair`]): The module.
        statistic (`Callable`): Maps values of shape `(num_clients, block)` to values of shape `(block,)`.
    """
    b, a = pair.matrices(updates.reference)
    product = torch.empty(b.shape[0], a.shape[1], dtype=torch.float64)
    num_values = max(1, updates.block_bytes // (2 * 8 * len(updates)))
    columns = min(a.shape[1], num_values)
    rows = max(1, num_values // columns)
    for left in range(0, a.shape[1], columns):
        for top in range(0, b.shape[0], rows):
            part = product[top : top + rows, left : left + columns]
            block = torch.empty(len(updates), *part.shape, dtype=torch.float64)
            for matrix, client_id in zip(block, updates.client_ids, strict=True):
                b_i, a_i = pair.read(updates, client_id)
                torch.mm(b_i[top : top + rows], a_i[:, left : left + columns], out=matrix)
            part.copy_(statistic(block.view(len(updates), -1)).view(part.shape))
    return _to_pair(updates, pair, *_truncated_svd(product, a.shape[0]))


def factored_svd(
    left: torch.Tensor, right: torch.Tensor, rank: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Return the singular vectors and values of a product from its factors, without the product.

    With the QR decompositions `L = Q_L R_L` and `Rᵀ = Q_R R_R`, they are those of the small matrix `R_L R_Rᵀ`,
    multiplied by `Q_L` and `Q_R`.

    Args:
        left (`torch.Tensor` of shape `(out, k)`): The left factor.
        right (`torch.Tensor` of shape `(k, in)`): The right factor.
        rank (`int`, *optional*): Number of leading vectors. By default all of them.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, torch.Tensor]`: `U`, the singular values in descending order, and `V`.
    """
    left_basis, left_rest = torch.linalg.qr(left)
    right_basis, right_rest = torch.linalg.qr(right.T)
    u, s, v = _truncated_svd(left_rest @ right_rest.T, left.shape[1] if rank is None else rank)
    return left_basis @ u, s, right_basis @ v


def _truncated_svd(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Return the leading singular vectors and values of a matrix, in float64.

    Above [`EXACT_SIZE`], they come from subspace iterations (Halko et al., 2011) with oversampling.
    """
    if min(matrix.shape) <= EXACT_SIZE:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        v = vh.T
    else:
        with isolated_rng(0):
            u, s, v = torch.svd_lowrank(matrix, q=min(2 * rank + 8, *matrix.shape), niter=8)
    return u[:, :rank], s[:rank], v[:, :rank]


def _to_pair(updates: UpdateCollection, pair: FactorPair, u: torch.Tensor, s: torch.Tensor, v: torch.Tensor) -> State:
    """Return `B` and `A` with the product `U diag(s) Vᵀ`, close to the global factors."""
    return pair_with_product(pair, updates.reference, u, s, v, keeps_dtype=False)


def pair_with_product(
    pair: FactorPair,
    reference: Tensors,
    u: torch.Tensor,
    s: torch.Tensor,
    v: torch.Tensor,
    keeps_dtype: bool = True,
) -> State:
    """
    Return `B` and `A` with the product `U diag(s) Vᵀ`.

    `A = α Q Vᵀ` has orthogonal rows with the mean norm `α` of the rows of the reference, and the rotation `Q` brings
    `A` as close as possible to the reference (orthogonal Procrustes problem). Directions with the singular value 0
    therefore stay trainable.

    Args:
        pair ([`FactorPair`]): The module.
        reference (`Mapping[str, torch.Tensor]`): The former factors, with the shapes of the new factors.
        u (`torch.Tensor` of shape `(out, k)`): `U`, with `k` of at most the rank.
        s (`torch.Tensor` of shape `(k,)`): The singular values.
        v (`torch.Tensor` of shape `(in, k)`): `V`.
        keeps_dtype (`bool`, *optional*, defaults to `True`): Whether the result has the dtype and the device of the
            reference, or float64 on the CPU.
    """
    a = pair.matrices(reference)[1]
    rank = a.shape[0]
    missing = rank - len(s)
    if missing:  # The module is smaller than the rank.
        u, v = (torch.nn.functional.pad(basis, (0, missing)) for basis in (u, v))
        s = torch.nn.functional.pad(s, (0, missing))
    scale = a.norm() / rank**0.5
    scale = torch.where(scale > 0, scale, 1.0)
    x, _, yh = torch.linalg.svd(a @ v)
    rotation = x @ yh
    new_b, new_a = (u * s) @ rotation.T / scale, scale * rotation @ v.T
    if keeps_dtype:
        return pair.write(reference, new_b, new_a)
    return {name: value.reshape(reference[name].shape) for name, value in ((pair.a, new_a), (pair.b, new_b))}
