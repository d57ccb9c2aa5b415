"""The data collators whose batches depend on their examples and on fixed settings only.

A pure collator draws no random numbers, keeps no state, and treats each example independently of the other examples of
the batch, except that it pads all examples to one length. [`ResidentRows`] therefore builds the batches of such a
collator from rows that it collated before. The list contains collators of transformers and of the tasks, not their
subclasses, and only with tokenizers that pad as transformers does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    DefaultDataCollator,
    default_data_collator,
)
from transformers.utils import PaddingStrategy

from .._compat import pads_as_transformers
from ..tasks.base import IGNORED
from ..tasks.causal import CausalCollator


@dataclass(frozen=True)
class PureCollator:
    """
    What determines the batches of a pure collator. Collators with equal descriptions return equal batches.

    Args:
        name (`str`): The collator.
        settings (`tuple`): All values that the batches depend on, in addition to the examples.
        padded (`tuple` of `(str, str, int)`): The columns that are padded to the longest example of a batch. Each has
            its name, the column whose length counts, and the padding value. All other columns have one shape.
        pads_left (`bool`): Whether the padding is on the left.
        multiple (`int`): The length of a padded batch is a multiple of this number.
    """

    name: str
    settings: tuple[Hashable, ...] = ()
    padded: tuple[tuple[str, str, int], ...] = ()
    pads_left: bool = False
    multiple: int = 1


def is_pure(collator: Any) -> bool:
    """
    Whether the batches of a collator depend on their examples and on fixed settings only.

    Args:
        collator (`Callable`): A data collator.

    Example:

    ```python
    >>> from transformers import default_data_collator
    >>> from hf_federated.clients.pure_collators import is_pure

    >>> is_pure(default_data_collator), is_pure(lambda examples: default_data_collator(examples))
    (True, False)

    ```
    """
    return describe(collator) is not None


def describe(collator: Any) -> PureCollator | None:
    """Return the description of a pure collator with its present settings, or `None` for all other collators."""
    if collator is default_data_collator:
        return PureCollator("default_data_collator")
    build = _PURE.get(type(collator))
    # An attribute that is no field could replace a method.
    if build is None or vars(collator).keys() != {field.name for field in dataclasses.fields(collator)}:
        return None
    return build(collator)


def _default(collator: DefaultDataCollator) -> PureCollator | None:
    return PureCollator("default_data_collator") if collator.return_tensors == "pt" else None


def _causal(collator: CausalCollator) -> PureCollator | None:
    if collator.continue_prompts:  # the padding side depends on the batch
        return None
    fills = {"input_ids": collator.pad_token_id, "attention_mask": 0, "labels": IGNORED}
    settings = (collator.pad_token_id, collator.with_attention_mask)
    return PureCollator("causal", settings, tuple((name, "input_ids", fill) for name, fill in fills.items()))


def _with_padding(collator: DataCollatorWithPadding) -> PureCollator | None:
    return _padded(collator, "input_ids")


def _token_classification(collator: DataCollatorForTokenClassification) -> PureCollator | None:
    return _padded(collator, "input_ids", collator.label_pad_token_id)


def _seq2seq(collator: DataCollatorForSeq2Seq) -> PureCollator | None:
    # A model may compute inputs of its decoder from the padded labels.
    return _padded(collator, "labels", collator.label_pad_token_id) if collator.model is None else None


def _padded(collator: Any, length_of_labels: str, label_fill: int | None = None) -> PureCollator | None:
    """
    The description of a collator that pads with its tokenizer.

    Args:
        collator (`Any`): The collator.
        length_of_labels (`str`): The column whose length is the length of the labels.
        label_fill (`int`, *optional*): Padding value of labels. By default the labels are not padded.
    """
    tokenizer = collator.tokenizer
    if collator.return_tensors != "pt" or not pads_as_transformers(tokenizer):
        return None
    names, fill = tuple(tokenizer.model_input_names), tokenizer.pad_token_id
    if names[:1] != ("input_ids",) or tokenizer.padding_side not in ("left", "right"):
        return None
    multiple = collator.pad_to_multiple_of
    name = type(collator).__name__
    of_tokenizer = (names, fill, tokenizer.pad_token_type_id, tokenizer.model_max_length, tokenizer.padding_side)
    settings = (collator.padding, collator.max_length, multiple, label_fill, *of_tokenizer)
    if collator.padding not in (True, "longest", PaddingStrategy.LONGEST):
        # Without padding, and with padding to a fixed length, all examples must have one length.
        return PureCollator(name, settings)
    fills = {"input_ids": fill, "token_type_ids": tokenizer.pad_token_type_id, "special_tokens_mask": 1}
    if "attention_mask" in names:
        fills["attention_mask"] = 0
    padded = [(column, "input_ids", value) for column, value in fills.items()]
    if label_fill is not None:
        padded += [(column, length_of_labels, label_fill) for column in ("label", "labels")]
    return PureCollator(name, settings, tuple(padded), tokenizer.padding_side == "left", multiple or 1)


_PURE: dict[type, Callable[[Any], PureCollator | None]] = {
    CausalCollator: _causal,
    DataCollatorForSeq2Seq: _seq2seq,
    DataCollatorForTokenClassification: _token_classification,
    DataCollatorWithPadding: _with_padding,
    DefaultDataCollator: _default,
}
