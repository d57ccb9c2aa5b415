"""Contributions as vectors of integers: the error of a sum, its exact numbers, and equal bytes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_federated import FedAvg
from hf_federated.messages import ClientUpdate
from hf_federated.methods import WeightedSums
from hf_federated.secure_aggregation.encoding import RingEncoding, statistics_of
from hf_federated.security.prime_field import PRIME
from hf_federated.server.client_metrics import RoundSummary
from hf_federated.utils.random import derived_seed
from hf_federated.utils.weighted_mean import PIECE


State = dict[str, torch.Tensor]

MODULI = [2**32, 2**16, PRIME]
NO_STATISTICS = dict.fromkeys(statistics_of(ClientUpdate(0, "a", {}, 1, 1, 1)), 0)


def encoding_of(*values: torch.Tensor, **arguments: Any) -> RingEncoding:
    """Return an encoding of one mean with the shapes of tensors."""
    shapes = {f"t{number}": value.shape for number, value in enumerate(values)}
    return RingEncoding({"state": shapes}, **{"num_clients": 1, "max_weight": 1.0, **arguments})


def sums_of(*values: torch.Tensor, weight: float = 1.0) -> dict[str, WeightedSums]:
    return {"state": WeightedSums(weight, 1, {f"t{number}": value for number, value in enumerate(values)})}


def added(encoding: RingEncoding, vectors: list[torch.Tensor]) -> torch.Tensor:
    total = encoding.zeros()
    for vector in vectors:
        assert encoding.problem(vector) is None
        encoding.add_(total, vector)
    return total


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- Values


@settings(max_examples=80, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=4),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    num_clients=st.sampled_from([1, 2, 3, 5, 17]),
    modulus=st.sampled_from(MODULI),
    clip=st.sampled_from([1.0, 3e-3, 500.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_sum_differs_by_less_than_a_step_for_each_client(shapes, dtype, num_clients, modulus, clip, seed):
    generator = torch.Generator().manual_seed(seed)
    state = {
        f"t{number}": torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for number, shape in enumerate(shapes)
    }
    algorithm = FedAvg()
    accumulator = algorithm.accumulator(state)
    encoding = RingEncoding(accumulator.shapes, num_clients, max_weight=8, clip=clip, modulus=modulus)
    vectors, expected = [], {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in state.items()}
    num_clipped = 0
    for client in range(num_clients):
        # One of four values is clipped.
        changed = {
            name: (value + clip * 2 * torch.randn(value.shape, generator=generator, dtype=torch.float64)).to(dtype)
            for name, value in state.items()
        }
        update = ClientUpdate(0, str(client), changed, 1 + client % 8, 0, 1)
        contribution = accumulator.contribution(update, state)
        for name, value in contribution["state"].values.items():
            expected[name] += value.clamp(-8 * clip, 8 * clip)
            num_clipped += int((value.abs() > 8 * clip).sum())
        vectors.append(encoding.encode(contribution, statistics_of(update), seed=seed + client))
        assert vectors[-1].shape == (encoding.num_values,) and vectors[-1].nbytes == encoding.num_bytes
    decoded, statistics = encoding.decode(added(encoding, vectors), num_clients)
    assert encoding.max_error == {mean: num_clients * step for mean, step in encoding.steps.items()}
    for name, value in decoded["state"].values.items():
        assert value.dtype == torch.float64 and value.shape == state[name].shape
        error = (value - expected[name]).abs().max() if value.numel() else torch.tensor(0.0)
        assert float(error) <= encoding.max_error["state"] * (1 + 1e-6)
    assert list(decoded["state"].values) == list(state)
    assert statistics["num_clipped"] == num_clipped
    assert decoded["state"].weight == sum(1 + client % 8 for client in range(num_clients))


@pytest.mark.parametrize("modulus", MODULI)
@pytest.mark.parametrize("num_clients", [1, 2, 3, 10, 255, 256])
@pytest.mark.parametrize("sign", [1, -1])
def test_largest_values_of_all_clients_do_not_overflow(modulus, num_clients, sign):
    values = sign * torch.tensor([1.0, 7.0, 1e300, math.nextafter(1.0, 0.0)], dtype=torch.float64)
    encoding = encoding_of(values, num_clients=num_clients, modulus=modulus, max_weight=1.0)
    vectors = [encoding.encode(sums_of(values), NO_STATISTICS, seed) for seed in range(num_clients)]
    decoded, statistics = encoding.decode(added(encoding, vectors), num_clients)
    result = decoded["state"].values["t0"]
    assert result[:3].tolist() == pytest.approx([sign * num_clients] * 3, rel=1e-12)
    assert result[3].item() == pytest.approx(sign * num_clients, abs=encoding.max_error["state"])
    assert statistics["num_clipped"] == 2 * num_clients


def test_rounding_is_unbiased_over_seeds():
    """The mean over 4000 seeds differs from the value by a few standard deviations of at most 1/2 / √4000 steps."""
    positions = torch.tensor([0.0, 0.1, 0.5, 0.9, -0.1, -0.75, 12.3, -99.6], dtype=torch.float64)
    encoding = encoding_of(positions, modulus=2**16, clip=1.0)
    values, step = positions * encoding.steps["state"], encoding.steps["state"]
    rounded = torch.stack([encoding.encode(sums_of(values), NO_STATISTICS, seed)[:8].double() for seed in range(4000)])
    assert set(rounded[:, 0].tolist()) == {0.0}
    for column, position in zip(rounded.T, positions.tolist(), strict=True):
        assert set(column.tolist()) <= {math.floor(position), math.ceil(position)}
        assert float(column.mean()) == pytest.approx(position, abs=5 * 0.5 / math.sqrt(4000))
    assert step * 32_767 == pytest.approx(1.0)


def test_rounding_is_unbiased_over_values_and_independent_between_clients():
    """The variance of the rounding is f (1 − f) with the fraction f. The errors of two clients are uncorrelated."""
    position, num = 7.3, 2**18 + 11
    values = torch.full((num,), position, dtype=torch.float64)
    encoding = encoding_of(values, num_clients=2, modulus=2**32, clip=2.0**20)
    first, second = (
        encoding.encode(sums_of(values * encoding.steps["state"]), NO_STATISTICS, seed)[:num].double() - position
        for seed in (1, 2)
    )
    assert abs(float(first.mean())) < 5 * math.sqrt(0.3 * 0.7 / num)
    assert float(first.var()) == pytest.approx(0.3 * 0.7, rel=0.02)
    assert abs(float((first * second).mean())) < 5 * 0.3 * 0.7 / math.sqrt(num)
    # The pieces of a tensor have different random numbers.
    assert not torch.equal(first[:11], first[PIECE : PIECE + 11])


@pytest.mark.parametrize(
    ("modulus", "clip", "error"), [(2**32, 1.0, 1.5e-5), (2**16, 4e-3, 4e-3), (PRIME, 1.0, 3.0e-5)]
)
def test_relative_error_of_the_mean_of_ten_clients(modulus, clip, error):
    """A step has the variance 1/6 on average, so the error of the mean is `step · √(N / 6) / N`."""
    generator, num = torch.Generator().manual_seed(0), 100_000
    changes = [2e-4 * torch.randn(num, generator=generator, dtype=torch.float64) for _ in range(10)]
    encoding = encoding_of(changes[0], num_clients=10, max_weight=50.0, clip=clip, modulus=modulus)
    vectors = [
        encoding.encode(sums_of(50.0 * change, weight=50.0), NO_STATISTICS, seed)
        for seed, change in enumerate(changes)
    ]
    decoded, _ = encoding.decode(added(encoding, vectors), 10)
    mean = sum(changes) / 10
    errors = decoded["state"].values["t0"] / decoded["state"].weight - mean
    assert float(errors.square().mean().sqrt() / mean.square().mean().sqrt()) == pytest.approx(error, rel=0.1)
    assert abs(float(errors.mean())) < 5 * float(errors.std()) / math.sqrt(num)


@pytest.mark.parametrize("modulus", MODULI)
def test_integers_are_the_floor_of_values_plus_uniform_numbers(modulus):
    """The expected integers are computed with numpy: each word of 64 bits has two uniform numbers."""
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3,), (), (2, 2))]
    encoding = encoding_of(*values, num_clients=4, max_weight=2.0, clip=0.5, modulus=modulus)
    vector = encoding.encode(sums_of(*values), NO_STATISTICS, seed=7)
    random, largest = np.random.PCG64(derived_seed(7, "rounding")), 2 ** (encoding.value_bits - 1) - 1
    expected: list[int] = []
    for value in values:
        words = [int(word) for word in random.random_raw((value.numel() + 1) // 2)]
        uniform = [half / 2**32 for word in words for half in (word % 2**32, word >> 32)]
        for number, u in zip(value.flatten().tolist(), uniform, strict=False):
            limited = min(max(math.floor(number / (2.0 * 0.5) * largest + u), -largest), largest)
            expected.append(limited % modulus if modulus == PRIME else limited)
    assert vector[:8].tolist() == expected


def test_bytes_do_not_depend_on_threads_or_on_lazy_values():
    generator = torch.Generator().manual_seed(0)
    state = {
        "large": torch.zeros(2**18 + 3, 3),
        "transposed": torch.zeros(5, 4).T,
        "empty": torch.zeros(2, 0),
        "half": torch.zeros(7, dtype=torch.bfloat16),
    }
    new = {name: torch.randn(value.shape, generator=generator).to(value.dtype) for name, value in state.items()}
    new["transposed"] = new["transposed"].T.contiguous().T
    update = ClientUpdate(0, "a", new, 3, 0, 1)
    accumulator = FedAvg().accumulator(state)
    encoding = RingEncoding(accumulator.shapes, 5, max_weight=10)
    contribution = accumulator.contribution(update, state)
    eager = {
        name: dataclasses.replace(sums, values=dict(reversed(list(sums.values.items()))))
        for name, sums in contribution.items()
    }
    vectors = []
    for number in (1, 3):
        with num_threads(number):
            for each in (contribution, eager):
                vectors.append(encoding.encode(each, statistics_of(update), seed=5))
    assert all(torch.equal(vector, vectors[0]) for vector in vectors[1:])
    other = encoding.encode(contribution, statistics_of(update), seed=6)
    assert not torch.equal(other, vectors[0]) and int((other - vectors[0]).abs().max()) == 1
    assert torch.equal(eager["state"].values["half"], 3 * new["half"].double()), "the values must not change"


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 2**18 + 1])
def test_values_that_are_not_finite_raise_an_error_with_their_names(wrong, position):
    values = [torch.zeros(2), torch.zeros(2**18 + 2, dtype=torch.float32)]
    values[1][position] = wrong
    encoding = encoding_of(*values)
    with pytest.raises(ValueError, match="tensor 't1' of the mean 'state' has NaN or infinite values"):
        encoding.encode(sums_of(*values), NO_STATISTICS, seed=0)


def test_means_have_their_own_clips_and_weights():
    shapes = {"state": {"w": torch.Size([1])}, "extra": {"w": torch.Size([1])}}
    encoding = RingEncoding(shapes, 2, max_weight={"state": 100.0, "extra": 1.0}, clip={"extra": 0.25})
    largest = 2**30 - 1
    assert encoding.steps == {"state": 100.0 / largest, "extra": 0.25 / largest}
    contribution = {name: WeightedSums(1.0, 1, {"w": torch.tensor([90.0])}) for name in shapes}
    decoded, statistics = encoding.decode(added(encoding, [encoding.encode(contribution, NO_STATISTICS, 0)]), 1)
    assert decoded["state"].values["w"].item() == pytest.approx(90.0)
    assert decoded["extra"].values["w"].item() == pytest.approx(0.25)
    assert statistics["num_clipped"] == 1


# ---- Numbers


@pytest.mark.parametrize("modulus", MODULI)
def test_weights_and_numbers_are_exact_sums(modulus):
    state = {"w": torch.zeros(2)}
    accumulator = FedAvg().accumulator(state)
    encoding = RingEncoding(accumulator.shapes, 3, max_weight=2.0**62, modulus=modulus)
    weights = [0.1, 2.0**61 + 512.0, 1e-3 / 7]
    updates = [
        ClientUpdate(0, "a", state, 2**53 + 1, 2**62, 7, {"loss": 0.1, "total_flos": 3.3e17}),
        ClientUpdate(0, "b", state, 5, 0, 2**40, {"loss": -2.5, "total_flos": 1e30}),
        ClientUpdate(0, "c", state, 0, 1, 1, {"loss": 7.25}),
    ]
    vectors = [
        encoding.encode(
            {"state": WeightedSums(weight, 1, {"w": torch.zeros(2)}), "extra": WeightedSums(0.0, 0, {})},
            statistics_of(update),
            seed=1,
        )
        for weight, update in zip(weights, updates, strict=True)
    ]
    decoded, statistics = encoding.decode(added(encoding, vectors), 3)
    # 1e-3 / 7 is below 2^-12, so its last bits are rounded.
    exact = [*map(Fraction, weights[:2]), Fraction(round(weights[2] * 2**64), 2**64)]
    assert decoded["state"].weight == float(sum(exact)) and decoded["state"].num_updates == 3
    assert (decoded["extra"].weight, decoded["extra"].num_updates) == (0.0, 0)
    losses = [Fraction(0.1 * (2**53 + 1)), Fraction(-2.5 * 5), Fraction(7.25)]
    assert statistics == {
        "num_clipped": 0,
        "num_examples": 2**53 + 6,
        "num_tokens": 2**62 + 1,
        "num_steps": 2**40 + 8,
        "total_flos": round(3.3e17) + round(1e30),
        "loss": float(sum(losses)),
        "loss_weight": float(2**53 + 7),
    }


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1e300, None])
def test_update_without_a_usable_loss_has_no_weight_in_the_loss(loss):
    metrics = {} if loss is None else {"loss": loss}
    statistics = statistics_of(ClientUpdate(0, "a", {}, 10, 2, 3, metrics))
    assert (statistics["loss"], statistics["loss_weight"]) == (0.0, 0)
    assert (statistics["num_examples"], statistics["num_tokens"], statistics["num_steps"]) == (10, 2, 3)


def test_summary_of_the_sums_equals_the_summary_of_the_clients():
    state = {"w": torch.zeros(2)}
    updates = [
        ClientUpdate(0, "a", state, 10, 100, 5, {"loss": 2.0, "total_flos": 1e9}),
        ClientUpdate(0, "b", state, 30, 300, 15, {"loss": 1.0, "total_flos": 3e9}),
        ClientUpdate(0, "c", state, 7, 70, 4, {"loss": math.nan, "total_flos": 2e9}),
    ]
    accumulator = FedAvg().accumulator(state)
    encoding = RingEncoding(accumulator.shapes, 3, max_weight=30)
    vectors = [
        encoding.encode(accumulator.contribution(update, state), statistics_of(update), seed)
        for seed, update in enumerate(updates)
    ]
    _, sums = encoding.decode(added(encoding, vectors), 3)
    summary = RoundSummary.from_sums(sums, {"loss": sums["loss_weight"]}, num_clients=3)
    expected = RoundSummary.from_clients({update.client_id: update.reported_metrics for update in updates}, 0)
    expected.clients = {}
    assert summary == expected and summary.loss == 1.25


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (math.nan, r"weight of the mean 'state' is nan; its absolute value must be finite and below 2\*\*62"),
        (math.inf, "weight of the mean 'state' is inf"),
        (2.0**62, r"below 2\*\*62"),
        (-1.0, r"is -1.0; it must be above 2\*\*-64"),
        (0.0, r"is 0.0; it must be above 2\*\*-64"),
        (2.0**-66, r"must be above 2\*\*-64"),
    ],
)
def test_weight_out_of_range_raises_an_error(weight, message):
    with pytest.raises(ValueError, match=message):
        encoding_of(torch.zeros(1)).encode(sums_of(torch.zeros(1), weight=weight), NO_STATISTICS, seed=0)


@pytest.mark.parametrize(("name", "value"), [("num_tokens", 2**126), ("total_flos", math.nan), ("total_flos", 1e300)])
def test_number_out_of_range_raises_an_error(name, value):
    with pytest.raises(ValueError, match=f"`{name}` is .* must be finite and below"):
        encoding_of(torch.zeros(1)).encode(sums_of(torch.zeros(1)), {**NO_STATISTICS, name: value}, seed=0)


# ---- Checks


@pytest.mark.parametrize(("modulus", "largest"), [(2**16, 2**8), (2**32, 2**24), (PRIME, 2**23)])
def test_too_many_clients_are_refused_with_an_alternative(modulus, largest):
    assert encoding_of(num_clients=largest, modulus=modulus).value_bits == 8
    with pytest.raises(
        ValueError, match=rf"leaves 7 of .* bits.* at least 8 .*Use at most {largest} clients"
    ) as error:
        encoding_of(num_clients=largest + 1, modulus=modulus)
    assert ("or the modulus 2**32" in str(error.value)) == (modulus == 2**16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_clients": 0}, "`num_clients` is 0; it must be at least 1"),
        ({"max_weight": 0.0}, "`max_weight` of the mean `state` is 0.0"),
        ({"max_weight": math.inf}, "`max_weight` of the mean `state` is inf"),
        ({"max_weight": {"extra": 1.0}}, r"`max_weight` has the means \['extra'\], but the means are \['state'\]"),
        ({"clip": {"other": 1.0}}, r"`clip` has the means \['other', 'state'\], but the means are"),
        ({"clip": math.nan}, "`clip` of the mean `state` is nan"),
        ({"modulus": 2**31}, "`modulus` is"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        encoding_of(**arguments)


def test_contribution_with_other_means_or_shapes_is_refused():
    encoding = encoding_of(torch.zeros(2))
    with pytest.raises(ValueError, match=r"means are \['extra'\], but \['state'\] are expected"):
        encoding.encode({"extra": sums_of(torch.zeros(2))["state"]}, NO_STATISTICS, seed=0)
    with pytest.raises(ValueError, match="sums of 't0' have the shape"):
        encoding.encode(sums_of(torch.zeros(3)), NO_STATISTICS, seed=0)


@pytest.mark.parametrize("modulus", MODULI)
def test_sum_of_another_number_of_vectors_is_refused(modulus):
    values = torch.ones(2)
    encoding = encoding_of(values, num_clients=3, modulus=modulus)
    vectors = [encoding.encode(sums_of(values), NO_STATISTICS, seed) for seed in range(2)]
    total = added(encoding, vectors)
    with pytest.raises(ValueError, match="The sum contains 2 vectors, but 3 are expected. A mask was not removed"):
        encoding.decode(total, 3)
    encoding.add_(total, torch.arange(encoding.num_values).to(encoding.ring.dtype))
    with pytest.raises(ValueError, match="vectors, but 2 are expected"):
        encoding.decode(total, 2)
    for num_updates in (0, 4):
        with pytest.raises(ValueError, match=f"`num_updates` is {num_updates}; it must be from 1 to 3"):
            encoding.decode(total, num_updates)


# ---- Memory


def peak_megabytes() -> float:
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1000


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of the memory is read from /proc")
def test_encoding_needs_one_payload_of_memory():
    """A payload has 96 MB. Copies of its values in float64 would have 192 MB, and those of one tensor 128 MB."""
    state = {"embedding": torch.zeros(2**24), "layer": torch.zeros(2**23)}
    new = {name: torch.full_like(value, 2e-4) for name, value in state.items()}
    accumulator = FedAvg().accumulator(state)
    encoding = RingEncoding(accumulator.shapes, 10, max_weight=10)
    update = ClientUpdate(0, "a", new, 3, 0, 1)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = peak_megabytes()
    vector = encoding.encode(accumulator.contribution(update, state), statistics_of(update), seed=0)
    assert vector.nbytes / 1e6 == pytest.approx(100.7, abs=0.1)
    assert peak_megabytes() - before < 1.2 * vector.nbytes / 1e6
