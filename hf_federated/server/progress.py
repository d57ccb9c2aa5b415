"""Progress of a round: a bar below the trainer's bar, a bar in a notebook, or one line per client in the log.

The trainer's own callback shows the rounds. Which of its callbacks is installed decides what is shown for a round:

- `ProgressCallback` on a terminal: a second tqdm bar, which disappears at the end of the round.
- `NotebookProgressCallback`: a bar below the table of metrics.
- Otherwise (`disable_tqdm=True`, or the output is a file): one line per trained client at INFO, in the log of
  transformers.

With `parallelism="clients"`, each process counts its own clients. Nothing is exchanged between processes.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from ..engines import Engine, Plan
from ..messages import ClientUpdate, Message


# A child of the logger of transformers: `set_verbosity_info()`, `log_level` of the training arguments and handlers of
# transformers also apply to the lines about clients.
logger = logging.get_logger("transformers.hf_federated")

# Longest client id in a bar.
MAX_ID_LENGTH = 30


class RoundProgress:
    """
    Shows how far a round is.

    Args:
        callbacks (`Callable[[], Sequence[TrainerCallback]]`): Returns the callbacks of the federated trainer.
        num_rounds (`int`): Number of rounds of the run.
    """

    def __init__(self, callbacks: Callable[[], Sequence[TrainerCallback]], num_rounds: int) -> None:
        self._callbacks = callbacks
        self._num_rounds = num_rounds
        self._bar: _Bar | None = None

    def client_callbacks(self) -> list[TrainerCallback]:
        """Callbacks of local training: one that reports the steps if there can be a bar."""
        return [_StepCallback(self)] if any(map(_is_progress_callback, self._callbacks())) else []

    def run(
        self, engine: Engine, plan: Plan, on_dispatch: Callable[[str], None] | None = None
    ) -> Generator[Message, None, None]:
        """
        Execute a plan as [`~hf_federated.engines.Engine.run`] and show its progress.

        Args:
            engine ([`Engine`]): The engine.
            plan ([`Plan`]): The plan to execute.
            on_dispatch (`Callable[[str], None]`, *optional*): Called with a client's id when its message is sent.

        Yields:
            [`Message`]: The replies of the clients.
        """
        num_clients = len(engine.own_clients(plan.cohort))
        num_replies = 0
        # The clients that have not replied, with the time of their message.
        waiting: dict[str, float] = {}

        def dispatch(client_id: str) -> None:
            waiting[client_id] = time.monotonic()
            if self._bar is not None:
                self._bar.show(num_replies, next(iter(waiting)))
            if on_dispatch is not None:
                on_dispatch(client_id)

        # If the consumer stops early, the engine must not wait for further replies.
        with self._shown_bar(plan, num_clients, engine), closing(engine.run(plan, dispatch)) as replies:
            for reply in replies:
                num_replies += 1
                started = waiting.pop(reply.client_id, None)
                if self._bar is not None:
                    # With no client left that trains, the next message is about to be sent.
                    if waiting:
                        self._bar.show(num_replies, next(iter(waiting)))
                elif isinstance(reply, ClientUpdate) and logger.isEnabledFor(logging.INFO):
                    seconds = None if started is None else time.monotonic() - started
                    logger.info(self._describe(reply, f"({num_replies}/{num_clients})", seconds))
                yield reply
                del reply  # Free the memory before the next client trains.

    def collect(
        self, engine: Engine, plan: Plan, on_dispatch: Callable[[str], None] | None = None
    ) -> dict[str, Message]:
        """
        Execute a plan as [`~hf_federated.engines.Engine.collect`] and show its progress.

        Args:
            engine ([`Engine`]): The engine.
            plan ([`Plan`]): The plan to execute.
            on_dispatch (`Callable[[str], None]`, *optional*): Called with a client's id when its message is sent.

        Returns:
            `dict[str, Message]`: Replies by client id, in the order of the cohort.
        """
        positions = itertools.count()

        def dispatch(client_id: str) -> None:
            if self._bar is not None:
                self._bar.show(next(positions), client_id)
            if on_dispatch is not None:
                on_dispatch(client_id)

        with self._shown_bar(plan, len(engine.own_clients(plan.cohort)), engine):
            return engine.collect(plan, dispatch)

    def on_client_step(self, step: int, num_steps: int) -> None:
        """Show an optimizer step of the client that trains in this process."""
        if self._bar is not None:
            self._bar.show_step(step, num_steps)

    def _describe(self, update: ClientUpdate, position: str, seconds: float | None) -> str:
        loss = update.metrics.get("loss")
        facts = [
            None if loss is None else f"loss {loss:.4g}",
            _count(update.num_examples, "example"),
            _count(update.num_steps, "step"),
            None if seconds is None else f"{seconds:.1f} s",
        ]
        return (
            f"round {update.round + 1}/{self._num_rounds}, client {update.client_id} {position}: "
            f"{', '.join(fact for fact in facts if fact is not None)}"
        )

    @contextmanager
    def _shown_bar(self, plan: Plan, num_clients: int, engine: Engine) -> Iterator[None]:
        """Show the bar of a plan inside the context, if the trainer itself shows a bar."""
        before, self._bar = self._bar, self._open_bar(plan, num_clients)
        if (bar := self._bar) is not None:
            engine.on_wait = lambda: bar.show_waiting(engine.describe_waiting())
        try:
            yield
        finally:
            engine.on_wait = None
            if self._bar is not None:
                self._bar.close()
            self._bar = before

    def _open_bar(self, plan: Plan, num_clients: int) -> _Bar | None:
        name = f"round {plan.round + 1}" if plan.phase == "training" else f"round {plan.round + 1}, {plan.phase}"
        for callback in self._callbacks():
            if not _is_progress_callback(callback):
                continue
            # A subclass may set no attribute, and only the main process has a bar.
            if isinstance(callback, ProgressCallback):
                outer = vars(callback).get("training_bar")
                if outer is not None and not outer.disable and sys.stderr.isatty():
                    return _TerminalBar(name, num_clients)
            elif (tracker := vars(callback).get("training_tracker")) is not None:
                return _NotebookBar(name, num_clients, tracker, plan.round)
        return None


def _is_progress_callback(callback: TrainerCallback) -> bool:
    # The module needs IPython. It is loaded if the class is in use.
    notebook = sys.modules.get("transformers.utils.notebook")
    return isinstance(callback, ProgressCallback) or (
        notebook is not None and isinstance(callback, notebook.NotebookProgressCallback)
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class _StepCallback(TrainerCallback):
    """Reports the optimizer steps of a client."""

    def __init__(self, progress: RoundProgress) -> None:
        self._progress = progress

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._progress.on_client_step(state.global_step, state.max_steps)


class _Bar(ABC):
    """
    A bar of one plan.

    Clients and steps are each drawn at most every `interval` seconds, so that drawing takes no time from training.
    """

    interval: float

    def __init__(self, name: str, num_clients: int) -> None:
        self._name = name
        self._num_clients = num_clients
        self._num_replies = 0
        self._short_id = ""
        self._client_drawn = self._step_drawn = -math.inf

    def show(self, num_replies: int, client_id: str) -> None:
        """Show the number of clients that have replied, and the client that trains."""
        self._num_replies = num_replies
        self._short_id = client_id if len(client_id) <= MAX_ID_LENGTH else f"{client_id[: MAX_ID_LENGTH - 1]}…"
        now = time.monotonic()
        if now - self._client_drawn >= self.interval:
            self._client_drawn = now
            self._draw([self._short_id], 0.0)

    def show_waiting(self, text: str | None) -> None:
        """Show which clients on other machines train, are late or absent."""
        now = time.monotonic()
        if text is not None and now - self._step_drawn >= self.interval:
            self._step_drawn = now
            self._draw([text], 0.0)

    def show_step(self, step: int, num_steps: int) -> None:
        """Show the step of the client that trains."""
        now = time.monotonic()
        if now - self._step_drawn >= self.interval:
            self._step_drawn = now
            self._draw([self._short_id, f"step {step}/{num_steps}"], step / max(num_steps, 1))

    @abstractmethod
    def _draw(self, parts: list[str], share_of_client: float) -> None:
        """Draw the bar. `parts` are the client and its step; `share_of_client` is the share of its steps."""

    @abstractmethod
    def close(self) -> None:
        """Remove the bar."""


class _TerminalBar(_Bar):
    """A tqdm bar below the bar of the trainer."""

    interval = 0.1

    def __init__(self, name: str, num_clients: int) -> None:
        super().__init__(name, num_clients)
        # This class limits how often the bar is drawn.
        self._bar = tqdm(
            total=num_clients,
            leave=False,
            dynamic_ncols=True,
            bar_format="{desc} |{bar}| {elapsed}<{remaining}",
            desc=f"{name}: 0/{num_clients} clients",
        )

    def _draw(self, parts: list[str], share_of_client: float) -> None:
        self._bar.n = min(self._num_replies + share_of_client, self._num_clients)
        counted = f"{self._name}: {self._num_replies}/{self._num_clients} clients"
        self._bar.set_description_str(" · ".join([counted, *parts]))

    def close(self) -> None:
        self._bar.close()


class _NotebookBar(_Bar):
    """A bar in the output of `NotebookProgressCallback`, where its bar of an evaluation is shown at other times."""

    interval = 0.2

    def __init__(self, name: str, num_clients: int, tracker: Any, round: int) -> None:
        super().__init__(name, num_clients)
        self._tracker = tracker
        if tracker.value is None:  # The trainer draws its bar when the first round ends.
            tracker.update(round)
        self._bar = tracker.add_child(num_clients, prefix=f"{name}, clients")

    def _draw(self, parts: list[str], share_of_client: float) -> None:
        self._bar.update(self._num_replies, force_update=True, comment=" · ".join(parts))

    def close(self) -> None:
        self._tracker.remove_child()
