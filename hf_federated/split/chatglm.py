"""ChatGLM's own layouts, whose classes come with their checkpoints and not with `transformers`.

Their blocks take hidden states sequence first and return tuples, and their models make masks and positions from token
ids, so that no class of theirs can be cut by giving it `inputs_embeds`. The runners below do block by block what those
models do, from what may cross to a server: the first generation's context lengths and two-dimensional positions, the
others' mask. `GlmForCausalLM` of `transformers`, which loads the newer GLM-4 checkpoints, needs none of this.

There is no cache here: generation computes the whole sequence for every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from transformers import PretrainedConfig

from .layouts import Layout, Places


class ChatGlmRunner:
    """
    Blocks of ChatGLM-6B, the first generation: a prefix language model with positions in two dimensions.

    The tokens before the first start token (`bos_token_id`) are the context and see one another; those from there on
    see what is before them. A position counts the context, and from the start token on stays at the mask token; the
    second one counts from the start token on (Du et al. 2022, GLM, section 2.2).
    """

    def places(self, config: PretrainedConfig, input_ids: torch.Tensor, places: Places) -> Places:
        """
        Context lengths and positions of token ids.

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
        return Places(None, positions, contexts)

    def check(self, places: Places) -> None:
        """
        Raises:
            ValueError: If context lengths or positions are missing, or a mask is given.
        """
        if places.context_lengths is None or places.position_ids is None or places.attention_mask is not None:
            raise ValueError("ChatGLM-6B needs context lengths and positions, and has no mask of padding.")

    def run(self, model: nn.Module, blocks: Sequence[int], states: torch.Tensor, places: Places) -> torch.Tensor:
        """Run the blocks of a part."""
        assert places.context_lengths is not None
        length = states.shape[1]
        column = torch.arange(length, device=states.device)
        in_context = column < places.context_lengths.view(-1, 1, 1)  # (batch, 1, sequence)
        unseen = (column > column.unsqueeze(1)) & ~in_context  # (batch, sequence, sequence)
        layers = model.get_submodule("transformer.layers")
        hidden = states.transpose(0, 1)
        for number, block in zip(blocks, cast(nn.ModuleList, layers), strict=True):
            hidden = block(
                hidden,
                position_ids=places.position_ids,
                attention_mask=unseen.unsqueeze(1),
                layer_id=torch.tensor(number),
            )[0]
        return hidden.transpose(0, 1)


class ChatGlm2Runner:
    """Blocks of ChatGLM2-6B and ChatGLM3-6B: causal, with one rotary table for all blocks."""

    def places(self, config: PretrainedConfig, input_ids: torch.Tensor, places: Places) -> Places:
        """What the caller gave."""
        return places

    def check(self, places: Places) -> None:
        """
        Raises:
            ValueError: If context lengths or positions in two dimensions are given.
        """
        if places.context_lengths is not None or (places.position_ids is not None and places.position_ids.ndim != 2):
            raise ValueError("ChatGLM2 counts positions in one dimension and has no context lengths.")

    def run(self, model: nn.Module, blocks: Sequence[int], states: torch.Tensor, places: Places) -> torch.Tensor:
        """Run the blocks of a part."""
        config, length = cast(PretrainedConfig, model.config), states.shape[1]
        table = model.get_submodule("transformer.rotary_pos_emb")(config.seq_length)
        rotary = table[None, :length] if places.position_ids is None else table[places.position_ids]
        unseen = None
        if places.attention_mask is not None:
            tokens = places.attention_mask.bool()
            causal = torch.ones(length, length, dtype=torch.bool, device=states.device).tril()
            # The row of a pad position sees everything, so that its softmax is one of numbers.
            seen = (causal & tokens.unsqueeze(1)) | ~tokens.unsqueeze(2)
            unseen = ~seen.unsqueeze(1)
        hidden = states.transpose(0, 1)
        rotary = rotary.transpose(0, 1).contiguous()
        for block in cast(nn.ModuleList, model.get_submodule("transformer.encoder.layers")):
            hidden = block(hidden, unseen, rotary, kv_cache=None, use_cache=False)[0]
        return hidden.transpose(0, 1)


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
