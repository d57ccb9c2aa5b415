"""Where clients run. An engine executes a plan; it decides nothing."""

from .base import Engine, Plan
from .local import LocalEngine


__all__ = ["Engine", "LocalEngine", "Plan"]
