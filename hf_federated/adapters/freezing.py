"""Freezing a model from the embedding up, as FedNLP's Table 3 does: what is frozen neither trains nor travels.

Source: Lin et al., FedNLP (Findings of NAACL 2022), section 4.4.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def _embedding_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that turn ids into vectors: the whole `embeddings` block where there is one."""
    words = model.get_input_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    parent_name = names[id(words)].rpartition(".")[0]
    parent = model.get_submodule(parent_name)
    if parent_name.rpartition(".")[2].endswith("embeddings"):
        return [parent]
    # Decoders keep token and position embeddings side by side with their layers.
    return [module for module in parent.children() if isinstance(module, nn.Embedding)] or [words]


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer blocks from the embedding up: an encoder's first, then a decoder's."""
    depths = {
        depth
        for name in (
            "num_hidden_layers",
            "encoder_layers",
            "decoder_layers",
            "num_layers",
            "num_decoder_layers",
            "n_layers",
            "n_layer",
        )
        if isinstance(depth := model.config.to_dict().get(name), int)
    }
    stacks = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) in depths and len({type(layer) for layer in module}) == 1
    ]
    return [layer for stack in stacks for layer in stack]


def freeze_layers(model: nn.Module, freeze: str) -> int:
    """
    Freeze the embeddings, the first layers, or both.

    Args:
        model (`transformers.PreTrainedModel`): Any encoder, decoder or encoder–decoder.
        freeze (`str`): `"embeddings"`, a number of layers from the embedding up (`"2"`), or `"embeddings+2"`.

    Returns:
        `int`: How many parameters still train.

    Raises:
        ValueError: If `freeze` says something else, the model has fewer layers, or its layers cannot be found.

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
        raise ValueError(f"`freeze` knows the layers of transformers models, not of {type(model).__name__}.")
    parts = str(freeze).split("+")
    num_layers = sum(int(part) for part in parts if part.isdigit())
    if any(part != "embeddings" and not part.isdigit() for part in parts):
        raise ValueError(f"`freeze` is {freeze!r}; write 'embeddings', a number of layers, or 'embeddings+2'.")
    frozen = _embedding_modules(model) if "embeddings" in parts else []
    layers = _layers(model)
    if num_layers > len(layers):
        raise ValueError(f"`freeze` asks for {num_layers} layers; {type(model).__name__} has {len(layers)}.")
    for module in frozen + layers[:num_layers]:
        module.requires_grad_(False)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
