"""The client's side of the cut layer, as a node in the model's autograd graph.

In the forward pass, the client sends hidden states and receives hidden states. In the backward pass, it sends and
receives gradients in the same way. The messages are the same within one process and between two machines. Only the
[`Link`] that carries them differs: within one process, the message itself is passed and its bytes are counted.
"""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch

from ..codecs.bits import pack_mask
from .agreement import (
    AnswerBounds,
    RefusedAnswerError,
    check_layout,
    check_micro_batch,
    check_norm,
    norms_of,
    read_answer,
)
from .body import BodyServer
from .messages import Backward, Forget, Forward, Gradient, Hidden
from .wire import Wire


Answer = TypeVar("Answer", Hidden, Gradient)


class Link(Protocol):
    """Carries a message to a server and returns the server's answer."""

    def exchange(self, blob: bytes) -> bytes | memoryview:
        """
        Send a message and wait for the answer.

        Args:
            blob (`bytes`): A serialized message.

        Returns:
            `bytes` or `memoryview`: The serialized answer.
        """

    def end_step(self) -> None:
        """Notify the link that an optimizer step ended. By default, do nothing."""
        return


def deliver(link: Link, message: Forward | Backward, answer_class: type[Answer]) -> Answer:
    """
    Send a message over a link and wait for the answer.

    Args:
        link ([`Link`]): The link. The message is serialized, unless the class of the link has a method `deliver` and
            no subclass replaces `exchange`.
        message ([`~split.messages.Forward`] or [`~split.messages.Backward`]): The message.
        answer_class (`type`): The class of the answer, [`~split.messages.Hidden`] or [`~split.messages.Gradient`].

    Raises:
        RefusedAnswerError: If the answer is damaged, or of another class.
    """
    # Looked up in the class, because a wrapper that forwards unknown attributes would skip its own `exchange`.
    owner: Any = next((owner for owner in type(link).__mro__ if "deliver" in vars(owner)), None)
    # If the link replaces the method `exchange` of this class, it must get every message.
    if owner is None or getattr(link.exchange, "__func__", None) is not owner.exchange:
        return read_answer(answer_class, link.exchange(message.to_bytes()))
    return cast(Answer, owner.deliver(link, message, answer_class))


class LocalLink(Link):
    """
    A link to a server in the same process.

    Args:
        server ([`BodyServer`]): The server.
        watch (`Callable[[bytes, bytes], None]`, *optional*): A callback that gets every serialized message and its
            answer. Messages are serialized only for this callback.
    """

    def __init__(self, server: BodyServer, watch: Callable[[bytes, bytes], None] | None = None) -> None:
        self.server = server
        self.watch = watch

    def exchange(self, blob: bytes) -> bytes:
        """Pass the message to the server and return the answer."""
        answer = self.server.answer(blob)
        if self.watch is not None:
            self.watch(blob, answer)
        return answer

    def deliver(self, message: Forward | Backward, answer_class: type[Answer]) -> Answer:
        """
        Pass the message to the server and return the answer, without serialization.

        Args:
            message ([`~split.messages.Forward`] or [`~split.messages.Backward`]): The message.
            answer_class (`type`): The class of the answer.
        """
        if self.watch is not None:
            return answer_class.from_bytes(self.exchange(message.to_bytes()))
        return cast(Answer, self.server.process(message))


