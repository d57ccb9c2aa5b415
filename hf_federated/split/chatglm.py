"""Layouts and block runners for ChatGLM, whose model classes are not part of `transformers`.

The model classes are in the checkpoint repositories. Their blocks take hidden states with the sequence dimension first
and return tuples. The models compute masks and positions from token ids, so a part cannot be run by passing
`inputs_embeds` to its model class. The runners in this module run the blocks one by one, as the models do, from inputs
that the client may send to the server: context lengths and two-dimensional positions for the first generation, the
attention mask for the second and third generation.

`GlmForCausalLM` of `transformers`, which loads the newer GLM-4 checkpoints, needs no runner. The model classes of the
older GLM-4 checkpoints, whose hidden states have the batch dimension first, are not supported and raise an error.

Keys and values are in a `transformers` cache with shape `(batch, heads, sequence, size)`. The blocks take and return
them with the sequence dimension first. A prefix precedes the tokens and takes no positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig

from .layouts import AttentionInputs, BlockRunner, Layout, PastKeyValues


class ChatGlmRunner(BlockRunner):
    """
    Runs the blocks of ChatGLM-6B, the first generation: a prefix language model with two-dimensional positions.

    The tokens before the first start token (`bos_token_id`) are the context and attend to each other in both
    directions. The start token and the tokens after it attend causally. Each token has two positions (Du et al. 2022,
    GLM, section 2.2). In the context, the first position is the index of the token, and the second position is 0. From
    the start token on, the first position is the index of the mask token, and the second position counts from 1.
    """

    def check_model(self, model: nn.Module) -> None:
        """Accept any model: the config already identifies the first generation."""

    def attention_inputs(
        self, config: PretrainedConfig, input_ids: torch.Tensor, inputs: AttentionInputs, seen: int = 0
    ) -> AttentionInputs:
        """
        Compute context lengths and positions from token ids. `inputs.position_ids` is ignored.

        Raises:
            ValueError: If a sequence has no start token or no mask token, or an attention mask is given, which this
                model does not support.
        """
        if inputs.attention_mask is not None:
            raise ValueError(
                "ChatGLM-6B does not support padding, but an attention mask with zeros was passed. Pass sequences of "
                "equal length, or one sequence at a time."
            )
        starts = input_ids == config.bos_token_id
        gmasks, masks = input_ids == config.gmask_token_id, input_ids == config.mask_token_id
        has_gmask = gmasks.any(1)
        for row in range(len(input_ids)):
            if not starts[row].any() or not (gmasks[row] | masks[row]).any():
                raise ValueError(
                    f"Sequence {row} has no start token (id {config.bos_token_id}) or no mask token (id "
                    f"{config.gmask_token_id} or {config.mask_token_id}). Encode the text with the model's tokenizer."
                )
        contexts = starts.int().argmax(1)
        mask_positions = torch.where(has_gmask, gmasks.int().argmax(1), masks.int().argmax(1))
        index = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        after_context = index >= contexts.unsqueeze(1)
        if config.position_encoding_2d:
            first = torch.where(after_context, mask_positions.unsqueeze(1), index)
            second = torch.where(after_context, index - contexts.unsqueeze(1) + 1, 0)
            positions = torch.stack((first, second), dim=1)  # (batch, 2, sequence)
        else:
            at_mask = after_context & ~has_gmask.unsqueeze(1)
            positions = torch.where(at_mask, mask_positions.unsqueeze(1), index)
        return AttentionInputs(None, positions[..., seen:], contexts)

    def key_value_heads(self, config: PretrainedConfig) -> tuple[int, int]:
        """Return the number and the size of the query heads. Each query head has its own key/value head."""
        return config.num_attention_heads, config.hidden_size // config.num_attention_heads

    def check(self, inputs: AttentionInputs) -> None:
        """
        Check that context lengths and positions are given, and that no attention mask is given.

        Raises:
            ValueError: If context lengths or positions are missing, or an attention mask is given.
        """
        if inputs.context_lengths is None or inputs.position_ids is None or inputs.attention_mask is not None:
            raise ValueError(
                "ChatGLM-6B requires context_lengths and position_ids, and does not support an attention mask. Pass "
                "the inputs that the runner computed from the token ids."
            )

    def run(
        self,
        model: nn.Module,
        blocks: Sequence[int],
        states: torch.Tensor,
        inputs: AttentionInputs,
        past: PastKeyValues | None = None,
    ) -> torch.Tensor:
        """Run the blocks of a part."""
        self.check(inputs)
        if not blocks:
            return states
        later = _is_later(states.shape[1], past, states.device)  # (sequence, seen + sequence)
        context_lengths = cast(torch.Tensor, inputs.context_lengths).view(-1, 1, 1)
        in_context = torch.arange(later.shape[1], device=states.device) < context_lengths
        masked = _with_prefix(later & ~in_context, past)
        layers = model.get_submodule("transformer.layers")
        hidden = states.transpose(0, 1)
        for index, (layer_id, block) in enumerate(zip(blocks, cast(nn.ModuleList, layers), strict=True)):
            hidden, *present = block(
                hidden,
                position_ids=inputs.position_ids,
                attention_mask=masked.unsqueeze(1),
                layer_id=torch.tensor(layer_id),
                layer_past=_layer_past(past, index),
                use_cache=past is not None and past.update_cache,
            )
            if past is not None and past.update_cache:
                _append(past.cache, index, present[0])
        return hidden.transpose(0, 1)


class ChatGlm2Runner(BlockRunner):
    """Runs the blocks of ChatGLM2-6B and ChatGLM3-6B: causal, with one rotary table for all blocks."""

    def check_model(self, model: nn.Module) -> None:
        """
        Check that the embedding returns hidden states with the sequence dimension first.

        Raises:
            ValueError: If the embedding returns hidden states with the batch dimension first. The first GLM-4
                checkpoints do so, and their config has the same model type.
        """
        weight = next(model.get_submodule("transformer.embedding").parameters())
        tokens = torch.zeros(1, 2, dtype=torch.long, device=weight.device)
        with torch.no_grad():
            states = model.get_submodule("transformer.embedding")(tokens)
        if states.shape[:2] != (2, 1):
            raise ValueError(
                f"The embedding of {type(model).__name__} returns hidden states of shape {tuple(states.shape)} for "
                "one sequence of 2 tokens, but ChatGLM2's blocks expect the sequence dimension first. For GLM-4 use a "
                "checkpoint for GlmForCausalLM of `transformers` (such as THUDM/glm-4-9b-chat-hf), or pass `layout` "
                "to SplitModel.from_model."
            )

    def key_value_heads(self, config: PretrainedConfig) -> tuple[int, int]:
        """Return the number and the size of the key/value heads. With grouped queries a group has one head."""
        grouped = getattr(config, "multi_query_attention", False)
        return config.multi_query_group_num if grouped else config.num_attention_heads, config.kv_channels

    def check(self, inputs: AttentionInputs) -> None:
        """
        Check that no context lengths and no two-dimensional positions are given.

        Raises:
            ValueError: If context lengths or two-dimensional positions are given.
        """
        if inputs.context_lengths is not None or (inputs.position_ids is not None and inputs.position_ids.ndim != 2):
            raise ValueError(
                "ChatGLM2 supports neither context_lengths nor two-dimensional position_ids. Pass position_ids of "
                "shape (batch or 1, sequence), or leave them out."
            )

    def run(
        self,
        model: nn.Module,
        blocks: Sequence[int],
        states: torch.Tensor,
        inputs: AttentionInputs,
        past: PastKeyValues | None = None,
    ) -> torch.Tensor:
        """Run the blocks of a part."""
        if not blocks:
            return states
        config, length = cast(PretrainedConfig, model.config), states.shape[1]
        table = model.get_submodule("transformer.rotary_pos_emb")(config.seq_length)
        later = _is_later(length, past, states.device)  # (sequence, seen + sequence)
        start = later.shape[1] - length
        rotary = table[None, start : start + length] if inputs.position_ids is None else table[inputs.position_ids]
        masked = None
        if inputs.attention_mask is not None:
            tokens = inputs.attention_mask.bool()
            # Padding positions attend to all positions, because a softmax over no positions is not defined.
            masked = (later | ~tokens.unsqueeze(1)) & tokens[:, start:].unsqueeze(2)
        elif past is not None:  # without a mask and a cache the blocks create the causal mask
            masked = later.expand(len(states), -1, -1)
        if masked is not None:
            masked = _with_prefix(masked, past).unsqueeze(1)
        hidden = states.transpose(0, 1)
        rotary = rotary.transpose(0, 1).contiguous()
        for index, block in enumerate(cast(nn.ModuleList, model.get_submodule("transformer.encoder.layers"))):
            use_cache = past is not None and past.update_cache
            hidden, present = block(hidden, masked, rotary, kv_cache=_layer_past(past, index), use_cache=use_cache)
            if past is not None and past.update_cache:
                _append(past.cache, index, present)
        return hidden.transpose(0, 1)


def _is_later(length: int, past: PastKeyValues | None, device: torch.device) -> torch.Tensor:
    """Mark the keys that come after each query, shape `(sequence, seen + sequence)`, without the prefix."""
    seen = 0 if past is None else past.cache.get_seq_length() - past.prefix_length
    column = torch.arange(seen + length, device=device)
    return column > column[seen:].unsqueeze(1)


def _with_prefix(masked: torch.Tensor, past: PastKeyValues | None) -> torch.Tensor:
    """Extend the mask by the keys of the prefix, to which all queries attend."""
    prefix_length = 0 if past is None else past.prefix_length
    return torch.cat((masked.new_zeros(*masked.shape[:2], prefix_length), masked), dim=2)


def _layer_past(past: PastKeyValues | None, block: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the cached keys and values of a block, each of shape `(sequence, batch, heads, size)`."""
    if past is None or past.cache.get_seq_length(block) == 0:
        return None
    layer = past.cache.layers[block]
    return layer.keys.permute(2, 0, 1, 3), layer.values.permute(2, 0, 1, 3)


