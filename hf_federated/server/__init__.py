"""The server side of a round: the round loop, the server state, and the events that callbacks receive."""

from .anomaly_report import AnomalyReport, load_anomalies
from .callbacks import AggregationCallback, DistillationCallback, FederatedCallback, ServerState, call_event
from .client_metrics import RoundSummary, spread_over_clients
from .progress import RoundProgress
from .round_loop import RoundLoop


__all__ = [
    "AggregationCallback",
    "AnomalyReport",
    "DistillationCallback",
    "FederatedCallback",
    "RoundLoop",
    "RoundProgress",
    "RoundSummary",
    "ServerState",
    "call_event",
    "load_anomalies",
    "spread_over_clients",
]
