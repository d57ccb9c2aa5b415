"""Training of split language models (FL-GLM): the trainer, its strategies, and the parties of a networked run."""

from .config import SplitConfig
from .in_process import ClientParty, SplitFederation
from .messages import PartParameters
from .networked_client import NetworkedFederation
from .optimization import JointOptimizer, Party
from .run_link import LateError
from .server import RunFailedError, TrainingServer
from .server_model import ServerModel
from .step_plan import SplitSteps, StepPlan
from .trainer import SplitFederatedTrainer, split_federate


__all__ = [
    "ClientParty",
    "JointOptimizer",
    "LateError",
    "NetworkedFederation",
    "PartParameters",
    "Party",
    "RunFailedError",
    "ServerModel",
    "SplitConfig",
    "SplitFederatedTrainer",
    "SplitFederation",
    "SplitSteps",
    "StepPlan",
    "TrainingServer",
    "split_federate",
]
