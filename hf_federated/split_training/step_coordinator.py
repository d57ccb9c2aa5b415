"""
Steps of a networked run on the server: which clients take part, in which order, and what happens if one fails.

All clients share one sequence of numbered steps. A step begins after the previous step has ended. A step ends after
each of its clients has sent the norm of its gradients and the server has updated the body.

- A client that is removed takes part in no further step. The steps in which no other client takes part are skipped:
  they update nothing, and the learning rate schedules advance. With `"serial"` the turn thereby passes to the next
  client.
- With a deadline, a step continues without the clients that send nothing, which receive a [`LateReply`].
- If the gradients of a client cannot be used, and the body has already processed them, the step is skipped for all
  clients, and the client is removed.

If a client is late or removed at the end of a step, its earlier micro-batches of the step have contributed to a shared
body.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from transformers.utils import logging

from ..split.client_faults import ClientFaultError
from ..split.messages import Backward, Forget, Forward, Gradient
from .envelope_relay import EnvelopeRelay
from .gradient_bounds import GradientBounds
from .messages import BeginStep, BeginStepReply, EndStep, EndStepReply, LateReply, ResendReply
from .pending_messages import BatchHandler, RequestBatch, StepProgress, repeated_error
from .run_state import RunState
from .server_model import ServerModel
from .step_plan import StepPlan


logger = logging.get_logger(__name__)

# A client that sends no message in this number of successive steps is removed, so that not every step waits for it.
MAX_SILENT_STEPS = 3


class StepCoordinator:
    """
    Answers the messages of the clients' steps. All methods require the lock of the state.

    Args:
        state ([`RunState`]): The run.
        server_model ([`ServerModel`]): The bodies.
        relay ([`EnvelopeRelay`]): Relay of the clients' parts.
        deadline (`float`, *optional*): Seconds that a step waits for a message of its clients.

    Attributes:
        plan ([`StepPlan`]): The clients of each step. Empty before the run starts.
        batches (`dict[tuple[str, int], RequestBatch]`): Requests that are answered together, by kind and micro-step.
    """

    def __init__(
        self, state: RunState, server_model: ServerModel, relay: EnvelopeRelay, deadline: float | None
    ) -> None:
        self.plan = StepPlan({}, simultaneous=False)
        self._state = state
        self._server_model = server_model
        self._relay = relay
        self._deadline = deadline
        self._is_batched = server_model.split.strategy == "client_batch"
        self._bounds = GradientBounds()
        self._progress = StepProgress(server_model.split, server_model.args.gradient_accumulation_steps)
        self._late_clients: set[str] = set()
        self.batches: dict[tuple[str, int], RequestBatch] = {}
        # Clients with a message that a body processes outside of a batch.
        self._computing_clients: set[str] = set()
        self._is_ending = False
        self._active_at = time.monotonic()
        # Last step that each client ended.
        self._last_steps: dict[str, int] = {}
        # Steps in which a client was late, by client and time of its last message.
        self._silent_steps: collections.Counter[tuple[str, float]] = collections.Counter()

    def start(self, plan: StepPlan) -> None:
        """Start the run with the clients of each step."""
        self.plan = plan
        self._active_at = time.monotonic()
        self._relay.plan, self._relay.last_step = plan, self._server_model.max_steps
        if self._state.step:
            self._relay.trained_clients = plan.participants(self._state.step - 1)

    def participants(self) -> list[str]:
        """Clients that take part in the current step and are neither late nor removed, in the order of the clients."""
        return [
            client_id
            for client_id in self.plan.participants(self._state.step)
            if client_id not in self._late_clients and client_id not in self._state.removed
        ]

    def clients_without_request(self, clients: Sequence[str]) -> list[str]:
        """Clients without a pending request for a micro-batch or the end of a step."""
        unanswered = [batch.messages for batch in self.batches.values() if batch.answers is None]
        pending = self._computing_clients.union(*unanswered)
        return [client_id for client_id in clients if client_id not in pending]

    # ---- Messages

    def begin_step(self, message: BeginStep) -> BeginStepReply | LateReply | ResendReply:
        """Wait for a step, and record that a client takes part in it."""
        client_id, max_steps = message.client_id, self._server_model.max_steps
        if not self.plan or message.step > max_steps:
            raise ValueError(f"Client {client_id!r} cannot begin step {message.step}. The run has {max_steps} steps.")
        if self._state.step < message.step and client_id in self.participants():
            # The current step would wait for this client, and this client for the end of the step.
            logger.warning(f"Client {client_id!r} skips step {self._state.step}, in which it takes part.")
            self._late_clients.add(client_id)
            self._state.condition.notify_all()
        while self._state.step < message.step:
            self._state.check(client_id)
            if (resend := self._relay.resend_request(client_id)) is not None:
                return resend
            self._wait_for_step(client_id)
        self._state.check(client_id)
        if not message.num_batches:
            return BeginStepReply(client_id, message.step)
        if self._is_late(message):
            return LateReply(client_id, message.step)
        if client_id not in self.participants():
            raise ValueError(f"Client {client_id!r} does not take part in step {self._state.step}.")
        self._progress.begin(message)
        self._active_at = time.monotonic()
        self._state.condition.notify_all()
        return BeginStepReply(client_id, message.step)

    def forward(self, message: Forward) -> Any:
        """Run the forward pass of the body. Messages without a gradient do not belong to a step."""
        server = self._server_model.body_servers[message.client_id]
        if not message.grad:
            with self._state.computing(message.client_id):
                return server.forward(message)

        def forward_batch(messages: Sequence[Forward]) -> Sequence[Any]:
            sizes = {message.client_id: server.size_of_states(message) for message in messages}
            self._bounds.check_states(self._state.step, sizes)
            return server.forward_batch(messages)

        return self._run_body("forward", message, server.check_forward, forward_batch)

    def backward(self, message: Backward) -> Any:
        """Run the backward pass of the body."""
        server = self._server_model.body_servers[message.client_id]

        def backward_batch(messages: Sequence[Backward]) -> Sequence[Any]:
            sensitivities = {message.client_id: server.sensitivity(message) for message in messages}
            self._bounds.check_gradients(self._state.step, sensitivities)
            return server.backward_batch(messages)

        reply = self._run_body("backward", message, server.check_backward, backward_batch)
        # The client completes the norm by itself, unless other clients contribute to it or the step may end without
        # this client.
        if isinstance(reply, Gradient) and not self._is_batched and self._deadline is None:
            if self._progress.has_all_gradients(message.client_id):
                with self._state.computing(message.client_id):
                    squared_norm = self._server_model.squared_norm(message.client_id)
                return dataclasses.replace(reply, squared_norm=squared_norm)
        return reply

    def forget(self, message: Forget) -> None:
        """Drop a cache of a client."""
        with self._state.computing(message.client_id):
            self._server_model.body_servers[message.client_id].answer(message.to_bytes())

    def end_step(self, message: EndStep) -> Any:
        """Wait for the other clients of the step, and return the norm of the gradients of all parties."""
        if self._is_late(message):
            return LateReply(message.client_id, message.step)
        self._progress.check(message)
        if not math.isfinite(message.squared_norm):
            reason = (
                f"the gradients of client {message.client_id!r} are not finite at step {self._state.step}. Lower the "
                "learning rate"
            )
            self._state.remove(message.client_id, reason)
            self._state.check(message.client_id)
        return self._answer_as_batch("step", message, self._train_step)

    # ---- Waiting

    def _is_late(self, message: Any) -> bool:
        """Whether the step of a message continued without its client."""
        client_id, step = message.client_id, message.step
        if not self.plan or step > self._state.step:
            raise ValueError(
                f"Client {client_id!r} sent a message of step {step}, which has not begun. The current step is "
                f"{self._state.step}."
            )
        if step >= self._server_model.max_steps:
            raise ValueError(f"Client {client_id!r} sent a message of step {step}, but the last step is {step - 1}.")
        if step <= self._last_steps.get(client_id, -1):
            raise ValueError(
                f"Client {client_id!r} sent a message of step {step}, which it has ended. The current step is "
                f"{self._state.step}."
            )
        return bool(step < self._state.step or client_id in self._late_clients)

    def _wait_for_step(self, client_id: str) -> None:
        """Wait for a change of the state, and skip the current step if no client takes part in it any more."""
        participants = self.participants()
        if self._is_ending:
            self._state.condition.wait()
        elif not participants:
            self._skip_step(client_id)
        elif self._deadline is None or not (missing := self.clients_without_request(participants)):
            self._state.condition.wait()
        else:
            latest = max(self._active_at, *(self._state.last_message_at[name] for name in participants))
            remaining = latest + self._deadline - time.monotonic()
            if remaining > 0:
                self._state.condition.wait(remaining)
            else:
                self.continue_without(missing)

    def _run_body(self, kind: str, message: Any, check: Callable[[Any], object], handler: BatchHandler) -> Any:
        """
        Run the forward or backward pass of a body for a message.

        With `"client_batch"` the messages of all clients form one batch.
        """
        client_id = message.client_id
        if self._is_late(message):
            return LateReply(client_id, message.step)
        self._progress.check(message)
        try:
            with self._exclusively(client_id, kind, message), self._state.computing(client_id):
                # Check each message on its own, so that only its sender receives the error.
                if self._is_batched:
                    self._server_model.check_batchable(message)
                check(message)
                reply = None if self._is_batched else handler([message])[0]
        except ClientFaultError as fault:
            self._remove_faulty(fault)
            self._state.check(client_id)
            raise
        if self._is_batched:
            self._state.check(client_id)
            if self._is_late(message):
                return LateReply(client_id, message.step)
            reply = self._answer_as_batch(kind, message, handler)
        self._active_at = time.monotonic()
        if message.step == self._state.step and client_id not in self._late_clients:
            self._progress.record(message)
        return reply

    @contextlib.contextmanager
    def _exclusively(self, client_id: str, kind: str, message: Any) -> Iterator[None]:
        """Reject a second message of a client while a body processes the first message."""
        if client_id in self._computing_clients:
            raise repeated_error(client_id, kind, message)
        self._computing_clients.add(client_id)
        try:
            yield
        finally:
            self._computing_clients.discard(client_id)
            # The deadline of a client that sends nothing counts again.
            self._state.condition.notify_all()

    def _answer_as_batch(self, kind: str, message: Any, handler: BatchHandler) -> Any:
        """Wait until all clients of the step sent the request or the deadline passed, then answer all requests."""
        client_id, micro_step = message.client_id, getattr(message, "micro_step", 0)
        batch = self.batches.setdefault((kind, micro_step), RequestBatch())
        if batch.answers is not None or client_id in batch.messages:
            raise repeated_error(client_id, kind, message)
        batch.messages[client_id] = message
        self._active_at = time.monotonic()
        self._state.condition.notify_all()
        while batch.answers is None:
            if batch.is_running:
                self._state.condition.wait()
                continue
            self._state.check(client_id)
            if message.step < self._state.step or client_id in self._late_clients:
                return LateReply(client_id, message.step)
            expected = self._expected_clients(kind, micro_step)
            if all(name in batch.messages for name in expected):
                self._answer_batch(kind, batch, [batch.messages[name] for name in expected], handler, client_id)
                continue
            remaining = None if self._deadline is None else batch.started_at + self._deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                self.continue_without(self.clients_without_request(expected))
                continue
            self._state.condition.wait(remaining)
        # The batch keeps all answers, even if the client whose thread computed the answers has disconnected.
        if client_id not in batch.answers:
            self._state.check(client_id)
            return LateReply(client_id, message.step)
        if isinstance(answer := batch.answers[client_id], ValueError):
            raise ValueError(str(answer))
        return answer

    def _answer_batch(
        self, kind: str, batch: RequestBatch, messages: Sequence[Any], handler: BatchHandler, client_id: str
    ) -> None:
        """Answer the requests of a batch, or remove the clients that cause an error."""
        batch.is_running = True
        self._is_ending |= kind == "step"
        try:
            with self._state.end_on_error(client_id):
                try:
                    with self._state.computing():
                        replies = handler(messages)
                except ClientFaultError as fault:
                    self._remove_faulty(fault)
                    return
                except ValueError as error:
                    batch.answers = dict.fromkeys(batch.messages, error)
                    return
            batch.answers = {message.client_id: reply for message, reply in zip(messages, replies, strict=True)}
            if kind == "step":
                self._finish_step([message.client_id for message in messages])
        finally:
            batch.is_running = False
            self._is_ending &= kind != "step"
            self._state.condition.notify_all()

    def _remove_faulty(self, fault: ClientFaultError) -> None:
        """Remove the clients that cause an error. If the error left the body incomplete, all clients skip the step."""
        for client_id in fault.client_ids:
            self._state.remove(client_id, str(fault))
        if self._is_batched and not fault.is_recoverable:
            self._late_clients.update(self.participants())

    def continue_without(self, missing: Sequence[str]) -> None:
        """
        Continue the step without the clients that have no pending request.

        A client with a pending request is not late, even if the request is for another micro-batch. All clients
        process their micro-batches in order (see [`StepProgress`]), so at least one client is missing: the clients
        with the least progress wait for no other client. If no client is missing, the run ends.

        Args:
            missing (`Sequence[str]`): The clients that have no pending request.
        """
        step = self._state.step
        if not missing:
            self._state.fail(f"{', '.join(self.participants())} wait for each other at step {step}")
            return
        logger.warning(f"The deadline of step {step} passed. The step continues without {', '.join(missing)}.")
        self._late_clients.update(missing)
        for client_id in missing:
            last_message = client_id, self._state.last_message_at[client_id]
            self._silent_steps[last_message] += 1
            if (num_steps := self._silent_steps[last_message]) >= MAX_SILENT_STEPS:
                self._state.remove(client_id, f"client {client_id!r} sent no message in {num_steps} successive steps")
        # Restart the deadline of all batches that waited for the missing clients.
        for batch in self.batches.values():
            batch.started_at = time.monotonic()
        self._state.condition.notify_all()

    def _expected_clients(self, kind: str, micro_step: int) -> list[str]:
        """Clients whose request a batch requires."""
        participants = self.participants()
        if kind == "step":
            return participants
        # A client that did not begin the step yet may send this micro-batch.
        return [client_id for client_id in participants if self._progress.may_send(client_id, micro_step)]

    # ---- Computation and end of a step

    def _train_step(self, messages: Sequence[EndStep]) -> list[EndStepReply]:
        """Update the bodies for the clients of the step. The caller holds the lock of the bodies."""
        model, step = self._server_model, self._state.step
        squared_norms = {message.client_id: message.squared_norm for message in messages}
        scales = {name: model.body_servers[name].take_boundary_scale(name) for name in squared_norms}
        self._bounds.check_squared_norms(step, squared_norms, scales)
        num_examples = {client_id: self._progress.num_examples(client_id) for client_id in squared_norms}
        model.discard([client_id for client_id in self._state.client_ids if client_id not in squared_norms])
        norms = model.train_step(step, squared_norms, num_examples)
        model.save_checkpoint(step + 1)
        return [EndStepReply(message.client_id, step, norms[message.client_id]) for message in messages]

    def _finish_step(self, clients: Sequence[str]) -> None:
        """Continue with the next step."""
        for client_id in clients:
            self._relay.record_training(client_id)
            self._last_steps[client_id] = self._state.step
        self._state.step += 1
        self._active_at = time.monotonic()
        self._late_clients, self.batches = set(), {}
        self._progress = StepProgress(self._server_model.split, self._server_model.args.gradient_accumulation_steps)
        self._state.condition.notify_all()

    def _skip_step(self, client_id: str) -> None:
        """End a step in which no client takes part any more. No parameter changes."""
        self._is_ending = True
        try:
            with self._state.end_on_error(client_id), self._state.computing():
                self._train_step([])
            self._finish_step([])
        finally:
            self._is_ending = False
