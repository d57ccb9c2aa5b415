"""Cached features: a frozen encoder runs once for each text, and clients train heads on its features."""

from .encoder import CachedEncoder, FrozenEncoder
from .heads import FeatureClassifier, FeatureClassifierConfig
from .store import FeatureStore, cache_folder, row_key


__all__ = [
    "CachedEncoder",
    "FeatureClassifier",
    "FeatureClassifierConfig",
    "FeatureStore",
    "FrozenEncoder",
    "cache_folder",
    "row_key",
]
