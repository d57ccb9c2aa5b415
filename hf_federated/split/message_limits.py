"""`MessageLimits`: the size of the micro-batches that the parties of a networked run agreed to.

The memory of a server grows with the positions of a micro-batch, and quadratically with the length of a row. Sequences
that are packed into one row count as a whole: without a limit, a message of 1.6 MB could cost 371 MB.
"""

from __future__ import annotations

from dataclasses import dataclass

from .messages import Forward, rows_of


# A message without a gradient may have this multiple of the positions of a micro-batch, for example in beam search.
# The server keeps no activations for it.
EVALUATION_FACTOR = 8


@dataclass(frozen=True)
class MessageLimits:
    """
    Largest size of the hidden states of a client, from the settings that all parties share.

    Args:
        batch_size (`int`): Number of sequences in a micro-batch of the training.
        eval_batch_size (`int`): Number of sequences in a batch of an evaluation.
        max_length (`int`, *optional*): Number of positions of a row. By default the number of positions of the model
            for a sequence, and as many positions as a full micro-batch for a row of packed sequences.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.split import Wire
    >>> from hf_federated.split.message_limits import MessageLimits
    >>> from hf_federated.split.messages import Forward

    >>> states = Wire("float32").encode({"hidden": torch.zeros(2, 70, 8)})
    >>> MessageLimits(2, 8).check(Forward("north", 0, 0, states, batch_size=2, grad=True), model_positions=64)
    Traceback (most recent call last):
    ...
    ValueError: Client 'north' sent a micro-batch of 2 rows of 70 positions at step 0. ... at most 128 positions ...
    ```
    """

    batch_size: int
    eval_batch_size: int
    max_length: int | None = None

    def num_positions(self, has_gradient: bool, model_positions: int | None) -> int | None:
        """
        Return the largest number of positions of a message, with those in its cache. `None` if there is no limit.

        Args:
            has_gradient (`bool`): Whether the client sends a gradient for the message.
            model_positions (`int`, *optional*): Number of positions of the model.
        """
        length = model_positions if self.max_length is None else self.max_length
        if length is None:
            return None
        if has_gradient:
            return self.batch_size * length
        return EVALUATION_FACTOR * max(self.batch_size, self.eval_batch_size) * length

    def check(self, message: Forward, model_positions: int | None) -> None:
        """
        Check the size of a message.

        Args:
            message ([`~split.messages.Forward`]): The message.
            model_positions (`int`, *optional*): Number of positions of the model.

        Raises:
            ValueError: If the message is larger than the parties agreed.
        """
        length = message.seen + len(rows_of(message.hidden)) // message.batch_size
        sent = (
            f"Client {message.client_id!r} sent a micro-batch of {message.batch_size} rows of {length} positions at "
            f"step {message.step}."
        )
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"{sent} The parties agreed to rows of at most max_length={self.max_length} positions. Shorten the "
                "rows, or raise max_length in the split config of all parties."
            )
        limit = self.num_positions(message.grad, model_positions)
        if limit is not None and message.batch_size * length > limit:
            kind = "training" if message.grad else "evaluation and generation"
            raise ValueError(
                f"{sent} The parties agreed to at most {limit} positions in {kind}. Send fewer rows, or raise "
                "the batch size or max_length in the settings of all parties."
            )
