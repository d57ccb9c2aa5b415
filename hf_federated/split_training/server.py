"""The server of a networked run: it holds the body, says whose step it is, and carries what clients send each other.

It answers messages, whatever brings them; a transport calls it from a thread for each client, and waiting happens
here. All clients go through the same numbered steps. A step begins when the one before it has ended, and ends when
everybody who takes part has sent its gradients' norm and the server has stepped. Where clients meet (`"client_batch"`)
a deadline may be set, after which the step goes on without those that are missing; they hear that they are late.

Nothing here sees tokens, labels or losses, nor parameters of a head or tail. A client that does not do as it should is
refused or ends the run; what it says of its gradients' norm, by which all clip, is believed. One that is late for the
end of a step has trained the body with the passages that it made before.
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
from .messages import Begin, Begun, Fetch, Fetched, Finish, Join, Joined, Late, Send, Sent, Step, Stepped, read_message
from .pending_messages import Answer, Gathering, Mailbox, Passages
from .server_model import ServerBodies
from .step_plan import StepPlan


logger = logging.get_logger(__name__)


class RunFailedError(ValueError):
    """The run cannot go on for anybody; it is resumed from its checkpoints."""


class TrainingServer:
    """
    Answers the clients of one run.

    Args:
        bodies ([`ServerBodies`]): What the server trains; it knows the clients and the strategy.
        digest (`str`): Of all settings that parties must have in common.
        deadline (`float`, *optional*): Seconds that clients who meet wait for one another, from the first that is
            there; by default for ever.

    Raises:
        ValueError: If a deadline is set where nobody waits.
    """

    def __init__(self, bodies: ServerBodies, digest: str, deadline: float | None = None) -> None:
        split = bodies.split
        if deadline is not None and split.strategy != "client_batch":
            raise ValueError(f"A deadline is for clients that meet, strategy='client_batch', not {split.strategy!r}.")
        self.split = split
        self.client_ids = list(bodies.of_client)
        self.digest = digest
        self.deadline = deadline
        self.finished = threading.Event()
        self.step = 0
        self.bodies = bodies
        # Everything below is guarded by it.
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._joined: dict[str, Join] = {}
        self._plan = StepPlan({}, together=False)
        self._resume_step = 0
        self._passages = Passages(split.strategy == "client_batch")
        self._late: set[str] = set()
        self._gathered: dict[tuple[str, int], Gathering] = {}
        self._mailbox = Mailbox(self.client_ids)
        self._done: set[str] = set()

    def answer(self, client_id: str, blob: bytes) -> bytes:
        """
        Do what a message asks, which may take as long as others need.

        Args:
            client_id (`str`): Who sent it, as the transport knows.
            blob (`bytes`): The serialised message.

        Raises:
            ValueError: If the message cannot be read, is another client's or comes at a wrong time.
            RunFailedError: If the run cannot go on.
        """
        message = read_message(blob)
        if message.client_id != client_id:
            raise ValueError(f"Client {client_id!r} sent a message in the name of {message.client_id!r}.")
        if client_id not in self.client_ids:
            raise ValueError(f"Client {client_id!r} takes no part in this run: {', '.join(self.client_ids)} do.")
        handlers: dict[type[Any], Callable[[Any], Any]] = {
            Join: self._join,
            Begin: self._begin,
            Step: self._end,
            Send: self._send,
            Fetch: self._fetch,
            Finish: self._finish,
            Forward: self._forward,
            Backward: self._backward,
            Forget: self._forget,
        }
        with self._changed:
            self._check()
            if client_id in self._done and not isinstance(message, Forget):
                raise ValueError(f"Client {client_id!r} said that it is done.")
            answer = handlers[type(message)](message)
            return b"" if answer is None else answer.to_bytes()

    def wait(self, notice_after: float = 60.0) -> str | None:
        """
        Wait until the run is over.

        Args:
            notice_after (`float`, *optional*, defaults to `60`): After so many seconds without a step, the log says
                for whom the run waits, and again after as many more.

        Returns:
            `str`: Why it failed; `None` where everybody finished.
        """
        with self._changed:
            since, before = time.monotonic(), self._progress()
            while not self._changed.wait_for(self._is_over, notice_after):
                if self._progress() != before:
                    since, before = time.monotonic(), self._progress()
                elif missing := self._waits_for():
                    silent = time.monotonic() - since
                    logger.warning(f"Step {self.step} waits for {', '.join(missing)}, for {silent:.0f} s now.")
            return self._failure

    def _is_over(self) -> bool:
        return self._failure is not None or self.finished.is_set()

    def _progress(self) -> tuple[int, ...]:
        return len(self._joined), self.step, len(self._done)

    def _waits_for(self) -> list[str]:
        """Clients from whom something has to come before the run goes on; none while the server itself works."""
        if not self._plan:
            return [own for own in self.client_ids if own not in self._joined]
        if self.step >= self.bodies.max_steps:
            missing = [own for own in self.client_ids if own not in self._done]
        else:
            missing = self._without_message(self._participants())
        # Who waits for an envelope waits for who writes it.
        return [own for own in missing if own not in self._mailbox.waiting]

    def _without_message(self, clients: Sequence[str]) -> list[str]:
        """Those of whom no message waits, for a passage or a step, to be answered."""
        waiting = {own for each in self._gathered.values() if not each.settled for own in each.messages}
        return [own for own in clients if own not in waiting]

    def client_lost(self, client_id: str) -> None:
        """A client is not heard any more: the run ends for all, and is resumed from its checkpoints."""
        with self._changed:
            if client_id in self._done or self.finished.is_set():
                return
            self._fail(f"client {client_id!r} is gone")

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why
        self._changed.notify_all()

    @contextlib.contextmanager
    def _for_everybody(self) -> Iterator[None]:
        """What goes wrong here ends the run: the log has it, clients learn its class."""
        try:
            yield
        except RunFailedError:
            raise
        except Exception as error:
            logger.exception("The server cannot go on.")
            self._fail(f"the server failed ({type(error).__name__}), and its log says why")
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise RunFailedError(
                f"The run ended at step {self.step}: {self._failure}. Start all again, clients to resume."
            )

    def _wait(self, until: Callable[[], bool]) -> None:
        """Let others go on until something is so, or the run fails."""
        self._changed.wait_for(lambda: self._failure is not None or until())
        self._check()

    # ---- Beginning and end

    def _join(self, message: Join) -> Joined:
        try:
            check_join(message, self.digest)
        except ValueError as error:
            logger.warning(f"Client {message.client_id!r} cannot join: {error}")
            raise
        if message.client_id in self._joined:
            raise ValueError(
                f"Client {message.client_id!r} joined this run before. Start the server again to resume it."
            )
        self._joined[message.client_id] = message
        if len(self._joined) == len(self.client_ids):
            with self._for_everybody():
                self._start()
        self._changed.notify_all()
        self._wait(lambda: bool(self._plan))
        return Joined(
            message.client_id,
            self._resume_step,
            {own: self._joined[own].num_steps for own in self.client_ids},
            {own: self._joined[own].introduction for own in self.client_ids},
        )

    def _start(self) -> None:
        """Everybody is there: plan the steps, and go back to the last one of which everybody has a checkpoint."""
        steps = {own: self._joined[own].num_steps for own in self.client_ids}
        plan = StepPlan(steps, self.split.strategy != "serial", self.split.steps_per_turn)
        self.bodies.prepare(len(plan))
        own_steps = self.bodies.checkpoints()
        common = set(own_steps).intersection(*(set(own.checkpoints) for own in self._joined.values()))
        if common:
            self.step = self._resume_step = max(common)
            self.bodies.load_checkpoint(own_steps[self.step])
        elif any(own.checkpoints for own in self._joined.values()):
            logger.warning("There is no step of which server and clients all have a checkpoint: the run begins anew.")
        self._plan = plan
        logger.info(f"{len(steps)} clients joined: {self.bodies.max_steps} steps, from {self.step}.")

    def _finish(self, message: Finish) -> None:
        if message.step > self.step:
            raise ValueError(f"Client {message.client_id!r} ends at step {message.step}, and this is {self.step}.")
        if not self._plan:
            self._fail(f"client {message.client_id!r} left before everybody was there")
            return
        self._done.add(message.client_id)
        if message.step < self.bodies.max_steps:
            self._fail(
                f"client {message.client_id!r} stopped before step {self.bodies.max_steps}, where all have to end: set"
                " max_steps or num_train_epochs in place of a callback that stops one client"
            )
            return
        if len(self._done) == len(self.client_ids):
            with self._for_everybody():
                self.bodies.save()
            self.finished.set()
        self._changed.notify_all()

    # ---- Steps

    def _participants(self) -> list[str]:
        """Who takes part in the step that is under way and is not late, in the clients' order."""
        return [own for own in self._plan[self.step % len(self._plan)] if own not in self._late]

    def _is_late(self, message: Any) -> bool:
        """Whether the step of a message went on without its client."""
        if not self._plan or message.step > self.step:
            raise ValueError(f"Step {message.step} of {message.client_id!r} was not begun; this is {self.step}.")
        if message.step >= self.bodies.max_steps:
            raise ValueError(f"Step {message.step} of {message.client_id!r} is behind the last, {message.step - 1}.")
        return message.step < self.step or message.client_id in self._late

    def _begin(self, message: Begin) -> Begun | Late:
        client_id = message.client_id
        if not self._plan or message.step > self.bodies.max_steps:
            raise ValueError(f"Client {client_id!r} cannot begin step {message.step} of {self.bodies.max_steps}.")
        self._wait(lambda: self.step >= message.step)
        if not message.num_batches:
            return Begun(client_id, message.step)
        if self._is_late(message):
            return Late(client_id, message.step)
        if client_id not in self._participants():
            raise ValueError(f"Client {client_id!r} takes no part in step {self.step}.")
        self._passages.begin(message)
        self._changed.notify_all()
        return Begun(client_id, message.step)

    def _forward(self, message: Forward) -> Any:
        server = self.bodies.of_client[message.client_id]
        if not message.grad:
            return server.forward(message)
        return self._pass("forward", message, server.check_forward, server.forward_batch)

    def _backward(self, message: Backward) -> Any:
        server = self.bodies.of_client[message.client_id]
        return self._pass("backward", message, server.check_backward, server.backward_batch)

    def _pass(self, what: str, message: Any, check: Callable[[Any], None], answer: Answer) -> Any:
        """Take a client's hidden states or gradients through the body, with those of others where they meet."""
        if self._is_late(message):
            return Late(message.client_id, message.step)
        self._passages.check(message)
        if self.split.strategy == "client_batch":
            # What is wrong with one message is for its sender to hear, not for all that meet.
            self.bodies.check_alike(message)
            check(message)
            answered = self._meet(what, message, answer)
        else:
            (answered,) = answer([message])
        if message.step == self.step and message.client_id not in self._late:
            self._passages.count(message)
        return answered

    def _forget(self, message: Forget) -> None:
        self.bodies.of_client[message.client_id].answer(message.to_bytes())

    def _end(self, message: Step) -> Any:
        if self._is_late(message):
            return Late(message.client_id, message.step)
        self._passages.check(message)
        if not math.isfinite(message.squared_norm):
            raise ValueError(
                f"The gradients of client {message.client_id!r} are not finite at step {self.step}, by which others "
                "would clip theirs: lower the learning rate."
            )
        return self._meet("step", message, self._step_together)

    def _step_together(self, messages: Sequence[Step]) -> list[Stepped]:
        """Step for everybody who takes part, and end the step."""
        ended = self.step
        squared_norms = {message.client_id: message.squared_norm for message in messages}
        num_rows = {own: self._passages.num_rows(own) for own in squared_norms}
        norms = self.bodies.train_step(ended, squared_norms, num_rows)
        self.step += 1
        for own in self._late:
            self.bodies.of_client[own].forget_passages([own])
        self._late, self._gathered = set(), {}
        self._passages = Passages(self.split.strategy == "client_batch")
        with self._for_everybody():
            self.bodies.save_checkpoint(self.step)
        return [Stepped(message.client_id, ended, norms[message.client_id]) for message in messages]

    def _meet(self, what: str, message: Any, answer: Answer) -> Any:
        """Wait for everybody who takes part, or until the deadline, and let one answer all."""
        key = what, getattr(message, "micro_step", 0)
        gathering = self._gathered.setdefault(key, Gathering())
        if gathering.settled or message.client_id in gathering.messages:
            raise ValueError(f"Client {message.client_id!r} sent {what} {key[1]} of step {message.step} again.")
        gathering.messages[message.client_id] = message
        self._changed.notify_all()
        while not gathering.settled:
            expected = self._expected(what, key[1])
            if all(own in gathering.messages for own in expected):
                with self._for_everybody():
                    gathering.settle([gathering.messages[own] for own in expected], answer)
                self._changed.notify_all()
                break
            left = None if self.deadline is None else gathering.began + self.deadline - time.monotonic()
            if left is not None and left <= 0:
                self._go_on_without(expected)
                continue
            self._changed.wait(left)
            if not gathering.settled:
                self._check()
        # What was settled is told to everybody, also where the one that settled it was gone before the others woke up.
        if gathering.error is not None:
            raise ValueError(gathering.error)
        assert gathering.answers is not None
        return gathering.answers[message.client_id]

    def _go_on_without(self, expected: Sequence[str]) -> None:
        """
        Those of whom nothing came; who waits, here or at another passage, is not late. There should be somebody:
        clients go through their passages in one order (`Passages`), so those that are least far have all others'
        messages.
        """
        missing = self._without_message(expected)
        if not missing:
            self._fail(f"{', '.join(expected)} wait for one another at step {self.step}")
            self._check()
        logger.warning(f"Step {self.step} goes on without {', '.join(missing)}, who came too late.")
        self._late.update(missing)
        # Those that waited for the late ones too have the time again.
        for each in self._gathered.values():
            each.began = time.monotonic()
        self._changed.notify_all()

    def _expected(self, what: str, micro_step: int) -> list[str]:
        """Whose messages one waits for."""
        own = self._participants()
        if what == "step":
            return own
        # Who has not begun may have this passage too.
        return [one for one in own if self._passages.may_come(one, micro_step)]

    # ---- Envelopes

    def _send(self, message: Send) -> Sent:
        self._mailbox.put(message)
        self._changed.notify_all()
        return Sent(message.client_id, message.step)

    def _fetch(self, message: Fetch) -> Fetched:
        self._mailbox.check(message)
        own, sender = message.client_id, message.sender
        self._mailbox.waiting.add(own)
        try:
            self._wait(lambda: self._mailbox.has(message) or sender in self._done)
        finally:
            self._mailbox.waiting.discard(own)
        if not self._mailbox.has(message):
            self._fail(f"client {sender!r} left before it wrote to {own!r}")
            self._check()
        return Fetched(own, message.step, sender, self._mailbox.take(message))
