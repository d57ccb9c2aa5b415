"""Shared code of the tasks for causal models: prompts with a truncatable part, and answers that follow the prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .columns import row_name
from .token_positions import TokenPositions


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
        with_attention_mask (`bool`, *optional*, defaults to `True`):
            Whether the batch has an attention mask. ChatGLM-6B computes its mask from the token IDs, and a mask of
            ones would mean that no token attends to another token. Padding on the right does not change its outputs.

    Raises:
        ValueError: If all labels of an example are −100. The model cannot learn from such an example, and a batch
            with only such examples has no loss. Also raised if prompts of different lengths are padded on the left
            without an attention mask.
    """

    pad_token_id: int
    continue_prompts: bool = False
    with_attention_mask: bool = True

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return the batch, with tensors of shape `(batch, longest example)` and dtype `int64`."""
        fill = {"input_ids": self.pad_token_id, "attention_mask": 0, "labels": IGNORED}
        if not self.with_attention_mask:
            del fill["attention_mask"]
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
        if on_left and not self.with_attention_mask and any(len(row["input_ids"]) < width for row in features):
            raise ValueError(
                "Prompts of different lengths cannot be padded, because the model computes its attention mask from the"
                " token IDs. Set per_device_eval_batch_size=1."
            )
        batch = {}
        for name in columns:
            padded = torch.full((len(features), width), fill[name], dtype=torch.long)
            for position, row in enumerate(features):
                values = torch.as_tensor(row[name], dtype=torch.long)
                begin = width - len(values) if on_left else 0
                padded[position, begin : begin + len(values)] = values
            batch[name] = padded
        return batch


def tokenize_texts(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """
    Tokenize texts without special tokens.

    Slow tokenizers are not called, because calls also pad, and the padding of some tokenizers (ChatGLM) creates other
    inputs from the tokens.

    Args:
        texts (`Sequence[str]`): The texts.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer.
    """
    if tokenizer.is_fast:
        encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids
    return [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)) for text in texts]


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """
    Return the special tokens that a tokenizer adds before and after a text that an answer follows.

    Slow tokenizers add them in `build_inputs_with_special_tokens`, fast tokenizers in their post-processor. Llama 2
    adds its start token before a text, and ChatGLM2 adds `[gMASK]` and `sop`. ChatGLM-6B adds `[gMASK]` and `<sop>`
    after a text. Tokens that end a text (`eos`, `sep` and `cls` at the end) are not included.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer.

    Raises:
        ValueError: If the tokenizer changes the tokens of a text when it adds special tokens.

    Example:

    ```python
    >>> from tokenizers import Tokenizer
    >>> from tokenizers.models import WordLevel
    >>> from tokenizers.processors import TemplateProcessing
    >>> from transformers import PreTrainedTokenizerFast
    >>> from hf_federated.tasks.causal import special_tokens

    >>> words = Tokenizer(WordLevel({"[CLS]": 0, "[SEP]": 1, ":": 2}, unk_token=":"))
    >>> words.post_processor = TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)])
    >>> special_tokens(PreTrainedTokenizerFast(tokenizer_object=words, cls_token="[CLS]", sep_token="[SEP]"))
    ([0], [])

    ```
    """
    ids = tokenize_texts([_CONTEXT], tokenizer)[0]
    if tokenizer.is_fast:
        built = tokenizer(_CONTEXT, return_attention_mask=False, verbose=False)["input_ids"]
    else:
        built = tokenizer.build_inputs_with_special_tokens(list(ids))
    ends = {tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.cls_token_id} - {None}
    starts = range(len(built) - len(ids) + 1)
    begin = next((number for number in starts if built[number : number + len(ids)] == ids), None)
    if begin is None:
        raise ValueError(
            f"{type(tokenizer).__name__} encodes {_CONTEXT!r} as {ids} without special tokens, and as {built} with"
            " special tokens. The tokens of the text must be equal. Use a tokenizer that only adds tokens."
        )
    before, after = built[:begin], built[begin + len(ids) :]
    while after and after[-1] in ends:
        after.pop()
    return before, after


def takes_attention_mask(model: Any) -> bool:
    """
    Whether a model takes an attention mask with one value per token, as models of `transformers` do.

    ChatGLM-6B, which has two-dimensional positions, takes a mask of another shape and meaning, or computes the mask.

    Args:
        model (`PreTrainedModel`, *optional*): The model.
    """
    return model is None or "position_encoding_2d" not in model.config.to_dict()


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
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer.
    """
    in_context = [f"{_CONTEXT} {text.strip()}" for text in texts]
    if not tokenizer.is_fast:
        positions = TokenPositions(tokenizer)
        answers = []
        for tokens in map(tokenizer.tokenize, in_context):
            answers.append(tokenizer.convert_tokens_to_ids(tokens[positions.after(tokens, _CONTEXT) :]))
        return answers
    tokens = tokenizer(
        in_context,
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    return [
        [token for token, (_, end) in zip(ids, offsets, strict=True) if end > len(_CONTEXT)]
        for ids, offsets in zip(tokens["input_ids"], tokens["offset_mapping"], strict=True)
    ]


def join_answers(prompts: Sequence[list[int]], answers: Sequence[list[int]] | None) -> dict[str, list[Any]]:
    """
    Return the columns for token IDs, attention mask and labels of prompts with their answers.

    Args:
        prompts (`Sequence[list[int]]`): Token IDs without labels.
        answers (`Sequence[list[int]]`, *optional*): Token IDs that the model learns to predict. Without answers, the
            result has no column `labels`.
    """
    if answers is None:
        return {"input_ids": list(prompts), "attention_mask": [[1] * len(prompt) for prompt in prompts]}
    pairs = list(zip(prompts, answers, strict=True))
    return {
        "input_ids": [prompt + answer for prompt, answer in pairs],
        "attention_mask": [[1] * (len(prompt) + len(answer)) for prompt, answer in pairs],
        "labels": [[IGNORED] * len(prompt) + answer for prompt, answer in pairs],
    }


def tokenize_prompts(
    prompts: Sequence[str],
    truncatable_spans: Sequence[tuple[int, int]],
    max_lengths: Sequence[float],
    tokenizer: Any,
    indices: Sequence[int] | None,
) -> list[list[int]]:
    """
    Tokenize prompts with the special tokens before and after them, and truncate prompts that are too long.

    Truncation removes the last tokens of the truncatable span. The text before and after the span stays complete.

    Args:
        prompts (`Sequence[str]`): The prompts.
        truncatable_spans (`Sequence[tuple[int, int]]`): The part of each prompt that can be truncated, as the position
            of its first character and the position after its last character.
        max_lengths (`Sequence[float]`): The maximum number of tokens for each prompt, including special tokens.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer.
        indices (`Sequence[int]`, *optional*): Row numbers for error messages.

    Raises:
        ValueError: If a prompt is too long even without the truncatable span. The message contains the row number.
    """
    before, after = special_tokens(tokenizer)
    tokens_inside: Callable[[int], Sequence[int]]
    if tokenizer.is_fast:
        tokens = tokenizer(list(prompts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids: list[list[int]] = tokens["input_ids"]

        def tokens_inside(row: int) -> Sequence[int]:
            (begin, end), characters = truncatable_spans[row], tokens.encodings[row].offsets
            return [token for token, (first, last) in enumerate(characters) if begin <= first and last <= end]

    else:
        pieces = [tokenizer.tokenize(prompt) for prompt in prompts]
        ids = [tokenizer.convert_tokens_to_ids(row) for row in pieces]
        positions = TokenPositions(tokenizer)

        def tokens_inside(row: int) -> Sequence[int]:
            return positions.inside(pieces[row], prompts[row], truncatable_spans[row])

    for row, row_ids in enumerate(ids):
        max_length = max_lengths[row] - len(before) - len(after)
        surplus = int(len(row_ids) - max_length)
        if surplus > 0:
            inside = tokens_inside(row)
            if surplus > len(inside):
                raise ValueError(
                    f"{row_name(row, indices)} has {len(row_ids) - len(inside)} tokens that cannot be truncated, but"
                    f" only {max(0, int(max_length))} tokens fit in addition to the answer. Increase the task's"
                    " maximum length, or drop the row."
                )
            dropped = set(inside[len(inside) - surplus :])
            row_ids = [token for number, token in enumerate(row_ids) if number not in dropped]
        ids[row] = [*before, *row_ids, *after]
    return ids
