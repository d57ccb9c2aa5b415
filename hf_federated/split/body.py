"""The server's side of a passage: hidden states come, hidden states go; gradients come, gradients go.

A [`BodyServer`] sees bytes only. What it keeps between the two ways of a passage are the graphs of passages whose
gradient is still to come, and the key/value caches of generations that go on.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator

import torch
from transformers import DynamicCache

from ..messages import Packed
from ..packing import unpack
from .messages import REQUESTS, Backward, Forget, Forward, Gradient, Hidden, unpack_mask
from .parts import Part
from .wire import Wire


# Graphs and caches that a client may leave behind before the oldest goes.
MAX_GRAPHS = 64
MAX_CACHES = 16


class BodyServer:
    """
    Answers a client's messages with the body of a split model.

    Args:
        body ([`Part`]): The server's blocks.
        wire ([`Wire`]): How states travel.

    Example: see [`SplitModel`], which makes one where both parties are in one process.
    """

    def __init__(self, body: Part, wire: Wire) -> None:
        self.body = body
        self.wire = wire
        # What came in and what went out of passages whose gradient is still to come.
        self._graphs: OrderedDict[tuple[str, int, int], tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
        self._caches: OrderedDict[tuple[str, int], DynamicCache] = OrderedDict()

    def answer(self, blob: bytes) -> bytes:
        """
        Do what a message asks.

        Args:
            blob (`bytes`): A serialised `Forward`, `Backward` or `Forget`.

        Returns:
            `bytes`: The serialised answer; empty to a `Forget`.

        Raises:
            ValueError: If the message is damaged, of another kind, holds a field that is not declared, or does not fit
                this body. Nothing has changed then.
        """
        tree = unpack(blob)
        kind = tree.get("kind") if isinstance(tree, dict) else None
        if kind not in REQUESTS:
            raise ValueError(f"A server takes messages of the kinds {sorted(REQUESTS)}, got {kind!r}.")
        return self._answer(REQUESTS[kind]._from_tree(tree))

    def _answer(self, message: Packed) -> bytes:
        if isinstance(message, Forward):
            return self.forward(message).to_bytes()
        if isinstance(message, Backward):
            return self.backward(message).to_bytes()
        assert isinstance(message, Forget)
        self._caches.pop((message.client_id, message.cache_id), None)
        return b""

    def forward(self, message: Forward) -> Hidden:
        """Hidden states behind the body's blocks."""
        came = self._states(message.hidden, message.batch_size)
        mask = None
        if message.mask is not None:
            mask = unpack_mask(message.mask, message.mask_width).to(came.device)
        positions = None if message.position_ids is None else message.position_ids.long().to(came.device)
        contexts = None if message.context_lengths is None else message.context_lengths.long().to(came.device)
        cache = None if message.cache_id is None else self._cache(message.client_id, message.cache_id)
        self.body.train(message.training)
        came.requires_grad_(message.grad)
        with torch.set_grad_enabled(message.grad), _autocast(came.device, message.autocast):
            went = self.body(came, mask, positions, cache, contexts, use_cache=cache is not None).logits
        if message.grad:
            self._keep(message.passage, came, went)
        return Hidden(*message.passage, hidden=self.wire.encode(went))

    def backward(self, message: Backward) -> Gradient:
        """The gradient by what came; those of the body's parameters are added to their `grad`."""
        if message.passage not in self._graphs:
            raise ValueError(
                f"No passage {message.passage[1:]} of client {message.client_id!r} waits for its gradient: it was "
                "answered already, or came before this server was started."
            )
        came, went = self._graphs[message.passage]
        gradient = self._states(message.gradient, len(went))
        if gradient.shape != went.shape:
            raise ValueError(f"The gradient has shape {tuple(gradient.shape)}; what was sent has {tuple(went.shape)}.")
        del self._graphs[message.passage]
        torch.autograd.backward(went, gradient.to(went.dtype))
        assert came.grad is not None
        return Gradient(*message.passage, gradient=self.wire.encode(came.grad))

    def _states(self, encoded: dict[str, torch.Tensor], batch_size: int) -> torch.Tensor:
        width, expected = encoded["values"].shape[1], self.body.model.config.hidden_size
        if width != expected:
            raise ValueError(f"Hidden states of {width} numbers came to a body of {expected}: another model's.")
        parameter = next(self.body.model.parameters())
        return self.wire.decode(encoded, batch_size, self.body.dtype).to(parameter.device)

    def _keep(self, passage: tuple[str, int, int], came: torch.Tensor, went: torch.Tensor) -> None:
        self._graphs[passage] = (came, went)
        while len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)

    def _cache(self, client_id: str, cache_id: int) -> DynamicCache:
        name = (client_id, cache_id)
        if name not in self._caches:
            self._caches[name] = self.body.new_cache()
            while len(self._caches) > MAX_CACHES:
                self._caches.popitem(last=False)
        return self._caches[name]


@contextlib.contextmanager
def _autocast(device: torch.device, dtype: str | None) -> Iterator[None]:
    """The client's autocast, or none, whatever the thread that serves it has."""
    if dtype is None:
        with torch.autocast(device.type, enabled=False):
            yield
    else:
        with torch.autocast(device.type, dtype=getattr(torch, dtype)):
            yield
