"""`JoinedClient`: a trainer that is one client of a federation whose server is on another machine."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from transformers import TrainerControl, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.utils import logging

from ..clients.state_history import StateHistory
from ..data import FederatedDataset
from ..data.client_ids import similar_ids_hint
from ..engines import ClientEngine
from ..messages import Announcement, ClientFailure, ClientUpdate, read_message
from ..server import RoundSummary
from ..transport import Connection, Connector, ServerUnreachableError, SessionLostError
from ..transport.framing import unframe
from ..utils.client_names import escape_client_id
from ..utils.errors import UserError
from .network_settings import NetworkSettings
from .setup import FederationSetup


logger = logging.get_logger(__name__)

STATES_DIR = "client_states"


class RunEndedError(UserError):
    """The server ended the run because of an error. The message contains the reason."""

    exit_code: ClassVar[int] = 1


class JoinedClient:
    """
    A client of a federation over a network.

    Args:
        setup ([`FederationSetup`]): The arguments of the trainer.
        args (`TrainingArguments`): The user's training arguments.
        client_id (`str`): Id of the client.
        state_dir (`str`, *optional*): Folder of the states. Defaults to a folder in the output directory.

    Raises:
        ValueError: If the launch has several processes, or if the trainer has the examples of several clients and
            `client_id` is none of them.
    """

    def __init__(self, setup: FederationSetup, args: TrainingArguments, client_id: str, state_dir: str | None) -> None:
        if setup.is_spread:
            raise ValueError(
                f"A client is one process, but the launch has {setup.processes.world_size} processes. Start the "
                "client without a launcher."
            )
        self.client_id = client_id
        self._engine = ClientEngine()
        self.setup = dataclasses.replace(_of_one_client(setup, client_id), engine=self._engine)
        self._args = args
        self._state_dir = state_dir or os.path.join(args.output_dir, STATES_DIR, escape_client_id(client_id))
        # Connects with the settings and the announcement of the client, which do not change when it connects again.
        self._connect: Callable[[], Connection]
        self._connection: Connection | None = None
        self._history: StateHistory | None = None
        # Number of training examples in all rounds.
        self.examples_seen = 0
        # The next request, and its content.
        self._request: tuple[dict[str, Any], memoryview] | None = None

    def connect(self, connector: Connector) -> None:
        """
        Connect to the server.

        Args:
            connector ([`~hf_federated.transport.Connector`]): Connects the client.

        Raises:
            ClientRefusedError: If the server refuses the client.
            ServerUnreachableError: If the server does not respond.
        """
        settings = NetworkSettings.of(self.setup, self._args, self.client_id)
        announcement = announcement_of(self.setup, self._args, self.client_id).to_bytes()
        self._connect = functools.partial(connector, settings, announcement)
        self._connection = self._connect()
        logger.warning(f"Client {self.client_id!r} joined the federation.")

    def _receive(self, reply: bytes | None = None) -> None:
        """Send a reply, if there is one, and wait for the next request. Connect again if the session is lost."""
        assert self._connection is not None
        while True:
            try:
                blob = self._connection.receive(reply)
                break
            except (SessionLostError, ServerUnreachableError) as error:
                logger.warning(
                    f"The connection to the server ended: {error} Client {self.client_id!r} connects again."
                )
                self._connection.close()
                self._connection = self._connect()
                # If the server still waits for the reply, it asks again.
                reply = None
        self._request = None
        if blob is not None:
            header, content = unframe(blob, state=str, keep=list, num_clients=int)
            if not all(isinstance(name, str) for name in header["keep"]):
                raise ValueError("The header of a request must name states with texts.")
            self._request = header, content

    def loop_arguments(self, args: TrainingArguments) -> TrainingArguments:
        """Return the training arguments of the client's loop, which neither evaluates nor saves checkpoints."""
        args = copy.copy(args)
        args.eval_strategy, args.save_strategy = IntervalStrategy.NO, SaveStrategy.NO
        args.load_best_model_at_end = False
        return args

    def close(self) -> None:
        """Disconnect from the server."""
        if self._connection is not None:
            self._connection.close()

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
        """
        assert self._connection is not None
        worker = self._engine.worker
        if self._history is None:
            self._history = StateHistory(self._state_dir, worker.models)
        metrics: dict[str, dict[str, float]] = {}
        round: int | None = None
        if self._request is None:
            self._receive()
        while self._request is not None:
            header, content = self._request
            message = read_message(bytes(content))
            if round is not None and message.round != round:
                # The request belongs to the next step of the loop.
                break
            round = message.round
            reply = self._history.reply_to(message.nonce)
            if reply is None:
                worker.is_federation = header["num_clients"] > 1
                self._history.restore(header["state"])
                answer = worker.handle(message)
                if isinstance(answer, ClientUpdate):
                    metrics[self.client_id] = answer.reported_metrics
                    self.examples_seen += self._num_examples_seen(answer)
                elif isinstance(answer, ClientFailure):
                    logger.warning(f"Round {message.round + 1}: this client failed: {worker.last_error}")
                reply = answer.to_bytes()
                self._history.record(message.nonce, reply)
                del answer
            else:
                self._history.restore(message.nonce)
            self._history.prune([header["state"], *header["keep"]])
            # Free the memory before the next request arrives.
            self._request = None
            del message, content
            self._receive(reply)
            del reply
        if self._request is None:
            control.should_training_stop = True
            if self._connection.end:
                raise RunEndedError(f"The server ended the run: {self._connection.end}")
        return RoundSummary.from_clients(metrics, num_failed=0, round=round or 0)

    def _num_examples_seen(self, update: ClientUpdate) -> int:
        config, args = self.setup.config, self._args
        if config.local_steps is None:
            return int(update.num_examples * config.local_epochs)
        return update.num_steps * args.train_batch_size * args.gradient_accumulation_steps


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
        examples_per_step=args.train_batch_size * args.gradient_accumulation_steps * setup.processes.world_size,
        class_counts=class_counts,
    )


class _Renamed(Mapping[str, Any]):
    """
    A mapping with one entry under another key.

    Args:
        values (`Mapping[str, Any]`): The mapping.
        key (`str`): Key of the entry.
        name (`str`): The new key.
    """

    def __init__(self, values: Mapping[str, Any], key: str, name: str) -> None:
        self._values, self._key, self._name = values, key, name

    def __getitem__(self, name: str) -> Any:
        if name != self._name:
            raise KeyError(name)
        return self._values[self._key]

    def __iter__(self) -> Iterator[str]:
        return iter([self._name] if self._key in self._values else [])

    def __len__(self) -> int:
        return len(list(iter(self)))


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
        train_datasets=_Renamed(setup.train_datasets, key, client_id),
    )
    evaluated, eval_datasets = setup.eval_clients, setup.eval_datasets
    eval_key = next((name for name in (client_id, key) if evaluated is not None and name in evaluated), None)
    if evaluated is None or eval_datasets is None or eval_key is None:
        return dataclasses.replace(setup, eval_clients=None, eval_datasets=None)
    return dataclasses.replace(
        setup,
        eval_clients=FederatedDataset.from_dict({client_id: evaluated[eval_key]}),
        eval_datasets=_Renamed(eval_datasets, eval_key, client_id),
    )
