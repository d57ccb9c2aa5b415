"""Features of examples: pooled hidden states of the model below its classification head.

The features of an example are the mean of the base model's last hidden states over the positions that the attention
mask selects. The definition is the same for all architectures. The inputs of the heads are not used as features
because they depend on the architecture (the first position for BERT, the last position for Llama, sometimes a
projection), and a model that is not trained for the task yet does not encode the example at such a position. For an
encoder–decoder, the features are the encoder's. For a PEFT model, they are the features of the wrapped model: layers
that an adapter changes count, virtual tokens do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from ..features.pooling import pool


def base_model_of(model: nn.Module) -> PreTrainedModel:
    """
    Return the part of a model below its head.

    Args:
        model (`transformers.PreTrainedModel` or `peft.PeftModel`): A model with or without a head.

    Returns:
        `transformers.PreTrainedModel`: The base model, or the encoder of an encoder–decoder.

    Raises:
        ValueError: If `model` is neither a `PreTrainedModel` nor a PEFT model around one.

    Example:

    ```python
    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> from hf_federated.clients.features import base_model_of

    >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> type(base_model_of(BertForSequenceClassification(config))).__name__
    'BertModel'
    ```
    """
    wrapped: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(wrapped, PreTrainedModel):
        raise ValueError(
            f"The model is a {type(wrapped).__name__}, but features require a PreTrainedModel, with or without PEFT "
            "around it. Pass a transformers model."
        )
    return wrapped.get_encoder() if wrapped.config.is_encoder_decoder else wrapped.base_model


def pooled_features(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """
    Compute the features of a batch.

    Args:
        model (`transformers.PreTrainedModel` or `peft.PeftModel`): A model with or without a head, on the device of
            the batch.
        inputs (`Mapping[str, Any]`): Model inputs without labels. Without `attention_mask`, all positions count.
            Inputs of the decoder (`decoder_*`) are ignored.

    Returns:
        `torch.Tensor`: Features of shape `(batch_size, hidden_size)`, float32 or wider.

    Raises:
        ValueError: If the base model does not return one vector for each position.
    """
    base = base_model_of(model)
    encoder_inputs = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
    hidden = base(**encoder_inputs)[0]
    mask = inputs.get("attention_mask")
    if hidden.ndim != 3 or (mask is not None and mask.shape != hidden.shape[:2]):
        raise ValueError(
            f"{type(base).__name__} returned hidden states of shape {tuple(hidden.shape)}"
            f"{'' if mask is None else f' for an attention mask of shape {tuple(mask.shape)}'}. Features require "
            "hidden states of shape (batch, positions, hidden). Use a model that returns one vector for each position."
        )
    return pool(hidden, mask)
