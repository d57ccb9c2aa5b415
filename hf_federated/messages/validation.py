"""Checks of replies: whether a reply answers the request, and keys, shapes, dtypes and values of client updates.

A client that refuses a request raises a [`RefusedRequestError`].
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..utils.fields import check_fields
from ..utils.finite_values import SUM_DTYPES, is_finite
from ..utils.printable import printable
from ..utils.shards import ACTIVE, first_over_shards
from .base import Message
from .ledger import Ledger
from .training import CLASS_COUNT, ClientFailure, ClientUpdate, Metrics


# Longest part of a received text in an error message.
MAX_SHOWN_LENGTH = 100
# Largest number of characters of a value in a refusal.
MAX_REFUSED_LENGTH = 300
# Errors of reading what another party sent. Each of them is a failure of this party.
INVALID_CONTENT = (ValueError, TypeError, KeyError, IndexError, RuntimeError, OverflowError)


# Function that raises `ValueError` for unusable values of `extra`. Names, shapes and dtypes are already checked.
CheckExtra = Callable[[Mapping[str, torch.Tensor]], None]
# Function that returns the name of a tensor with NaN or infinite values, or `None`.
FindNonFinite = Callable[[Mapping[str, torch.Tensor]], "str | None"]


# Words that only a refusal contains.
_AGREED = "The client agreed to"


class InvalidUpdateError(ValueError):
    """The server rejected an update. The message names the client, the round, the key and the expected value."""


class RefusedRequestError(ValueError):
    """
    The client refuses a request, because a value differs from what its own settings allow.

    Args:
        request ([`Message`]): The request.
        field (`str`): The field with the value.
        found (`str`): The value, as the predicate of a sentence.
        agreed (`str`): What the client agreed to.
        is_of_peer (`bool`, *optional*, defaults to `False`): Whether another client may have sent the value, so that
            the refusal does not count against the server.
    """

    def __init__(self, request: Message, field: str, found: str, agreed: str, is_of_peer: bool = False) -> None:
        self.is_of_peer = is_of_peer
        # A value of the server can be long, and a message to the server must be short.
        found, agreed = (printable(text, MAX_REFUSED_LENGTH) for text in (found, agreed))
        super().__init__(f"`{field}` of a request of kind {request.kind!r} {found}. {_AGREED} {agreed}.")


def is_refusal(error: str) -> bool:
    """Whether the text of a [`ClientFailure`] is that of a refusal. The text comes from the client."""
    return _AGREED in error


@contextmanager
def refusing(request: Message, field: str) -> Iterator[None]:
    """
    Refuse a request whose content cannot be read.

    Args:
        request ([`Message`]): The request.
        field (`str`): The field that is read in the block.

    Raises:
        RefusedRequestError: In place of an error that invalid content causes.
    """
    try:
        yield
    except INVALID_CONTENT as error:
        raise refusal_of(error, request, field) from error


def refusal_of(error: Exception, request: Message, field: str) -> Exception:
    """
    Return the refusal of a request whose content cannot be read.

    Args:
        error (`Exception`): The error of reading. A refusal, and an error of the device, are returned as they are.
        request ([`Message`]): The request.
        field (`str`): The field that was read.
    """
    if isinstance(error, (RefusedRequestError, torch.OutOfMemoryError)):
        return error
    found = f"cannot be read: {type(error).__name__}: {error}"
    return RefusedRequestError(request, field, found, "the content that its own methods read")


@dataclass(frozen=True)
class ExpectedReply:
    """
    What the reply to a request must contain.

    Args:
        client_id (`str`): Id of the client that was asked.
        round (`int`): Round number, from 0.
        nonce (`str`): Nonce of the request.
        kind (`str`): Kind of the reply of a client that succeeds. Empty if any message may answer the request.
        max_examples (`int`, *optional*): Largest number of examples that a reply of the kind [`Metrics`] may claim.
    """

    client_id: str
    round: int
    nonce: str
    kind: str
    max_examples: int | None = None

    @classmethod
    def to(cls, request: Message, max_examples: int | None = None) -> ExpectedReply:
        """Describe the reply to a request."""
        return cls(request.client_id, request.round, request.nonce, request.answered_by, max_examples)

    def check(self, reply: Any) -> None:
        """
        Check a reply.

        Args:
            reply (`Any`): What the client sent.

        Raises:
            ValueError: If the reply is no message, is of another kind, round or client than requested, does not
                contain the nonce of the request, or has a field with a value of another type or out of range.
        """
        if not isinstance(reply, Message):
            raise ValueError(f"it is a {type(reply).__name__}, expected a message")
        if self.kind and reply.kind not in (self.kind, ClientFailure.kind):
            raise ValueError(f"it is a {reply.kind!r}, expected a {self.kind!r}")
        check_fields(reply)
        if reply.client_id != self.client_id:
            raise ValueError(f"it is in the name of client {reply.client_id[:MAX_SHOWN_LENGTH]!r}")
        if reply.round != self.round:
            raise ValueError(f"it belongs to round {reply.round + 1}")
        if reply.nonce != self.nonce:
            raise ValueError("it does not contain the nonce of the request, so it may answer an earlier request")
        limit = self.max_examples
        if limit is not None and isinstance(reply, Metrics) and reply.num_examples > limit:
            raise ValueError(f"it claims {reply.num_examples} evaluation examples, but the client announced {limit}")


def first_non_finite(state: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the first tensor with NaN or infinite values, or `None`. Meta tensors have no values."""
    floating = {
        name: value
        for name, value in state.items()
        if value.is_floating_point() and value.numel() and not value.is_meta
    }
    # As in `is_finite`, with one transfer from an accelerator for all tensors. Finite sums may overflow together.
    sums = [value.sum(dtype=SUM_DTYPES[value.dtype]) for value in floating.values()]
    found = None
    if sums and not math.isfinite(torch.stack(sums).sum()):
        found = next((name for name, value in floating.items() if not is_finite(value)), None)
    return first_over_shards(state, found) if ACTIVE else found


