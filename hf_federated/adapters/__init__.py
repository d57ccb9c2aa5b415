"""What is exchanged of a model: adapters, trainable parameters, freezing."""

from .exchange import Exchange
from .freezing import freeze_layers


__all__ = ["Exchange", "freeze_layers"]
