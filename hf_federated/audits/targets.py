"""Which tokens a client is to predict, its labels, read from the gradient by which it answers the server.

At the second cut the server knows the hidden states h that it sent, and receives g = ∂L/∂h. With the pretrained
weights of the client's tail it can compute what g would be for any targets. A loss of cross entropies is a sum,
g_t = Σ_{s ≥ t} w · (∂z_s/∂h_t)ᵀ (softmax(z_s) − 1[y_s]), of the targets y_s at positions s with logits z_s and a
weight w, where blocks look back alone. So the last position's gradient is of its own target; with this one known its
share is subtracted from the positions before it, and so on. A position without a gradient of its own has no target.

The idea to fit labels to a gradient is that of Zhao et al. 2020, "iDLG: Improved Deep Leakage from Gradients"; here it
is the gradient by hidden states, of a whole tail, position by position. A client that trained its tail since the
server saw it is measured by `victim_model`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import cosine_similarity, cross_entropy
from transformers import PreTrainedModel

from ..split import LocalLink, Part, SplitModel, Wire
from ..split.messages import Backward, Hidden
from .rows import TokenRows


# Rows that are attacked at a time.
_BATCH_SIZE = 8
# What is left of a position's gradient, beside the longest of its row, where there is no target. Lower, rounding of a
# narrow wire is taken for targets; higher, those of which the model is sure are missed.
_NO_TARGET = 0.002
# How far a hidden state is moved to see which logits follow, as a share of its length.
_MOVED = 1e-3


@dataclass(frozen=True)
class TargetRecovery:
    """
    How well targets were read. Shares of 1.

    Args:
        tail_blocks (`int`): Blocks of the client behind the second cut.
        wire_dtype (`str`): How states and gradients travelled.
        targets (`str`): `"all"`: every token is predicted, as in language modelling. `"last"`: the last of each row
            alone, as where a label is a word behind its text.
        token_recall (`float`): Of the targets, those that were named at their position.
        position_precision (`float`): Of the positions at which a target was named, those that have one.
        position_recall (`float`): Of the positions that have a target, those at which one was named.
        num_targets (`int`): Targets that there were.

    Example:

    ```python
    >>> from hf_federated.audits import TargetRecovery

    >>> TargetRecovery(1, "float32", "last", 1.0, 1.0, 1.0, num_targets=20).token_recall
    1.0
    ```
    """

    tail_blocks: int
    wire_dtype: str
    targets: str
    token_recall: float
    position_precision: float
    position_recall: float
    num_targets: int


def recover_targets(
    tail: Part, states: torch.Tensor, gradient: torch.Tensor, attention_mask: torch.Tensor, num_candidates: int = 8
) -> torch.Tensor:
    """
    The targets that a gradient gives away.

    Args:
        tail ([`~split.Part`]): The client's last part, as the attacker knows it.
        states (`torch.Tensor`): That the server sent, of shape `(rows, length, hidden)`.
        gradient (`torch.Tensor`): That came back, of the same shape.
        attention_mask (`torch.Tensor`): Shape `(rows, length)`, 1 for tokens, padded on the right.
        num_candidates (`int`, *optional*, defaults to `8`): Tokens whose gradients are compared at a position.

    Returns:
        `torch.Tensor`: Shape `(rows, length)`: the token that each position predicts, −1 where it predicts none.
    """
    left = gradient.clone()
    longest = gradient.norm(dim=2).amax(1)
    named = torch.full(attention_mask.shape, -1, device=states.device)
    for position in reversed(range(states.shape[1])):
        has_target = (left[:, position].norm(dim=1) > _NO_TARGET * longest) & (attention_mask[:, position] > 0)
        rows = has_target.nonzero()[:, 0]
        if not len(rows):
            continue
        before, own = states[rows, : position + 1], left[rows, position]
        tokens, weights = _name(tail, before, own, num_candidates)
        named[rows, position] = tokens
        left[rows, : position + 1] -= weights[:, None, None] * _gradient_of(tail, before, tokens)
    return named


@torch.no_grad()
def _name(
    tail: Part, states: torch.Tensor, gradient: torch.Tensor, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The tokens whose gradient at the last position points as one that came, and its length by theirs.

    The candidates are those whose logits fall most along the gradient: (∂z/∂h) g is most negative at the target, whose
    logit alone the loss wants higher.
    """
    direction = gradient / gradient.norm(dim=1, keepdim=True)
    step = _MOVED * states[:, -1].norm(dim=1, keepdim=True) * direction
    moved = torch.cat([states, states])
    moved[:, -1] += torch.cat([step, -step])
    up, down = tail(moved, use_cache=False, logits_to_keep=1).logits[:, -1].chunk(2)
    candidates = (down - up).topk(min(num_candidates, up.shape[1]), dim=1).indices
    found = _own_gradients(tail, states, candidates)
    likeness = cosine_similarity(found, gradient[:, None], dim=2)
    best = likeness.argmax(1, keepdim=True)
    chosen = found.take_along_dim(best[:, :, None], 1)[:, 0]
    weights = (chosen * gradient).sum(1) / chosen.square().sum(1).clamp_min(torch.finfo(chosen.dtype).tiny)
    return candidates.take_along_dim(best, 1)[:, 0], weights


