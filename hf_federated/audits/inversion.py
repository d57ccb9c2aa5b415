"""Inversion of a split model's hidden states: how much of a client's text can be read from what it sends?

FL-GLM (Zheng et al. 2024), section 4.3.3: a server and a colluding client train an attacker on that client's hidden
states and text, and try it on other clients' hidden states. Here each token is sought at the position of its hidden
state, and no row of a victim is the attacker's.

What is measured is what these attackers find, with the weights that both clients have: a stronger one may find more. A
victim that trained its first blocks since they were last shared is measured by `victim_model`.
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
from .rows import TokenRows


# Rows that are run through a head at a time.
_BATCH_SIZE = 16


@dataclass(frozen=True)
class Inversion:
    """
    What one attacker recovered at one cut. All scores are shares of 1.

    Args:
        head_blocks (`int`): Blocks of the client behind the embedding.
        wire_dtype (`str`): How hidden states travelled.
        attacker (`str`): Its name in [`AuditConfig`].
        token_recall (`float`): Tokens of the victims that were found at their position.
        rouge1 (`float`): Shared words, as in [`~hf_federated.tasks.metrics.Rouge`].
        rouge2 (`float`): Shared pairs of words.
        rougeL (`float`): Longest common subsequence.
        bleu4 (`float`): As in [`~hf_federated.tasks.metrics.Bleu`].

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
    The part of a model that a client keeps before the cut. It shares the model's parameters.

    Args:
        model (`PreTrainedModel`): The whole model.
        head_blocks (`int`): Blocks behind the embedding.

    Raises:
        ValueError: If the cut does not fit the model, or its blocks run without a cache.
    """
    layout = layout_of(model.config)
    if layout.runner is not None:
        raise ValueError(
            f"{type(model).__name__} brings its own classes, whose blocks run without a cache and are not audited: "
            "audit the same weights as GlmForCausalLM."
        )
    cut = Cut(int(getattr(model.config, layout.num_blocks)), head_blocks)
    head = Part(model.config, cut, "head", layout, type(model))
    head.take(model.state_dict(keep_vars=True))
    return head.eval()


@torch.no_grad()
def sent_states(head: Part, rows: TokenRows, wire: Wire) -> torch.Tensor:
    """
    The hidden states that a server receives of rows.

    Args:
        head ([`Part`]): The client's first part.
        rows ([`TokenRows`]): The client's rows.
        wire ([`Wire`]): How states travel.

    Returns:
        `torch.Tensor`: Shape `(rows, length, hidden)`, `float32`, on the head's device; zeros where there is no token.
    """
    device = word_embeddings(head).device
    received = []
    for ids, mask in zip(rows.input_ids.split(_BATCH_SIZE), rows.attention_mask.split(_BATCH_SIZE), strict=True):
        states = head(ids.to(device), mask.to(device), use_cache=False).logits
        received.append(wire.decode(wire.encode(states), len(states), torch.float32) * mask[:, :, None])
    return torch.cat(received).to(device)


def invert(
    model: PreTrainedModel,
    tokenizer: Any,
    attacker_rows: TokenRows,
    victim_rows: TokenRows,
    config: AuditConfig,
    victim_model: PreTrainedModel | None = None,
    on_result: Callable[[Inversion], None] | None = None,
) -> list[Inversion]:
    """
    Attack every cut with every attacker.

    Args:
        model (`PreTrainedModel`): The whole model, on the device of the configuration; the attacker knows its head.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        attacker_rows ([`TokenRows`]): Of the colluding client.
        victim_rows ([`TokenRows`]): Of the victims: other rows than the attacker's.
        config ([`AuditConfig`]): Cuts, dtypes and attackers.
        victim_model (`PreTrainedModel`, *optional*): Whose head the victims have, where it is another.
        on_result (`Callable[[Inversion], None]`, *optional*): Called with each result as it is found.

    Returns:
        `list[Inversion]`: Cut by cut, dtype by dtype, attacker by attacker.

    Raises:
        ValueError: If a row is both the attacker's and a victim's, a cut does not fit the model, or the victims' model
            is of another kind.
    """
    _check_disjoint(attacker_rows, victim_rows)
    heads = [build_head(model, depth) for depth in config.head_blocks]
    sources = heads if victim_model is None else [build_head(victim_model, depth) for depth in config.head_blocks]
    for head, source in zip(heads, sources, strict=True):
        _check_alike(head, source)
    found = []
    for depth, head, source in zip(config.head_blocks, heads, sources, strict=True):
        nearest = None
        if "nearest" in config.attackers:
            length = max(attacker_rows.input_ids.shape[1], victim_rows.input_ids.shape[1])
            nearest = NearestState(head, length)
        for dtype in config.wire_dtypes:
            states = sent_states(source, victim_rows, Wire(dtype))
            attackers = _attackers(head, nearest, attacker_rows, Wire(dtype), config)
            for name, attacker in attackers.items():
                guessed = attacker.propose(states, victim_rows.attention_mask.to(states.device), 1)[:, :, 0].cpu()
                found.append(Inversion(depth, dtype, name, **score(tokenizer, guessed, victim_rows)))
                if on_result is not None:
                    on_result(found[-1])
    return found


def _attackers(
    head: Part, nearest: NearestState | None, rows: TokenRows, wire: Wire, config: AuditConfig
) -> dict[str, Attacker]:
    """The attackers of the configuration, ready, by name; the search last."""
    attackers: dict[str, Attacker] = {} if nearest is None else {"nearest": nearest}
    learned = [name for name in ("decoder", "transformer") if name in config.attackers]
    if learned:
        states, embedding = sent_states(head, rows, wire), word_embeddings(head)
        for name in learned:
            attackers[name] = LearnedDecoder(embedding, states, rows, config, contextual=name == "transformer")
    if "search" in config.attackers:
        attackers["search"] = PrefixSearch(head, list(attackers.values()), config.num_candidates)
    return attackers


def score(tokenizer: Any, guessed: torch.Tensor, rows: TokenRows) -> dict[str, float]:
    """
    Guessed tokens beside the true ones.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Makes texts of tokens, for ROUGE and BLEU.
        guessed (`torch.Tensor`): Token ids, of shape `(rows, length)`.
        rows ([`TokenRows`]): The victims' rows.

    Returns:
        `dict[str, float]`: `token_recall`, `rouge1`, `rouge2`, `rougeL` and `bleu4`, shares of 1.
    """
    hits = (guessed == rows.input_ids)[rows.scored]
    texts: list[list[str]] = [
        [
            tokenizer.decode(row[on], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for row, on in zip(ids, rows.scored, strict=True)
        ]
        for ids in (guessed, rows.input_ids)
    ]
    rouge = Rouge().compute(predictions=texts[0], references=texts[1])
    bleu = Bleu().compute(predictions=texts[0], references=texts[1])
    return {"token_recall": float(hits.float().mean()), **rouge, **bleu}


def chance_recall(attacker_rows: TokenRows, victim_rows: TokenRows) -> float:
    """The token recall of who always names the token that is most frequent in the attacker's rows."""
    most_frequent = attacker_rows.input_ids[attacker_rows.scored].mode().values
    return float((victim_rows.input_ids[victim_rows.scored] == most_frequent).float().mean())


