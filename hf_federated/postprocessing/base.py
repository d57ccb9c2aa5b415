"""Postprocessors: an ordered list of steps between local training and aggregation.

A step changes messages at four places: before a message leaves the server, when it reaches the client, before the
client's update leaves the client, and when the update reaches the server. A fifth method changes the sums of a round.
Each side keeps a memory between rounds. Clipping, noise, compression and conversion of dtypes are steps. The ledger
counts the bytes of messages as they are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from ..messages import ClientUpdate, Fit
from ..methods import Accumulator
from ..utils.random import derived_seed, isolated_rng
from ..utils.weighted_mean import State, Tensors
from .previous_release import adapt_old_names


# What a step keeps between rounds: scalars, tensors, and dictionaries of these.
Memory = dict[str, Any]
# The memories of a list of steps, by position and class name of the step. A step without a memory has no entry.
Memories = MutableMapping[str, Memory]


class Postprocessor:
    """
    Step between local training and aggregation.

    The methods run in this order. All of them return their input by default.

    | method | where | steps of the list |
    |---|---|---|
    | `server_send` or `server_send_shared` | server, before a [`Fit`] message is sent | in order |
    | `client_receive` | client, before the message is used | in reverse order |
    | `client_send` | client, after local training | in order |
    | `server_receive` | server, when the update arrives | in reverse order |
    | `on_sums` | server, before the algorithm computes the new state from the sums of the updates | in order |

    The client and the server share the constructor arguments. Each method has a `memory`, a dictionary that is kept
    between rounds and saved in checkpoints: a client has one for each step, the server has one for each step and
    client, and another one for each step for `on_sums`. A method changes the dictionary by assignment
    (`memory["residual"] = residual`) and does not change the values in place. Values are scalars, tensors, and
    dictionaries of these. If a step raises an error, all memories stay as they were.

    An update may be rejected after `server_receive`, or may not arrive. The next message to the client has the field
    `accepted_round`, the last round whose update the server used. A step with a memory compares the field with the
    round of its last message.

    All methods may draw random numbers from the global generators of torch, numpy and Python. The generators are
    seeded from the seed of the run, the client and the round, and restored afterwards. Each update therefore gets
    different noise, and a run has the same noise with any number of processes. A private generator of a step has
    neither property.

    Example:

    ```python
    >>> import dataclasses

    >>> from hf_federated import Postprocessor

    >>> class SendBfloat16(Postprocessor):
    ...     def client_send(self, update, message, memory):
    ...         state = {k: v.bfloat16() if v.is_floating_point() else v for k, v in update.state.items()}
    ...         return dataclasses.replace(update, state=state)
    ...
    ...     def server_receive(self, update, state, memory):
    ...         return dataclasses.replace(update, state={k: v.to(state[k].dtype) for k, v in update.state.items()})
    ```
    """

    # Whether `client_send` adds noise. The server then cannot check what earlier steps of the list did.
    adds_noise: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adapt_old_names(cls)

    @property
    def changes_requests(self) -> bool:
        """Whether the step overrides a method for the messages to clients. Each client then gets its own message."""
        cls, base = type(self), Postprocessor
        return (
            cls.server_send is not base.server_send
            or cls.server_send_shared is not base.server_send_shared
            or cls.client_receive is not base.client_receive
        )

    @property
    def keeps_server_memory(self) -> bool:
        """Whether the server may keep a memory of each client. Each client then stays on one rank of a launch."""
        return self.changes_requests or type(self).server_receive is not Postprocessor.server_receive

    def server_send(self, message: Fit, memory: Memory) -> Fit:
        """
        Change a message before it leaves the server.

        Args:
            message ([`Fit`]): Message with the global state, or the result of the preceding step. Its tensors may be
                shared with the messages to other clients.
            memory (`dict`): The server's memory of this step for the client.

        Returns:
            [`Fit`]: The changed message.
        """
        return message

    def server_send_shared(self, message: Fit, memory: Memory, shared: Memory) -> Fit:
        """
        Change a message before it leaves the server, with a memory for all clients. Calls `server_send` by default.

        Args:
            message ([`Fit`]): As for `server_send`.
            memory (`dict`): The server's memory of this step for the client.
            shared (`dict`): The memory of `on_sums`. In a launch of several processes, each process has one. What the
                messages of a round leave in it must not depend on the client, and `on_sums` must leave the same in a
                process that sent no message.

        Returns:
            [`Fit`]: The changed message.
        """
        return self.server_send(message, memory)

    def client_receive(self, message: Fit, memory: Memory) -> Fit:
        """
        Change a message when it reaches the client.

        Args:
            message ([`Fit`]): Received message, or the result of the following step of the list.
            memory (`dict`): The client's memory of this step.

        Returns:
            [`Fit`]: The changed message.
        """
        return message

    def client_send(self, update: ClientUpdate, message: Fit, memory: Memory) -> ClientUpdate:
        """
        Change an update before it leaves the client.

        Args:
            update ([`ClientUpdate`]): Result of local training or of the preceding step.
            message ([`Fit`]): Message that the client received, after `client_receive` of all steps.
            memory (`dict`): The client's memory of this step.

        Returns:
            [`ClientUpdate`]: The changed update.
        """
        return update

    def server_receive(self, update: ClientUpdate, state: dict[str, torch.Tensor], memory: Memory) -> ClientUpdate:
        """
        Change an update when it reaches the server.

        Args:
            update ([`ClientUpdate`]): Received update, or the result of the following step of the list.
            state (`dict[str, torch.Tensor]`): The global state in the dtypes of the server. The client trained from
                this state, except for what the way to the client lost (`exchange_dtype`, `server_send`). Steps
                therefore send changes, which the server adds to this state.
            memory (`dict`): The server's memory of this step for the client.

        Returns:
            [`ClientUpdate`]: The changed update.
        """
        return update

    def on_sums(self, sums: Accumulator, round: Any, memory: Memory) -> Accumulator:
        """
        Change the sums of the accepted updates, for example with central noise.

        Args:
            sums ([`~hf_federated.aggregation.Accumulator`]): The sums of all processes, which may be changed in place.
            round (`Any`): The round, with `number` (from 0), `cohort` (ids of the clients) and `state` (the global
                state before the round).
            memory (`dict`): The server's memory of this step, for all clients together.

        Returns:
            [`~hf_federated.aggregation.Accumulator`]: The changed sums.
        """
        return sums

    def check_update(self, update: ClientUpdate, state: dict[str, torch.Tensor]) -> None:
        """
        Check that the client carried out this step. It is called after `server_receive` if no later step adds noise.

        Args:
            update ([`ClientUpdate`]): The update after `server_receive`.
            state (`dict[str, torch.Tensor]`): The global state, as for `server_receive`.

        Raises:
            ValueError: If the client did not carry out the step. The server then rejects the update.
        """


adapt_old_names(Postprocessor)


def matching(values: Tensors, state: Tensors) -> State:
    """Return the floating values that have the name and the shape of a tensor of a state."""
    return {
        name: value
        for name, value in values.items()
        if value.is_floating_point() and name in state and state[name].shape == value.shape
    }


def run_server_send(
    steps: Sequence[Postprocessor], message: Fit, memories: Memories, shared: Memories | None = None
) -> Fit:
    """
    Run `server_send_shared` of all steps in order.

    Args:
        steps (`Sequence[Postprocessor]`): The steps.
        message ([`Fit`]): The message.
        memories (`dict`): The server's memories for this client, changed in place.
        shared (`dict`, *optional*): The server's memories for all clients together, changed in place.
    """
    if not any(step.changes_requests for step in steps):
        return message
    shared = {} if shared is None else shared
    with (
        _opened(steps, memories, message.seed, "server send") as opened,
        _opened(steps, shared, message.seed, "server send") as opened_shared,
    ):
        for (step, memory), (_, of_all) in zip(opened, opened_shared, strict=True):
            message = step.server_send_shared(message, memory, of_all)
    return message


def run_client_receive(steps: Sequence[Postprocessor], message: Fit, memories: Memories) -> Fit:
    """Run `client_receive` of all steps in reverse order. `memories` are the client's, changed in place."""
    if not any(step.changes_requests for step in steps):
        return message
    with _opened(steps, memories, message.seed, "client receive") as opened:
        for step, memory in reversed(opened):
            message = step.client_receive(message, memory)
    return message


