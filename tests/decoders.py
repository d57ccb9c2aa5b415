"""Tiny decoder models of all model types that can be split."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)


VOCABULARY = 50
NUM_BLOCKS = 5


def sizes(vocabulary: int, num_blocks: int, eos_token_id: int) -> dict[str, Any]:
    """Config arguments of a tiny decoder, by the names that most config classes use."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "num_hidden_layers": num_blocks,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": eos_token_id,
    }


def gpt2_sizes(common: dict[str, Any]) -> dict[str, Any]:
    """The return value of `sizes` by the names of `GPT2Config`, without the pad token."""
    return {
        "vocab_size": common["vocab_size"],
        "n_embd": common["hidden_size"],
        "n_layer": common["num_hidden_layers"],
        "n_head": common["num_attention_heads"],
        "n_positions": common["max_position_embeddings"],
        "bos_token_id": common["bos_token_id"],
        "eos_token_id": common["eos_token_id"],
    }


_SIZES = sizes(VOCABULARY, NUM_BLOCKS, eos_token_id=2)
_GROUPED: dict[str, Any] = {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2}

DECODERS: dict[str, Any] = {
    "glm": lambda: GlmConfig(**_GROUPED, head_dim=8),
    "glm4": lambda: Glm4Config(**_GROUPED, head_dim=8),
    "gpt2": lambda: GPT2Config(**gpt2_sizes(_SIZES), resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, pad_token_id=0),
    "llama": lambda: LlamaConfig(**_GROUPED),
    "llama-tied": lambda: LlamaConfig(**_GROUPED, tie_word_embeddings=True),
    "mistral-window": lambda: MistralConfig(**_GROUPED, head_dim=8, sliding_window=4),
    "opt": lambda: OPTConfig(**_SIZES, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0, attention_dropout=0.0),
    "opt-projected": lambda: OPTConfig(
        **_SIZES, ffn_dim=48, word_embed_proj_dim=16, dropout=0.0, attention_dropout=0.0
    ),
    "qwen2": lambda: Qwen2Config(**_GROUPED),
    "qwen2-windows": lambda: Qwen2Config(**_GROUPED, use_sliding_window=True, sliding_window=4, max_window_layers=2),
    "qwen3": lambda: Qwen3Config(**_GROUPED, head_dim=8),
}


def from_config(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Create a model in evaluation mode, without changing the global random generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).eval()


def decoder(name: str, seed: int = 0) -> PreTrainedModel:
    """Create a model of one of `DECODERS`, in evaluation mode."""
    return from_config(DECODERS[name](), seed)


def batch(padding: str | None, batch_size: int = 3, length: int = 9, seed: int = 0) -> dict[str, torch.Tensor]:
    """Create token ids, mask and labels. With padding, the first sequence is three tokens shorter."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (batch_size, length), generator=generator)
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if padding is not None:
        mask = torch.ones_like(ids)
        padded = slice(0, 3) if padding == "left" else slice(length - 3, length)
        mask[0, padded] = 0
        inputs["attention_mask"] = mask
        inputs["labels"][mask == 0] = -100
        if padding == "left":
            # Without this, a padding position would predict the first token of the sequence.
            inputs["labels"][0, 3] = -100
    return inputs
