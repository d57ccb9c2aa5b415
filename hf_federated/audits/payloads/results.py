"""Results of an audit of payloads: the attacks on several settings, side by side."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...utils.untrusted_json import read_json
from .evidence import AttackResult


@dataclass(frozen=True)
class PayloadAudit:
    """
    Results of the attacks on the payloads of clients, for each compared setting.

    Args:
        results (`dict[str, list[AttackResult]]`):
            The results of the attacks by the name of the setting.
        settings (`dict[str, Any]`, *optional*):
            Settings of the audit.
        model_name (`str`, *optional*):
            Name of the model.
        data_name (`str`, *optional*):
            Name of the dataset.
        versions (`dict[str, str]`, *optional*):
            Versions of packages.

    Example:

    ```python
    >>> from hf_federated.audits import AttackResult, PayloadAudit

    >>> audit = PayloadAudit({"full": [AttackResult("token_set", {"precision": 1.0, "recall": 1.0})]})
    >>> audit.find("full", "token_set").metrics["recall"]
    1.0
    ```
    """

    results: dict[str, list[AttackResult]]
    settings: dict[str, Any] = field(default_factory=dict)
    model_name: str = ""
    data_name: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def find(self, variant: str, attack: str) -> AttackResult | None:
        """Return the result of an attack on a setting, or `None` if the attack was not run."""
        return next((result for result in self.results[variant] if result.attack == attack), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the results as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PayloadAudit:
        """Create the results from the values of `to_dict`."""
        results = {
            variant: [AttackResult(**result) for result in results] for variant, results in values["results"].items()
        }
        return cls(**{**values, "results": results})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the results as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PayloadAudit:
        """
        Load results that `save` wrote.

        Raises:
            ValueError: If the file does not contain the results of an audit of payloads.
        """
        try:
            return cls.from_dict(read_json(path))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{path} does not contain the results of an audit of payloads: {error}. Pass an audit.json that"
                " `hf-federated audit RECIPE` wrote."
            ) from error
