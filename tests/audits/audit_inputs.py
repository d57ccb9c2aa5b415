"""Tiny decoder models, a word tokenizer, and random texts of a colluding client and of victims."""

from __future__ import annotations

import random
from typing import Any

from decoders import from_config, gpt2_sizes, sizes
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from hf_federated.audits import TokenizedExamples, encode_examples


SPECIAL = ["<end>", "<start>", "<unk>"]
WORDS = [f"word{number}" for number in range(60)]
NUM_BLOCKS = 4
LENGTH = 12
_SIZES = sizes(len(SPECIAL) + len(WORDS), NUM_BLOCKS, eos_token_id=0)
_LLAMA: dict[str, Any] = {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "initializer_range": 0.2}
MODELS: dict[str, Any] = {
    "gpt2": lambda: GPT2Config(**gpt2_sizes(_SIZES), initializer_range=0.2),
    "llama": lambda: LlamaConfig(**_LLAMA),
    "llama-tied": lambda: LlamaConfig(**_LLAMA, tie_word_embeddings=True),
    "mistral-window": lambda: MistralConfig(**_LLAMA, head_dim=8, sliding_window=4),
    "opt-projected": lambda: OPTConfig(**_SIZES, ffn_dim=48, word_embed_proj_dim=16, init_std=0.2),
}


def tiny(name: str = "llama", seed: int = 0) -> PreTrainedModel:
    """Create a model of one of `MODELS` in evaluation mode, without changing the global random generator."""
    return from_config(MODELS[name](), seed)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Create a tokenizer with one token per word and a start token before each text."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="<start> $A", special_tokens=[("<start>", 1)])
    names = {"bos_token": "<start>", "eos_token": "<end>", "unk_token": "<unk>", "pad_token": "<end>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def texts(num_texts: int, seed: int) -> list[str]:
    """Draw texts of four to eleven random words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randrange(4, LENGTH))) for _ in range(num_texts)]


def examples(num_examples: int, seed: int) -> TokenizedExamples:
    """Draw tokenized texts of four to eleven random words."""
    return encode_examples(texts(num_examples, seed), word_tokenizer(), LENGTH)
