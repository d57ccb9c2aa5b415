"""Low-rank compression of updates by singular value decomposition, for MutualKD.

Wu et al., Communication-Efficient Federated Learning via Knowledge Distillation (FedKD, Nature Communications 2022). A
matrix of an update is sent as `U diag(s) V`. It keeps the fewest singular values whose squares sum to at least a share
`T` of the total. `T` grows over the run. The dropped part is not kept for a later round.

The authors' code takes the smallest rank with a share above `T` on clients, and of at least `T` on the server. Here,
the share is at least `T` in both directions.
"""

from __future__ import annotations

import torch

from ..utils.arguments import require
from ..utils.weighted_mean import Tensors


# Last part of a key: an unchanged tensor, or one of its three factors.
DENSE, FACTORS = "dense", ("u", "s", "v")


def compress(update: Tensors, energy: float) -> dict[str, torch.Tensor]:
    """
    Compress an update.

    A floating point matrix `(m, n)` becomes `U (m, r)`, `s (r,)` and `V (r, n)` with the smallest rank `r` such that
    `Σ_{i ≤ r} σ_i² ≥ energy · Σ_i σ_i²`, if the three factors have fewer bytes than the matrix. In float32, this is
    the case if `r · (m + n + 1) < m · n`. Otherwise, the matrix is sent unchanged. All other tensors are sent
    unchanged too.

    Singular values within the rounding error (`σ_i ≤ max(m, n) · eps · σ_1`) count as 0. With `energy=1`, a matrix of
    full rank is therefore sent unchanged, and a matrix of lower rank is exact up to rounding. A matrix of zeros is
    sent as factors of rank 0.

    Args:
        update (`Mapping[str, torch.Tensor]`): Changed values by parameter name, of any shapes and dtypes.
        energy (`float`): `T`, above 0 and at most 1.

    Returns:
        `dict[str, torch.Tensor]`: For each name, either `"<name>/dense"`, or `"<name>/u"`, `"<name>/s"` and
        `"<name>/v"`. `u` and `v` have the dtype of the matrix. `s` is float32 or wider.

    Raises:
        ValueError: If `energy` is out of range, or a tensor holds NaN or infinite values. The message names the
            tensor.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.distillation import compress, decompress

    >>> update = {"weight": torch.outer(torch.arange(6.0), torch.ones(8)), "bias": torch.ones(8)}
    >>> sent = compress(update, energy=0.95)
    >>> {key: tuple(value.shape) for key, value in sent.items()}
    {'weight/u': (6, 1), 'weight/s': (1,), 'weight/v': (1, 8), 'bias/dense': (8,)}
    >>> torch.allclose(decompress(sent)["weight"], update["weight"], atol=1e-5)
    True
    ```
    """
    require("energy", energy, 0 < energy <= 1, "above 0 and at most 1")
    sent: dict[str, torch.Tensor] = {}
    for name, value in update.items():
        # Meta tensors have no values. They are sent unchanged, which is the largest size.
        if value.is_floating_point() and not value.is_meta and not value.isfinite().all():
            raise ValueError(
                f"{name!r} holds NaN or infinite values and cannot be compressed. Lower this client's learning rate, "
                "clip its gradients (`max_grad_norm`), or check its data."
            )
        is_matrix = value.is_floating_point() and value.ndim == 2 and value.numel() > 0 and not value.is_meta
        factors = _factors(value, energy) if is_matrix else ()
        if factors and sum(factor.nbytes for factor in factors) < value.nbytes:
            sent.update({f"{name}/{kind}": factor for kind, factor in zip(FACTORS, factors, strict=True)})
        else:
            sent[f"{name}/{DENSE}"] = value
    return sent


