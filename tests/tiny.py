"""The smallest objects that `Trainer` can train, from the conformance kit, and comparisons of models.

```python
trainer = FederatedTrainer(
    model=tiny_model(), args=arguments(tmp_path), train_dataset={"a": rows(8), "b": rows(8, seed=1)}
)
```

`federations.py` builds such a trainer with one call.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from hf_federated._compat import HAS_ACTIVATION_CHECKPOINTING
from hf_federated.testing import tiny_arguments, tiny_dataset, tiny_model
from hf_federated.testing.tiny import ROW_LENGTH, VOCAB_SIZE


__all__ = ["ROW_LENGTH", "VOCAB_SIZE", "arguments", "rows", "tiny_model"]

rows = functools.lru_cache(maxsize=256)(tiny_dataset)  # no test changes a data set in place


def arguments(output_dir: str | os.PathLike[str], **kwargs: Any) -> TrainingArguments:
    """Training arguments as those of the conformance kit, under the names of the installed transformers."""
    return tiny_arguments(output_dir, **supported_names(kwargs))


def supported_names(values: dict[str, Any]) -> dict[str, Any]:
    """Training arguments under the names of the installed transformers (`hf_federated/_compat.py`)."""
    if HAS_ACTIVATION_CHECKPOINTING:
        return values
    old = "gradient_checkpointing"
    return {name.replace("activation_checkpointing", old): value for name, value in values.items()}


def checkpoints_activations(model: Any) -> bool:
    """Whether activation checkpointing of a model is on."""
    return model.is_activation_checkpointing if HAS_ACTIVATION_CHECKPOINTING else model.is_gradient_checkpointing


def same_weights(model_a: nn.Module, model_b: nn.Module) -> bool:
    """Whether two models have the same names and bit-identical parameters and buffers."""
    a, b = model_a.state_dict(), model_b.state_dict()
    return list(a) == list(b) and all(_bits(a[name]) == _bits(b[name]) for name in a)


def _bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    # A comparison of bytes distinguishes 0.0 from -0.0 and treats identical NaN values as equal; `==` does neither.
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tensor.shape, raw