def _own_gradients(tail: Part, states: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """What each candidate's cross entropy has as gradient by the last state, of shape `(rows, candidates, hidden)`."""
    cache = tail.new_cache()
    if states.shape[1] > 1:
        tail(states[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
    with torch.enable_grad():
        last = states[:, -1:].clone().requires_grad_()
        logits = tail(last, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        losses = [
            cross_entropy(logits, candidates[:, number], reduction="sum") for number in range(candidates.shape[1])
        ]
        gradients = [torch.autograd.grad(loss, last, retain_graph=True)[0][:, 0] for loss in losses]
    return torch.stack(gradients, 1)


def _gradient_of(tail: Part, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The gradient by all states of the last position's cross entropy."""
    states = states.clone().requires_grad_()
    logits = tail(states, use_cache=False, logits_to_keep=1).logits[:, -1]
    return torch.autograd.grad(cross_entropy(logits, tokens, reduction="sum"), states)[0]


def attack_targets(
    model: PreTrainedModel,
    rows: TokenRows,
    tail_blocks: int,
    wire_dtype: str,
    targets: str,
    victim_model: PreTrainedModel | None = None,
) -> TargetRecovery:
    """
    Read the targets of victims' rows from what crosses in a training step.

    Args:
        model (`PreTrainedModel`): The whole model, of whose tail the attacker knows the weights. Without dropout.
        rows ([`TokenRows`]): The victims' rows.
        tail_blocks (`int`): Blocks of the client behind the second cut.
        wire_dtype (`str`): How states and gradients travel.
        targets (`str`): `"all"` or `"last"`, as of [`TargetRecovery`].
        victim_model (`PreTrainedModel`, *optional*): Which the victims train, where it is another.

    Raises:
        ValueError: If the cut does not fit the model, or the model is not in float32.
    """
    if targets not in ("all", "last"):
        raise ValueError(f'targets is "all" or "last", got {targets!r}.')
    trained = model if victim_model is None else victim_model
    for own in (model, trained):
        if own.dtype != torch.float32:
            raise ValueError(
                f"The audit computes in float32, and a model in {own.dtype} was given: load it in float32."
            )
    # How many blocks the head has is all one here.
    tail = SplitModel.from_model(model, 0, tail_blocks).client_tail.eval()
    split = SplitModel.from_model(trained, 0, tail_blocks, wire_dtype=wire_dtype).eval()
    device = split.client_tail.model.device
    asks = [parameter for own in (model, trained) for parameter in own.parameters() if parameter.requires_grad]
    for parameter in asks:
        parameter.requires_grad_(False)
    try:
        named, true = [], []
        for start in range(0, len(rows), _BATCH_SIZE):
            ids = rows.input_ids[start : start + _BATCH_SIZE].to(device)
            mask = rows.attention_mask[start : start + _BATCH_SIZE].to(device)
            labels = ids.masked_fill(mask == 0, -100)
            if targets == "last":
                is_last = torch.arange(ids.shape[1], device=device) == mask.sum(1, keepdim=True) - 1
                labels = labels.masked_fill(~is_last, -100)
            states, gradient = _crossed(split, ids, mask, labels)
            named.append(recover_targets(tail, states, gradient, mask))
            true.append(torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), -100)], dim=1))
    finally:
        for parameter in asks:
            parameter.requires_grad_(True)
    found, wanted = torch.cat(named), torch.cat(true)
    is_named, is_target = found >= 0, wanted != -100
    both, number = int((is_named & is_target).sum()), int(is_target.sum())
    return TargetRecovery(
        tail_blocks,
        wire_dtype,
        targets,
        token_recall=int((found == wanted).sum()) / max(number, 1),
        position_precision=both / max(int(is_named.sum()), 1),
        position_recall=both / max(number, 1),
        num_targets=number,
    )


def _crossed(
    split: SplitModel, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the server sends and what comes back in a step, as they travel."""
    blobs: list[bytes] = []

    def watch(question: bytes, answer: bytes) -> None:
        blobs.extend((question, answer))

    assert isinstance(split.boundary.link, LocalLink)
    split.boundary.link.watch = watch
    split(ids, attention_mask=mask, labels=labels).loss.backward()
    _, sent, came, _ = blobs
    wire: Wire = split.boundary.wire
    both = (Hidden.from_bytes(sent).hidden, Backward.from_bytes(came).gradient)
    states, gradient = (wire.decode(own, len(ids), torch.float32).to(ids.device) for own in both)
    return states, gradient
