"""The models that can be split, by their type: a new one is one entry."""

from __future__ import annotations

from transformers import PretrainedConfig

from .chatglm import CHATGLM, CHATGLM2
from .layouts import Layout


_LLAMA = Layout(
    blocks="model.layers",
    embedding="model.embed_tokens",
    output="lm_head",
    of_head={"model.embed_tokens": "identity"},
    of_tail={"model.norm": "identity", "lm_head": "identity"},
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
        of_head={"transformer.wte": "identity", "transformer.wpe": "zero", "transformer.drop": "identity"},
        of_tail={"transformer.ln_f": "identity", "lm_head": "identity"},
        by_number=("scale_attn_by_inverse_layer_idx",),
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "opt": Layout(
        blocks="model.decoder.layers",
        embedding="model.decoder.embed_tokens",
        output="lm_head",
        of_head={
            "model.decoder.embed_tokens": "identity",
            "model.decoder.embed_positions": "zero",
            "model.decoder.project_in": "none",
        },
        of_tail={
            "model.decoder.final_layer_norm": "none",
            "model.decoder.project_out": "none",
            "lm_head": "identity",
        },
    ),
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}


def layout_of(config: PretrainedConfig) -> Layout:
    """
    The layout of a model.

    Args:
        config (`PretrainedConfig`): The model's.

    Raises:
        ValueError: If no entry of `LAYOUTS` has this model type, or a setting of the config makes its blocks depend
            on their numbers.
    """
    name = config.model_type
    # All generations have one model type; the first alone knows of positions in two dimensions.
    if name == "chatglm" and "position_encoding_2d" not in config.to_dict():
        name = "chatglm2"
    layout = LAYOUTS.get(name)
    if layout is None:
        raise ValueError(
            f"No layout for models of type {config.model_type!r}: known are {sorted(LAYOUTS)}. Add one to "
            "hf_federated.split.LAYOUTS, or give it: SplitModel.from_model(..., layout=Layout(...))."
        )
    for setting in layout.by_number:
        if getattr(config, setting):
            raise ValueError(
                f"{setting}=True makes a block of {config.model_type!r} depend on its own number, which splitting "
                f"changes: this model cannot be split. Set {setting}=False."
            )
    return layout
