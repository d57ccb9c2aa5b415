"""What a client of a split model accepts from a server that may be dishonest.

The kind, the micro-batch, the dtype and the shape of an answer follow from the message of the client. The size of the
received hidden states and gradients is bounded by what the client itself has sent:

- Hidden states: the norm of the largest position, relative to the largest position of the sent hidden states.
- Gradients: the sensitivity of the loss at the first cut, relative to the sensitivity at the second cut, which follows
  from the client's own loss. The sensitivity `s = √Σ (‖g‖ · ‖h‖)²`, over the positions with the hidden state `h` and
  the gradient `g`, is the change of the loss if the hidden states change by their own size. Blocks normalize their
  input and add to it, so the ratio `s_received / s_sent` does not depend on the scale of the hidden states. It does
  not depend on the scale of the loss either (loss scaling, accumulation, number of targets).

A server can choose any answer within these bounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from ..codecs import Layout
from ..messages import Serializable
from ..utils.finite_values import SUM_DTYPES
from ..utils.printable import printable
from .messages import MicroBatchId, SplitMessage


A = TypeVar("A", bound=Serializable)

# Largest number of characters of a value in an error.
MAX_SHOWN = 300
# Largest ratio of hidden states in any run, and relative to the first micro-batches of the same run. A few positions
# of a trained model can be 10⁴ times as large as its embeddings. In runs with 4 to 48 blocks, the ratio was at most
# 500.
MAX_STATES, MAX_STATES_RELATIVE = 1e6, 1e4
# The same for gradients. In these runs, some of them with a learning rate of 10, the ratio was between 0.005 and 7.
MAX_GRADIENT, MAX_GRADIENT_RELATIVE = 1000.0, 100.0
# Number of micro-batches whose median is the reference of later ones.
NUM_REFERENCES = 16
# A sensitivity below this number counts as zero: float32 squares of smaller gradients are rounded to zero.
SMALLEST_SENSITIVITY = 1e-12
# A position counts with at least this part of the mean norm, so that a gradient at a hidden state of zero counts.
SMALLEST_STATE = 1e-3


class RefusedAnswerError(ValueError):
    """
    The client refuses an answer of the server, because a value differs from what the client agreed to.

    Args:
        kind (`str`): The kind of the answer.
        field (`str`): The field with the value.
        found (`str`): The value, as the predicate of a sentence.
        agreed (`str`): What the client agreed to.
    """

    def __init__(self, kind: str, field: str, found: str, agreed: str) -> None:
        # A value of the server can be long.
        found, agreed = (printable(text, MAX_SHOWN) for text in (found, agreed))
        super().__init__(f"`{field}` of an answer of kind {kind!r} {found}. The client agreed to {agreed}.")


def read_answer(answer_class: type[A], blob: bytes | memoryview) -> A:
    """
    Deserialize an answer.

    Args:
        answer_class (`type`): The class of the answer.
        blob (`bytes`): The serialized answer.

    Raises:
        RefusedAnswerError: If the answer is damaged, is of another kind, or has an invalid field.
    """
    try:
        return answer_class.from_bytes(blob)
    except ValueError as error:
        agreed = f"an answer of kind {answer_class.kind!r}"
        raise RefusedAnswerError(answer_class.kind, "kind", f"cannot be read: {error}", agreed) from error


def check_micro_batch(answer: SplitMessage, sent: MicroBatchId) -> None:
    """
    Check that an answer belongs to the message of the client.

    Args:
        answer ([`~split.messages.SplitMessage`]): The answer.
        sent (`MicroBatchId`): The micro-batch of the message.

    Raises:
        RefusedAnswerError: If the answer belongs to another micro-batch.
    """
    for name, expected in zip(("client_id", "step", "micro_step"), sent, strict=True):
        check_equal(answer, name, expected, ", that of its message")


def check_layout(answer: SplitMessage, layout: Layout) -> None:
    """
    Check the names, dtypes and shapes of the tensors of an answer.

    Args:
        answer ([`~split.messages.Hidden`] or [`~split.messages.Gradient`]): The answer.
        layout (`Layout`): The dtype and the shape of each expected tensor.

    Raises:
        RefusedAnswerError: If a tensor is missing or has another dtype or shape.
    """
    encoded: Mapping[str, torch.Tensor] = getattr(answer, answer.states_field)
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in encoded.items()}
    expected = {name: (dtype, tuple(shape)) for name, (dtype, shape) in layout.items()}
    if found != expected:
        raise RefusedAnswerError(answer.kind, answer.states_field, f"is {found}", f"{expected}")


def norms_of(states: torch.Tensor) -> torch.Tensor:
    """Return the norm of each position of hidden states or gradients."""
    return torch.linalg.vector_norm(states.detach(), dim=-1, dtype=SUM_DTYPES[states.dtype])


class AnswerBounds:
    """
    Bounds of what a client receives, from what it has sent and from the first micro-batches of the run.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.split.agreement import AnswerBounds

    >>> norms = torch.ones(2, 7)  # of 2 sequences of 7 positions
    >>> bounds = AnswerBounds()
    >>> bounds.check_gradient(sent=norms, received=3 * norms, states=(norms, norms))
    >>> bounds.check_gradient(sent=norms, received=1e5 * norms, states=(norms, norms))
    Traceback (most recent call last):
    ...
    hf_federated.split.agreement.RefusedAnswerError: `gradient` of an answer of kind 'split_gradient' is 1e+05 ...
    ```
    """

    def __init__(self) -> None:
        self._states = _RatioBound(MAX_STATES, MAX_STATES_RELATIVE)
        self._gradients = _RatioBound(MAX_GRADIENT, MAX_GRADIENT_RELATIVE)

    def check_states(self, states: tuple[torch.Tensor, torch.Tensor], is_training: bool) -> None:
        """
        Check the size of received hidden states.

        Args:
            states (`tuple[torch.Tensor, torch.Tensor]`): Norms of the positions of the sent and of the received hidden
                states, each of shape `(batch, sequence)`.
            is_training (`bool`): Whether the hidden states belong to a training step, so that they count as reference.

        Raises:
            RefusedAnswerError: If the hidden states are too large.
        """
        reference, largest = (float(norms.max()) for norms in states)
        limit = self._states.limit if is_training else MAX_STATES
        if not largest <= limit * reference and reference:
            found = f"is {largest / reference:.3g} times as large as the hidden states that the client sent"
            raise RefusedAnswerError("split_hidden", "hidden", found, f"at most {limit:.3g} times")
        if is_training and reference:
            self._states.record(largest / reference)

    def check_gradient(
        self, sent: torch.Tensor, received: torch.Tensor, states: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """
        Check the size of a received gradient.

        Args:
            sent (`torch.Tensor`): Norm of each position of the sent gradient, of shape `(batch, sequence)`.
            received (`torch.Tensor`): Norm of each position of the received gradient, of the same shape.
            states (`tuple[torch.Tensor, torch.Tensor]`): Norms of the sent and of the received hidden states.

        Raises:
            RefusedAnswerError: If the gradient is too large.
        """
        sent_states, received_states = states
        of_loss, of_answer = _sensitivity(sent, received_states), _sensitivity(received, sent_states)
        limit = self._gradients.limit
        # The product of large numbers can be infinite or NaN. If the client's loss is NaN, there is no bound.
        if math.isfinite(of_loss) and not of_answer <= limit * of_loss + SMALLEST_SENSITIVITY:
            ratio = of_answer / of_loss if of_loss else math.inf
            found = f"is {ratio:.3g} times as large as the gradient that the client sent, relative to hidden states"
            raise RefusedAnswerError("split_gradient", "gradient", found, f"at most {limit:.3g} times")
        if SMALLEST_SENSITIVITY < of_loss < math.inf:
            self._gradients.record(of_answer / of_loss)


def _sensitivity(gradients: torch.Tensor, states: torch.Tensor) -> float:
    """Return the change of the loss if hidden states change by their own size, from the norms of the positions."""
    return float(torch.linalg.vector_norm(gradients * states.clamp_min(SMALLEST_STATE * float(states.mean()))))


class _RatioBound:
    """
    The largest ratio that a client accepts.

    Args:
        largest (`float`): Largest ratio in any run.
        relative (`float`): Largest multiple of the median of the first ratios of the run, which counts as at least 1.
    """

    def __init__(self, largest: float, relative: float) -> None:
        self._largest, self._relative = largest, relative
        self._first: list[float] = []

    @property
    def limit(self) -> float:
        """The largest accepted ratio."""
        if not self._first:
            return self._largest
        return min(self._largest, self._relative * max(1.0, statistics.median_low(self._first)))

    def record(self, ratio: float) -> None:
        """Record an accepted ratio. The later ones do not count, so that the bound does not grow with the ratios."""
        if len(self._first) < NUM_REFERENCES:
            self._first.append(ratio)


def check_norm(kind: str, name: str, value: float, smallest: float) -> None:
    """
    Check the norm of gradients that the server reports.

    Args:
        kind (`str`): The kind of the answer.
        name (`str`): The field.
        value (`float`): The norm.
        smallest (`float`): The smallest possible norm, without rounding errors.

    Raises:
        RefusedAnswerError: If the norm is not finite or too small.
    """
    if not smallest * (1 - 1e-6) <= value < math.inf:
        raise RefusedAnswerError(kind, name, f"is {value!r}", f"a finite number of at least {smallest:.6g}")


def check_equal(answer: Any, name: str, expected: Any, remark: str = "") -> None:
    """
    Check the value of a field of an answer.

    Args:
        answer (`Any`): The answer.
        name (`str`): The field.
        expected (`Any`): The only value that the client accepts.
        remark (`str`, *optional*): What the value is, for the error.

    Raises:
        RefusedAnswerError: If the value differs.
    """
    if (found := getattr(answer, name)) != expected:
        raise RefusedAnswerError(answer.kind, name, f"is {found!r}", f"{expected!r}{remark}")
