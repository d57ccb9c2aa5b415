"""`ClientSpec`: the model, tokenizer and training arguments of one client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig
from transformers import PreTrainedModel, TrainingArguments


@dataclass
class ClientSpec:
    """
    A client with its own model, tokenizer, training arguments or LoRA configuration.

    Use it if clients differ: a hospital with a small GPU trains DistilBERT, and another hospital trains RoBERTa.

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
        peft_config (`peft.LoraConfig`, *optional*):
            The client's LoRA configuration, of which `r`, `lora_alpha` and `use_rslora` are used. The rank is at most
            the rank of the server's model. It requires `aggregation="stacked_lora"`.

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
    peft_config: LoraConfig | None = None

    @property
    def has_own_model(self) -> bool:
        """Whether the client may have another model, tokenizer or training arguments than the server."""
        return any(value is not None for value in (self.model, self.processing_class, self.args))