def decompress(sent: Tensors, reference: Tensors | None = None) -> dict[str, torch.Tensor]:
    """
    Restore an update from the return value of [`compress`], without the dropped part.

    Args:
        sent (`Mapping[str, torch.Tensor]`): Return value of `compress`, in any order.
        reference (`Mapping[str, torch.Tensor]`, *optional*): Tensors with the allowed names and shapes, such as the
            global state. Pass it if the tensors come from an untrusted sender: a product of small factors can fill the
            memory.

    Returns:
        `dict[str, torch.Tensor]`: Tensors by parameter name, with the dtypes and shapes of the update.

    Raises:
        ValueError: If a key has an unknown form, a tensor is given both dense and as factors, a factor is missing,
            factors do not fit each other, or a tensor is missing in the reference or has a different shape there.
    """
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in sent.items():
        name, slash, kind = key.rpartition("/")
        if not slash or kind not in (DENSE, *FACTORS):
            raise ValueError(f"{key!r} is no key of a compressed update. Such keys end in /dense, /u, /s or /v.")
        parts.setdefault(name, {})[kind] = value
    for name, kinds in parts.items():
        _check(name, kinds, reference)
    return {name: _product(kinds) for name, kinds in parts.items()}


def energy_schedule(round: int, num_rounds: int, start: float = 0.95, end: float = 0.98) -> float:
    """
    The share `T` of a round: `T(t) = T_start + (T_end − T_start) · t`.

    `t` is the share of the run that is done when the updates of a round are sent: `(round + 1) / num_rounds`, as in
    the authors' code. The last round uses `end`.

    Args:
        round (`int`): Round number, from 0.
        num_rounds (`int`): Number of rounds of the run.
        start (`float`, *optional*, defaults to `0.95`): `T_start`.
        end (`float`, *optional*, defaults to `0.98`): `T_end`.

    Raises:
        ValueError: If the round is not between 0 and `num_rounds - 1`, or `start` or `end` is not above 0 and at most
            1.
    """
    if not 0 <= round < num_rounds:
        raise ValueError(
            f"Round {round} is out of range: a run of {num_rounds} rounds has the rounds 0 to {num_rounds - 1}."
        )
    for name, energy in (("start", start), ("end", end)):
        require(name, energy, 0 < energy <= 1, "above 0 and at most 1")
    done = (round + 1) / num_rounds
    return (1 - done) * start + done * end


def _factors(matrix: torch.Tensor, energy: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`U`, `s` and `V` of the smallest rank that keeps the energy. The matrix must not be empty."""
    wide = matrix.detach().to(torch.promote_types(matrix.dtype, torch.float32))
    u, s, v = torch.linalg.svd(wide, full_matrices=False)
    signal = s[s > max(matrix.shape) * torch.finfo(wide.dtype).eps * s[0]]
    # Divided by the largest value, because squares of small numbers underflow and squares of large numbers overflow.
    kept = (signal.double() / s[0]).square().cumsum(0)
    rank = int((kept < energy * kept[-1]).sum()) + 1 if len(kept) else 0
    # A slice without `clone` would keep all of U and V in memory.
    return u[:, :rank].to(matrix.dtype).clone(), s[:rank].clone(), v[:rank].to(matrix.dtype).clone()


def _check(name: str, kinds: Tensors, reference: Tensors | None) -> None:
    """Check the factors of a tensor and its shape before `_product` allocates memory."""
    if set(kinds) == {DENSE}:
        shape = tuple(kinds[DENSE].shape)
    elif set(kinds) == set(FACTORS):
        u, s, v = (kinds[kind] for kind in FACTORS)
        if (u.ndim, s.ndim, v.ndim) != (2, 1, 2) or not u.shape[1] == len(s) == len(v) or u.dtype != v.dtype:
            raise ValueError(
                f"The factors of {name!r} do not fit: u is {u.dtype} of shape {tuple(u.shape)}, s of shape "
                f"{tuple(s.shape)}, v {v.dtype} of shape {tuple(v.shape)}; expected (m, r), (r,) and (r, n), with u "
                "and v of the same dtype."
            )
        shape = (u.shape[0], v.shape[1])
    else:
        raise ValueError(f"{name!r} has the parts {sorted(kinds)}; expected either 'dense' or all of 's', 'u', 'v'.")
    if reference is not None and name not in reference:
        raise ValueError(f"{name!r} has shape {shape}, but no tensor of this name is expected.")
    if reference is not None and tuple(reference[name].shape) != shape:
        raise ValueError(f"{name!r} has shape {shape}, expected {tuple(reference[name].shape)}.")


def _product(kinds: Tensors) -> torch.Tensor:
    if DENSE in kinds:
        return kinds[DENSE]
    u, s, v = (kinds[kind] for kind in FACTORS)
    return ((u.to(s.dtype) * s) @ v.to(s.dtype)).to(u.dtype)
