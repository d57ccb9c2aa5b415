"""The boundary between a client and a server inside a model's graph.

Forward, hidden states leave as bytes and hidden states come back; backward, their gradients do the same. In one
process and between two machines the same bytes pass; what differs is the [`Link`] that carries them.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .body import BodyServer
from .messages import Backward, Forget, Forward, Gradient, Hidden, pack_mask
from .wire import Wire


class Link(Protocol):
    """What carries a message to a server and its answer back."""

    def exchange(self, blob: bytes) -> bytes:
        """
        Args:
            blob (`bytes`): A serialised message.

        Returns:
            `bytes`: The serialised answer.
        """

    def end_step(self) -> None:
        """An optimizer step ended."""


class LocalLink:
    """
    A link to a server in the same process.

    Args:
        server ([`BodyServer`]): The server.
        watch (`Callable[[bytes, bytes], None]`, *optional*): Called with every message and its answer.
    """

    def __init__(self, server: BodyServer, watch: Callable[[bytes, bytes], None] | None = None) -> None:
        self.server = server
        self.watch = watch

    def exchange(self, blob: bytes) -> bytes:
        """Hand the message over and take the answer."""
        answer = self.server.answer(blob)
        if self.watch is not None:
            self.watch(blob, answer)
        return answer

    def end_step(self) -> None:
        """Nothing."""


class Boundary:
    """
    A client's end of the boundary.

    Args:
        link ([`Link`]): To the server.
        wire ([`Wire`]): How states travel.
        client_id (`str`): Whose end it is.

    Attributes:
        step (`int`): Optimizer steps done. What trains the model counts it.
        total_targets (`int`, *optional*): Where several clients share a server's step: this client's target tokens of
            the whole step, by which its loss is divided. Gradients then travel as those of the summed loss.
        defers_backward (`bool`): Whether a backward pass ends behind the boundary, and `finish_backward` takes it on.
            A client that waits for others must not do so inside a backward pass: on a GPU one thread runs them all.
    """

    def __init__(self, link: Link, wire: Wire, client_id: str) -> None:
        self.link = link
        self.wire = wire
        self.client_id = client_id
        self.step = 0
        self.total_targets: int | None = None
        self.defers_backward = False
        self._micro_step = 0
        self._num_told = 0
        self._deferred: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
        self._dropped: collections.deque[int] = collections.deque()

    def begin_step(self, step: int, total_targets: int | None = None) -> None:
        """Passages from now on belong to this optimizer step, of so many target tokens where they must be told."""
        if step != self.step:
            self.link.end_step()
        self.step = step
        self.total_targets = total_targets
        self._micro_step = self._num_told = 0
        self._deferred.clear()

    def cross(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        training: bool,
        cache_id: int | None = None,
        seen: int = 0,
        context_lengths: torch.Tensor | None = None,
        num_targets: int | None = None,
    ) -> torch.Tensor:
        """
        Hidden states behind the server's blocks, in the graph.

        Args:
            hidden (`torch.Tensor`): Shape `(batch, sequence, hidden)`, behind the client's first blocks.
            attention_mask (`torch.Tensor`, *optional*): Shape `(batch, past + sequence)`.
            position_ids (`torch.Tensor`, *optional*): Shape `(batch or 1, sequence)`, where they cannot be derived.
            training (`bool`): Whether dropout is on.
            cache_id (`int`, *optional*): The server's cache to go on with.
            seen (`int`, *optional*, defaults to `0`): Positions that the cache holds.
            context_lengths (`torch.Tensor`, *optional*): Shape `(batch,)`, where the layout's runner asks for them.
            num_targets (`int`, *optional*): Target tokens of this passage; told where `total_targets` is given.

        Returns:
            `torch.Tensor`: Of the shape and dtype of `hidden`.
        """
        self._tell_dropped()
        autocast = None
        if torch.is_autocast_enabled(hidden.device.type):
            autocast = str(torch.get_autocast_dtype(hidden.device.type)).removeprefix("torch.")
        header: dict[str, Any] = {
            "client_id": self.client_id,
            "step": self.step,
            "micro_step": self._micro_step,
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
        }
        # Without a gradient nothing comes back, and nothing is counted.
        self._micro_step += header["grad"]
        self._num_told += num_targets or 0
        # Where the client's first blocks are frozen nothing before the boundary asks for a gradient, and the server's
        # blocks would get none.
        anchor = torch.zeros((), device=hidden.device, requires_grad=header["grad"])
        went = _Passage.apply(hidden, anchor, self, header, num_targets)
        if not (self.defers_backward and header["grad"]):
            return went
        received = went.detach().requires_grad_()
        self._deferred.append((went, received, hidden))
        return received

    def finish_backward(self) -> None:
        """Send the gradients of the passages that wait, and take what comes back to the client's first blocks."""
        deferred, self._deferred = self._deferred, []
        for went, received, hidden in deferred:
            if received.grad is None:
                raise ValueError("finish_backward() comes after the backward pass of every passage.")
            states = self.exchange_gradient(went.grad_fn, received.grad)
            if hidden.requires_grad:
                hidden.backward(states)

    def check_targets(self) -> None:
        """
        Raises:
            ValueError: If the passages of the step had other target tokens than `total_targets`: the server's
                gradients would be divided by another number than the loss.
        """
        if self.total_targets not in (None, self._num_told):
            raise ValueError(
                f"The model was called on {self._num_told} target tokens in a step of {self.total_targets}. Where "
                "clients meet, the loss calls the model once for each batch: use another strategy than 'client_batch'."
            )

    def exchange_gradient(self, passage: Any, gradient: torch.Tensor) -> torch.Tensor:
        """
        Send the gradient of a passage.

        Args:
            passage (`Any`): The node of the graph that `cross` made.
            gradient (`torch.Tensor`): Of the loss by what came back; shape `(batch, sequence, hidden)`.

        Returns:
            `torch.Tensor`: The gradient by what was sent, of the same shape.
        """
        client_id, step, micro_step = passage.name_of_passage
        total = self.total_targets
        if total is None:
            message = Backward(client_id, step, micro_step, self.wire.encode(gradient))
        else:
            summed = self.wire.encode(gradient * total)
            message = Backward(client_id, step, micro_step, summed, num_targets=passage.num_targets)
        answer = Gradient.from_bytes(self.link.exchange(message.to_bytes()))
        _check_passage(answer.passage, passage.name_of_passage)
        states = self.wire.decode(answer.gradient, len(gradient), passage.dtype).to(passage.device)
        return states if total is None else states / max(total, 1)

    def drop(self, cache_id: int) -> None:
        """
        The server may drop a cache; it is told before the next passage, or by `flush`. A collection of garbage calls
        this, in any thread and also in the midst of an exchange: nothing is sent here.
        """
        self._dropped.append(cache_id)

    def flush(self) -> None:
        """Tell the server which caches it may drop; a link that is gone says so when it is used again."""
        with contextlib.suppress(Exception):  # what was generated is not lost for it
            self._tell_dropped()

    def _tell_dropped(self) -> None:
        while self._dropped:
            self.link.exchange(Forget(self.client_id, self._dropped.popleft()).to_bytes())


class _Passage(torch.autograd.Function):
    """Hidden states there and back; their gradients there and back."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        anchor: torch.Tensor,
        boundary: Boundary,
        header: dict[str, Any],
        num_targets: int | None,
    ) -> torch.Tensor:
        message = Forward(hidden=boundary.wire.encode(hidden), **header)
        answer = Hidden.from_bytes(boundary.link.exchange(message.to_bytes()))
        _check_passage(answer.passage, message.passage)
        ctx.boundary, ctx.name_of_passage, ctx.num_targets = boundary, message.passage, num_targets
        ctx.dtype, ctx.device = hidden.dtype, hidden.device
        return boundary.wire.decode(answer.hidden, len(hidden), hidden.dtype).to(hidden.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.boundary.exchange_gradient(ctx, gradient), None, None, None, None


def _check_passage(answered: tuple[str, int, int], asked: tuple[str, int, int]) -> None:
    if answered != asked:
        raise ValueError(f"The server answered passage {answered}, and {asked} was sent: the link mixes messages up.")
