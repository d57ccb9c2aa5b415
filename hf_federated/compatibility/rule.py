"""`Rule`: two features that do not work together."""

from __future__ import annotations

from dataclasses import dataclass

from .combination import Combination
from .features import Feature


@dataclass(frozen=True)
class Rule:
    """
    Two features that do not work together.

    Args:
        first, second ([`Feature`]): The features.
        reason (`str`): Why they do not work together: a clause without a period.
        alternative (`str`): What to do instead: a sentence.
        checked_by (`str`, *optional*): What checks the rule in place of [`check_combination`], because the check needs
            the exchanged tensors, or belongs to one method.
    """

    first: Feature
    second: Feature
    reason: str
    alternative: str
    checked_by: str = ""

    def applies_to(self, combination: Combination) -> bool:
        """Whether a federation has both features."""
        return bool(self.first.find(combination) and self.second.find(combination))

    def error(self, combination: Combination) -> str:
        """Return the error for a federation that has both features."""
        first, second = self.first.find(combination), self.second.find(combination)
        return f"{first} does not work with {second}: {self.reason}. {self.alternative}"
