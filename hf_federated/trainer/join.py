"""`JoinedClient`: a trainer that is one client of a federation whose server is on another machine."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from transformers import TrainerControl, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.utils import logging

from ..adapters import Exchange
from ..clients import Agreement, RefusedRequestError
from ..clients.journal import ClientJournal
from ..clients.limits import examples_per_step
from ..clients.request_record import REQUESTS_FILE, RequestRecord
from ..clients.state_history import StateHistory
from ..data import FederatedDataset
from ..data.client_ids import similar_ids_hint
from ..engines import ClientEngine, raise_common_failure
from ..messages import Announcement, ClientFailure, ClientUpdate, Message, read_message
from ..secure_aggregation.credentials import Credentials
from ..server import RoundProgress, RoundSummary
from ..transport import Connector
from ..utils.arguments import require
from ..utils.client_names import escape_client_id
from ..utils.errors import UserError
from ..utils.journal import Journal
from ..utils.printable import printable
from ..utils.shards import states_in_shards
from ..utils.storage import write_private
from .announcement_limits import AnnouncementError, agreed_problem
from .client_requests import ClientRequests, Request
from .dataset_preparation import count_dropped
from .network_settings import NetworkSettings
from .setup import FederationSetup
from .workers import Workers


logger = logging.get_logger(__name__)

STATES_DIR = "client_states"
AGREEMENT_FILE = "agreement.json"


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
        refusals (`int`, *optional*, defaults to `3`): Number of refused requests after which the client leaves.
        credentials ([`~hf_federated.secure_aggregation.credentials.Credentials`], *optional*): The identity of the
            client, for secure aggregation.

    Raises:
        ValueError: If several processes would not train the client together, if the trainer has the examples of
            several clients and `client_id` is none of them, or if several processes use secure aggregation.
    """

    def __init__(
        self,
        setup: FederationSetup,
        args: TrainingArguments,
        client_id: str,
        state_dir: str | None,
        refusals: int = 3,
        credentials: Credentials | None = None,
    ) -> None:
        require("refusals", refusals, refusals >= 1, "at least 1")
        self._processes = setup.processes
        if setup.spreads_clients:
            raise ValueError(
                f"parallelism='clients', but the {setup.processes.world_size} processes of this launch train one "
                "client. Set parallelism='data', or start the client without a launcher."
            )
        if setup.secure_aggregation is not None and setup.is_spread:
            raise ValueError(
                f"`secure_aggregation` needs a client of one process, but the launch has {setup.processes.world_size} "
                "processes. Start the client without a launcher."
            )
        self.client_id = client_id
        self._engine = ClientEngine()
        self._args = args
        self._state_dir = state_dir or os.path.join(args.output_dir, STATES_DIR, escape_client_id(client_id))
        self.setup = dataclasses.replace(
            _of_one_client(setup, client_id),
            engine=self._engine,
            credentials=credentials,
        )
        self._requests: ClientRequests | None = None
        self._history: StateHistory | None = None
        # A request whose round has not begun. A message can be read only once.
        self._next: tuple[Request, Message] | None = None
        self._max_refused = refusals
        self._record = RequestRecord()
        self._agreed: dict[str, str] = {}
        # Number of training examples in all rounds.
        self.examples_seen = 0

    def connect(self, connector: Connector) -> None:
        """
        Connect to the server.

        Args:
            connector ([`~hf_federated.transport.Connector`]): Connects the client. Only the main process calls it.

        Raises:
            AnnouncementError: If the client has more examples than all parties agreed to.
            ClientRefusedError: If the server refuses the client.
            ServerUnreachableError: If the server does not respond.
        """
        # A connection after a lost one has the same settings, although the parameters of the model have changed. All
        # processes prepare the examples, because a preparation may wait for all of them.
        settings = NetworkSettings.of(self.setup, self._args, self.client_id)
        self._agreed = settings.to_dict()
        counts = _counts_of(self.setup, self._args, self.client_id)
        if (problem := agreed_problem(self.setup, self.client_id, counts)) is not None:
            raise AnnouncementError(problem)
        announcement = announcement_of(self.setup, self._args, self.client_id)
        connect = functools.partial(connector, settings, announcement.to_bytes())
        self._requests = ClientRequests(self.client_id, self._processes, connect)
        if self._processes.is_main:
            logger.warning(f"Client {self.client_id!r} joined the federation.")

    def describe_agreement(self) -> dict[str, str]:
        """Return what the client agrees to, without a connection: limits of the requests, and the shared settings."""
        setup, config = self.setup, self.setup.config
        exchange = Exchange(setup.trainer.model, config.exchange, config.keep_local, setup.aggregation.changes_base)
        workers = Workers(setup, self._args, exchange, None, RoundProgress(lambda: (), setup.num_rounds))
        settings = NetworkSettings.of(setup, self._args, self.client_id)
        known = {} if setup.credentials is None else {"fingerprints of other clients": setup.credentials.describe()}
        return {**workers.agreement().describe(), **known, **settings.to_dict()}

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
            self._history = self._open_history()
            self._record = self._agreement.record = self._open_record()
            if (secure := self._engine.worker.secure) is not None:
                secure.journal = ClientJournal(Path(self._state_dir), self._record.run)
        metrics: dict[str, dict[str, float]] = {}
        round: int | None = None
        if self._next is None:
            self._next = self._read(requests.receive())
        while self._next is not None:
            request, message = self._next
            if round is not None and round < message.round < (self.setup.config.num_rounds or 1):
                # The request belongs to the next step of the loop. A server that resumes repeats earlier rounds, and
                # the client refuses a round after the last one.
                break
            round = message.round if round is None else round
            with states_in_shards(self._engine.worker.shards):
                reply = self._answer(request, message, self._history, metrics)
            # Free the memory before the next request arrives.
            self._next = None
            del request, message
            self._next = self._read(requests.receive(reply))
            del reply
        if self._next is None:
            control.should_training_stop = True
            if requests.end:
                raise RunEndedError(f"The server ended the run: {requests.end}")
            self._record.end()
        return RoundSummary.from_clients(metrics, num_failed=0, round=round or 0)

    def _read(self, request: Request | None) -> tuple[Request, Message] | None:
        if request is None:
            return None
        try:
            return request, read_message(request.content, self._engine.kinds, self._engine.max_tensors)
        except ValueError as error:
            raise ServerRefusedError(
                f"Client {self.client_id!r} left the federation, because it cannot read a message of the server: "
                f"{error}"
            ) from error

    def _answer(
        self, request: Request, message: Message, history: StateHistory, metrics: dict[str, dict[str, float]]
    ) -> bytes:
        """Carry out a request, unless the client has done so before. Return the reply, and note the metrics."""
        worker, processes = self._engine.worker, self._processes
        self._record.start = request.state
        if (reply := self._earlier_reply(message, history)) is not None:
            return reply
        worker.is_federation = request.num_clients > 1
        history.restore(request.state)
        answer = worker.handle(message)
        trained = answer.reported_metrics if isinstance(answer, ClientUpdate) else worker.last_metrics
        if trained is not None:
            metrics[self.client_id] = trained
            if self.setup.config.local_steps is None:
                self.examples_seen += int(trained["num_examples"]) * self.setup.config.local_epochs
            else:
                self.examples_seen += int(trained["num_steps"]) * examples_per_step(self._args, processes.world_size)
        elif isinstance(worker.last_error, RefusedRequestError):
            logger.warning(f"Round {message.round + 1}: this client refused a request: {worker.last_error}")
            if not worker.last_error.is_of_peer:
                self._note_refusal(worker.last_error)
        elif isinstance(answer, ClientFailure):
            if processes.world_size > 1:
                raise_common_failure(processes, answer, worker.last_error)
            logger.warning(
                f"Round {message.round + 1}: this client failed: {printable(worker.last_error or answer.error)}"
            )
        reply = answer.to_bytes() if processes.is_main else b""
        if self.setup.is_sharded and processes.is_main:
            # The main process sends the reply, so the shards of all other processes must be on disk before.
            processes.wait(f"state of the shards, round {message.round}")
        history.record(message.nonce, reply)
        if self.setup.is_sharded and not processes.is_main:
            processes.wait(f"state of the shards, round {message.round}")
        # A server that resumes repeats the requests after its last checkpoint, but no session of secure aggregation.
        repeatable = self._record.since(request.keep) if worker.secure is None else ()
        history.prune([request.state, *request.keep], repeatable)
        return reply

    def _earlier_reply(self, message: Message, history: StateHistory) -> bytes | None:
        """Return the reply to an earlier request with the content of a message, if the client still has the reply."""
        processes = self._processes
        # Only the main process knows its replies for certain: other machines may see its files later.
        reply, earlier = None, None
        if processes.is_main:
            reply = history.reply_to(message.nonce)
            earlier = None if reply is not None else self._record.earlier(message)
        # A state in the middle of the repeated requests is not needed, if the state after the last of them exists.
        has_later = history.has_state(earlier or "") or history.has_state(self._record.last)
        if earlier is not None and has_later and (content := history.reply_to(earlier)) is not None:
            sent = read_message(content, self._engine.kinds, self._engine.max_tensors)
            reply = dataclasses.replace(sent, nonce=message.nonce).to_bytes()
            history.repeat(earlier, message.nonce, reply)
        else:
            earlier = None
        found: dict[str, Any] = {
            "is_answered": reply is not None,
            "repeated": earlier,
            "has_state": reply is not None and history.has_state(message.nonce),
        }
        found = processes.run_on_main("earlier reply", lambda: found)
        if found["repeated"] is not None:
            # All processes of the client have the same record.
            self._agreement.check(message)
            if self.setup.is_sharded and not processes.is_main and found["has_state"]:
                history.repeat(found["repeated"], message.nonce, b"")
        if found["has_state"]:
            history.restore(message.nonce)
        return (reply or b"") if found["is_answered"] else None

    @property
    def _agreement(self) -> Agreement:
        agreement = self._engine.worker.agreement
        if agreement is None:
            raise RuntimeError("The worker of a client on another machine has an agreement.")
        return agreement

    def _open_history(self) -> StateHistory:
        """Open the history of the client's states. With FSDP, each process writes those of its shards."""
        processes, folder = self._processes, Path(self._state_dir)
        if self.setup.is_sharded and not processes.is_main:
            folder /= f"shard-{processes.rank}"
        writes = processes.is_main or self.setup.is_sharded
        return StateHistory(folder, self._engine.worker.models, writes)

    def _open_record(self) -> RequestRecord:
        """Open the record of the client's requests, and write what the client agrees to."""
        folder, agreed = Path(self._state_dir), {**self._agreement.describe(), **self._agreed}
        text = json.dumps(agreed, indent=2) + "\n"
        # Other machines may see the file later.
        saved = self._processes.run_on_main("record of requests", Journal(folder / REQUESTS_FILE).read)
        record = RequestRecord(folder, hashlib.sha256(text.encode()).hexdigest(), self._processes.is_main, saved)
        if self._processes.is_main:
            write_private(folder / AGREEMENT_FILE, text.encode())
        return record

    def _note_refusal(self, error: RefusedRequestError) -> None:
        """Count a refusal. Leave the federation after too many refusals."""
        record = self._record
        record.add_refusal(str(error))
        if record.num_refused >= self._max_refused:
            raise ServerRefusedError(
                f"Client {self.client_id!r} left the federation after {record.num_refused} requests to which it "
                f"did not agree. The last one: {error} Compare the settings of the server and the client. If the "
                f"server starts a new run, start the client again without {str(record.path)!r}."
            )


