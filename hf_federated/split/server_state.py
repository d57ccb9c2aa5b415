"""What the server of a split model keeps between messages: autograd graphs, key/value caches and norms."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from .client_faults import norm
from .joined_inputs import split_by_client
from .messages import Backward, Forward, MicroBatchId, rows_of
from .parts import Part


# Maximum number of graphs and caches per client. If a client exceeds a maximum, its oldest graph or cache is dropped.
MAX_GRAPHS = 64
MAX_CACHES = 16


@dataclass
class ForwardGraph:
    """
    Autograd graph of one forward pass.

    Args:
        micro_batch_ids (`tuple[MicroBatchId, ...]`): The micro-batches, at most one per client.
        inputs (`torch.Tensor`): Hidden states of all micro-batches, a leaf of the graph.
        outputs (`torch.Tensor`): Hidden states of all micro-batches after the blocks.
        sizes (`list[tuple[int, int]]`): `(batch, sequence)` of each micro-batch.
    """

    micro_batch_ids: tuple[MicroBatchId, ...]
    inputs: torch.Tensor
    outputs: torch.Tensor
    sizes: list[tuple[int, int]]

    @functools.cached_property
    def client_ids(self) -> list[str]:
        """The client of each micro-batch."""
        return [client_id for client_id, _, _ in self.micro_batch_ids]

    def select(self, tensor: torch.Tensor, message: Backward) -> torch.Tensor:
        """Return the part of a tensor of all micro-batches that belongs to the micro-batch of a message."""
        return split_by_client(tensor, self.sizes)[self.micro_batch_ids.index(message.micro_batch_id)]


class OpenGraphs:
    """The graphs of the micro-batches whose gradient was not received yet. The length counts micro-batches."""

    def __init__(self) -> None:
        self._graphs: OrderedDict[MicroBatchId, ForwardGraph] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, message: Backward) -> ForwardGraph:
        """
        Return the graph of the micro-batch of a message.

        Raises:
            ValueError: If the micro-batch does not wait for its gradient.
        """
        if message.micro_batch_id not in self._graphs:
            raise ValueError(
                f"Micro-batch {message.micro_batch_id[1:]} of client {message.client_id!r} does not wait for a "
                "gradient: its gradient was already received, or its hidden states were sent before a restart of the "
                "server."
            )
        return self._graphs[message.micro_batch_id]

    def add(self, graph: ForwardGraph) -> None:
        """Keep a graph. If a client has more than `MAX_GRAPHS` micro-batches, its oldest graphs are dropped."""
        for micro_batch_id in graph.micro_batch_ids:
            self._graphs[micro_batch_id] = graph
        for client_id in set(graph.client_ids):
            client_graphs = [kept for kept in self._graphs.values() if client_id in kept.client_ids]
            for oldest in client_graphs[: max(len(client_graphs) - MAX_GRAPHS, 0)]:
                self.drop(oldest)

    def drop(self, graph: ForwardGraph) -> None:
        """Drop a graph."""
        for micro_batch_id in graph.micro_batch_ids:
            if self._graphs.get(micro_batch_id) is graph:
                del self._graphs[micro_batch_id]

    def drop_clients(self, client_ids: Collection[str]) -> None:
        """Drop the graphs with a micro-batch of one of the clients."""
        for graph in list(self._graphs.values()):
            if not set(client_ids).isdisjoint(graph.client_ids):
                self.drop(graph)


class GenerationCaches:
    """The key/value caches of unfinished generations. Iteration yields the client id and the id of each cache."""

    def __init__(self) -> None:
        # Each cache and its number of sequences.
        self._caches: OrderedDict[tuple[str, int], tuple[DynamicCache, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._caches)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self._caches)

    def drop(self, client_id: str, cache_id: int) -> None:
        """Drop a cache, if it exists."""
        self._caches.pop((client_id, cache_id), None)

    def find(self, message: Forward, body: Part, max_positions: int | None = None) -> DynamicCache | None:
        """
        Return the cache that a message uses, in the order of the message's sequences.

        Args:
            message ([`~split.messages.Forward`]): The message. Its first positions begin a new cache.
            body ([`Part`]): The server's blocks.
            max_positions (`int`, *optional*): Largest number of positions in the caches of a client. If the message
                exceeds it, the oldest other caches of the client are dropped.

        Returns:
            `DynamicCache`, *optional*: The cache. `None` if the message uses no cache.

        Raises:
            ValueError: If the cache was dropped, or has another length or number of sequences than the message.
        """
        if message.cache_id is None:
            return None
        key = (message.client_id, message.cache_id)
        if message.seen == 0:
            self._caches[key] = (body.new_cache(), message.batch_size)
            self._drop_oldest(key, len(rows_of(message.hidden)), max_positions)
            return self._caches[key][0]
        prefix = 0 if body.prefix is None else body.prefix.length
        cache, num_sequences = self._caches.get(key, (None, 0))
        if cache is None or cache.get_seq_length() != prefix + message.seen:
            raise ValueError(
                f"The server has no cache of {message.seen} positions for this generation: the cache was dropped, or "
                "has a different length. Generate from the beginning."
            )
        if num_sequences != message.batch_size:
            raise ValueError(
                f"The message has {message.batch_size} sequences, but the cache has {num_sequences} sequences. "
                "Generate from the beginning."
            )
        self._drop_oldest(key, len(rows_of(message.hidden)), max_positions)
        if message.reorder is not None:
            cache.reorder_cache(message.reorder.long())
        return cache

    def _drop_oldest(self, key: tuple[str, int], num_added: int, max_positions: int | None) -> None:
        """
        Drop the oldest other caches of a client that exceeds a maximum.

        Args:
            key (`tuple[str, int]`): The client, and the cache that is used.
            num_added (`int`): Number of positions that are added to the cache.
            max_positions (`int`, *optional*): Largest number of positions in the caches of the client.
        """
        sizes = {
            kept: cache.get_seq_length() * num_sequences
            for kept, (cache, num_sequences) in self._caches.items()
            if kept[0] == key[0]
        }
        num_positions = sum(sizes.values()) + num_added
        for number, (oldest, size) in enumerate(sizes.items()):
            is_full = max_positions is not None and num_positions > max_positions
            if oldest != key and (is_full or len(sizes) - number > MAX_CACHES):
                del self._caches[oldest]
                num_positions -= size


@dataclass
class BoundaryNorms:
    """
    Squared norms of what crossed the cut layers for a client in a step.

    Args:
        states (`float`, *optional*, defaults to `0.0`): Squared norm of the hidden states, as blocks normalize them.
        gradients (`float`, *optional*, defaults to `0.0`): Squared norm of the gradients.
        num_targets (`int`, *optional*, defaults to `0`): Number of target tokens.
    """

    states: float = 0.0
    gradients: float = 0.0
    num_targets: int = 0

    def add(self, graph: ForwardGraph, message: Backward, received: torch.Tensor, answered: torch.Tensor) -> None:
        """
        Add a micro-batch.

        Args:
            graph ([`ForwardGraph`]): The forward pass.
            message ([`~split.messages.Backward`]): The gradient of the micro-batch.
            received (`torch.Tensor`): The decoded gradients of all micro-batches of the graph.
            answered (`torch.Tensor`): The gradient that answers the message.
        """
        outputs, inputs, gradient = (
            graph.select(tensor.detach(), message) for tensor in (graph.outputs, graph.inputs, received)
        )
        # Blocks normalize the hidden states. A normalized state has the squared norm of its number of values.
        self.states += norm(inputs) ** 2 + norm(outputs) ** 2 + outputs.numel()
        self.gradients += norm(gradient) ** 2 + norm(answered) ** 2
        self.num_targets += message.num_targets or 0

    @property
    def scale(self) -> float:
        """Product of the squared norms, for the gradient of the mean loss."""
        return self.gradients / max(self.num_targets, 1) ** 2 * self.states
