"""Where the clients of one server step meet: their hidden states go through the body together.

FL-GLM's client-batch strategy (section 3.3): "stack the smashed data from different clients". Each client's work is an
ordinary function that calls its model, in a thread of its own; at the boundary it waits until every other client is
there too. Only one of the threads runs at a time, in the clients' order, and each has random numbers of its own, so
the result does not depend on the machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from ..messages import Packed
from .body import BodyServer
from .messages import Backward, Forward, read_request


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
        self._messages: dict[str, Packed] = {}
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
            Exception: The first client's, where one fails. The others then end with an error at the boundary.
        """
        results: dict[str, T] = {}
        failures: dict[str, BaseException] = {}
        self._present = list(work)
        self._messages.clear()
        self._answers.clear()
        self._turn = self._present[0]
        random_state = torch.get_rng_state()
        threads = [
            threading.Thread(target=self._attend, args=(name, do, results, failures, torch.is_grad_enabled()))
            for name, do in work.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.set_rng_state(random_state)
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
        with self._changed:
            self._changed.wait_for(lambda: self._turn == client_id)
        try:
            with torch.set_grad_enabled(grad):
                results[client_id] = do()
        except BaseException as error:
            failures[client_id] = error
        with self._changed:
            if client_id in failures:
                for other in self._messages:
                    self._answers[other] = _Abandoned(f"Client {client_id!r} of the same server step failed.")
                self._messages.clear()
            following = self._following(client_id)
            self._present.remove(client_id)
            self._pass_on(following if following != client_id else None)

    def exchange(self, client_id: str, blob: bytes) -> bytes:
        """Wait at the boundary for the others, and take the answer."""
        state = torch.get_rng_state()
        with self._changed:
            self._messages[client_id] = read_request(blob)
            self._pass_on(self._following(client_id))
            self._changed.wait_for(lambda: self._turn == client_id)
            torch.set_rng_state(state)
            answer = self._answers.pop(client_id)
        if isinstance(answer, Exception):
            raise answer
        return answer

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
        """Wait for the others, and take the answer; outside a meeting, alone."""
        if self.client_id in self.meeting._present:
            return self.meeting.exchange(self.client_id, blob)
        return self.meeting.server.answer(blob)


class _Abandoned(RuntimeError):
    """What the others get where one client fails."""
