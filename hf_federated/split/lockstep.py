"""`LockstepRunner`: functions that take turns, and whose messages a server answers together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ..utils.random import generator_states, set_generator_states


T = TypeVar("T")


class LockstepRunner:
    """
    Runs functions that exchange messages with a server, and lets the server answer the messages of all functions.

    Each function runs in a separate thread and waits at each `exchange` until all other functions wait or have
    finished. Only one thread runs at a time, in the order of the functions, and each thread has its own random state,
    so the result does not depend on the machine.

    Args:
        answer (`Callable[[Sequence], Sequence]`): Answers the messages of all functions, in their order.
        kind (`str`, *optional*, defaults to `"client"`): What a function belongs to, for error messages.
    """

    def __init__(self, answer: Callable[[Sequence[Any]], Sequence[Any]], kind: str = "client") -> None:
        self._answer_messages = answer
        self._kind = kind
        self._changed = threading.Condition()
        # Functions that have not finished, in order.
        self._active: list[str] = []
        self._turn: str | None = None
        self._cancelled = False
        self._threads: dict[str, int | None] = {}
        # Messages of the functions that wait.
        self._messages: dict[str, Any] = {}
        self._answers: dict[str, Any] = {}

    def is_running(self, name: str) -> bool:
        """Whether the function of this name is running."""
        return name in self._active

    def name_of_thread(self) -> str | None:
        """Name of the function that runs in this thread, if any."""
        thread = threading.get_ident()
        return next((name for name, ident in self._threads.items() if ident == thread), None)

    def run(self, work: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """
        Run all functions.

        Args:
            work (`Mapping[str, Callable]`): The functions, by name, in the order of their turns.

        Returns:
            `dict[str, Any]`: The return value of each function.

        Raises:
            Exception: The error of the first function that fails. The other functions stop at their next exchange.
            RuntimeError: If there are no functions, or another `run` is in progress.
        """
        if not work or self._threads:
            raise RuntimeError(
                f"{type(self).__name__}.run() was called with {len(work)} functions, or during another run. It needs "
                "at least one function, and only one run at a time is possible."
            )
        results: dict[str, T] = {}
        failures: dict[str, BaseException] = {}
        self._active = list(work)
        self._turn = self._active[0]
        random_states = generator_states()
        threads = [
            threading.Thread(target=self._run, args=(name, function, results, failures, torch.is_grad_enabled()))
            for name, function in work.items()
        ]
        self._threads = dict.fromkeys(work)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            # After an interrupt of this thread, the functions stop at their next exchange.
            with self._changed:
                self._cancelled = True
                self._changed.notify_all()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            self._turn, self._cancelled = None, False
            self._threads, self._active = {}, []
            self._messages.clear()
            self._answers.clear()
            set_generator_states(random_states)
        for name in work:
            if name in failures and not isinstance(failures[name], StepCancelledError):
                raise failures[name]
        return results

    def _run(
        self,
        name: str,
        function: Callable[[], T],
        results: dict[str, T],
        failures: dict[str, BaseException],
        grad: bool,
    ) -> None:
        """Run one function in its thread."""
        self._threads[name] = threading.get_ident()
        try:
            with self._changed:
                self._wait_for_turn(name)
            self._enter(name)
            with torch.set_grad_enabled(grad):
                results[name] = function()
            self._leave(name)
            self._finish(name)
        except BaseException as error:
            failures[name] = error
        with self._changed:
            following = self._following(name)
            self._active.remove(name)
            self._cancelled |= name in failures
            self._pass_turn(following if following != name else None)

    def _enter(self, name: str) -> None:
        """Called when the turn of a function begins."""

    def _leave(self, name: str) -> None:
        """Called when the turn of a function ends."""

    def _finish(self, name: str) -> None:
        """Called when a function has finished, in the order of the functions if all have the same number of turns."""

    def exchange(self, name: str, message: Any) -> Any:
        """
        Wait until all functions have sent a message, and return the answer to the message of this function.

        Raises:
            RuntimeError: If another thread than that of the function calls the method.
        """
        if self._threads[name] != threading.get_ident():
            raise RuntimeError(
                f"The backward pass of {self._kind} {name!r} reached the cut layer in another thread. On a GPU one "
                f"thread runs the backward passes of every {self._kind}, which would wait for each other. Set "
                "boundary.defers_backward, and call boundary.finish_backward() after the backward pass."
            )
        states = generator_states()
        self._leave(name)
        with self._changed:
            self._check_not_cancelled()
            self._messages[name] = message
            self._pass_turn(self._following(name))
            self._wait_for_turn(name)
            set_generator_states(states)
            answer = self._answers.pop(name)
        self._enter(name)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _check_not_cancelled(self) -> None:
        if self._cancelled:
            raise StepCancelledError()

    def _wait_for_turn(self, name: str) -> None:
        self._changed.wait_for(lambda: self._cancelled or self._turn == name)
        self._check_not_cancelled()

    def _following(self, name: str) -> str:
        index = self._active.index(name)
        return self._active[(index + 1) % len(self._active)]

    def _pass_turn(self, name: str | None) -> None:
        """Pass the turn to a function that can continue. If all functions wait, answer their messages first."""
        if self._active and not self._cancelled and all(active in self._messages for active in self._active):
            self._answer()
            name = self._active[0]
        elif name is not None and not self._cancelled:
            # Skip the functions that wait.
            while name in self._messages:
                name = self._following(name)
        self._turn = name
        self._changed.notify_all()

    def _answer(self) -> None:
        messages = [self._messages[name] for name in self._active]
        try:
            self._answers = dict(zip(self._active, self._answer_messages(messages), strict=True))
        except Exception as error:
            self._answers = dict.fromkeys(self._active, error)
        self._messages.clear()


class StepCancelledError(RuntimeError):
    """Raised in a function after another function failed, or after an interrupt."""

    def __init__(self) -> None:
        super().__init__("Another part of the step failed, or the step was interrupted.")
