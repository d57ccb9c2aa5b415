"""
Federated learning for everyone who already uses `transformers`.

A public name is imported on first use, so that `from hf_federated import FederatedDataset` imports neither models nor
the trainer.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .adapters import freeze_layers
    from .aggregation import (
        AGGREGATIONS,
        Aggregation,
        CenteredClipping,
        CoordinateMedian,
        FedAvg,
        FedExP,
        FedNova,
        FedOpt,
        FedPer,
        FedProx,
        FLTrust,
        GeometricMedian,
        Krum,
        LocalOnly,
        MutualKD,
        NormBoundedMean,
        RobustAggregation,
        Scaffold,
        TrimmedMean,
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
        DistillationPart,
        FedAUX,
        FedDF,
        FedDRS,
        FedED,
        FedID,
        FedKD,
        FedMD,
        text_generation,
    )
    from .engines import NetworkEngine
    from .messages.ledger import Ledger
    from .methods import ClientPart, Method, Round
    from .postprocessing import ClipUpdate, GaussianNoise, Postprocessor, QuantizeChanges
    from .server.anomaly_report import AnomalyReport
    from .server.callbacks import AggregationCallback, DistillationCallback, FederatedCallback
    from .split import SplitModel
    from .split_training import SplitConfig, SplitFederatedTrainer, split_federate
    from .trainer.federate import FederatedTrainer, federate
    from .utils.errors import RoundFailedError


__version__ = "0.1.0"

__all__ = [
    "AGGREGATIONS",
    "DISTILLATIONS",
    "DSFL",
    "MHAT",
    "AdaFD",
    "Aggregation",
    "AggregationCallback",
    "AnomalyReport",
    "CenteredClipping",
    "ClientPart",
    "ClientSpec",
    "ClipUpdate",
    "CoordinateMedian",
    "Cronus",
    "DatasetSource",
    "Distillation",
    "DistillationCallback",
    "DistillationPart",
    "FLTrust",
    "FeatureClusterPartitioner",
    "FedAUX",
    "FedAvg",
    "FedDF",
    "FedDRS",
    "FedED",
    "FedExP",
    "FedID",
    "FedKD",
    "FedMD",
    "FedNova",
    "FedOpt",
    "FedPer",
    "FedProx",
    "FederatedCallback",
    "FederatedConfig",
    "FederatedDataset",
    "FederatedDatasetDict",
    "FederatedTrainer",
    "GaussianNoise",
    "GeometricMedian",
    "IidPartitioner",
    "Krum",
    "LabelDirichletPartitioner",
    "Ledger",
    "LocalOnly",
    "Method",
    "MultiDomainPartitioner",
    "MutualKD",
    "NaturalPartitioner",
    "NestedPartitioner",
    "NetworkEngine",
    "NormBoundedMean",
    "PerClassDirichletPartitioner",
    "Postprocessor",
    "QuantityDirichletPartitioner",
    "QuantizeChanges",
    "RobustAggregation",
    "Round",
    "RoundFailedError",
    "Scaffold",
    "SplitConfig",
    "SplitFederatedTrainer",
    "SplitModel",
    "TrimmedMean",
    "federate",
    "freeze_layers",
    "split_federate",
    "split_for_distillation",
    "text_generation",
]

# The module of each public name. Type checkers and editors read the imports above.
_MODULES = {
    "AGGREGATIONS": ".aggregation",
    "DISTILLATIONS": ".distillation",
    "DSFL": ".distillation",
    "MHAT": ".distillation",
    "AdaFD": ".distillation",
    "Aggregation": ".aggregation",
    "AggregationCallback": ".server.callbacks",
    "AnomalyReport": ".server.anomaly_report",
    "CenteredClipping": ".aggregation",
    "ClientPart": ".methods",
    "ClientSpec": ".clients",
    "ClipUpdate": ".postprocessing",
    "CoordinateMedian": ".aggregation",
    "Cronus": ".distillation",
    "DatasetSource": ".data",
    "Distillation": ".distillation",
    "DistillationCallback": ".server.callbacks",
    "DistillationPart": ".distillation",
    "FLTrust": ".aggregation",
    "FeatureClusterPartitioner": ".data",
    "FedAUX": ".distillation",
    "FedAvg": ".aggregation",
    "FedDF": ".distillation",
    "FedDRS": ".distillation",
    "FedED": ".distillation",
    "FedExP": ".aggregation",
    "FedID": ".distillation",
    "FedKD": ".distillation",
    "FedMD": ".distillation",
    "FedNova": ".aggregation",
    "FedOpt": ".aggregation",
    "FedPer": ".aggregation",
    "FedProx": ".aggregation",
    "FederatedCallback": ".server.callbacks",
    "FederatedConfig": ".config",
    "FederatedDataset": ".data",
    "FederatedDatasetDict": ".data",
    "FederatedTrainer": ".trainer.federate",
    "GaussianNoise": ".postprocessing",
    "GeometricMedian": ".aggregation",
    "IidPartitioner": ".data",
    "Krum": ".aggregation",
    "LabelDirichletPartitioner": ".data",
    "Ledger": ".messages.ledger",
    "LocalOnly": ".aggregation",
    "Method": ".methods",
    "MultiDomainPartitioner": ".data",
    "MutualKD": ".aggregation",
    "NaturalPartitioner": ".data",
    "NestedPartitioner": ".data",
    "NetworkEngine": ".engines",
    "NormBoundedMean": ".aggregation",
    "PerClassDirichletPartitioner": ".data",
    "Postprocessor": ".postprocessing",
    "QuantityDirichletPartitioner": ".data",
    "QuantizeChanges": ".postprocessing",
    "RobustAggregation": ".aggregation",
    "Round": ".methods",
    "RoundFailedError": ".utils.errors",
    "Scaffold": ".aggregation",
    "SplitConfig": ".split_training",
    "SplitFederatedTrainer": ".split_training",
    "SplitModel": ".split",
    "TrimmedMean": ".aggregation",
    "federate": ".trainer.federate",
    "freeze_layers": ".adapters",
    "split_federate": ".split_training",
    "split_for_distillation": ".data",
    "text_generation": ".distillation",
}
# Names of version 0.1, which will be removed in 1.0.
_PREVIOUS_MODULES = {"LocalHook": ".methods.previous_release", "ServerState": ".server.previous_release"}


def __getattr__(name: str) -> Any:
    """Import a public name or a submodule on first use ([PEP 562](https://peps.python.org/pep-0562/))."""
    module = _MODULES.get(name) or _PREVIOUS_MODULES.get(name)
    if module is None:
        if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
