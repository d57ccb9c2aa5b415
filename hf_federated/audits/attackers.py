"""Attackers that read tokens from the hidden states which leave a client of a split model.

All of them know what an honest-but-curious server with a colluding client knows: the pretrained weights, so the head
that victims hold; text of the colluding client; and the hidden states of victims' rows, as they crossed. None knows a
victim's token. The threat model is that of FL-GLM (Zheng et al. 2024), section 4.3.3, with one difference: a token is
sought at the position of its hidden state.

- [`NearestState`] needs no training: which token, run through the head without its row, comes nearest?
- [`LearnedDecoder`] is trained on the colluding client's hidden states and tokens, each position by itself, or with
  its neighbours through one block of a transformer, as the paper's attacker.
- [`PrefixSearch`] uses that the head is a known function of the tokens before: from left to right it runs what others
  propose behind what it has found so far, and keeps what gives the hidden state that crossed (Nikolaou et al. 2025,
  "Language Models are Injective and Hence Invertible", whose search goes through the whole vocabulary).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from ..split import Part
from ..utils.random import own_draws
from .config import AuditConfig
from .rows import TokenRows


class Attacker(Protocol):
    """What names tokens for hidden states."""

    def propose(self, states: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
        """
        Args:
            states (`torch.Tensor`): Shape `(rows, length, hidden)`, as they crossed.
            mask (`torch.Tensor`): Shape `(rows, length)`, 1 for tokens.
            number (`int`): Tokens wanted at each position, no more than the vocabulary has.

        Returns:
            `torch.Tensor`: Token ids of shape `(rows, length, number)`, the likeliest first.
        """


class NearestState:
    """
    The tokens whose hidden states, without their rows, are nearest by Euclidean distance.

    A token at the first position sees itself only, and so it is run. Elsewhere it is run behind one fixed token; how
    states of that token differ from position to position is subtracted, which takes learned positions away. Where the
    head is the embedding alone, these states are the word embeddings, and the nearest is the token.

    Args:
        head ([`Part`]): The client's first part, which the attacker has too.
        length (`int`): Positions of the longest row.
        fixed_token (`int`, *optional*, defaults to `0`): That which stands before each.
        batch_size (`int`, *optional*, defaults to `1024`): Tokens run at a time.
    """

    @torch.no_grad()
    def __init__(self, head: Part, length: int, fixed_token: int = 0, batch_size: int = 1024) -> None:
        embedding = word_embeddings(head)
        tokens = torch.arange(len(embedding), device=embedding.device).split(batch_size)
        before = torch.full((1, max(length, 2)), fixed_token, device=embedding.device)
        along = head(before, use_cache=False).logits[0]
        # Of shape (length, hidden).
        self._positions = along - along[1]
        self._first = torch.cat([head(some[:, None], use_cache=False).logits[:, 0] for some in tokens])
        pairs = (torch.stack([before[0, 0].expand_as(some), some], 1) for some in tokens)
        self._later = torch.cat([head(pair, use_cache=False).logits[:, 1] for pair in pairs])

    def propose(self, states: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
        """See [`Attacker`]."""
        found = []
        for position, at_position in enumerate(states.unbind(1)):
            table = self._first if position == 0 else self._later
            sought = at_position if position == 0 else at_position - self._positions[position]
            # |x - s|² without |x|², which is the same for all tokens.
            distances = table.square().sum(1) - 2 * sought @ table.T
            found.append(distances.topk(number, dim=1, largest=False).indices)
        return torch.stack(found, 1)


class LearnedDecoder(nn.Module):
    """
    A network from hidden states to tokens, trained on those of the colluding client.

    States are standardized, go through a linear layer (at first the identity) and either two layers at each position
    or one block of a transformer over all of them, and are compared by cosine with the word embeddings. As these stay
    as they are, tokens that the colluding client never wrote can be found too. Training minimises the cross entropy
    over a step's true tokens and random others.

    Args:
        embedding (`torch.Tensor`): Word embeddings, of shape `(vocabulary, embedding)`.
        states (`torch.Tensor`): Of the colluding client's rows, of shape `(rows, length, hidden)`, as they crossed.
        rows ([`TokenRows`]): These rows.
        config ([`AuditConfig`]): Steps, rates and seed.
        contextual (`bool`, *optional*, defaults to `False`): Whether a position's neighbours are looked at.
    """

    def __init__(
        self,
        embedding: torch.Tensor,
        states: torch.Tensor,
        rows: TokenRows,
        config: AuditConfig,
        contextual: bool = False,
    ) -> None:
        super().__init__()
        hidden_size = states.shape[-1]
        known = states[rows.attention_mask.bool()]
        self._mean, self._scale = known.mean(0), known.std(0).clamp_min(1e-6)
        self._table = normalize(embedding.detach().float(), dim=1)
        self.contextual = contextual
        with own_draws(config.seed):
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
        self._fit(states, rows, config)

    def forward(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """
        Args:
            states (`torch.Tensor`): Shape `(rows, length, hidden)`.
            mask (`torch.Tensor`): Shape `(rows, length)`.

        Returns:
            `torch.Tensor`: Directions in the space of the word embeddings, of shape `(rows, length, embedding)`.
        """
        states = (states - self._mean) / self._scale
        if self.contextual:
            mixed = self.mixer(states, src_key_padding_mask=mask == 0)
        else:
            mixed = states + self.mixer(states)
        return normalize(self.output(mixed), dim=-1)

    def _fit(self, states: torch.Tensor, rows: TokenRows, config: AuditConfig) -> None:
        generator = torch.Generator().manual_seed(config.seed)
        optimizer = torch.optim.AdamW(self.parameters(), lr=config.learning_rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / config.num_steps)
        vocabulary = len(self._table)
        for _ in range(config.num_steps):
            chosen = torch.randint(len(rows), (config.batch_size,), generator=generator)
            mask = rows.attention_mask[chosen].bool()
            true = rows.input_ids[chosen][mask]
            candidates = torch.arange(vocabulary)
            if vocabulary > config.num_negatives:
                others = torch.randint(vocabulary, (config.num_negatives,), generator=generator)
                candidates = torch.cat([true, others]).unique()
            directions = self(states[chosen.to(states.device)], mask.to(states.device))[mask.to(states.device)]
            logits = self.log_temperature.exp() * directions @ self._table[candidates.to(states.device)].T
            # The candidates are sorted.
            loss = cross_entropy(logits, torch.searchsorted(candidates, true).to(states.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()

    @torch.no_grad()
    def propose(self, states: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
        """See [`Attacker`]."""
        found = [
            (self(row[None], on[None])[0] @ self._table.T).topk(number, dim=1).indices
            for row, on in zip(states, mask, strict=True)
        ]
        return torch.stack(found)


class PrefixSearch:
    """
    Of what others propose, the token that gives the hidden state which crossed, behind those found before it.

    Args:
        head ([`Part`]): The client's first part, which the attacker has too.
        proposers (`Sequence[Attacker]`): Who proposes.
        num_candidates (`int`): Tokens that each of them proposes at a position.
        batch_size (`int`, *optional*, defaults to `8`): Rows searched at a time.

    Raises:
        ValueError: If the head's blocks run without a cache (ChatGLM's own classes).
    """

    def __init__(self, head: Part, proposers: Sequence[Attacker], num_candidates: int, batch_size: int = 8) -> None:
        self.head = head
        self.proposers = proposers
        self.num_candidates = min(num_candidates, len(word_embeddings(head)))
        self.batch_size = batch_size

    def propose(self, states: torch.Tensor, mask: torch.Tensor, number: int = 1) -> torch.Tensor:
        """See [`Attacker`]; it finds one token at each position, whatever the `number`."""
        proposals = [proposer.propose(states, mask, self.num_candidates) for proposer in self.proposers]
        candidates = torch.cat(proposals, -1)
        batches = zip(states.split(self.batch_size), candidates.split(self.batch_size), strict=True)
        return torch.cat([self._search(some, tokens) for some, tokens in batches])[:, :, None]

    @torch.no_grad()
    def _search(self, states: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Token ids of shape `(rows, length)`."""
        num_rows, length, width = candidates.shape
        cache, found = self.head.new_cache(), []
        first = torch.arange(num_rows, device=states.device) * width
        for position in range(length):
            tokens = candidates[:, position].reshape(-1, 1)
            cache.batch_repeat_interleave(width)
            places = torch.full((1, 1), position, device=states.device)
            tried = self.head(tokens, position_ids=places, past_key_values=cache, use_cache=True).logits
            tried = tried.view(num_rows, width, -1)
            best = (tried - states[:, position, None]).square().sum(-1).argmin(1)
            cache.batch_select_indices(first + best)
            found.append(candidates[:, position].gather(1, best[:, None])[:, 0])
        return torch.stack(found, 1)


def word_embeddings(head: Part) -> torch.Tensor:
    """The word embeddings of a client's first part, of shape `(vocabulary, embedding)`."""
    return head.model.get_submodule(head.layout.embedding).weight
