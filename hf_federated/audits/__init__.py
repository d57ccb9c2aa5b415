"""Measure the information about clients' examples in the exchanged tensors, in simulations that have the examples."""

from .attackers import LearnedDecoder, NearestState, PrefixSearch
from .config import AuditConfig
from .embedding_gradients import TokenRecovery, attack_embedding, embedding_gradient, recover_tokens
from .examples import TokenizedExamples, encode_examples, remove_shared_texts
from .inversion import Inversion, build_head, invert, score, sent_states, strongest
from .leakage import LeakageAudit, audit_leakage, plot_leakage
from .payloads import PAYLOAD_ATTACKS, PayloadAttack
from .payloads.attention_probe import NoSpanError
from .payloads.canary import CanaryExposure
from .payloads.dager import Dager
from .payloads.evidence import AttackResult, Evidence, Payload, PayloadRecorder, ShadowLosses, SumRecorder
from .payloads.membership import LiRA, LossThreshold
from .payloads.results import PayloadAudit
from .payloads.token_set import TokenSet
from .pseudo_samples import PseudoSampleAudit, SampleOverlap, nearest_tokens, plot_pseudo_samples
from .targets import TargetRecovery, attack_targets, recover_targets


__all__ = [
    "PAYLOAD_ATTACKS",
    "AttackResult",
    "AuditConfig",
    "CanaryExposure",
    "Dager",
    "Evidence",
    "Inversion",
    "LeakageAudit",
    "LearnedDecoder",
    "LiRA",
    "LossThreshold",
    "NearestState",
    "NoSpanError",
    "Payload",
    "PayloadAttack",
    "PayloadAudit",
    "PayloadRecorder",
    "PrefixSearch",
    "PseudoSampleAudit",
    "SampleOverlap",
    "ShadowLosses",
    "SumRecorder",
    "TargetRecovery",
    "TokenRecovery",
    "TokenSet",
    "TokenizedExamples",
    "attack_embedding",
    "attack_targets",
    "audit_leakage",
    "build_head",
    "embedding_gradient",
    "encode_examples",
    "invert",
    "nearest_tokens",
    "plot_leakage",
    "plot_pseudo_samples",
    "recover_targets",
    "recover_tokens",
    "remove_shared_texts",
    "score",
    "sent_states",
    "strongest",
]
