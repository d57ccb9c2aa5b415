"""The server side of a round: the round loop, its collectors, and the events that callbacks receive."""

from .anomaly_report import AnomalyReport, load_anomalies
from .callbacks import AggregationCallback, DistillationCallback, FederatedCallback, call_event
from .client_metrics import RoundSummary, spread_over_clients
from .collectors import COLLECTORS, CollectorContext, SynchronousCollector, UpdateCollector
from .fit_requests import FitSettings
from .live_report import LiveReport
from .previous_release import ServerState
from .progress import RoundProgress
from .round_loop import RoundLoop
from .step_memories import StepMemories


__all__ = [
    "COLLECTORS",
    "AggregationCallback",
    "AnomalyReport",
    "CollectorContext",
    "DistillationCallback",
    "FederatedCallback",
    "FitSettings",
    "LiveReport",
    "RoundLoop",
    "RoundProgress",
    "RoundSummary",
    "ServerState",
    "StepMemories",
    "SynchronousCollector",
    "UpdateCollector",
    "call_event",
    "load_anomalies",
    "spread_over_clients",
]
