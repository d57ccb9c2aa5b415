"""Losses of a student's predictions against a teacher's predictions.

Each loss has the form `(student_logits, teacher, ...) -> scalar`. The classes are the last dimension, and the loss is
the mean over all other dimensions. The name of the argument states whether the teacher's predictions are logits or
probabilities.

No loss detaches the teacher's predictions. To send gradients to the student only, pass predictions without a graph
(`teacher.detach()`, or received predictions). Narrow dtypes are converted to float32 first.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..utils.arguments import require


def _matched(student_logits: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert both tensors to one dtype, at least float32."""
    if student_logits.shape != teacher.shape or student_logits.ndim == 0:
        raise ValueError(
            f"The student's predictions have shape {tuple(student_logits.shape)} and the teacher's "
            f"{tuple(teacher.shape)}; expected the same shape, with the classes in the last dimension."
        )
    dtype = torch.promote_types(torch.promote_types(student_logits.dtype, teacher.dtype), torch.float32)
    return student_logits.to(dtype), teacher.to(dtype)


def kl_divergence(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """
    KL divergence with temperature, `T² KL(softmax(z_t / T) ‖ softmax(z_s / T))`, mean over the rows.

    The factor `T²` keeps the scale of the gradient when `T` changes (Hinton et al., Distilling the Knowledge in a
    Neural Network, 2015, section 2). For `T → ∞` the loss approaches half of [`mean_squared_error`] with
    `center=True`. If `T` is large compared to the logits, the value of the loss (not its gradient) loses precision in
    float32.

    Args:
        student_logits (`torch.Tensor` of shape `(N, C)`): `z_s`.
        teacher_logits (`torch.Tensor` of shape `(N, C)`): `z_t`. A class with `-inf` has probability 0 and adds
            nothing.
        temperature (`float`, *optional*, defaults to `1.0`): `T`, positive.

    Returns:
        `torch.Tensor`: A scalar.

    Raises:
        ValueError: If the temperature is not positive and finite, or the shapes differ.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.distillation.losses import kl_divergence

    >>> kl_divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 0.0]]), temperature=2.0)
    tensor(0.4438)
    ```
    """
    require("temperature", temperature, 0 < temperature < float("inf"), "positive and finite")
    student, teacher = _matched(student_logits, teacher_logits)
    terms = F.kl_div(
        (student / temperature).log_softmax(dim=-1), (teacher / temperature).softmax(dim=-1), reduction="none"
    )
    return temperature**2 * terms.sum(dim=-1).mean()


def soft_cross_entropy(student_logits: torch.Tensor, teacher_probabilities: torch.Tensor) -> torch.Tensor:
    """
    Cross-entropy with soft labels, `−Σ_c p_c log softmax(z_s)_c`, mean over the rows.

    This is the KL divergence plus the entropy of the teacher's distribution. Both have the same gradient for the
    student.

    Args:
        student_logits (`torch.Tensor` of shape `(N, C)`): `z_s`.
        teacher_probabilities (`torch.Tensor` of shape `(N, C)`): `p`. Each row sums to 1.

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
    Squared error of the logits, `(z_s − z_t)²`, mean over rows and classes (AdaFD's server loss).

    Args:
        student_logits (`torch.Tensor` of shape `(N, C)`): `z_s`.
        teacher_logits (`torch.Tensor` of shape `(N, C)`): `z_t`, finite.
        center (`bool`, *optional*, defaults to `False`):
            Whether to subtract each row's mean from both tensors first. A constant added to a row changes no
            probability. Half of the centered error is the limit of [`kl_divergence`] for `T → ∞` (Hinton et al., 2015,
            section 2.1).

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
    Absolute error of the logits, `|z_s − z_t|`, mean over rows and classes.

    FedMD's clients use it to learn the consensus (Li and Wang, FedMD, 2019).

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
