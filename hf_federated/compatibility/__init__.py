"""Which features of a federation work together: one list of rules.

Two features work together unless a rule of `RULES` names both. The constructor of the trainer checks the rules, the
tables of the documentation are made from them, and a test walks all pairs of features.
"""

from .check import check_combination, find_rule
from .combination import Combination
from .features import GROUPS, Feature
from .rule import Rule
from .rules import RULES


__all__ = ["GROUPS", "RULES", "Combination", "Feature", "Rule", "check_combination", "find_rule"]
