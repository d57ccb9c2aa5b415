"""What tasks of causal models share: a prompt, of which a passage may be cut, and an answer that goes on from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .base import row_name


IGNORED = -100  # what a loss skips

_BEFORE = ":"  # what answers are tokenized behind: some tokenizers begin a text as they would not go on with it


@dataclass
class CausalCollator:
    """
    Pads rows of ids, attention mask and, with −100, labels, and leaves other columns out.

    Rows are padded on the right, whatever the tokenizer's `padding_side`: models that count positions from the first
    token are then not disturbed.

    Args:
        pad_token_id (`int`): What ids are padded with. The attention mask is 0 there, so any token will do.
        continue_prompts (`bool`, *optional*, defaults to `False`):
            Pad batches on the left of which no row has more than one label: prompts that `generate` goes on from.

    Raises:
        ValueError: If all labels of a row are −100: it has nothing to learn from, and alone in a batch no loss.
    """

    pad_token_id: int
    continue_prompts: bool = False

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """The batch, of tensors of shape `(rows, longest row)`."""
        fill = {"input_ids": self.pad_token_id, "attention_mask": 0, "labels": IGNORED}
        columns = [name for name in fill if name in features[0]]
        num_labels = [0] * len(features)
        if "labels" in columns:
            num_labels = [sum(label != IGNORED for label in row["labels"]) for row in features]
            if 0 in num_labels:
                raise ValueError(
                    "A row of this batch has no answer to learn from. Leave such rows out of the training data, as"
                    " `superglue_cloze_rows(..., answered_only=True)` does; to evaluate them, encode rows with the"
                    " task's `prepare` and then `for_evaluation`."
                )
        on_left = self.continue_prompts and max(num_labels) <= 1
        width = max(len(row["input_ids"]) for row in features)
        batch = {}
        for name in columns:
            padded = torch.full((len(features), width), fill[name], dtype=torch.long)
            for place, row in enumerate(features):
                values = torch.as_tensor(row[name], dtype=torch.long)
                begin = width - len(values) if on_left else 0
                padded[place, begin : begin + len(values)] = values
            batch[name] = padded
        return batch


def check_is_fast(tokenizer: Any) -> None:
    """
    Checks that a tokenizer says which characters a token stands for.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer.

    Raises:
        ValueError: If it does not.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} gives no character offsets. Use a fast tokenizer.")


def start_tokens(tokenizer: Any) -> list[int]:
    """
    What a tokenizer puts before every text: its start token, or nothing. What it puts behind a text is left out,
    where an answer follows.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer.
    """
    special = tokenizer("", return_attention_mask=False)["input_ids"]
    starts = {tokenizer.bos_token_id, tokenizer.cls_token_id} - {None}
    return special[:1] if special[:1] and special[0] in starts else []


def end_token(tokenizer: Any) -> int:
    """
    The token that ends an answer: the end token, or for a tokenizer in BERT's manner `sep`.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer.

    Raises:
        ValueError: If it has neither.
    """
    token = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if token is None:
        raise ValueError(f"{type(tokenizer).__name__} has no token that ends an answer. Set its eos_token.")
    return token


def padding_token(tokenizer: Any) -> int:
    """
    The token that rows are padded with: the pad token, or the end token of a tokenizer without one.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer.
    """
    tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in tokens if token is not None)


def tokenize_answers(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """
    The tokens of texts, each as it follows a space.

    Args:
        texts (`Sequence[str]`): The answers.
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer.
    """
    tokens = tokenizer(
        [f"{_BEFORE} {text.strip()}" for text in texts],
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    return [
        [token for token, (_, end) in zip(ids, offsets, strict=True) if end > len(_BEFORE)]
        for ids, offsets in zip(tokens["input_ids"], tokens["offset_mapping"], strict=True)
    ]


def tokenize_prompts(
    prompts: Sequence[str],
    passages: Sequence[tuple[int, int]],
    rooms: Sequence[float],
    tokenizer: Any,
    indices: Sequence[int] | None,
) -> list[list[int]]:
    """
    The tokens of prompts, without special ones, where too many are there without those at the end of the passage.

    Args:
        prompts (`Sequence[str]`): The texts.
        passages (`Sequence[tuple[int, int]]`): The characters of each that may be cut: first, and behind the last.
        rooms (`Sequence[float]`): How many tokens there may be of each.
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer.
        indices (`Sequence[int]`, *optional*): The rows' numbers.

    Raises:
        ValueError: If a prompt is too long even without its passage. The message names the row.
    """
    tokens = tokenizer(list(prompts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    ids: list[list[int]] = tokens["input_ids"]
    for place, row in enumerate(ids):
        surplus = int(len(row) - rooms[place])
        if surplus <= 0:
            continue
        begin, end = passages[place]
        characters = tokens.encodings[place].offsets
        inside = [token for token, (first, last) in enumerate(characters) if begin <= first and last <= end]
        if surplus > len(inside):
            raise ValueError(
                f"{row_name(place, indices)} has {len(row) - len(inside)} tokens beside the passage, and room"
                f" for {max(0, int(rooms[place]))} with its answer. Raise the number of tokens that are kept of a"
                " row, or leave the row out."
            )
        dropped = set(inside[len(inside) - surplus :])
        ids[place] = [token for number, token in enumerate(row) if number not in dropped]
    return ids
