"""ChatGLM's own layouts, whose classes come with their checkpoints and not with `transformers`.

Their blocks take hidden states sequence first and return tuples, and their models make masks and positions from token
ids, so that no class of theirs can be cut by giving it `inputs_embeds`. The runners below do block by block what those
models do, from what may cross to a server: the first generation's context lengths and two-dimensional positions, the
others' mask. `GlmForCausalLM` of `transformers`, which loads the newer GLM-4 checkpoints, needs none of this; the
older ones' own classes, whose states are batch first, are refused.

Keys and values lie in a cache of `transformers`, `(batch, heads, sequence, size)`, and go to a block and come from it
sequence first, as these models have them. A prefix stands before the tokens and takes no positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig

from .layouts import Layout, Past, Places


class ChatGlmRunner:
    """
    Blocks of ChatGLM-6B, the first generation: a prefix language model with positions in two dimensions.

    The tokens before the first start token (`bos_token_id`) are the context and see one another; those from there on
    see what is before them. A position counts the context, and from the start token on stays at the mask token; the
    second one counts from the start token on (Du et al. 2022, GLM, section 2.2).
    """

    def check_model(self, model: nn.Module) -> None:
        """Its config tells it apart."""

    def places(self, config: PretrainedConfig, input_ids: torch.Tensor, places: Places, seen: int = 0) -> Places:
        """
        Context lengths and positions of token ids, whatever positions were given.

        Raises:
            ValueError: If a row has no start token or no mask token, or a mask is given, which this model has not.
        """
        if places.attention_mask is not None:
            raise ValueError("ChatGLM-6B masks no padding: give rows of one length, or one at a time.")
        starts = input_ids == config.bos_token_id
        gmasks, masks = input_ids == config.gmask_token_id, input_ids == config.mask_token_id
        has_gmask = gmasks.any(1)
        for row in range(len(input_ids)):
            if not starts[row].any() or not (gmasks[row] | masks[row]).any():
                raise ValueError(
                    f"Row {row} has no start token (id {config.bos_token_id}) or no mask token (id "
                    f"{config.gmask_token_id} or {config.mask_token_id}): encode it with the model's own tokenizer."
                )
        contexts = starts.int().argmax(1)
        mask_positions = torch.where(has_gmask, gmasks.int().argmax(1), masks.int().argmax(1))
        index = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        behind = index >= contexts.unsqueeze(1)
        if config.position_encoding_2d:
            first = torch.where(behind, mask_positions.unsqueeze(1), index)
            second = torch.where(behind, index - contexts.unsqueeze(1) + 1, 0)
            positions = torch.stack((first, second), dim=1)  # (batch, 2, sequence)
        else:
            at_mask = behind & ~has_gmask.unsqueeze(1)
            positions = torch.where(at_mask, mask_positions.unsqueeze(1), index)
        return Places(None, positions[..., seen:], contexts)

    def key_value_heads(self, config: PretrainedConfig) -> tuple[int, int]:
        """As many as there are heads of queries."""
        return config.num_attention_heads, config.hidden_size // config.num_attention_heads

    def check(self, places: Places) -> None:
        """
        Raises:
            ValueError: If context lengths or positions are missing, or a mask is given.
        """
        if places.context_lengths is None or places.position_ids is None or places.attention_mask is not None:
            raise ValueError("ChatGLM-6B needs context lengths and positions, and has no mask of padding.")

    def run(
        self,
        model: nn.Module,
        blocks: Sequence[int],
        states: torch.Tensor,
        places: Places,
        past: Past | None = None,
    ) -> torch.Tensor:
        """Run the blocks of a part."""
        assert places.context_lengths is not None
        if not blocks:
            return states
        later = _later(states.shape[1], past, states.device)  # (sequence, seen + sequence)
        in_context = torch.arange(later.shape[1], device=states.device) < places.context_lengths.view(-1, 1, 1)
        unseen = _behind_prefix(later & ~in_context, past)
        layers = model.get_submodule("transformer.layers")
        hidden = states.transpose(0, 1)
        for own, (number, block) in enumerate(zip(blocks, cast(nn.ModuleList, layers), strict=True)):
            hidden, *present = block(
                hidden,
                position_ids=places.position_ids,
                attention_mask=unseen.unsqueeze(1),
                layer_id=torch.tensor(number),
                layer_past=_past(past, own),
                use_cache=past is not None and past.grows,
            )
            if past is not None and past.grows:
                _append(past.cache, own, present[0])
        return hidden.transpose(0, 1)


class ChatGlm2Runner:
    """Blocks of ChatGLM2-6B and ChatGLM3-6B: causal, with one rotary table for all blocks."""

    def check_model(self, model: nn.Module) -> None:
        """
        Raises:
            ValueError: If its embedding gives states batch first, as that of the first GLM-4 checkpoints does, whose
                config has the same type.
        """
        weight = next(model.get_submodule("transformer.embedding").parameters())
        tokens = torch.zeros(1, 2, dtype=torch.long, device=weight.device)
        with torch.no_grad():
            states = model.get_submodule("transformer.embedding")(tokens)
        if states.shape[:2] != (2, 1):
            raise ValueError(
                f"The embedding of {type(model).__name__} makes states of shape {tuple(states.shape)} of a row of 2 "
                "tokens, and ChatGLM2's blocks take them sequence first. For GLM-4 take a checkpoint in the layout of "
                "`transformers` (GlmForCausalLM; THUDM/glm-4-9b-chat-hf), or give SplitModel a layout of your own."
            )

    def places(self, config: PretrainedConfig, input_ids: torch.Tensor, places: Places, seen: int = 0) -> Places:
        """What the caller gave."""
        return places

    def key_value_heads(self, config: PretrainedConfig) -> tuple[int, int]:
        """Those of groups, where queries have such."""
        grouped = getattr(config, "multi_query_attention", False)
        return config.multi_query_group_num if grouped else config.num_attention_heads, config.kv_channels

    def check(self, places: Places) -> None:
        """
        Raises:
            ValueError: If context lengths or positions in two dimensions are given.
        """
        if places.context_lengths is not None or (places.position_ids is not None and places.position_ids.ndim != 2):
            raise ValueError("ChatGLM2 counts positions in one dimension and has no context lengths.")

    def run(
        self,
        model: nn.Module,
        blocks: Sequence[int],
        states: torch.Tensor,
        places: Places,
        past: Past | None = None,
    ) -> torch.Tensor:
        """Run the blocks of a part."""
        if not blocks:
            return states
        config, length = cast(PretrainedConfig, model.config), states.shape[1]
        table = model.get_submodule("transformer.rotary_pos_emb")(config.seq_length)
        later = _later(length, past, states.device)  # (sequence, seen + sequence)
        start = later.shape[1] - length
        rotary = table[None, start : start + length] if places.position_ids is None else table[places.position_ids]
        unseen = None
        if places.attention_mask is not None:
            tokens = places.attention_mask.bool()
            # The row of a pad position sees everything, so that its softmax is one of numbers.
            unseen = (later | ~tokens.unsqueeze(1)) & tokens[:, start:].unsqueeze(2)
        elif past is not None:  # without a mask and a cache the blocks make it themselves
            unseen = later.expand(len(states), -1, -1)
        if unseen is not None:
            unseen = _behind_prefix(unseen, past).unsqueeze(1)
        hidden = states.transpose(0, 1)
        rotary = rotary.transpose(0, 1).contiguous()
        for own, block in enumerate(cast(nn.ModuleList, model.get_submodule("transformer.encoder.layers"))):
            grows = past is not None and past.grows
            hidden, present = block(hidden, unseen, rotary, kv_cache=_past(past, own), use_cache=grows)
            if past is not None and past.grows:
                _append(past.cache, own, present)
        return hidden.transpose(0, 1)


def _later(length: int, past: Past | None, device: torch.device) -> torch.Tensor:
    """Which tokens come after the one that looks: shape `(sequence, seen + sequence)`, without the prefix."""
    seen = 0 if past is None else past.cache.get_seq_length() - past.prefix_length
    column = torch.arange(seen + length, device=device)
    return column > column[seen:].unsqueeze(1)


def _behind_prefix(unseen: torch.Tensor, past: Past | None) -> torch.Tensor:
    """The same of keys of which a prefix comes first, that everybody sees."""
    prefix_length = 0 if past is None else past.prefix_length
    return torch.cat((unseen.new_zeros(*unseen.shape[:2], prefix_length), unseen), dim=2)


def _past(past: Past | None, block: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys and values of a block, `(sequence, batch, heads, size)`."""
    if past is None or past.cache.get_seq_length(block) == 0:
        return None
    layer = past.cache.layers[block]
    return layer.keys.permute(2, 0, 1, 3), layer.values.permute(2, 0, 1, 3)


