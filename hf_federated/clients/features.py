"""Features of rows: what a classifier says of them before its head does.

They are the mean of the base model's last hidden states over the positions that the attention mask shows, whatever the
architecture: a head may read the first position (BERT), the last one (Llama) or a projection of it, and models that
are not trained for the task yet have nothing of the row in such a place. Of an encoder–decoder they are the encoder's.
A PEFT model's are those of the model inside: layers that an adapter changes count, virtual tokens do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel


def base_model_of(model: nn.Module) -> PreTrainedModel:
    """
    The part of a model below its head.

    Args:
        model (`transformers.PreTrainedModel` or `peft.PeftModel`): With or without a head.

    Raises:
        ValueError: If it is neither.

    Example:

    ```python
    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> from hf_federated.clients.features import base_model_of

    >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> type(base_model_of(BertForSequenceClassification(config))).__name__
    'BertModel'
    ```
    """
    inside: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(inside, PreTrainedModel):
        raise ValueError(
            f"Features are the last hidden states below a transformers model's head, and {type(inside).__name__} is "
            "no PreTrainedModel: take a transformers model, PEFT around it or not."
        )
    return inside.get_encoder() if inside.config.is_encoder_decoder else inside.base_model


def pooled_features(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """
    Features of a batch.

    Args:
        model (`transformers.PreTrainedModel` or `peft.PeftModel`): With or without a head, on the device of the batch.
        inputs (`Mapping[str, Any]`): As the model takes it, without labels. Without `attention_mask` all positions
            count.

    Returns:
        `torch.Tensor`: Of shape `(rows, hidden)`, float32 or wider.

    Raises:
        ValueError: If the base model gives something else than a vector for each position.
    """
    base = base_model_of(model)
    taken = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
    hidden = base(**taken)[0]
    mask = inputs.get("attention_mask")
    if hidden.ndim != 3 or (mask is not None and mask.shape != hidden.shape[:2]):
        raise ValueError(
            f"{type(base).__name__} gives hidden states of shape {tuple(hidden.shape)}"
            f"{'' if mask is None else f' for a mask of shape {tuple(mask.shape)}'}, and features are means of shape "
            "(rows, positions, hidden) over the positions: take a model that gives a vector for each position."
        )
    hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if mask is None:
        return hidden.mean(1)
    shown = mask.to(hidden).unsqueeze(-1)
    return (hidden * shown).sum(1) / shown.sum(1).clamp(min=1)
