"""Layouts of the model types that can be split. To support a new model type, add one entry to `LAYOUTS`."""

from __future__ import annotations

from transformers import PretrainedConfig

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
    "glm": _LLAMA,
    "glm4": _LLAMA,
    "gpt2": Layout(
        blocks="transformer.h",
        embedding="transformer.wte",
        output="lm_head",
        head_modules={"transformer.wte": "identity", "transformer.wpe": "zero", "transformer.drop": "identity"},
        tail_modules={"transformer.ln_f": "identity", "lm_head": "identity"},
        index_dependent_settings=("scale_attn_by_inverse_layer_idx",),
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
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
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
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
        ValueError: If `LAYOUTS` has no entry for this model type, or a setting of the config makes the blocks depend
            on their index.
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
    for setting in layout.index_dependent_settings:
        if getattr(config, setting):
            raise ValueError(
                f"{setting}=True makes each block of {config.model_type!r} depend on its index. Splitting a model "
                f"renumbers its blocks, so this model cannot be split. Set {setting}=False."
            )
    return layout
