"""What a student minimises against a teacher's predictions.

Every loss is `(student_logits, teacher, ...) -> scalar`: the classes lie along the last dimension, and the mean is
taken over all positions before it. `LOSSES` names them for messages and configurations, and says of each whether the
teacher comes as logits or as probabilities.

No loss detaches the teacher. Gradients flow to the student alone only if the caller passes a teacher that carries no
graph (`teacher.detach()`, or predictions that were received). Narrow dtypes are widened to float32 first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional as F


def _matched(student_logits: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in one dtype, at least float32."""
    if student_logits.shape != teacher.shape or student_logits.ndim == 0:
        raise ValueError(
            f"The student's predictions have shape {tuple(student_logits.shape)} and the teacher's "
            f"{tuple(teacher.shape)}; expected one shape, with the classes along the last dimension."
        )
    dtype = torch.promote_types(torch.promote_types(student_logits.dtype, teacher.dtype), torch.float32)
    return student_logits.to(dtype), teacher.to(dtype)


def _check_temperature(temperature: float) -> None:
    if not 0 < temperature < float("inf"):
        raise ValueError(f"`temperature` is {temperature}; it must be positive and finite.")


def kl_divergence(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """
    `T² KL(softmax(z_t / T) ‖ softmax(z_s / T))`, mean over the rows (Hinton et al., Distilling the Knowledge in a
    Neural Network, 2015, section 2: the factor keeps the gradient's size when `T` changes).

    For `T → ∞` it becomes half of [`mean_squared_error`] with `center=True`. In float32 its value (not its gradient)
    loses digits where `T` is large against the logits.

    Args:
        student_logits (`torch.Tensor` of shape `(N, C)`): `z_s`.
        teacher_logits (`torch.Tensor` of shape `(N, C)`): `z_t`. A class at `-inf` has probability 0 and adds nothing.
        temperature (`float`, *optional*, defaults to `1.0`): `T`, positive.

    Returns:
        `torch.Tensor`: A scalar.

    Raises:
        ValueError: If the temperature is not positive or the shapes differ.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.distillation.losses import kl_divergence

    >>> kl_divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 0.0]]), temperature=2.0)
    tensor(0.4438)
    ```
    """
    _check_temperature(temperature)
    student, teacher = _matched(student_logits, teacher_logits)
    return kl_divergence_from_probabilities(student, (teacher / temperature).softmax(dim=-1), temperature)


def kl_divergence_from_probabilities(
    student_logits: torch.Tensor, teacher_probabilities: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """
    `T² KL(p ‖ softmax(z_s / T))`, mean over the rows.

    It equals [`kl_divergence`] if `p = softmax(z_t / T)`: the temperature has already been applied to the teacher.

    Args:
        student_logits (`torch.Tensor` of shape `(N, C)`): `z_s`.
        teacher_probabilities (`torch.Tensor` of shape `(N, C)`): `p`; each row sums to 1.
        temperature (`float`, *optional*, defaults to `1.0`): `T`, positive.

    Returns:
        `torch.Tensor`: A scalar.

    Raises:
        ValueError: If the temperature is not positive or the shapes differ.
    """
    _check_temperature(temperature)
    student, teacher = _matched(student_logits, teacher_probabilities)
    terms = F.kl_div((student / temperature).log_softmax(dim=-1), teacher, reduction="none")
    return temperature**2 * terms.sum(dim=-1).mean()


def soft_cross_entropy(student_logits: torch.Tensor, teacher_probabilities: torch.Tensor) -> torch.Tensor:
    """
    `−Σ_c p_c log softmax(z_s)_c`, mean over the rows: the KL divergence plus the teacher's own entropy, with the same
    gradient for the student.

    Args:
        student_logits (`torch.Tensor` of shape `(N, C)`): `z_s`.
        teacher_probabilities (`torch.Tensor` of shape `(N, C)`): `p`; each row sums to 1.

    Returns:
        `torch.Tensor`: A scalar.

    Raises:
        ValueError: If the shapes differ.
    """
    student, teacher = _matched(student_logits, teacher_probabilities)
    return -(teacher * student.log_softmax(dim=-1)).sum(dim=-1).mean()


def mean_squared_error(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, center: bool = False
) -> torch.Tensor:
    """
    `(z_s − z_t)²`, mean over rows and classes (AdaFD's server).

    Args:
        student_logits (`torch.Tensor` of shape `(N, C)`): `z_s`.
        teacher_logits (`torch.Tensor` of shape `(N, C)`): `z_t`, finite.
        center (`bool`, *optional*, defaults to `False`):
            Subtract each row's mean from both first, since a constant added to a row changes no probability. Half of
            the result is then the limit of [`kl_divergence`] for `T → ∞` (Hinton et al., 2015, section 2.1).

    Returns:
        `torch.Tensor`: A scalar.

    Raises:
        ValueError: If the shapes differ.
    """
    student, teacher = _matched(student_logits, teacher_logits)
    difference = student - teacher
    if center:
        difference = difference - difference.mean(dim=-1, keepdim=True)
    return difference.square().mean()


def mean_absolute_error(student_logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    """
    `|z_s − z_t|`, mean over rows and classes: how FedMD's clients digest the consensus (Li and Wang, FedMD, 2019).

    Args:
        student_logits (`torch.Tensor` of shape `(N, C)`): `z_s`.
        teacher_logits (`torch.Tensor` of shape `(N, C)`): `z_t`, finite.

    Returns:
        `torch.Tensor`: A scalar.

    Raises:
        ValueError: If the shapes differ.
    """
    student, teacher = _matched(student_logits, teacher_logits)
    return (student - teacher).abs().mean()


@dataclass(frozen=True)
class DistillationLoss:
    """
    A loss, and what it wants of the teacher.

    Args:
        function (`Callable`): `(student_logits, teacher, **options) -> scalar`.
        target (`str`): `"logits"` or `"probabilities"`: how the teacher's predictions must come.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.distillation.losses import LOSSES

    >>> loss, logits = LOSSES["soft_cross_entropy"], torch.zeros(1, 4)
    >>> loss.target
    'probabilities'
    >>> loss.function(logits, logits.softmax(dim=-1))
    tensor(1.3863)
    ```
    """

    function: Callable[..., torch.Tensor]
    target: Literal["logits", "probabilities"]


LOSSES: dict[str, DistillationLoss] = {
    "kl_divergence": DistillationLoss(kl_divergence, "logits"),
    "kl_divergence_from_probabilities": DistillationLoss(kl_divergence_from_probabilities, "probabilities"),
    "mean_absolute_error": DistillationLoss(mean_absolute_error, "logits"),
    "mean_squared_error": DistillationLoss(mean_squared_error, "logits"),
    "soft_cross_entropy": DistillationLoss(soft_cross_entropy, "probabilities"),
}
