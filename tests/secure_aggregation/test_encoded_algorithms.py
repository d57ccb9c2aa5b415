"""Algorithms on the decoded sum of encoded contributions give the plain result within the error of the rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_federated import FedAvg, FedExP, FedNova, FedOpt, NormBoundedMean, Scaffold
from hf_federated.aggregation import Accumulator, Aggregation
from hf_federated.messages import ClientUpdate
from hf_federated.secure_aggregation.encoding import RingEncoding, statistics_of
from hf_federated.security.prime_field import PRIME


State = dict[str, torch.Tensor]

NUM_EXAMPLES = [30, 7, 250, 1, 64]
ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {"cls": FedAvg},
    "fednova": {"cls": FedNova, "clip": {"normalizer": 4.0}},
    "fedexp": {"cls": FedExP, "weighting": "examples"},
    "fedopt": {"cls": FedOpt, "server_optimizer": "sgd", "server_lr": 0.5},
    "scaffold": {
        "cls": Scaffold,
        "server_lr": 0.5,
        "weighting": "examples",
        "clip": {"extra": 2.0},
        "max_weight": {"extra": 1.0},  # control variates are averaged uniformly
    },
    # About one half of the changes are limited.
    "norm_bounded_mean": {"cls": NormBoundedMean, "max_norm": 0.25, "weighting": "examples"},
}


def build(name: str) -> Aggregation:
    """Return an algorithm of a party. The server and each client have their own."""
    arguments = {key: value for key, value in ALGORITHMS[name].items() if key not in ("cls", "clip", "max_weight")}
    algorithm = ALGORITHMS[name]["cls"](**arguments)
    algorithm.setup(num_rounds=2, num_clients=7)
    return algorithm


def encoding_of(name: str, accumulator: Accumulator, modulus: int) -> RingEncoding:
    weights = {**dict.fromkeys(accumulator.shapes, 250.0), **ALGORITHMS[name].get("max_weight", {})}
    clip = ALGORITHMS[name].get("clip", 1.0)
    return RingEncoding(accumulator.shapes, len(NUM_EXAMPLES), weights, clip, modulus)


def global_state() -> State:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (4, 3), "scalar": (), "empty": (0,), "vector": (5,)}
    floats = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {"count": torch.tensor([5, 6]), **floats}


def client_updates(algorithm: Aggregation, state: State, round: int) -> list[ClientUpdate]:
    updates = []
    for number, num_examples in enumerate(NUM_EXAMPLES):
        generator = torch.Generator().manual_seed(10 * round + number)
        new = {
            name: value + 0.06 * torch.randn(value.shape, generator=generator, dtype=torch.float64)
            for name, value in state.items()
            if value.is_floating_point()
        }
        extra = {
            name: torch.rand(value.shape, generator=generator, dtype=torch.float64).to(value.dtype) + 0.1
            for name, value in algorithm.update_extra(state).items()
        }
        new["count"] = torch.tensor([number, number])
        metrics = {"loss": 1.0 + number}
        updates.append(ClientUpdate(round, f"client {number}", new, num_examples, 3, 2 + number, metrics, extra))
    return updates


@pytest.mark.parametrize("modulus", [2**32, PRIME, 2**16])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_decoded_sum_gives_the_plain_result(name, modulus):
    state, plain, server = global_state(), build(name), build(name)
    clients = [build(name) for _ in NUM_EXAMPLES]
    for round in range(2):  # the server keeps the control variates of the first round
        updates = client_updates(plain, state, round)
        expected_sums, loaded = plain.accumulator(state), server.accumulator(state)
        encoding = encoding_of(name, loaded, modulus)
        total = encoding.zeros()
        for seed, (client, update) in enumerate(zip(clients, updates, strict=True)):
            expected_sums.add(update)
            accumulator = client.accumulator(state)
            own = encoding_of(name, accumulator, modulus)
            contribution = accumulator.contribution(update, state)
            encoding.add_(total, own.encode(contribution, statistics_of(update), seed))
        contribution, statistics = encoding.decode(total, len(updates))
        assert statistics["num_clipped"] == 0 and statistics["num_examples"] == sum(NUM_EXAMPLES)
        loaded.load_sums([contribution], state)
        assert_means_within_bounds(loaded, expected_sums, encoding)
        # The step of FedExP depends on two means.
        tolerance = 4 * max(encoding.max_error[mean] / contribution[mean].weight for mean in used(contribution))
        expected, result = plain.aggregate(expected_sums, state), server.aggregate(loaded, state)
        for key, value in expected.items():
            if value.is_floating_point():
                torch.testing.assert_close(result[key], value, rtol=0, atol=tolerance)
                assert not value.numel() or not torch.equal(value, state[key])
            else:
                assert torch.equal(result[key], state[key])
        state = {**state, **{key: value for key, value in expected.items() if value.is_floating_point()}}
    if name == "scaffold":
        controls, expected_controls = server.state_dict()["control"], plain.state_dict()["control"]
        for key, value in expected_controls.items():
            torch.testing.assert_close(controls[key], value, rtol=0, atol=tolerance)
            assert not value.numel() or float(value.abs().max()) > 0.1


def used(sums: dict[str, Any]) -> list[str]:
    return [mean for mean, each in sums.items() if each.num_updates]


def assert_means_within_bounds(loaded: Accumulator, expected: Accumulator, encoding: RingEncoding) -> None:
    """Each mean has the exact weight, and differs by at most one step for each client, divided by the weight."""
    for mean_name, mean in expected.means.items():
        result = loaded.means[mean_name]
        assert result.num_updates == mean.num_updates
        assert result.total_weight == pytest.approx(mean.total_weight, rel=1e-15)
        if not mean.num_updates:
            continue
        bound = encoding.max_error[mean_name] / mean.total_weight
        for name, value in mean.finalize(wide=True).items():
            if value.is_floating_point():
                difference = (result.mean_of(name, wide=True).double() - value.double()).abs()
                assert not value.numel() or float(difference.max()) <= bound * (1 + 1e-6) + 1e-15
