"""Where clients run. An engine executes a plan; it decides nothing."""

from .base import Engine, Plan
from .local import LocalEngine
from .ranks import RankEngine, WatchPeers


__all__ = ["Engine", "LocalEngine", "Plan", "RankEngine", "WatchPeers"]
