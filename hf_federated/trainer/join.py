"""`JoinedClient`: a trainer that is one client of a federation whose server is on another machine."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from transformers import TrainerControl, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.utils import logging

from ..clients import RefusedRequestError
from ..clients.limits import examples_per_step
from ..clients.state_history import StateHistory
from ..data import FederatedDataset
from ..data.client_ids import similar_ids_hint
from ..engines import ClientEngine, raise_common_failure
from ..messages import Announcement, ClientFailure, ClientUpdate, Message, read_message
from ..server import RoundSummary
from ..transport import Connector
from ..utils.client_names import escape_client_id
from ..utils.errors import UserError
from .client_requests import ClientRequests, Request
from .network_settings import NetworkSettings
from .setup import FederationSetup


logger = logging.get_logger(__name__)

STATES_DIR = "client_states"
# A client leaves after this number of requests to which it did not agree.
MAX_REFUSALS = 3


class RunEndedError(UserError):
    """The server ended the run because of an error. The message contains the reason."""

    exit_code: ClassVar[int] = 1


class ServerRefusedError(UserError):
    """The client left, because the server sent several requests to which the client did not agree."""


class JoinedClient:
    """
    A client of a federation over a network. With several processes, each of them has an instance.

    The processes of a client handle each request together. The main process communicates with the server, and writes
    the states of the client.

    Args:
        setup ([`FederationSetup`]): The arguments of the trainer.
        args (`TrainingArguments`): The user's training arguments.
        client_id (`str`): Id of the client.
        state_dir (`str`, *optional*): Folder of the states. Defaults to a folder in the output directory.

    Raises:
        ValueError: If several processes would not train the client together, or if the trainer has the examples of
            several clients and `client_id` is none of them.
    """

    def __init__(self, setup: FederationSetup, args: TrainingArguments, client_id: str, state_dir: str | None) -> None:
        self._processes = setup.processes
        if setup.spreads_clients:
            raise ValueError(
                f"parallelism='clients', but the {setup.processes.world_size} processes of this launch train one "
                "client. Set parallelism='data', or start the client without a launcher."
            )
        self.client_id = client_id
        self._engine = ClientEngine()
        self.setup = dataclasses.replace(_of_one_client(setup, client_id), engine=self._engine)
        self._args = args
        self._state_dir = state_dir or os.path.join(args.output_dir, STATES_DIR, escape_client_id(client_id))
        self._requests: ClientRequests | None = None
        self._history: StateHistory | None = None
        # A request whose round has not begun. A message can be read only once.
        self._next: tuple[Request, Message] | None = None
        self._num_refused = 0
        # Number of training examples in all rounds.
        self.examples_seen = 0

    def connect(self, connector: Connector) -> None:
        """
        Connect to the server.

        Args:
            connector ([`~hf_federated.transport.Connector`]): Connects the client. Only the main process calls it.

        Raises:
            ClientRefusedError: If the server refuses the client.
            ServerUnreachableError: If the server does not respond.
        """
        # A connection after a lost one has the same settings, although the parameters of the model have changed. All
        # processes prepare the examples, because a preparation may wait for all of them.
        settings = NetworkSettings.of(self.setup, self._args, self.client_id)
        announcement = announcement_of(self.setup, self._args, self.client_id).to_bytes()
        connect = functools.partial(connector, settings, announcement)
        self._requests = ClientRequests(self.client_id, self._processes, connect)
        if self._processes.is_main:
            logger.warning(f"Client {self.client_id!r} joined the federation.")

    def loop_arguments(self, args: TrainingArguments) -> TrainingArguments:
        """Return the training arguments of the client's loop, which neither evaluates nor saves checkpoints."""
        args = copy.copy(args)
        args.eval_strategy, args.save_strategy = IntervalStrategy.NO, SaveStrategy.NO
        args.load_best_model_at_end = False
        return args

    def close(self) -> None:
        """Disconnect from the server."""
        if self._requests is not None:
            self._requests.close()

    def run_round(self, control: TrainerControl) -> RoundSummary:
        """
        Answer the requests of one round.

        Args:
            control (`TrainerControl`): Set to stop when the run has ended.

        Returns:
            [`RoundSummary`]: The metrics of the client's local training.

        Raises:
            RunEndedError: If the server ended the run because of an error.
            LinkError: If the connection to the server ended.
            PeerFailedError: If another process of the client failed.
        """
        requests = self._requests
        if requests is None:
            raise RuntimeError("The client is not connected. Call `connect` first.")
        if self._history is None:
            self._history = StateHistory(self._state_dir, self._engine.worker.models, self._processes.is_main)
        metrics: dict[str, dict[str, float]] = {}
        round: int | None = None
        if self._next is None:
            self._next = self._read(requests.receive())
        while self._next is not None:
            request, message = self._next
            if round is not None and message.round != round:
                # The request belongs to the next step of the loop.
                break
            round = message.round
            reply = self._answer(request, message, self._history, metrics)
            self._history.prune([request.state, *request.keep])
            # Free the memory before the next request arrives.
            self._next = None
            del request, message
            self._next = self._read(requests.receive(reply))
            del reply
        if self._next is None:
            control.should_training_stop = True
            if requests.end:
                raise RunEndedError(f"The server ended the run: {requests.end}")
        return RoundSummary.from_clients(metrics, num_failed=0, round=round or 0)

    def _read(self, request: Request | None) -> tuple[Request, Message] | None:
        if request is None:
            return None
        return request, read_message(request.content, self._engine.kinds, self._engine.max_tensors)

    def _answer(
        self, request: Request, message: Message, history: StateHistory, metrics: dict[str, dict[str, float]]
    ) -> bytes:
        """Carry out a request, unless the client has done so before. Return the reply, and note the metrics."""
        worker, processes = self._engine.worker, self._processes
        # Only the main process knows its replies for certain: other machines may see its files later.
        reply = history.reply_to(message.nonce) if processes.is_main else None
        if processes.run_on_main("earlier reply", lambda: reply is not None):
            history.restore(message.nonce)
            return reply or b""
        worker.is_federation = request.num_clients > 1
        history.restore(request.state)
        answer = worker.handle(message)
        if isinstance(answer, ClientUpdate):
            metrics[self.client_id] = answer.reported_metrics
            if self.setup.config.local_steps is None:
                self.examples_seen += answer.num_examples * self.setup.config.local_epochs
            else:
                self.examples_seen += answer.num_steps * examples_per_step(self._args, processes.world_size)
        elif isinstance(worker.last_error, RefusedRequestError):
            self._num_refused += 1
            logger.warning(f"Round {message.round + 1}: this client refused a request: {worker.last_error}")
            if self._num_refused >= MAX_REFUSALS:
                raise ServerRefusedError(
                    f"Client {self.client_id!r} left the federation after {self._num_refused} requests to which it "
                    f"did not agree. The last one: {worker.last_error} Compare the settings of the server and the "
                    "client."
                )
        elif isinstance(answer, ClientFailure):
            if processes.world_size > 1:
                raise_common_failure(processes, answer, worker.last_error)
            logger.warning(f"Round {message.round + 1}: this client failed: {worker.last_error}")
        reply = answer.to_bytes() if processes.is_main else b""
        history.record(message.nonce, reply)
        return reply


