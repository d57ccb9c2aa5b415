"""Name the tokens of a client from the change of its word embeddings, over any number of local steps.

The gradient of the word embedding of a token that the client does not have is zero. Its row changes only by weight
decay, which multiplies all such rows by the same factor. Adam's moments of such a row stay zero. The changed rows are
therefore the client's exact vocabulary (Melis et al. 2019, "Exploiting Unintended Feature Leakage in Collaborative
Learning"), after any number of steps. Clipping of the update multiplies all rows by one more factor, and changes
nothing. `embedding_gradients.py` attacks gradients, and matrices that are also the output layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from .evidence import AttackResult, Evidence


# With weight decay, a row is unchanged if it differs from pure decay by at most this number of roundings.
_MIN_ROUNDINGS = 8
# In a payload with noise, a row is changed if its length exceeds the median by this number of standard deviations.
_NUM_DEVIATIONS = 6
# The largest error of a rounded decay is at most this multiple of the median error.
_ERROR_FACTOR = 8
# Largest median error of a decay in bfloat16. Noise has larger errors.
_LARGEST_ERROR = 2**-8
# If a larger share of the rows changed, the payload contains noise, or the matrix is also the output layer.
_NOISE_SHARE = 0.99


class TokenSet:
    """
    Name the tokens whose word embeddings a client changed.

    If the payload has no word embeddings (frozen embeddings, LoRA, predictions), the attacker names the most frequent
    tokens of public texts instead. The result is then the chance level.

    A sum of updates names the tokens of all its clients. The attack does not assign a token to a client.

    Relations:
        - [`Dager`] recovers the order of the tokens, and needs the attention layers in place of the embeddings.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.audits import TokenSet

    >>> before = torch.ones(4, 2)
    >>> after = 0.99 * before  # weight decay
    >>> after[2] += torch.tensor([0.1, -0.1])
    >>> TokenSet.changed_rows(before, after).tolist()
    [2]
    ```
    """

    name = "token_set"

    def run(self, evidence: Evidence) -> list[AttackResult]:
        """
        Attack a payload of the recipe's local training.

        Args:
            evidence ([`Evidence`]): `payload` is attacked.

        Returns:
            `list[AttackResult]`: `precision` and `recall` of the named tokens, and `chance`, the recall of naming the
            same number of frequent tokens. For a sum, these are scores for the tokens of one client, and
            `union_precision` and `union_recall` are scores for the tokens of all clients in the sum.
        """
        payload = evidence.payload
        if payload is None:
            return []
        true = {token for ids in payload.token_ids for token in ids}
        union = true.union(*payload.other_token_ids)
        guess = self._frequent_tokens(evidence.public_token_ids, len(union))
        chance = len(guess & true) / len(true)
        weight = evidence.model.get_input_embeddings().weight
        name = next((name for name, value in evidence.model.named_parameters() if value is weight), None)
        note = ""
        if name in payload.after:
            named = set(self.changed_rows(payload.before[name], payload.after[name], payload.num_steps).tolist())
        else:
            named, note = guess, "The payload has no word embeddings. The attacker guesses frequent tokens."
        metrics = {**_scores(named, true), "chance": chance}
        if payload.other_token_ids:
            metrics |= {f"union_{metric}": value for metric, value in _scores(named, union).items()}
        return [AttackResult(self.name, metrics, note=note)]

    @staticmethod
    def changed_rows(before: torch.Tensor, after: torch.Tensor, num_steps: int = 1) -> torch.Tensor:
        """
        Return the rows of a matrix that changed by more than weight decay.

        Args:
            before (`torch.Tensor`): The matrix before training, of shape `(vocabulary, embedding)`.
            after (`torch.Tensor`): The matrix after training.
            num_steps (`int`, *optional*, defaults to `1`): Number of optimizer steps, which an update contains.

        Returns:
            `torch.Tensor`: Row numbers in ascending order, `int64`.
        """
        dtype, before, change = after.dtype, before.double(), after.double() - before.double()
        # Most rows belong to tokens that the client does not have, so the median ratio is the decay.
        used = before != 0
        decay = (change[used] / before[used]).median() if used.any() else before.new_zeros(())
        remaining = (change - decay * before).abs()
        changed = change.ne(0).any(1)
        if decay != 0:
            # Every step of pure decay is rounded once. Changes in bfloat16 have errors in proportion to the decay.
            rounding = max(_MIN_ROUNDINGS, num_steps) * torch.finfo(dtype).eps * before.abs()
            error = (remaining[used] / (decay * before[used]).abs()).median().clamp_max(_LARGEST_ERROR)
            changed = (remaining > rounding + _ERROR_FACTOR * error * (decay * before).abs()).any(1)
        if changed.double().mean() > _NOISE_SHARE:
            lengths = change.norm(dim=1)
            deviation = 1.4826 * (lengths - lengths.median()).abs().median()
            changed = lengths > lengths.median() + _NUM_DEVIATIONS * deviation
        return changed.nonzero()[:, 0]

    @staticmethod
    def _frequent_tokens(token_ids: Sequence[Sequence[int]], num_tokens: int) -> set[int]:
        counts = Counter(token for ids in token_ids for token in ids)
        return {token for token, _ in counts.most_common(num_tokens)}


def _scores(named: set[int], true: set[int]) -> dict[str, float]:
    """Return precision and recall. The precision of no tokens is missing."""
    num_correct = len(named & true)
    precision = {"precision": num_correct / len(named)} if named else {}
    return {**precision, "recall": num_correct / len(true)}
