"""Targets from the gradients that a client sends back."""

from __future__ import annotations

import pytest
import torch
from attacked import MODELS, NUM_BLOCKS, rows, tiny
from torch.nn.functional import cross_entropy

from hf_federated import SplitModel
from hf_federated.audits import attack_targets, recover_targets
from hf_federated.audits.targets import _crossed


BATCH = rows(4, seed=3)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("tail_blocks", [1, 2])
def test_targets_are_read_from_any_tail(tail_blocks, name):
    for targets, number in (("last", len(BATCH)), ("all", int(BATCH.attention_mask.sum()) - len(BATCH))):
        found = attack_targets(tiny(name), BATCH, tail_blocks, "float32", targets)
        assert found.num_targets == number
        assert (found.token_recall, found.position_precision, found.position_recall) == (1.0, 1.0, 1.0), targets


@pytest.mark.parametrize("wire_dtype", ["float16", "bfloat16", "int8"])
def test_a_narrow_wire_hides_nothing_of_a_tiny_model(wire_dtype):
    found = attack_targets(tiny(), BATCH, 1, wire_dtype, "all")
    assert (found.token_recall, found.position_precision, found.position_recall) == (1.0, 1.0, 1.0)


def test_a_tail_that_was_changed_since_is_read_worse_and_a_chance_tail_hardly():
    """What it measures is the attacker's knowledge of the tail, and not what it is told."""
    victim, chance = tiny(), tiny(seed=1)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, parameter in victim.named_parameters():
            if f"layers.{NUM_BLOCKS - 1}." in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    recalls = [
        attack_targets(own, BATCH, 1, "float32", "all", victim).token_recall for own in (victim, tiny(), chance)
    ]
    assert recalls[0] == 1 and recalls[0] >= recalls[1] > recalls[2] and recalls[2] < 0.3


def test_what_is_given_is_left_as_it_was():
    model = tiny().train()
    model.lm_head.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attack_targets(model, BATCH, 1, "float32", "last")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [name for name, own in model.named_parameters() if not own.requires_grad] == ["lm_head.weight"]
    assert all(own.grad is None for own in model.parameters()) and model.training


def test_positions_without_a_target_are_told_apart():
    tail = SplitModel.from_model(tiny(), 1, 1).client_tail
    states = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    wanted = torch.tensor([[-1, 7, -1, 9, -1, -1], [-1, -1, -1, -1, 30, -1]])
    logits = tail(states).logits.flatten(0, 1)
    loss = cross_entropy(logits, wanted.flatten().masked_fill(wanted.flatten() < 0, -100))
    (gradient,) = torch.autograd.grad(loss, states)
    found = recover_targets(tail, states.detach(), gradient, torch.ones(2, 6, dtype=torch.long))
    assert torch.equal(found, wanted)
    # Nothing came back: there is nothing to read.
    nothing = recover_targets(tail, states.detach(), torch.zeros_like(gradient), torch.ones(2, 6, dtype=torch.long))
    assert (nothing == -1).all()


def test_a_model_in_half_precision_is_refused():
    with pytest.raises(ValueError, match="in torch.bfloat16 was given: load it in float32"):
        attack_targets(tiny().bfloat16(), BATCH, 1, "float32", "all")


def test_positions_that_are_named_wrongly_count_against_precision_alone():
    """A strongly changed tail leaves gradients at positions before the one target of a row."""
    victim = tiny(seed=1)
    found = attack_targets(tiny(), BATCH, 1, "float32", "last", victim)
    assert found.position_recall == 1 and found.position_precision < 0.5


def test_other_targets_than_last_and_all_are_refused():
    with pytest.raises(ValueError, match='"last" or "all"|"all" or "last"'):
        attack_targets(tiny(), BATCH, 1, "float32", "first")


def test_the_last_target_is_the_last_token_of_each_row(monkeypatch):
    taken = []

    def crossed(split, ids, mask, labels):
        taken.extend(
            (row[mark.bool()].tolist(), own.tolist()) for row, mark, own in zip(ids, mask, labels, strict=True)
        )
        return _crossed(split, ids, mask, labels)

    monkeypatch.setattr("hf_federated.audits.targets._crossed", crossed)
    attack_targets(tiny(), BATCH, 1, "float32", "last")
    assert len({len(ids) for ids, _ in taken}) > 1
    for ids, labels in taken:
        expected = [-100] * len(labels)
        expected[len(ids) - 1] = ids[-1]
        assert labels == expected
