"""Which features of a federation work together: one list of rules.

Two features work together unless a rule of `RULES` names both. The constructor of the trainer checks the rules, the
tables of the documentation are made from them, and a test walks all pairs of features.
"""

from .combination import Combination
from .features import GROUPS, Feature
from .rules import RULES, Rule, check_combination, find_rule


__all__ = ["GROUPS", "RULES", "Combination", "Feature", "Rule", "check_combination", "find_rule"]