def _append(cache: DynamicCache, block: int, present: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> None:
    """Append a block's new keys and values to the cache; `present` is `(past + sequence, batch, heads, size)`."""
    if isinstance(present, torch.Tensor):  # some checkpoints' classes return one tensor if there was no past
        present = cast(tuple[torch.Tensor, torch.Tensor], present.squeeze(0).unbind(0))
    num_cached = cache.get_seq_length(block)
    keys, values = (states[num_cached:].permute(1, 2, 0, 3) for states in present)
    cache.update(keys, values, block)


CHATGLM = Layout(
    blocks="transformer.layers",
    embedding="transformer.word_embeddings",
    output="lm_head",
    head_modules={"transformer.word_embeddings": "identity"},
    tail_modules={"transformer.final_layernorm": "identity", "lm_head": "identity"},
    num_blocks="num_layers",
    max_positions="max_sequence_length",
    norm="transformer.final_layernorm",
    runner=ChatGlmRunner(),
)

CHATGLM2 = Layout(
    blocks="transformer.encoder.layers",
    embedding="transformer.embedding.word_embeddings",
    output="transformer.output_layer",
    head_modules={"transformer.embedding": "identity"},
    tail_modules={"transformer.encoder.final_layernorm": "identity", "transformer.output_layer": "identity"},
    num_blocks="num_layers",
    max_positions="seq_length",
    norm="transformer.encoder.final_layernorm",
    runner=ChatGlm2Runner(),
)
