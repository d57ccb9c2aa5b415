"""Attacks on what a client of averaging or distillation sends: parameters, adapters and predictions."""

from typing import Protocol

from .attention_probe import NoSpanError
from .canary import CanaryExposure
from .dager import Dager, score_sequences
from .evidence import AttackResult, Evidence, Payload, PayloadRecorder, ShadowLosses
from .membership import LiRA, LossThreshold
from .results import PayloadAudit
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

__all__ = [
    "PAYLOAD_ATTACKS",
    "AttackResult",
    "CanaryExposure",
    "Dager",
    "Evidence",
    "LiRA",
    "LossThreshold",
    "NoSpanError",
    "Payload",
    "PayloadAttack",
    "PayloadAudit",
    "PayloadRecorder",
    "ShadowLosses",
    "TokenSet",
    "score_sequences",
]
