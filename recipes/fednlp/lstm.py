"""The LSTM baselines of FedNLP (Lin et al., 2022, appendix F.2). `prepare_lstm.py` writes them to a folder.

The folder contains a copy of this module, which therefore uses only torch and transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput, TokenClassifierOutput


class LSTMConfig(PreTrainedConfig):
    """
    The configuration of an LSTM.

    Args:
        vocab_size (`int`, *optional*, defaults to 8000): Number of words.
        hidden_size (`int`, *optional*, defaults to 100): Size of the word embeddings.
        lstm_size (`int`, *optional*, defaults to 128): Size of the state in each direction.
        bidirectional (`bool`, *optional*, defaults to `False`): Whether a second LSTM reads the text backwards.
        dropout (`float`, *optional*, defaults to 0.2): Dropout of the embeddings and of the states.
        pad_token_id (`int`, *optional*, defaults to 0): The word that pads a text.
    """

    model_type = "fednlp-lstm"

    def __init__(
        self,
        vocab_size: int = 8000,
        hidden_size: int = 100,
        lstm_size: int = 128,
        bidirectional: bool = False,
        dropout: float = 0.2,
        pad_token_id: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.lstm_size = lstm_size
        self.bidirectional = bidirectional
        self.dropout = dropout
        self.pad_token_id = pad_token_id


class _LSTMModel(PreTrainedModel):
    """Embeddings, an LSTM and a linear classifier."""

    config_class = LSTMConfig
    base_model_prefix = ""

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.lstm = nn.LSTM(config.hidden_size, config.lstm_size, batch_first=True, bidirectional=config.bidirectional)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.lstm_size * (2 if config.bidirectional else 1), config.num_labels)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def _init_weights(self, module: nn.Module) -> None:
        """The initial values of torch, except that embeddings have a standard deviation of 0.1."""
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.1)
            with torch.no_grad():
                module.weight[module.padding_idx].zero_()
        elif isinstance(module, nn.Linear | nn.LSTM):
            module.reset_parameters()

    def read(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """
        Read texts that are padded on the right.

        Args:
            input_ids (`torch.Tensor`): Words, of shape `(texts, words)`.
            attention_mask (`torch.Tensor`): 1 for each word and 0 for padding, of the same shape.

        Returns:
            `torch.Tensor`: The state after each word, of shape `(texts, words, size)`. It is 0 at padding.
        """
        lengths = attention_mask.sum(dim=1).clamp(min=1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(
            self.dropout(self.embeddings(input_ids)), lengths, batch_first=True, enforce_sorted=False
        )
        states, _ = self.lstm(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(states, batch_first=True, total_length=input_ids.shape[1])
        return self.dropout(padded)


class LSTMForSequenceClassification(_LSTMModel):
    """An LSTM that classifies a text by the mean of its states."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """
        Args:
            input_ids (`torch.Tensor`): Words, of shape `(texts, words)`.
            attention_mask (`torch.Tensor`): 1 for each word and 0 for padding, of the same shape.
            labels (`torch.Tensor`, *optional*): Classes, of shape `(texts,)`.
        """
        states = self.read(input_ids, attention_mask)
        logits = self.classifier(states.sum(dim=1) / attention_mask.sum(dim=1, keepdim=True).clamp(min=1))
        loss = None if labels is None else cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class LSTMForTokenClassification(_LSTMModel):
    """An LSTM that classifies each word by its states."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """
        Args:
            input_ids (`torch.Tensor`): Words, of shape `(texts, words)`.
            attention_mask (`torch.Tensor`): 1 for each word and 0 for padding, of the same shape.
            labels (`torch.Tensor`, *optional*): Classes, of shape `(texts, words)`; -100 has no loss.
        """
        logits = self.classifier(self.read(input_ids, attention_mask))
        loss = None if labels is None else cross_entropy(logits.flatten(0, 1), labels.flatten())
        return TokenClassifierOutput(loss=loss, logits=logits)
