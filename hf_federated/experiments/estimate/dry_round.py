"""Dry rounds: the messages of a federation, and their bytes, without training.

The round loop, the methods, the postprocessors and the collector of a run exchange real messages with the client
halves of the methods. Models, examples and everything that is computed from them are replaced (`dry_parties.py`). The
ledger of the engine has the bytes.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.utils import logging

from hf_federated.clients import ClientSampler, RowLimit
from hf_federated.distributed.process_group import process_group
from hf_federated.engines import EngineContext, LocalEngine
from hf_federated.experiments.estimate.dry_parties import (
    DryFederation,
    DryServer,
    DryStudent,
    DryWorker,
)
from hf_federated.experiments.estimate.dry_secure_sums import DryProtocol
from hf_federated.experiments.estimate.results import Exchange
from hf_federated.experiments.estimate.step_cost import StepCost
from hf_federated.messages import Message, kinds_of
from hf_federated.messages.ledger import Ledger
from hf_federated.messages.secure_aggregation import SECURE_MESSAGES
from hf_federated.messages.serialization import packed_size
from hf_federated.methods import Method
from hf_federated.postprocessing import exchange_dtype
from hf_federated.server import CollectorContext, FitSettings, RoundLoop, RoundProgress, StepMemories, UpdateCollector
from hf_federated.server.bound_update import BoundUpdate
from hf_federated.server.collectors import SecureCollector
from hf_federated.utils.algorithm_names import COLLECTOR_NAMES


logger = logging.get_logger(__name__)


class DryRoundError(ValueError):
    """
    A dry round could not obtain a message, because the code that builds it needs training or values of tensors.

    Args:
        cause (`str`): What happened.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(
            f"{cause} A dry round has no training, and an estimate of a recipe has no values of tensors. Run one "
            "round: the ledger of the trainer has the bytes."
        )


def dry_round(trainer: Any, num_rounds: int = 1) -> Ledger:
    """
    Compute the bytes of the first rounds of a trainer without training.

    The tensors of the messages have no values. If a method or a postprocessor needs values, the rounds run again with
    the values of the model, and a training adds noise to them. Evaluations between rounds are not counted.

    Args:
        trainer ([`FederatedTrainer`]): The trainer. It is not changed.
        num_rounds (`int`, *optional*, defaults to `1`): Number of rounds.

    Returns:
        [`~hf_federated.messages.ledger.Ledger`]: Bytes by round, client and direction. They are those of a run, except
        where a size depends on the training: the digits of a number of tokens or of an integer setting can change a
        message by 8 bytes, and the updates of [`MutualKD`] have the size without compression.

    Raises:
        DryRoundError: If a client half needs a real training for its reply, an update is rejected, or clients predict
            words or tokens, whose number depends on the tokenizers.
    """
    try:
        run = dry_run(describe_trainer(trainer), num_rounds)
        if not run.without_state:
            return run.ledger
    except DryRoundError as error:
        logger.info(f"The dry round runs again with values. {error}")
    return dry_run(describe_trainer(trainer, has_values=True), num_rounds).ledger


def describe_trainer(trainer: Any, has_values: bool = False) -> DryFederation:
    """
    Describe the federation of a trainer. Its model is a copy, and its methods are new objects with the same arguments.

    Args:
        trainer ([`FederatedTrainer`]): The trainer.
        has_values (`bool`, *optional*, defaults to `False`): Whether the copy of the model has values. By default, it
            is on the meta device.

    Raises:
        DryRoundError: If clients predict words or tokens.
    """
    setup, model = trainer._federation_setup, trainer.model
    task, public = setup.participants.task, setup.participants.public_dataset
    if setup.distillation is not None and task is not None and task.prediction_unit != "row":
        raise DryRoundError(f"The number of {task.prediction_unit}s of the public examples is not known.")
    num_public = 0 if public is None else len(public)
    memo: dict[int, Any] = {}
    if not has_values:
        for item in (*model.parameters(), *model.buffers()):
            empty = item.detach().to("meta").requires_grad_(item.requires_grad)
            memo[id(item)] = nn.Parameter(empty, item.requires_grad) if isinstance(item, nn.Parameter) else empty
    return DryFederation(
        config=setup.config,
        args=trainer.args,
        model=copy.deepcopy(model, memo),
        aggregation=setup.aggregation.on_client(),
        distillation=None if setup.distillation is None else setup.distillation.on_client(),
        postprocessors=copy.deepcopy(setup.postprocessors),
        num_examples=setup.clients.num_rows,
        peft_configs=setup.participants.peft_configs,
        num_public=num_public,
        num_positions=num_public,
        num_classes=0 if setup.distillation is None else model.config.num_labels,
        secure_aggregation=None if setup.secure_aggregation is None else DryProtocol(setup.secure_aggregation),
    )


