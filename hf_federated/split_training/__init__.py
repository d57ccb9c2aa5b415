"""Training of split language models: strategies, parties and their optimizers, checkpoints, the trainer (FL-GLM)."""

from .config import SplitConfig
from .in_process import ClientParty, SplitFederation
from .link_wrappers import LateError
from .messages import PartParameters
from .networked_client import RemoteFederation
from .optimization import JointOptimizer, Party
from .server import RunFailedError, TrainingServer
from .server_model import ServerBodies
from .step_plan import SplitSteps, StepPlan
from .trainer import SplitFederatedTrainer, split_federate


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
