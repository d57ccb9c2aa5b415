"""Calls of heads and tails for all layouts, also for models whose context attends in both directions (ChatGLM-6B).

Such a model computes its attention mask from the token ids: the tokens before `bos_token_id` are the context. The
hidden states of a text are attacked in the context, where a client's prompt is. The targets of a loss are generated
after the context, so attacks on gradients use the text as the answer to an empty prompt.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from ..split import Part
from ..split.layouts import AttentionInputs
from ..tasks.causal import takes_attention_mask
from .examples import TokenizedExamples


def context_end(config: PretrainedConfig) -> list[int]:
    """
    Return the tokens that end the context of a model whose context attends in both directions.

    Args:
        config (`PretrainedConfig`): The config of the model.

    Returns:
        `list[int]`: The mask token and the start token, or no tokens for other models.
    """
    return [config.gmask_token_id, config.bos_token_id] if "position_encoding_2d" in config.to_dict() else []


def head_states(head: Part, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """
    Compute the hidden states after a head.

    Args:
        head ([`~split.Part`]): The first part of a client.
        ids (`torch.Tensor`): Token ids of shape `(batch, length)`, with all special tokens.
        mask (`torch.Tensor`, *optional*): Mask of the same shape, 1 for tokens, padded on the right.

    Returns:
        `torch.Tensor`: Hidden states of shape `(batch, length, hidden)`.
    """
    runner, config = head.layout.runner, head.model.config
    if runner is None or not context_end(config):
        return head(ids, mask, use_cache=False).logits
    inputs = runner.attention_inputs(config, ids, AttentionInputs())
    return head(ids, None, inputs.position_ids, None, inputs.context_lengths, use_cache=False).logits


def text_states(head: Part, ids: torch.Tensor) -> torch.Tensor:
    """
    Compute the hidden states of tokens without special tokens, in a context if the model has one.

    Args:
        head ([`~split.Part`]): The first part of a client.
        ids (`torch.Tensor`): Token ids of shape `(batch, length)`.

    Returns:
        `torch.Tensor`: Hidden states of shape `(batch, length, hidden)`.
    """
    end = torch.tensor(context_end(head.model.config), dtype=ids.dtype, device=ids.device)
    return head_states(head, torch.cat([ids, end.expand(len(ids), -1)], dim=1))[:, : ids.shape[1]]


def as_answers(examples: TokenizedExamples, config: PretrainedConfig) -> TokenizedExamples:
    """
    Move texts from the context to the answer, for models whose context attends in both directions.

    Args:
        examples ([`TokenizedExamples`]): The examples. They are unchanged for other models.
        config (`PretrainedConfig`): The config of the model.
    """
    end = context_end(config)
    if not end:
        return examples
    texts = [ids[scored].tolist() for ids, scored in zip(examples.input_ids, examples.scored, strict=True)]
    rows = [torch.tensor([*end, *text]) for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    scored = mask.bool() & (torch.arange(ids.shape[1]) >= len(end))
    return TokenizedExamples(ids, mask, scored)


def answer_inputs(tail: Part, num_examples: int, length: int, seen: int = 0) -> dict[str, Any]:
    """
    Return the inputs that a tail needs in addition to the hidden states of [`as_answers`].

    The server knows these inputs, because it receives them with the hidden states.

    Args:
        tail ([`~split.Part`]): The last part of a client.
        num_examples (`int`): Number of examples.
        length (`int`): Number of tokens of each example, including the tokens in a cache.
        seen (`int`, *optional*, defaults to `0`): Number of tokens in a cache.
    """
    config, runner = tail.model.config, tail.layout.runner
    end = context_end(config)
    if runner is None or not end:
        return {}
    device = next(tail.parameters()).device
    ids = torch.zeros(num_examples, max(length, len(end)), dtype=torch.long, device=device)
    ids[:, : len(end)] = torch.tensor(end, device=device)
    inputs = runner.attention_inputs(config, ids, AttentionInputs(), seen)
    positions = None if inputs.position_ids is None else inputs.position_ids[..., : length - seen]
    return {"position_ids": positions, "context_lengths": inputs.context_lengths}


def model_inputs(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    Return the arguments of a full or split model for examples that are padded on the right.

    Args:
        model (`PreTrainedModel`): The model.
        ids (`torch.Tensor`): Token ids of shape `(batch, length)`.
        mask (`torch.Tensor`): Mask of the same shape, 1 for tokens.
    """
    return {"input_ids": ids, "attention_mask": mask} if takes_attention_mask(model) else {"input_ids": ids}
