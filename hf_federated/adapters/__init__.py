"""Exchanged parameters of a model: adapters, trainable parameters and frozen layers."""

from .copying import copy_model
from .exchange import Exchange, ModelMismatchError
from .freezing import freeze_layers
from .shards import optimizer_state_here


__all__ = ["Exchange", "ModelMismatchError", "copy_model", "freeze_layers", "optimizer_state_here"]