def announcement_of(setup: FederationSetup, args: TrainingArguments, client_id: str) -> Announcement:
    """
    Describe the examples of a client to the server. With `secure_aggregation`, their numbers are hidden.

    Args:
        setup ([`FederationSetup`]): The arguments of the client's trainer.
        args (`TrainingArguments`): The user's training arguments.
        client_id (`str`): Id of the client.
    """
    if setup.hides_counts:
        return Announcement(None, None, 0, _examples_per_step(setup, args, client_id), hides_counts=True)
    return _counts_of(setup, args, client_id)


def _examples_per_step(setup: FederationSetup, args: TrainingArguments, client_id: str) -> int:
    spec = setup.participants.clients.get(client_id)
    own = args if spec is None or spec.args is None else spec.args
    return examples_per_step(own, setup.processes.world_size)


def _counts_of(setup: FederationSetup, args: TrainingArguments, client_id: str) -> Announcement:
    """Return the numbers of examples of a client."""
    participants, distillation = setup.participants, setup.distillation
    num_examples, num_evaluated = setup.clients.num_rows[client_id], 0
    if setup.eval_clients is not None and setup.eval_datasets is not None and setup.eval_clients.num_rows[client_id]:
        num_evaluated = len(setup.eval_datasets[client_id])
    class_counts = None
    if distillation is not None and distillation.reports_class_counts:
        config: Any = setup.trainer.model.config
        tokenizer = participants.tokenizer_of(client_id, setup.trainer.processing_class)
        class_counts = distillation.class_counts(setup.train_datasets[client_id], config.num_labels, tokenizer)
    num_dropped = None
    if num_examples is not None and participants.task is None and setup.trainer.prepares_data():
        num_dropped = count_dropped(setup.clients[client_id], setup.train_datasets[client_id], args) or None
    return Announcement(
        num_examples=num_examples,
        num_encoded_examples=None if num_examples is None else len(setup.train_datasets[client_id]),
        num_eval_examples=num_evaluated,
        examples_per_step=_examples_per_step(setup, args, client_id),
        class_counts=class_counts,
        num_dropped_examples=num_dropped,
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