def run_client_send(
    steps: Sequence[Postprocessor], update: ClientUpdate, message: Fit, memories: Memories
) -> ClientUpdate:
    """Run `client_send` of all steps in order. `memories` are the client's, changed in place."""
    with _opened(steps, memories, message.seed, "client side") as opened:
        for step, memory in opened:
            update = step.client_send(update, message, memory)
    return update


def run_server_receive(
    steps: Sequence[Postprocessor],
    update: ClientUpdate,
    state: dict[str, torch.Tensor],
    seed: int,
    memories: Memories,
) -> ClientUpdate:
    """
    Run `server_receive` of all steps in reverse order, and their checks.

    Args:
        steps (`Sequence[Postprocessor]`): The steps.
        update ([`ClientUpdate`]): Received update.
        state (`dict[str, torch.Tensor]`): The global state in the dtypes of the server.
        seed (`int`): Seed of the message that was sent to the client.
        memories (`dict`): The server's memories for this client, changed in place.
    """
    is_noisy = False
    with _opened(steps, memories, seed, "server side") as opened:
        for step, memory in reversed(opened):
            update = step.server_receive(update, state, memory)
            if not is_noisy:
                step.check_update(update, state)
            is_noisy = is_noisy or step.adds_noise
    return update


def run_on_sums(
    steps: Sequence[Postprocessor], sums: Accumulator, round: Any, seed: int, memories: Memories
) -> Accumulator:
    """
    Run `on_sums` of all steps in order.

    Args:
        steps (`Sequence[Postprocessor]`): The steps.
        sums ([`~hf_federated.aggregation.Accumulator`]): The sums of all processes.
        round (`Any`): The round, with `number`, `cohort` and `state`.
        seed (`int`): Seed of the federation, equal in all processes.
        memories (`dict`): The server's memories for all clients together, changed in place.
    """
    with _opened(steps, memories, derived_seed(seed, round.number), "sums") as opened:
        for step, memory in opened:
            sums = step.on_sums(sums, round, memory)
    return sums


@contextmanager
def _opened(
    steps: Sequence[Postprocessor], memories: Memories, seed: int, purpose: str
) -> Iterator[list[tuple[Postprocessor, Memory]]]:
    """Seed the global generators, and store the memories that the steps leave if no step raises an error."""
    if not steps:
        yield []
        return
    opened = {f"{place} {type(step).__name__}": step for place, step in enumerate(steps)}
    copies = {key: dict(memories.get(key, {})) for key in opened}
    with isolated_rng(derived_seed(seed, purpose)):
        yield [(step, copies[key]) for key, step in opened.items()]
    memories.update(copies)
    for key in [key for key, memory in copies.items() if not memory]:
        del memories[key]
