"""The parts of a model that is in this process or in a checkpoint."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from .adapters import check_peft_model
from .cut import ROLES, Role
from .families import cut_of
from .layouts import Layout
from .loading import load_parts
from .parts import Part
from .splitting import dense_config, split_into_parts


def create_parts(
    model_or_name: PreTrainedModel | PeftModel | str,
    head_blocks: int,
    tail_blocks: int,
    layout: Layout | None,
    model_class: type[PreTrainedModel] | None,
    **kwargs: Any,
) -> tuple[PretrainedConfig, dict[Role, Part]]:
    """
    Create the three parts of a model.

    Args:
        model_or_name (`PreTrainedModel`, `PeftModel` or `str`): A model or a checkpoint.
        head_blocks (`int`): Number of first blocks, which the client keeps.
        tail_blocks (`int`): Number of last blocks, which the client keeps.
        layout ([`Layout`], *optional*): The layout of the model. Defaults to the layout of its model type.
        model_class (`type[PreTrainedModel]`, *optional*): The model class of a checkpoint.
        kwargs: For a checkpoint: `dtype`, and the arguments of `AutoConfig.from_pretrained`.

    Returns:
        `tuple[PretrainedConfig, dict[str, Part]]`: The config of the full model, and the parts by role.

    Raises:
        ValueError: As [`SplitModel.from_model`].
        TypeError: If arguments for a checkpoint are passed together with a model.
    """
    if isinstance(model_or_name, str):
        dtype = kwargs.pop("dtype", None)
        config = AutoConfig.from_pretrained(model_or_name, **kwargs)
        cut = cut_of(config, head_blocks, tail_blocks, layout)
        return config, load_parts(
            model_or_name, config, cut, ROLES, layout=layout, model_class=model_class, dtype=dtype, **kwargs
        )
    if kwargs:
        raise TypeError(
            f"The arguments {sorted(kwargs)} are only for a checkpoint, but a model was passed. Remove them, or pass "
            "a directory or a Hub id."
        )
    if isinstance(model_or_name, PeftModel):
        check_peft_model(model_or_name)
    model = base_model(model_or_name)
    config = dense_config(model)
    cut = cut_of(config, head_blocks, tail_blocks, layout)
    return config, split_into_parts(model, config, cut, layout)


def base_model(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Return the model without the wrapper of PEFT."""
    return model.get_base_model() if isinstance(model, PeftModel) else model
