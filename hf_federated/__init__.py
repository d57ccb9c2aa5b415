"""Federated learning for everyone who already uses `transformers`."""

from .adapters import freeze_layers
from .aggregation import AGGREGATIONS, Aggregation, FedAvg, FedOpt, FedProx, LocalHook, Scaffold
from .callbacks import AggregationCallback, FederatedCallback, ServerState
from .config import FederatedConfig
from .data import DatasetSource, FederatedDataset, FederatedDatasetDict, IidPartitioner, split_for_distillation
from .ledger import Ledger
from .postprocessing import ClipUpdate, Postprocessor
from .rounds import RoundFailedError
from .trainer import FederatedTrainer, federate


__version__ = "0.1.0.dev0"

__all__ = [
    "AGGREGATIONS",
    "Aggregation",
    "AggregationCallback",
    "ClipUpdate",
    "DatasetSource",
    "FedAvg",
    "FedOpt",
    "FedProx",
    "FederatedCallback",
    "FederatedConfig",
    "FederatedDataset",
    "FederatedDatasetDict",
    "FederatedTrainer",
    "IidPartitioner",
    "Ledger",
    "LocalHook",
    "Postprocessor",
    "RoundFailedError",
    "Scaffold",
    "ServerState",
    "federate",
    "freeze_layers",
    "split_for_distillation",
]