def announcement_of(setup: FederationSetup, args: TrainingArguments, client_id: str) -> Announcement:
    """
    Describe the examples of a client.

    Args:
        setup ([`FederationSetup`]): The arguments of the client's trainer.
        args (`TrainingArguments`): The user's training arguments.
        client_id (`str`): Id of the client.
    """
    participants, distillation = setup.participants, setup.distillation
    num_examples, num_evaluated = setup.clients.num_rows[client_id], 0
    if setup.eval_clients is not None and setup.eval_datasets is not None and setup.eval_clients.num_rows[client_id]:
        num_evaluated = len(setup.eval_datasets[client_id])
    spec = participants.clients.get(client_id)
    args = args if spec is None or spec.args is None else spec.args
    class_counts = None
    if distillation is not None and distillation.reports_class_counts:
        config: Any = setup.trainer.model.config
        tokenizer = participants.tokenizer_of(client_id, setup.trainer.processing_class)
        class_counts = distillation.class_counts(setup.train_datasets[client_id], config.num_labels, tokenizer)
    return Announcement(
        num_examples=num_examples,
        num_encoded_examples=None if num_examples is None else len(setup.train_datasets[client_id]),
        num_eval_examples=num_evaluated,
        examples_per_step=examples_per_step(args, setup.processes.world_size),
        class_counts=class_counts,
    )


class _Renamed(Mapping[str, Any]):
    """
    Entries of a mapping under other keys. An entry is read on access.

    Args:
        values (`Mapping[str, Any]`): The mapping.
        keys (`Mapping[str, str]`): Keys of the entries, by their new keys.
    """

    def __init__(self, values: Mapping[str, Any], keys: Mapping[str, str]) -> None:
        self._values, self._keys = values, keys

    def __getitem__(self, name: str) -> Any:
        return self._values[self._keys[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _of_one_client(setup: FederationSetup, client_id: str) -> FederationSetup:
    """Return the setup of a client alone, from a trainer with the examples of this client or of all clients."""
    ids = list(setup.clients)
    if client_id not in ids and len(ids) > 1:
        raise ValueError(
            f"client_id={client_id!r} is not in `train_dataset`, which has {len(ids)} clients. Pass the examples of "
            f"the client. {similar_ids_hint(client_id, ids)}"
        )
    key = client_id if client_id in ids else ids[0]
    setup = dataclasses.replace(
        setup,
        clients=FederatedDataset.from_dict({client_id: setup.clients[key]}),
        train_datasets=_Renamed(setup.train_datasets, {client_id: key}),
    )
    evaluated, eval_datasets = setup.eval_clients, setup.eval_datasets
    eval_key = next((name for name in (client_id, key) if evaluated is not None and name in evaluated), None)
    if evaluated is None or eval_datasets is None or eval_key is None:
        return dataclasses.replace(setup, eval_clients=None, eval_datasets=None)
    return dataclasses.replace(
        setup,
        eval_clients=FederatedDataset.from_dict({client_id: evaluated[eval_key]}),
        eval_datasets=_Renamed(eval_datasets, {client_id: eval_key}),
    )
