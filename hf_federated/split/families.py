"""Layouts of the model types that can be split. To support a new model type, add one entry to `LAYOUTS`."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from .._compat import GPT_NEOX_OUTPUT
from .chatglm import CHATGLM, CHATGLM2
from .cut import Cut
from .layouts import Layout


_LLAMA = Layout(
    blocks="model.layers",
    embedding="model.embed_tokens",
    output="lm_head",
    head_modules={"model.embed_tokens": "identity"},
    tail_modules={"model.norm": "identity", "lm_head": "identity"},
)

LAYOUTS: dict[str, Layout] = {
    "chatglm": CHATGLM,
    "chatglm2": CHATGLM2,
    "cohere": _LLAMA,
    "cohere2": _LLAMA,
    "falcon": Layout(
        blocks="transformer.h",
        embedding="transformer.word_embeddings",
        output="lm_head",
        head_modules={"transformer.word_embeddings": "identity"},
        tail_modules={"transformer.ln_f": "identity", "lm_head": "identity"},
    ),
    "gemma": _LLAMA,
    "gemma2": _LLAMA,
    "gemma3_text": _LLAMA,
    "glm": _LLAMA,
    "glm4": _LLAMA,
    "gpt2": Layout(
        blocks="transformer.h",
        embedding="transformer.wte",
        output="lm_head",
        head_modules={"transformer.wte": "identity", "transformer.wpe": "zero", "transformer.drop": "identity"},
        tail_modules={"transformer.ln_f": "identity", "lm_head": "identity"},
    ),
    "gpt_neox": Layout(
        blocks="gpt_neox.layers",
        embedding="gpt_neox.embed_in",
        output=GPT_NEOX_OUTPUT,
        head_modules={"gpt_neox.embed_in": "identity", "gpt_neox.emb_dropout": "identity"},
        tail_modules={"gpt_neox.final_layer_norm": "identity", GPT_NEOX_OUTPUT: "identity"},
    ),
    "granite": replace(_LLAMA, head_settings={"embedding_multiplier": 1.0}),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "olmo2": _LLAMA,
    "opt": Layout(
        blocks="model.decoder.layers",
        embedding="model.decoder.embed_tokens",
        output="lm_head",
        head_modules={
            "model.decoder.embed_tokens": "identity",
            "model.decoder.embed_positions": "zero",
            "model.decoder.project_in": "none",
        },
        tail_modules={
            "model.decoder.final_layer_norm": "none",
            "model.decoder.project_out": "none",
            "lm_head": "identity",
        },
    ),
    "phi3": _LLAMA,
    "qwen2": _LLAMA,
    "qwen2_moe": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": _LLAMA,
    "smollm3": _LLAMA,
    "stablelm": _LLAMA,
}


def cut_of(config: PretrainedConfig, head_blocks: int, tail_blocks: int, layout: Layout | None = None) -> Cut:
    """
    Return the cuts of a model.

    Args:
        config (`PretrainedConfig`): The config of the full model.
        head_blocks (`int`): Number of first blocks, which the client keeps.
        tail_blocks (`int`): Number of last blocks, which the client keeps.
        layout ([`Layout`], *optional*): The layout of the model. Defaults to the layout of its model type.

    Raises:
        ValueError: If the model has no layout, or too few blocks for the cuts.
    """
    layout = layout_of(config) if layout is None else layout
    return Cut(int(getattr(config, layout.num_blocks)), head_blocks, tail_blocks)


def layout_of(config: PretrainedConfig) -> Layout:
    """
    Return the layout of a model.

    Args:
        config (`PretrainedConfig`): The config of the full model.

    Raises:
        ValueError: If `LAYOUTS` has no entry for this model type.
    """
    name = config.model_type
    # All ChatGLM generations share one model type. Only the first generation has two-dimensional positions.
    if name == "chatglm" and "position_encoding_2d" not in config.to_dict():
        name = "chatglm2"
    layout = LAYOUTS.get(name)
    if layout is None:
        raise ValueError(
            f"Model type {config.model_type!r} has no layout. Supported model types: {sorted(LAYOUTS)}. Add a layout "
            "to hf_federated.split.LAYOUTS, or pass one: SplitModel.from_model(..., layout=Layout(...))."
        )
    return layout
