"""The server's side of the cut layer: forward and backward passes of the body on the clients' hidden states.

Between messages, a [`BodyServer`] keeps the autograd graphs of micro-batches whose gradient it has not received, and
the key/value caches of unfinished generations.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from ..utils.random import are_equal_states, derived_seed, generator_states, isolated_rng
from .client_faults import are_finite, check_outputs, norm, overflow_error
from .joined_inputs import check_joint, join_attention_inputs, join_states, split_by_client
from .layouts import AttentionInputs
from .message_limits import MessageLimits
from .messages import (
    Backward,
    Forget,
    Forward,
    Gradient,
    Hidden,
    SplitMessage,
    read_request,
    rows_of,
)
from .parts import Part
from .server_state import BoundaryNorms, ForwardGraph, GenerationCaches, OpenGraphs
from .wire import Wire


# Held while a body draws random numbers. The generators belong to the process.
_GENERATORS = threading.RLock()


class BodyServer:
    """
    Answers clients' messages with the body of a split model.

    Args:
        body ([`Part`]): The server's blocks.
        wire ([`Wire`]): The wire format of hidden states and gradients.
        seed (`int`, *optional*):
            Seed of the body's random numbers in training (dropout). The random numbers depend only on the seed, the
            client, the step and the micro-step. By default the global generator of the process is used.
        trusts_clients (`bool`, *optional*, defaults to `False`):
            Whether the server skips checks that clients in the same process do not need. By default, a backward pass
            whose gradients are not finite raises an error and changes nothing, and the server records the norms that
            `take_boundary_scale` needs.
        limits ([`~split.message_limits.MessageLimits`], *optional*):
            Largest size of the hidden states of a client. By default there is no limit on the number of sequences and
            on the length of a row of packed sequences.

    Attributes:
        num_targets (`int`): Number of target tokens of the gradients received since the last `average_gradients`.
        graphs ([`~split.server_state.OpenGraphs`]): The micro-batches whose gradient was not received yet.
        caches ([`~split.server_state.GenerationCaches`]): The key/value caches of unfinished generations.
        draws_random_numbers (`bool`, *optional*): Whether a forward pass draws random numbers in training. `None`
            before the first pass.

    Example: see [`SplitModel`], which creates a `BodyServer` if both parties are in one process.
    """

    def __init__(
        self,
        body: Part,
        wire: Wire,
        seed: int | None = None,
        trusts_clients: bool = False,
        limits: MessageLimits | None = None,
    ) -> None:
        self.body = body
        self.limits = limits
        self.wire = wire
        self.seed = seed
        self.trusts_clients = trusts_clients
        self.num_targets = 0
        self.graphs = OpenGraphs()
        self.caches = GenerationCaches()
        self._norms: dict[str, BoundaryNorms] = {}
        self.draws_random_numbers: bool | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy. A copy has no graphs and no caches."""
        return {**vars(self), "graphs": OpenGraphs(), "caches": GenerationCaches(), "_norms": {}, "num_targets": 0}

    def answer(self, blob: bytes) -> bytes:
        """
        Process a message.

        Args:
            blob (`bytes`): A serialized `Forward`, `Backward` or `Forget`.

        Returns:
            `bytes`: The serialized answer. Empty for a `Forget`.

        Raises:
            ValueError: If the message is damaged, has an unknown kind or an undeclared field, or does not fit this
                body. The error changes neither weights nor gradients nor other micro-batches. With
                `trusts_clients=True`, gradients that are not finite raise no error.
        """
        message = read_request(blob)
        if isinstance(message, Forget):
            self.caches.drop(message.client_id, message.cache_id)
            return b""
        return self.process(message).to_bytes()

    def process(self, message: Forward | Backward) -> Hidden | Gradient:
        """Answer a message with hidden states or a gradient. The answer and the message may share memory."""
        return self.forward(message) if isinstance(message, Forward) else self.backward(message)

    def forward(self, message: Forward) -> Hidden:
        """Run the body's blocks on a client's hidden states."""
        return self.forward_batch([message])[0]

    def backward(self, message: Backward) -> Gradient:
        """Return the gradient with respect to the received hidden states, and accumulate the body's gradients."""
        return self.backward_batch([message])[0]

    def forward_batch(self, messages: Sequence[Forward]) -> list[Hidden]:
        """
        Run the body's blocks on the hidden states of several clients, in one forward pass.

        Shorter sequences are padded on the right, and the padding is masked.

        Args:
            messages (`Sequence[Forward]`): One message per client.

        Returns:
            `list[Hidden]`: The answers, in the order of the messages.

        Raises:
            ValueError: If the messages differ in `training`, `grad` or `autocast`, or one of several messages uses a
                cache.
        """
        check_joint(messages)
        first = messages[0]
        for message in messages:
            self._check_positions(message)
        states = [self._decode_states(message) for message in messages]
        sizes = [(len(client_states), client_states.shape[1]) for client_states in states]
        inputs = join_states(states)
        mask, positions, contexts = join_attention_inputs(messages, sizes, inputs.device)
        max_cached = None if self.limits is None else self.limits.num_positions(False, self.body.max_positions)
        cache = self.caches.find(first, self.body, max_cached)
        if self.body.model.training != first.training:  # setting the mode of many small modules is slow
            self.body.train(first.training)
        inputs.requires_grad_(first.grad)
        with self._random_numbers(first), torch.set_grad_enabled(first.grad), _autocast(inputs.device, first.autocast):
            outputs = self.body(inputs, mask, positions, cache, contexts, use_cache=cache is not None).logits
        if first.grad:
            graph = ForwardGraph(tuple(message.micro_batch_id for message in messages), inputs, outputs, sizes)
            check_outputs(graph.client_ids, split_by_client(outputs.detach(), sizes))
            self.graphs.add(graph)
        return [
            Hidden(*message.micro_batch_id, hidden=self.wire.encode({"hidden": client_outputs}))
            for message, client_outputs in zip(messages, split_by_client(outputs, sizes), strict=True)
        ]

    @contextlib.contextmanager
    def _random_numbers(self, message: Forward) -> Iterator[None]:
        """
        Seed the random numbers of a forward pass.

        The first pass shows whether the body draws random numbers. If not, later passes neither seed the generators of
        the process nor wait for the passes of other bodies, which use the same generators.
        """
        if self.seed is None or not message.training or self.draws_random_numbers is False:
            yield
            return
        with _GENERATORS, isolated_rng(derived_seed(self.seed, "body", *message.micro_batch_id)):
            before = generator_states()
            yield
            if self.draws_random_numbers is None:
                self.draws_random_numbers = not are_equal_states(before, generator_states())

    def backward_batch(self, messages: Sequence[Backward]) -> list[Gradient]:
        """
        Run one backward pass for clients whose hidden states were processed in one forward pass.

        The gradient of a client that sends no message is zero.

        Args:
            messages (`Sequence[Backward]`): At most one message per client of the server batch.

        Returns:
            `list[Gradient]`: Gradients with respect to the received hidden states, in the order of the messages.

        Raises:
            ValueError: If a micro-batch does not wait for its gradient, or the micro-batches belong to different
                server batches.
        """
        graph = self.graphs.find(messages[0])
        gradient = torch.zeros_like(graph.outputs)
        # Views of `gradient`.
        unset = dict(zip(graph.micro_batch_ids, split_by_client(gradient, graph.sizes), strict=True))
        for message in messages:
            client_gradient = unset.pop(message.micro_batch_id, None)
            if client_gradient is None:
                raise ValueError(
                    f"Micro-batch {message.micro_batch_id} is not in the server batch of micro-batch "
                    f"{messages[0].micro_batch_id}, or its gradient was sent twice. Send one gradient for each "
                    "micro-batch of a server batch."
                )
            client_gradient.copy_(self._decode_gradient(graph, message))
        num_targets = [message.num_targets for message in messages if message.num_targets is not None]
        if len(num_targets) not in (0, len(messages)):
            raise ValueError(
                f"{len(num_targets)} of {len(messages)} clients of a server batch sent num_targets. Either all "
                "clients or no client must send it."
            )
        self.graphs.drop(graph)
        # Activation checkpointing runs a part of the forward pass again, with the same random numbers.
        with contextlib.nullcontext() if self.draws_random_numbers is False else _GENERATORS:
            if self.trusts_clients:
                graph.outputs.backward(gradient)
            else:
                self._backward_with_check(graph, gradient)
        received = cast(torch.Tensor, graph.inputs.grad)
        self.num_targets += sum(num_targets)
        answers = dict(zip(graph.micro_batch_ids, split_by_client(received, graph.sizes), strict=True))
        if not self.trusts_clients:
            for message in messages:
                norms = self._norms.setdefault(message.client_id, BoundaryNorms())
                norms.add(graph, message, gradient, answers[message.micro_batch_id])
        return [
            Gradient(*message.micro_batch_id, gradient=self.wire.encode({"gradient": answers[message.micro_batch_id]}))
            for message in messages
        ]

    def _backward_with_check(self, graph: ForwardGraph, gradient: torch.Tensor) -> None:
        """
        Run the backward pass of a server batch, and add the gradients to the `grad` of inputs and parameters.

        Args:
            graph ([`~split.server_state.ForwardGraph`]): The forward pass.
            gradient (`torch.Tensor`): The gradients of all clients, joined as the outputs of the forward pass are.

        Raises:
            ClientFaultError: If a gradient is not finite. The `grad` of every parameter is then as before.
        """
        trained = [parameter for parameter in self.body.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(graph.outputs, [graph.inputs, *trained], gradient, allow_unused=True)
        if not are_finite([tensor for tensor in gradients if tensor is not None]):
            received, answers = (split_by_client(tensor, graph.sizes) for tensor in (gradient, gradients[0]))
            raise overflow_error(graph.client_ids, received, answers)
        graph.inputs.grad = gradients[0]
        for parameter, parameter_gradient in zip(trained, gradients[1:], strict=True):
            if parameter.grad is None:
                parameter.grad = parameter_gradient
            elif parameter_gradient is not None:
                parameter.grad += parameter_gradient

    def average_gradients(self) -> None:
        """Divide the gradients by the number of received target tokens, if clients sent gradients of summed losses."""
        if self.num_targets:
            for parameter in self.body.parameters():
                if parameter.grad is not None:
                    parameter.grad /= self.num_targets
        self.num_targets = 0

    def size_of_states(self, message: Forward) -> float:
        """Return the root mean square of a client's hidden states."""
        states = self._decode_states(message)
        return norm(states) / states.numel() ** 0.5

    def sensitivity(self, message: Backward) -> float:
        """
        Return the change of the loss per target token if the hidden states behind the body change by their own size.

        The number is the norm of the gradient times the norm of the hidden states, divided by the target tokens. It
        does not depend on the scale of the hidden states. It is an upper bound to first order.

        Args:
            message ([`~split.messages.Backward`]): The gradient of a micro-batch that waits for its gradient.
        """
        graph = self.graphs.find(message)
        gradient = self._decode_gradient(graph, message)
        return norm(gradient) * norm(graph.select(graph.outputs.detach(), message)) / max(message.num_targets or 1, 1)

    def take_boundary_scale(self, client_id: str) -> float:
        """
        Return the scale of the squared norm of a client's parameter gradients, and forget the step of the client.

        The gradient of a weight is a product of gradients and states, and those at the cut layers have the scale of
        those inside the client's blocks. The scale is the product of their squared norms since the last call. Requires
        `trusts_clients=False`.

        Args:
            client_id (`str`): The client.
        """
        return self._norms.pop(client_id, BoundaryNorms()).scale

    def check_forward(self, message: Forward) -> None:
        """
        Check that the body can process a client's hidden states, independently of the other clients.

        Raises:
            ValueError: If the hidden states have a different hidden size or wire dtype, are not finite, are too long,
                or have invalid positions.
        """
        self._check_positions(message)
        self._decode_states(message)

    def check_backward(self, message: Backward) -> None:
        """
        Check that the body can process a client's gradient.

        Raises:
            ValueError: If the micro-batch does not wait for a gradient, or the gradient is not finite or has a
                different shape or wire dtype.
        """
        self._decode_gradient(self.graphs.find(message), message)

    def _decode_gradient(self, graph: ForwardGraph, message: Backward) -> torch.Tensor:
        """Decode a gradient, whose shape must be the shape of the hidden states of its micro-batch."""
        batch_size, length = graph.sizes[graph.micro_batch_ids.index(message.micro_batch_id)]
        gradient = self._decode(message, message.gradient, batch_size, graph.inputs.dtype)
        expected = (batch_size, length, self.body.model.config.hidden_size)
        if gradient.shape != expected:
            raise ValueError(
                f"The gradient has shape {tuple(gradient.shape)}, but the hidden states have shape {expected}. Send "
                "the gradient of the hidden states that the server returned."
            )
        return gradient

    def _decode_states(self, message: Forward) -> torch.Tensor:
        """Decode hidden states, with the dtype and on the device of the body."""
        weight = next(parameter for parameter in self.body.model.parameters() if parameter.is_floating_point())
        return self._decode(message, message.hidden, message.batch_size, weight.dtype).to(weight.device)

    def _decode(
        self, message: SplitMessage, encoded: dict[str, torch.Tensor], batch_size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        try:
            # The message defines the sequence length.
            like = torch.empty(batch_size, 0, self.body.model.config.hidden_size, dtype=dtype, device="meta")
            return self.wire.decode(encoded, {"states": like})["states"]
        except ValueError as error:
            raise ValueError(f"Client {message.client_id!r}, step {message.step}: {error}") from error

    def _check_positions(self, message: Forward) -> None:
        """
        Check length and positions before the model uses them.

        The model itself would raise an unspecific error, which on a GPU ends the process.
        """
        if self.limits is not None:
            self.limits.check(message, self.body.max_positions)
        length = len(rows_of(message.hidden)) // message.batch_size
        limit, runner, positions = self.body.max_positions, self.body.layout.runner, message.position_ids
        # Packed sequences each start at position 0, so a packed row may be longer than the limit of the model. Runners
        # count positions differently: for them the length of a row must not exceed the limit.
        if positions is None or runner is not None:
            self.body.check_length(message.seen + length)
        if positions is not None:
            if positions.ndim == 3 and runner is None:
                raise ValueError(
                    f"position_ids has shape {tuple(positions.shape)}, but the model has one position per token. Send "
                    "position_ids of shape (batch or 1, sequence)."
                )
            if positions.min() < 0 or (limit is not None and int(positions.max()) >= limit):
                raise ValueError(
                    f"position_ids range from {int(positions.min())} to {int(positions.max())}, but they must be at "
                    f"least 0 and less than {limit}, the number of the model's positions after the prefix."
                )
        if message.context_lengths is not None and (runner is None or message.context_lengths.min() < 0):
            raise ValueError(
                f"context_lengths has the minimum {int(message.context_lengths.min())}, or the model does not support "
                "context lengths. Send context_lengths of at least 0, and only to a model that requires them."
            )
        if runner is not None:
            runner.check(AttentionInputs(message.mask, positions, message.context_lengths))

    def drop_micro_batches(self, client_ids: Collection[str]) -> None:
        """Drop what clients sent in a step: the graphs of micro-batches that wait for a gradient, and norms."""
        for client_id in client_ids:
            self._norms.pop(client_id, None)
        self.graphs.drop_clients(client_ids)


def _autocast(device: torch.device, dtype: str | None) -> AbstractContextManager[Any]:
    """Apply the client's autocast setting, independently of the autocast state of the server thread."""
    if dtype is None and not torch.is_autocast_enabled(device.type):  # the usual case, in less time
        return contextlib.nullcontext()
    return torch.autocast(device.type, getattr(torch, dtype) if dtype else None, enabled=dtype is not None)
