"""Heads that are trained on cached features: a logistic regression, or a small network."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from ..utils.arguments import require, require_count


class FeatureClassifierConfig(PretrainedConfig):
    """
    Config of a [`FeatureClassifier`].

    Args:
        feature_size (`int`, *optional*, defaults to `384`): Number of values of a feature vector.
        hidden_sizes (`list[int]`, *optional*, defaults to `[]`): Units of each hidden layer. An empty list is a
            logistic regression.
        dropout (`float`, *optional*, defaults to `0.0`): Probability of dropout after each hidden layer.
        kwargs (*optional*): Further arguments of `PretrainedConfig`, such as `num_labels` and `id2label`.

    Raises:
        ValueError: If a size is smaller than one, or if `dropout` is not at least 0 and below 1.

    Example:

    ```python
    >>> from hf_federated.features import FeatureClassifierConfig

    >>> FeatureClassifierConfig(feature_size=8, hidden_sizes=[16], num_labels=3).hidden_sizes
    [16]

    ```
    """

    model_type = "hf_federated_features"

    def __init__(
        self,
        feature_size: int = 384,
        hidden_sizes: list[int] | tuple[int, ...] = (),
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> None:
        require_count("feature_size", feature_size, 1)
        for size in hidden_sizes:
            require_count("hidden_sizes", size, 1)
        require("dropout", dropout, 0 <= dropout < 1, "at least 0 and below 1")
        self.feature_size = feature_size
        self.hidden_sizes = list(hidden_sizes)
        self.dropout = dropout
        super().__init__(**kwargs)


class FeatureClassifier(PreTrainedModel):
    """
    A classifier of feature vectors: linear probing, or a multilayer perceptron.

    Its inputs are the features of [`FrozenEncoder`] or [`TfidfEncoder`]. Averaging methods, distillation methods and
    secure aggregation train it as any other model. [`complete_model`] joins it with its encoder.

    Source: [Understanding intermediate layers using linear classifier probes](https://arxiv.org/abs/1610.01644).

    Args:
        config ([`FeatureClassifierConfig`]): The sizes and the labels.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.features import FeatureClassifier, FeatureClassifierConfig

    >>> head = FeatureClassifier(FeatureClassifierConfig(feature_size=4, num_labels=3))
    >>> head(features=torch.zeros(2, 4), labels=torch.tensor([0, 2])).logits.shape
    torch.Size([2, 3])
    >>> head.num_parameters()
    15

    ```
    """

    config_class = FeatureClassifierConfig
    base_model_prefix = "hidden"
    main_input_name = "features"
    accepts_loss_kwargs: ClassVar[bool] = False

    def __init__(self, config: FeatureClassifierConfig) -> None:
        super().__init__(config)
        self.hidden = HiddenLayers(config)
        self.classifier = nn.Linear([config.feature_size, *config.hidden_sizes][-1], config.num_labels)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()

    def get_input_embeddings(self) -> nn.Module:
        """The hidden layers. A model on features has no table of embeddings."""
        return self.hidden

    def forward(self, features: torch.Tensor, labels: torch.Tensor | None = None) -> SequenceClassifierOutput:
        """
        Compute the logits of feature vectors, and the mean cross-entropy.

        Args:
            features (`torch.Tensor` of shape `(batch, feature_size)`): Feature vectors.
            labels (`torch.Tensor` of shape `(batch,)`, *optional*): Label ids. A label of -100 is skipped.
        """
        logits = self.classifier(self.hidden(features)[0].squeeze(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class HiddenLayers(nn.Module):
    """
    The layers of a [`FeatureClassifier`] below its output. As a base model, they return one vector per position.

    Args:
        config ([`FeatureClassifierConfig`]): The sizes of the layers.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.features.heads import FeatureClassifierConfig, HiddenLayers

    >>> HiddenLayers(FeatureClassifierConfig(feature_size=4, hidden_sizes=[5]))(torch.zeros(2, 4))[0].shape
    torch.Size([2, 1, 5])

    ```
    """

    def __init__(self, config: FeatureClassifierConfig) -> None:
        super().__init__()
        sizes = [config.feature_size, *config.hidden_sizes]
        self.layers = nn.ModuleList(nn.Linear(*each) for each in zip(sizes, sizes[1:], strict=False))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor]:
        """
        Apply the layers.

        Args:
            features (`torch.Tensor` of shape `(batch, feature_size)`): Feature vectors.

        Returns:
            `tuple[torch.Tensor]`: A tensor of shape `(batch, 1, units)`.
        """
        values = features
        for layer in self.layers:
            values = self.dropout(nn.functional.relu(layer(values)))
        return (values.unsqueeze(1),)


AutoConfig.register(FeatureClassifierConfig.model_type, FeatureClassifierConfig, exist_ok=True)
AutoModelForSequenceClassification.register(FeatureClassifierConfig, FeatureClassifier, exist_ok=True)
