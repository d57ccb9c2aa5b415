"""Freezing a model from the embedding up, as FedNLP's Table 3 does: what is frozen neither trains nor travels.

Source: Lin et al., FedNLP (Findings of NAACL 2022), section 4.4.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from transformers import PreTrainedModel


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
# What else than tables stands between ids and the first block: norms and projections of embeddings, OPT's projection
# to the width of its blocks, and the norm of DeBERTa's relative positions.
_EMBEDDING = re.compile(r"(^|[._])emb|(^|\.)project_in\.|(^|\.)encoder\.LayerNorm\.")


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks from the embedding up: an encoder's first, then a decoder's. One that is used again stands again."""
    config: dict[str, Any] = model.config.to_dict()
    # An `EncoderDecoderModel` has a config for each half.
    configs = [config] + [config[half] for half in ("encoder", "decoder") if isinstance(config.get(half), dict)]
    depths = {depth for part in configs for name in DEPTHS if isinstance(depth := part.get(name), int)}
    num_groups = config.get("num_hidden_groups")  # ALBERT's sets of weights, each for several layers in a row
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
    """All that stands between ids and the first block. Relative positions inside of blocks (T5) belong to these."""
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

    The embeddings are all that stands between ids and the first layer, in an encoder and in a decoder: tables of
    words, positions and types, their norms and projections. A head that is tied to the words is frozen with them.
    Relative positions belong to the layers where these hold them (T5), otherwise to the embeddings (DeBERTa). The
    layers of a decoder come after those of its encoder.

    Args:
        model (`transformers.PreTrainedModel`): Any encoder, decoder or encoder–decoder.
        freeze (`str`): `"embeddings"`, a number of layers from the embedding up (`"2"`), or `"embeddings+2"`.

    Returns:
        `int`: How many parameters still train.

    Raises:
        ValueError: If `freeze` says something else, the model has fewer layers, its layers cannot be found, layers
            that are to be frozen share their weights with others (ALBERT), or the model is wrapped by PEFT.

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
            f"`freeze` knows the layers of transformers models, not of {type(model).__name__}. Freeze a model before"
            " it is wrapped; what PEFT wraps is frozen already."
        )
    parts = str(freeze).split("+")
    num_layers = sum(int(part) for part in parts if part.isdigit())
    if any(part != "embeddings" and not part.isdigit() for part in parts):
        raise ValueError(f"`freeze` is {freeze!r}; write 'embeddings', a number of layers, or 'embeddings+2'.")
    layers = _layers(model)
    if num_layers > len(layers):
        raise ValueError(f"`freeze` asks for {num_layers} layers; {type(model).__name__} has {len(layers)}.")
    frozen = _embedding_parameters(model, layers) if "embeddings" in parts else []
    frozen += [parameter for layer in layers[:num_layers] for parameter in layer.parameters()]
    still_used = {id(parameter) for layer in layers[num_layers:] for parameter in layer.parameters()}
    if any(id(parameter) in still_used for parameter in frozen):
        groups = [layers.index(layer) for layer in dict.fromkeys(layers)] + [len(layers)]
        raise ValueError(
            f"`freeze` asks for {num_layers} layers; {type(model).__name__} shares weights among its layers, so that"
            f" only {', '.join(map(str, groups[:-1]))} or {groups[-1]} of them can be frozen."
        )
    for parameter in frozen:
        parameter.requires_grad_(False)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
