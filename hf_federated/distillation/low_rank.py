"""Updates sent as singular vectors: matrices of low rank in few numbers, for MutualKD.

Wu et al., Communication-Efficient Federated Learning via Knowledge Distillation (FedKD, Nature Communications 2022): a
matrix of an update is sent as `U diag(s) V`, with as many singular values as hold a share `T` of the sum of their
squares, and `T` grows over the run. What is dropped is not kept for a later round.

The authors' code takes the smallest rank with a share above `T` on clients and of at least `T` on the server; here it
is at least `T` in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


# What a key ends in: a tensor as it is, or one of its three factors.
DENSE, FACTORS = "dense", ("u", "s", "v")


def compress(update: Mapping[str, torch.Tensor], energy: float) -> dict[str, torch.Tensor]:
    """
    An update in fewer numbers.

    A floating matrix `(m, n)` becomes `U (m, r)`, `s (r,)` and `V (r, n)` with the smallest rank `r` such that
    `Σ_{i ≤ r} σ_i² ≥ energy · Σ_i σ_i²`, if these take fewer bytes than the matrix: in float32, if
    `r · (m + n + 1) < m · n`. Otherwise it stays as it is, and so does every tensor that is no floating matrix.
    Singular values that cannot be told from rounding (`σ_i ≤ max(m, n) · eps · σ_1`) count as 0, so `energy=1` sends a
    matrix of full rank as it is, and one of lower rank exactly but for rounding; a matrix of zeros is sent as nothing.

    Args:
        update (`Mapping[str, torch.Tensor]`): What changed, by parameter name; any shapes and dtypes.
        energy (`float`): `T`, above 0 and at most 1.

    Returns:
        `dict[str, torch.Tensor]`: Of each name either `"<name>/dense"`, or `"<name>/u"`, `"<name>/s"` and
        `"<name>/v"`. `u` and `v` have the matrix's dtype, `s` has float32 or wider.

    Raises:
        ValueError: If `energy` is out of range, or a tensor holds NaN or infinite values; the message names it.

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
    if not 0 < energy <= 1:
        raise ValueError(f"`energy` is {energy}; it must be above 0 and at most 1.")
    sent: dict[str, torch.Tensor] = {}
    for name, value in update.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise ValueError(
                f"{name!r} holds NaN or infinite values and cannot be compressed. Lower this client's learning rate, "
                "clip its gradients (`max_grad_norm`), or look at its data."
            )
        is_matrix = value.is_floating_point() and value.ndim == 2 and value.numel() > 0
        factors = _factors(value, energy) if is_matrix else ()
        if factors and sum(factor.nbytes for factor in factors) < value.nbytes:
            sent.update({f"{name}/{kind}": factor for kind, factor in zip(FACTORS, factors, strict=True)})
        else:
            sent[f"{name}/{DENSE}"] = value
    return sent


def decompress(
    sent: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """
    The update that [`compress`] made smaller, less what it dropped.

    Args:
        sent (`Mapping[str, torch.Tensor]`): What `compress` returned, in any order.
        reference (`Mapping[str, torch.Tensor]`, *optional*): Tensors of the names and shapes that may come, such as
            the global state. To be given where someone else compressed: a product of small factors can fill the
            memory.

    Returns:
        `dict[str, torch.Tensor]`: By parameter name, of the dtypes and shapes of the update.

    Raises:
        ValueError: If a key is none of `compress`, a tensor comes twice or lacks a factor, factors do not fit each
            other, or a tensor is not in the reference or has another shape there.
    """
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in sent.items():
        name, slash, kind = key.rpartition("/")
        if not slash or kind not in (DENSE, *FACTORS):
            raise ValueError(f"{key!r} is no key of a compressed update; those end in /dense, /u, /s or /v.")
        parts.setdefault(name, {})[kind] = value
    for name, kinds in parts.items():
        _check(name, kinds, reference)
    return {name: _product(kinds) for name, kinds in parts.items()}


def energy_schedule(round: int, num_rounds: int, start: float = 0.95, end: float = 0.98) -> float:
    """
    `T(t) = T_start + (T_end − T_start) · t`, with `t` the share of the run that is done when a round's updates are
    sent: `(round + 1) / num_rounds`, as in the authors' code. The last round is sent with `end`.

    Args:
        round (`int`): Round number, from 0.
        num_rounds (`int`): Rounds of the run.
        start (`float`, *optional*, defaults to `0.95`): `T_start`.
        end (`float`, *optional*, defaults to `0.98`): `T_end`.

    Raises:
        ValueError: If the round is none of the run, or an end of the schedule is not above 0 and at most 1.
    """
    if not 0 <= round < num_rounds:
        raise ValueError(f"Round {round} is none of a run of {num_rounds} rounds, which are counted from 0.")
    if not (0 < start <= 1 and 0 < end <= 1):
        raise ValueError(f"`start` is {start} and `end` is {end}; both must be above 0 and at most 1.")
    done = (round + 1) / num_rounds
    return (1 - done) * start + done * end


def _factors(matrix: torch.Tensor, energy: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`U`, `s` and `V` of the smallest rank that keeps the energy; the matrix is not empty."""
    wide = matrix.detach().to(torch.promote_types(matrix.dtype, torch.float32))
    u, s, v = torch.linalg.svd(wide, full_matrices=False)
    signal = s[s > max(matrix.shape) * torch.finfo(wide.dtype).eps * s[0]]
    # Relative to the largest, since squares of small numbers vanish and those of large ones overflow.
    kept = (signal.double() / s[0]).square().cumsum(0)
    rank = int((kept < energy * kept[-1]).sum()) + 1 if len(kept) else 0
    # A slice would keep the whole of U and V in memory.
    return u[:, :rank].to(matrix.dtype).clone(), s[:rank].clone(), v[:rank].to(matrix.dtype).clone()


def _check(name: str, kinds: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor] | None) -> None:
    """Refuse what `_product` cannot put together, or what must not be, before it takes any memory."""
    if set(kinds) == {DENSE}:
        shape = tuple(kinds[DENSE].shape)
    elif set(kinds) == set(FACTORS):
        u, s, v = (kinds[kind] for kind in FACTORS)
        if (u.ndim, s.ndim, v.ndim) != (2, 1, 2) or not u.shape[1] == len(s) == len(v) or u.dtype != v.dtype:
            raise ValueError(
                f"The factors of {name!r} do not fit: u is {u.dtype} of shape {tuple(u.shape)}, s of shape "
                f"{tuple(s.shape)}, v {v.dtype} of shape {tuple(v.shape)}; expected (m, r), (r,) and (r, n) of one "
                "dtype."
            )
        shape = (u.shape[0], v.shape[1])
    else:
        raise ValueError(f"Of {name!r} there are {sorted(kinds)}; expected either 'dense' or all of 's', 'u', 'v'.")
    if reference is not None and (name not in reference or tuple(reference[name].shape) != shape):
        expected = f"expected {tuple(reference[name].shape)}" if name in reference else "which was not asked for"
        raise ValueError(f"{name!r} has shape {shape}, {expected}.")


def _product(kinds: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if DENSE in kinds:
        return kinds[DENSE]
    u, s, v = (kinds[kind] for kind in FACTORS)
    return ((u.to(s.dtype) * s) @ v.to(s.dtype)).to(u.dtype)
