"""Which tokens a client's batch had, read from the gradient (or the change) of the word embeddings it shares.

A client whose embedding is trained and averaged sends its change, and the change names words:

- The embedding of a token that is not in the batch has no gradient. Where input and output embeddings are two
  matrices, the rows that changed *are* the tokens (Melis et al. 2019, "Exploiting Unintended Feature Leakage in
  Collaborative Learning").
- A tied matrix is also the output layer, whose softmax gives every row a gradient: Σ_t (p_t(v) − 1[v = y_t]) · s_t of
  token v over the targets y_t with final states s_t and predicted probabilities p_t, beside that of the input. Only
  where v is a target can the factor be negative, so that its row points against the others (the sign rule of Zhao et
  al. 2020, "iDLG: Improved Deep Leakage from Gradients", for a layer that predicts). And it is larger than where the
  factor is a small probability.

A frozen embedding (LoRA, prefixes) sends no change, and tells nothing in this way. The last token of a row is no input
of any prediction: without a tied matrix it is not in the gradient, unless it occurs elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from .rows import TokenRows


@dataclass(frozen=True)
class TokenRecovery:
    """
    How well the set of tokens of a batch was read, a mean over batches. Shares of 1.

    Args:
        source (`str`): `"gradient"`, or `"adamw"`: what the first AdamW step makes of it.
        rule (`str`): `"nonzero"`, `"sign"` or `"size"`; see [`recover_tokens`].
        precision (`float`): Of the tokens named, those in the batch. 1 if none was named.
        recall (`float`): Of the batch's tokens, those named.
        num_tokens (`float`): Different tokens of a batch.

    Example:

    ```python
    >>> from hf_federated.audits import TokenRecovery

    >>> TokenRecovery("gradient", "nonzero", precision=1.0, recall=1.0, num_tokens=12).rule
    'nonzero'
    ```
    """

    source: str
    rule: str
    precision: float
    recall: float
    num_tokens: float


def recover_tokens(change: torch.Tensor, rule: str, num_tokens: int | None = None) -> torch.Tensor:
    """
    The tokens that a gradient or a change of word embeddings gives away.

    Args:
        change (`torch.Tensor`): A gradient, or the embeddings before training without those after, of shape
            `(vocabulary, embedding)`.
        rule (`str`): `"nonzero"`: rows that are not zero, for an embedding that is not tied. `"sign"`: rows that point
            against the mean direction of all rows, for a tied one. `"size"`: the `num_tokens` rows with the largest
            Euclidean norms.
        num_tokens (`int`, *optional*): For `"size"`.

    Returns:
        `torch.Tensor`: Token ids, in rising order.

    Raises:
        ValueError: If the rule is not known, or `"size"` is not told how many.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.audits import recover_tokens

    >>> recover_tokens(torch.tensor([[0.0, 0.0], [0.1, -0.2], [0.0, 0.0]]), "nonzero").tolist()
    [1]
    >>> recover_tokens(torch.tensor([[0.1, 0.0], [0.2, 0.1], [-0.9, 0.1], [0.1, 0.1]]), "sign").tolist()
    [2]
    ```
    """
    if rule == "nonzero":
        return change.ne(0).any(1).nonzero()[:, 0]
    if rule == "sign":
        # Most rows are of no target; a row's length must not weigh, for those of targets are long.
        return (change @ normalize(change, dim=1).mean(0) < 0).nonzero()[:, 0]
    if rule == "size" and num_tokens is not None:
        return change.norm(dim=1).topk(num_tokens).indices.sort().values
    raise ValueError(f'The rule is "nonzero", "sign", or "size" with num_tokens; got {rule!r} and {num_tokens}.')


def embedding_gradient(model: PreTrainedModel, rows: TokenRows) -> torch.Tensor | None:
    """
    The gradient of the mean language-modelling loss of rows in the word embeddings.

    Args:
        model (`PreTrainedModel`): The whole model. It is run without dropout.
        rows ([`TokenRows`]): The batch.

    Returns:
        `torch.Tensor`: Shape `(vocabulary, embedding)`, or `None` where the embedding is frozen.
    """
    weight = model.get_input_embeddings().weight
    if not weight.requires_grad:
        return None
    training = model.training
    model.eval()
    ids, mask = rows.input_ids.to(weight.device), rows.attention_mask.to(weight.device)
    loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    (gradient,) = torch.autograd.grad(loss, [weight])
    model.train(training)
    return gradient


def attack_embedding(model: PreTrainedModel, rows: TokenRows, batch_size: int) -> list[TokenRecovery]:
    """
    Read the tokens of victims' batches from the gradients of their embedding.

    Args:
        model (`PreTrainedModel`): The whole model.
        rows ([`TokenRows`]): The victims' rows.
        batch_size (`int`): Rows of a batch.

    Returns:
        `list[TokenRecovery]`: One for each source and rule; `"size"` is told how many different tokens there are. None
        where the embedding is frozen.
    """
    tied = model.get_output_embeddings() is not None and (
        model.get_input_embeddings().weight is model.get_output_embeddings().weight
    )
    rules = ("sign", "size") if tied else ("nonzero",)
    found: dict[tuple[str, str], list[tuple[float, float, int]]] = {}
    for start in range(0, len(rows), batch_size):
        of_batch = slice(start, start + batch_size)
        batch = TokenRows(rows.input_ids[of_batch], rows.attention_mask[of_batch], rows.scored[of_batch])
        if int(batch.attention_mask.sum(1).max()) < 2:
            continue  # no target, and no gradient
        gradient = embedding_gradient(model, batch)
        if gradient is None:
            return []
        true = batch.input_ids[batch.attention_mask.bool()].unique().to(gradient.device)
        for source, change in (("gradient", gradient), ("adamw", _first_adamw_step(gradient))):
            for rule in rules:
                named = recover_tokens(change, rule, len(true))
                right = int(torch.isin(named, true).sum())
                precision = right / len(named) if len(named) else 1.0
                found.setdefault((source, rule), []).append((precision, right / len(true), len(true)))
    return [
        TokenRecovery(source, rule, *(sum(column) / len(values) for column in zip(*values, strict=True)))
        for (source, rule), values in found.items()
    ]


def _first_adamw_step(gradient: torch.Tensor) -> torch.Tensor:
    """What AdamW without weight decay subtracts in its first step, at the defaults of `Trainer` but for its rate."""
    weight: Any = torch.nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient
    torch.optim.AdamW([weight], lr=1.0, weight_decay=0.0).step()
    return -weight.detach()
