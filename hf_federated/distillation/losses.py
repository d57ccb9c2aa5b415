"""What a student minimises against a teacher's predictions.

Every loss is `(student_logits, teacher, ...) -> scalar`: the classes lie along the last dimension, and the mean is
taken over all positions before it. Whether the teacher comes as logits or as probabilities, the argument's name says.

No loss detaches the teacher. Gradients flow to the student alone only if the caller passes a teacher that carries no
graph (`teacher.detach()`, or predictions that were received). Narrow dtypes are widened to float32 first.
"""

from __future__ import annotations

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
    terms = F.kl_div(
        (student / temperature).log_softmax(dim=-1), (teacher / temperature).softmax(dim=-1), reduction="none"
    )
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
