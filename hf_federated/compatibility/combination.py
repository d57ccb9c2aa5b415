"""`Combination`: the parts of a federation, in which the rules look for features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import TrainingArguments

from ..aggregation import Aggregation, FedAvg, LocalOnly
from ..clients.participants import Participants
from ..config import FederatedConfig
from ..distillation import Distillation
from ..engines import Engine, LocalEngine
from ..methods import Method
from ..postprocessing import Postprocessor
from ..secure_aggregation import SecureAggregation
from ..server.collectors import SynchronousCollector, UpdateCollector


@dataclass(frozen=True, kw_only=True)
class Combination:
    """
    The parts of a federation. The defaults work with everything.

    Args:
        config ([`FederatedConfig`], *optional*): The configuration.
        args (`TrainingArguments`, *optional*): The training arguments.
        aggregation ([`Aggregation`], *optional*): The averaging algorithm that the user set.
        distillation ([`Distillation`], *optional*): The distillation algorithm.
        postprocessors (`Sequence[Postprocessor]`, *optional*): The steps that the user passed.
        collector ([`~hf_federated.server.collectors.UpdateCollector`], *optional*): Obtains the updates of a round.
        engine ([`Engine`], *optional*): Runs the clients.
        num_processes (`int`, *optional*, defaults to `1`): Number of processes of the launch.
        is_sharded (`bool`, *optional*, defaults to `False`): Whether FSDP2 divides the model over the processes.
        participants ([`~hf_federated.clients.participants.Participants`], *optional*): The models of the clients. By
            default they are not known.
        num_examples (`Mapping[str, int | None]`, *optional*): Number of training examples by client, `None` for a
            stream. Empty if the clients are on other machines.
        secure_aggregation ([`~hf_federated.secure_aggregation.SecureAggregation`], *optional*): The protocol.
        reports_anomalies (`bool`, *optional*, defaults to `False`): Whether there is an [`AnomalyReport`].
        model (`torch.nn.Module`, *optional*): The server's model.
        data_collator (`Callable`, *optional*): Forms the batches. By default it is not known.

    Example:

    ```python
    >>> from hf_federated import FedDF, FedNova, MHAT
    >>> from hf_federated.compatibility import Combination, find_rule

    >>> find_rule(Combination(aggregation=FedNova(), distillation=FedDF()))
    >>> find_rule(Combination(aggregation=FedNova(), distillation=MHAT())).alternative
    'Leave `aggregation` out.'
    ```
    """

    config: FederatedConfig = field(default_factory=FederatedConfig)
    args: TrainingArguments | None = None
    aggregation: Aggregation = field(default_factory=FedAvg)
    distillation: Distillation | None = None
    postprocessors: Sequence[Postprocessor] = ()
    collector: UpdateCollector = field(default_factory=SynchronousCollector)
    engine: Engine = field(default_factory=LocalEngine)
    num_processes: int = 1
    is_sharded: bool = False
    participants: Participants | None = None
    num_examples: Mapping[str, int | None] = field(default_factory=dict)
    secure_aggregation: SecureAggregation | None = None
    reports_anomalies: bool = False
    model: nn.Module | None = None
    data_collator: Callable[[list[Any]], Any] | None = None

    @property
    def averaging(self) -> Aggregation:
        """The averaging algorithm that runs. With a distillation of predictions, there is nothing to average."""
        averages = self.distillation is None or self.distillation.returns_parameters
        return self.aggregation if averages else LocalOnly()

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods of a round, in order."""
        return (self.averaging,) if self.distillation is None else (self.averaging, self.distillation)

    @property
    def keep_local(self) -> Any:
        """The tensors that clients keep, as the averaging algorithm or the configuration selects them."""
        own = self.aggregation.keep_local
        return self.config.keep_local if own is None else own

    @property
    def trained(self) -> list[str]:
        """Names of the trainable parameters."""
        parameters = () if self.model is None else self.model.named_parameters()
        return [name for name, parameter in parameters if parameter.requires_grad]
