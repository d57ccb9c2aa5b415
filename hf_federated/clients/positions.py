"""The positions of public examples at which models predict: each word, or each target token.

The positions of an example are the same for all clients: its words, for any tokenizer, or its tokens, if all clients
share one vocabulary. Predictions are tensors of shape `(positions, classes)`, ordered by example and by position
within an example. Padding, special tokens and all sub-tokens of a word except the first are no positions.

**Words that a tokenizer drops.** A tokenizer may keep no token of a word, because the example is too long or because
the tokenizer does not treat the word as text. The client cannot predict at this word. It reports the positions that it
cannot predict (`absent`), and the server restricts the exchange to the words that all clients of the cohort and its
own model keep. These are the agreed positions. At an agreed position, all clients of the cohort contribute as the
algorithm defines, and no model learns at the other positions. (If the remaining clients contributed at such a word,
the weights of clients would change from word to word.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from datasets import Dataset

from ..tasks.base import NUM_POSITIONS


# Key of the left-out positions in messages with predictions or targets: indices among the requested positions.
ABSENT = "absent"


class Positions:
    """
    The positions of public examples, for one model.

    Args:
        counts (`torch.Tensor` of shape `(examples,)`):
            Number of positions of each example, int64. It is the same for all clients.
        seen (`torch.Tensor` of shape `(positions,)`, *optional*):
            Whether the model can predict at each position, bool. By default it can predict at all positions.
        feeds_labels (`bool`, *optional*, defaults to `False`):
            Whether the model receives the labels of public examples as inputs of its decoder.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.clients.positions import Positions

    >>> positions = Positions(torch.tensor([2, 1, 3]), torch.tensor([True, True, True, True, False, True]))
    >>> positions.numbers_of([2, 0])
    tensor([3, 4, 5, 0, 1])
    >>> positions.agreed_of([2, 0])  # the tokenizer keeps no token of the second word of the last example
    tensor([3, 5, 0, 1])
    >>> positions.absent_of([2, 0])
    tensor([1], dtype=torch.int32)
    ```
    """

    def __init__(self, counts: torch.Tensor, seen: torch.Tensor | None = None, feeds_labels: bool = False) -> None:
        self.counts = counts
        self.seen = torch.ones(int(counts.sum()), dtype=torch.bool) if seen is None else seen
        self.feeds_labels = feeds_labels
        self._starts = counts.cumsum(0) - counts
        # The positions of the current exchange: a subset of the seen positions.
        self._agreed = self.seen.clone()

    @classmethod
    def from_dataset(cls, rows: Dataset, feeds_labels: bool) -> Positions:
        """
        Find the positions of encoded public examples.

        Args:
            rows (`datasets.Dataset`): Examples from [`Task.prepare_public`].
            feeds_labels (`bool`): See [`Positions`]. If `False`, the column `labels` has the index of each position
                within its example.
        """
        counts = torch.tensor(rows[NUM_POSITIONS][:], dtype=torch.int64)
        positions = cls(counts, feeds_labels=feeds_labels)
        if not feeds_labels:
            seen = torch.zeros_like(positions.seen)
            for start, labels in zip(positions._starts.tolist(), rows["labels"], strict=True):
                indices = np.asarray(labels, dtype=np.int64)
                seen[start + indices[indices >= 0]] = True
            positions = cls(counts, seen)
        return positions

    def copy(self) -> Positions:
        """Return the same positions for another model. The agreed positions of the copy change independently."""
        return Positions(self.counts, self.seen, self.feeds_labels)

    @property
    def num_rows(self) -> int:
        """Number of public examples."""
        return len(self.counts)

    def numbers_of(self, rows: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """
        Return the indices of the positions of some examples among all positions, int64.

        Args:
            rows (`Sequence[int]`): Indices of examples.
        """
        rows = torch.as_tensor(rows, dtype=torch.int64)
        counts = self.counts[rows]
        within = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        return self._starts[rows].repeat_interleave(counts) + within

    def agreed_of(self, rows: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Return the indices of the agreed positions of some examples."""
        numbers = self.numbers_of(rows)
        return numbers[self._agreed[numbers]]

    def agreed_among_seen(self, rows: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """
        Return a bool mask of the agreed positions among the positions of some examples at which the model can predict.
        """
        numbers = self.numbers_of(rows)
        return self._agreed[numbers[self.seen[numbers]]]

    def index_map(self, rows: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """
        Map each position to its index in the predictions of some examples.

        Returns:
            `torch.Tensor`: Tensor of shape `(positions,)`, int64. Positions without a prediction have the value −1.
        """
        indices = torch.full((len(self.seen),), -1)
        agreed = self.agreed_of(rows)
        indices[agreed] = torch.arange(len(agreed))
        return indices

    def rows_with_agreed(self, rows: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Return the examples that have at least one agreed position."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        row_of_position = torch.arange(len(rows)).repeat_interleave(self.counts[rows])
        has_agreed = torch.zeros(len(rows), dtype=torch.bool)
        has_agreed[row_of_position[self._agreed[self.numbers_of(rows)]]] = True
        return rows[has_agreed]

    def first_seen_row(self) -> int:
        """
        Return the index of the first example with a position at which the model can predict.

        Raises:
            ValueError: If there is no such example.
        """
        if not self.seen.any():
            raise ValueError(
                f"None of the {self.num_rows} public examples has a position to predict. Use texts with at least two "
                "tokens, or examples with words that the tokenizer keeps."
            )
        return int(torch.arange(self.num_rows).repeat_interleave(self.counts)[self.seen][0])

    def absent_of(self, rows: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Return the positions of some examples that are not agreed, as indices among their positions, int32."""
        return (~self._agreed[self.numbers_of(rows)]).nonzero().flatten().to(torch.int32)

    def agree(self, rows: Sequence[int] | torch.Tensor, absent: torch.Tensor | None = None) -> None:
        """
        Set the agreed positions of some examples for a new exchange.

        Args:
            rows (`Sequence[int]`): Indices of examples.
            absent (`torch.Tensor`, *optional*):
                Positions to leave out, as indices among the positions of these examples. By default the positions at
                which the model cannot predict are left out.

        Raises:
            ValueError: If the exchange includes a position at which the model cannot predict.
        """
        numbers = self.numbers_of(rows)
        wanted = self.seen[numbers] if absent is None else torch.ones(len(numbers), dtype=torch.bool)
        if absent is not None:
            wanted[absent.long()] = False
        unpredictable = wanted & ~self.seen[numbers]
        if unpredictable.any():
            raise ValueError(
                f"The message includes {int(unpredictable.sum())} words that this client's tokenizer drops. The first "
                f"is position {int(unpredictable.nonzero()[0])} of the requested positions. A client learns only "
                "words that it predicted. Check that the client's tokenizer did not change during the run."
            )
        self._agreed[numbers] = wanted

    def take_absent(
        self, rows: Sequence[int] | torch.Tensor, values: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """
        Split received tensors into values and the positions that they leave out.

        Args:
            rows (`Sequence[int]`): Indices of the examples that the message is about.
            values (`Mapping[str, torch.Tensor]`): Tensors of the message. They are validated here.

        Returns:
            `tuple`: The other tensors, and the left-out positions as indices among the positions of the examples,
                int64, ascending.

        Raises:
            ValueError: If the indices are out of range, not ascending or not unique.
        """
        tensors = dict(values)
        absent = tensors.pop(ABSENT, torch.empty(0, dtype=torch.int32))
        num_positions = int(self.counts[torch.as_tensor(rows, dtype=torch.int64)].sum())
        before, after = (torch.tensor([index], device=absent.device) for index in (-1, num_positions))
        is_valid = absent.dtype == torch.int32 and absent.ndim == 1
        if not is_valid or (absent.long().diff(prepend=before, append=after) <= 0).any():
            raise ValueError(
                f"{ABSENT!r} has dtype {absent.dtype}, shape {tuple(absent.shape)} and the first values "
                f"{absent.flatten()[:16].tolist()}. It must be a one-dimensional int32 tensor of unique ascending "
                f"indices below {num_positions}, the number of requested positions."
            )
        return tensors, absent.long()

    def add_absent(
        self, rows: Sequence[int] | torch.Tensor, values: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Add the left-out positions of some examples to the tensors of a message, if there are any."""
        absent = self.absent_of(rows)
        return {**values, ABSENT: absent} if len(absent) else dict(values)
