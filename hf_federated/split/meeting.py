"""Where the clients of one server step meet: their hidden states go through the body together.

FL-GLM's client-batch strategy (section 3.3): "stack the smashed data from different clients". Each client's work is an
ordinary function that calls its model, in a thread of its own; at the boundary it waits until every other client is
there too. Only one of the threads runs at a time, in the clients' order, and each has random numbers of its own, so
the result does not depend on the machine.

Backward passes on a GPU run in a thread of the device's own, which a waiting client would block for all. A client
there sets `defers_backward` of its boundary: its backward pass then ends behind the boundary, and `finish_backward`
waits for the others and goes on. Otherwise it is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from ..utils.random import set_torch_state, torch_state
from .body import BodyServer
from .messages import Backward, Forget, Forward, read_request


T = TypeVar("T")


class Meeting:
    """
    Runs the clients of one server step, and answers them together.

    Args:
        server ([`BodyServer`]): The server.

    Example:

    ```python
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from hf_federated import SplitModel
    >>> from hf_federated.split import Meeting

    >>> config = LlamaConfig(
    ...     vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2
    ... )
    >>> whole = LlamaForCausalLM(config)
    >>> clients = {name: SplitModel.from_model(whole, client_id=name) for name in ("a", "b")}
    >>> meeting = Meeting(clients["a"].boundary.link.server)
    >>> for name, client in clients.items():
    ...     client.boundary.link = meeting.link(name)

    >>> rows = {"a": torch.tensor([[1, 2, 3]]), "b": torch.tensor([[4, 5]])}
    >>> logits = meeting.run({name: lambda name=name: clients[name](rows[name]).logits for name in clients})
    >>> [tuple(own.shape) for own in logits.values()]
    [(1, 3, 40), (1, 2, 40)]
    ```
    """

    def __init__(self, server: BodyServer) -> None:
        self.server = server
        self._changed = threading.Condition()
        self._present: list[str] = []
        self._turn: str | None = None
        self._failed: str | None = None
        self._given_up = False
        self._threads: dict[str, int | None] = {}
        self._messages: dict[str, Forward | Backward] = {}
        self._answers: dict[str, bytes | Exception] = {}

    def link(self, client_id: str) -> MeetingLink:
        """A client's way to the server."""
        return MeetingLink(self, client_id)

    def run(self, work: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """
        Do every client's work, side by side.

        Args:
            work (`Mapping[str, Callable]`): What each client does, in the order in which their rows are stacked.

        Returns:
            `dict[str, Any]`: What each returned.

        Raises:
            Exception: The first client's, where one fails. Others that reach the boundary then end there. Gradients
                that were made by then stay, in the body and the clients: whoever steps must drop them.
            RuntimeError: If there are no clients, or a meeting is under way.
        """
        if not work or self._threads:
            raise RuntimeError("A meeting needs clients, and there is one at a time.")
        results: dict[str, T] = {}
        failures: dict[str, BaseException] = {}
        self._present = list(work)
        self._turn = self._present[0]
        random_state, num_targets = torch_state(), self.server.num_targets
        threads = [
            threading.Thread(target=self._attend, args=(name, do, results, failures, torch.is_grad_enabled()))
            for name, do in work.items()
        ]
        self._threads = dict(zip(work, [None] * len(work), strict=True))
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            # Interrupted here, clients end at the boundary.
            with self._changed:
                self._given_up = True
                self._changed.notify_all()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            if failures:
                self.server.num_targets = num_targets
                self.server.forget_passages(work)
            self._failed, self._turn, self._given_up = None, None, False
            self._threads, self._present = {}, []
            self._messages.clear()
            self._answers.clear()
            set_torch_state(random_state)
        for name in work:
            if name in failures and not isinstance(failures[name], _Abandoned):
                raise failures[name]
        return results

    def _attend(
        self,
        client_id: str,
        do: Callable[[], T],
        results: dict[str, T],
        failures: dict[str, BaseException],
        grad: bool,
    ) -> None:
        """One client's thread."""
        self._threads[client_id] = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._given_up or self._turn == client_id)
        try:
            self._check_goes_on()
            with torch.set_grad_enabled(grad):
                results[client_id] = do()
        except BaseException as error:
            failures[client_id] = error
        with self._changed:
            if client_id in failures:
                self._failed = self._failed or client_id
                for other in self._messages:
                    self._answers[other] = _Abandoned(f"Client {client_id!r} of the same server step failed.")
                self._messages.clear()
            following = self._following(client_id)
            self._present.remove(client_id)
            self._pass_on(following if following != client_id else None)

    def exchange(self, client_id: str, message: Forward | Backward) -> bytes:
        """Wait at the boundary for the others, and take the answer."""
        if self._threads[client_id] != threading.get_ident():
            raise RuntimeError(
                f"The gradient of client {client_id!r} came from another thread, as it does on a GPU, where backward "
                "passes of all clients share one: set boundary.defers_backward, and call finish_backward()."
            )
        state = torch_state()
        with self._changed:
            self._check_goes_on()
            self._messages[client_id] = message
            self._pass_on(self._following(client_id))
            self._changed.wait_for(lambda: self._given_up or self._turn == client_id)
            if self._given_up:
                raise _Abandoned("The meeting was given up.")
            set_torch_state(state)
            answer = self._answers.pop(client_id)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _check_goes_on(self) -> None:
        if self._given_up or self._failed is not None:
            raise _Abandoned(f"Client {self._failed!r} of the same server step failed, or it was given up.")

    def _following(self, client_id: str) -> str:
        place = self._present.index(client_id)
        return self._present[(place + 1) % len(self._present)]

    def _pass_on(self, client_id: str | None) -> None:
        """Give the turn to a client that can go on; where all wait at the boundary, answer them first."""
        if self._present and all(name in self._messages for name in self._present):
            self._answer()
            client_id = self._present[0]
        elif client_id is not None:
            # Those that wait at the boundary are passed over.
            while client_id in self._messages:
                client_id = self._following(client_id)
        self._turn = client_id
        self._changed.notify_all()

    def _answer(self) -> None:
        messages = [self._messages[name] for name in self._present]
        try:
            self._answers = dict(zip(self._present, self._answers_to(messages), strict=True))
        except Exception as error:
            self._answers = dict.fromkeys(self._present, error)
        self._messages.clear()

    def _answers_to(self, messages: list[Any]) -> list[bytes]:
        if all(isinstance(message, Forward) for message in messages):
            return [answer.to_bytes() for answer in self.server.forward_batch(messages)]
        if all(isinstance(message, Backward) for message in messages):
            return [answer.to_bytes() for answer in self.server.backward_batch(messages)]
        kinds = sorted({type(message).kind for message in messages})
        raise ValueError(f"Clients of one server step must do the same: they sent {kinds}.")


class MeetingLink:
    """
    A client's way to a server at which it meets others.

    Args:
        meeting ([`Meeting`]): Where.
        client_id (`str`): Who.
    """

    def __init__(self, meeting: Meeting, client_id: str) -> None:
        self.meeting = meeting
        self.client_id = client_id

    def exchange(self, blob: bytes) -> bytes:
        """
        Wait for the others, and take the answer; outside a meeting, alone.

        Raises:
            ValueError: If the message names another client.
        """
        message = read_request(blob)
        if message.client_id != self.client_id:
            raise ValueError(f"Client {self.client_id!r} sent a message in the name of {message.client_id!r}.")
        # A cache may be forgotten at any time.
        if isinstance(message, Forget) or self.client_id not in self.meeting._present:
            return self.meeting.server.answer(blob)
        return self.meeting.exchange(self.client_id, message)

    def end_step(self) -> None:
        """Nothing."""


class _Abandoned(RuntimeError):
    """What the others get where one client fails."""
