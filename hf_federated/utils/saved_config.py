"""`SavedConfig`: a configuration that is one JSON file in a directory."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any, ClassVar

from .fields import check_values
from .untrusted_json import read_json


if TYPE_CHECKING:
    from typing_extensions import Self


class SavedConfig:
    """Base class of dataclasses that are saved as one JSON file in a directory, like configs of transformers."""

    # Name of the JSON file.
    file_name: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]  # every subclass is a dataclass

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """
        Create a config from the values of `to_dict`.

        Args:
            values (`dict[str, Any]`): Values by field name.

        Raises:
            ValueError: If `values` contains a key that is not a field. The message lists the fields.
        """
        known = [item.name for item in dataclasses.fields(cls)]  # type: ignore[arg-type]  # as above
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"Unknown fields {unknown} of {cls.__name__}; the fields are {known}.")
        return cls(**values)

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Save the config as a JSON file in a directory. The directory is created if it does not exist."""
        os.makedirs(save_directory, exist_ok=True)
        with open(os.path.join(save_directory, self.file_name), "w", encoding="utf-8") as file:
            file.write(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n")

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> Self:
        """
        Load a config from the JSON file in a directory.

        Raises:
            FileNotFoundError: If the directory has no such file.
            ValueError: If the file is damaged, or a value is not allowed. The message names the file.
        """
        path = os.path.join(directory, cls.file_name)
        try:
            values = read_json(path)
            if not isinstance(values, dict):
                raise ValueError(f"it contains a {type(values).__name__} instead of a dictionary.")
            check_values(cls, values)
            return cls.from_dict(values)
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{path!r} is not a valid {cls.__name__}: {error} Correct the file, or save the config again."
            ) from error
