"""The rows of an audit: those of a colluding client and those of victims, none of them the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TokenRows:
    """
    Texts as tokens, padded on the right.

    Args:
        input_ids (`torch.Tensor`): Shape `(rows, length)`, of `int64`.
        attention_mask (`torch.Tensor`): Shape `(rows, length)`, 1 for tokens.
        scored (`torch.Tensor`): Shape `(rows, length)`, `True` where there is a token of the text. What a tokenizer
            puts around a text, everybody knows.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.audits.rows import TokenRows

    >>> ids = torch.tensor([[5, 6, 0]])
    >>> TokenRows(ids, (ids > 0).long(), ids > 0).num_tokens
    2
    ```
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    scored: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens of the texts."""
        return int(self.scored.sum())

    def __len__(self) -> int:
        return len(self.input_ids)

    def first(self, num_rows: int) -> TokenRows:
        """The first rows alone."""
        return TokenRows(self.input_ids[:num_rows], self.attention_mask[:num_rows], self.scored[:num_rows])


def encode_rows(texts: Sequence[str], tokenizer: Any, max_length: int) -> TokenRows:
    """
    Texts as a model gets them.

    Args:
        texts (`Sequence[str]`): The texts.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        max_length (`int`): Tokens of a row; the others are cut off.

    Raises:
        ValueError: If no text has a token.
    """
    encoded = tokenizer(list(texts), truncation=True, max_length=max_length, return_special_tokens_mask=True)
    rows = list(zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True))
    length = max((len(ids) for ids, _ in rows), default=0)
    input_ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask, scored = torch.zeros_like(input_ids), torch.zeros(len(rows), length, dtype=torch.bool)
    for row, (ids, special) in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids, dtype=torch.long)
        mask[row, : len(ids)] = 1
        scored[row, : len(ids)] = torch.tensor(special, dtype=torch.long) == 0
    if not scored.any():
        raise ValueError(f"None of the {len(rows)} texts has a token: give texts that are not empty.")
    return TokenRows(input_ids, mask, scored)


def drop_shared(
    attacker: Sequence[str], victims: Sequence[str], tokenizer: Any, max_length: int, most: int | None = None
) -> tuple[list[str], int]:
    """
    The victims' texts that the attacker has not, each once.

    A text is the attacker's if it is the same but for case and spaces, or if its first tokens, which are all that a
    model gets of it, are the same.

    Args:
        attacker (`Sequence[str]`): Texts of the colluding client.
        victims (`Sequence[str]`): Texts of the victims.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        max_length (`int`): Tokens of a row.
        most (`int`, *optional*): How many are wanted; texts behind them are not looked at.

    Returns:
        `tuple[list[str], int]`: Texts in the order they had, and how many before the last of them were dropped.
    """

    def marks(text: str) -> set[Any]:
        ids = tokenizer(text, truncation=True, max_length=max_length)["input_ids"]
        return {" ".join(text.casefold().split()), tuple(ids)}

    known = {mark for text in attacker for mark in marks(text)}
    kept: list[str] = []
    num_dropped = 0
    for text in victims:
        if most is not None and len(kept) == most:
            break
        theirs = marks(text)
        if known.isdisjoint(theirs):
            kept.append(text)
        else:
            num_dropped += 1
        known |= theirs
    return kept, num_dropped
