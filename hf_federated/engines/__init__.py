"""Engines: where the clients of a federation run. An engine executes a plan and decides nothing."""

from .base import Engine, EngineContext, Plan
from .local import LocalEngine
from .ranks import RankEngine, WatchPeers


__all__ = ["Engine", "EngineContext", "LocalEngine", "Plan", "RankEngine", "WatchPeers"]
