"""Tiny decoder models of all model types that can be split."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
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

# The experts of a mixture-of-experts block. The second block has no experts.
_EXPERTS: dict[str, Any] = {
    **_GROUPED,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
}
_LAYER_TYPES = [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")]

# The arguments of `AutoConfig.for_model`. Settings that make a block depend on its number, or that scale embeddings or
# logits, have values with a large effect on the output of a small model.
_SETTINGS: dict[str, dict[str, Any]] = {
    "cohere": {"model_type": "cohere", **_GROUPED, "logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {"model_type": "cohere2", **_GROUPED, "logit_scale": 0.25, "sliding_window": 4},
    "falcon": {"model_type": "falcon", **_SIZES, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "falcon-alibi": {
        "model_type": "falcon",
        **_SIZES,
        "alibi": True,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "gemma": {"model_type": "gemma", **_GROUPED, "head_dim": 8},
    "gemma2": {
        "model_type": "gemma2",
        **_GROUPED,
        "head_dim": 8,
        "sliding_window": 4,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 0.5,
        "attn_logit_softcapping": 0.5,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **_GROUPED,
        "head_dim": 8,
        "sliding_window": 4,
        "query_pre_attn_scalar": 8,
        "layer_types": _LAYER_TYPES,
    },
    "gpt2-scaled": {
        "model_type": "gpt2",
        **gpt2_sizes(_SIZES),
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "pad_token_id": 0,
        "scale_attn_by_inverse_layer_idx": True,
    },
    "gpt_neox": {"model_type": "gpt_neox", **_SIZES, "intermediate_size": 48},
    "granite": {
        "model_type": "granite",
        **_GROUPED,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.5,
        "logits_scaling": 0.25,
    },
    "mixtral": {
        "model_type": "mixtral",
        **_GROUPED,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
    },
    "olmo2": {"model_type": "olmo2", **_GROUPED},
    "phi3": {"model_type": "phi3", **_GROUPED},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **_EXPERTS,
        "shared_expert_intermediate_size": 16,
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 2,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **_EXPERTS, "head_dim": 8},
    "smollm3": {
        "model_type": "smollm3",
        **_GROUPED,
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 4,
    },
    "stablelm": {"model_type": "stablelm", **_GROUPED},
}

# Sizes and settings by the names that config classes use. A class gets the entries that it knows. Windows, types of
# layers and multipliers have a large effect on the output of a small model.
_COMMON: dict[str, Any] = {
    **_EXPERTS,
    "head_dim": 8,
    "kv_channels": 8,
    "v_head_dim": 8,
    "ffn_dim": 48,
    "sliding_window": 4,
    "layer_types": _LAYER_TYPES,
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"],
    "num_attention_heads_per_layer": [4, 2, 4, 2, 4],
    "first_k_dense_replace": 2,
    "num_dense_layers": 2,
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_k", "moe_topk", "n_group"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "topk_group"), 1),
    **dict.fromkeys(("shared_intermediate_size", "shared_expert_intermediate_size", "dense_intermediate_size"), 16),
    "routed_scaling_factor": 2.5,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.5,
    "logits_scaling": 0.25,
    "logit_scale": 0.25,
    "query_pre_attn_scalar": 8,
    "final_logit_softcapping": 0.5,
    "attn_logit_softcapping": 0.5,
}

_GPT2_LIKE = {**gpt2_sizes(_SIZES), "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "pad_token_id": 0}
_LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
    "head_dim": 4,
}

_LINEAR = {
    "layer_types": [f"{kind}_attention" for kind in ("linear", "full", "linear", "linear", "full")],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_CONVOLUTION = {"layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"]}

# Decoders of `_COMMON` by model type (before a hyphen), with the settings that differ from `_COMMON`.
_FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "apertus apertus1p5_text arcee aria_text beam bitnet cohere2_moe cwm diffllama dots1 ernie4_5 "
            "ernie4_5_moe exaone exaone4 exaone_moe flex_olmo flint glm4_moe gpt_oss granitemoe granitemoeshared "
            "helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 "
            "laguna mellum mimo_v2_flash minimax_m2 ministral moshi nemotron olmo3 persimmon phimoe sarvam_moe "
            "seed_oss solar_open starcoder2 vaultgemma"
        ).split(),
        {},
    ),
    "afmoe": {"mup_enabled": True},
    "bloom": {"n_layer": NUM_BLOCKS, "n_head": 4, "hidden_dropout": 0.0},
    "codegen": {**_GPT2_LIKE, "rotary_dim": 4},
    "deepseek_v2": {**_LATENT, "topk_method": "greedy"},
    "deepseek_v2-groups": {**_LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT,
    "deepseek_v3-without-query-rank": {**_LATENT, "q_lora_rank": None},
    "doge": {"keep_window_size": 4},
    "glm4_moe_lite": _LATENT,
    "gpt_bigcode": _GPT2_LIKE,
    "gpt_bigcode-heads": {**_GPT2_LIKE, "multi_query": False},
    "gpt_neo": {
        "num_layers": NUM_BLOCKS,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2], [["local"], 1]],
        "window_size": 4,
        "embed_dropout": 0.0,
        "resid_dropout": 0.0,
    },
    "gptj": {**_GPT2_LIKE, "rotary_dim": 4},
    "granite_swa": {"layer_rope_theta": [10000.0, 0.0, 500.0, 10000.0, 500.0]},
    "granitemoe_swa": {"layer_rope_theta": [10000.0, 0.0, 500.0, 10000.0, 500.0]},
    "lara_mini": {
        **_LINEAR,
        "layer_types": [f"{kind}_attention" for kind in ("linear", "full", "sliding", "linear", "full")],
    },
    "lfm2": _CONVOLUTION,
    "lfm2_moe": _CONVOLUTION,
    "minicpm3": {**_LATENT, "scale_emb": 12, "scale_depth": 1.4},
    # Attention depends on the position, in steps of the original context length.
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 4,
            "llama_4_scaling_beta": 0.5,
        }
    },
    "mpt": {"d_model": 32, "n_layers": NUM_BLOCKS, "n_heads": 4, "max_seq_len": 64, "expansion_ratio": 2},
    "olmo": {"clip_qkv": 0.1},
    "olmo_hybrid": _LINEAR,
    "olmoe": {"clip_qkv": 0.1},
    "phi": {"partial_rotary_factor": 0.5},
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "sarvam_mla": _LATENT,
}


def family(name: str) -> PretrainedConfig:
    """Create the config of one of `_FAMILIES`."""
    model_type = name.split("-")[0]
    known = signature(CONFIG_MAPPING[model_type]).parameters
    common = {setting: value for setting, value in _COMMON.items() if setting in known}
    return AutoConfig.for_model(model_type, **{**common, **_FAMILIES[name]})


def is_available(name: str) -> bool:
    """Whether the installed version of transformers has the model type, and a cache for its linear attention."""
    kinds = _FAMILIES[name].get("layer_types", [])
    has_cache = hasattr(DynamicCache, "get_conv_state") or not {"linear_attention", "conv"} & set(kinds)
    return has_cache and name.split("-")[0] in CONFIG_MAPPING


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
    # A model type that the installed version of transformers lacks is left out.
    **{
        name: lambda settings=settings: AutoConfig.for_model(**settings)
        for name, settings in _SETTINGS.items()
        if settings["model_type"] in CONFIG_MAPPING
    },
    **{name: partial(family, name) for name in _FAMILIES if is_available(name)},
}


# The decoders of `_FAMILIES`. `family_table.py` measures them, and few other tests use them.
FAMILIES = [name for name in DECODERS if name in _FAMILIES]

# Decoders with blocks that have a recurrent state or the state of a convolution in place of keys and values.
WITHOUT_KEYS = [name for name in ("lfm2", "olmo_hybrid") if name in DECODERS]

# The decoders of `_SETTINGS`. Most tests of these decoders are slow.
MORE_DECODERS = [name for name in DECODERS if name in _SETTINGS]


def slow(names: Iterable[str]) -> list[Any]:
    """Mark the parameters of a test as slow."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


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
