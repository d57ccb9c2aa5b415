"""`ClientSpec`: the model, tokenizer and training arguments of one client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, TrainingArguments


@dataclass
class ClientSpec:
    """
    A client with its own model, tokenizer or training arguments.

    Fields that are not set default to the server's values.

    Args:
        model (`str`, `PreTrainedModel` or `Callable[[], PreTrainedModel]`, *optional*):
            One of the following: a name or path, which the trainer's `task` loads; a model, whose copy the client
            trains; or a function that builds the model each time it is loaded into memory. By default the client
            trains a copy of the server's model as it is before the first round.
        processing_class (`PreTrainedTokenizerBase`, *optional*):
            The client's tokenizer. It requires raw datasets and a trainer with a `task`.
        args (`TrainingArguments`, *optional*):
            The client's training arguments: batch size, learning rate, optimizer. The federation sets the length of
            local training.

    Example:

    ```python
    >>> from hf_federated import ClientSpec

    >>> ClientSpec(model="roberta-base").processing_class is None
    True
    ```
    """

    model: str | PreTrainedModel | Callable[[], PreTrainedModel] | None = None
    processing_class: Any = None
    args: TrainingArguments | None = None
