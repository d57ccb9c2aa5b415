"""Attacks on the weighted mean of the updates of one client, of clients without a change, and of several clients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from federations import CLIENTS, build_federation
from payload_inputs import END, model, sgd_payload

from hf_federated import FedAvg, Round
from hf_federated.audits import Dager, Evidence, Payload, PayloadRecorder, SumRecorder, TokenSet
from hf_federated.messages import ClientUpdate


VICTIM = [[5, 9, 7, END], [11, 6, 13, END]]
OTHER = [[21, 30, 25, END], [33, 22, 28, END]]


def summed(updates: list[Payload], weights: list[int]) -> Payload:
    """The payload of the sum of the updates, as a server records it. The first update is that of the victim."""
    before = updates[0].before
    sums = FedAvg().accumulator(before)
    for number, (update, weight) in enumerate(zip(updates, weights, strict=True)):
        sums.add(ClientUpdate(0, str(number), update.after, num_examples=weight, num_tokens=0, num_steps=1))
    metrics = {str(number): {"num_steps": 1.0 + number} for number in range(len(updates))}
    recorder = SumRecorder(updates[0].token_ids, [ids for update in updates[1:] for ids in update.token_ids])
    recorder.on_aggregate(None, None, None, round=Round(0, tuple(metrics), before, sums=sums, metrics=metrics))
    return recorder.payload


def attack(victim: Any, payload: Payload) -> dict[str, dict[str, float]]:
    evidence = Evidence(victim, payload=payload, step_payload=payload, end_token=END, max_length=6)
    return {result.attack: result.metrics for attack in (TokenSet(), Dager()) for result in attack.run(evidence)}


def test_sum_of_one_update_is_the_update_in_all_bits(tmp_path):
    ids = [[3, 5]]
    recorders = [PayloadRecorder("north", ids), SumRecorder(ids, [])]
    trainer = build_federation(tmp_path, {"north": CLIENTS["north"]}, trainer={"callbacks": recorders})
    trainer.train()
    single, total = (recorder.payload for recorder in recorders)
    assert (single.token_ids, single.num_steps) == (total.token_ids, total.num_steps) == (ids, 2)
    assert single.after.keys() == total.after.keys() and total.num_examples == 1
    for name, value in single.after.items():
        assert torch.equal(value, total.after[name]) and torch.equal(single.before[name], total.before[name])


def test_sum_is_the_weighted_mean_of_the_updates():
    victim = model()
    updates = [sgd_payload(victim, VICTIM), sgd_payload(victim, OTHER)]
    payload = summed(updates, [1, 3])
    for name in updates[0].after:
        expected = (updates[0].change(name) + 3 * updates[1].change(name)) / 4
        assert torch.allclose(payload.change(name), expected, atol=1e-12)
    assert payload.other_token_ids == OTHER and payload.num_examples == 4 and payload.num_steps == 2


def test_clients_without_a_change_hide_nothing():
    """The attacks find in the sum what they find in the update, also if its weight is a tenth."""
    victim = model()
    single = sgd_payload(victim, VICTIM)
    unchanged = Payload(single.before, single.before, [])
    alone, diluted = attack(victim, single), attack(victim, summed([single, unchanged, unchanged], [1, 4, 5]))
    assert alone == diluted
    assert alone["dager_step"] == {"tokens": 1.0, "examples": 1.0}
    assert alone["token_set"]["precision"] == alone["token_set"]["recall"] == 1.0


def test_sum_of_small_steps_reveals_the_texts_of_all_clients():
    victim = model()
    payload = summed([sgd_payload(victim, VICTIM), sgd_payload(victim, OTHER)], [1, 1])
    metrics = attack(victim, payload)
    assert metrics["dager_step"] == dict.fromkeys(("tokens", "examples", "union_tokens", "union_examples"), 1.0)
    union = {token for ids in VICTIM + OTHER for token in ids}
    own = {token for ids in VICTIM for token in ids}
    assert metrics["token_set"]["precision"] == len(own) / len(union)
    assert metrics["token_set"]["union_precision"] == metrics["token_set"]["union_recall"] == 1.0


def test_method_without_a_sum_of_parameters_is_refused_by_name(tmp_path):
    recorder = SumRecorder([[3]], [[5]])
    trainer = build_federation(tmp_path, federation={"aggregation": "median"}, trainer={"callbacks": [recorder]})
    with pytest.raises(ValueError, match="does not sum the parameters of the clients"):
        trainer.train()


def test_secure_aggregation_gives_the_recorder_the_sum(tmp_path):
    """Without secure aggregation, the recorder finds the same mean up to the rounding of the ring."""

    def recorded(**federation: Any) -> Payload:
        recorder = SumRecorder([[3]], [[5]])
        build_federation(tmp_path, num_rounds=1, federation=federation, trainer={"callbacks": [recorder]}).train()
        return recorder.payload

    kwargs = {"max_weight": 10, "masks": False}
    plain, secure = recorded(), recorded(secure_aggregation="secagg", secure_aggregation_kwargs=kwargs)
    # A value is rounded to steps of 2^-29 · max_weight for each of three clients, of which the mean is taken.
    for name, value in plain.after.items():
        if value.is_floating_point():
            assert torch.allclose(value, secure.after[name], rtol=0, atol=10 * 2**-29 + 1e-7)
            assert not torch.equal(secure.after[name], secure.before[name]) or torch.equal(value, plain.before[name])
