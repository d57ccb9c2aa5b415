"""`ConstructorSettings`: an object that lists its constructor arguments, for cards, configurations and copies."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar


class ConstructorSettings:
    """
    Base class of objects that store each constructor argument in an attribute of the same name.

    Example:

    ```python
    >>> from hf_federated import FedProx

    >>> FedProx(0.1).settings()
    {'proximal_weight': 0.1, 'weighting': 'examples'}
    ```
    """

    # Constructor arguments that are another name of an argument, by alias. `settings` does not contain them.
    aliases: ClassVar[Mapping[str, str]] = {}

    def settings(self) -> dict[str, Any]:
        """Return all constructor arguments with their values, without aliases."""
        names = inspect.signature(type(self)).parameters
        return {name: getattr(self, name) for name in names if name not in self.aliases}

    def non_default_settings(self) -> dict[str, Any]:
        """Return the constructor arguments whose values differ from the defaults."""
        parameters = inspect.signature(type(self)).parameters
        return {name: value for name, value in self.settings().items() if value != parameters[name].default}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.non_default_settings().items())
        return f"{type(self).__name__}({arguments})"
