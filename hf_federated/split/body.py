"""The server's side of a passage: hidden states come, hidden states go; gradients come, gradients go.

A [`BodyServer`] sees bytes only. What it keeps between the two ways of a passage are the graphs of passages whose
gradient is still to come, and the key/value caches of generations that go on.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils import get_total_norm
from transformers import DynamicCache

from ..utils.random import derived_seed, own_draws
from .layouts import Places
from .messages import Backward, Crossing, Forget, Forward, Gradient, Hidden, read_request, unpack_mask
from .parts import Part
from .wire import Wire


# Client, step and micro-step.
Passage = tuple[str, int, int]
# Graphs and caches that one client may leave behind before the oldest goes.
MAX_GRAPHS = 64
MAX_CACHES = 16


@dataclass
class _Graph:
    """What came and what went of clients that passed together, and how many rows of what length each has."""

    passages: tuple[Passage, ...]
    came: torch.Tensor
    went: torch.Tensor
    sizes: list[tuple[int, int]]


class BodyServer:
    """
    Answers a client's messages with the body of a split model.

    Args:
        body ([`Part`]): The server's blocks.
        wire ([`Wire`]): How states travel.
        seed (`int`, *optional*): What the body draws in training (dropout) then follows from it, the client and the
            number of the passage; by default the process's generator is drawn from.

    Attributes:
        num_targets (`int`): Target tokens of the gradients that came since the last `average_gradients`.

    Example: see [`SplitModel`], which makes one where both parties are in one process.
    """

    def __init__(self, body: Part, wire: Wire, seed: int | None = None) -> None:
        self.body = body
        self.wire = wire
        self.seed = seed
        self.num_targets = 0
        # Of passages whose gradient is still to come.
        self._graphs: OrderedDict[Passage, _Graph] = OrderedDict()
        self._caches: OrderedDict[tuple[str, int], DynamicCache] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the same body and no passage or generation under way."""
        return {**self.__dict__, "_graphs": OrderedDict(), "_caches": OrderedDict(), "num_targets": 0}

    def answer(self, blob: bytes) -> bytes:
        """
        Do what a message asks.

        Args:
            blob (`bytes`): A serialised `Forward`, `Backward` or `Forget`.

        Returns:
            `bytes`: The serialised answer; empty to a `Forget`.

        Raises:
            ValueError: If the message is damaged, of another kind, holds a field that is not declared, or does not fit
                this body. Its weights, their gradients and other passages are as they were then.
        """
        message = read_request(blob)
        if isinstance(message, Forward):
            return self.forward(message).to_bytes()
        if isinstance(message, Backward):
            return self.backward(message).to_bytes()
        assert isinstance(message, Forget)
        self._caches.pop((message.client_id, message.cache_id), None)
        return b""

    def forward(self, message: Forward) -> Hidden:
        """Hidden states behind the body's blocks."""
        return self.forward_batch([message])[0]

    def backward(self, message: Backward) -> Gradient:
        """The gradient by what came; those of the body's parameters are added to their `grad`."""
        return self.backward_batch([message])[0]

    def forward_batch(self, messages: Sequence[Forward]) -> list[Hidden]:
        """
        Several clients' hidden states behind the body's blocks, in one pass.

        Shorter sequences are padded on the right, behind a mask.

        Args:
            messages (`Sequence[Forward]`): One a client.

        Raises:
            ValueError: If they ask for different things, or generation is among them.
        """
        first = messages[0]
        for message in messages[1:]:
            for name in ("training", "grad", "autocast"):
                if getattr(message, name) != getattr(first, name):
                    raise ValueError(
                        f"Clients of one batch must agree: {name} is {getattr(first, name)!r} of {first.client_id!r} "
                        f"and {getattr(message, name)!r} of {message.client_id!r}."
                    )
        if len(messages) > 1 and any(message.cache_id is not None for message in messages):
            raise ValueError("Generation goes on with a cache, one client at a time.")
        passages = tuple(message.passage for message in messages)
        if len(set(passages)) != len(passages):
            raise ValueError(f"A passage came twice in one batch: {passages}.")
        for message in messages:
            self._check_places(message)
        states = [self._states(message, message.hidden, message.batch_size) for message in messages]
        sizes = [(len(own), own.shape[1]) for own in states]
        length = max(own for _, own in sizes)
        came = _joined([functional.pad(own, (0, 0, 0, length - own.shape[1])) for own in states])
        mask, positions, contexts = _join_places(messages, sizes, came.device)
        cache = None if first.cache_id is None else self._cache(first)
        if self.body.model.training != first.training:  # of many small modules this takes as long as a block
            self.body.train(first.training)
        came.requires_grad_(first.grad)
        draws: Any = contextlib.nullcontext()
        if self.seed is not None and first.training:
            draws = own_draws(derived_seed(self.seed, "body", *first.passage))
        with draws, torch.set_grad_enabled(first.grad), _autocast(came.device, first.autocast):
            went = self.body(came, mask, positions, cache, contexts, use_cache=cache is not None).logits
        if first.grad:
            self._keep(_Graph(passages, came, went, sizes))
        answers = _cut(went, sizes)
        return [Hidden(*m.passage, hidden=self.wire.encode(own)) for m, own in zip(messages, answers, strict=True)]

    def backward_batch(self, messages: Sequence[Backward]) -> list[Gradient]:
        """
        The gradients by what came of clients that went through the body together.

        Of a client whose gradient does not come the rows are left out: theirs are zero.

        Args:
            messages (`Sequence[Backward]`): At most one of each client of the batch.

        Raises:
            ValueError: If a passage does not wait for its gradient, or they are not of one batch.
        """
        graph = self._graph(messages[0])
        gradient = torch.zeros_like(graph.went)
        own = _cut(gradient, graph.sizes)
        places = []
        for message in messages:
            if message.passage not in graph.passages or message.passage in places:
                raise ValueError(f"{message.passage} is not of the batch of {messages[0].passage}, or came twice.")
            places.append(message.passage)
            place = own[graph.passages.index(message.passage)]
            states = self._states(message, message.gradient, len(place))
            if states.shape != place.shape:
                raise ValueError(
                    f"The gradient has shape {tuple(states.shape)}; what was sent has {tuple(place.shape)}."
                )
            place.copy_(states)
        counted = [message.num_targets for message in messages if message.num_targets is not None]
        if len(counted) not in (0, len(messages)):
            raise ValueError("Either all clients of a batch tell their target tokens, or none.")
        self._drop(graph)
        trained = [parameter for parameter in self.body.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(graph.went, [graph.came, *trained], gradient, allow_unused=True)
        if not _are_finite([own for own in gradients if own is not None]):
            lengths = {
                one.client_id: float(own[graph.passages.index(one.passage)].double().norm()) for one in messages
            }
            raise ValueError(
                "The gradients that came make gradients of the server's blocks that are not finite; the longest is "
                f"that of client {max(lengths, key=lengths.__getitem__)!r}."
            )
        for parameter, own_gradient in zip(trained, gradients[1:], strict=True):
            if own_gradient is not None:
                if parameter.grad is None:
                    parameter.grad = own_gradient
                else:
                    parameter.grad += own_gradient
        self.num_targets += sum(counted)
        answers = dict(zip(graph.passages, _cut(gradients[0], graph.sizes), strict=True))
        return [Gradient(*m.passage, gradient=self.wire.encode(answers[m.passage])) for m in messages]

    def average_gradients(self) -> None:
        """Make sums of gradients over target tokens, where clients sent such, means over those that arrived."""
        if self.num_targets:
            for parameter in self.body.parameters():
                if parameter.grad is not None:
                    parameter.grad /= self.num_targets
        self.num_targets = 0

    def check_forward(self, message: Forward) -> None:
        """
        Refuse hidden states that this body cannot take, whoever sends others beside them.

        Raises:
            ValueError: If they are of another model or wire dtype, not finite, too long, or at impossible positions.
        """
        self._check_places(message)
        self._decoded(message, message.hidden, message.batch_size)

    def check_backward(self, message: Backward) -> None:
        """
        Refuse a gradient that this body cannot take.

        Raises:
            ValueError: If no passage waits for it, or it has another shape, another wire dtype, or is not finite.
        """
        graph = self._graph(message)
        batch_size, length = graph.sizes[graph.passages.index(message.passage)]
        states = self._decoded(message, message.gradient, batch_size)
        expected = (batch_size, length, self.body.model.config.hidden_size)
        if states.shape != expected:
            raise ValueError(f"The gradient has shape {tuple(states.shape)}; what was sent has {expected}.")

    def _states(self, message: Crossing, encoded: dict[str, torch.Tensor], batch_size: int) -> torch.Tensor:
        return self._decoded(message, encoded, batch_size).to(next(self.body.model.parameters()).device)

    def _decoded(self, message: Crossing, encoded: dict[str, torch.Tensor], batch_size: int) -> torch.Tensor:
        width, expected = encoded["values"].shape[1], self.body.model.config.hidden_size
        if width != expected:
            raise ValueError(f"Hidden states of {width} numbers came to a body of {expected}: another model's.")
        try:
            return self.wire.decode(encoded, batch_size, self.body.dtype)
        except ValueError as error:
            raise ValueError(f"Client {message.client_id!r}, step {message.step}: {error}") from error

    def _graph(self, message: Backward) -> _Graph:
        if message.passage not in self._graphs:
            raise ValueError(
                f"No passage {message.passage[1:]} of client {message.client_id!r} waits for its gradient: it was "
                "answered already, or came before this server was started."
            )
        return self._graphs[message.passage]

    def _check_places(self, message: Forward) -> None:
        """Refuse what would end inside the model, where an error says little and on a GPU ends the process."""
        length = len(message.hidden["values"]) // message.batch_size
        limit = getattr(self.body.model.config, self.body.layout.max_positions, None)
        runner = self.body.layout.runner
        prefix = 0 if self.body.prefix is None or runner is not None else self.body.prefix.length
        positions = message.position_ids
        # Of sequences packed into one row each has positions of its own; runners count otherwise.
        if (positions is None or runner is not None) and limit is not None and prefix + message.seen + length > limit:
            raise ValueError(f"{prefix + message.seen + length} positions came to a model of {limit}.")
        if positions is not None:
            if positions.ndim == 3 and runner is None:
                raise ValueError("Positions in two dimensions came to a model that counts in one.")
            if positions.min() < 0 or (limit is not None and int(positions.max()) + prefix >= limit):
                raise ValueError(f"position_ids reach from {int(positions.min())} to {int(positions.max())}.")
        if message.context_lengths is not None and (runner is None or message.context_lengths.min() < 0):
            raise ValueError("context_lengths are not for this model, or below zero.")
        if runner is not None:
            runner.check(Places(message.mask, positions, message.context_lengths))

    def forget_passages(self, client_ids: Collection[str]) -> None:
        """Drop the passages of clients that wait for a gradient."""
        for graph in list(self._graphs.values()):
            if any(passage[0] in client_ids for passage in graph.passages):
                self._drop(graph)

    def _drop(self, graph: _Graph) -> None:
        for passage in graph.passages:
            if self._graphs.get(passage) is graph:
                del self._graphs[passage]

    def _keep(self, graph: _Graph) -> None:
        for passage in graph.passages:
            self._graphs[passage] = graph
        for client_id in {passage[0] for passage in graph.passages}:
            own = [old for old in self._graphs.values() if any(passage[0] == client_id for passage in old.passages)]
            for old in own[: max(len(own) - MAX_GRAPHS, 0)]:
                self._drop(old)

    def _cache(self, message: Forward) -> DynamicCache:
        """The cache that a message goes on with."""
        assert message.cache_id is not None
        name = (message.client_id, message.cache_id)
        if message.seen == 0:
            self._caches[name] = self.body.new_cache()
            own = [other for other in self._caches if other[0] == message.client_id]
            for other in own[: max(len(own) - MAX_CACHES, 0)]:
                del self._caches[other]
            return self._caches[name]
        prefix = 0 if self.body.prefix is None else self.body.prefix.length
        cache = self._caches.get(name)
        if cache is None or cache.get_seq_length() != prefix + message.seen:
            raise ValueError(
                f"The server has no cache of {message.seen} positions for this generation: it was dropped, or went on "
                "otherwise. Generate from the beginning."
            )
        if len(cache.layers[0].keys) != message.batch_size:
            raise ValueError(f"{message.batch_size} rows came to a cache of {len(cache.layers[0].keys)}.")
        return cache


def _are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all values are: of hundreds of small tensors (adapters) without asking each, which takes long."""
    if bool(get_total_norm(tensors).isfinite()):
        return True
    # A norm may overflow where no value did.
    return all(bool(own.isfinite().all()) for own in tensors)


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _cut(states: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Each client's rows of a batch, without the padding of the batch."""
    rows = states.split([own for own, _ in sizes])
    return [own[:, :length] for own, (_, length) in zip(rows, sizes, strict=True)]


def _join_places(
    messages: Sequence[Forward], sizes: Sequence[tuple[int, int]], device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Mask, positions and context lengths of a batch; none where no client needs one."""
    width = max(length for _, length in sizes)
    masks: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    for message, (rows, length) in zip(messages, sizes, strict=True):
        if message.mask is None:
            mask = torch.ones(rows, length, dtype=torch.long)
        else:
            mask = unpack_mask(message.mask, message.mask_width)
        # Alone, a client may have a cache before its sequence.
        masks.append(functional.pad(mask, (0, width - length)))
        if message.position_ids is not None:
            own = message.position_ids.long()
            own = own if len(messages) == 1 else own.expand(rows, *own.shape[1:])
        else:
            own = torch.arange(length).expand(rows, -1)
        positions.append(functional.pad(own, (0, width - length)))
    masked = any(m.mask is not None or length < width for m, (_, length) in zip(messages, sizes, strict=True))
    told = any(message.position_ids is not None for message in messages)
    packed = [message.client_id for message in messages if message.num_sequences > message.batch_size]
    if packed and masked and len(messages) > 1:
        # Rows packed into one are told apart by their positions only where there is no mask. Without one the padding
        # of the batch, at position 0 each, is as many sequences of their own behind the others.
        if any(message.mask is not None for message in messages):
            raise ValueError(
                f"Client {packed[0]!r} sends several sequences packed into one row, and others padded ones: let all "
                "clients pack their rows, or none."
            )
        masked = False
    contexts = [message.context_lengths.long() for message in messages if message.context_lengths is not None]
    return (
        _joined(masks).to(device) if masked else None,
        _joined(positions).to(device) if told else None,
        _joined(contexts).to(device) if contexts else None,
    )


@contextlib.contextmanager
def _autocast(device: torch.device, dtype: str | None) -> Iterator[None]:
    """The client's autocast, or none, whatever the thread that serves it has."""
    if dtype is None:
        with torch.autocast(device.type, enabled=False):
            yield
    else:
        with torch.autocast(device.type, dtype=getattr(torch, dtype)):
            yield