class Boundary:
    """
    The client's side of the cut layer.

    Args:
        link ([`Link`]): The link to the server.
        wire ([`Wire`]): The wire format of hidden states and gradients.
        client_id (`str`): The client.
        trusts_server (`bool`, *optional*, defaults to `False`): Whether the client skips checks of answers that a
            server in the same process does not need.

    Attributes:
        bounds ([`~split.agreement.AnswerBounds`], *optional*): Bounds of the answers of the server.
        step (`int`): Number of completed optimizer steps. The training loop sets it with `begin_step`.
        micro_step (`int`): Number of micro-batches of the step so far.
        total_targets (`int`, *optional*):
            Number of this client's target tokens in the step, by which the client's loss is divided. The attribute is
            set if several clients share a server step. The client then sends the gradients of the summed loss.
        squared_norm_of_body (`float`, *optional*):
            Squared norm of the gradients of the server's blocks in the step, if the server has sent it.
        defers_backward (`bool`):
            Whether a backward pass stops at the cut layer, so that `finish_backward` must complete the pass. A client
            must not wait for other clients inside a backward pass, because on a GPU one thread runs the backward
            passes of all clients.
    """

    def __init__(self, link: Link, wire: Wire, client_id: str, trusts_server: bool = False) -> None:
        self.bounds = None if trusts_server else AnswerBounds()
        self.link = link
        self.wire = wire
        self.client_id = client_id
        self.step = 0
        self.total_targets: int | None = None
        self.squared_norm_of_body: float | None = None
        self.defers_backward = False
        self.micro_step = 0
        self._num_targets = 0
        # For each micro-batch: the server's output in the autograd graph, the detached leaf after the cut layer, and
        # the client's hidden states.
        self._deferred: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
        self._dropped_caches: collections.deque[int] = collections.deque()

    def begin_step(self, step: int, total_targets: int | None = None) -> None:
        """
        Start an optimizer step.

        Args:
            step (`int`): Number of optimizer steps before this step.
            total_targets (`int`, *optional*):
                Number of target tokens of the step, if the server needs the number of targets.
        """
        if step != self.step:
            self.link.end_step()
        self.step = step
        self.total_targets = total_targets
        self.squared_norm_of_body = None
        self.micro_step = self._num_targets = 0
        self._deferred.clear()

    def run_body(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        training: bool,
        cache_id: int | None = None,
        seen: int = 0,
        context_lengths: torch.Tensor | None = None,
        num_targets: int | None = None,
        reorder: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Run the server's blocks on hidden states. The result is part of the autograd graph.

        Args:
            hidden (`torch.Tensor`):
                Hidden states after the client's first blocks, shape `(batch, sequence, hidden)`.
            attention_mask (`torch.Tensor`, *optional*): Shape `(batch, past + sequence)`.
            position_ids (`torch.Tensor`, *optional*):
                Shape `(batch or 1, sequence)`, if the server cannot derive the positions.
            training (`bool`): Whether dropout is active.
            cache_id (`int`, *optional*): The server's cache to use.
            seen (`int`, *optional*, defaults to `0`): Number of positions that the cache holds.
            context_lengths (`torch.Tensor`, *optional*): Shape `(batch,)`, if the layout's runner requires them.
            num_targets (`int`, *optional*):
                Number of target tokens of this micro-batch. The number is sent to the server if `total_targets` is
                set.
            reorder (`torch.Tensor`, *optional*):
                Shape `(batch,)`. The server's cache is reordered before the call: sequence `i` continues the cached
                sequence `reorder[i]`.

        Returns:
            `torch.Tensor`: Hidden states after the server's blocks, with the shape and dtype of `hidden`.
        """
        self._send_dropped_caches()
        autocast = None
        if torch.is_autocast_enabled(hidden.device.type):
            autocast = str(torch.get_autocast_dtype(hidden.device.type)).removeprefix("torch.")
        header: dict[str, Any] = {
            "client_id": self.client_id,
            "step": self.step,
            "micro_step": self.micro_step,
            "batch_size": len(hidden),
            "mask": None if attention_mask is None else pack_mask(attention_mask),
            "mask_width": 0 if attention_mask is None else attention_mask.shape[1],
            "position_ids": None if position_ids is None else position_ids.to("cpu", torch.int32),
            "context_lengths": None if context_lengths is None else context_lengths.to("cpu", torch.int32),
            "training": training,
            "grad": torch.is_grad_enabled(),
            "autocast": autocast,
            "cache_id": cache_id,
            "seen": seen,
            "reorder": None if reorder is None else reorder.to("cpu", torch.int32),
        }
        # Without a gradient there is no backward pass, so the micro-batch is not counted.
        self.micro_step += header["grad"]
        self._num_targets += num_targets or 0
        # If the client's first blocks are frozen, `hidden` requires no gradient, and autograd would skip the backward
        # pass of the server's blocks. The anchor requires a gradient, so autograd always calls the backward pass.
        anchor = torch.zeros((), device=hidden.device, requires_grad=header["grad"])
        output = _ServerBody.apply(hidden, anchor, self, header, num_targets)
        if not (self.defers_backward and header["grad"]):
            return output
        received = output.detach().requires_grad_()
        self._deferred.append((output, received, hidden))
        return received

    def finish_backward(self) -> None:
        """Send the deferred gradients, and backpropagate the received gradients through the client's first blocks."""
        deferred, self._deferred = self._deferred, []
        for output, received, hidden in deferred:
            if received.grad is None:
                raise ValueError(
                    "A micro-batch has no gradient yet. Call finish_backward() after the backward pass of every "
                    "micro-batch."
                )
            states = self.exchange_gradient(output.grad_fn, received.grad)
            if hidden.requires_grad:
                hidden.backward(states)

    def check_targets(self) -> None:
        """
        Check that the micro-batches of the step had `total_targets` target tokens.

        Raises:
            ValueError: If the number differs. The server's gradients and the loss would have different divisors.
        """
        if self.total_targets not in (None, self._num_targets):
            raise ValueError(
                f"The model was called on {self._num_targets} target tokens in a step of {self.total_targets}. With "
                "strategy='client_batch' the loss must call the model exactly once for each batch. Change the loss, "
                "or use another strategy."
            )

    def exchange_gradient(self, context: Any, gradient: torch.Tensor) -> torch.Tensor:
        """
        Send the gradient of a micro-batch to the server, and return the server's gradient.

        Args:
            context (`Any`): The autograd node that `run_body` created.
            gradient (`torch.Tensor`):
                Gradient of the loss with respect to the received hidden states, shape `(batch, sequence, hidden)`.

        Returns:
            `torch.Tensor`: Gradient of the loss with respect to the sent hidden states, of the same shape.
        """
        client_id, step, micro_step = context.micro_batch_id
        bounds, total = self.bounds, self.total_targets
        encoded = self.wire.encode({"gradient": gradient if total is None else gradient * total})
        num_targets = None if total is None else context.num_targets
        message = Backward(client_id, step, micro_step, encoded, num_targets)
        answer = deliver(self.link, message, Gradient)
        check_micro_batch(answer, message.micro_batch_id)
        self._check_squared_norm(answer)
        like = torch.empty_like(gradient, dtype=context.dtype, device="meta")
        states = self.read(answer, like, context.device)
        states = states if total is None else states / max(total, 1)
        if bounds is not None:
            bounds.check_gradient(norms_of(gradient), norms_of(states), context.norms)
        return states

    def _check_squared_norm(self, answer: Gradient) -> None:
        """Check and keep the squared norm of the gradients of the server's blocks, if the server has sent it."""
        if answer.squared_norm is not None:
            if self.total_targets is not None:
                agreed = "no norm, because several clients share the step"
                raise RefusedAnswerError(answer.kind, "squared_norm", f"is {answer.squared_norm!r}", agreed)
            # If the norm is not finite, the server ends the run at the end of the step.
            if math.isfinite(answer.squared_norm):
                check_norm(answer.kind, "squared_norm", answer.squared_norm, smallest=0.0)
        self.squared_norm_of_body = answer.squared_norm

    def read(self, answer: Hidden | Gradient, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """
        Decode the hidden states or the gradient of an answer.

        Args:
            answer ([`~split.messages.Hidden`] or [`~split.messages.Gradient`]): The answer.
            like (`torch.Tensor`): A tensor with the shape and the dtype of the result.
            device (`torch.device`): The device of the result.

        Raises:
            RefusedAnswerError: If the shape or the dtype differs, or a value is not finite.
        """
        name = answer.states_field
        encoded: dict[str, torch.Tensor] = getattr(answer, name)
        if self.bounds is not None:
            check_layout(answer, self.wire.layout({name: like.shape}))
        try:
            return self.wire.decode(encoded, {name: like})[name].to(device)
        except ValueError as error:
            raise RefusedAnswerError(answer.kind, name, f"cannot be read: {error}", "finite values") from error

    def drop(self, cache_id: int) -> None:
        """
        Mark a cache of the server as no longer needed.

        The garbage collector calls this method in any thread, possibly during an exchange, so it sends nothing. The
        next `run_body` or `flush` sends the message.
        """
        self._dropped_caches.append(cache_id)

    def flush(self) -> None:
        """Notify the server of the caches that it can drop. Errors of the link are ignored until its next use."""
        with contextlib.suppress(Exception):  # a failure must not discard the generated text
            self._send_dropped_caches()

    def _send_dropped_caches(self) -> None:
        while self._dropped_caches:
            self.link.exchange(Forget(self.client_id, self._dropped_caches.popleft()).to_bytes())


class _ServerBody(torch.autograd.Function):
    """Sends hidden states to the server in the forward pass, and their gradients in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        anchor: torch.Tensor,
        boundary: Boundary,
        header: dict[str, Any],
        num_targets: int | None,
    ) -> torch.Tensor:
        message = Forward(hidden=boundary.wire.encode({"hidden": hidden}), **header)
        answer = deliver(boundary.link, message, Hidden)
        check_micro_batch(answer, message.micro_batch_id)
        ctx.boundary, ctx.micro_batch_id, ctx.num_targets = boundary, message.micro_batch_id, num_targets
        ctx.dtype, ctx.device = hidden.dtype, hidden.device
        received = boundary.read(answer, hidden, hidden.device)
        if boundary.bounds is not None:
            # Norms of the sent and of the received hidden states.
            ctx.norms = norms_of(hidden), norms_of(received)
            boundary.bounds.check_states(ctx.norms, is_training=message.grad)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.boundary.exchange_gradient(ctx, gradient), None, None, None, None
