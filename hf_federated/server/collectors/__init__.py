"""How the server obtains the updates of a round, one collector per module."""

from collections.abc import Mapping
from types import MappingProxyType

from .base import Collected, CollectorContext, UpdateCollector
from .received import ReceivedUpdates
from .synchronous import SynchronousCollector


COLLECTORS: Mapping[str, type[UpdateCollector]] = MappingProxyType({cls.name: cls for cls in (SynchronousCollector,)})
"""The collectors, by the name that `collector` of [`FederatedConfig`] accepts."""


__all__ = [
    "COLLECTORS",
    "Collected",
    "CollectorContext",
    "ReceivedUpdates",
    "SynchronousCollector",
    "UpdateCollector",
]
