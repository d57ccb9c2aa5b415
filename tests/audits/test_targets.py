"""Recovery of targets from the gradients that a client sends back."""

from __future__ import annotations

import pytest
import torch
from audit_inputs import MODELS, NUM_BLOCKS, examples, tiny
from torch.nn.functional import cross_entropy

from hf_federated import SplitModel
from hf_federated.audits import attack_targets, recover_targets
from hf_federated.audits.targets import _exchanged_tensors


BATCH = examples(4, seed=3)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("tail_blocks", [1, 2])
@pytest.mark.sampled(4)
def test_all_targets_are_recovered_from_any_tail(tail_blocks, name):
    for targets, num_targets in (("last", len(BATCH)), ("all", int(BATCH.attention_mask.sum()) - len(BATCH))):
        recovery = attack_targets(tiny(name), BATCH, tail_blocks, "float32", targets)
        assert recovery.num_targets == num_targets
        assert (recovery.token_recall, recovery.position_precision, recovery.position_recall) == (1.0, 1.0, 1.0), (
            targets
        )


@pytest.mark.parametrize("wire_dtype", ["float16", "bfloat16", "int8"])
def test_narrow_wire_dtypes_hide_no_targets_of_a_tiny_model(wire_dtype):
    recovery = attack_targets(tiny(), BATCH, 1, wire_dtype, "all")
    assert (recovery.token_recall, recovery.position_precision, recovery.position_recall) == (1.0, 1.0, 1.0)


def test_recall_depends_on_the_attackers_knowledge_of_the_tail():
    """The attack uses the attacker's tail, not the victim's. A random tail recovers few targets."""
    victim, random_model = tiny(), tiny(seed=1)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, parameter in victim.named_parameters():
            if f"layers.{NUM_BLOCKS - 1}." in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    recalls = [
        attack_targets(known, BATCH, 1, "float32", "all", victim).token_recall
        for known in (victim, tiny(), random_model)
    ]
    assert recalls[0] == 1 and recalls[0] >= recalls[1] > recalls[2] and recalls[2] < 0.3


def test_attack_leaves_the_model_unchanged():
    model = tiny().train()
    model.lm_head.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attack_targets(model, BATCH, 1, "float32", "last")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [name for name, value in model.named_parameters() if not value.requires_grad] == ["lm_head.weight"]
    assert all(value.grad is None for value in model.parameters()) and model.training


def test_positions_without_a_target_are_recognized():
    tail = SplitModel.from_model(tiny(), 1, 1).client_tail
    states = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    targets = torch.tensor([[-1, 7, -1, 9, -1, -1], [-1, -1, -1, -1, 30, -1]])
    logits = tail(states).logits.flatten(0, 1)
    loss = cross_entropy(logits, targets.flatten().masked_fill(targets.flatten() < 0, -100))
    (gradient,) = torch.autograd.grad(loss, states)
    recovered = recover_targets(tail, states.detach(), gradient, torch.ones(2, 6, dtype=torch.long))
    assert torch.equal(recovered, targets)
    # A zero gradient reveals no targets.
    from_zeros = recover_targets(tail, states.detach(), torch.zeros_like(gradient), torch.ones(2, 6, dtype=torch.long))
    assert (from_zeros == -1).all()


def test_model_in_half_precision_raises():
    with pytest.raises(ValueError, match="The model is in torch.bfloat16, .* Load the model in float32"):
        attack_targets(tiny().bfloat16(), BATCH, 1, "float32", "all")


def test_wrongly_named_positions_lower_precision_but_not_recall():
    """A strongly changed tail leaves gradients at positions before the only target of an example."""
    victim = tiny(seed=1)
    recovery = attack_targets(tiny(), BATCH, 1, "float32", "last", victim)
    assert recovery.position_recall == 1 and recovery.position_precision < 0.5


def test_unknown_kind_of_targets_raises():
    with pytest.raises(ValueError, match='targets=\'first\' is unknown. Set it to "all" or "last"'):
        attack_targets(tiny(), BATCH, 1, "float32", "first")


def test_last_target_is_the_last_token_of_each_example(monkeypatch):
    batches = []

    def record_labels(split, ids, mask, labels):
        batches.extend(
            (example_ids[example_mask.bool()].tolist(), example_labels.tolist())
            for example_ids, example_mask, example_labels in zip(ids, mask, labels, strict=True)
        )
        return _exchanged_tensors(split, ids, mask, labels)

    monkeypatch.setattr("hf_federated.audits.targets._exchanged_tensors", record_labels)
    attack_targets(tiny(), BATCH, 1, "float32", "last")
    assert len({len(ids) for ids, _ in batches}) > 1
    for ids, labels in batches:
        expected = [-100] * len(labels)
        expected[len(ids) - 1] = ids[-1]
        assert labels == expected