def known_tokens(attacker_rows: TokenRows, victim_rows: TokenRows) -> float:
    """The share of the victims' tokens that occur anywhere in the attacker's rows."""
    theirs = attacker_rows.input_ids[attacker_rows.scored].unique()
    return float(torch.isin(victim_rows.input_ids[victim_rows.scored], theirs).float().mean())


def _check_disjoint(attacker_rows: TokenRows, victim_rows: TokenRows) -> None:
    own, theirs = (
        {tuple(ids[mask.bool()].tolist()) for ids, mask in zip(rows.input_ids, rows.attention_mask, strict=True)}
        for rows in (attacker_rows, victim_rows)
    )
    shared = len(own & theirs)
    if shared:
        raise ValueError(
            f"{shared} of the victims' rows are the attacker's too, which then need not be recovered: leave them out "
            "with drop_shared."
        )


def _check_alike(head: Part, source: Part) -> None:
    own, theirs = ({name: value.shape for name, value in part.originals()} for part in (head, source))
    if own != theirs:
        name = next(name for name in sorted(own | theirs) if own.get(name) != theirs.get(name))
        raise ValueError(
            f"The victims' model has {name} of shape {_shape(theirs.get(name))}, the attacker's"
            f" {_shape(own.get(name))}: give one of the same configuration, such as the model after training."
        )


def _shape(shape: torch.Size | None) -> str:
    return "none" if shape is None else str(tuple(shape))


def strongest(inversions: Sequence[Inversion], head_blocks: int, wire_dtype: str) -> Inversion:
    """
    The attacker that recovered most tokens at a cut: the leak to report.

    Args:
        inversions (`Sequence[Inversion]`): Of all cuts.
        head_blocks (`int`): The cut.
        wire_dtype (`str`): How hidden states travelled.

    Raises:
        ValueError: If it was not measured.
    """
    there = [one for one in inversions if (one.head_blocks, one.wire_dtype) == (head_blocks, wire_dtype)]
    if not there:
        raise ValueError(f"The cut after {head_blocks} blocks with {wire_dtype} on the wire was not measured.")
    return max(there, key=lambda one: one.token_recall)
