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

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from .body import BodyServer
from .boundary import Answer, Link
from .lockstep import LockstepRunner
from .messages import Backward, Forget, Forward, Gradient, Hidden, Request, read_request


T = TypeVar("T")


class ClientBatchRunner(LockstepRunner):
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
        super().__init__(self._run_server)
        self.server = server

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
        num_targets = self.server.num_targets
        try:
            return super().run(work)
        except BaseException:
            self.server.num_targets = num_targets
            self.server.drop_micro_batches(work)
            raise

    def _run_server(self, messages: Sequence[Any]) -> Sequence[Hidden | Gradient]:
        if all(isinstance(message, Forward) for message in messages):
            return self.server.forward_batch(messages)
        if all(isinstance(message, Backward) for message in messages):
            return self.server.backward_batch(messages)
        kinds = sorted({type(message).kind for message in messages})
        raise ValueError(
            f"All clients of a server step must send messages of the same kind, but they sent {kinds}. Make all "
            "clients run the same sequence of forward and backward passes."
        )


class ClientBatchLink(Link):
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
        # A client may drop a cache at any time, without waiting for the other clients.
        if isinstance(message, Forget):
            self._check_client(message)
            return self.runner.server.answer(blob)
        return self._answer(message).to_bytes()

    def deliver(self, message: Forward | Backward, answer_class: type[Answer]) -> Answer:
        """
        Wait for the other clients, and return the server's answer, without serialization.

        Args:
            message ([`~split.messages.Forward`] or [`~split.messages.Backward`]): The message.
            answer_class (`type`): The class of the answer.

        Raises:
            ValueError: If the message has the id of another client.
        """
        return cast(Answer, self._answer(message))

    def _answer(self, message: Forward | Backward) -> Hidden | Gradient:
        self._check_client(message)
        if not self.runner.is_running(self.client_id):
            return self.runner.server.process(message)
        answer: Hidden | Gradient = self.runner.exchange(self.client_id, message)
        return answer

    def _check_client(self, message: Request) -> None:
        if message.client_id != self.client_id:
            raise ValueError(
                f"The link of client {self.client_id!r} got a message of client {message.client_id!r}. Use a separate "
                "link for each client."
            )
