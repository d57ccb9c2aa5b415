"""Slow tokenizers with the vocabulary, special tokens and construction of ChatGLM's, for both generations.

The file is code of a model repository, which is loaded with `trust_remote_code`, so it imports only public packages.
"""

from __future__ import annotations

from typing import Any

from sentencepiece import SentencePieceProcessor
from transformers import PreTrainedTokenizer


class Vocabulary:
    """A SentencePiece vocabulary with further tokens, and with pieces for characters that it would change."""

    def __init__(self, path: str, marks: tuple[tuple[str, str], ...] = (), further: tuple[str, ...] = ()) -> None:
        self.pieces = SentencePieceProcessor(model_file=path)
        self.marks = marks
        self.further = further

    def __len__(self) -> int:
        return self.pieces.vocab_size() + len(self.further)

    def split(self, text: str) -> list[str]:
        for characters, piece in self.marks:
            text = text.replace(characters, piece)
        return self.pieces.encode(text, out_type=str)

    def join(self, pieces: list[str]) -> str:
        text = self.pieces.decode(pieces)
        for characters, piece in self.marks:
            text = text.replace(piece, characters)
        return text

    def number(self, piece: str) -> int:
        if piece in self.further:
            return self.pieces.vocab_size() + self.further.index(piece)
        return self.pieces.piece_to_id(piece)

    def piece(self, number: int) -> str:
        first = self.pieces.vocab_size()
        return self.further[number - first] if number >= first else self.pieces.id_to_piece(number)


class Tokenizer(PreTrainedTokenizer):
    """Base class of the tokenizers of both generations."""

    vocab_files_names = {"vocab_file": "ice_text.model"}
    model_input_names = ["input_ids", "attention_mask", "position_ids"]
    vocabulary: Vocabulary

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    def get_vocab(self) -> dict[str, int]:
        return {self.vocabulary.piece(number): number for number in range(self.vocab_size)}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return self.vocabulary.split(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.vocabulary.number(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self.vocabulary.piece(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self.vocabulary.join(tokens)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        path = f"{save_directory}/{self.vocab_files_names['vocab_file']}"
        with open(path, "wb") as file:
            file.write(self.vocabulary.pieces.serialized_model_proto())
        return (path,)


class ChatGlmTokenizer(Tokenizer):
    """
    First generation: the special tokens follow the context.

    As in ChatGLM-6B, the vocabulary is loaded after the constructor of the base class, and padding creates another
    mask and has no argument `padding_side`.
    """

    def __init__(
        self,
        vocab_file: str,
        bos_token: str = "<sop>",
        eos_token: str = "<eop>",
        gmask_token: str = "[gMASK]",
        pad_token: str = "<pad>",
        unk_token: str = "<unk>",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            bos_token=bos_token,
            eos_token=eos_token,
            gmask_token=gmask_token,
            pad_token=pad_token,
            unk_token=unk_token,
            **kwargs,
        )
        self.gmask_token = gmask_token
        self.vocabulary = Vocabulary(vocab_file, marks=(("\n", "<n>"), ("  ", "<|blank_2|>")))

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        ids = [*token_ids_0, self.vocabulary.number(self.gmask_token), self.vocabulary.number(self.bos_token)]
        return ids if token_ids_1 is None else [*ids, *token_ids_1, self.vocabulary.number(self.eos_token)]

    def _pad(
        self,
        encoded_inputs: Any,
        max_length: int | None = None,
        padding_strategy: Any = None,
        pad_to_multiple_of: int | None = None,
        return_attention_mask: bool | None = None,
    ) -> Any:
        raise AssertionError("the tasks must not use the masks and positions of this tokenizer")


class ChatGlm2Tokenizer(Tokenizer):
    """Second and third generation: the special tokens precede the text, and some tokens are properties."""

    def __init__(self, vocab_file: str, padding_side: str = "left", **kwargs: Any) -> None:
        self.vocabulary = Vocabulary(vocab_file, further=("[MASK]", "[gMASK]", "sop", "eop"))
        super().__init__(padding_side=padding_side, **kwargs)

    @property
    def unk_token(self) -> str:
        return "<unk>"

    @property
    def pad_token(self) -> str:
        return "<unk>"

    @property
    def pad_token_id(self) -> int:
        return 0

    @property
    def eos_token(self) -> str:
        return "</s>"

    @property
    def eos_token_id(self) -> int:
        return 2

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        ids = [self.vocabulary.number("[gMASK]"), self.vocabulary.number("sop"), *token_ids_0]
        return ids if token_ids_1 is None else [*ids, *token_ids_1, self.eos_token_id]
