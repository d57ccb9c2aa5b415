"""Exposure of canaries: random texts that were inserted into a client's examples.

[The Secret Sharer](https://arxiv.org/abs/1802.08232) (Carlini et al., USENIX Security 2019). The canary has a rank by
its loss among random texts of the same format, the references. Its exposure is `log2 |R| − log2 rank`, with `|R|` the
number of references and the canary. The paper ranks the canary among all texts of the format. Here, the references are
a random sample of these texts ("approximation by sampling" in the paper), so the largest exposure is `log2 |R|`.
"""

from __future__ import annotations

import math

import torch

from .evidence import AttackResult, Evidence


class CanaryExposure:
    """
    Measure how much more likely a model finds a canary than random texts of the same format.

    Relations:
        - [`LiRA`] measures examples of the data. Canaries measure the memorization of random texts, which a model
          cannot predict in any other way.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.audits import CanaryExposure

    >>> CanaryExposure.exposure(torch.tensor([0.1]), torch.tensor([1.0, 2.0, 3.0])).tolist()
    [2.0]
    ```
    """

    name = "canary"

    def run(self, evidence: Evidence) -> list[AttackResult]:
        """
        Attack the shadow models.

        Args:
            evidence ([`Evidence`]): `shadows` with canaries and references are attacked.

        Returns:
            `list[AttackResult]`: Mean exposure in bits of canaries that the client had (`exposure`) and of canaries
            that it did not have (`absent`), and the largest possible exposure (`largest`).
        """
        shadows = evidence.shadows
        if shadows is None or shadows.canaries is None or shadows.references is None or shadows.canary_members is None:
            return []
        exposures = torch.stack(
            [self.exposure(*losses) for losses in zip(shadows.canaries, shadows.references, strict=True)]
        )
        metrics = {
            "exposure": float(exposures[shadows.canary_members].mean()),
            "absent": float(exposures[~shadows.canary_members].mean()),
            "largest": math.log2(shadows.references.shape[1] + 1),
        }
        return [AttackResult(self.name, metrics)]

    @staticmethod
    def exposure(canaries: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
        """
        Compute the exposure of canaries under one model, in bits.

        Args:
            canaries (`torch.Tensor`): Losses of the canaries, of shape `(num_canaries,)`.
            references (`torch.Tensor`): Losses of the references, of shape `(num_references,)`.

        Returns:
            `torch.Tensor`: Exposures of shape `(num_canaries,)`, `float64`.
        """
        # A reference with the same loss ranks before the canary, so equal losses give no exposure.
        ranks = 1 + (references <= canaries[:, None]).sum(1)
        return math.log2(len(references) + 1) - ranks.double().log2()
