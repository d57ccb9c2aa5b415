"""`FederationSetup`: the checked arguments of a federated trainer and the algorithms that they name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import nn
from transformers import Trainer, TrainerCallback

from ..adapters import Exchange, freeze_layers
from ..aggregation import Aggregation, build_aggregation
from ..clients import ClientSampler
from ..clients.model_factory import check_given_models
from ..clients.participants import Participants
from ..compatibility import Combination, check_combination
from ..compatibility.features import decodes
from ..config import FederatedConfig
from ..data import FederatedDataset
from ..distillation import Distillation, build_distillation
from ..distributed.launch import check_launch
from ..distributed.process_group import ProcessGroup, process_group
from ..engines import Engine, LocalEngine, RankEngine
from ..methods import Method
from ..postprocessing import Postprocessor, SendChanges, exchange_codec_steps, exchange_dtype
from ..secure_aggregation import SecureAggregation
from ..secure_aggregation.credentials import Credentials
from ..server import AggregationCallback, AnomalyReport, DistillationCallback, LiveReport, UpdateCollector
from ..server.collectors import SecureCollector
from ..utils.algorithm_names import COLLECTOR_NAMES
from ..utils.shards import Shards
from .checkpoint import WHOLE, ShardFiles
from .checks.arguments import check_arguments, is_sharded, resolve_federation
from .checks.data import check_clients, sample_clients
from .checks.first_round import check_first_round
from .checks.participants import check_participants, check_predictions, check_server_dataset
from .checks.secure_aggregation import build_secure_aggregation, check_cohort, check_weights


T = TypeVar("T")


@dataclass(kw_only=True)
class FederationSetup:
    """
    The complete and checked arguments of a federated trainer.

    Args:
        trainer (`transformers.Trainer`): The federated trainer.
        arguments (`dict[str, Any]`): The constructor arguments of the trainer's class, by name.
        config ([`FederatedConfig`]): The configuration with all fields filled in.
        engine ([`Engine`]): The engine that runs the clients.
        clients ([`FederatedDataset`]): Training examples by client.
        eval_clients ([`FederatedDataset`], *optional*): Evaluation examples by client.
        train_datasets (`Mapping[str, Dataset]`): Training examples by client, prepared for the trainer.
        eval_datasets (`Mapping[str, Dataset]`, *optional*): Evaluation examples by client, prepared for the trainer.
        server_datasets (`Mapping[str, Dataset]`): The server's own examples, prepared for the trainer, under
            the name `"server"`. Empty if the server has no examples.
        participants ([`Participants`]): Public examples, the server's examples, and clients with their own models,
            tokenizers or training arguments.
        aggregation ([`Aggregation`]): The averaging algorithm.
        distillation ([`Distillation`], *optional*): The distillation algorithm.
        collector ([`~hf_federated.server.collectors.UpdateCollector`]): Obtains the updates of a round.
        postprocessors (`list[Postprocessor]`): Steps between a client's training and the aggregate.
        client_callbacks (`list[TrainerCallback]`): Callbacks that run inside clients.
        sampler ([`ClientSampler`]): Draws the cohort of a round.
        processes ([`~hf_federated.distributed.process_group.ProcessGroup`]): The processes of the launch.
        exchange ([`Exchange`]): Reads and writes the exchanged parameters of the model.
        secure_aggregation ([`SecureAggregation`], *optional*): The protocol of secure aggregation.
        credentials ([`~hf_federated.secure_aggregation.credentials.Credentials`], *optional*): The identity of a
            client on another machine, for secure aggregation.
        deferred_errors (`list[ValueError]`): Errors of a federation of one client, which `train()` raises. A client of
            a federation on several machines does not train alone.
    """

    trainer: Trainer
    arguments: dict[str, Any]
    config: FederatedConfig
    engine: Engine
    clients: FederatedDataset
    eval_clients: FederatedDataset | None
    train_datasets: Mapping[str, Any]
    eval_datasets: Mapping[str, Any] | None
    server_datasets: Mapping[str, Any]
    participants: Participants
    aggregation: Aggregation
    distillation: Distillation | None
    collector: UpdateCollector
    postprocessors: list[Postprocessor]
    client_callbacks: list[TrainerCallback]
    sampler: ClientSampler
    processes: ProcessGroup
    exchange: Exchange
    secure_aggregation: SecureAggregation | None = None
    credentials: Credentials | None = None
    deferred_errors: list[ValueError] = field(default_factory=list)

    @classmethod
    def build(
        cls,
        *,
        trainer: Trainer,
        config: FederatedConfig | None,
        engine: Engine | None,
        clients: FederatedDataset,
        eval_clients: FederatedDataset | None,
        participants: Participants,
        user_callbacks: Sequence[TrainerCallback],
        postprocessors: Sequence[Postprocessor],
        **fields: Any,
    ) -> FederationSetup:
        """
        Complete and check the arguments of a trainer.

        Args:
            trainer (`transformers.Trainer`): The federated trainer, constructed as its parent class.
            config ([`FederatedConfig`], *optional*): The user's configuration.
            engine ([`Engine`], *optional*): The user's engine.
            clients, eval_clients, participants, postprocessors: The arguments that the user passed.
            user_callbacks (`Sequence[TrainerCallback]`): The user's callbacks. An [`AggregationCallback`] among them
                replaces `aggregation` of the configuration.
            fields: `arguments`, `train_datasets`, `eval_datasets`, `server_datasets` and `client_callbacks`.

        Raises:
            ValueError: If an argument or a combination is not supported.
        """
        args = trainer.args
        resolved = resolve_federation(config, args)
        launched = process_group()
        check_launch(launched.world_size)
        launched.initialize(args.ddp_timeout)
        if engine is None:
            engine = LocalEngine() if launched.world_size == 1 else RankEngine()
        engine.check_launch(launched.world_size)
        distillation = _find_distillation(user_callbacks, resolved)
        has_report = any(isinstance(callback, AnomalyReport) for callback in user_callbacks)
        secure = build_secure_aggregation(resolved)
        combination = Combination(
            config=resolved,
            args=args,
            aggregation=_find_aggregation(user_callbacks, resolved),
            distillation=distillation,
            postprocessors=postprocessors,
            collector=COLLECTOR_NAMES.build(resolved.collector, resolved.collector_kwargs, UpdateCollector),
            engine=engine,
            num_processes=launched.world_size,
            is_sharded=is_sharded(trainer),
            participants=participants,
            num_examples={} if clients.is_remote else clients.num_rows,
            secure_aggregation=secure,
            reports_anomalies=has_report or resolved.report_anomalies,
            model=trainer.model,
            data_collator=trainer.data_collator,
        )
        check_combination(combination)
        aggregation = combination.averaging
        resolved = replace(resolved, keep_local=combination.keep_local)
        if resolved.report_anomalies and not has_report:
            trainer.add_callback(AnomalyReport())
        if resolved.live_report and not any(isinstance(callback, LiveReport) for callback in user_callbacks):
            trainer.add_callback(LiveReport())
        check_arguments(trainer, resolved, aggregation)
        check_participants(aggregation, distillation, participants, clients, args)
        check_given_models(participants, trainer.model)
        deferred_errors: list[ValueError] = []

        def check_server(check: Callable[[], T], otherwise: T) -> T:
            """Check what only the server needs. A process with one client may be a client on another machine."""
            try:
                return check()
            except ValueError as error:
                if len(clients) > 1 or clients.is_remote:
                    raise
                deferred_errors.append(error)
                return otherwise

        alone = ClientSampler(list(clients), 1.0, resolved.federation_seed or 0)
        sampler = check_server(lambda: sample_clients(clients, resolved), alone)
        check_server(lambda: check_server_dataset(aggregation, distillation, participants), None)
        check_clients(trainer, clients, eval_clients, resolved, participants.task is not None, distillation)
        _check_model(trainer, resolved, distillation, participants)
        check_first_round(trainer, resolved, clients, participants.task)
        check_weights(aggregation, secure)
        if secure is not None:
            check_server(functools.partial(check_cohort, secure, sampler.num_sampled), None)
        setup = cls(
            trainer=trainer,
            config=resolved,
            engine=engine,
            clients=clients,
            eval_clients=eval_clients,
            participants=participants,
            aggregation=aggregation,
            distillation=distillation,
            collector=combination.collector if secure is None else SecureCollector(secure),
            secure_aggregation=secure,
            postprocessors=[*postprocessors, *algorithm_postprocessors(aggregation, resolved)],
            sampler=sampler,
            processes=launched,
            # A wrong `exchange` fails here instead of in the first round.
            exchange=Exchange(trainer.model, resolved.exchange, resolved.keep_local, aggregation.changes_base),
            deferred_errors=deferred_errors,
            **fields,
        )
        aggregation.check_model(trainer.model, participants.peft_configs)
        check_server(lambda: aggregation.check_exchange(setup.exchange.tensors, sampler.num_sampled), None)
        setup.collector.check(engine, setup.methods, resolved, resolved.min_clients_of(sampler.num_sampled))
        for method in setup.methods:
            method.check_engine(type(engine).__name__)
        return setup

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods of a round, in order."""
        return (self.aggregation,) if self.distillation is None else (self.aggregation, self.distillation)

    @property
    def sends_parameters(self) -> bool:
        """Whether the server sends parameters to the clients, or the clients to the server."""
        by_distillation = self.distillation is not None and self.distillation.sends_parameters
        return self.aggregation.exchanges_parameters or by_distillation

    @property
    def hides_counts(self) -> bool:
        """Whether clients on other machines hide their numbers of examples: the server needs those of a sum only."""
        return self.config.secure_aggregation is not None

    @property
    def num_rounds(self) -> int:
        """Number of rounds of the run."""
        return self.config.num_rounds or 1

    @property
    def seed(self) -> int:
        """Seed of client sampling and of the clients' randomness."""
        return self.config.federation_seed or 0

    @property
    def is_spread(self) -> bool:
        """Whether several processes share the work."""
        return self.processes.world_size > 1

    @property
    def spreads_clients(self) -> bool:
        """Whether each process trains whole clients, independently of the other processes."""
        return self.is_spread and self.config.parallelism == "clients"

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 divides the model over the processes."""
        return self.is_spread and is_sharded(self.trainer)

    @property
    def files(self) -> ShardFiles:
        """The files of a checkpoint that this process reads and writes."""
        return ShardFiles(self.processes.rank, self.processes.world_size) if self.is_sharded else WHOLE

    def independent(self, as_main: bool = False) -> AbstractContextManager[None]:
        """With `parallelism="clients"`, hide the other processes from the parent trainer."""
        return self.processes.independent(as_main) if self.spreads_clients else nullcontext()

    def freeze(self, model: nn.Module) -> None:
        """Freeze the parameters that `freeze` of the configuration names."""
        if self.config.freeze is not None:
            freeze_layers(model, self.config.freeze)


def shards_of(exchange: Exchange, processes: ProcessGroup) -> Shards | None:
    """Return how FSDP2 divides the exchanged tensors over the processes, or `None` without FSDP2."""
    shapes = exchange.shards.shapes
    return Shards(shapes, processes.sum_, processes.rank) if shapes else None


def _check_model(
    trainer: Trainer, config: FederatedConfig, distillation: Distillation | None, participants: Participants
) -> None:
    """Freeze parameters as `freeze` configures, and check the model against the distillation."""
    if config.freeze is not None:
        freeze_layers(trainer.model, config.freeze)
    if distillation is not None:
        check_predictions(distillation, participants, trainer)
        distillation.check_model(trainer.model)


def _find_distillation(user_callbacks: Sequence[TrainerCallback], config: FederatedConfig) -> Distillation | None:
    """Return the algorithm of the user's callback or of the configuration."""
    given = [callback.algorithm for callback in user_callbacks if isinstance(callback, DistillationCallback)]
    return given[0] if given else build_distillation(config.distillation, config.distillation_kwargs)


def _find_aggregation(user_callbacks: Sequence[TrainerCallback], config: FederatedConfig) -> Aggregation:
    """Return the algorithm of the user's callback or of the configuration."""
    given = [callback.algorithm for callback in user_callbacks if isinstance(callback, AggregationCallback)]
    return given[0] if given else build_aggregation(config.aggregation, config.aggregation_kwargs)


def algorithm_postprocessors(algorithm: Aggregation, config: FederatedConfig) -> list[Postprocessor]:
    """Return the postprocessors of the algorithm, `exchange_dtype` and `exchange_codec`, which follow the user's."""
    dtype, steps = exchange_dtype(config.exchange_dtype), exchange_codec_steps(config)
    if config.secure_aggregation is not None:
        # A client sends integers, which no further step encodes.
        return [step for step in algorithm.postprocessors() if not decodes(step)] + steps
    return [*algorithm.postprocessors(), *steps] if dtype is None else [SendChanges(dtype)]
