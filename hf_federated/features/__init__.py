"""Cached features: a frozen encoder runs once for each text, and clients train heads on its features."""

from .blocks import BlocksClassifier, BlocksClassifierConfig
from .complete import EncoderClassifier, EncoderClassifierConfig, complete_model
from .encoder import CachedEncoder, FrozenEncoder, PretrainedEncoder
from .heads import FeatureClassifier, FeatureClassifierConfig
from .hidden_states import FrozenLayers, HiddenStatesCollator
from .store import FeatureStore, cache_folder, row_key
from .tfidf import TfidfEncoder


__all__ = [
    "BlocksClassifier",
    "BlocksClassifierConfig",
    "CachedEncoder",
    "EncoderClassifier",
    "EncoderClassifierConfig",
    "FeatureClassifier",
    "FeatureClassifierConfig",
    "FeatureStore",
    "FrozenEncoder",
    "FrozenLayers",
    "HiddenStatesCollator",
    "PretrainedEncoder",
    "TfidfEncoder",
    "cache_folder",
    "complete_model",
    "row_key",
]
