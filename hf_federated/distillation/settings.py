"""`Settings`: the settings of a distillation algorithm, which are the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import name_functions
from ..utils.arguments import require, require_one_of
from ..utils.constructor_settings import ConstructorSettings


@dataclass(kw_only=True, repr=False, eq=False)
class Settings(ConstructorSettings):
    """
    Base class of dataclasses whose constructor arguments are settings. It checks and shows the settings.

    Example:

    ```python
    >>> from hf_federated import DSFL

    >>> DSFL(client_epochs=2).non_default_settings()
    {'client_epochs': 2}
    ```
    """

    def _require(
        self, names: Sequence[str], is_allowed: Callable[[Any], bool], allowed: str, optional: bool = False
    ) -> None:
        """
        Raise a `ValueError` if one of these settings has a value that is not allowed.

        Args:
            names (`Sequence[str]`): Names of settings.
            is_allowed (`Callable`): Whether a value is allowed.
            allowed (`str`): The allowed values, for the message "it must be ...".
            optional (`bool`, *optional*, defaults to `False`): Whether `None` is also allowed.
        """
        for name in names:
            value = getattr(self, name)
            require(name, value, (optional and value is None) or is_allowed(value), allowed)

    def _require_one_of(self, name: str, allowed: Collection[str]) -> None:
        """Raise a `ValueError` if a setting is none of these names."""
        require_one_of(name, getattr(self, name), allowed)

    def _refuse_without_effect(self, *names: str, given: str = "") -> None:
        """
        Raise a `ValueError` if one of these settings is not at its default.

        Args:
            names (`str`): Names of settings that have no effect.
            given (`str`, *optional*, defaults to `""`): Setting and value that make them have no effect, for the
                message.
        """
        given_aliases = {name for name in self.aliases if getattr(self, name) is not None}
        for name in sorted((self.non_default_settings().keys() | given_aliases) & set(names)):
            reason = f" with {given}" if given else ""
            raise ValueError(f"`{name}` would have no effect on {type(self).__name__}{reason}: leave it out.")

    def __repr__(self) -> str:
        settings = name_functions(self.non_default_settings())
        arguments = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        return f"{type(self).__name__}({arguments})"
