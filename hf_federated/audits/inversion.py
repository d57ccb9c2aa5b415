"""Inversion of the hidden states of a split model: measure how much of a client's text can be recovered from them.

FL-GLM (Zheng et al. 2024), section 4.3.3: a server and a colluding client train an attacker on the hidden states and
the text of this client, and apply it to the hidden states of other clients. Here, the attacker recovers each token at
the position of its hidden state, and no example of a victim is also an example of the attacker.

The results are the findings of these attackers with the weights that both clients have. A stronger attacker may find
more. Pass `victim_model` to measure victims that have trained their first blocks since the blocks were last shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..split import Cut, Part, Wire, layout_of
from ..tasks.metrics import Bleu, Rouge
from .attackers import Attacker, LearnedDecoder, NearestState, PrefixSearch, word_embeddings
from .config import AuditConfig
from .examples import TokenizedExamples
from .part_inputs import head_states


# Number of examples that are run through a head at a time.
_BATCH_SIZE = 16


@dataclass(frozen=True)
class Inversion:
    """
    Results of one attacker at one cut. All scores are fractions of 1.

    Args:
        head_blocks (`int`):
            Number of blocks that the client keeps after the embedding.
        wire_dtype (`str`):
            Dtype of the sent hidden states.
        attacker (`str`):
            Name of the attacker in [`AuditConfig`].
        token_recall (`float`):
            Fraction of the victims' tokens that were recovered at their position.
        rouge1 (`float`):
            Overlap of words, as in [`~hf_federated.tasks.metrics.Rouge`].
        rouge2 (`float`):
            Overlap of word pairs.
        rougeL (`float`):
            Longest common subsequence.
        bleu4 (`float`):
            BLEU-4, as in [`~hf_federated.tasks.metrics.Bleu`].

    Example:

    ```python
    >>> from hf_federated.audits import Inversion

    >>> Inversion(0, "float32", "nearest", 1.0, 1.0, 1.0, 1.0, 1.0).attacker
    'nearest'
    ```
    """

    head_blocks: int
    wire_dtype: str
    attacker: str
    token_recall: float
    rouge1: float
    rouge2: float
    rougeL: float
    bleu4: float


def build_head(model: PreTrainedModel, head_blocks: int) -> Part:
    """
    Build the part of a model that a client keeps before the cut. The part shares the parameters of the model.

    Args:
        model (`PreTrainedModel`):
            The full model.
        head_blocks (`int`):
            Number of blocks after the embedding.

    Raises:
        ValueError: If the cut does not fit the model.
    """
    layout = layout_of(model.config)
    cut = Cut(int(getattr(model.config, layout.num_blocks)), head_blocks)
    head = Part(model.config, cut, "head", layout, type(model))
    head.assign_parameters(model.state_dict(keep_vars=True))
    return head.eval()


@torch.no_grad()
def sent_states(head: Part, examples: TokenizedExamples, wire: Wire) -> torch.Tensor:
    """
    Compute the hidden states that a server receives for examples.

    Args:
        head ([`Part`]):
            The first part of the client.
        examples ([`TokenizedExamples`]):
            The client's examples.
        wire ([`Wire`]):
            The encoding of hidden states in messages.

    Returns:
        `torch.Tensor`: Hidden states of shape `(num_examples, length, hidden)`, `float32`, on the device of the head.
        They are zero for padding.
    """
    device = word_embeddings(head).device
    received = []
    batches = zip(examples.input_ids.split(_BATCH_SIZE), examples.attention_mask.split(_BATCH_SIZE), strict=True)
    for ids, mask in batches:
        states = {"hidden": head_states(head, ids.to(device), mask.to(device))}
        restored = wire.decode(wire.encode(states), {"hidden": states["hidden"].float()})["hidden"]
        received.append(restored * mask[:, :, None])
    return torch.cat(received).to(device)


def invert(
    model: PreTrainedModel,
    tokenizer: Any,
    attacker_examples: TokenizedExamples,
    victim_examples: TokenizedExamples,
    config: AuditConfig,
    victim_model: PreTrainedModel | None = None,
    on_result: Callable[[Inversion], None] | None = None,
) -> list[Inversion]:
    """
    Attack every cut with every attacker.

    Args:
        model (`PreTrainedModel`):
            The full model, on the device of the configuration. The attacker knows its head.
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer of the model.
        attacker_examples ([`TokenizedExamples`]):
            Examples of the colluding client.
        victim_examples ([`TokenizedExamples`]):
            Examples of the victims, without examples of the attacker.
        config ([`AuditConfig`]):
            Cuts, dtypes and attackers.
        victim_model (`PreTrainedModel`, *optional*):
            The model whose head the victims have. Defaults to `model`.
        on_result (`Callable[[Inversion], None]`, *optional*):
            Called with each result as soon as it is available.

    Returns:
        `list[Inversion]`: The results, ordered by cut, dtype and attacker.

    Raises:
        ValueError: If an example belongs to both the attacker and a victim, if a cut does not fit the model, or if the
            victims' model has another architecture.
    """
    _check_disjoint(attacker_examples, victim_examples)
    heads = [build_head(model, depth) for depth in config.head_blocks]
    sources = heads if victim_model is None else [build_head(victim_model, depth) for depth in config.head_blocks]
    for head, source in zip(heads, sources, strict=True):
        _check_same_shapes(head, source)
    results = []
    for depth, head, source in zip(config.head_blocks, heads, sources, strict=True):
        nearest = None
        if "nearest" in config.attackers:
            length = max(attacker_examples.input_ids.shape[1], victim_examples.input_ids.shape[1])
            nearest = NearestState(head, length)
        for dtype in config.wire_dtypes:
            states = sent_states(source, victim_examples, Wire(dtype))
            attackers = _attackers(head, nearest, attacker_examples, Wire(dtype), config)
            for name, attacker in attackers.items():
                guessed = attacker.propose(states, victim_examples.attention_mask.to(states.device), 1)[:, :, 0].cpu()
                results.append(Inversion(depth, dtype, name, **score(tokenizer, guessed, victim_examples)))
                if on_result is not None:
                    on_result(results[-1])
    return results


def _attackers(
    head: Part, nearest: NearestState | None, examples: TokenizedExamples, wire: Wire, config: AuditConfig
) -> dict[str, Attacker]:
    """Return the trained attackers of the configuration by name. The search is the last one."""
    attackers: dict[str, Attacker] = {} if nearest is None else {"nearest": nearest}
    learned = [name for name in ("decoder", "transformer") if name in config.attackers]
    if learned:
        states, embedding = sent_states(head, examples, wire), word_embeddings(head)
        for name in learned:
            attackers[name] = LearnedDecoder(embedding, states, examples, config, contextual=name == "transformer")
    if "search" in config.attackers:
        attackers["search"] = PrefixSearch(head, list(attackers.values()), config.num_candidates)
    return attackers


def score(tokenizer: Any, guessed: torch.Tensor, examples: TokenizedExamples) -> dict[str, float]:
    """
    Compare guessed tokens with the true tokens.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer that decodes tokens to text, for ROUGE and BLEU.
        guessed (`torch.Tensor`):
            Token ids of shape `(num_examples, length)`.
        examples ([`TokenizedExamples`]):
            The victims' examples.

    Returns:
        `dict[str, float]`: `token_recall`, `rouge1`, `rouge2`, `rougeL` and `bleu4`, as fractions of 1.
    """
    hits = (guessed == examples.input_ids)[examples.scored]
    # A model can have more word embeddings than the tokenizer has tokens.
    num_tokens = len(tokenizer)
    texts: list[list[str]] = [
        [
            tokenizer.decode(
                example_ids[scored & (example_ids < num_tokens)].tolist(),
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
            for example_ids, scored in zip(ids, examples.scored, strict=True)
        ]
        for ids in (guessed, examples.input_ids)
    ]
    rouge = Rouge().compute(predictions=texts[0], references=texts[1])
    bleu = Bleu().compute(predictions=texts[0], references=texts[1])
    return {"token_recall": float(hits.float().mean()), **rouge, **bleu}


def chance_recall(attacker_examples: TokenizedExamples, victim_examples: TokenizedExamples) -> float:
    """Return the token recall of always naming the most frequent token in the attacker's examples."""
    most_frequent = attacker_examples.input_ids[attacker_examples.scored].mode().values
    return float((victim_examples.input_ids[victim_examples.scored] == most_frequent).float().mean())


