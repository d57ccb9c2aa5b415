"""The server of a networked run. It holds the body, schedules the steps, and relays messages between clients.

The server answers messages independently of their transport. The transport calls `TrainingServer.answer` from one
thread per client, and the calls block until the required messages of other clients have arrived. The work is divided:

- [`RunState`]: the locks, the step, and the clients that were removed (`run_state.py`),
- [`StepCoordinator`]: the steps (`step_coordinator.py`),
- [`EnvelopeRelay`]: encrypted messages between clients (`envelope_relay.py`),
- [`ServerModel`]: the bodies and their files (`server_model.py`).

The server receives no tokens, labels, losses, or parameters of a head or tail. A message that violates the protocol is
rejected. A client that disconnects, stops early, or reports impossible gradients is removed from the run, and the run
continues with the other clients if at least `min_clients` of the split config are left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transformers.utils import logging

from ..messages.serialization import packed_kind
from ..split.messages import Backward, Forget, Forward
from ..utils.printable import printable
from .envelope_relay import EnvelopeRelay
from .messages import (
    STOPPING_KINDS,
    BeginStep,
    Bundle,
    EndStep,
    FetchEnvelope,
    Finish,
    Join,
    JoinReply,
    SendEnvelope,
    as_tensor,
    as_view,
    read_message,
)
from .networked_checks import check_join
from .run_state import ClientRemovedError, RunFailedError, RunState
from .server_model import ServerModel
from .step_coordinator import StepCoordinator
from .step_plan import StepPlan


logger = logging.get_logger(__name__)

__all__ = ["RunFailedError", "TrainingServer"]

# Number of rejected messages of a client that are logged.
MAX_LOGGED_REJECTIONS = 10


class TrainingServer:
    """
    Server that answers the clients of one run.

    Args:
        server_model ([`ServerModel`]): The trained model, which also defines the clients and the strategy.
        digest (`str`): Digest of the settings that all parties share.
        deadline (`float`, *optional*): Seconds that a step waits. With `"serial"`, the step waits for the next message
            of its only client. With the other strategies, it waits for the remaining clients after the first request.
            The step then continues without the missing clients. A client that sends nothing in three successive steps,
            or does not send the parameters that another client waits for, is removed. By default the server waits
            without a limit.

    Attributes:
        state ([`RunState`]): The locks, the step, and the clients that were removed.
        steps ([`StepCoordinator`]): Answers the messages of the steps.
        relay ([`EnvelopeRelay`]): Relays encrypted messages between clients.
        resume_step (`int`): The step from which the run resumed; 0 if it started from scratch.
    """

    def __init__(self, server_model: ServerModel, digest: str, deadline: float | None = None) -> None:
        split = server_model.split
        self.split = split
        self.client_ids = list(server_model.body_servers)
        self.digest = digest
        self.deadline = deadline
        self.server_model = server_model
        self.state = RunState(self.client_ids, split.resolve_min_clients(len(self.client_ids)))
        self.state.share_bodies(server_model.party_names)
        self.finished = self.state.finished
        self.relay = EnvelopeRelay(self.state, split, deadline)
        self.steps = StepCoordinator(self.state, server_model, self.relay, deadline)
        self._joined: dict[str, Join] = {}
        self.resume_step = 0
        self._is_starting = False
        self._num_rejections: dict[str, int] = {}
        self._handlers: dict[type[Any], Callable[[Any], Any]] = {
            Join: self._join_run,
            BeginStep: self.steps.begin_step,
            EndStep: self.steps.end_step,
            SendEnvelope: self.relay.store,
            FetchEnvelope: self.relay.deliver,
            Finish: self._finish_run,
            Forward: self.steps.forward,
            Backward: self.steps.backward,
            Forget: self.steps.forget,
        }

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self.state.step

    def answer(self, client_id: str, blob: bytes | memoryview) -> bytes:
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
            ClientRemovedError: If the client was removed from the run.
        """
        try:
            return self._answer(client_id, blob)
        except (RunFailedError, ClientRemovedError):
            raise
        except ValueError as error:
            self._log_rejection(client_id, error)
            raise

    def _answer(self, client_id: str, blob: bytes | memoryview) -> bytes:
        if client_id not in self.client_ids:
            raise ValueError(
                f"Client {client_id!r} is not part of this run. The clients are {', '.join(self.client_ids)}."
            )
        message = read_message(blob)
        if message.client_id != client_id:
            raise ValueError(f"Client {client_id!r} sent a message in the name of {message.client_id!r}.")
        if isinstance(message, Bundle):
            return self._answer_bundle(client_id, message)
        with self.state.condition:
            self.state.check(client_id)
            if client_id in self.state.finished_clients and not isinstance(message, Forget):
                raise ValueError(f"Client {client_id!r} sent a request after it finished. Call leave() last.")
            self.state.last_message_at[client_id] = time.monotonic()
            try:
                answer = self._handlers[type(message)](message)
            finally:
                # The client may have waited for longer than a deadline.
                self.state.last_message_at[client_id] = time.monotonic()
        return b"" if answer is None else bytes(answer.to_bytes())

    def _answer_bundle(self, client_id: str, bundle: Bundle) -> bytes:
        """Answer the messages of a bundle in order, until an answer stops the client."""
        answers = []
        for content in bundle.messages:
            message = as_view(content)
            if packed_kind(message) == Bundle.kind:
                raise ValueError(f"Client {client_id!r} sent a bundle in a bundle.")
            answers.append(self._answer(client_id, message))
            if packed_kind(answers[-1]) in STOPPING_KINDS:
                break
        return Bundle(client_id, [as_tensor(answer) for answer in answers]).to_bytes()

    def _log_rejection(self, client_id: str, error: ValueError) -> None:
        """Log a rejected message. Later messages of the same client are not logged, so that it cannot fill the log."""
        with self.state.condition:
            number = self._num_rejections[client_id] = self._num_rejections.get(client_id, 0) + 1
        if number <= MAX_LOGGED_REJECTIONS:
            remark = " Further rejections are not logged." if number == MAX_LOGGED_REJECTIONS else ""
            logger.warning(f"A message of client {client_id!r} was rejected: {printable(error, 1000)}{remark}")

    def wait(self, notice_after: float = 60.0) -> str | None:
        """
        Wait until the run has ended.

        Args:
            notice_after (`float`, *optional*, defaults to `60`): Seconds without progress after which a warning names
                the clients that the run waits for. The warning is repeated after the same interval.

        Returns:
            `str`: The reason for the failure; `None` if all clients finished.
        """
        condition = self.state.condition
        with condition:
            last_progress_at, last_progress = time.monotonic(), self._progress()
            while not condition.wait_for(lambda: self.state.is_over, notice_after):
                if self._progress() != last_progress:
                    last_progress_at, last_progress = time.monotonic(), self._progress()
                elif missing := self._awaited_clients():
                    idle_seconds = time.monotonic() - last_progress_at
                    logger.warning(
                        f"Step {self.step} has been waiting for {', '.join(missing)} for {idle_seconds:.0f} s."
                    )
            return self.state.failure

    def _progress(self) -> tuple[int, ...]:
        return len(self._joined), self.step, len(self.state.finished_clients), len(self.state.removed)

    def _awaited_clients(self) -> list[str]:
        """Clients whose next message the run requires. Empty while the server computes."""
        active = self.state.active_clients
        if not self.steps.plan:
            return [client_id for client_id in active if client_id not in self._joined]
        if self.step >= self.server_model.max_steps:
            missing = [client_id for client_id in active if client_id not in self.state.finished_clients]
        else:
            missing = self.steps.clients_without_request(self.steps.participants())
        # A client that waits for the parameters of another client does not hold up the run.
        return [client_id for client_id in missing if client_id not in self.relay.waiting_clients]

    def client_lost(self, client_id: str) -> None:
        """Report that a client is disconnected. The run continues without it if enough clients are left."""
        with self.state.condition:
            self.state.remove(client_id, f"client {client_id!r} disconnected")
            self._finish_if_complete(client_id)

    # ---- Start and end of the run

    def _join_run(self, message: Join) -> JoinReply:
        client_id, state = message.client_id, self.state
        check_join(message, self.digest)
        if client_id in self._joined:
            raise ValueError(f"Client {client_id!r} joined this run before. Restart the server to resume the run.")
        self._joined[client_id] = message
        state.condition.notify_all()
        while not self.steps.plan:
            state.check(client_id)
            if not self._is_starting and all(name in self._joined for name in state.active_clients):
                self._start_run(client_id)
            else:
                state.condition.wait()
        state.check(client_id)
        return JoinReply(
            client_id,
            self.resume_step,
            dict(self._num_steps),
            {name: self._joined[name].introduction for name in self._num_steps},
        )

    def _start_run(self, client_id: str) -> None:
        """Plan the steps after all clients have joined, and load the latest checkpoint that all parties have."""
        state, model = self.state, self.server_model
        self._is_starting = True
        joined = [self._joined[name] for name in state.active_clients]
        self._num_steps = {join.client_id: join.num_steps for join in joined}
        plan = StepPlan(self._num_steps, self.split.strategy != "serial", self.split.steps_per_turn)
        with state.end_on_error(client_id), state.computing():
            model.prepare(len(plan))
            checkpoints = model.checkpoints()
            common_steps = set(checkpoints).intersection(*(set(join.checkpoints) for join in joined))
            if common_steps:
                model.load_checkpoint(checkpoints[max(common_steps)])
        if common_steps:
            state.step = self.resume_step = max(common_steps)
        elif any(join.checkpoints for join in joined):
            logger.warning(
                "The server and the clients have no checkpoint of a common step. The run starts from scratch."
            )
        self.steps.start(plan)
        logger.info(
            f"{len(joined)} clients joined, with these steps in an epoch: {self._num_steps}. Training from step "
            f"{state.step} to step {model.max_steps}."
        )
        state.condition.notify_all()

    def _finish_run(self, message: Finish) -> None:
        client_id, state, max_steps = message.client_id, self.state, self.server_model.max_steps
        if message.step > self.step:
            raise ValueError(
                f"Client {client_id!r} finished at step {message.step}, but the current step is {self.step}."
            )
        if not self.steps.plan:
            state.remove(client_id, f"client {client_id!r} left before all clients joined")
        elif message.step < max_steps:
            state.remove(
                client_id,
                f"client {client_id!r} stopped before the last step {max_steps}; to stop all clients earlier, set "
                "max_steps or num_train_epochs instead of a callback that stops one client",
            )
        else:
            state.finished_clients.add(client_id)
        self._finish_if_complete(client_id)
        state.condition.notify_all()

    def _finish_if_complete(self, client_id: str) -> None:
        """Save the bodies after all clients of the run have finished."""
        state = self.state
        if state.is_over or not self.steps.plan or not state.finished_clients >= set(state.active_clients):
            return
        with state.end_on_error(client_id), state.computing():
            self.server_model.save()
        state.finished.set()
        state.condition.notify_all()
