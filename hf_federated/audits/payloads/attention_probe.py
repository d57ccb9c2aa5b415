"""The inputs of the first two attention layers, and the spans of the changes of these layers, for [`Dager`]."""

from __future__ import annotations

import math
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers.pytorch_utils import Conv1D

from ...adapters import copy_model
from ...adapters.freezing import model_layers
from .evidence import Payload


# Number of sequences that are run through the model at a time.
BATCH_SIZE = 256
# Two inputs are equal if their relative difference is smaller.
_SAME_INPUT = 1e-4


class NoSpanError(ValueError):
    """The payload has no change of the first two attention layers."""


class _Stop(Exception):
    """Ends a forward pass after the input of a layer is known."""


class AttentionProbe:
    """
    The inputs of the first two attention layers under the sent state, and the spans of their changes.

    Args:
        model (`torch.nn.Module`): The model. It is copied.
        payload ([`Payload`]): The payload.
    """

    def __init__(self, model: nn.Module, payload: Payload) -> None:
        self._model: Any = copy_model(model).cpu().eval()
        parameters: dict[str, nn.Parameter] = dict(self._model.named_parameters())
        for name, value in payload.before.items():
            if name in parameters:
                parameters[name].data.copy_(value)
        base: Any = self._model.get_base_model() if isinstance(self._model, PeftModel) else self._model
        layers = model_layers(base)[:2]
        if len(layers) < 2:
            raise NoSpanError(f"{type(base).__name__} has fewer than two attention layers.")
        self.vocabulary_size = len(base.get_input_embeddings().weight)
        self.max_positions = int(getattr(base.config, "max_position_embeddings", 0) or 2**30)
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._readers, self._spans = [], []
        for layer in layers:
            readers = self._find_readers(layer)
            matrices = []
            for module in readers:
                weight = module.weight
                name = names[id(weight)]
                if name in payload.after:
                    change = payload.change(name)
                    matrices.append(change.T if isinstance(module, Conv1D) else change)
            self._readers.append(readers[0])
            self._spans.append(_span(matrices).to(weight.dtype))

    def _find_readers(self, layer: nn.Module) -> list[Any]:
        """Return the linear layers of a block that read the same tensor as its first linear layer."""
        seen: list[tuple[nn.Module, torch.Tensor]] = []
        handles = [
            module.register_forward_pre_hook(lambda module, inputs: seen.append((module, inputs[0])))
            for module in layer.modules()
            if isinstance(module, (nn.Linear, Conv1D))
        ]
        try:
            with torch.no_grad():
                self._model(input_ids=torch.tensor([[1, 2]]))
        finally:
            for handle in handles:
                handle.remove()
        first = seen[0][1]
        return [module for module, given in seen if given.shape == first.shape and torch.equal(given, first)]

    def _inputs(self, layer: int, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the inputs of an attention layer, of shape `(num_sequences, length, hidden)`."""
        captured: list[torch.Tensor] = []

        def stop(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            captured.append(inputs[0])
            raise _Stop

        handle = self._readers[layer].register_forward_pre_hook(stop)
        try:
            self._model(input_ids=token_ids, attention_mask=torch.ones_like(token_ids))
        except _Stop:
            pass
        finally:
            handle.remove()
        return captured[0]

    @torch.no_grad()
    def distance(self, layer: int, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the relative distance of each input to the span, of shape `(num_sequences, length)`."""
        return self._relative_distance(layer, self._inputs(layer, token_ids))

    def _relative_distance(self, layer: int, inputs: torch.Tensor) -> torch.Tensor:
        span = self._spans[layer]
        outside = inputs - inputs @ span.T @ span
        lengths = inputs.norm(dim=-1)
        # The embedding of a padding token is zero, which is in every span.
        return (outside.norm(dim=-1) / lengths).masked_fill(lengths == 0, math.inf)

    def sequence_distances(self, sequences: list[list[int]]) -> list[float]:
        """Return the mean distance of the positions of each sequence at the second layer."""
        parts = [torch.tensor(sequences[start : start + BATCH_SIZE]) for start in range(0, len(sequences), BATCH_SIZE)]
        return [distance for part in parts for distance in self.distance(1, part).mean(1).tolist()]

    @torch.no_grad()
    def last_distances(self, sequences: list[list[int]]) -> list[float]:
        """
        Return the distance of the last position of each sequence at the second layer.

        The distance is infinite if the input equals the input of the previous position. With rotary positions, this is
        the case for a first token that is repeated. Such an input is in the span for any number of repetitions.
        """
        distances: list[float] = []
        for start in range(0, len(sequences), BATCH_SIZE):
            inputs = self._inputs(1, torch.tensor(sequences[start : start + BATCH_SIZE]))
            values = self._relative_distance(1, inputs[:, -1])
            if inputs.shape[1] > 1:
                last, previous = inputs[:, -1], inputs[:, -2]
                is_repeated = (last - previous).norm(dim=-1) < _SAME_INPUT * last.norm(dim=-1)
                values = values.masked_fill(is_repeated, math.inf)
            distances += values.tolist()
        return distances

    def is_causal(self) -> bool:
        """Return whether the input of the second layer at a position ignores later tokens."""
        pair = torch.tensor([[1, 2, 3], [1, 2, 4]])
        with torch.no_grad():
            first, second = self._inputs(1, pair)[:, 0]
        return torch.equal(first, second)


def _span(matrices: list[torch.Tensor]) -> torch.Tensor:
    """
    Return an orthonormal basis of the common row space of matrices, of shape `(rank, hidden)`.

    Raises:
        NoSpanError: If there is no matrix, or if all are zero.
    """
    if not matrices:
        raise NoSpanError("The payload does not contain the first two attention layers or an adapter of them.")
    stacked = torch.cat(matrices)
    size = stacked.shape[1]
    _, values, directions = torch.linalg.svd(stacked, full_matrices=False)
    if not values[0] > 0:
        raise NoSpanError("The change of the attention layer is zero.")
    floor = torch.finfo(torch.float64).eps * max(stacked.shape) * values[0]
    if len(values) == size and values[-1] > floor:
        # Singular values of noise stay below this multiple of their median (Gavish and Donoho 2014, equation 5).
        ratio = size / len(stacked)
        factor = 0.56 * ratio**3 - 0.95 * ratio**2 + 1.82 * ratio + 1.43
        floor = torch.maximum(floor, factor * values.median())
    return directions[: int((values > floor).sum())]
