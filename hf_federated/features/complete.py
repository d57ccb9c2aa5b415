"""Join a trained head with its encoder, so that the result takes token ids as any other model."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from .blocks import BlocksClassifier
from .encoder import FrozenEncoder, PretrainedEncoder
from .heads import FeatureClassifier, FeatureClassifierConfig
from .hidden_states import FrozenLayers
from .pooling import pool


class EncoderClassifierConfig(PretrainedConfig):
    """
    Config of an [`EncoderClassifier`].

    Args:
        encoder (`dict[str, Any]`, *optional*): Config of the encoder, with `model_type`.
        head (`dict[str, Any]`, *optional*): Config of the [`FeatureClassifier`].
        pooling (`str`, *optional*, defaults to `"mean"`): Pooling of the hidden states, as in [`FrozenEncoder`].
        kwargs (*optional*): Further arguments of `PretrainedConfig`, such as `num_labels` and `id2label`.

    Example:

    ```python
    >>> from hf_federated.features import EncoderClassifierConfig

    >>> EncoderClassifierConfig(encoder={"model_type": "bert"}, head={"feature_size": 768}).pooling
    'mean'

    ```
    """

    model_type = "hf_federated_encoder_classifier"

    def __init__(
        self,
        encoder: dict[str, Any] | None = None,
        head: dict[str, Any] | None = None,
        pooling: str = "mean",
        **kwargs: Any,
    ) -> None:
        self.encoder = encoder or {}
        self.head = head or {}
        self.pooling = pooling
        super().__init__(**kwargs)


class EncoderClassifier(PreTrainedModel):
    """
    A frozen encoder and a head that was trained on its features, as one model.

    Args:
        config ([`EncoderClassifierConfig`]): The configs of both.

    Example:

    ```python
    >>> import torch
    >>> from transformers import BertConfig
    >>> from hf_federated.features import EncoderClassifier, EncoderClassifierConfig

    >>> encoder = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2).to_dict()
    >>> model = EncoderClassifier(EncoderClassifierConfig(encoder, {"feature_size": 8, "num_labels": 3}))
    >>> model(input_ids=torch.ones(2, 4, dtype=torch.int64)).logits.shape
    torch.Size([2, 3])

    ```
    """

    config_class = EncoderClassifierConfig
    base_model_prefix = "encoder"
    accepts_loss_kwargs: ClassVar[bool] = False

    def __init__(self, config: EncoderClassifierConfig) -> None:
        super().__init__(config)
        self.encoder = AutoModel.from_config(AutoConfig.for_model(**config.encoder))
        self.head = FeatureClassifier(FeatureClassifierConfig(**config.head))
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """
        Compute the logits of texts, and the mean cross-entropy.

        Args:
            input_ids (`torch.Tensor` of shape `(batch, length)`, *optional*): Token ids.
            attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): 1 for tokens, 0 for padding.
            token_type_ids (`torch.Tensor` of shape `(batch, length)`, *optional*): As in the encoder.
            inputs_embeds (`torch.Tensor` of shape `(batch, length, hidden_size)`, *optional*): Word embeddings, in
                place of `input_ids`.
            labels (`torch.Tensor` of shape `(batch,)`, *optional*): Label ids.
        """
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        words = {"input_ids": input_ids} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}
        hidden = self.encoder(**words, attention_mask=attention_mask, **types)[0]
        output: SequenceClassifierOutput = self.head(pool(hidden, attention_mask, self.config.pooling), labels)
        return output


def complete_model(head: PreTrainedModel, encoder: PretrainedEncoder) -> PreTrainedModel:
    """
    Join a trained head with its encoder.

    Save the tokenizer, `encoder.tokenizer`, with the model. The maximum length of the run is not part of the model.

    Args:
        head ([`FeatureClassifier`] or [`BlocksClassifier`]): The trained head. LoRA layers must be merged.
        encoder ([`FrozenEncoder`] or [`FrozenLayers`]): The encoder of its features.

    Returns:
        `PreTrainedModel`: An [`EncoderClassifier`], or for a [`BlocksClassifier`] the model class of `transformers`,
        such as `BertForSequenceClassification`.

    Raises:
        ValueError: If head and encoder do not belong together.

    Example:

    ```python
    >>> from hf_federated.features import FeatureClassifier, FeatureClassifierConfig, FrozenEncoder, complete_model
    >>> from transformers import BertConfig, BertModel

    >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> BertModel(config).save_pretrained("m")
    >>> head = FeatureClassifier(FeatureClassifierConfig(feature_size=8))
    >>> type(complete_model(head, FrozenEncoder("m"))).__name__
    'EncoderClassifier'

    ```
    """
    labels = {name: getattr(head.config, name) for name in ("id2label", "label2id")}
    if isinstance(head, FeatureClassifier) and isinstance(encoder, FrozenEncoder):
        if head.config.feature_size != encoder.feature_size:
            raise ValueError(
                f"The head has {head.config.feature_size} features, but {encoder.name_or_path} has"
                f" {encoder.feature_size}. Pass the encoder that the head was trained with."
            )
        pretrained = encoder.model
        config = EncoderClassifierConfig(pretrained.config.to_dict(), head.config.to_dict(), encoder.pooling, **labels)
        joined = EncoderClassifier(config)
        joined.encoder.load_state_dict(pretrained.state_dict())
        joined.head.load_state_dict(head.state_dict())
        return joined.eval()
    if isinstance(head, BlocksClassifier) and isinstance(encoder, FrozenLayers):
        if head.config.freeze != encoder.freeze:
            raise ValueError(
                f"The head has freeze={head.config.freeze!r}, but the encoder has freeze={encoder.freeze!r}. Pass the"
                " encoder that the head was trained with."
            )
        whole: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
            encoder.name_or_path, revision=encoder.revision, **encoder.kwargs, **labels
        )
        whole.load_state_dict(head.whole_state(), strict=False)
        return whole.eval()
    raise ValueError(
        f"A {type(head).__name__} does not belong to a {type(encoder).__name__}. Join a FeatureClassifier with a"
        " FrozenEncoder, or a BlocksClassifier with FrozenLayers."
    )


AutoConfig.register(EncoderClassifierConfig.model_type, EncoderClassifierConfig, exist_ok=True)
AutoModelForSequenceClassification.register(EncoderClassifierConfig, EncoderClassifier, exist_ok=True)
