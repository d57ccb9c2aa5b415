"""What is exchanged of a model: adapters, trainable parameters, freezing."""

from .copying import copy_model
from .exchange import AnotherModelError, Exchange
from .freezing import freeze_layers


__all__ = ["AnotherModelError", "Exchange", "copy_model", "freeze_layers"]