def _append(cache: DynamicCache, block: int, present: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> None:
    """Keep what is new of a block's keys and values, `(past + sequence, batch, heads, size)`."""
    if isinstance(present, torch.Tensor):  # as some checkpoints' classes have them where there was no past
        present = cast(tuple[torch.Tensor, torch.Tensor], present.squeeze(0).unbind(0))
    past = cache.get_seq_length(block)
    keys, values = (states[past:].permute(1, 2, 0, 3) for states in present)
    cache.update(keys, values, block)


CHATGLM = Layout(
    blocks="transformer.layers",
    embedding="transformer.word_embeddings",
    output="lm_head",
    of_head={"transformer.word_embeddings": "identity"},
    of_tail={"transformer.final_layernorm": "identity", "lm_head": "identity"},
    num_blocks="num_layers",
    max_positions="max_sequence_length",
    norm="transformer.final_layernorm",
    runner=ChatGlmRunner(),
)

CHATGLM2 = Layout(
    blocks="transformer.encoder.layers",
    embedding="transformer.embedding.word_embeddings",
    output="transformer.output_layer",
    of_head={"transformer.embedding": "identity"},
    of_tail={"transformer.encoder.final_layernorm": "identity", "transformer.output_layer": "identity"},
    num_blocks="num_layers",
    max_positions="seq_length",
    norm="transformer.encoder.final_layernorm",
    runner=ChatGlm2Runner(),
)
