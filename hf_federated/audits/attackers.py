"""Attackers that recover tokens from the hidden states that a client of a split model sends.

All attackers have the knowledge of an honest-but-curious server with a colluding client: the pretrained weights and
therefore the victims' head, the text of the colluding client, and the hidden states that the server received for the
victims' examples. They do not know any tokens of the victims. The threat model is that of FL-GLM (Zheng et al. 2024),
section 4.3.3, except that the attackers recover the token at the position of each hidden state.

- [`NearestState`] is not trained. It selects the token whose hidden state without context is nearest.
- [`LearnedDecoder`] is trained on the hidden states and tokens of the colluding client. It decodes each position
  independently, or all positions with one transformer block, like the attacker in the paper.
- [`PrefixSearch`] uses the fact that the head is a known function of the preceding tokens. From left to right, it
  appends the proposals of other attackers to the tokens found so far, and keeps the proposal whose hidden state
  matches the received one (Nikolaou et al. 2025, "Language Models are Injective and Hence Invertible", whose search
  covers the whole vocabulary).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from ..split import Part
from ..utils.random import isolated_rng
from .config import AuditConfig
from .examples import TokenizedExamples
from .part_inputs import context_end, text_states


# Number of times that the search tries each position of a context that attends in both directions.
_NUM_SWEEPS = 2


class Attacker(Protocol):
    """Interface of an attacker that proposes tokens for hidden states."""

    def propose(self, states: torch.Tensor, mask: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """
        Propose tokens for each position.

        Args:
            states (`torch.Tensor`):
                Received hidden states of shape `(num_examples, length, hidden)`.
            mask (`torch.Tensor`):
                Mask of shape `(num_examples, length)`, 1 for tokens.
            num_tokens (`int`):
                Number of proposed tokens at each position, at most the size of the vocabulary.

        Returns:
            `torch.Tensor`: Token ids of shape `(num_examples, length, num_tokens)`, the likeliest token first.
        """


class NearestState:
    """
    Propose the tokens whose hidden states without context are nearest in Euclidean distance.

    A token at the first position attends to itself only, so the attacker runs each token alone. For later positions,
    the attacker runs each token after one fixed token. The differences between the states of the fixed token at
    different positions are subtracted, which removes learned position embeddings. If the head is the embedding alone,
    the states are the word embeddings and the nearest state belongs to the true token.

    Args:
        head ([`Part`]):
            The first part of the client, which the attacker also has.
        length (`int`):
            Number of positions of the longest example.
        fixed_token (`int`, *optional*, defaults to `0`):
            Id of the token that precedes each token.
        batch_size (`int`, *optional*, defaults to `1024`):
            Number of tokens that are run at a time.

    Example:

    ```python
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from hf_federated.audits import NearestState, build_head

    >>> config = LlamaConfig(
    ...     vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=1
    ... )
    >>> head = build_head(LlamaForCausalLM(config), head_blocks=0)
    >>> tokens = torch.tensor([[3, 5, 2]])
    >>> mask = torch.ones_like(tokens)
    >>> states = head(tokens, mask, use_cache=False).logits.detach()
    >>> NearestState(head, length=3).propose(states, mask, num_tokens=1).flatten().tolist()
    [3, 5, 2]
    ```
    """

    @torch.no_grad()
    def __init__(self, head: Part, length: int, fixed_token: int = 0, batch_size: int = 1024) -> None:
        embedding = word_embeddings(head)
        tokens = torch.arange(len(embedding), device=embedding.device).split(batch_size)
        repeated = torch.full((1, max(length, 2)), fixed_token, device=embedding.device)
        repeated_states = text_states(head, repeated)[0]
        # Shape (length, hidden).
        self._position_offsets = repeated_states - repeated_states[1]
        self._first = torch.cat([text_states(head, batch[:, None])[:, 0] for batch in tokens])
        pairs = (torch.stack([repeated[0, 0].expand_as(batch), batch], 1) for batch in tokens)
        self._later = torch.cat([text_states(head, pair)[:, 1] for pair in pairs])

    def propose(self, states: torch.Tensor, mask: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Propose tokens, see [`Attacker`]."""
        proposals = []
        for position, received in enumerate(states.unbind(1)):
            table = self._first if position == 0 else self._later
            query = received if position == 0 else received - self._position_offsets[position]
            # |x - s|² without |x|², which is the same for all tokens.
            distances = table.square().sum(1) - 2 * query @ table.T
            proposals.append(distances.topk(num_tokens, dim=1, largest=False).indices)
        return torch.stack(proposals, 1)


