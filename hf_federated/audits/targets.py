"""Recover the target tokens of a client, its labels, from the gradients that the client sends to the server.

At the second cut, the server knows the hidden states h that it sent, and receives the gradient g = ∂L/∂h. With the
pretrained weights of the client's tail, the server can compute the gradient for any targets. A loss of cross entropies
is a sum over the targets y_s at positions s with logits z_s and a weight w:
g_t = Σ_{s ≥ t} w · (∂z_s/∂h_t)ᵀ (softmax(z_s) − 1[y_s]), because blocks attend only to earlier positions. The gradient
at the last position therefore depends only on the target of that position. When this target is known, its contribution
is subtracted from the gradients of the earlier positions, and the attack continues with the previous position. A
position without a remaining gradient has no target.

Matching labels to a gradient is the idea of Zhao et al. 2020, "iDLG: Improved Deep Leakage from Gradients". Here, the
gradient is with respect to hidden states, passes through a whole tail and is attacked position by position. Pass
`victim_model` to measure a client that has trained its tail since the server knew the weights.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch.nn.functional import cosine_similarity, cross_entropy
from transformers import PreTrainedModel

from ..distillation.pseudo_sampler import frozen
from ..split import LocalLink, Part, SplitModel, Wire
from ..split.messages import Backward, Hidden
from .examples import TokenizedExamples
from .part_inputs import answer_inputs, as_answers, context_end, model_inputs


# Number of examples that are attacked at a time.
_BATCH_SIZE = 8
# A position has a target if its remaining gradient is longer than this fraction of the longest gradient of the
# example. With a lower value, rounding errors of a narrow wire dtype count as targets. With a higher value, the attack
# misses targets that the model predicts with certainty.
_TARGET_THRESHOLD = 0.002
# Length of the step along the gradient, as a fraction of the length of the hidden state.
_STEP_SIZE = 1e-3


@dataclass(frozen=True)
class TargetRecovery:
    """
    Quality of the recovered targets. Scores are fractions of 1.

    Args:
        tail_blocks (`int`):
            Number of blocks that the client keeps after the second cut.
        wire_dtype (`str`):
            Dtype of the sent hidden states and gradients.
        targets (`str`):
            `"all"` if every token is a target, as in language modeling. `"last"` if only the last token of each
            example is a target, as for a label word after a text.
        token_recall (`float`):
            Fraction of the targets that were named at their position.
        position_precision (`float`):
            Fraction of the positions with a named target that have a target.
        position_recall (`float`):
            Fraction of the positions with a target at which a target was named.
        num_targets (`int`):
            Number of targets.

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
    Recover targets from a gradient.

    Args:
        tail ([`~split.Part`]):
            The last part of the client, with the weights that the attacker knows.
        states (`torch.Tensor`):
            Hidden states that the server sent, of shape `(num_examples, length, hidden)`.
        gradient (`torch.Tensor`):
            Gradient that the client sent back, of the same shape.
        attention_mask (`torch.Tensor`):
            Mask of shape `(num_examples, length)`, 1 for tokens, padded on the right.
        num_candidates (`int`, *optional*, defaults to `8`):
            Number of tokens whose gradients are compared at a position.

    Returns:
        `torch.Tensor`: The target token of each position, of shape `(num_examples, length)`, and −1 for positions
        without a target.
    """
    remaining = gradient.clone()
    longest = gradient.norm(dim=2).amax(1)
    named = torch.full(attention_mask.shape, -1, device=states.device)
    for position in reversed(range(states.shape[1])):
        is_long = remaining[:, position].norm(dim=1) > _TARGET_THRESHOLD * longest
        indices = (is_long & (attention_mask[:, position] > 0)).nonzero()[:, 0]
        if not len(indices):
            continue
        prefix, position_gradient = states[indices, : position + 1], remaining[indices, position]
        tokens, weights = _match_token(tail, prefix, position_gradient, num_candidates)
        named[indices, position] = tokens
        remaining[indices, : position + 1] -= weights[:, None, None] * _target_gradient(tail, prefix, tokens)
    return named


@torch.no_grad()
def _match_token(
    tail: Part, states: torch.Tensor, gradient: torch.Tensor, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Find the tokens whose gradients at the last position are most similar to the received gradients.

    The candidates are the tokens whose logits decrease most along the gradient. (∂z/∂h) g is most negative at the
    target, because the loss increases only the logit of the target.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The tokens and the weights by which their gradients are multiplied to fit
        the received gradients, each of shape `(num_examples,)`.
    """
    direction = gradient / gradient.norm(dim=1, keepdim=True)
    step = _STEP_SIZE * states[:, -1].norm(dim=1, keepdim=True) * direction
    moved = torch.cat([states, states])
    moved[:, -1] += torch.cat([step, -step])
    up, down = _last_logits(tail, moved).chunk(2)
    candidates = (down - up).topk(min(num_candidates, up.shape[1]), dim=1).indices
    gradients = _candidate_gradients(tail, states, candidates)
    similarity = cosine_similarity(gradients, gradient[:, None], dim=2)
    best = similarity.argmax(1, keepdim=True)
    chosen = gradients.take_along_dim(best[:, :, None], 1)[:, 0]
    weights = (chosen * gradient).sum(1) / chosen.square().sum(1).clamp_min(torch.finfo(chosen.dtype).tiny)
    return candidates.take_along_dim(best, 1)[:, 0], weights


