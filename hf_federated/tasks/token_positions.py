"""Positions of tokens in a text, for tokenizers without character offsets (slow tokenizers).

The end of a token is the length of the text of all tokens up to this token. A tokenizer can change the text, for
example by Unicode normalization. Positions are therefore compared with the length of the part of the text before or
after them, after the same change. For the same vocabulary, the result equals the result of the character offsets of a
fast tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


_CONTEXT = ":"  # precedes a part of a text, because tokenizers drop a space at the start of a text
_PARTIAL = "\ufffd"  # the text of a byte of an incomplete character


class TokenPositions:
    """
    Finds the tokens of a part of a text with the methods `tokenize` and `convert_tokens_to_string` of a tokenizer.

    Args:
        tokenizer (`PreTrainedTokenizer`): The tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._context = tokenizer.tokenize(_CONTEXT)
        # A token without a space before it. At the end of tokens, it keeps `convert_tokens_to_string` from dropping
        # the spaces before it.
        self._mark = tokenizer.tokenize(f"x{_CONTEXT}")[-1:]
        self._mark_length = self._text_length([*self._context, *self._mark]) - self._text_length(self._context)

    def after(self, tokens: Sequence[str], begin: str) -> int:
        """
        Count the tokens at the start that end within `begin`.

        Args:
            tokens (`Sequence[str]`): The tokens of a text that starts with `begin`.
            begin (`str`): The start of the text.
        """
        length = self._length(self.tokenizer.tokenize(begin))
        return next((count for count in range(len(tokens)) if self._length(tokens[: count + 1]) > length), len(tokens))

    def inside(self, tokens: Sequence[str], text: str, span: tuple[int, int]) -> range:
        """
        Return the indices of the tokens that are completely in a part of a text.

        Args:
            tokens (`Sequence[str]`): The tokens of the text.
            text (`str`): The text.
            span (`tuple[int, int]`): The position of the first character of the part, and the position after its last
                character.
        """
        before, after = text[: span[0]], text[span[1] :]
        # The tokenizer can drop spaces at the end of `before`, so another character follows them.
        length = self._text_length(self.tokenizer.tokenize(before + _CONTEXT)) - self._text_length(self._context)
        first = next((n for n in range(len(tokens)) if self._ends_at(tokens[:n], before, length)), len(tokens))
        length = self._text_length(self.tokenizer.tokenize(_CONTEXT + after))
        numbers = range(len(tokens), first - 1, -1)
        end = next((n for n in numbers if self._starts_at(tokens[n:], after, length)), first)
        return range(first, end)

    def _ends_at(self, tokens: Sequence[str], before: str, length: int) -> bool:
        """Whether tokens from the start of a text contain `before`, and end with a complete character."""
        is_complete = before.endswith(_PARTIAL) or not self._text(tokens).endswith(_PARTIAL)
        return is_complete and self._length(tokens) >= length

    def _starts_at(self, tokens: Sequence[str], after: str, length: int) -> bool:
        """Whether tokens up to the end of a text contain `after`, and start with a complete character."""
        text = self._text([*self._context, *tokens])
        is_complete = after.startswith(_PARTIAL) or not text.startswith(_PARTIAL, self._text_length(self._context))
        return is_complete and len(text) >= length

    def _length(self, tokens: Sequence[str]) -> int:
        """Length of the text of tokens from the start of a text, with the spaces at its end."""
        return self._text_length([*tokens, *self._mark]) - self._mark_length

    def _text_length(self, tokens: Sequence[str]) -> int:
        return len(self._text(tokens))

    def _text(self, tokens: Sequence[str]) -> str:
        return self.tokenizer.convert_tokens_to_string(list(tokens)) if tokens else ""