class LearnedDecoder(nn.Module):
    """
    Neural network that maps hidden states to tokens, trained on the data of the colluding client.

    Hidden states are standardized. They pass two layers at each position, or one transformer block over all positions,
    and then a linear layer that is initialized to the identity. The outputs are compared with the word embeddings by
    cosine similarity. The word embeddings are not trained, so the decoder can also recover tokens that do not occur in
    the text of the colluding client. Training minimizes the cross entropy over the true tokens of a step and random
    other tokens.

    Args:
        embedding (`torch.Tensor`):
            Word embeddings of shape `(vocabulary, embedding)`.
        states (`torch.Tensor`):
            Received hidden states of the colluding client's examples, of shape `(num_examples, length, hidden)`.
        examples ([`TokenizedExamples`]):
            The colluding client's examples.
        config ([`AuditConfig`]):
            Number of steps, learning rate and seed.
        contextual (`bool`, *optional*, defaults to `False`):
            Whether a position is decoded together with its neighbors, by the transformer block.

    Example:

    ```python
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from hf_federated.audits import AuditConfig, LearnedDecoder, TokenizedExamples, build_head

    >>> config = LlamaConfig(
    ...     vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=1
    ... )
    >>> head = build_head(LlamaForCausalLM(config), head_blocks=0)
    >>> tokens = torch.tensor([[3, 5, 2]])
    >>> mask = torch.ones_like(tokens)
    >>> states = head(tokens, mask, use_cache=False).logits.detach()
    >>> examples = TokenizedExamples(tokens, mask, mask.bool())
    >>> embedding = head.model.get_input_embeddings().weight
    >>> decoder = LearnedDecoder(embedding, states, examples, AuditConfig(num_steps=2))
    >>> decoder.propose(states, mask, num_tokens=4).shape
    torch.Size([1, 3, 4])
    ```
    """

    def __init__(
        self,
        embedding: torch.Tensor,
        states: torch.Tensor,
        examples: TokenizedExamples,
        config: AuditConfig,
        contextual: bool = False,
    ) -> None:
        super().__init__()
        hidden_size = states.shape[-1]
        known = states[examples.attention_mask.bool()]
        self._mean, self._scale = known.mean(0), known.std(0).clamp_min(1e-6)
        self._table = normalize(embedding.detach().float(), dim=1)
        self.contextual = contextual
        with isolated_rng(config.seed):
            if contextual:
                heads = next(number for number in (8, 4, 2, 1) if hidden_size % number == 0)
                self.mixer: nn.Module = nn.TransformerEncoderLayer(
                    hidden_size, heads, 2 * hidden_size, dropout=0.0, activation="gelu", batch_first=True
                )
            else:
                layers = (nn.Linear(hidden_size, 2 * hidden_size), nn.GELU(), nn.Linear(2 * hidden_size, hidden_size))
                self.mixer = nn.Sequential(*layers)
            self.output = nn.Linear(hidden_size, embedding.shape[1])
        nn.init.eye_(self.output.weight)
        self.log_temperature = nn.Parameter(torch.tensor(3.0))
        self.to(states.device)
        self._fit(states, examples, config)

    def forward(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """
        Map hidden states to directions in the space of the word embeddings.

        Args:
            states (`torch.Tensor`):
                Hidden states of shape `(num_examples, length, hidden)`.
            mask (`torch.Tensor`):
                Mask of shape `(num_examples, length)`, 1 for tokens.

        Returns:
            `torch.Tensor`: Unit vectors of shape `(num_examples, length, embedding)`.
        """
        states = (states - self._mean) / self._scale
        if self.contextual:
            mixed = self.mixer(states, src_key_padding_mask=mask == 0)
        else:
            mixed = states + self.mixer(states)
        return normalize(self.output(mixed), dim=-1)

    def _fit(self, states: torch.Tensor, examples: TokenizedExamples, config: AuditConfig) -> None:
        generator = torch.Generator().manual_seed(config.seed)
        optimizer = torch.optim.AdamW(self.parameters(), lr=config.learning_rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / config.num_steps)
        vocabulary = len(self._table)
        for _ in range(config.num_steps):
            chosen = torch.randint(len(examples), (config.batch_size,), generator=generator)
            mask = examples.attention_mask[chosen].bool()
            true = examples.input_ids[chosen][mask]
            candidates = torch.arange(vocabulary)
            if vocabulary > config.num_negatives:
                negatives = torch.randint(vocabulary, (config.num_negatives,), generator=generator)
                candidates = torch.cat([true, negatives]).unique()
            directions = self(states[chosen.to(states.device)], mask.to(states.device))[mask.to(states.device)]
            logits = self.log_temperature.exp() * directions @ self._table[candidates.to(states.device)].T
            # `candidates` is sorted.
            loss = cross_entropy(logits, torch.searchsorted(candidates, true).to(states.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()

    @torch.no_grad()
    def propose(self, states: torch.Tensor, mask: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Propose tokens, see [`Attacker`]."""
        proposals = [
            (self(example_states[None], example_mask[None])[0] @ self._table.T).topk(num_tokens, dim=1).indices
            for example_states, example_mask in zip(states, mask, strict=True)
        ]
        return torch.stack(proposals)


class PrefixSearch:
    """
    Select, from the proposals of other attackers, the token that reproduces the received hidden state.

    The search runs from left to right. Each proposal is appended to the tokens found so far. If the context of the
    model attends in both directions (ChatGLM-6B), a hidden state also depends on the later tokens. The search then
    starts from the first proposals for the whole text, and replaces one token after another, twice.

    Args:
        head ([`Part`]):
            The first part of the client, which the attacker also has.
        proposers (`Sequence[Attacker]`):
            The attackers that propose tokens.
        num_candidates (`int`):
            Number of tokens that each of these attackers proposes at a position.
        batch_size (`int`, *optional*, defaults to `8`):
            Number of examples that are searched at a time.

    Example:

    ```python
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from hf_federated.audits import NearestState, PrefixSearch, build_head

    >>> config = LlamaConfig(
    ...     vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=1
    ... )
    >>> head = build_head(LlamaForCausalLM(config), head_blocks=1)
    >>> tokens = torch.tensor([[3, 5, 2]])
    >>> mask = torch.ones_like(tokens)
    >>> states = head(tokens, mask, use_cache=False).logits.detach()
    >>> search = PrefixSearch(head, [NearestState(head, length=3)], num_candidates=9)
    >>> search.propose(states, mask).flatten().tolist()
    [3, 5, 2]
    ```
    """

    def __init__(self, head: Part, proposers: Sequence[Attacker], num_candidates: int, batch_size: int = 8) -> None:
        self.head = head
        self.proposers = proposers
        self.num_candidates = min(num_candidates, len(word_embeddings(head)))
        self.batch_size = batch_size

    def propose(self, states: torch.Tensor, mask: torch.Tensor, num_tokens: int = 1) -> torch.Tensor:
        """Find one token at each position, see [`Attacker`]. `num_tokens` is ignored."""
        proposals = [proposer.propose(states, mask, self.num_candidates) for proposer in self.proposers]
        candidates = torch.cat(proposals, -1)
        if context_end(self.head.model.config):
            rows = zip(states, mask, candidates, strict=True)
            return torch.stack([self._search_context(*row) for row in rows])[:, :, None]
        batches = zip(states.split(self.batch_size), candidates.split(self.batch_size), strict=True)
        return torch.cat([self._search(batch, tokens) for batch, tokens in batches])[:, :, None]

    @torch.no_grad()
    def _search(self, states: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Return token ids of shape `(num_examples, length)`."""
        num_examples, length, width = candidates.shape
        cache, found = self.head.new_cache(), []
        first = torch.arange(num_examples, device=states.device) * width
        for position in range(length):
            tokens = candidates[:, position].reshape(-1, 1)
            cache.batch_repeat_interleave(width)
            position_ids = torch.full((1, 1), position, device=states.device)
            candidate_states = self.head(
                tokens, position_ids=position_ids, past_key_values=cache, use_cache=True
            ).logits
            candidate_states = candidate_states.view(num_examples, width, -1)
            best = (candidate_states - states[:, position, None]).square().sum(-1).argmin(1)
            cache.batch_select_indices(first + best)
            found.append(candidates[:, position].gather(1, best[:, None])[:, 0])
        return torch.stack(found, 1)

    @torch.no_grad()
    def _search_context(self, states: torch.Tensor, mask: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Return token ids of shape `(length,)` for an example in a context that attends in both directions."""
        found = candidates[:, 0].clone()
        # The server knows the length of the context.
        length = int(mask.sum()) - len(context_end(self.head.model.config))
        for position in list(range(length)) * _NUM_SWEEPS:
            trials = found[:length].repeat(candidates.shape[1], 1)
            trials[:, position] = candidates[position]
            distances = (text_states(self.head, trials) - states[:length]).square().sum((1, 2))
            found[position] = candidates[position, distances.argmin()]
        return found


def word_embeddings(head: Part) -> torch.Tensor:
    """Return the word embeddings of a client's first part, of shape `(vocabulary, embedding)`."""
    return head.model.get_submodule(head.layout.embedding).weight
