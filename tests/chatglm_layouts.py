"""Small models with the attributes and calling conventions of ChatGLM's model classes, for both generations.

The models have ChatGLM's layout: module names, hidden states with the sequence dimension first, tuples as outputs,
masks and positions computed from token ids, and past keys and values of shape `(sequence, batch, heads, size)`.
Attention and feed-forward layers are the simplest layers that depend on every argument.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss


class ChatGlmConfig(PretrainedConfig):
    model_type = "chatglm"

    def __init__(self, generation: int = 1, num_layers: int = 5, **kwargs: Any) -> None:
        self.generation = generation
        self.vocab_size = 40
        self.hidden_size = 16
        self.num_layers = num_layers
        self.num_attention_heads = 2
        if generation == 1:
            self.max_sequence_length = 32
            self.position_encoding_2d = True
            self.mask_token_id = 36
            self.gmask_token_id = 37
        else:
            self.seq_length = 32
            self.multi_query_attention = True
            self.multi_query_group_num = 1
            self.kv_channels = 8
        super().__init__(
            **{"bos_token_id": 38, "eos_token_id": 39, "pad_token_id": 3, "tie_word_embeddings": False, **kwargs}
        )


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masked: torch.Tensor | None) -> torch.Tensor:
    """Attention over `(sequence, batch, heads, size)`; `masked` is `(batch, 1, sequence, past + sequence)`."""
    key, value = (states.expand(-1, -1, query.shape[2], -1) for states in (key, value))
    scores = torch.einsum("qbnh,kbnh->bnqk", query, key) / query.shape[-1] ** 0.5
    if masked is None:
        assert len(query) == len(key)
        masked = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    return torch.einsum("bnqk,kbnh->qbnh", scores.masked_fill(masked, -1e4).softmax(-1), value).flatten(2)


class Block(nn.Module):
    """Base class of the blocks of both generations."""

    def __init__(self, config: ChatGlmConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.head_size = size // config.num_attention_heads
        groups = getattr(config, "multi_query_group_num", config.num_attention_heads)
        self.sizes = [size, groups * self.head_size, groups * self.head_size]
        self.input_layernorm = nn.LayerNorm(size)
        self.query_key_value = nn.Linear(size, sum(self.sizes))
        self.mlp = nn.Linear(size, size)

    def mix(self, hidden: torch.Tensor, factor: torch.Tensor, masked: Any, past: Any, use_cache: bool) -> Any:
        """Return the hidden states after the block and, with `use_cache`, its keys and values."""
        mixed = self.query_key_value(self.input_layernorm(hidden)).split(self.sizes, dim=-1)
        query, key, value = (states.unflatten(-1, (-1, self.head_size)) for states in mixed)
        query, key = query * factor, key * factor
        if past is not None:
            key, value = torch.cat((past[0], key)), torch.cat((past[1], value))
        hidden = hidden + attend(query, key, value, masked)
        return hidden + self.mlp(hidden).tanh(), (key, value) if use_cache else None


class Block1(Block):
    """Block of the first generation, which takes two-dimensional positions and the index of the block."""

    def forward(
        self,
        hidden: torch.Tensor,
        position_ids: Any,
        attention_mask: Any,
        layer_id: Any,
        layer_past: Any = None,
        use_cache: bool = False,
    ) -> tuple[Any, ...]:
        # (batch, 2, sequence) -> (sequence, batch, 1, 1)
        first, second = (ids.float().t()[..., None, None] for ids in position_ids.unbind(1))
        factor = (first.sin() + 0.5 * second.cos()) * (1 + 0.1 * layer_id)
        hidden, present = self.mix(hidden, factor, attention_mask, layer_past, use_cache)
        return (hidden, present) if use_cache else (hidden,)


class Block2(Block):
    """Block of the second and third generation, which takes a rotary table."""

    def forward(
        self, hidden: torch.Tensor, attention_mask: Any, rotary: torch.Tensor, kv_cache: Any, use_cache: bool
    ) -> Any:
        return self.mix(hidden, rotary.unsqueeze(2), attention_mask, kv_cache, use_cache)


class CausalModel(PreTrainedModel):
    """Base class of the models of both generations."""

    config_class = ChatGlmConfig

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": input_ids}

    def get_input_embeddings(self) -> nn.Module:
        return next(module for module in self.modules() if isinstance(module, nn.Embedding))

    def get_output_embeddings(self) -> nn.Module | None:
        return None


class ChatGlm(CausalModel):
    """Model of the first generation."""

    def __init__(self, config: ChatGlmConfig) -> None:
        super().__init__(config)
        self.transformer = nn.Module()
        self.transformer.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.transformer.layers = nn.ModuleList(Block1(config) for _ in range(config.num_layers))
        self.transformer.final_layernorm = nn.LayerNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, prefix: Any = None) -> Any:
        """Run the model. `prefix` contains keys and values for each block."""
        masks, positions = [], []
        for ids in input_ids.tolist():
            length, context = len(ids), ids.index(self.config.bos_token_id)
            gmask, mask = self.config.gmask_token_id, self.config.mask_token_id
            mask_position = ids.index(gmask if gmask in ids else mask)
            visible = torch.ones(length, length).tril()
            visible[:, :context] = 1
            prefix_length = 0 if prefix is None else len(prefix[0][0])
            masks.append(torch.cat((torch.ones(length, prefix_length), visible), dim=1) < 0.5)
            first = [*range(context), *[mask_position] * (length - context)]
            second = [*[0] * context, *range(1, length - context + 1)]
            positions.append([first, second])
        hidden = self.transformer.word_embeddings(input_ids).transpose(0, 1)
        for number, layer in enumerate(self.transformer.layers):
            hidden = layer(
                hidden,
                position_ids=torch.tensor(positions),
                attention_mask=torch.stack(masks).unsqueeze(1),
                layer_id=torch.tensor(number),
                layer_past=None if prefix is None else prefix[number],
            )[0]
        logits = self.lm_head(self.transformer.final_layernorm(hidden)).permute(1, 0, 2).contiguous()
        loss = None if labels is None else ForCausalLMLoss(logits, labels, self.config.vocab_size)
        return SimpleNamespace(loss=loss, logits=logits)


class Rotary(nn.Module):
    """A rotary table with frequencies that are saved with the weights."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1 / 100 ** (torch.arange(size) / size))

    def forward(self, length: int) -> torch.Tensor:
        return torch.outer(torch.arange(length).float(), self.inv_freq).cos()