def known_tokens(attacker_examples: TokenizedExamples, victim_examples: TokenizedExamples) -> float:
    """Return the fraction of the victims' tokens that occur anywhere in the attacker's examples."""
    known = attacker_examples.input_ids[attacker_examples.scored].unique()
    return float(torch.isin(victim_examples.input_ids[victim_examples.scored], known).float().mean())


def _check_disjoint(attacker_examples: TokenizedExamples, victim_examples: TokenizedExamples) -> None:
    attacker_ids, victim_ids = (
        {
            tuple(ids[mask.bool()].tolist())
            for ids, mask in zip(examples.input_ids, examples.attention_mask, strict=True)
        }
        for examples in (attacker_examples, victim_examples)
    )
    num_shared = len(attacker_ids & victim_ids)
    if num_shared:
        raise ValueError(
            f"{num_shared} of the victims' examples are also examples of the attacker, so the attacker need not"
            " recover them. Remove them with remove_shared_texts."
        )


def _check_same_shapes(head: Part, source: Part) -> None:
    attacker_shapes, victim_shapes = (
        {name: tuple(value.shape) for name, value in part.named_original_parameters()} for part in (head, source)
    )
    if attacker_shapes != victim_shapes:
        names = sorted(attacker_shapes | victim_shapes)
        name = next(name for name in names if attacker_shapes.get(name) != victim_shapes.get(name))
        raise ValueError(
            f"The parameter {name} has shape {victim_shapes.get(name, 'none')} in the victims' model, but"
            f" {attacker_shapes.get(name, 'none')} in the attacker's model. Pass a victims' model with the same"
            " configuration, such as the model after training."
        )


def strongest(inversions: Sequence[Inversion], head_blocks: int, wire_dtype: str) -> Inversion:
    """
    Return the result of the attacker with the highest token recall at a cut. This is the leak to report.

    Args:
        inversions (`Sequence[Inversion]`):
            Results for all cuts.
        head_blocks (`int`):
            The cut.
        wire_dtype (`str`):
            Dtype of the sent hidden states.

    Raises:
        ValueError: If this cut and dtype were not measured.
    """
    at_cut = [result for result in inversions if (result.head_blocks, result.wire_dtype) == (head_blocks, wire_dtype)]
    if not at_cut:
        raise ValueError(
            f"The audit did not measure the cut after {head_blocks} blocks with wire dtype {wire_dtype}. Run the audit"
            " with this cut and dtype."
        )
    return max(at_cut, key=lambda result: result.token_recall)
