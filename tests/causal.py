"""A tiny causal model and tokenizers that split words, for tests of tasks with causal models."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def bytes_tokenizer(texts: Iterable[str], vocab_size: int = 420) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as in GPT-2, Llama 3 and SmolLM2. The end token is also the pad token."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def pieces_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """BPE with `▁` for spaces, a space before every text, and a start token, as in Llama 2."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    tokenizer.decoder = decoders.Metaspace()
    special = ["<unk>", "<start>", "<end>"]
    tokenizer.train_from_iterator(texts, BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False))
    tokenizer.post_processor = TemplateProcessing(single="<start> $A", special_tokens=[("<start>", 1)])
    names = {"unk_token": "<unk>", "bos_token": "<start>", "eos_token": "<end>", "pad_token": "<end>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def llama(vocab_size: int, seed: int = 0, num_layers: int = 2) -> LlamaForCausalLM:
    """A Llama model with hidden size 32. Building it does not change the global random state."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
