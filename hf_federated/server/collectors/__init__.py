"""How the server obtains the updates of a round, one collector per module."""

from collections.abc import Mapping
from types import MappingProxyType

from ...utils.algorithm_names import COLLECTOR_NAMES, import_reference
from .base import Collected, CollectorContext, UpdateCollector
from .fedbuff import BufferedCollector
from .received import ReceivedUpdates
from .secure import SecureCollector
from .synchronous import SynchronousCollector


COLLECTORS: Mapping[str, type[UpdateCollector]] = MappingProxyType(
    {name: import_reference(reference) for name, reference in COLLECTOR_NAMES.built_in.items()}
)
"""The collectors, by the name that `collector` of [`FederatedConfig`] accepts."""


__all__ = [
    "COLLECTORS",
    "BufferedCollector",
    "Collected",
    "CollectorContext",
    "ReceivedUpdates",
    "SecureCollector",
    "SynchronousCollector",
    "UpdateCollector",
]
