"""The server side of a round: the round loop, the server state, and the events that callbacks receive."""

from .callbacks import AggregationCallback, DistillationCallback, FederatedCallback, ServerState, call_event
from .client_metrics import RoundSummary, spread_over_clients
from .progress import RoundProgress
from .round_loop import RoundLoop


__all__ = [
    "AggregationCallback",
    "DistillationCallback",
    "FederatedCallback",
    "RoundLoop",
    "RoundProgress",
    "RoundSummary",
    "ServerState",
    "call_event",
    "spread_over_clients",
]
