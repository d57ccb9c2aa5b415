"""A tiny causal language model with its tokenizer and texts, for trainers that work on text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


# The clients have disjoint vocabularies.
WORDS = {"north": [f"snow{i}" for i in range(12)], "south": [f"sand{i}" for i in range(12)]}
SPECIAL = ["<pad>", "<eos>", "<unk>"]


def tokenizer(words: Sequence[str] = (*SPECIAL, *WORDS["north"], *WORDS["south"])) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word."""
    model = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def masking_tokenizer() -> PreTrainedTokenizerFast:
    """The same tokenizer with an additional mask token."""
    with_mask = tokenizer()
    with_mask.add_special_tokens({"mask_token": "<mask>"})
    return with_mask


def language_model(hidden_size: int = 16, vocab_size: int = len(SPECIAL) + 24) -> LlamaForCausalLM:
    """A Llama model with two layers. Each call returns the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab_size,
                hidden_size=hidden_size,
                intermediate_size=hidden_size,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=64,
                pad_token_id=0,
                eos_token_id=1,
            )
        )


def sentences(client_id: str, num_rows: int) -> list[str]:
    """Consecutive words of a client, 3 to 6 words per sentence."""
    words = WORDS[client_id]
    return [" ".join(words[(i + j) % len(words)] for j in range(3 + i % 4)) for i in range(num_rows)]


def texts(client_id: str, num_rows: int) -> Dataset:
    """A dataset for language modeling."""
    return Dataset.from_dict({"text": sentences(client_id, num_rows)})


def preferences(client_id: str, num_rows: int) -> Dataset:
    """A dataset with prompts and chosen and rejected answers."""
    words = WORDS[client_id]
    return Dataset.from_dict(
        {
            "prompt": sentences(client_id, num_rows),
            "chosen": [f" {words[i % 12]}" for i in range(num_rows)],
            "rejected": [f" {words[(i + 5) % 12]}" for i in range(num_rows)],
        }
    )
