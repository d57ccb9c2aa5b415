"""Engines, which run the clients of a federation. An engine executes plans and contains no algorithm."""

from .base import Engine
from .client import ClientEngine
from .context import EngineContext
from .local import LocalEngine
from .network import NetworkEngine
from .ranks import RankEngine, WatchPeers, raise_common_failure
from .requests import Plan


__all__ = [
    "ClientEngine",
    "Engine",
    "EngineContext",
    "LocalEngine",
    "NetworkEngine",
    "Plan",
    "RankEngine",
    "WatchPeers",
    "raise_common_failure",
]
