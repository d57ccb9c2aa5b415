"""Engines, which run the clients of a federation. An engine executes plans and contains no algorithm."""

from .base import Engine, EngineContext, Plan
from .local import LocalEngine
from .ranks import RankEngine, WatchPeers


__all__ = ["Engine", "EngineContext", "LocalEngine", "Plan", "RankEngine", "WatchPeers"]