_shape_of, _dtype_of = operator.attrgetter("shape"), operator.attrgetter("dtype")


def have_same_layout(values: Mapping[str, Any], references: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether the tensors with these names have the same shapes and dtypes. It runs no Python code for a tensor."""
    names = tuple(names)
    own, expected = list(map(values.__getitem__, names)), list(map(references.__getitem__, names))
    has_dtypes = list(map(_dtype_of, own)) == list(map(_dtype_of, expected))
    return has_dtypes and list(map(_shape_of, own)) == list(map(_shape_of, expected))


def _check_state(
    state: Mapping[str, torch.Tensor],
    reference: Mapping[str, torch.Tensor],
    where: str,
    find_non_finite: FindNonFinite = first_non_finite,
) -> None:
    if state.keys() != reference.keys():
        missing = [name for name in reference if name not in state]
        unexpected = [name for name in state if name not in reference]
        found = {"missing": missing, "unexpected": unexpected}
        parts = [f"{len(names)} keys are {kind}, the first is {names[0]!r}" for kind, names in found.items() if names]
        raise InvalidUpdateError(f"{where}: {'; '.join(parts)}. Train the same adapter or layers on all clients.")
    if not have_same_layout(state, reference, reference):
        for name, expected in reference.items():
            value = state[name]
            if value.shape != expected.shape:
                raise InvalidUpdateError(
                    f"{where}: {name!r} has shape {tuple(value.shape)}, expected {tuple(expected.shape)}."
                )
            if value.dtype != expected.dtype:
                raise InvalidUpdateError(f"{where}: {name!r} is {value.dtype}, expected {expected.dtype}.")
    if (non_finite_name := find_non_finite(state)) is not None:
        raise InvalidUpdateError(
            f"{where}: {non_finite_name!r} holds NaN or infinite values, expected finite values. Lower the learning "
            "rate of this client, clip its gradients (`max_grad_norm`), or check its data."
        )


@dataclass(frozen=True)
class UpdateLimits:
    """
    Largest numbers that an update of a client may claim. `None` is no limit.

    Args:
        num_examples (`int`, *optional*): Number of training examples that the client has announced.
        num_steps (`int`, *optional*): Number of optimizer steps that the client can take in a round.
        num_tokens (`int`, *optional*): Number of input tokens that the client can see in a round.
        class_counts (`tuple[int, ...]`, *optional*): Number of training examples of each class that the client has
            announced.
    """

    num_examples: int | None = None
    num_steps: int | None = None
    num_tokens: int | None = None
    class_counts: tuple[int, ...] | None = None


def check_claims(update: ClientUpdate, limits: UpdateLimits) -> None:
    """
    Check the numbers that a client claims. They decide the weight of its update.

    Args:
        update ([`ClientUpdate`]): Update of the client.
        limits ([`UpdateLimits`]): What the client may claim.

    Raises:
        InvalidUpdateError: If the update has no example or no step, or if it claims more than the limits allow.
    """
    where = f"Client {update.client_id!r}, round {update.round + 1}"
    if update.num_examples < 1 or update.num_steps < 1:
        raise InvalidUpdateError(
            f"{where}: {update.num_examples} examples, {update.num_tokens} tokens and {update.num_steps} steps; "
            "expected at least one example and one step. An update without data cannot be weighted."
        )
    for name in ("num_examples", "num_steps", "num_tokens"):
        claimed, limit = getattr(update, name), getattr(limits, name)
        if limit is not None and claimed > limit:
            noun = name.removeprefix("num_")
            raise InvalidUpdateError(
                f"{where}: the update claims {claimed} {noun}, but the client has at most {limit}."
            )
    if limits.class_counts is not None:
        _check_class_counts(update, limits.class_counts, where)


def _check_class_counts(update: ClientUpdate, limits: Sequence[int], where: str) -> None:
    by_name = {f"{CLASS_COUNT}{label}": limit for label, limit in enumerate(limits)}
    for name, claimed in update.metrics.items():
        if name.startswith(CLASS_COUNT) and not claimed <= by_name.get(name, 0):  # Also NaN.
            label = name.removeprefix(CLASS_COUNT)[:MAX_SHOWN_LENGTH]
            raise InvalidUpdateError(
                f"{where}: the update claims {claimed:g} examples of class {label}, but the client announced "
                f"{by_name.get(name, 0)}."
            )


def check_update(
    update: ClientUpdate,
    reference: Mapping[str, torch.Tensor],
    extra_reference: Mapping[str, torch.Tensor],
    extra_checks: Sequence[CheckExtra] = (),
    find_non_finite: FindNonFinite = first_non_finite,
) -> None:
    """
    Check the tensors of an update before it is aggregated.

    Args:
        update ([`ClientUpdate`]): Update of the client.
        reference (`Mapping[str, torch.Tensor]`): The global state that was sent. Keys, shapes and dtypes of the update
            must be equal.
        extra_reference (`Mapping[str, torch.Tensor]`): Tensors with the keys, shapes and dtypes that `extra` of the
            update must have.
        extra_checks (`Sequence[Callable]`, *optional*): Functions that raise `ValueError` for values of `extra` that
            an algorithm cannot use.
        find_non_finite (`Callable`, *optional*): Returns the name of the first tensor of the state with NaN or
            infinite values, or `None`. It is called if the names, shapes and dtypes are right.

    Raises:
        InvalidUpdateError: If a key, shape or dtype differs, if a value is not finite, or if the algorithm cannot use
            a value.
    """
    where = f"Client {update.client_id!r}, round {update.round + 1}"
    _check_state(update.state, reference, where, find_non_finite)
    extra_where = f"{where}, additional tensors"
    if update.extra or extra_reference:
        _check_state(update.extra, extra_reference, extra_where)
    for check_extra in extra_checks:
        try:
            check_extra(update.extra)
        except ValueError as error:
            raise InvalidUpdateError(f"{extra_where}: {error}") from error


def checked_reply(expected: ExpectedReply, reply: Message, ledger: Ledger, error: Exception | None) -> Message:
    """
    Check a reply and count its bytes.

    Args:
        expected ([`ExpectedReply`]): What the reply must contain.
        reply (`Message`): What the client sent.
        ledger ([`Ledger`]): Counts the bytes in the round of the request.
        error (`Exception`, *optional*): The error behind a failure, if the client runs in this process.

    Returns:
        [`Message`]: The reply, or a failure of the client if the reply is refused.
    """
    round, client_id = expected.round, expected.client_id
    try:
        expected.check(reply)
        ledger.record(round, client_id, bytes_up=reply.num_bytes)
    except (TypeError, ValueError) as refused:
        return ClientFailure(round, client_id, f"the server refused the reply: {printable(refused)}")
    if isinstance(reply, ClientFailure):
        # If the client runs in this process, the text of the error has not left it.
        text = printable(reply.error) if error is None else f"{type(error).__name__}: {error}"
        reply = replace(reply, error=text)
    elif isinstance(reply, (ClientUpdate, Metrics)) and not all(map(str.isprintable, reply.metrics)):
        # The names of metrics reach logs, trackers and the model card.
        reply = replace(reply, metrics={printable(name): value for name, value in reply.metrics.items()})
    # The nonce has served its purpose. Without it, the replies of two equal runs are equal.
    return reply.with_nonce("")
