"""`max_weight` limits the weight of an update in all means of an algorithm."""

from __future__ import annotations

import math

import pytest
import torch

from hf_federated import Aggregation, FedAvg, FedNova
from hf_federated.aggregation import AGGREGATIONS, Accumulator, FedExP, NormBoundedMean
from hf_federated.messages import ClientUpdate


class BySteps(Aggregation):
    def weight(self, update: ClientUpdate) -> float:
        return float(update.num_steps)


class BySquare(BySteps):
    """Uses the weight of the parent."""

    def weight(self, update: ClientUpdate) -> float:
        return super().weight(update) ** 2


class Steps:
    def weight(self, update: ClientUpdate) -> float:
        return float(update.num_steps)


class FromMixin(Steps, FedAvg):
    pass


class OwnSums(BySteps):
    def accumulate(self, accumulator: Accumulator, update: ClientUpdate) -> None:
        accumulator.means["state"].add(update.state, self.weight(update))


def update_of(client_id: str = "a", num: int = 100, value: float = 1.0, **extra: torch.Tensor) -> ClientUpdate:
    return ClientUpdate(0, client_id, {"w": torch.tensor([value])}, num, num, num, extra=extra)


@pytest.mark.parametrize("algorithm", [FedAvg, BySteps, BySquare, FromMixin, OwnSums])
def test_weight_is_limited_also_in_a_subclass_that_overrides_it(algorithm):
    bounded = algorithm()
    assert bounded.weight(update_of()) == algorithm().weight(update_of()) == (10_000 if algorithm is BySquare else 100)
    bounded.max_weight = 60.0
    assert bounded.weight(update_of()) == 60.0
    assert bounded.weight(update_of(num=5)) == algorithm().weight(update_of(num=5))
    state = {"w": torch.zeros(1)}
    accumulator = bounded.accumulator(state)
    sums = accumulator.contribution(update_of(), state)["state"]
    assert (sums.weight, sums.values["w"].item()) == (60.0, 60.0)
    accumulator.add(update_of("a", 100, 1.0))
    accumulator.add(update_of("b", 5, 0.0))
    second = 25.0 if algorithm is BySquare else 5.0
    assert accumulator.mean.total_weight == 60.0 + second
    assert bounded.aggregate(accumulator, state)["w"].item() == pytest.approx(60 / (60 + second), abs=1e-7)


def test_all_means_of_an_algorithm_use_the_limited_weight():
    normalizer = torch.tensor(0.5, dtype=torch.float64)
    nova, exp, bounded = FedNova(), FedExP(weighting="examples"), NormBoundedMean(1.0, weighting="tokens")
    for algorithm in (nova, exp, bounded):
        algorithm.max_weight = 8.0
    state = {"w": torch.zeros(1)}
    sums = nova.accumulator(state).contribution(update_of(normalizer=normalizer))
    assert (sums["state"].weight, sums["normalizer"].weight) == (16.0, 8.0)
    sums = exp.accumulator(state).contribution(update_of())
    assert (sums["state"].weight, sums["squared_norm"].weight) == (8.0, 8.0)
    assert bounded.accumulator(state).contribution(update_of())["state"].weight == 8.0


def test_weight_is_unlimited_by_default_and_the_limit_is_no_setting():
    algorithm = FedAvg()
    assert algorithm.max_weight == math.inf and algorithm.weight(update_of(num=2**53)) == 2.0**53
    algorithm.max_weight = 3.0
    assert algorithm.settings() == {"weighting": "examples"} and algorithm.on_client().max_weight == math.inf
    assert all(cls.max_weight == math.inf for cls in AGGREGATIONS.values())


def test_update_without_a_weight_is_refused_as_before():
    algorithm = FedAvg()
    algorithm.max_weight = 3.0
    with pytest.raises(ValueError, match="Client 'a' reports 0 examples"):
        algorithm.check_update(update_of(num=0))