@dataclass(frozen=True)
class DryRun:
    """
    The result of dry rounds.

    Args:
        ledger ([`~hf_federated.messages.ledger.Ledger`]): Bytes by round, client and direction.
        exchanges (`dict[int, dict[str, Counter[Exchange]]]`): Numbers of equal exchanges, by round and client.
        clients ([`DryWorker`]): The clients, which count their batches.
        server ([`DryStudent`], *optional*): The model of the server of a distillation, which counts its batches.
        state_bytes (`int`): Bytes of the state that the averaging algorithm keeps between rounds.
        without_state (`set[str]`): Names of methods whose new state needs values of tensors. The rounds after the
            first one have the first state.
    """

    ledger: Ledger
    exchanges: dict[int, dict[str, Counter[Exchange]]]
    clients: DryWorker
    server: DryStudent | None
    state_bytes: int
    without_state: set[str]

    def client_flops(self, cost: StepCost) -> int:
        """Return the operations of the client with the most work in a round, for the cost of a batch."""
        # All clients have the same public examples.
        public = 0 if self.clients.student is None else self.clients.student.flops(cost)
        return self.clients.num_batches * cost.flops + public // sum(map(len, self.exchanges.values()))

    def server_flops(self, cost: StepCost) -> int:
        """Return the operations of the server's distillation in a round. Averaging needs none that count."""
        return 0 if self.server is None else self.server.flops(cost) // len(self.exchanges)


def dry_run(federation: DryFederation, num_rounds: int = 1) -> DryRun:
    """
    Run the first rounds of a federation without training.

    Args:
        federation ([`DryFederation`]): The federation.
        num_rounds (`int`, *optional*, defaults to `1`): Number of rounds.

    Raises:
        DryRoundError: If a message cannot be obtained: a client half or the server half needs a training or values of
            tensors, or an update is rejected. The message names the cause.
        ValueError: If the configuration is invalid.
    """
    engine, without_state = RecordingEngine(), set[str]()
    secure = () if federation.secure_aggregation is None else SECURE_MESSAGES
    kinds = kinds_of(*(kind for method in federation.methods for kind in method.messages), *secure)
    engine.start(EngineContext(lambda: DryWorker(federation), {}, "data", process_group(), kinds=kinds))
    config = federation.config
    sampler = ClientSampler(list(federation.num_examples), config.clients_per_round, config.federation_seed or 0)
    loop = _build_loop(federation, engine, sampler)
    server = _start_methods(federation, engine.worker, sampler.num_sampled, without_state)
    for number in range(num_rounds):
        try:
            loop.run(number)
        except ValueError:
            raise
        except Exception as error:
            raise DryRoundError(f"{type(error).__name__}: {error}") from error
        for reason in loop.round.rejected.values():
            raise DryRoundError(reason)
    state = federation.aggregation.state_dict()
    state_bytes = packed_size(state) if state else 0
    return DryRun(engine.ledger, engine.exchanges, engine.worker, server, state_bytes, without_state)


class RecordingEngine(LocalEngine):
    """
    Answers each message with the client halves of the methods, and records the exchanges.

    Attributes:
        exchanges (`dict[int, dict[str, Counter[Exchange]]]`): Numbers of equal exchanges, by round and client.
    """

    worker: DryWorker

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: dict[int, dict[str, Counter[Exchange]]] = {}

    def _deliver(self, message: Message) -> Message:
        reply, error = super()._deliver(message), self.worker.last_error
        if error is not None:
            raise DryRoundError(
                f"No reply to the message {message.kind!r}: {type(error).__name__}: {error}"
            ) from error
        bytes_down, bytes_up, number = message.num_bytes, reply.num_bytes, self.worker.trainer.repeats
        counts = self.exchanges.setdefault(message.round, {}).setdefault(message.client_id, Counter())
        counts[Exchange(message.kind, bytes_down, bytes_up)] += number
        # The engine itself records a message once.
        self.ledger.record(message.round, message.client_id, bytes_down * (number - 1), bytes_up * (number - 1))
        return reply


