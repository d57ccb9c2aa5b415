"""Certainty scores of FedAUX: how much a public row is like a client's own rows.

Sattler et al., FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning (IEEE TNNLS 2021), section on
differentially private certainty scoring. A client tells its own rows from the public ones by a logistic regression
over features that all clients compute alike, and the regression's probability of a public row is the score.
"""

from __future__ import annotations

import math

import torch


def scale_into_unit_ball(own: torch.Tensor, public: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Features divided by the largest norm of a public row's; own ones that are still longer than 1 are cut to 1.

    The paper divides by the largest norm of all rows. That number would change with a single private row and move all
    other features, which its bound on the sensitivity does not allow for; the public rows' tells nothing.

    Args:
        own (`torch.Tensor`): Features of the client's rows, of shape `(own rows, features)`.
        public (`torch.Tensor`): Those of the public rows, of shape `(public rows, features)`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Both, float64, with norms of at most 1.

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
    The weights of the logistic regression that tells own rows (label 1) from public ones (label 0): those of

    ```
    min_w  (1/n) Σ_i log(1 + exp(−t_i ⟨w, h_i⟩)) + (λ/2) ‖w‖²,    t_i = ±1
    ```

    over all `n` rows, without an intercept, which the paper's score has none of. scikit-learn's `LogisticRegression`
    minimises `C Σ_i log(1 + exp(−t_i ⟨w, h_i⟩)) + ½ ‖w‖²` (its user guide, binary case), the same divided by `λ` where
    `C = 1 / (n λ)`. (The paper's published code sets `C = 1 / λ` and fits an intercept; its weights are then as
    sensitive as `2 / λ`, and the noise that it adds is for `2 / (n λ)`.)

    Args:
        own (`torch.Tensor`): Features of the client's rows, of shape `(own rows, features)`.
        public (`torch.Tensor`): Those of the public rows, of shape `(public rows, features)`.
        regularization (`float`): `λ`.

    Returns:
        `torch.Tensor`: Of shape `(features,)`, float64.
    """
    from sklearn.linear_model import LogisticRegression

    rows = torch.cat([own, public])
    is_own = torch.arange(len(rows)) < len(own)
    # Newton's steps come to the optimum of which the bound on the sensitivity speaks, in a handful of passes.
    regression = LogisticRegression(
        C=1 / (len(rows) * regularization), fit_intercept=False, solver="newton-cg", tol=1e-8, max_iter=1000
    )
    return torch.from_numpy(regression.fit(rows.numpy(), is_own.numpy()).coef_[0])


def sensitivity(num_rows: int, regularization: float) -> float:
    """
    How far, in Euclidean norm, one own row that is another moves the weights of [`fit_certainty`] at most:
    `2 / (n λ)` (Chaudhuri et al., Differentially Private Empirical Risk Minimization, JMLR 2011, corollary 8), for
    features with norms of at most 1.

    Args:
        num_rows (`int`): `n`, own and public rows together.
        regularization (`float`): `λ`.
    """
    return 2 / (num_rows * regularization)


def noise_std(num_rows: int, regularization: float, epsilon: float, delta: float) -> float:
    """
    The standard deviation of the noise on each weight that makes them (ε, δ)-differentially private with regard to one
    own row: `σ = sqrt(2 ln(1.25 / δ)) · sensitivity / ε`, for ε below 1 (Dwork and Roth, The Algorithmic Foundations
    of Differential Privacy, 2014, theorem 3.22).

    Args:
        num_rows (`int`): `n`, own and public rows together.
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
    `s(x) = 1 / (1 + exp(−⟨w, h(x)⟩)) + ξ` of public rows.

    Args:
        weights (`torch.Tensor`): Of shape `(features,)`.
        public (`torch.Tensor`): Features, of shape `(rows, features)`, scaled as for the fit.
        offset (`float`): `ξ`.

    Returns:
        `torch.Tensor`: Of shape `(rows,)`, float32, positive.
    """
    return ((public @ weights).sigmoid() + offset).to(torch.float32)
