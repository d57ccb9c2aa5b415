"""Recover the tokens of a client's batch from the gradient or the change of its word embeddings.

A client that trains its embedding and sends it for averaging reveals the change of the embedding. The change
identifies tokens:

- The embedding of a token that does not occur in the batch has no gradient. If the input and output embeddings are two
  separate matrices, the changed rows *are* the tokens of the batch (Melis et al. 2019, "Exploiting Unintended Feature
  Leakage in Collaborative Learning").
- A tied matrix is also the output layer, whose softmax gives every row a gradient. In addition to the gradient of the
  input, the row of token v receives Σ_t (p_t(v) − 1[v = y_t]) · s_t, summed over the targets y_t with final states s_t
  and predicted probabilities p_t. The factor can be negative only if v is a target. The row then points against the
  other rows (the sign rule of Zhao et al. 2020, "iDLG: Improved Deep Leakage from Gradients", for a layer that
  predicts). The row is also larger than a row whose factor is a small probability.

A frozen embedding (LoRA, prefixes) sends no change and reveals nothing in this way. The last token of an example is
not the input of any prediction. Without a tied matrix, it does not appear in the gradient unless it also occurs
elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from .examples import TokenizedExamples
from .part_inputs import as_answers, model_inputs


@dataclass(frozen=True)
class TokenRecovery:
    """
    Quality of the recovered token sets, averaged over batches. Scores are fractions of 1.

    Args:
        source (`str`):
            `"gradient"`, or `"adamw"` for the change in the first AdamW step with this gradient.
        rule (`str`):
            `"nonzero"`, `"sign"` or `"size"`. See [`recover_tokens`].
        precision (`float`):
            Fraction of the named tokens that occur in the batch. 1 if no token was named.
        recall (`float`):
            Fraction of the tokens of the batch that were named.
        num_tokens (`float`):
            Mean number of distinct tokens in a batch.

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
    Recover tokens from a gradient or a change of the word embeddings.

    Args:
        change (`torch.Tensor`):
            A gradient, or the embeddings before training minus the embeddings after training, of shape
            `(vocabulary, embedding)`.
        rule (`str`):
            `"nonzero"` selects rows that are not zero, for an embedding that is not tied. `"sign"` selects rows that
            point against the mean direction of all rows, for a tied embedding. `"size"` selects the `num_tokens` rows
            with the largest Euclidean norms.
        num_tokens (`int`, *optional*):
            Number of tokens to select. Required for `"size"`.

    Returns:
        `torch.Tensor`: Token ids in ascending order.

    Raises:
        ValueError: If the rule is unknown, or if the rule is `"size"` and `num_tokens` is not given.

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
        # Most rows belong to tokens that are no targets. Rows are normalized, because the rows of targets are long.
        return (change @ normalize(change, dim=1).mean(0) < 0).nonzero()[:, 0]
    if rule == "size" and num_tokens is not None:
        return change.norm(dim=1).topk(num_tokens).indices.sort().values
    raise ValueError(
        f'rule={rule!r} with num_tokens={num_tokens} is not supported. Set rule to "nonzero", "sign" or "size", and'
        ' set num_tokens if rule is "size".'
    )


def embedding_gradient(model: PreTrainedModel, examples: TokenizedExamples) -> torch.Tensor | None:
    """
    Compute the gradient of the mean language modeling loss with respect to the word embeddings.

    Args:
        model (`PreTrainedModel`):
            The full model. It is run in evaluation mode, without dropout.
        examples ([`TokenizedExamples`]):
            The batch.

    Returns:
        `torch.Tensor`: Gradient of shape `(vocabulary, embedding)`, or `None` if the embedding is frozen.
    """
    weight = model.get_input_embeddings().weight
    if not weight.requires_grad:
        return None
    training = model.training
    model.eval()
    ids, mask = examples.input_ids.to(weight.device), examples.attention_mask.to(weight.device)
    loss = model(**model_inputs(model, ids, mask), labels=ids.masked_fill(mask == 0, -100)).loss
    (gradient,) = torch.autograd.grad(loss, [weight])
    model.train(training)
    return gradient


def attack_embedding(model: PreTrainedModel, examples: TokenizedExamples, batch_size: int) -> list[TokenRecovery]:
    """
    Recover the tokens of the victims' batches from the gradients of their embedding.

    Args:
        model (`PreTrainedModel`):
            The full model.
        examples ([`TokenizedExamples`]):
            The victims' examples.
        batch_size (`int`):
            Number of examples in a batch.

    Returns:
        `list[TokenRecovery]`: One result for each source and rule. The rule `"size"` is given the number of distinct
        tokens. The list is empty if the embedding is frozen.
    """
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    rules = ("sign", "size") if tied else ("nonzero",)
    examples = as_answers(examples, model.config)
    scores: dict[tuple[str, str], list[tuple[float, float, int]]] = {}
    for start in range(0, len(examples), batch_size):
        batch = examples[start : start + batch_size]
        if int(batch.attention_mask.sum(1).max()) < 2:
            continue  # without a target there is no gradient
        gradient = embedding_gradient(model, batch)
        if gradient is None:
            return []
        true = batch.input_ids[batch.attention_mask.bool()].unique().to(gradient.device)
        for source, change in (("gradient", gradient), ("adamw", _first_adamw_step(gradient))):
            for rule in rules:
                named = recover_tokens(change, rule, len(true))
                num_correct = int(torch.isin(named, true).sum())
                precision = num_correct / len(named) if len(named) else 1.0
                scores.setdefault((source, rule), []).append((precision, num_correct / len(true), len(true)))
    return [
        TokenRecovery(source, rule, *(sum(column) / len(values) for column in zip(*values, strict=True)))
        for (source, rule), values in scores.items()
    ]


def _first_adamw_step(gradient: torch.Tensor) -> torch.Tensor:
    """Return the first AdamW step: `Trainer` defaults, except a learning rate of 1 and no weight decay."""
    weight: Any = torch.nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient
    torch.optim.AdamW([weight], lr=1.0, weight_decay=0.0).step()
    return -weight.detach()
