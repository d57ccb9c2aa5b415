"""Recovery of tokens from gradients of the embedding."""

from __future__ import annotations

import pytest
import torch
from audit_inputs import examples, tiny
from torch import nn

from hf_federated.audits import attack_embedding, embedding_gradient, recover_tokens
from hf_federated.audits.embedding_gradients import _first_adamw_step
from hf_federated.audits.examples import TokenizedExamples


BATCH = examples(4, seed=3)


def inputs_of_predictions() -> list[int]:
    """Return all tokens except the last token of each example, which predicts nothing."""
    tokens = set()
    for ids, mask in zip(BATCH.input_ids, BATCH.attention_mask, strict=True):
        tokens |= set(ids[: int(mask.sum()) - 1].tolist())
    return sorted(tokens)


def test_nonzero_rule_recovers_exactly_the_tokens_of_an_untied_embedding():
    gradient = embedding_gradient(tiny("llama"), BATCH)
    assert gradient is not None
    assert recover_tokens(gradient, "nonzero").tolist() == inputs_of_predictions()
    assert recover_tokens(_first_adamw_step(gradient), "nonzero").tolist() == inputs_of_predictions()


def test_embedding_gradient_equals_the_training_gradient():
    model = tiny("llama")
    labels = BATCH.input_ids.masked_fill(BATCH.attention_mask == 0, -100)
    model(BATCH.input_ids, attention_mask=BATCH.attention_mask, labels=labels).loss.backward()
    gradient = embedding_gradient(model.train(), BATCH)
    assert gradient is not None and torch.equal(gradient, model.get_input_embeddings().weight.grad)
    assert model.training


def test_first_adamw_step():
    gradient = torch.tensor([[0.5, -2.0], [0.0, 1e-3]])
    expected = gradient / (gradient.abs() + 1e-8)
    assert torch.allclose(_first_adamw_step(gradient), expected)


def test_tied_embedding_has_no_zero_rows_and_still_reveals_tokens():
    model = tiny("llama-tied")
    gradient = embedding_gradient(model, BATCH)
    assert gradient is not None and len(recover_tokens(gradient, "nonzero")) == len(gradient)
    results = {(result.source, result.rule): result for result in attack_embedding(model, BATCH, batch_size=2)}
    assert set(results) == {(source, rule) for source in ("gradient", "adamw") for rule in ("sign", "size")}
    share = results["gradient", "size"].num_tokens / len(gradient)
    best = results["gradient", "size"]
    # Random guesses of the known number of tokens are correct as often as a token of the vocabulary is in a batch.
    assert best.precision == pytest.approx(best.recall) and best.recall > 2 * share


def test_sign_rule_recovers_targets_if_all_final_states_are_equal():
    """With one final state s, the row of token v is (sum of p(v) - count(v) / n) · s, negative for targets only."""
    probabilities = torch.softmax(torch.randn(30, generator=torch.Generator().manual_seed(0)), 0)
    counts = torch.zeros(30)
    counts[torch.tensor([4, 9, 17])] = 1 / 3
    state = torch.randn(8, generator=torch.Generator().manual_seed(1))
    assert recover_tokens((probabilities - counts)[:, None] * state, "sign").tolist() == [4, 9, 17]


def test_frozen_embedding_has_no_gradient_and_no_results():
    model = tiny()
    model.get_input_embeddings().requires_grad_(False)
    assert embedding_gradient(model, BATCH) is None
    assert attack_embedding(model, BATCH, batch_size=2) == []


def test_results_are_averaged_over_batches():
    (gradient, adamw) = attack_embedding(tiny("llama"), BATCH, batch_size=3)
    sizes = [
        len(BATCH.input_ids[part][BATCH.attention_mask[part].bool()].unique()) for part in (slice(3), slice(3, 4))
    ]
    assert gradient.num_tokens == sum(sizes) / 2 and gradient.precision == adamw.precision == 1
    assert 0.8 < gradient.recall < 1


def test_batch_without_a_target_is_skipped():
    short = TokenizedExamples(BATCH.input_ids.clone(), BATCH.attention_mask.clone(), BATCH.scored.clone())
    short.attention_mask[3:, 1:] = 0
    results = attack_embedding(tiny("llama"), short, batch_size=3)
    assert results == attack_embedding(tiny("llama"), short.first(3), batch_size=3)


def test_unknown_rule_or_missing_num_tokens_raises():
    for rule in ("size", "magic"):
        with pytest.raises(ValueError, match=f"rule='{rule}' with num_tokens=None"):
            recover_tokens(nn.Parameter(torch.ones(2, 2)), rule)
