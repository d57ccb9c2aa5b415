"""Losses with which a client backpropagates the server's feedback.

A client's predictions `y^k` enter the ensemble with the weight `w_k`: `q = Σ_k w_k y^k`, or the softmax of this sum if
logits are averaged. Each function of this module returns a scalar. The gradient of the scalar with respect to the
client's parameters is, or estimates, the gradient of the server's validation loss after the server's step. The client
adds the scalar to its distillation loss (FedID, equation 15). `feedback.py` has the server's side and the paper.

| variant | sent in addition to the ensemble | gradient |
|---|---|---|
| [`chain_rule_surrogate`] | `B · C` numbers | exact |
| [`per_example_surrogate`] | `B` numbers, `B` labels | unbiased |
| [`mpl_sampled_surrogate`] | one number, `B` labels | unbiased, with a high variance |
| [`mpl_surrogate`] | one number | biased; this is the paper's published code |

**Why the sampled variants are unbiased.** Draw `ŷ_i ~ q_i` for every row. Let `R(ŷ)` be any number that depends on the
client's parameters only through the draw. Then `∇E[R] = E[R ∇log P(ŷ)]`, where `log P(ŷ) = Σ_i log q_{i, ŷ_i}` (score
function). Because `E[∇log P] = 0`, a constant may be subtracted from `R`.

- *One number per row*: the server's step is on `q`. With `r_i = G_{i, ŷ_i}`,
  `E[r_i ∇log q_{i, ŷ_i}] = Σ_c q_ic G_ic ∇q_ic / q_ic = Σ_c G_ic ∇q_ic`, the gradient of the chain rule. The labels
  are drawn after the step, only for the feedback.
- *One number per batch*: the server's step is on the drawn labels, and `R = L_val(θ⁺(ŷ)) − L_val(θ)`. With the
  batch-mean cross-entropy `CE = −(1/B) log P(ŷ)` of the *ensemble*, `B · E[(L_old − L_new) ∇CE]` is the gradient of
  `E[L_val(θ⁺(ŷ))]`. This holds for any optimizer. With plain gradient descent, it approaches the gradient of the chain
  rule as `η → 0`. For `η > 0` the two differ: `θ⁺(ŷ)` has the mean `θ⁺(q)`, but the loss is not linear between them.

The score function is that of the ensemble, not that of the client. It is `log q` at the received values, with the
client's share in its gradient. `∇log y^k` would be correct only for labels drawn from `y^k`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional as F

from ..utils.arguments import require


Averaged = Literal["probabilities", "logits"]


def chain_rule_surrogate(predictions: torch.Tensor, feedback: torch.Tensor, weight: float) -> torch.Tensor:
    """
    `w_k ⟨G, y^k⟩`, whose gradient is `Σ_ic ∂L_val/∂y^k_ic ∇y^k_ic`.

    Args:
        predictions (`torch.Tensor` of shape `(B, C)`):
            `y^k` with its graph: the predictions that the server averages, either probabilities or logits.
        feedback (`torch.Tensor` of shape `(B, C)`):
            Feedback of the same kind: [`chain_rule_feedback`] for probabilities, [`logit_feedback`] or
            [`squared_error_feedback`] for logits.
        weight (`float`): `w_k`, the client's weight in the ensemble.

    Returns:
        `torch.Tensor`: A scalar.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.distillation import chain_rule_surrogate

    >>> predictions = torch.tensor([[0.5, 0.5]], requires_grad=True)
    >>> chain_rule_surrogate(predictions, torch.tensor([[1.0, -2.0]]), weight=0.5).backward()
    >>> predictions.grad
    tensor([[ 0.5000, -1.0000]])
    ```
    """
    return weight * (feedback.detach() * predictions).sum()


def sample_pseudo_labels(ensemble_probabilities: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """
    Draw one class for each row: `ŷ_i ~ q_i`.

    Args:
        ensemble_probabilities (`torch.Tensor` of shape `(B, C)`): `q`, as the clients receive it.
        generator (`torch.Generator`): A generator on the device of `q`.

    Returns:
        `torch.Tensor` of shape `(B,)`: Classes, int64.
    """
    return torch.multinomial(ensemble_probabilities, 1, generator=generator).squeeze(1)


def per_example_feedback(feedback: torch.Tensor, pseudo_labels: torch.Tensor) -> torch.Tensor:
    """
    One number for each row instead of `C`, for [`per_example_surrogate`]: `r_i = G_{i, ŷ_i}`.

    `G` is the result of [`chain_rule_feedback`], whether probabilities or logits are averaged.

    Args:
        feedback (`torch.Tensor` of shape `(B, C)`): `G`.
        pseudo_labels (`torch.Tensor` of shape `(B,)`): `ŷ`, from [`sample_pseudo_labels`].

    Returns:
        `torch.Tensor` of shape `(B,)`: `r`.
    """
    return feedback.gather(1, pseudo_labels.unsqueeze(1)).squeeze(1)


def per_example_surrogate(
    predictions: torch.Tensor,
    ensemble: torch.Tensor,
    pseudo_labels: torch.Tensor,
    feedback: torch.Tensor,
    weight: float,
    averaged: Averaged = "probabilities",
) -> torch.Tensor:
    """
    `Σ_i r_i log q_{i, ŷ_i}`, whose expected gradient is that of [`chain_rule_surrogate`].

    Args:
        predictions (`torch.Tensor` of shape `(B, C)`): `y^k` with its graph.
        ensemble (`torch.Tensor` of shape `(B, C)`):
            The received ensemble, of the same kind as the predictions: `q`, or logits whose softmax is `q`.
        pseudo_labels (`torch.Tensor` of shape `(B,)`): `ŷ`, drawn from the received `q`.
        feedback (`torch.Tensor` of shape `(B,)`): `r`, from [`per_example_feedback`].
        weight (`float`): `w_k`.
        averaged (`str`, *optional*, defaults to `"probabilities"`):
            Kind of predictions that the server averages: `"probabilities"` or `"logits"`.

    Returns:
        `torch.Tensor`: A scalar.

    Raises:
        ValueError: If `averaged` is neither.
    """
    return (feedback.detach() * _log_likelihoods(predictions, ensemble, pseudo_labels, weight, averaged)).sum()


def mpl_sampled_surrogate(
    predictions: torch.Tensor,
    ensemble: torch.Tensor,
    pseudo_labels: torch.Tensor,
    improvement: float | torch.Tensor,
    weight: float,
    averaged: Averaged = "probabilities",
) -> torch.Tensor:
    """
    `−(L_old − L_new) Σ_i log q_{i, ŷ_i}`, whose expected gradient is that of `E[L_val(θ⁺(ŷ))]`.

    This is `B` times the improvement times the ensemble's cross-entropy on the labels of the server's step. It is the
    estimator of Meta Pseudo Labels (Pham et al., CVPR 2021) for a teacher that is an ensemble.

    Args:
        predictions (`torch.Tensor` of shape `(B, C)`): `y^k` with its graph.
        ensemble (`torch.Tensor` of shape `(B, C)`): As in [`per_example_surrogate`].
        pseudo_labels (`torch.Tensor` of shape `(B,)`): `ŷ`, drawn from `q`, on which the server took its step.
        improvement (`float` or `torch.Tensor`):
            `L_old − L_new`: the validation loss before the step minus the loss after it, on the same examples in
            evaluation mode.
        weight (`float`): `w_k`.
        averaged (`str`, *optional*, defaults to `"probabilities"`):
            Kind of predictions that the server averages: `"probabilities"` or `"logits"`.

    Returns:
        `torch.Tensor`: A scalar.

    Raises:
        ValueError: If `averaged` is neither.
    """
    return -improvement * _log_likelihoods(predictions, ensemble, pseudo_labels, weight, averaged).sum()


def mpl_surrogate(
    logits: torch.Tensor, pseudo_labels: torch.Tensor, improvement: float | torch.Tensor, weight: float
) -> torch.Tensor:
    """
    `w_k (L_old − L_new) CE(f^k, argmax y^k)`, as in the published code (github.com/maxinge8698/FedID).

    The labels are the most likely classes instead of drawn labels, and the score function is that of the client. The
    gradient is therefore no estimate of a gradient of the validation loss. In the published code, the server's step is
    on `Σ_k w_k CE(f, argmax y^k)`, where `w_k` also enters.

    Args:
        logits (`torch.Tensor` of shape `(B, C)`): `f^k` with its graph.
        pseudo_labels (`torch.Tensor` of shape `(B,)`): The most likely class of each prediction that the client sent.
        improvement (`float` or `torch.Tensor`): `L_old − L_new`, as in [`mpl_sampled_surrogate`].
        weight (`float`): `w_k`.

    Returns:
        `torch.Tensor`: A scalar.
    """
    return weight * improvement * F.cross_entropy(logits, pseudo_labels)


def _log_likelihoods(
    predictions: torch.Tensor,
    ensemble: torch.Tensor,
    pseudo_labels: torch.Tensor,
    weight: float,
    averaged: Averaged,
) -> torch.Tensor:
    """`log q_{i, ŷ_i}`, of shape `(B,)`, at the ensemble's values and with the gradient of the client's share."""
    require("averaged", averaged, averaged in ("probabilities", "logits"), "'probabilities' or 'logits'")
    shared = ensemble.detach() + weight * (predictions - predictions.detach())
    labels = pseudo_labels.unsqueeze(1)
    if averaged == "logits":
        return shared.log_softmax(dim=-1).gather(1, labels).squeeze(1)
    return shared.gather(1, labels).squeeze(1).log()
