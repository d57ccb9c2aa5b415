"""Freeze a model from the embeddings upward, as in FedNLP's Table 3. Frozen layers are not trained or exchanged.

Source: Lin et al., FedNLP (Findings of NAACL 2022), section 4.4.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..config import parse_freeze


DEPTHS = (
    "num_hidden_layers",
    "encoder_layers",
    "decoder_layers",
    "num_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "n_layers",
    "n_layer",
)
# Parameters between the token IDs and the first block that are not in embedding tables: norms and projections of
# embeddings, OPT's projection to the hidden size of its blocks, and the norm of DeBERTa's relative positions.
_EMBEDDING = re.compile(r"(^|[._])emb|(^|\.)project_in\.|(^|\.)encoder\.LayerNorm\.")


def model_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return all blocks in order, first the encoder, then the decoder. A reused block occurs once per use."""
    config: dict[str, Any] = model.config.to_dict()
    # An `EncoderDecoderModel` has one config for the encoder and one for the decoder.
    configs = [config] + [config[half] for half in ("encoder", "decoder") if isinstance(config.get(half), dict)]
    depths = {depth for part in configs for name in DEPTHS if isinstance(depth := part.get(name), int)}
    num_groups = config.get("num_hidden_groups")  # ALBERT: consecutive layers of a group share their weights
    stacks: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len({type(layer) for layer in module}) != 1:
            continue
        nested = any(name.startswith(f"{stack}.") for stack in stacks)
        if not nested and (len(module) in depths if num_groups is None else len(module) == num_groups):
            stacks[name] = module
    layers = [layer for stack in stacks.values() for layer in stack]
    if num_groups is not None and layers:
        depth = config["num_hidden_layers"]
        return [layers[number * num_groups // depth] for number in range(depth)]
    return layers


def _embedding_parameters(model: PreTrainedModel, layers: list[nn.Module]) -> list[nn.Parameter]:
    """Return all parameters between token IDs and the first block, without relative positions in blocks (T5)."""
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    looked_up = {id(parameter) for table in tables for parameter in table.parameters()}
    head = model.get_output_embeddings()
    scoring = set() if head is None else {id(parameter) for parameter in head.parameters()}
    return [
        parameter
        for name, parameter in model.named_parameters()
        if id(parameter) not in inside
        and (id(parameter) in looked_up or (_EMBEDDING.search(name) and id(parameter) not in scoring))
    ]


def freeze_layers(model: nn.Module, freeze: str) -> int:
    """
    Freeze the embeddings, the first layers, or both.

    The embeddings are all parameters between the token IDs and the first layer, in an encoder and in a decoder. They
    include the tables of words, positions and types, and the norms and projections of the embeddings. An output head
    with tied weights is frozen together with the word embeddings. Relative positions belong to the layers if the
    layers contain them (T5), otherwise to the embeddings (DeBERTa). The layers of a decoder follow the layers of its
    encoder.

    Args:
        model (`transformers.PreTrainedModel`): An encoder, a decoder or an encoder-decoder model.
        freeze (`str`): `"embeddings"`, a number of layers counted from the embeddings (`"2"`), or `"embeddings+2"`.

    Returns:
        `int`: The number of parameters that are still trainable.

    Raises:
        ValueError: If `freeze` has another format, the model has too few layers, its layers cannot be found, the
            frozen layers share weights with other layers (ALBERT), or the model is wrapped by PEFT.

    Example:

    ```python
    >>> from transformers import BertConfig, BertModel
    >>> from hf_federated.adapters import freeze_layers

    >>> model = BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2))
    >>> before = model.num_parameters(only_trainable=True)
    >>> freeze_layers(model, "embeddings+1") < before
    True
    ```
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"`freeze` supports transformers models, got {type(model).__name__}. PEFT already freezes the model "
            "that it wraps. Freeze a model before wrapping it."
        )
    with_embeddings, num_layers = parse_freeze(str(freeze))
    layers = model_layers(model)
    if num_layers > len(layers):
        raise ValueError(
            f"`freeze` asks for {num_layers} layers; {type(model).__name__} has {len(layers)}. Use a smaller number."
        )
    frozen = _embedding_parameters(model, layers) if with_embeddings else []
    frozen += [parameter for layer in layers[:num_layers] for parameter in layer.parameters()]
    still_used = {id(parameter) for layer in layers[num_layers:] for parameter in layer.parameters()}
    if any(id(parameter) in still_used for parameter in frozen):
        groups = [layers.index(layer) for layer in dict.fromkeys(layers)] + [len(layers)]
        raise ValueError(
            f"`freeze` asks for {num_layers} layers, but {type(model).__name__} shares weights among its layers. Set"
            f" `freeze` to {', '.join(map(str, groups[:-1]))} or {groups[-1]} layers."
        )
    for parameter in frozen:
        parameter.requires_grad_(False)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
