"""Federated learning for everyone who already uses `transformers`."""

from .adapters import freeze_layers
from .aggregation import (
    AGGREGATIONS,
    Aggregation,
    FedAvg,
    FedNova,
    FedOpt,
    FedProx,
    LocalHook,
    LocalOnly,
    MutualKD,
    Scaffold,
)
from .clients import ClientSpec
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
from .distillation import (
    DISTILLATIONS,
    DSFL,
    MHAT,
    AdaFD,
    Cronus,
    Distillation,
    FedAUX,
    FedDF,
    FedDRS,
    FedED,
    FedID,
    FedKD,
    FedMD,
    text_generation,
)
from .messages.ledger import Ledger
from .messages.validation import RoundFailedError
from .postprocessing import ClipUpdate, Postprocessor
from .server.callbacks import AggregationCallback, DistillationCallback, FederatedCallback, ServerState
from .split import SplitModel
from .split_training import SplitConfig, SplitFederatedTrainer, split_federate
from .trainer.federate import FederatedTrainer, federate


__version__ = "0.1.0"

__all__ = [
    "AGGREGATIONS",
    "DISTILLATIONS",
    "DSFL",
    "MHAT",
    "AdaFD",
    "Aggregation",
    "AggregationCallback",
    "ClientSpec",
    "ClipUpdate",
    "Cronus",
    "DatasetSource",
    "Distillation",
    "DistillationCallback",
    "FeatureClusterPartitioner",
    "FedAUX",
    "FedAvg",
    "FedDF",
    "FedDRS",
    "FedED",
    "FedID",
    "FedKD",
    "FedMD",
    "FedNova",
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
    "LocalOnly",
    "MultiDomainPartitioner",
    "MutualKD",
    "NaturalPartitioner",
    "NestedPartitioner",
    "PerClassDirichletPartitioner",
    "Postprocessor",
    "QuantityDirichletPartitioner",
    "RoundFailedError",
    "Scaffold",
    "ServerState",
    "SplitConfig",
    "SplitFederatedTrainer",
    "SplitModel",
    "federate",
    "freeze_layers",
    "split_federate",
    "split_for_distillation",
    "text_generation",
]