class Embedding2(nn.Module):
    """Embedding that returns the sequence dimension first, unlike the embedding of the first GLM-4 checkpoints."""

    def __init__(self, config: ChatGlmConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.word_embeddings(input_ids).transpose(0, 1).contiguous()


class ChatGlm2(CausalModel):
    """Model of the second and third generation."""

    def __init__(self, config: ChatGlmConfig) -> None:
        super().__init__(config)
        self.transformer = nn.Module()
        self.transformer.embedding = Embedding2(config)
        self.transformer.rotary_pos_emb = Rotary(config.kv_channels)
        self.transformer.encoder = nn.Module()
        self.transformer.encoder.layers = nn.ModuleList(Block2(config) for _ in range(config.num_layers))
        self.transformer.encoder.final_layernorm = nn.LayerNorm(config.hidden_size)
        self.transformer.output_layer = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        prefix: Any = None,
    ) -> Any:
        """Run the model. `prefix` contains keys and values for each block."""
        length = input_ids.shape[1]
        full = None
        if prefix is not None or (attention_mask is not None and not attention_mask.all()):
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            full = torch.ones(len(input_ids), length, length).tril() * mask.unsqueeze(1)
            if prefix is not None:
                full = torch.cat((torch.ones(len(input_ids), length, len(prefix[0][0])), full), dim=2)
            full = (full - (mask.unsqueeze(-1) - 1) < 0.5).unsqueeze(1)
        table = self.transformer.rotary_pos_emb(self.config.seq_length)
        rotary = table[None, :length] if position_ids is None else table[position_ids]
        rotary = rotary.transpose(0, 1).contiguous()
        hidden = self.transformer.embedding(input_ids)
        for number, layer in enumerate(self.transformer.encoder.layers):
            past = None if prefix is None else prefix[number]
            hidden, _ = layer(hidden, full, rotary, kv_cache=past, use_cache=False)
        hidden = self.transformer.encoder.final_layernorm(hidden)
        logits = self.transformer.output_layer(hidden).transpose(0, 1).contiguous()
        loss = None if labels is None else ForCausalLMLoss(logits, labels, self.config.vocab_size)
        return SimpleNamespace(loss=loss, logits=logits)


def chatglm(generation: int, seed: int = 0) -> PreTrainedModel:
    """Create a model of a generation, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model_class = ChatGlm if generation == 1 else ChatGlm2
        return model_class(ChatGlmConfig(generation)).eval()
