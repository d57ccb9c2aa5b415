"""Attacks on what a client of averaging or distillation sends: parameters, adapters and predictions."""

from typing import Protocol

from .canary import CanaryExposure
from .dager import Dager
from .evidence import AttackResult, Evidence
from .membership import LiRA, LossThreshold
from .token_set import TokenSet


class PayloadAttack(Protocol):
    """Interface of an attack on the payloads of clients."""

    name: str

    def run(self, evidence: Evidence) -> list[AttackResult]:
        """
        Run the attack.

        Args:
            evidence ([`Evidence`]): What the attacker received, and what is needed to score the attack.

        Returns:
            `list[AttackResult]`: The results. Empty if the evidence lacks what the attack reads.
        """


# The attacks by name, in the order of the report.
PAYLOAD_ATTACKS: dict[str, type[PayloadAttack]] = {
    "token_set": TokenSet,
    "dager": Dager,
    "loss_threshold": LossThreshold,
    "lira": LiRA,
    "canary": CanaryExposure,
}
