"""DAGER: recover the examples of a client from the change of its first two attention layers.

[DAGER: Exact Gradient Inversion for Large Language Models](https://arxiv.org/abs/2405.15586) (Petrov et al., NeurIPS
2024). A linear layer `Y = X Wᵀ` has the gradient `∂L/∂W = (∂L/∂Y)ᵀ X`. Its rows are combinations of the inputs `X`,
one input for each token of the batch. If the batch has fewer tokens than the layer has inputs, the row space of the
gradient has a low dimension. It contains every true input and almost no other input. The attack tests candidates:

1. At the first attention layer, the input of a token depends only on the token and its position. The attack tests all
   tokens of the vocabulary at all positions.
2. At the second attention layer, the input of a token depends on the other tokens of its example. The attack tests
   sequences of the tokens of step 1. For a decoder, it extends sequences token by token, because an input depends only
   on earlier tokens. For an encoder, it tests whole sequences: all sequences if their number is at most
   `max_sequences`, otherwise it exchanges neighboring tokens of a sequence as long as the distance decreases. The
   published code draws random sequences in this case.

Two details differ from the paper. The attack reads all linear layers of a block that have the same input (query, key
and value), and not the query alone. The rank is not a constant: the singular values that exceed the noise are selected
with [The Optimal Hard Threshold for Singular Values is 4/√3](https://arxiv.org/abs/1305.5870) (Gavish and Donoho,
2014). A payload contains parameters and not gradients, so its singular values contain rounding errors. With rounding
errors, the batch must have fewer tokens than half of the layer's inputs.

The attack is exact for one SGD step. After several steps or with another optimizer the change is not a gradient, and
the attack is an approximation.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from .attention_probe import BATCH_SIZE, AttentionProbe, NoSpanError
from .evidence import AttackResult, Evidence, Payload


# Number of passes over all positions when tokens of a sequence are exchanged.
_MAX_SWEEPS = 4
# Number of starts of this search for each example.
_NUM_STARTS = 4


class Dager:
    """
    Recover examples from the change of the attention layers, see the module.

    Args:
        tolerance (`float`, *optional*, defaults to `0.1`):
            Largest distance of a candidate's input to the span, relative to the length of the input.
        max_sequences (`int`, *optional*, defaults to `4096`):
            Maximum number of sequences of an encoder that are tested exhaustively, and maximum number of unfinished
            sequences of a decoder.
        max_candidates (`int`, *optional*, defaults to `2`):
            Maximum number of tokens that are tried at a position, for each example of the client. If the inputs of the
            first layer do not depend on the position, the maximum holds for the whole example.

    Relations:
        - [`TokenSet`] needs the word embeddings in the payload and names a set of tokens. DAGER needs the attention
          layers and recovers sequences, also if the embeddings are frozen.
        - Published rate (abstract): ROUGE-1 and ROUGE-2 above 0.99 for batches of up to 128 examples.

    Example:

    ```python
    >>> import torch
    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> from hf_federated.audits import Dager, Payload

    >>> config = BertConfig(vocab_size=30, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    ...                     num_attention_heads=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    >>> model = BertForSequenceClassification(config).double()
    >>> loss = model(input_ids=torch.tensor([[5, 9, 7, 2]]), labels=torch.tensor([1])).loss
    >>> names, parameters = zip(*model.named_parameters())
    >>> gradients = torch.autograd.grad(loss, parameters)
    >>> before = {name: value.detach() for name, value in zip(names, parameters)}
    >>> after = {name: value - gradient for (name, value), gradient in zip(before.items(), gradients)}
    >>> Dager().recover(model, Payload(before, after, [[5, 9, 7, 2]]), end_token=2, max_length=6)
    [[5, 9, 7, 2]]
    ```
    """

    name = "dager"

    def __init__(self, tolerance: float = 0.1, max_sequences: int = 4096, max_candidates: int = 2) -> None:
        self.tolerance = tolerance
        self.max_sequences = max_sequences
        self.max_candidates = max_candidates

    def run(self, evidence: Evidence) -> list[AttackResult]:
        """
        Attack a payload of one SGD step, and a payload of the recipe's local training.

        Args:
            evidence ([`Evidence`]): `step_payload` and `small_payload` are attacked.

        Returns:
            `list[AttackResult]`: `dager_step` and `dager_run`, with the share of the tokens that were recovered at
            their position (`tokens`), and the share of the examples that were recovered completely (`examples`). For a
            sum, these are the shares of one client, and `union_tokens` and `union_examples` the shares of all clients
            in the sum.
        """
        results = []
        for name, payload in (("dager_step", evidence.step_payload), ("dager_run", evidence.small_payload)):
            if payload is None:
                continue
            found: list[list[int]] = []
            note = "The payload has no parameters." if not payload.after else ""
            if payload.after:
                try:
                    found = self.recover(evidence.model, payload, evidence.end_token, evidence.max_length)
                except NoSpanError as error:
                    note = str(error)
            metrics = score_sequences(found, payload.token_ids)
            if payload.other_token_ids:
                union = score_sequences(found, [*payload.token_ids, *payload.other_token_ids])
                metrics |= {f"union_{metric}": value for metric, value in union.items()}
            results.append(AttackResult(name, metrics, note=note))
        return results

    def recover(
        self, model: nn.Module, payload: Payload, end_token: int | None = None, max_length: int = 64
    ) -> list[list[int]]:
        """
        Recover the examples of a payload.

        Args:
            model (`torch.nn.Module`):
                The model, which can have an adapter. It is copied.
            payload ([`Payload`]):
                The payload. The number of its examples is known to the server; the token ids are not read.
            end_token (`int`, *optional*):
                Token that ends each example. Required for encoders.
            max_length (`int`, *optional*, defaults to `64`):
                Maximum number of tokens of an example.

        Returns:
            `list[list[int]]`: Token ids of the recovered examples, at most as many as the clients of the payload have.

        Raises:
            NoSpanError: If the payload does not contain the change of an attention layer, or if the change is zero.
        """
        num_examples = payload.num_examples
        probe = AttentionProbe(model, payload)
        candidates = self._candidates(probe, num_examples, max_length)
        if not candidates or not candidates[0]:
            return []
        if probe.is_causal():
            found = self._search_decoder(probe, candidates, end_token)
        else:
            found = self._search_encoder(probe, candidates, num_examples, end_token)
        return found[:num_examples]

    @torch.no_grad()
    def _candidates(self, probe: AttentionProbe, num_examples: int, max_length: int) -> list[list[int]]:
        """Return the tokens of each position whose inputs of the first layer are in the span, the nearest first."""
        length = min(max_length, probe.max_positions)
        distances = torch.cat(
            [
                probe.distance(0, tokens[:, None].expand(-1, length))
                for tokens in torch.arange(probe.vocabulary_size).split(BATCH_SIZE)
            ]
        )
        limit = num_examples * self.max_candidates
        if torch.allclose(distances[:, 0], distances[:, -1], atol=1e-6):
            limit *= length
        values, tokens = distances.topk(min(limit, len(distances)), dim=0, largest=False)
        return [
            [int(token) for token, value in zip(tokens[:, i], values[:, i], strict=True) if value < self.tolerance]
            for i in range(length)
        ]

    def _search_decoder(
        self, probe: AttentionProbe, candidates: list[list[int]], end_token: int | None
    ) -> list[list[int]]:
        """Extend sequences by the candidates whose inputs of the second layer are in the span. Best sequence first."""
        prefixes: list[tuple[list[int], float]] = [([], 0.0)]
        finished: list[tuple[list[int], float]] = []
        for options in candidates:
            extended: list[tuple[list[int], float]] = []
            sequences = [[*prefix, token] for prefix, _ in prefixes for token in options]
            distances = probe.last_distances(sequences)
            continued = set()
            for number, (sequence, distance) in enumerate(zip(sequences, distances, strict=True)):
                if distance < self.tolerance:
                    continued.add(number // len(options))
                    target = finished if sequence[-1] == end_token and len(sequence) > 1 else extended
                    target.append((sequence, distance))
            finished += [prefix for number, prefix in enumerate(prefixes) if number not in continued and prefix[0]]
            prefixes = sorted(extended, key=lambda item: item[1])[: self.max_sequences]
            if not prefixes:
                break
        # Longer sequences first: a sequence that ended early is a prefix that no candidate continued.
        found = sorted([*finished, *prefixes], key=lambda item: (-len(item[0]), item[1]))
        return [sequence for sequence, _ in found]

    def _search_encoder(
        self, probe: AttentionProbe, candidates: list[list[int]], num_examples: int, end_token: int | None
    ) -> list[list[int]]:
        """Test whole sequences of each possible length, a position with the end token. Best sequence first."""
        found: dict[tuple[int, ...], float] = {}
        lengths = [length for length in range(1, len(candidates) + 1) if all(candidates[:length])]
        for length in lengths if end_token is not None else lengths[-1:]:
            options = candidates[:length]
            if end_token is not None:
                # The end token ends the sequence and does not occur within it.
                within = [[token for token in tokens if token != end_token] for tokens in options[:-1]]
                if end_token not in options[-1] or not all(within):
                    continue
                options = [*within, [end_token]]
            if math.prod(map(len, options)) <= self.max_sequences:
                sequences = [list(sequence) for sequence in itertools.product(*options)]
                found |= zip(map(tuple, sequences), probe.sequence_distances(sequences), strict=True)
            else:
                found |= {tuple(s): d for s, d in self._exchange_tokens(probe, options, num_examples)}
        accepted = [sequence for sequence, distance in found.items() if distance < self.tolerance]
        return _distinct([list(sequence) for sequence in sorted(accepted, key=found.__getitem__)])

    def _exchange_tokens(
        self, probe: AttentionProbe, options: list[list[int]], num_examples: int
    ) -> Iterable[tuple[list[int], float]]:
        """Exchange neighboring tokens as long as the distance decreases, from random starts for each example."""
        draw = random.Random(0)
        for start in range(_NUM_STARTS * num_examples):
            # The first start has the nearest token at each position.
            sequence = [draw.choice(tokens) if start else tokens[0] for tokens in options]
            best = probe.sequence_distances([sequence])[0]
            for _ in range(_MAX_SWEEPS):
                before = best
                for position in range(len(options) - 1):
                    # Two neighbors at a time: swapped tokens are a local minimum of single exchanges.
                    pairs = list(itertools.product(*options[position : position + 2]))
                    if len(pairs) == 1:
                        continue
                    trials = [[*sequence[:position], *pair, *sequence[position + 2 :]] for pair in pairs]
                    distances = probe.sequence_distances(trials)
                    chosen = min(range(len(trials)), key=distances.__getitem__)
                    if distances[chosen] < best:
                        sequence, best = trials[chosen], distances[chosen]
                if best >= before:
                    break
            yield sequence, best


def _distinct(found: list[list[int]], share: float = 0.7) -> list[list[int]]:
    """Drop sequences of which most tokens equal those of a preceding sequence, as the published code does."""
    kept: list[list[int]] = []
    for sequence in found:
        if all(_num_equal(sequence, other) < share * len(sequence) for other in kept):
            kept.append(sequence)
    return kept


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(a == b for a, b in zip(first, second, strict=False)) if len(first) == len(second) else 0


def score_sequences(found: Sequence[Sequence[int]], true: Sequence[Sequence[int]]) -> dict[str, float]:
    """
    Compare recovered sequences with the true ones. Each recovered sequence is compared with one true sequence.

    Args:
        found (`list[list[int]]`):
            Token ids of the recovered sequences.
        true (`list[list[int]]`):
            Token ids of the client's examples.

    Returns:
        `dict[str, float]`: `tokens`, the share of the true tokens that were recovered at their position, and
        `examples`, the share of the true sequences that were recovered completely.
    """
    hits = [[sum(a == b for a, b in zip(sequence, target, strict=False)) for target in true] for sequence in found]
    free_found, free_true = set(range(len(found))), set(range(len(true)))
    num_tokens = num_examples = 0
    pairs = sorted(itertools.product(free_found, free_true), key=lambda pair: -hits[pair[0]][pair[1]])
    for number, target in pairs:
        if number in free_found and target in free_true:
            free_found.remove(number)
            free_true.remove(target)
            num_tokens += hits[number][target]
            num_examples += list(found[number]) == list(true[target])
    return {"tokens": num_tokens / sum(map(len, true)), "examples": num_examples / len(true)}
