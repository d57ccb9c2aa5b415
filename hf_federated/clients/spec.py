"""`ClientSpec`: what one client has of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, TrainingArguments


@dataclass
class ClientSpec:
    """
    A client that differs: its model, tokenizer or training arguments. What it does not say is the server's.

    Args:
        model (`str`, `PreTrainedModel` or `Callable[[], PreTrainedModel]`, *optional*):
            A name or path, which the trainer's `task` loads; a model, which is trained as it is; or a function that
            makes one whenever it is needed in memory. By default a copy of the server's as it is before the first
            round.
        processing_class (`PreTrainedTokenizerBase`, *optional*):
            The client's tokenizer. Rows must then be raw, and the trainer have a `task`.
        args (`TrainingArguments`, *optional*):
            The client's: batch size, learning rate, optimizer. How long it trains is the federation's.

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
