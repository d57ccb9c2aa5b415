"""Shared code of the tasks for causal models: prompts with a truncatable part, and answers that follow the prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .base import row_name


IGNORED = -100  # label value that losses skip

_CONTEXT = ":"  # precedes each answer in the tokenizer input: some tokenizers encode the start of a text differently


@dataclass
class CausalCollator:
    """
    Pad token IDs, attention masks and labels, and drop all other columns.

    Labels are padded with −100. Padding is on the right, independent of the tokenizer's `padding_side`. Models that
    count positions from the first token are therefore not affected by the padding.

    Args:
        pad_token_id (`int`): The padding for token IDs. Any token works, because the attention mask is 0 there.
        continue_prompts (`bool`, *optional*, defaults to `False`):
            Whether to pad on the left if no example in the batch has more than one label. Such examples are prompts
            that `generate` continues.

    Raises:
        ValueError: If all labels of an example are −100. The model cannot learn from such an example, and a batch
            with only such examples has no loss.
    """

    pad_token_id: int
    continue_prompts: bool = False

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return the batch, with tensors of shape `(batch, longest example)` and dtype `int64`."""
        fill = {"input_ids": self.pad_token_id, "attention_mask": 0, "labels": IGNORED}
        columns = [name for name in fill if name in features[0]]
        num_labels = [0] * len(features)
        if "labels" in columns:
            num_labels = [sum(label != IGNORED for label in row["labels"]) for row in features]
            if 0 in num_labels:
                raise ValueError(
                    "An example of this batch has no answer, so all its labels are -100. Remove such examples from the"
                    " training data, for example with `superglue_cloze_rows(..., answered_only=True)`. For evaluation,"
                    " encode with the task's `prepare` and then `for_evaluation`."
                )
        on_left = self.continue_prompts and max(num_labels) <= 1
        width = max(len(row["input_ids"]) for row in features)
        batch = {}
        for name in columns:
            padded = torch.full((len(features), width), fill[name], dtype=torch.long)
            for position, row in enumerate(features):
                values = torch.as_tensor(row[name], dtype=torch.long)
                begin = width - len(values) if on_left else 0
                padded[position, begin : begin + len(values)] = values
            batch[name] = padded
        return batch


def check_fast_tokenizer(tokenizer: Any) -> None:
    """
    Check that a tokenizer returns the character offsets of tokens.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer.

    Raises:
        ValueError: If the tokenizer is not a fast tokenizer.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} gives no character offsets. Use a fast tokenizer.")


def start_tokens(tokenizer: Any) -> list[int]:
    """
    Return the tokens that a tokenizer adds before every text: the start token, or no token.

    Tokens that the tokenizer adds after a text are not included, because an answer follows the prompt.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer.
    """
    special = tokenizer("", return_attention_mask=False)["input_ids"]
    starts = {tokenizer.bos_token_id, tokenizer.cls_token_id} - {None}
    return special[:1] if special[:1] and special[0] in starts else []


def end_token(tokenizer: Any) -> int:
    """
    Return the ID of the token that ends an answer: `eos`, or `sep` for BERT-style tokenizers.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer.

    Raises:
        ValueError: If the tokenizer has neither token.
    """
    token = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if token is None:
        raise ValueError(f"{type(tokenizer).__name__} has no token to end an answer. Set its eos_token.")
    return token


def padding_token(tokenizer: Any) -> int:
    """
    Return the ID of the padding token: `pad`, or `eos` for tokenizers without a `pad` token.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer.
    """
    tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in tokens if token is not None)


def tokenize_answers(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """
    Tokenize answers as text that follows a space.

    Args:
        texts (`Sequence[str]`): The answers.
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer.
    """
    tokens = tokenizer(
        [f"{_CONTEXT} {text.strip()}" for text in texts],
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    return [
        [token for token, (_, end) in zip(ids, offsets, strict=True) if end > len(_CONTEXT)]
        for ids, offsets in zip(tokens["input_ids"], tokens["offset_mapping"], strict=True)
    ]


def tokenize_prompts(
    prompts: Sequence[str],
    truncatable_spans: Sequence[tuple[int, int]],
    max_lengths: Sequence[float],
    tokenizer: Any,
    indices: Sequence[int] | None,
) -> list[list[int]]:
    """
    Tokenize prompts without special tokens, and truncate prompts that are too long.

    Truncation removes the last tokens of the truncatable span. The text before and after the span stays complete.

    Args:
        prompts (`Sequence[str]`): The prompts.
        truncatable_spans (`Sequence[tuple[int, int]]`): The part of each prompt that can be truncated, as the position
            of its first character and the position after its last character.
        max_lengths (`Sequence[float]`): The maximum number of tokens for each prompt.
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer.
        indices (`Sequence[int]`, *optional*): Row numbers for error messages.

    Raises:
        ValueError: If a prompt is too long even without the truncatable span. The message contains the row number.
    """
    tokens = tokenizer(list(prompts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    ids: list[list[int]] = tokens["input_ids"]
    for position, row in enumerate(ids):
        surplus = int(len(row) - max_lengths[position])
        if surplus <= 0:
            continue
        begin, end = truncatable_spans[position]
        characters = tokens.encodings[position].offsets
        inside = [token for token, (first, last) in enumerate(characters) if begin <= first and last <= end]
        if surplus > len(inside):
            raise ValueError(
                f"{row_name(position, indices)} has {len(row) - len(inside)} tokens that cannot be truncated, but only"
                f" {max(0, int(max_lengths[position]))} tokens fit in addition to the answer. Increase the task's"
                " maximum length, or drop the row."
            )
        dropped = set(inside[len(inside) - surplus :])
        ids[position] = [token for number, token in enumerate(row) if number not in dropped]
    return ids
