"""Hidden states of the frozen part of a model, computed once for each text."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ..adapters.freezing import model_layers
from ..config import parse_freeze
from ..utils.arguments import require_one_of
from .encoder import PretrainedEncoder


# The column with the hidden states of an example, as bytes.
HIDDEN_COLUMN = "inputs_embeds"
# Tokens of the batch on which the parts of a model are compared with the whole model.
_NUM_CHECKED = 6


class FrozenLayers(PretrainedEncoder):
    """
    The frozen embeddings and first blocks of a pretrained model, which give the hidden states of each token.

    The clients train a [`BlocksClassifier`] on the hidden states. A text of 48 tokens of a model with 384 hidden units
    takes 37 kB on disk in float16, twice: once in the store, and once in the encoded dataset.

    Args:
        name_or_path (`str`): Hub id or folder of the model and its tokenizer. The weights must be safetensors files.
        freeze (`str`): The frozen part, as in [`freeze_layers`]: `"embeddings"`, or `"embeddings+4"` with the first
            four blocks.
        revision (`str`, *optional*): Branch, tag or commit of the model on the Hub.
        dtype (`str`, *optional*, defaults to `"float16"`): Type of the hidden states on disk, `"float16"` or
            `"float32"`. Batches are float32.
        kwargs (*optional*): Further arguments of `from_pretrained`.

    Raises:
        ValueError: If `freeze` does not include the embeddings, the model has too few blocks, or the model has no
            safetensors file. When the first text is encoded, also if the parts of the model do not compute what the
            whole model computes.

    Example:

    ```python
    >>> from hf_federated.features import FrozenLayers

    >>> encoder = FrozenLayers("sentence-transformers/all-MiniLM-L6-v2", freeze="embeddings+4")  # loads nothing yet
    >>> encoder.num_frozen
    4

    ```
    """

    def __init__(
        self, name_or_path: str, freeze: str, revision: str | None = None, dtype: str = "float16", **kwargs: Any
    ) -> None:
        super().__init__(name_or_path, revision, **kwargs)
        require_one_of("dtype", dtype, ("float16", "float32"))
        self.freeze = str(freeze)
        self.dtype = dtype
        self.num_frozen = num_frozen_blocks(self.freeze)

    @property
    def settings(self) -> dict[str, Any]:
        """The number of frozen blocks, and the type of the hidden states."""
        return {"num_frozen": self.num_frozen, "dtype": self.dtype}

    def to_dict(self) -> dict[str, Any]:
        """The arguments of the encoder, which `save_pretrained` writes."""
        return {**super().to_dict(), "freeze": self.freeze, "dtype": self.dtype}

    @functools.cached_property
    def model(self) -> Any:
        """The frozen part in float32 and evaluation mode, on the GPU if there is one. The first access loads it."""
        model = super().model
        inputs = check_inputs(model.config)
        whole = hidden_states_of(model, inputs)
        if self.num_frozen >= len(whole):
            raise ValueError(
                f"`freeze` is {self.freeze!r}; {self.name_or_path} has {len(whole) - 1} blocks. Use a smaller number."
            )
        del stack_of(model)[1][self.num_frozen :]
        check_equal(model, model(**inputs)[0], whole[self.num_frozen])
        return model

    def features_of(self, hidden: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        """The hidden states of the tokens of each text, of shape `(tokens, hidden_size)`."""
        return [states[positions] for states, positions in zip(hidden, mask.bool(), strict=True)]

    def to_columns(self, features: list[np.ndarray]) -> dict[str, Any]:
        """The column `inputs_embeds` with the bytes of the hidden states of each row, see [`CachedEncoder`]."""
        return {HIDDEN_COLUMN: [np.ascontiguousarray(each).tobytes() for each in features]}

    def data_collator(self) -> HiddenStatesCollator:
        """Pad hidden states to shape `(batch, length, hidden_size)`."""
        return HiddenStatesCollator(self.feature_size, self.dtype)


@dataclass
class HiddenStatesCollator:
    """
    Pads hidden states to the longest example of a batch, and adds the attention mask.

    Args:
        hidden_size (`int`): Number of values of a hidden state.
        dtype (`str`): NumPy type of the hidden states. Batches are float32.

    Example:

    ```python
    >>> import numpy as np
    >>> from hf_federated.features import HiddenStatesCollator

    >>> examples = [{"inputs_embeds": np.ones(size, "float16").tobytes(), "labels": 0} for size in (2, 4)]
    >>> batch = HiddenStatesCollator(hidden_size=2, dtype="float16")(examples)
    >>> batch["inputs_embeds"].shape, batch["attention_mask"].tolist()
    (torch.Size([2, 2, 2]), [[1, 0], [1, 1]])

    ```
    """

    hidden_size: int
    dtype: str = "float16"

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """
        Collate encoded examples.

        Args:
            examples (`Sequence[Mapping[str, Any]]`): Examples with `inputs_embeds` as bytes, and numbers.

        Returns:
            `dict[str, torch.Tensor]`: `inputs_embeds` of shape `(batch, length, hidden_size)`, `attention_mask` of
            shape `(batch, length)`, and the numbers.
        """
        states = [np.frombuffer(each[HIDDEN_COLUMN], self.dtype).reshape(-1, self.hidden_size) for each in examples]
        length = max(map(len, states))
        padded = torch.zeros(len(states), length, self.hidden_size)
        mask = torch.zeros(len(states), length, dtype=torch.int64)
        for row, values in enumerate(states):
            padded[row, : len(values)] = torch.from_numpy(values.astype(np.float32))
            mask[row, : len(values)] = 1
        others = [name for name in examples[0] if name != HIDDEN_COLUMN]
        numbers = {name: torch.tensor([each[name] for each in examples]) for name in others}
        return {HIDDEN_COLUMN: padded, "attention_mask": mask, **numbers}


def num_frozen_blocks(freeze: str) -> int:
    """
    Return the number of frozen blocks.

    Args:
        freeze (`str`): The frozen part, such as `"embeddings+4"`.

    Raises:
        ValueError: If `freeze` has another format, or if it does not include the embeddings.
    """
    with_embeddings, number = parse_freeze(freeze)
    if not with_embeddings:
        raise ValueError(
            f"`freeze` is {freeze!r}, without the embeddings. Use 'embeddings+{number}' for hidden states."
        )
    return number


def stack_of(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """
    Return the list of the blocks of an encoder, with its name.

    Args:
        model (`PreTrainedModel`): The encoder, with or without a head.

    Raises:
        ValueError: If the blocks are not in one list, or share their weights.
    """
    blocks = model_layers(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and list(module) == blocks and not model.config.is_encoder_decoder:
            return name, module
    raise ValueError(
        f"{type(model).__name__} has no single list of blocks, so its hidden states cannot be cached. Use an encoder"
        " such as BERT, RoBERTa or DistilBERT, or fine-tune with `freeze` of FederatedConfig."
    )


def check_inputs(config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Two rows of tokens, of which the second one has padding."""
    ids = torch.arange(2 * _NUM_CHECKED).reshape(2, -1) % config.vocab_size
    mask = torch.ones_like(ids)
    mask[1, _NUM_CHECKED // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def hidden_states_of(base: Any, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the hidden states in front of each block and behind the last one, without gradients."""
    inputs = {name: value.to(base.device) for name, value in inputs.items()}
    states: tuple[torch.Tensor, ...] = base(**inputs, output_hidden_states=True).hidden_states
    return states


def check_equal(model: PreTrainedModel, found: torch.Tensor, expected: torch.Tensor) -> None:
    """
    Check that a part of a model computes what the whole model computes for the rows of `check_inputs`.

    Args:
        model (`PreTrainedModel`): The whole model.
        found (`torch.Tensor`): Logits, or hidden states of shape `(rows, length, hidden_size)`, of the part.
        expected (`torch.Tensor`): The values of the whole model.

    Raises:
        ValueError: If the values differ.
    """
    mask = check_inputs(model.config)["attention_mask"].bool().to(found.device)
    if found.ndim == 3:  # hidden states of padding are not used
        found, expected = found[mask], expected[mask]
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-3, atol=1e-4):
        raise ValueError(
            f"The parts of {type(model).__name__} do not compute what the whole model computes, so its hidden states"
            " cannot be cached. Use an encoder such as BERT, RoBERTa or DistilBERT, or fine-tune with `freeze` of"
            " FederatedConfig."
        )
