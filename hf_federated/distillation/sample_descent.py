"""Gradient descent on pseudo-samples, with a step size for each sample.

`pseudo_samples.py` has the losses. The length of a descent is `num_steps` steps of `step_size`. With the schedule
`"constant"`, the descent makes these steps. With `"growing"`, one long step replaces several of them while the
gradient changes little:

| step of a sample | next step |
|---|---|
| its error is at most 0.25 | twice as long |
| its error is more than 0.5 | `step_size` |
| the loss rises or is not finite | the sample goes back, and the next step is `step_size` |

A step of length `β` that changes the loss by `Δ` has the error `|Δ + β ‖∇L‖²| / (β ‖∇L‖²)`. The error is 0 if the
gradient is constant along the step. A long step enlarges the part of the gradient that changes fast, and the next
short step removes this part. Long and short steps in turn therefore descend faster than steps of one size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


STEP_SIZE_SCHEDULES = ("growing", "constant")
SMALL_ERROR, LARGE_ERROR = 0.25, 0.5

# `losses(embeddings, rows)` returns the loss of each sample, of shape `(len(rows),)`. `rows` are the indices of these
# samples in the batch.
SampleLosses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def descend(
    embeddings: torch.Tensor,
    losses: SampleLosses,
    num_steps: int,
    step_size: float,
    num_pinned: int = 0,
    tolerance: float = 0.0,
    schedule: str = "constant",
) -> torch.Tensor:
    """
    Move pseudo-samples by gradient descent, `θ ← θ − β ∇θ L`. Parameters of models receive no gradients.

    Each sample has its own steps. A sample that has finished its descent is not passed to `losses` again.

    Args:
        embeddings (`torch.Tensor`): `θ`, of shape `(samples, positions, hidden)`. This tensor is not changed.
        losses (`Callable`): `L(θ)` of each sample. It receives the embeddings of the samples that still move, and
            their indices, of shape `(moving samples,)`.
        num_steps (`int`): Length of the descent, as a number of steps of `step_size`.
        step_size (`float`): `β`, the size of the shortest step.
        num_pinned (`int`, *optional*, defaults to `0`): Number of positions at the beginning that are not moved.
        tolerance (`float`, *optional*, defaults to `0.0`): A fraction of the decrease of a sample's loss since the
            start. A sample stops when its gradient is not longer than before the last step, and the rest of the
            descent would add at most this fraction at the present gradient:
            `(remaining length) ‖∇θ L‖² ≤ tolerance · (L(start) − L(θ))`. With 0, a sample stops early only if its
            gradient is 0.
        schedule (`str`, *optional*, defaults to `"constant"`): `"growing"` or `"constant"`, as described in this
            module.

    Returns:
        `torch.Tensor`: The moved samples, of the same shape. Values that are not finite stay in the result.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.distillation.sample_descent import descend

    >>> descend(torch.ones(2, 1, 1), lambda theta, rows: theta.sum((1, 2)), num_steps=4, step_size=0.25).flatten()
    tensor([0., 0.])
    ```
    """
    moved = embeddings.detach().clone()
    slope, rows = torch.zeros_like(moved), torch.arange(len(moved), device=moved.device)
    start_value, value, squares = (torch.zeros(len(moved), dtype=torch.float64, device=moved.device) for _ in range(3))
    # Lengths are whole numbers of steps of `step_size`, so they have no rounding errors. The first step has length 0.
    step, left = torch.zeros_like(rows), torch.full_like(rows, num_steps)

    def after_step(rows: torch.Tensor) -> torch.Tensor:
        return moved[rows] - (step[rows].to(moved.dtype) * step_size).view(-1, 1, 1) * slope[rows]

    while len(rows):
        theta, tried, before = after_step(rows), step[rows], squares[rows]
        values, gradients = _differentiate(losses, theta, rows, num_pinned, bool((left[rows] > tried).any()))
        # The shortest step is never taken back.
        accepted = (tried <= 1) | (values <= value[rows])
        expected = tried * step_size * before
        error = (value[rows] - values - expected).abs() / expected
        following = torch.where(error <= SMALL_ERROR, 2 * tried, torch.where(error > LARGE_ERROR, 1, tried))
        following = torch.where(accepted, following, 1).clamp(min=1, max=None if schedule == "growing" else 1)
        start_value[rows] = torch.where(tried == 0, values, start_value[rows])
        at = rows[accepted]
        moved[at], slope[at], value[at] = theta[accepted], gradients[accepted], values[accepted]
        left[at] -= tried[accepted]
        squares[at] = torch.linalg.vector_norm(slope[at], dim=(1, 2), dtype=torch.float64).square()
        # A sample whose gradient is not finite takes the rest of its descent in one step, which ends it.
        is_finite = squares[rows].isfinite()
        step[rows] = torch.where(is_finite, torch.minimum(following, left[rows]), left[rows])
        rest, decrease = left[rows] * step_size * squares[rows], start_value[rows] - value[rows]
        is_slower = (tried > 0) & (squares[rows] <= before)
        is_moving = ~((rest == 0) | is_slower & (rest <= tolerance * decrease))
        # No gradient is needed after a last step, and the shortest step is taken at any loss.
        is_last = is_moving & (step[rows] == left[rows]) & ((step[rows] == 1) | ~is_finite)
        moved[rows[is_last]] = after_step(rows[is_last])
        rows = rows[is_moving & ~is_last]
    return moved


def _differentiate(
    losses: SampleLosses, theta: torch.Tensor, rows: torch.Tensor, num_pinned: int, needs_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each sample in float64, and its gradient, which is 0 for pinned positions and if not needed."""
    with torch.set_grad_enabled(needs_gradient):
        theta = theta.detach().requires_grad_(needs_gradient)
        values = losses(theta, rows)
    gradients = torch.autograd.grad(values.sum(), theta)[0] if needs_gradient else torch.zeros_like(theta)
    gradients[:, :num_pinned] = 0
    return values.detach().double(), gradients
