"""All clients of one server step, whose hidden states the server processes as one batch.

This is FL-GLM's client-batch strategy (section 3.3): "stack the smashed data from different clients". The work of each
client is an ordinary function that calls the client's model. Each function runs in a separate thread and waits at the
cut layer until all other clients reach the cut layer. Only one thread runs at a time, in the order of the clients, and
each thread has its own random state, so the result does not depend on the machine.

On a GPU, PyTorch runs the backward passes of all clients in one thread of the device. A client that waits in this
thread would block all clients. On a GPU, set `defers_backward` of each client's boundary: the backward pass then stops
at the cut layer, and `finish_backward` waits for the other clients and completes the pass. Without `defers_backward`,
a backward pass in another thread raises an error.
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


class ClientBatchRunner:
    """
    Runs the clients of one server step and answers their messages together.

    Args:
        server ([`BodyServer`]): The server.

    Example:

    ```python
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from hf_federated import SplitModel
    >>> from hf_federated.split import ClientBatchRunner

    >>> config = LlamaConfig(
    ...     vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2
    ... )
    >>> model = LlamaForCausalLM(config)
    >>> clients = {name: SplitModel.from_model(model, client_id=name) for name in ("a", "b")}
    >>> runner = ClientBatchRunner(clients["a"].boundary.link.server)
    >>> for name, client in clients.items():
    ...     client.boundary.link = runner.link(name)

    >>> inputs = {"a": torch.tensor([[1, 2, 3]]), "b": torch.tensor([[4, 5]])}
    >>> logits = runner.run({name: lambda name=name: clients[name](inputs[name]).logits for name in clients})
    >>> [tuple(value.shape) for value in logits.values()]
    [(1, 3, 40), (1, 2, 40)]
    ```
    """

    def __init__(self, server: BodyServer) -> None:
        self.server = server
        self._changed = threading.Condition()
        # Clients that have not finished, in order.
        self._active: list[str] = []
        self._turn: str | None = None
        self._failed = False
        self._cancelled = False
        self._threads: dict[str, int | None] = {}
        # Messages of the clients that wait at the cut layer.
        self._messages: dict[str, Forward | Backward] = {}
        self._answers: dict[str, bytes | Exception] = {}

    def link(self, client_id: str) -> ClientBatchLink:
        """Create a client's link to the server."""
        return ClientBatchLink(self, client_id)

    def run(self, work: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """
        Run the work of all clients.

        Args:
            work (`Mapping[str, Callable]`):
                A function for each client, by client id. The order is the order in which the server stacks the
                clients' hidden states.

        Returns:
            `dict[str, Any]`: The return value of each client's function.

        Raises:
            Exception: The error of the first client that fails. The other clients stop at the cut layer. The server's
                body and the clients' parts keep the gradients that were computed before the failure. Clear these
                gradients before the next optimizer step.
            RuntimeError: If there are no clients, or another `run` is in progress.
        """
        if not work or self._threads:
            raise RuntimeError(
                f"ClientBatchRunner.run() was called with {len(work)} clients, or during another run. It needs at "
                "least one client, and only one run at a time is possible."
            )
        results: dict[str, T] = {}
        failures: dict[str, BaseException] = {}
        self._active = list(work)
        self._turn = self._active[0]
        random_state, num_targets = torch_state(), self.server.num_targets
        threads = [
            threading.Thread(
                target=self._run_client, args=(name, function, results, failures, torch.is_grad_enabled())
            )
            for name, function in work.items()
        ]
        self._threads = dict(zip(work, [None] * len(work), strict=True))
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            # After an interrupt of this thread, the clients stop at the cut layer.
            with self._changed:
                self._cancelled = True
                self._changed.notify_all()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            if failures:
                self.server.num_targets = num_targets
                self.server.drop_micro_batches(work)
            self._failed, self._turn, self._cancelled = False, None, False
            self._threads, self._active = {}, []
            self._messages.clear()
            self._answers.clear()
            set_torch_state(random_state)
        for name in work:
            if name in failures and not isinstance(failures[name], _StepCancelledError):
                raise failures[name]
        return results

    def _run_client(
        self,
        client_id: str,
        function: Callable[[], T],
        results: dict[str, T],
        failures: dict[str, BaseException],
        grad: bool,
    ) -> None:
        """Run one client's function in its thread."""
        self._threads[client_id] = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._cancelled or self._turn == client_id)
        try:
            self._check_not_cancelled()
            with torch.set_grad_enabled(grad):
                results[client_id] = function()
        except BaseException as error:
            failures[client_id] = error
        with self._changed:
            if client_id in failures:
                self._failed = True
                for waiting in self._messages:
                    self._answers[waiting] = _StepCancelledError()
                self._messages.clear()
            next_client = self._next_client(client_id)
            self._active.remove(client_id)
            self._pass_turn(next_client if next_client != client_id else None)

    def exchange(self, client_id: str, message: Forward | Backward) -> bytes:
        """Wait at the cut layer until all clients have sent a message, and return the server's answer."""
        if self._threads[client_id] != threading.get_ident():
            raise RuntimeError(
                f"The backward pass of client {client_id!r} reached the cut layer in another thread. On a GPU one "
                "thread runs the backward passes of all clients, which would wait for each other. Set "
                "boundary.defers_backward, and call boundary.finish_backward() after the backward pass."
            )
        state = torch_state()
        with self._changed:
            self._check_not_cancelled()
            self._messages[client_id] = message
            self._pass_turn(self._next_client(client_id))
            self._changed.wait_for(lambda: self._cancelled or self._turn == client_id)
            if self._cancelled:
                raise _StepCancelledError()
            set_torch_state(state)
            answer = self._answers.pop(client_id)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _check_not_cancelled(self) -> None:
        if self._cancelled or self._failed:
            raise _StepCancelledError()

    def _next_client(self, client_id: str) -> str:
        index = self._active.index(client_id)
        return self._active[(index + 1) % len(self._active)]

    def _pass_turn(self, client_id: str | None) -> None:
        """Pass the turn to a client that can continue. If all clients wait at the cut layer, answer them first."""
        if self._active and all(name in self._messages for name in self._active):
            self._answer()
            client_id = self._active[0]
        elif client_id is not None:
            # Skip the clients that wait at the cut layer.
            while client_id in self._messages:
                client_id = self._next_client(client_id)
        self._turn = client_id
        self._changed.notify_all()

    def _answer(self) -> None:
        messages = [self._messages[name] for name in self._active]
        try:
            self._answers = dict(zip(self._active, self._run_server(messages), strict=True))
        except Exception as error:
            self._answers = dict.fromkeys(self._active, error)
        self._messages.clear()

    def _run_server(self, messages: list[Any]) -> list[bytes]:
        if all(isinstance(message, Forward) for message in messages):
            return [answer.to_bytes() for answer in self.server.forward_batch(messages)]
        if all(isinstance(message, Backward) for message in messages):
            return [answer.to_bytes() for answer in self.server.backward_batch(messages)]
        kinds = sorted({type(message).kind for message in messages})
        raise ValueError(
            f"All clients of a server step must send messages of the same kind, but they sent {kinds}. Make all "
            "clients run the same sequence of forward and backward passes."
        )


