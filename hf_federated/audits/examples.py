"""Tokenized examples of an audit: those of a colluding client and those of the victims, without overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..tasks.causal import special_tokens, tokenize_texts


@dataclass(frozen=True)
class TokenizedExamples:
    """
    Tokenized texts, padded on the right.

    Args:
        input_ids (`torch.Tensor`):
            Token ids of shape `(num_examples, length)`, `int64`.
        attention_mask (`torch.Tensor`):
            Mask of shape `(num_examples, length)`, 1 for tokens and 0 for padding.
        scored (`torch.Tensor`):
            Boolean mask of shape `(num_examples, length)`, `True` for tokens of the text. Special tokens are not
            scored, because all parties know them.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.audits.examples import TokenizedExamples

    >>> ids = torch.tensor([[5, 6, 0]])
    >>> TokenizedExamples(ids, (ids > 0).long(), ids > 0).num_tokens
    2
    ```
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    scored: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Number of scored tokens."""
        return int(self.scored.sum())

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, rows: slice) -> TokenizedExamples:
        return TokenizedExamples(self.input_ids[rows], self.attention_mask[rows], self.scored[rows])

    def first(self, num_examples: int) -> TokenizedExamples:
        """Return the first examples only."""
        return self[:num_examples]


def encode_examples(texts: Sequence[str], tokenizer: Any, max_length: int) -> TokenizedExamples:
    """
    Tokenize texts for a model.

    Args:
        texts (`Sequence[str]`):
            The texts.
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer of the model.
        max_length (`int`):
            Maximum number of tokens of an example. Longer texts are truncated.

    Returns:
        [`TokenizedExamples`]: The tokenized texts.

    Raises:
        ValueError: If no text has a token.
    """
    examples = _tokenize(texts, tokenizer, max_length)
    if all(all(special) for _, special in examples):
        raise ValueError(
            f"All {len(examples)} texts are empty after tokenization. Pass texts with at least one token."
        )
    columns = ([ids, [1] * len(ids), special] for ids, special in examples)
    input_ids, mask, special_mask = (
        pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True)
        for rows in zip(*columns, strict=True)
    )
    return TokenizedExamples(input_ids, mask, mask.bool() & (special_mask == 0))


def _tokenize(texts: Sequence[str], tokenizer: Any, max_length: int) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of each text, and a mask that is 1 for special tokens."""
    if tokenizer.is_fast:
        encoded = tokenizer(list(texts), truncation=True, max_length=max_length, return_special_tokens_mask=True)
        return list(zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True))
    before, after = special_tokens(tokenizer)
    num_kept = max(0, max_length - len(before) - len(after))
    rows = [ids[:num_kept] for ids in tokenize_texts(texts, tokenizer)]
    return [([*before, *ids, *after], [1] * len(before) + [0] * len(ids) + [1] * len(after)) for ids in rows]


def remove_shared_texts(
    attacker: Sequence[str], victims: Sequence[str], tokenizer: Any, max_length: int, max_texts: int | None = None
) -> tuple[list[str], int]:
    """
    Remove victims' texts that the attacker also has, and duplicates among the victims' texts.

    Two texts are considered equal if they differ only in case and whitespace, or if their first `max_length` tokens
    are equal. The model receives only these tokens.

    Args:
        attacker (`Sequence[str]`):
            Texts of the colluding client.
        victims (`Sequence[str]`):
            Texts of the victims.
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer of the model.
        max_length (`int`):
            Maximum number of tokens of an example.
        max_texts (`int`, *optional*):
            Maximum number of returned texts. Further texts are not considered.

    Returns:
        `tuple[list[str], int]`: The remaining texts in their original order, and the number of removed texts among the
        considered texts.
    """

    def keys(text: str) -> set[Any]:
        ((ids, _),) = _tokenize([text], tokenizer, max_length)
        return {" ".join(text.casefold().split()), tuple(ids)}

    known = {key for text in attacker for key in keys(text)}
    kept: list[str] = []
    num_removed = 0
    for text in victims:
        if max_texts is not None and len(kept) == max_texts:
            break
        text_keys = keys(text)
        if known.isdisjoint(text_keys):
            kept.append(text)
        else:
            num_removed += 1
        known |= text_keys
    return kept, num_removed