def _build_loop(federation: DryFederation, engine: RecordingEngine, sampler: ClientSampler) -> RoundLoop:
    config, distillation = federation.config, federation.distillation
    returns_state = federation.aggregation.exchanges_parameters
    context = CollectorContext(
        engine=engine,
        fit=FitSettings(
            methods=federation.methods,
            seed=config.federation_seed or 0,
            steps=StepMemories(federation.postprocessors),
            dtype=exchange_dtype(config.exchange_dtype),
            sends_state=returns_state or (distillation is not None and distillation.sends_parameters),
            returns_state=returns_state,
            row_limit=RowLimit(federation.num_examples, config.balance, config.max_rows_per_round),
        ),
        progress=RoundProgress(list, config.num_rounds or 1),
        bound=BoundUpdate(math.inf),
    )
    collector: UpdateCollector
    if federation.secure_aggregation is not None:
        collector = SecureCollector(federation.secure_aggregation)
    else:
        collector = COLLECTOR_NAMES.build(config.collector, config.collector_kwargs, UpdateCollector)
        # A copy, because the configuration of a trainer can contain the collector that the trainer uses.
        collector = type(collector)(**collector.settings())
    collector.check(engine, federation.methods)
    collector.start(context)
    exchange = federation.exchange()
    # A failure is not an update, and a method that trains on the server then raises an error.
    train_on_server: Any = engine.worker.handle
    return RoundLoop(context, collector, sampler, config, exchange.read(), exchange.write, train_on_server)


def _start_methods(
    federation: DryFederation, worker: DryWorker, num_sampled: int, without_state: set[str]
) -> DryStudent | None:
    """Start the methods as for a run. Return the model of the server of a distillation."""
    config, num_clients, server = federation.config, len(federation.num_examples), None
    num_rounds = config.num_rounds or 1
    federation.aggregation.check_model(federation.model, federation.peft_configs)
    federation.aggregation.setup(num_rounds, num_clients)
    if federation.distillation is not None:
        server, exchange = DryStudent(worker.trainer, federation), federation.exchange()
        sizes = config.federation_seed or 0, num_rounds, exchange, num_clients, num_sampled
        federation.distillation.start(DryServer(server, *sizes), _refuse_main)
    for method in federation.methods:
        _skip_values(method, without_state)
    return server


class _NoValueError(RuntimeError):
    """A value is not known in a dry round."""


def _refuse_main(label: str, find: Callable[[], Any]) -> Any:
    """Refuse what only the main process computes, such as an answer of a language model."""
    raise _NoValueError(f"The {label} are not computed in a dry round.")


# Hooks that compute with the values of tensors and need no reply: the result without values, by name.
_VALUES: dict[str, Callable[..., Any]] = {
    "check_extra": lambda extra: None,
    "check": lambda round, update: None,
    "accumulate": lambda accumulator, update: None,
    "aggregate": lambda accumulator, state: dict(state),
    "ensemble": lambda predictions, cohort: next(iter(predictions.values())),
}


def _skip_values(method: Method, without_state: set[str]) -> None:
    """Let the hooks of a method that need values of meta tensors return their result without values."""
    failed: set[str] = set()

    def call(name: str, hook: Callable[..., Any], *args: Any) -> Any:
        try:
            return hook(*args)
        except Exception as error:
            # Without the sums of the updates, the error of `aggregate` is a consequence.
            is_consequence = name == "aggregate" and "accumulate" in failed
            if not (is_consequence or isinstance(error, _NoValueError) or "meta" in str(error).lower()):
                raise
        failed.add(name)
        if name == "aggregate":
            without_state.add(method.name)
        return _VALUES[name](*args)

    for name in _VALUES:
        if hasattr(method, name):
            vars(method)[name] = functools.partial(call, name, getattr(method, name))
