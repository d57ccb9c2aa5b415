"""The remaining blocks of a model whose embeddings and first blocks are frozen, on cached hidden states.

`freeze_layers` computes the frozen part again for each batch. Here it runs once for each text, and the clients train
the other blocks on its hidden states. Dropout of the frozen part is off, so a run differs from a run with
`freeze_layers` unless the model has no dropout.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from .hidden_states import (
    HIDDEN_COLUMN,
    check_equal,
    check_inputs,
    hidden_states_of,
    num_frozen_blocks,
    stack_of,
)


class BlocksClassifierConfig(PretrainedConfig):
    """
    Config of a [`BlocksClassifier`].

    Args:
        whole (`dict[str, Any]`, *optional*): Config of the whole model, with `model_type`.
        freeze (`str`, *optional*, defaults to `"embeddings"`): The frozen part of the whole model.
        kwargs (*optional*): Further arguments of `PretrainedConfig`, such as `num_labels` and `id2label`.

    Example:

    ```python
    >>> from hf_federated.features import BlocksClassifierConfig

    >>> BlocksClassifierConfig(whole={"model_type": "bert"}, freeze="embeddings+4").freeze
    'embeddings+4'

    ```
    """

    model_type = "hf_federated_blocks"

    def __init__(self, whole: dict[str, Any] | None = None, freeze: str = "embeddings", **kwargs: Any) -> None:
        self.whole = whole or {}
        self.freeze = freeze
        super().__init__(**kwargs)


class BlocksClassifier(PreTrainedModel):
    """
    The blocks of a sequence classification model above its frozen part, with the head of the model.

    Its inputs are the hidden states of [`FrozenLayers`]. LoRA can be applied with `target_modules`. The model supports
    encoders whose base model has a module `embeddings` and one stack of blocks, such as BERT, RoBERTa and DistilBERT.

    Args:
        config ([`BlocksClassifierConfig`]): The config of the whole model, and its frozen part.

    Example:

    ```python
    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> from hf_federated.features import BlocksClassifier

    >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=3, num_attention_heads=2)
    >>> head = BlocksClassifier.from_model(BertForSequenceClassification(config), "embeddings+2")
    >>> len(head.model.bert.encoder.layer)
    1

    ```
    """

    config_class = BlocksClassifierConfig
    main_input_name = HIDDEN_COLUMN
    accepts_loss_kwargs: ClassVar[bool] = False

    def __init__(self, config: BlocksClassifierConfig) -> None:
        super().__init__(config)
        whole = AutoConfig.for_model(**config.whole)
        whole.num_hidden_layers -= num_frozen_blocks(config.freeze)
        self.model = AutoModelForSequenceClassification.from_config(whole)
        self.model.base_model.embeddings = HiddenStates()
        self.post_init()

    @classmethod
    def from_model(cls, model: PreTrainedModel, freeze: str) -> BlocksClassifier:
        """
        Take the blocks above the frozen part from a whole model.

        Args:
            model (`PreTrainedModel`): A sequence classification model. It is not changed.
            freeze (`str`): The frozen part, such as `"embeddings+4"`.

        Raises:
            ValueError: If `freeze` does not include the embeddings, the model has too few blocks, or the parts of the
                model do not compute what the whole model computes.
        """
        name, stack = stack_of(model)
        number = num_frozen_blocks(freeze)
        if number > len(stack):
            raise ValueError(
                f"`freeze` is {freeze!r}; {type(model).__name__} has {len(stack)} blocks. Use a smaller number."
            )
        labels = {key: getattr(model.config, key) for key in ("id2label", "label2id")}
        head = cls(BlocksClassifierConfig(whole=model.config.to_dict(), freeze=freeze, **labels)).to(model.dtype)
        whole = model.state_dict()
        head.model.load_state_dict({key: whole[_name_in_whole(key, name, number)] for key in head.model.state_dict()})
        head.train(model.training)
        _check_head(model, head, number)
        return head

    @property
    def base_model(self) -> Any:
        """The blocks without the head of the model."""
        return self.model.base_model

    def get_input_embeddings(self) -> nn.Module:
        """The module in place of the embeddings. It has no weights."""
        embeddings: nn.Module = self.model.base_model.embeddings
        return embeddings

    def forward(
        self,
        inputs_embeds: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        input_ids: None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """
        Compute the logits, and the loss of the whole model.

        Args:
            inputs_embeds (`torch.Tensor` of shape `(batch, length, hidden_size)`): Hidden states of the frozen part.
            attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): 1 for tokens, 0 for padding.
            labels (`torch.Tensor` of shape `(batch,)`, *optional*): Label ids.
            input_ids (*optional*): Must be `None`. PEFT passes the argument.
            output_attentions (`bool`, *optional*): As in the whole model.
            output_hidden_states (`bool`, *optional*): As in the whole model.
            return_dict (`bool`, *optional*): As in the whole model.
        """
        dtype = self.dtype
        return self.model(
            inputs_embeds=None if inputs_embeds is None else inputs_embeds.to(dtype),
            attention_mask=attention_mask,
            labels=labels,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
        )

    def whole_state(self) -> dict[str, torch.Tensor]:
        """Return the weights by their names in the whole model."""
        name, _ = stack_of(self.model)
        number = num_frozen_blocks(self.config.freeze)
        return {_name_in_whole(key, name, number): value for key, value in self.model.state_dict().items()}


class HiddenStates(nn.Module):
    """
    Takes the place of the embeddings of a model, and returns the hidden states that the model received.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.features.blocks import HiddenStates

    >>> HiddenStates()(inputs_embeds=torch.ones(1, 1, 2))
    tensor([[[1., 1.]]])

    ```
    """

    def forward(
        self, input_ids: Any = None, inputs_embeds: torch.Tensor | None = None, *others: Any, **kwargs: Any
    ) -> torch.Tensor:
        """
        Return `inputs_embeds`.

        Args:
            input_ids (*optional*): Not used.
            inputs_embeds (`torch.Tensor`): The hidden states.
            others (*optional*): Further arguments of an embedding module. They are not used.
            kwargs (*optional*): Further arguments of an embedding module. They are not used.
        """
        if inputs_embeds is None:
            raise ValueError("The model has no embeddings. Pass hidden states as `inputs_embeds`, not `input_ids`.")
        return inputs_embeds


def _name_in_whole(name: str, stack: str, number: int) -> str:
    if not name.startswith(f"{stack}."):
        return name
    block, _, rest = name.removeprefix(f"{stack}.").partition(".")
    return f"{stack}.{int(block) + number}.{rest}"


@torch.no_grad()
def _check_head(model: Any, head: BlocksClassifier, number: int) -> None:
    inputs = check_inputs(model.config)
    was_training = model.training
    model.eval(), head.eval()
    try:
        hidden = hidden_states_of(model.base_model, inputs)[number]
        expected = model(**inputs).logits
        found = head(inputs_embeds=hidden, attention_mask=inputs["attention_mask"]).logits
    finally:
        model.train(was_training), head.train(was_training)
    check_equal(model, found, expected)


AutoConfig.register(BlocksClassifierConfig.model_type, BlocksClassifierConfig, exist_ok=True)
AutoModelForSequenceClassification.register(BlocksClassifierConfig, BlocksClassifier, exist_ok=True)
