"""Training of split language models: strategies, parties and their optimizers, checkpoints, the trainer (FL-GLM)."""

from .config import SplitConfig
from .federation import ClientParty, SplitFederation
from .parties import JointOptimizer, Party
from .steps import SplitSteps, plan_together, plan_turns
from .trainer import SplitFederatedTrainer, split_federate
from .transfer import PartParameters


__all__ = [
    "ClientParty",
    "JointOptimizer",
    "PartParameters",
    "Party",
    "SplitConfig",
    "SplitFederatedTrainer",
    "SplitFederation",
    "SplitSteps",
    "plan_together",
    "plan_turns",
    "split_federate",
]
