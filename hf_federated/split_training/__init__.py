"""Training of split language models: strategies, parties and their optimizers, checkpoints, the trainer (FL-GLM)."""

from .bodies import ServerBodies
from .config import SplitConfig
from .federation import ClientParty, SplitFederation
from .parties import JointOptimizer, Party
from .remote import LateError, RemoteFederation
from .server import RunFailedError, TrainingServer
from .steps import SplitSteps, StepPlan
from .trainer import SplitFederatedTrainer, split_federate
from .transfer import PartParameters


__all__ = [
    "ClientParty",
    "JointOptimizer",
    "LateError",
    "PartParameters",
    "Party",
    "RemoteFederation",
    "RunFailedError",
    "ServerBodies",
    "SplitConfig",
    "SplitFederatedTrainer",
    "SplitFederation",
    "SplitSteps",
    "StepPlan",
    "TrainingServer",
    "split_federate",
]
