"""What could be told of clients' rows from what left them, measured where the rows are at hand: in a simulation."""

from .attackers import LearnedDecoder, NearestState, PrefixSearch
from .config import AuditConfig
from .embedding_gradients import TokenRecovery, attack_embedding, embedding_gradient, recover_tokens
from .inversion import Inversion, build_head, invert, score, sent_states, strongest
from .leakage import LeakageAudit, audit_leakage, plot_leakage
from .pseudo_samples import PseudoSampleAudit, SampleOverlap, nearest_tokens, plot_pseudo_samples
from .rows import TokenRows, drop_shared, encode_rows
from .targets import TargetRecovery, attack_targets, recover_targets


__all__ = [
    "AuditConfig",
    "Inversion",
    "LeakageAudit",
    "LearnedDecoder",
    "NearestState",
    "PrefixSearch",
    "PseudoSampleAudit",
    "SampleOverlap",
    "TargetRecovery",
    "TokenRecovery",
    "TokenRows",
    "attack_embedding",
    "attack_targets",
    "audit_leakage",
    "build_head",
    "drop_shared",
    "embedding_gradient",
    "encode_rows",
    "invert",
    "nearest_tokens",
    "plot_leakage",
    "plot_pseudo_samples",
    "recover_targets",
    "recover_tokens",
    "score",
    "sent_states",
    "strongest",
]