def _candidate_gradients(tail: Part, states: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """
    Compute the gradient of each candidate's cross entropy with respect to the last hidden state.

    Returns:
        `torch.Tensor`: Gradients of shape `(num_examples, num_candidates, hidden)`.
    """
    cache, length = tail.new_cache(), states.shape[1]
    if length > 1:
        inputs = answer_inputs(tail, len(states), length - 1)
        tail(states[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1, **inputs)
    with torch.enable_grad():
        last = states[:, -1:].clone().requires_grad_()
        inputs = answer_inputs(tail, len(states), length, seen=length - 1)
        logits = tail(last, past_key_values=cache, use_cache=True, logits_to_keep=1, **inputs).logits[:, -1]
        losses = [cross_entropy(logits, candidates[:, index], reduction="sum") for index in range(candidates.shape[1])]
        gradients = [torch.autograd.grad(loss, last, retain_graph=True)[0][:, 0] for loss in losses]
    return torch.stack(gradients, 1)


def _target_gradient(tail: Part, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of the cross entropy at the last position with respect to all hidden states."""
    states = states.clone().requires_grad_()
    logits = _last_logits(tail, states)
    return torch.autograd.grad(cross_entropy(logits, tokens, reduction="sum"), states)[0]


def _last_logits(tail: Part, states: torch.Tensor) -> torch.Tensor:
    """Return the logits of the last position, of shape `(num_examples, vocabulary)`."""
    inputs = answer_inputs(tail, *states.shape[:2])
    return tail(states, use_cache=False, logits_to_keep=1, **inputs).logits[:, -1]


def attack_targets(
    model: PreTrainedModel,
    examples: TokenizedExamples,
    tail_blocks: int,
    wire_dtype: str,
    targets: str,
    victim_model: PreTrainedModel | None = None,
) -> TargetRecovery:
    """
    Recover the targets of victims' examples from the messages of a training step.

    Args:
        model (`PreTrainedModel`):
            The full model, without dropout. The attacker knows the weights of its tail.
        examples ([`TokenizedExamples`]):
            The victims' examples.
        tail_blocks (`int`):
            Number of blocks that the client keeps after the second cut.
        wire_dtype (`str`):
            Dtype of the sent hidden states and gradients.
        targets (`str`):
            `"all"` or `"last"`, as in [`TargetRecovery`].
        victim_model (`PreTrainedModel`, *optional*):
            The model that the victims train. Defaults to `model`.

    Raises:
        ValueError: If `targets` is unknown, if the cut does not fit the model, or if the model is not in float32.
    """
    if targets not in ("all", "last"):
        raise ValueError(f'targets={targets!r} is unknown. Set it to "all" or "last".')
    trained_model = model if victim_model is None else victim_model
    for checked_model in (model, trained_model):
        if checked_model.dtype != torch.float32:
            raise ValueError(
                f"The model is in {checked_model.dtype}, but the audit computes in float32. Load the model in float32."
            )
    # The number of blocks of the head does not matter for this attack.
    tail = SplitModel.from_model(model, 0, tail_blocks).client_tail.eval()
    split = SplitModel.from_model(trained_model, 0, tail_blocks, wire_dtype=wire_dtype).eval()
    device = split.client_tail.model.device
    examples = as_answers(examples, model.config)
    named, true = [], []
    with ExitStack() as stack:
        # Compute only gradients with respect to hidden states.
        for parameter in itertools.chain(model.parameters(), trained_model.parameters()):
            stack.enter_context(frozen(parameter))
        for start in range(0, len(examples), _BATCH_SIZE):
            ids = examples.input_ids[start : start + _BATCH_SIZE].to(device)
            mask = examples.attention_mask[start : start + _BATCH_SIZE].to(device)
            labels = ids.masked_fill(mask == 0, -100)
            labels[:, : len(context_end(model.config))] = -100
            if targets == "last":
                is_last = torch.arange(ids.shape[1], device=device) == mask.sum(1, keepdim=True) - 1
                labels = labels.masked_fill(~is_last, -100)
            states, gradient = _exchanged_tensors(split, ids, mask, labels)
            named.append(recover_targets(tail, states, gradient, mask))
            true.append(torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), -100)], dim=1))
    named_tokens, true_tokens = torch.cat(named), torch.cat(true)
    is_named, is_target = named_tokens >= 0, true_tokens != -100
    num_both, num_targets = int((is_named & is_target).sum()), int(is_target.sum())
    return TargetRecovery(
        tail_blocks,
        wire_dtype,
        targets,
        token_recall=int((named_tokens == true_tokens).sum()) / max(num_targets, 1),
        position_precision=num_both / max(int(is_named.sum()), 1),
        position_recall=num_both / max(num_targets, 1),
        num_targets=num_targets,
    )


def _exchanged_tensors(
    split: SplitModel, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states that the server sends in a step and the received gradient, after the wire encoding."""
    messages: list[bytes] = []
    assert isinstance(split.boundary.link, LocalLink)
    split.boundary.link.watch = lambda *messages_of_call: messages.extend(messages_of_call)
    split(**model_inputs(split, ids, mask), labels=labels).loss.backward()
    _, sent, received, _ = messages
    wire: Wire = split.boundary.wire
    encoded = (Hidden.from_bytes(sent).hidden, Backward.from_bytes(received).gradient)
    like = {"states": torch.empty(*ids.shape, split.config.hidden_size, device="meta")}
    states, gradient = (wire.decode(tensor, like)["states"].to(ids.device) for tensor in encoded)
    return states, gradient