class ClientBatchLink:
    """
    A client's link to a server that answers several clients together.

    Args:
        runner ([`ClientBatchRunner`]): The runner of the clients.
        client_id (`str`): The client.
    """

    def __init__(self, runner: ClientBatchRunner, client_id: str) -> None:
        self.runner = runner
        self.client_id = client_id

    def exchange(self, blob: bytes) -> bytes:
        """
        Wait for the other clients, and return the server's answer.

        Outside of `ClientBatchRunner.run` the server answers immediately.

        Raises:
            ValueError: If the message has the id of another client.
        """
        message = read_request(blob)
        if message.client_id != self.client_id:
            raise ValueError(
                f"The link of client {self.client_id!r} got a message of client {message.client_id!r}. Use a separate "
                "link for each client."
            )
        # A client may drop a cache at any time, without waiting for the other clients.
        if isinstance(message, Forget) or self.client_id not in self.runner._active:
            return self.runner.server.answer(blob)
        return self.runner.exchange(self.client_id, message)

    def end_step(self) -> None:
        """Do nothing at the end of an optimizer step."""


class _StepCancelledError(RuntimeError):
    """Raised in the work of a client after another client of the server step failed, or after an interrupt."""

    def __init__(self) -> None:
        super().__init__("Another client of the server step failed, or the step was interrupted.")
