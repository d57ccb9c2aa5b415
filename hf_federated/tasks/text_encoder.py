"""`TextEncoder`: the base class of encoders that a task uses in place of a tokenizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar


class TextEncoder(ABC):
    """
    Base class of encoders that take the place of a tokenizer. They convert texts to the inputs of a head.

    [`TextClassification`] calls a text encoder as it calls a tokenizer. The features of the encoder replace token ids
    in the encoded examples, and the encoder is the `processing_class` of the trainer.

    Example:

    ```python
    >>> from transformers import default_data_collator
    >>> from hf_federated.tasks import TextClassification, TextEncoder

    >>> class LengthEncoder(TextEncoder):
    ...     digest = "length"
    ...     data_collator = staticmethod(lambda: default_data_collator)
    ...     def __call__(self, *texts, truncation=True, max_length=None, return_attention_mask=True):
    ...         return {"features": [[float(len(text)) for text in row] for row in zip(*texts)]}

    >>> task = TextClassification(label_names=["bad", "good"])
    >>> task.encode({"text": ["fine", "bad"], "label": [1, 0]}, LengthEncoder())
    {'features': [[4.0], [3.0]], 'labels': [1, 0]}

    ```
    """

    # Names of the columns with token ids, as in a tokenizer.
    model_input_names: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def digest(self) -> str:
        """A hash of everything that determines the features of a text, except the maximum length."""

    @abstractmethod
    def __call__(
        self,
        *texts: Sequence[str],
        truncation: bool = True,
        max_length: int | None = None,
        return_attention_mask: bool = True,
    ) -> dict[str, Any]:
        """
        Return the columns with the features of the texts.

        Args:
            texts (`Sequence[str]`): The texts. Text pairs are two sequences.
            truncation (`bool`, *optional*, defaults to `True`): Must be `True`. Texts are always truncated.
            max_length (`int`, *optional*): Maximum number of tokens. Defaults to the maximum of the encoder.
            return_attention_mask (`bool`, *optional*): Not used. The argument makes the call that of a tokenizer.
        """

    @abstractmethod
    def data_collator(self) -> Any:
        """Return the data collator for encoded examples."""
