"""A fast tokenizer with a small vocabulary, used by the tests of all tasks."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["a", "dull", "bright", "film", "plot", "warm", "cold", "in", "par", "##is", "rom", "##e", "ann", "##a", "##s"]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """WordPiece with BERT's templates: `[CLS] text [SEP]` and `[CLS] text [SEP] text [SEP]`."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    pieces = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    pieces.pre_tokenizer = Whitespace()
    pieces.decoder = decoders.WordPiece()
    pieces.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=pieces,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
