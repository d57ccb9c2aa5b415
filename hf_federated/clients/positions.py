"""Where in public rows models predict, if that is not once a row: at each word, or at each token of a target.

A row has as many positions for everybody: its words, whatever a tokenizer makes of them, or its tokens, where all
share one vocabulary. Predictions are tensors of shape `(positions, classes)`, the rows in their order and the
positions of a row in theirs. Padding, special tokens and the further sub-tokens of a word are no positions.

**Words of which a tokenizer keeps nothing**, because a row is too long for it or because they are no text to it. A
client cannot predict those. It says which they are (`absent`), and the server narrows the exchange down to the words
that the cohort and its own model all have a place for: what is learned at a word is then what the method says, of all
clients of the cohort, and at the others nothing is learned by anybody. (To let the remaining clients speak for a word
would change their weights from word to word.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from datasets import Dataset

from ..tasks.base import NUM_POSITIONS


# What is named beside predictions and targets: numbers of positions, of those asked for, that they leave out.
ABSENT = "absent"


class Positions:
    """
    The positions of public rows, for one model.

    Args:
        counts (`torch.Tensor` of shape `(rows,)`):
            Positions of each row, int64, the same for everybody.
        seen (`torch.Tensor` of shape `(positions,)`, *optional*):
            For which of them the model has a place, bool; all by default.
        feeds_labels (`bool`, *optional*, defaults to `False`):
            Whether the model is given the labels of public rows, which are then its decoder's inputs.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.clients.positions import Positions

    >>> positions = Positions(torch.tensor([2, 1, 3]), torch.tensor([True, True, True, True, False, True]))
    >>> positions.numbers_of([2, 0])
    tensor([3, 4, 5, 0, 1])
    >>> positions.agreed_of([2, 0])  # its tokenizer keeps nothing of the second word of the last row
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
        # Those that the exchange which runs is about: at most those seen.
        self._agreed = self.seen.clone()

    @classmethod
    def of(cls, rows: Dataset, feeds_labels: bool) -> Positions:
        """
        Those of encoded public rows.

        Args:
            rows (`datasets.Dataset`): From [`Task.prepare_public`].
            feeds_labels (`bool`): As above. Otherwise `labels` are the numbers of positions in their row.
        """
        counts = torch.tensor(rows[NUM_POSITIONS][:], dtype=torch.int64)
        positions = cls(counts, feeds_labels=feeds_labels)
        if not feeds_labels:
            seen = torch.zeros_like(positions.seen)
            for start, marks in zip(positions._starts.tolist(), rows["labels"], strict=True):
                found = np.asarray(marks, dtype=np.int64)
                seen[start + found[found >= 0]] = True
            positions = cls(counts, seen)
        return positions

    def copy(self) -> Positions:
        """The same positions, of which another model's exchanges may be about others."""
        return Positions(self.counts, self.seen, self.feeds_labels)

    @property
    def num_rows(self) -> int:
        """Public rows."""
        return len(self.counts)

    def numbers_of(self, rows: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """
        Of some rows, the numbers of their positions among all, int64.

        Args:
            rows (`Sequence[int]`): Row numbers.
        """
        rows = torch.as_tensor(rows, dtype=torch.int64)
        counts = self.counts[rows]
        within = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        return self._starts[rows].repeat_interleave(counts) + within

    def agreed_of(self, rows: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """The numbers of those positions of some rows that the exchange is about."""
        numbers = self.numbers_of(rows)
        return numbers[self._agreed[numbers]]

    def agreed_among_seen(self, rows: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Which of the positions of some rows that the model has a place for the exchange is about, bool."""
        numbers = self.numbers_of(rows)
        return self._agreed[numbers[self.seen[numbers]]]

    def places_among(self, rows: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """
        Where predictions of some rows have each position.

        Returns:
            `torch.Tensor`: Of shape `(positions,)`, int64, −1 for those that are not among them.
        """
        places = torch.full((len(self.seen),), -1)
        agreed = self.agreed_of(rows)
        places[agreed] = torch.arange(len(agreed))
        return places

    def with_any(self, rows: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Those of some rows with a position that the exchange is about."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        place = torch.arange(len(rows)).repeat_interleave(self.counts[rows])
        found = torch.zeros(len(rows), dtype=torch.bool)
        found[place[self._agreed[self.numbers_of(rows)]]] = True
        return rows[found]

    def first_row(self) -> int:
        """
        The first row for which the model has a place.

        Raises:
            ValueError: If there is none.
        """
        if not self.seen.any():
            raise ValueError(
                f"None of the {self.num_rows} public rows has anything to predict. Take texts of two tokens or more, "
                "or rows with words that the tokenizer keeps."
            )
        return int(torch.arange(self.num_rows).repeat_interleave(self.counts)[self.seen][0])

    def absent_of(self, rows: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """The places, among all positions of some rows, of those that the exchange is not about, int32."""
        return (~self._agreed[self.numbers_of(rows)]).nonzero().flatten().to(torch.int32)

    def agree(self, rows: Sequence[int] | torch.Tensor, absent: torch.Tensor | None = None) -> None:
        """
        Begin an exchange about some rows.

        Args:
            rows (`Sequence[int]`): Row numbers.
            absent (`torch.Tensor`, *optional*):
                Places among all their positions that it is not about; by default those that are not seen.

        Raises:
            ValueError: If it is about a position for which the model has no place.
        """
        numbers = self.numbers_of(rows)
        wanted = self.seen[numbers] if absent is None else torch.ones(len(numbers), dtype=torch.bool)
        if absent is not None:
            wanted[absent.long()] = False
        blind = wanted & ~self.seen[numbers]
        if blind.any():
            raise ValueError(
                f"The message is about {int(blind.sum())} words of which this client's tokenizer keeps nothing, the "
                f"first is position {int(blind.nonzero()[0])} of those asked for. A client that never predicted a "
                "word cannot learn it: was its tokenizer changed during the run?"
            )
        self._agreed[numbers] = wanted

    def take_absent(
        self, rows: Sequence[int] | torch.Tensor, values: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """
        What came about some rows, apart from the positions that it leaves out.

        Args:
            rows (`Sequence[int]`): Row numbers.
            values (`Mapping[str, torch.Tensor]`): What came. It is not trusted.

        Returns:
            `tuple`: The other tensors, and the places that are left out, int64, in order.

        Raises:
            ValueError: If these are no places among the positions of the rows, in order and each once.
        """
        others = dict(values)
        absent = others.pop(ABSENT, torch.empty(0, dtype=torch.int32))
        num_positions = int(self.counts[torch.as_tensor(rows, dtype=torch.int64)].sum())
        is_valid = absent.dtype == torch.int32 and absent.ndim == 1
        if is_valid and len(absent):
            is_valid = (
                0 <= int(absent[0]) and int(absent[-1]) < num_positions and bool((absent.long().diff() > 0).all())
            )
        if not is_valid:
            raise ValueError(
                f"{ABSENT!r} is {absent.dtype} of shape {tuple(absent.shape)}: {absent.flatten()[:16].tolist()}; "
                f"expected int32 places below {num_positions}, the positions asked for, in order and each once."
            )
        return others, absent.long()

    def add_absent(
        self, rows: Sequence[int] | torch.Tensor, values: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What goes out about some rows, with the positions that it leaves out if there are any."""
        absent = self.absent_of(rows)
        return {**values, ABSENT: absent} if len(absent) else dict(values)
