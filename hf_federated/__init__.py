"""Federated learning for everyone who already uses `transformers`."""

from .adapters import freeze_layers
from .aggregation import AGGREGATIONS, Aggregation, FedAvg, FedOpt, FedProx, LocalHook, Scaffold
from .callbacks import AggregationCallback, FederatedCallback, ServerState
from .config import FederatedConfig
from .data import (
    DatasetSource,
    FeatureClusterPartitioner,
    FederatedDataset,
    FederatedDatasetDict,
    IidPartitioner,
    LabelDirichletPartitioner,
    MultiDomainPartitioner,
    NaturalPartitioner,
    NestedPartitioner,
    PerClassDirichletPartitioner,
    QuantityDirichletPartitioner,
    split_for_distillation,
)
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
    "FeatureClusterPartitioner",
    "FedAvg",
    "FedOpt",
    "FedProx",
    "FederatedCallback",
    "FederatedConfig",
    "FederatedDataset",
    "FederatedDatasetDict",
    "FederatedTrainer",
    "IidPartitioner",
    "LabelDirichletPartitioner",
    "Ledger",
    "LocalHook",
    "MultiDomainPartitioner",
    "NaturalPartitioner",
    "NestedPartitioner",
    "PerClassDirichletPartitioner",
    "Postprocessor",
    "QuantityDirichletPartitioner",
    "RoundFailedError",
    "Scaffold",
    "ServerState",
    "federate",
    "freeze_layers",
    "split_for_distillation",
]
