"""The server of a networked run. It holds the body, schedules the steps, and relays messages between clients.

The server answers messages independently of their transport. The transport calls `TrainingServer.answer` from one
thread per client, and the calls block in this module. All clients share one sequence of numbered steps. A step begins
after the previous step has ended. A step ends after each client of the step has sent the norm of its gradients and the
server has updated the body. With `"client_batch"` the server can set a deadline. After the deadline the step continues
without the missing clients, which receive a [`LateReply`].

The server receives no tokens, labels, losses, or parameters of a head or tail. If a client violates the protocol, the
server rejects the message or ends the run. The server does not verify the norm of the gradients that a client
reports, which all parties of a step use for clipping. If a client is late at the end of a step, its earlier
micro-batches of the step have contributed to the gradients of the body.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from transformers.utils import logging

from ..split.messages import Backward, Forget, Forward
from .checks import check_join
from .messages import (
    BeginStep,
    BeginStepReply,
    EndStep,
    EndStepReply,
    FetchEnvelope,
    FetchEnvelopeReply,
    Finish,
    Join,
    JoinReply,
    LateReply,
    SendEnvelope,
    SendEnvelopeReply,
    read_message,
)
from .pending_messages import BatchHandler, EnvelopeStore, RequestBatch, StepProgress
from .server_model import ServerModel
from .step_plan import StepPlan


logger = logging.get_logger(__name__)


class RunFailedError(ValueError):
    """Raised when the run has failed for all clients. The run can be resumed from its checkpoints."""


class TrainingServer:
    """
    Server that answers the clients of one run.

    Args:
        server_model ([`ServerModel`]): The trained model, which also defines the clients and the strategy.
        digest (`str`): Digest of the settings that all parties share.
        deadline (`float`, *optional*): With `"client_batch"`: seconds that the server waits for the remaining clients
            after the first request of a batch. By default it waits without a limit.

    Raises:
        ValueError: If a deadline is set with another strategy.
    """

    def __init__(self, server_model: ServerModel, digest: str, deadline: float | None = None) -> None:
        split = server_model.split
        if deadline is not None and split.strategy != "client_batch":
            raise ValueError(
                f"A deadline requires strategy='client_batch', but the strategy is {split.strategy!r}. Leave the "
                "deadline out, or change the strategy."
            )
        self.split = split
        self.client_ids = list(server_model.body_servers)
        self.digest = digest
        self.deadline = deadline
        self.finished = threading.Event()
        self.step = 0
        self.server_model = server_model
        # Guards all attributes below.
        self._condition = threading.Condition()
        self._failure: str | None = None
        self._joined: dict[str, Join] = {}
        self._plan = StepPlan({}, simultaneous=False)
        self._resume_step = 0
        self._step_progress = StepProgress(split.strategy == "client_batch")
        self._late_clients: set[str] = set()
        self._batches: dict[tuple[str, int], RequestBatch] = {}
        self._envelopes = EnvelopeStore(self.client_ids)
        self._finished_clients: set[str] = set()

    def answer(self, client_id: str, blob: bytes) -> bytes:
        """
        Process a message of a client. The call blocks until the required messages of other clients have arrived.

        Args:
            client_id (`str`): The client that sent the message, as authenticated by the transport.
            blob (`bytes`): The serialized message.

        Returns:
            `bytes`: The serialized answer; empty if the message has no answer.

        Raises:
            ValueError: If the message cannot be deserialized, names another client, or is not valid at this time.
            RunFailedError: If the run has failed.
        """
        message = read_message(blob)
        if message.client_id != client_id:
            raise ValueError(f"Client {client_id!r} sent a message in the name of {message.client_id!r}.")
        if client_id not in self.client_ids:
            raise ValueError(
                f"Client {client_id!r} is not part of this run. The clients are {', '.join(self.client_ids)}."
            )
        handlers: dict[type[Any], Callable[[Any], Any]] = {
            Join: self._join_run,
            BeginStep: self._begin_step,
            EndStep: self._end_step,
            SendEnvelope: self._store_envelope,
            FetchEnvelope: self._deliver_envelope,
            Finish: self._finish_run,
            Forward: self._forward,
            Backward: self._backward,
            Forget: self._forget,
        }
        with self._condition:
            self._raise_if_failed()
            if client_id in self._finished_clients and not isinstance(message, Forget):
                raise ValueError(f"Client {client_id!r} sent a request after it finished. Call leave() last.")
            answer = handlers[type(message)](message)
            return b"" if answer is None else answer.to_bytes()

    def wait(self, notice_after: float = 60.0) -> str | None:
        """
        Wait until the run has ended.

        Args:
            notice_after (`float`, *optional*, defaults to `60`): Seconds without progress after which a warning names
                the clients that the run waits for. The warning is repeated after the same interval.

        Returns:
            `str`: The reason for the failure; `None` if all clients finished.
        """
        with self._condition:
            last_progress_at, last_progress = time.monotonic(), self._progress()
            while not self._condition.wait_for(self._is_over, notice_after):
                if self._progress() != last_progress:
                    last_progress_at, last_progress = time.monotonic(), self._progress()
                elif missing := self._awaited_clients():
                    idle_seconds = time.monotonic() - last_progress_at
                    logger.warning(
                        f"Step {self.step} has been waiting for {', '.join(missing)} for {idle_seconds:.0f} s."
                    )
            return self._failure

    def _is_over(self) -> bool:
        return self._failure is not None or self.finished.is_set()

    def _progress(self) -> tuple[int, ...]:
        return len(self._joined), self.step, len(self._finished_clients)

    def _awaited_clients(self) -> list[str]:
        """Clients whose next message the run requires. Empty while the server computes."""
        if not self._plan:
            return [client_id for client_id in self.client_ids if client_id not in self._joined]
        if self.step >= self.server_model.max_steps:
            missing = [client_id for client_id in self.client_ids if client_id not in self._finished_clients]
        else:
            missing = self._clients_without_request(self._participants())
        # A client that waits for the parameters of another client does not hold up the run.
        return [client_id for client_id in missing if client_id not in self._envelopes.waiting_clients]

    def _clients_without_request(self, clients: Sequence[str]) -> list[str]:
        """Clients without a pending request for a micro-batch or the end of a step."""
        pending = {
            client_id for batch in self._batches.values() if not batch.is_answered for client_id in batch.messages
        }
        return [client_id for client_id in clients if client_id not in pending]

    def client_lost(self, client_id: str) -> None:
        """
        Report that a client is disconnected. The run ends for all clients and can be resumed from its checkpoints.
        """
        with self._condition:
            if client_id in self._finished_clients or self.finished.is_set():
                return
            self._fail_run(f"client {client_id!r} disconnected")

    def _fail_run(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._condition.notify_all()

    @contextlib.contextmanager
    def _end_run_on_error(self) -> Iterator[None]:
        """End the run if the block raises an error. The server logs the error; the clients receive only its class."""
        try:
            yield
        except RunFailedError:
            raise
        except Exception as error:
            logger.exception("The server failed, and the run ends.")
            self._fail_run(f"the server failed ({type(error).__name__}); see the log of the server")
        self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise RunFailedError(
                f"The run ended at step {self.step}: {self._failure}. Restart all parties, and resume on the clients."
            )

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Release the lock until a condition holds or the run fails."""
        self._condition.wait_for(lambda: self._failure is not None or condition())
        self._raise_if_failed()

    # ---- Start and end of the run

    def _join_run(self, message: Join) -> JoinReply:
        try:
            check_join(message, self.digest)
        except ValueError as error:
            logger.warning(f"Client {message.client_id!r} cannot join: {error}")
            raise
        if message.client_id in self._joined:
            raise ValueError(
                f"Client {message.client_id!r} joined this run before. Restart the server to resume the run."
            )
        self._joined[message.client_id] = message
        if len(self._joined) == len(self.client_ids):
            with self._end_run_on_error():
                self._start_run()
        self._condition.notify_all()
        self._wait_until(lambda: bool(self._plan))
        return JoinReply(
            message.client_id,
            self._resume_step,
            {client_id: self._joined[client_id].num_steps for client_id in self.client_ids},
            {client_id: self._joined[client_id].introduction for client_id in self.client_ids},
        )

    def _start_run(self) -> None:
        """Plan the steps after all clients have joined, and load the latest checkpoint that all parties have."""
        steps_per_client = {client_id: self._joined[client_id].num_steps for client_id in self.client_ids}
        plan = StepPlan(steps_per_client, self.split.strategy != "serial", self.split.steps_per_turn)
        self.server_model.prepare(len(plan))
        server_checkpoints = self.server_model.checkpoints()
        common_steps = set(server_checkpoints).intersection(*(set(join.checkpoints) for join in self._joined.values()))
        if common_steps:
            self.step = self._resume_step = max(common_steps)
            self.server_model.load_checkpoint(server_checkpoints[self.step])
        elif any(join.checkpoints for join in self._joined.values()):
            logger.warning(
                "The server and the clients have no checkpoint of a common step. The run starts from scratch."
            )
        self._plan = plan
        logger.info(
            f"{len(steps_per_client)} clients joined. Training from step {self.step} to step "
            f"{self.server_model.max_steps}."
        )

    def _finish_run(self, message: Finish) -> None:
        if message.step > self.step:
            raise ValueError(
                f"Client {message.client_id!r} finished at step {message.step}, but the current step is {self.step}."
            )
        if not self._plan:
            self._fail_run(f"client {message.client_id!r} left before all clients joined")
            return
        self._finished_clients.add(message.client_id)
        if message.step < self.server_model.max_steps:
            self._fail_run(
                f"client {message.client_id!r} stopped before the last step {self.server_model.max_steps}; to stop "
                "all clients earlier, set max_steps or num_train_epochs instead of a callback that stops one client"
            )
            return
        if len(self._finished_clients) == len(self.client_ids):
            with self._end_run_on_error():
                self.server_model.save()
            self.finished.set()
        self._condition.notify_all()

    # ---- Steps

    def _participants(self) -> list[str]:
        """Clients that take part in the current step and are not late, in the order of the clients."""
        return [
            client_id for client_id in self._plan[self.step % len(self._plan)] if client_id not in self._late_clients
        ]

    def _is_late(self, message: Any) -> bool:
        """Whether the step of a message continued without its client."""
        if not self._plan or message.step > self.step:
            raise ValueError(
                f"Client {message.client_id!r} sent a message of step {message.step}, which has not begun. The "
                f"current step is {self.step}."
            )
        if message.step >= self.server_model.max_steps:
            raise ValueError(
                f"Client {message.client_id!r} sent a message of step {message.step}, but the last step is "
                f"{message.step - 1}."
            )
        return message.step < self.step or message.client_id in self._late_clients

    def _begin_step(self, message: BeginStep) -> BeginStepReply | LateReply:
        client_id = message.client_id
        if not self._plan or message.step > self.server_model.max_steps:
            raise ValueError(
                f"Client {client_id!r} cannot begin step {message.step}. The run has {self.server_model.max_steps} "
                "steps."
            )
        self._wait_until(lambda: self.step >= message.step)
        if not message.num_batches:
            return BeginStepReply(client_id, message.step)
        if self._is_late(message):
            return LateReply(client_id, message.step)
        if client_id not in self._participants():
            raise ValueError(f"Client {client_id!r} does not take part in step {self.step}.")
        self._step_progress.begin(message)
        self._condition.notify_all()
        return BeginStepReply(client_id, message.step)

    def _forward(self, message: Forward) -> Any:
        server = self.server_model.body_servers[message.client_id]
        if not message.grad:
            return server.forward(message)
        return self._run_body("forward", message, server.check_forward, server.forward_batch)

    def _backward(self, message: Backward) -> Any:
        server = self.server_model.body_servers[message.client_id]
        return self._run_body("backward", message, server.check_backward, server.backward_batch)

    def _run_body(self, kind: str, message: Any, check: Callable[[Any], None], handler: BatchHandler) -> Any:
        """
        Run the forward or backward pass of the body for a message.

        With `"client_batch"` the messages of all clients form one batch.
        """
        if self._is_late(message):
            return LateReply(message.client_id, message.step)
        self._step_progress.check(message)
        if self.split.strategy == "client_batch":
            # Check each message on its own, so that only its sender receives the error.
            self.server_model.check_batchable(message)
            check(message)
            reply = self._answer_as_batch(kind, message, handler)
        else:
            (reply,) = handler([message])
        if message.step == self.step and message.client_id not in self._late_clients:
            self._step_progress.record(message)
        return reply

    def _forget(self, message: Forget) -> None:
        self.server_model.body_servers[message.client_id].answer(message.to_bytes())

    def _end_step(self, message: EndStep) -> Any:
        if self._is_late(message):
            return LateReply(message.client_id, message.step)
        self._step_progress.check(message)
        if not math.isfinite(message.squared_norm):
            raise ValueError(
                f"The gradients of client {message.client_id!r} are not finite at step {self.step}. Lower the "
                "learning rate."
            )
        return self._answer_as_batch("step", message, self._train_step)

    def _train_step(self, messages: Sequence[EndStep]) -> list[EndStepReply]:
        """Update the body for all clients of the step, and end the step."""
        step = self.step
        squared_norms = {message.client_id: message.squared_norm for message in messages}
        num_examples = {client_id: self._step_progress.num_examples(client_id) for client_id in squared_norms}
        norms = self.server_model.train_step(step, squared_norms, num_examples)
        self.step += 1
        for client_id in self._late_clients:
            self.server_model.body_servers[client_id].drop_micro_batches([client_id])
        self._late_clients, self._batches = set(), {}
        self._step_progress = StepProgress(self.split.strategy == "client_batch")
        with self._end_run_on_error():
            self.server_model.save_checkpoint(self.step)
        return [EndStepReply(message.client_id, step, norms[message.client_id]) for message in messages]

    def _answer_as_batch(self, kind: str, message: Any, handler: BatchHandler) -> Any:
        """Wait until all clients of the step sent the request or the deadline passed, then answer all requests."""
        key = kind, getattr(message, "micro_step", 0)
        batch = self._batches.setdefault(key, RequestBatch())
        if batch.is_answered or message.client_id in batch.messages:
            raise ValueError(f"Client {message.client_id!r} sent {kind} {key[1]} of step {message.step} twice.")
        batch.messages[message.client_id] = message
        self._condition.notify_all()
        while not batch.is_answered:
            expected = self._expected_clients(kind, key[1])
            if all(client_id in batch.messages for client_id in expected):
                with self._end_run_on_error():
                    batch.answer_all([batch.messages[client_id] for client_id in expected], handler)
                self._condition.notify_all()
                break
            remaining = None if self.deadline is None else batch.started_at + self.deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                self._continue_without(expected)
                continue
            self._condition.wait(remaining)
            if not batch.is_answered:
                self._raise_if_failed()
        # The batch keeps all answers, even if the client whose thread computed the answers has disconnected.
        return batch.answer_to(message.client_id)

    def _continue_without(self, expected: Sequence[str]) -> None:
        """
        Continue the step without the clients that have no pending request.

        A client with a pending request is not late, even if the request is for another micro-batch. All clients
        process their micro-batches in order (see [`StepProgress`]), so at least one client is missing: the clients
        with the least progress wait for no other client. If no client is missing, the run ends.
        """
        missing = self._clients_without_request(expected)
        if not missing:
            self._fail_run(f"{', '.join(expected)} wait for each other at step {self.step}")
            self._raise_if_failed()
        logger.warning(f"The deadline of step {self.step} passed. The step continues without {', '.join(missing)}.")
        self._late_clients.update(missing)
        # Restart the deadline of all batches that waited for the missing clients.
        for batch in self._batches.values():
            batch.started_at = time.monotonic()
        self._condition.notify_all()

    def _expected_clients(self, kind: str, micro_step: int) -> list[str]:
        """Clients whose request a batch requires."""
        participants = self._participants()
        if kind == "step":
            return participants
        # A client that did not begin the step yet may send this micro-batch.
        return [client_id for client_id in participants if self._step_progress.may_send(client_id, micro_step)]

    # ---- Messages between clients

    def _store_envelope(self, message: SendEnvelope) -> SendEnvelopeReply:
        self._envelopes.put(message)
        self._condition.notify_all()
        return SendEnvelopeReply(message.client_id, message.step)

    def _deliver_envelope(self, message: FetchEnvelope) -> FetchEnvelopeReply:
        self._envelopes.check_fetch(message)
        client_id, sender = message.client_id, message.sender
        self._envelopes.waiting_clients.add(client_id)
        try:
            self._wait_until(lambda: self._envelopes.has(message) or sender in self._finished_clients)
        finally:
            self._envelopes.waiting_clients.discard(client_id)
        if not self._envelopes.has(message):
            self._fail_run(f"client {sender!r} left before it sent its parameters to {client_id!r}")
            self._raise_if_failed()
        return FetchEnvelopeReply(client_id, message.step, sender, self._envelopes.take(message))
