"""Membership inference: does the payload of a client reveal whether the client trained on an example?

The model under attack is what the payload teaches the server: the client's parameters, or a model that the server
distilled from the client's predictions ("Distillation-based LiRA" of Shi et al. 2025, "Unveiling Client Privacy
Leakage from Public Dataset Usage in Federated Distillation", https://arxiv.org/abs/2502.08001).

Each of the shadow models is the target once, and the remaining models are the attacker's. The design and the numbers
to report, the true positive rate at a low false positive rate, are those of [Membership Inference Attacks From First
Principles](https://arxiv.org/abs/2112.03570) (Carlini et al., S&P 2022).
"""

from __future__ import annotations

import math

import numpy as np
import torch

from .evidence import AttackResult, Evidence, ShadowLosses


FALSE_POSITIVE_RATE = 0.01
# Lower bound of a probability and of a standard deviation.
_SMALLEST = 1e-6


class LossThreshold:
    """
    Call an example a member if its loss is low.

    [Privacy Risk in Machine Learning](https://arxiv.org/abs/1709.01604) (Yeom et al., CSF 2018). The attack needs no
    shadow models. The threshold is not fixed; the result describes all thresholds.

    Args:
        num_resamples (`int`, *optional*, defaults to `1000`):
            Number of bootstrap samples of the target models for the confidence intervals.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the bootstrap.

    Relations:
        - [`LiRA`] compares the loss of an example with the losses of the same example under other models.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.audits import LossThreshold, ShadowLosses

    >>> members = torch.tensor([[True, False], [False, True]])
    >>> shadows = ShadowLosses(losses=torch.tensor([[0.1, 2.0], [3.0, 0.2]]), members=members)
    >>> LossThreshold().scores(shadows).argmax(1).tolist()
    [0, 1]
    ```
    """

    name = "loss_threshold"

    def __init__(self, num_resamples: int = 1000, seed: int = 0) -> None:
        self.num_resamples = num_resamples
        self.seed = seed

    def run(self, evidence: Evidence) -> list[AttackResult]:
        """
        Attack the shadow models.

        Args:
            evidence ([`Evidence`]): `shadows` are attacked.

        Returns:
            `list[AttackResult]`: `auc` and `tpr`, the true positive rate at a false positive rate of 1 %, with 95 %
            confidence intervals from a bootstrap over the target models.
        """
        if evidence.shadows is None:
            return []
        scores, members = self.scores(evidence.shadows).numpy(), evidence.shadows.members.numpy()
        metrics = _rates(scores, members)
        generator = np.random.default_rng(self.seed)
        samples = [
            _rates(scores[chosen], members[chosen])
            for chosen in (generator.integers(len(scores), size=len(scores)) for _ in range(self.num_resamples))
        ]
        intervals = {
            name: np.quantile([sample[name] for sample in samples], [0.025, 0.975]).tolist() for name in metrics
        }
        return [AttackResult(self.name, metrics, intervals)]

    def scores(self, shadows: ShadowLosses) -> torch.Tensor:
        """Return the attacker's confidence that each example is a member, of shape `(num_models, num_examples)`."""
        return -shadows.losses.double()


class LiRA(LossThreshold):
    """
    Call an example a member if its loss is more likely under models that trained on it than under models that did not.

    Carlini et al. 2022, online attack. With few shadow models, the standard deviations of the two normal distributions
    are shared by all examples (section VI.C of the paper). The logit `log(p / (1 − p))` of the probability
    `p = exp(−loss)` is compared.

    Args:
        kwargs (*optional*): As in [`LossThreshold`].

    Relations:
        - The paper trains 256 shadow models on CIFAR-10. With fewer models, the attack is weaker.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.audits import LiRA, ShadowLosses

    >>> members = torch.tensor([[True, False], [False, True], [True, False], [False, True]])
    >>> losses = torch.where(members, 1.0, 2.0) + torch.tensor([0.0, 5.0])
    >>> LiRA().scores(ShadowLosses(losses, members)).argmax(1).tolist()
    [0, 1, 0, 1]
    ```
    """

    name = "lira"

    def scores(self, shadows: ShadowLosses) -> torch.Tensor:
        losses, members = shadows.losses.double(), shadows.members
        logits = -losses - torch.log((-torch.expm1(-losses)).clamp_min(_SMALLEST))
        scores = torch.zeros_like(logits)
        for target in range(len(logits)):
            others = torch.arange(len(logits)) != target
            likelihoods = []
            for included in (members[others], ~members[others]):
                values, counts = logits[others], included.sum(0)
                mean = (values * included).sum(0) / counts.clamp_min(1)
                # An example that no other model has, or that all have, gets the mean of the other examples.
                mean = torch.where(counts > 0, mean, mean[counts > 0].mean())
                deviations = (values - mean)[included & (counts > 1)]
                # One degree of freedom of each example is the mean.
                spread = deviations.square().sum() / max(int((counts - 1).clamp_min(0).sum()), 1)
                scale = spread.sqrt().clamp_min(_SMALLEST)
                likelihoods.append(-0.5 * ((logits[target] - mean) / scale).square() - scale.log())
            scores[target] = likelihoods[0] - likelihoods[1]
        return scores


def _rates(scores: np.ndarray, members: np.ndarray) -> dict[str, float]:
    """Return the area under the ROC curve, and the largest true positive rate at the false positive rate of 1 %."""
    from sklearn.metrics import roc_auc_score, roc_curve

    flat_scores, flat_members = scores.ravel(), members.ravel()
    if flat_members.all() or not flat_members.any():
        return {"auc": math.nan, "tpr": math.nan}
    false_positives, true_positives, _ = roc_curve(flat_members, flat_scores)
    return {
        "auc": float(roc_auc_score(flat_members, flat_scores)),
        "tpr": float(true_positives[false_positives <= FALSE_POSITIVE_RATE].max()),
    }
