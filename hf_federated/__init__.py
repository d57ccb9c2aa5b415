"""
Federated learning for everyone who already uses `transformers`.

A public name is imported on first use, so that `from hf_federated import FederatedDataset` imports neither models nor
the trainer.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .adapters import freeze_layers as freeze_layers
    from .aggregation import AGGREGATIONS as AGGREGATIONS
    from .aggregation import Aggregation as Aggregation
    from .aggregation import CenteredClipping as CenteredClipping
    from .aggregation import CoordinateMedian as CoordinateMedian
    from .aggregation import FedAvg as FedAvg
    from .aggregation import FedExLoRA as FedExLoRA
    from .aggregation import FedExP as FedExP
    from .aggregation import FedIT as FedIT
    from .aggregation import FedNova as FedNova
    from .aggregation import FedOpt as FedOpt
    from .aggregation import FedPer as FedPer
    from .aggregation import FedProx as FedProx
    from .aggregation import FedSVD as FedSVD
    from .aggregation import FFALoRA as FFALoRA
    from .aggregation import FLTrust as FLTrust
    from .aggregation import GeometricMedian as GeometricMedian
    from .aggregation import Krum as Krum
    from .aggregation import LocalOnly as LocalOnly
    from .aggregation import MutualKD as MutualKD
    from .aggregation import NormBoundedMean as NormBoundedMean
    from .aggregation import RobustAggregation as RobustAggregation
    from .aggregation import RoLoRA as RoLoRA
    from .aggregation import Scaffold as Scaffold
    from .aggregation import StackedLora as StackedLora
    from .aggregation import TrimmedMean as TrimmedMean
    from .clients import ClientSpec as ClientSpec
    from .config import FederatedConfig as FederatedConfig
    from .data import DatasetSource as DatasetSource
    from .data import FeatureClusterPartitioner as FeatureClusterPartitioner
    from .data import FederatedDataset as FederatedDataset
    from .data import FederatedDatasetDict as FederatedDatasetDict
    from .data import IidPartitioner as IidPartitioner
    from .data import LabelDirichletPartitioner as LabelDirichletPartitioner
    from .data import MultiDomainPartitioner as MultiDomainPartitioner
    from .data import NaturalPartitioner as NaturalPartitioner
    from .data import NestedPartitioner as NestedPartitioner
    from .data import PerClassDirichletPartitioner as PerClassDirichletPartitioner
    from .data import QuantityDirichletPartitioner as QuantityDirichletPartitioner
    from .data import split_for_distillation as split_for_distillation
    from .distillation import DISTILLATIONS as DISTILLATIONS
    from .distillation import DSFL as DSFL
    from .distillation import MHAT as MHAT
    from .distillation import AdaFD as AdaFD
    from .distillation import Cronus as Cronus
    from .distillation import Distillation as Distillation
    from .distillation import DistillationPart as DistillationPart
    from .distillation import FedAUX as FedAUX
    from .distillation import FedDF as FedDF
    from .distillation import FedDRS as FedDRS
    from .distillation import FedED as FedED
    from .distillation import FedID as FedID
    from .distillation import FedKD as FedKD
    from .distillation import FedMD as FedMD
    from .distillation import text_generation as text_generation
    from .engines import NetworkEngine as NetworkEngine
    from .messages.ledger import Ledger as Ledger
    from .methods import ClientPart as ClientPart
    from .methods import Method as Method
    from .methods import Round as Round
    from .postprocessing import ClipUpdate as ClipUpdate
    from .postprocessing import GaussianNoise as GaussianNoise
    from .postprocessing import Postprocessor as Postprocessor
    from .postprocessing import QuantizeChanges as QuantizeChanges
    from .secure_aggregation import SECURE_AGGREGATIONS as SECURE_AGGREGATIONS
    from .secure_aggregation import SecAgg as SecAgg
    from .secure_aggregation import SecureAggregation as SecureAggregation
    from .server.anomaly_report import AnomalyReport as AnomalyReport
    from .server.callbacks import AggregationCallback as AggregationCallback
    from .server.callbacks import DistillationCallback as DistillationCallback
    from .server.callbacks import FederatedCallback as FederatedCallback
    from .server.live_report import LiveReport as LiveReport
    from .split import SplitModel as SplitModel
    from .split_training import SplitConfig as SplitConfig
    from .split_training import SplitFederatedTrainer as SplitFederatedTrainer
    from .split_training import split_federate as split_federate
    from .trainer.federate import FederatedTrainer as FederatedTrainer
    from .trainer.federate import federate as federate
    from .utils.errors import RoundFailedError as RoundFailedError


__version__ = "0.1.0"

# The module of each public name. Type checkers and editors read the imports above, and `as` marks a name as public.
_MODULES = {
    "AGGREGATIONS": ".aggregation",
    "DISTILLATIONS": ".distillation",
    "DSFL": ".distillation",
    "MHAT": ".distillation",
    "SECURE_AGGREGATIONS": ".secure_aggregation",
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
    "FFALoRA": ".aggregation",
    "FLTrust": ".aggregation",
    "FeatureClusterPartitioner": ".data",
    "FedAUX": ".distillation",
    "FedAvg": ".aggregation",
    "FedDF": ".distillation",
    "FedDRS": ".distillation",
    "FedED": ".distillation",
    "FedExLoRA": ".aggregation",
    "FedExP": ".aggregation",
    "FedID": ".distillation",
    "FedIT": ".aggregation",
    "FedKD": ".distillation",
    "FedMD": ".distillation",
    "FedNova": ".aggregation",
    "FedOpt": ".aggregation",
    "FedPer": ".aggregation",
    "FedProx": ".aggregation",
    "FedSVD": ".aggregation",
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
    "LiveReport": ".server.live_report",
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
    "RoLoRA": ".aggregation",
    "RobustAggregation": ".aggregation",
    "Round": ".methods",
    "RoundFailedError": ".utils.errors",
    "Scaffold": ".aggregation",
    "SecAgg": ".secure_aggregation",
    "SecureAggregation": ".secure_aggregation",
    "SplitConfig": ".split_training",
    "SplitFederatedTrainer": ".split_training",
    "SplitModel": ".split",
    "StackedLora": ".aggregation",
    "TrimmedMean": ".aggregation",
    "federate": ".trainer.federate",
    "freeze_layers": ".adapters",
    "split_federate": ".split_training",
    "split_for_distillation": ".data",
    "text_generation": ".distillation",
}
if not TYPE_CHECKING:
    __all__ = list(_MODULES)

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
    return sorted({*globals(), *_MODULES})
