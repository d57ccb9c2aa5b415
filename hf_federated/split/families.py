"""Layouts of the model types that can be split. To support a new model type, add one entry to `LAYOUTS`."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from .._compat import GPT_NEOX_OUTPUT
from .chatglm import CHATGLM, CHATGLM2
from .cut import Cut
from .layouts import PAGE, Layout


_LLAMA = Layout(
    blocks="model.layers",
    embedding="model.embed_tokens",
    output="lm_head",
    head_modules={"model.embed_tokens": "identity"},
    tail_modules={"model.norm": "identity", "lm_head": "identity"},
)

_FALCON = Layout(
    blocks="transformer.h",
    embedding="transformer.word_embeddings",
    output="lm_head",
    head_modules={"transformer.word_embeddings": "identity"},
    tail_modules={"transformer.ln_f": "identity", "lm_head": "identity"},
)

_GPT2 = Layout(
    blocks="transformer.h",
    embedding="transformer.wte",
    output="lm_head",
    head_modules={"transformer.wte": "identity", "transformer.wpe": "zero", "transformer.drop": "identity"},
    tail_modules={"transformer.ln_f": "identity", "lm_head": "identity"},
)

_GRANITE = replace(_LLAMA, head_settings={"embedding_multiplier": 1.0})

_GPTJ = replace(_GPT2, head_modules={"transformer.wte": "identity", "transformer.drop": "identity"})

# Families with latent or linear attention, or with keys and values of several sizes.
_WITHOUT_PREFIXES = replace(_LLAMA, supports_prefixes=False)

_LFM2 = replace(_WITHOUT_PREFIXES, tail_modules={"model.embedding_norm": "identity", "lm_head": "identity"})

_PHI = replace(
    _LLAMA,
    head_modules={"model.embed_tokens": "identity", "model.embed_dropout": "identity"},
    tail_modules={"model.final_layernorm": "identity", "lm_head": "identity"},
)

# Model types whose modules have the paths of Llama's modules.
_NAMED_AS_LLAMA = (
    "apertus apertus1p5_text arcee aria_text beam bitnet cohere cohere2 cohere2_moe cwm diffllama doge dots1 ernie4_5 "
    "ernie4_5_moe exaone exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text glm glm4 glm4_moe gpt_oss helium "
    "hunyuan_v1_dense hunyuan_v1_moe hy_v3 internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama mellum "
    "minimax_m2 ministral ministral3 mistral mixtral moshi nemotron olmo olmo2 olmo3 olmoe phi3 phimoe qwen2 "
    "qwen2_moe qwen3 qwen3_moe sarvam_moe seed_oss smollm3 solar_open stablelm vaultgemma"
).split()

LAYOUTS: dict[str, Layout] = {
    **dict.fromkeys(_NAMED_AS_LLAMA, _LLAMA),
    **dict.fromkeys(
        (
            "deepseek_v2 deepseek_v3 glm4_moe_lite lara_mini mimo_v2_flash olmo_hybrid qwen3_5_moe_text qwen3_5_text "
            "qwen3_next sarvam_mla"
        ).split(),
        _WITHOUT_PREFIXES,
    ),
    **dict.fromkeys("granite granite_swa granitemoe granitemoe_swa granitemoeshared hyperclovax".split(), _GRANITE),
    "afmoe": replace(_LLAMA, head_settings={"mup_enabled": False}),
    "bloom": replace(
        _FALCON,
        head_modules={"transformer.word_embeddings": "identity", "transformer.word_embeddings_layernorm": "identity"},
    ),
    "chatglm": CHATGLM,
    "chatglm2": CHATGLM2,
    "codegen": _GPTJ,
    "falcon": _FALCON,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": _GPT2,
    "gpt_neox": Layout(
        blocks="gpt_neox.layers",
        embedding="gpt_neox.embed_in",
        output=GPT_NEOX_OUTPUT,
        head_modules={"gpt_neox.embed_in": "identity", "gpt_neox.emb_dropout": "identity"},
        tail_modules={"gpt_neox.final_layer_norm": "identity", GPT_NEOX_OUTPUT: "identity"},
    ),
    "gptj": _GPTJ,
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "minicpm3": replace(_WITHOUT_PREFIXES, head_settings={"scale_emb": 1}),
    "mpt": Layout(
        blocks="transformer.blocks",
        embedding="transformer.wte",
        output="lm_head",
        head_modules={"transformer.wte": "identity"},
        tail_modules={"transformer.norm_f": "identity", "lm_head": "identity"},
    ),
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
    "persimmon": _PHI,
    "phi": _PHI,
    "starcoder2": replace(_LLAMA, head_settings={"embedding_dropout": 0.0}),
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
        ValueError: If the model has no layout, too few blocks for the cuts, or no setting with the number of blocks.
    """
    layout = layout_of(config) if layout is None else layout
    num_blocks = getattr(config, layout.num_blocks, None)
    if num_blocks is None:
        raise ValueError(
            f"The config of {config.model_type!r} has no setting {layout.num_blocks!r}, which its layout names. Set "
            f"num_blocks of the layout to the setting with the number of blocks, see {PAGE}."
        )
    return Cut(int(num_blocks), head_blocks, tail_blocks)


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
            f"Model type {config.model_type!r} has no layout. Split a model of a family in "
            f"docs/reference/split-families.md, or pass a layout: SplitModel.from_model(..., layout=Layout(...)), see "
            f"{PAGE}."
        )
    return layout
