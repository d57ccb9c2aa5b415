"""Integer and boolean tensors are those of the first client of the cohort, for every order of arrival."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_federated.aggregation import FedAvg
from hf_federated.messages import ClientUpdate
from hf_federated.server.bound_update import GroupedAccumulator


COHORT = ("a", "b", "c")
REFERENCE = {"w": torch.zeros(2), "steps": torch.tensor(0), "seen": torch.tensor(False)}


def update(client_id: str) -> ClientUpdate:
    number = COHORT.index(client_id)
    state = {
        "w": torch.full((2,), float(number)),
        "steps": torch.tensor(10 + number),
        "seen": torch.tensor(number == 0),
    }
    return ClientUpdate(0, client_id, state, num_examples=1 + number, num_tokens=0, num_steps=1)


def group(number: int) -> tuple[tuple[str, int, int], ...]:
    return (("state", number, number),)


@pytest.mark.parametrize("order", list(itertools.permutations(COHORT)), ids="".join)
@pytest.mark.parametrize("groups", [(0, 0, 0), (0, 1, 2), (0, 0, 1), (1, 0, 1)], ids=str)
def test_integer_tensors_do_not_depend_on_the_order_of_arrival(order, groups):
    grouped = GroupedAccumulator(lambda: FedAvg().accumulator(REFERENCE), COHORT)
    for client_id in order:
        grouped.add(client_id, group(groups[COHORT.index(client_id)])).add(update(client_id))
    mean = grouped.settle(lambda group: True).mean.finalize()
    assert mean["steps"] == 10 and mean["seen"]
    assert torch.equal(mean["w"], torch.full((2,), (1 * 0 + 2 * 1 + 3 * 2) / 6))


def test_integer_tensors_are_those_of_the_first_accepted_client():
    grouped = GroupedAccumulator(lambda: FedAvg().accumulator(REFERENCE), COHORT)
    for client_id in ("c", "b", "a"):
        grouped.add(client_id, group(int(client_id == "a"))).add(update(client_id))
    mean = grouped.settle(lambda accepted: accepted == group(0)).mean.finalize()
    assert mean["steps"] == 11 and not mean["seen"]


def test_without_a_cohort_the_first_arrival_counts():
    accumulator = FedAvg().accumulator(REFERENCE)
    for client_id in ("b", "a"):
        accumulator.add(update(client_id))
    assert accumulator.mean.finalize()["steps"] == 11
