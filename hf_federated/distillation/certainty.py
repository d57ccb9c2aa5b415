"""Certainty scores of FedAUX: the similarity of a public example to a client's examples.

Sattler et al., FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning (IEEE TNNLS 2021), section on
differentially private certainty scoring. A client fits a logistic regression that separates its examples from the
public examples. All clients compute features with the same function. The score of a public example is the probability
that the regression assigns to it.
"""

from __future__ import annotations

import math

import torch


def scale_into_unit_ball(own: torch.Tensor, public: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Divide features by the largest norm of a public example, and clip the client's features to norm 1.

    The paper divides by the largest norm of all examples. This number would change with a single private example and
    rescale all other features. The paper's bound on the sensitivity does not account for this change. The largest norm
    of the public examples reveals nothing about private examples.

    Args:
        own (`torch.Tensor`): Features of the client's examples, of shape `(own examples, features)`.
        public (`torch.Tensor`): Features of the public examples, of shape `(public examples, features)`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Both scaled tensors, float64, with norms of at most 1.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.distillation.certainty import scale_into_unit_ball

    >>> own, public = scale_into_unit_ball(torch.tensor([[1.0, 0.0], [0.0, 9.0]]), torch.tensor([[4.0, 0.0]]))
    >>> own.tolist(), public.tolist()
    ([[0.25, 0.0], [0.0, 1.0]], [[1.0, 0.0]])
    ```
    """
    own, public = own.to(torch.float64), public.to(torch.float64)
    largest = public.norm(dim=1).max().clamp(min=torch.finfo(torch.float64).tiny)
    own = own / largest
    return own / own.norm(dim=1, keepdim=True).clamp(min=1), public / largest


def fit_certainty(own: torch.Tensor, public: torch.Tensor, regularization: float) -> torch.Tensor:
    """
    Fit the logistic regression that separates a client's examples (label 1) from the public examples (label 0).

    The weights minimize

    ```
    min_w  (1/n) Σ_i log(1 + exp(−t_i ⟨w, h_i⟩)) + (λ/2) ‖w‖²,    t_i = ±1
    ```

    over all `n` examples. There is no intercept, because the paper's score has none. scikit-learn's
    `LogisticRegression` minimizes `C Σ_i log(1 + exp(−t_i ⟨w, h_i⟩)) + ½ ‖w‖²` (its user guide, binary case). With
    `C = 1 / (n λ)`, this is the same objective divided by `λ`. (The paper's published code sets `C = 1 / λ` and fits
    an intercept. The sensitivity of its weights is then `2 / λ`, but the noise that it adds is for `2 / (n λ)`.)

    Args:
        own (`torch.Tensor`): Features of the client's examples, of shape `(own examples, features)`.
        public (`torch.Tensor`): Features of the public examples, of shape `(public examples, features)`.
        regularization (`float`): `λ`.

    Returns:
        `torch.Tensor`: Weights of shape `(features,)`, float64.
    """
    from sklearn.linear_model import LogisticRegression

    rows = torch.cat([own, public])
    is_own = torch.arange(len(rows)) < len(own)
    # The bound on the sensitivity holds at the optimum. Newton's method reaches the optimum in a few iterations.
    regression = LogisticRegression(
        C=1 / (len(rows) * regularization), fit_intercept=False, solver="newton-cg", tol=1e-8, max_iter=1000
    )
    return torch.from_numpy(regression.fit(rows.numpy(), is_own.numpy()).coef_[0])


def sensitivity(num_rows: int, regularization: float) -> float:
    """
    L2 sensitivity of the weights of [`fit_certainty`] to the replacement of one of the client's examples.

    It is at most `2 / (n λ)` for features with norms of at most 1 (Chaudhuri et al., Differentially Private Empirical
    Risk Minimization, JMLR 2011, corollary 8).

    Args:
        num_rows (`int`): `n`, the number of the client's examples and public examples together.
        regularization (`float`): `λ`.
    """
    return 2 / (num_rows * regularization)


def noise_std(num_rows: int, regularization: float, epsilon: float, delta: float) -> float:
    """
    Standard deviation of the noise that makes the weights (ε, δ)-differentially private with regard to one example.

    `σ = sqrt(2 ln(1.25 / δ)) · sensitivity / ε` on each weight, for ε below 1 (Dwork and Roth, The Algorithmic
    Foundations of Differential Privacy, 2014, theorem 3.22).

    Args:
        num_rows (`int`): `n`, the number of the client's examples and public examples together.
        regularization (`float`): `λ`.
        epsilon (`float`): `ε`.
        delta (`float`): `δ`.

    Example:

    ```python
    >>> from hf_federated.distillation.certainty import noise_std

    >>> round(noise_std(num_rows=20_000, regularization=0.01, epsilon=0.1, delta=1e-5), 3)
    0.484
    ```
    """
    return math.sqrt(2 * math.log(1.25 / delta)) * sensitivity(num_rows, regularization) / epsilon


def certainty(weights: torch.Tensor, public: torch.Tensor, offset: float) -> torch.Tensor:
    """
    Certainty scores of public examples: `s(x) = 1 / (1 + exp(−⟨w, h(x)⟩)) + ξ`.

    Args:
        weights (`torch.Tensor`): `w`, of shape `(features,)`.
        public (`torch.Tensor`): Features of the public examples, of shape `(examples, features)`, scaled as for the
            fit.
        offset (`float`): `ξ`.

    Returns:
        `torch.Tensor`: Positive scores of shape `(examples,)`, float32.
    """
    return ((public @ weights).sigmoid() + offset).to(torch.float32)
