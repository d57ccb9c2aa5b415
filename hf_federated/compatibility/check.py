"""The check of the rules when a trainer is built."""

from __future__ import annotations

from .combination import Combination
from .rule import Rule
from .rules import RULES


def find_rule(combination: Combination) -> Rule | None:
    """Return the first rule that refuses a federation, or `None`. Rules with `checked_by` are left out."""
    return next((rule for rule in RULES if not rule.checked_by and rule.applies_to(combination)), None)


def check_combination(combination: Combination) -> None:
    """
    Refuse a federation whose parts do not work together.

    Args:
        combination ([`Combination`]): The parts of the federation.

    Raises:
        ValueError: If a rule names two features of the federation. The message names the alternative.
    """
    if (rule := find_rule(combination)) is not None:
        raise ValueError(rule.error(combination))
