"""Tokens from gradients of the embedding."""

from __future__ import annotations

import pytest
import torch
from attacked import rows, tiny
from torch import nn

from hf_federated.audits import attack_embedding, embedding_gradient, recover_tokens
from hf_federated.audits.embedding_gradients import _first_adamw_step
from hf_federated.audits.rows import TokenRows


BATCH = rows(4, seed=3)


def inputs_of_predictions() -> list[int]:
    """All tokens but the last of each row, which predicts nothing."""
    found = set()
    for ids, mask in zip(BATCH.input_ids, BATCH.attention_mask, strict=True):
        found |= set(ids[: int(mask.sum()) - 1].tolist())
    return sorted(found)


def test_an_untied_embedding_names_exactly_the_tokens():
    gradient = embedding_gradient(tiny("llama"), BATCH)
    assert gradient is not None
    assert recover_tokens(gradient, "nonzero").tolist() == inputs_of_predictions()
    assert recover_tokens(_first_adamw_step(gradient), "nonzero").tolist() == inputs_of_predictions()


def test_the_gradient_is_that_of_training():
    model = tiny("llama")
    labels = BATCH.input_ids.masked_fill(BATCH.attention_mask == 0, -100)
    model(BATCH.input_ids, attention_mask=BATCH.attention_mask, labels=labels).loss.backward()
    gradient = embedding_gradient(model.train(), BATCH)
    assert gradient is not None and torch.equal(gradient, model.get_input_embeddings().weight.grad)
    assert model.training


def test_a_first_step_is_that_of_adamw():
    gradient = torch.tensor([[0.5, -2.0], [0.0, 1e-3]])
    expected = gradient / (gradient.abs() + 1e-8)
    assert torch.allclose(_first_adamw_step(gradient), expected)


def test_a_tied_embedding_has_no_row_of_zeros_and_still_names_tokens():
    model = tiny("llama-tied")
    gradient = embedding_gradient(model, BATCH)
    assert gradient is not None and len(recover_tokens(gradient, "nonzero")) == len(gradient)
    found = {(one.source, one.rule): one for one in attack_embedding(model, BATCH, batch_size=2)}
    assert set(found) == {(source, rule) for source in ("gradient", "adamw") for rule in ("sign", "size")}
    share = found["gradient", "size"].num_tokens / len(gradient)
    best = found["gradient", "size"]
    # Told how many there are, guesses would be right as often as tokens of the vocabulary are in a batch.
    assert best.precision == pytest.approx(best.recall) and best.recall > 2 * share


def test_the_sign_names_targets_where_states_point_one_way():
    """With one final state s the row of token v is (sum of p(v) - count(v) / n) · s, negative for targets alone."""
    probabilities = torch.softmax(torch.randn(30, generator=torch.Generator().manual_seed(0)), 0)
    counts = torch.zeros(30)
    counts[torch.tensor([4, 9, 17])] = 1 / 3
    state = torch.randn(8, generator=torch.Generator().manual_seed(1))
    assert recover_tokens((probabilities - counts)[:, None] * state, "sign").tolist() == [4, 9, 17]


def test_a_frozen_embedding_leaves_nothing():
    model = tiny()
    model.get_input_embeddings().requires_grad_(False)
    assert embedding_gradient(model, BATCH) is None
    assert attack_embedding(model, BATCH, batch_size=2) == []


def test_batches_are_attacked_one_by_one():
    (gradient, adamw) = attack_embedding(tiny("llama"), BATCH, batch_size=3)
    sizes = [
        len(BATCH.input_ids[part][BATCH.attention_mask[part].bool()].unique()) for part in (slice(3), slice(3, 4))
    ]
    assert gradient.num_tokens == sum(sizes) / 2 and gradient.precision == adamw.precision == 1
    assert 0.8 < gradient.recall < 1


def test_a_batch_without_a_target_has_nothing_to_find():
    short = TokenRows(BATCH.input_ids.clone(), BATCH.attention_mask.clone(), BATCH.scored.clone())
    short.attention_mask[3:, 1:] = 0
    found = attack_embedding(tiny("llama"), short, batch_size=3)
    assert found == attack_embedding(tiny("llama"), short.first(3), batch_size=3)


def test_a_rule_that_is_not_known_is_refused():
    for rule in ("size", "magic"):
        with pytest.raises(ValueError, match=f"got '{rule}' and None"):
            recover_tokens(nn.Parameter(torch.ones(2, 2)), rule)
