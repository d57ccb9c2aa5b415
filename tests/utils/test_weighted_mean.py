"""`WeightedMean` against a numpy reference."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from hf_federated.aggregation import Accumulator, FedAvg, WeightedMean
from hf_federated.messages import ClientUpdate
from hf_federated.utils.weighted_mean import PIECE


def random_states(num: int, dtype: torch.dtype, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "matrix": torch.randn(3, 4, generator=generator, dtype=torch.float64).to(dtype),
            "scalar": torch.randn((), generator=generator, dtype=torch.float64).to(dtype),
        }
        for _ in range(num)
    ]


def numpy_mean(states: list[dict[str, torch.Tensor]], weights: list[float], name: str) -> np.ndarray:
    """Compute `Σ w_i x_i / Σ w_i` in float64."""
    values = np.stack([state[name].double().numpy() for state in states])
    return np.tensordot(np.array(weights, dtype=np.float64), values, axes=1) / np.sum(weights)


def mean_of(states, weights, reference=None) -> WeightedMean:
    mean = WeightedMean(reference)
    for state, weight in zip(states, weights, strict=True):
        mean.add(state, weight)
    return mean


def reduced(*parts: WeightedMean) -> tuple[WeightedMean, ...]:
    """Reduce the parts of a mean over several processes as `RankEngine` does."""
    weight, number = sum(part.total_weight for part in parts), sum(part.num_updates for part in parts)
    first = next(index for index, part in enumerate(parts) if part.num_updates)
    tensors = [part.reduction_tensors(weight, number) for part in parts]
    for values in zip(*(sums for sums, _ in tensors), strict=True):
        total = sum(value.clone() for value in values)
        for value in values:
            value.copy_(total)
    for values in zip(*(copies for _, copies in tensors), strict=True):
        for value in values:
            value.copy_(values[first])
    return parts


WEIGHTS = [3.0, 1.0, 250.0, 7.0, 0.5]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
)
def test_mean_equals_the_reference_in_the_dtype_of_the_states(dtype, tolerance):
    states = random_states(5, dtype)
    result = mean_of(states, WEIGHTS).finalize()
    for name in ("matrix", "scalar"):
        assert result[name].dtype == dtype and result[name].shape == states[0][name].shape
        expected = numpy_mean(states, WEIGHTS, name)
        np.testing.assert_allclose(result[name].double().numpy(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_summed_in_float32(dtype):
    # A mean in half precision would lose a thousand steps of 1/1000.
    states = [{"w": torch.tensor([1.0 + 4 * (i % 2)], dtype=dtype)} for i in range(1000)]
    mean = mean_of(states, [1.0] * 1000)
    wide = mean.finalize(wide=True)["w"]
    assert wide.dtype == torch.float32
    assert wide.item() == pytest.approx(3.0, abs=1e-4)
    assert mean.finalize()["w"].dtype == dtype


def test_mean_does_not_depend_on_order_and_grouping():
    states = random_states(50, torch.float32)
    weights = [float(1 + i % 7) for i in range(50)]
    forwards = mean_of(states, weights).finalize()
    backwards = mean_of(states[::-1], weights[::-1]).finalize()
    parts = [mean_of(states[i::3], weights[i::3]) for i in range(3)]
    grouped = reduced(*parts)[1].finalize()
    for name in ("matrix", "scalar"):
        assert torch.equal(forwards[name], backwards[name]) and torch.equal(forwards[name], grouped[name])


def test_tie_is_rounded_to_even_in_any_order():
    # The mean is exactly between two adjacent float32 values, so the smallest error would change the result.
    low = torch.tensor([1.0])
    high = torch.nextafter(low, torch.tensor([2.0]))
    for states in ([low, high, low, high, low, high], [high, high, high, low, low, low]):
        assert mean_of([{"w": state} for state in states], [1.0] * 6).finalize()["w"].item() == 1.0


@pytest.mark.parametrize(
    ("dtype", "num"),
    [(dtype, num) for dtype in (torch.float32, torch.bfloat16, torch.float16) for num in (1, 2, 3, 10, 101)]
    + [(torch.float64, 1)],
    ids=str,
)
def test_mean_of_equal_states_is_exact(dtype, num):
    (state,) = random_states(1, dtype)
    state["edge"] = torch.tensor([3.4e38, -3.4e38, 1e-45, 0.1, 1 / 3, 0.0], dtype=torch.float64).to(dtype)
    state["edge"] = state["edge"].nan_to_num(posinf=0.1, neginf=-0.1)
    weights = [float(1 + i * 13 % 29) for i in range(num)]
    result = mean_of([state] * num, weights).finalize()
    assert all(torch.equal(result[name], state[name]) for name in state)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_integers_and_booleans_are_copied_from_the_first_state(dtype):
    first, second = torch.tensor([1, 0, 1]).to(dtype), torch.tensor([0, 1, 1]).to(dtype)
    mean = mean_of([{"n": first, "w": torch.zeros(1)}, {"n": second, "w": torch.ones(1)}], [1.0, 3.0])
    for wide in (False, True):
        result = mean.finalize(wide=wide)
        assert result["n"].dtype == dtype and torch.equal(result["n"], first)
        assert result["w"].item() == 0.75


def test_large_step_counter_is_not_rounded():
    count = torch.tensor(2**53 + 1)
    assert mean_of([{"n": count}] * 3, [1.0] * 3).finalize()["n"].item() == 2**53 + 1


def test_keys_keep_their_order():
    state = {"b": torch.ones(1), "n": torch.tensor(1), "a": torch.ones(1)}
    assert list(mean_of([state, state], [1.0, 1.0]).finalize()) == ["b", "n", "a"]


def test_mean_keeps_copies_of_the_states():
    state = {"w": torch.ones(2), "n": torch.tensor(1)}
    mean = mean_of([state], [1.0])
    state["w"].zero_(), state["n"].zero_()
    assert mean.finalize()["w"].tolist() == [1.0, 1.0] and mean.finalize()["n"].item() == 1


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weight_must_be_positive_and_finite(weight):
    mean = WeightedMean()
    with pytest.raises(ValueError, match="A weight must be positive and finite"):
        mean.add({"w": torch.ones(1)}, weight)
    assert mean.num_updates == 0


def test_mean_of_no_states_raises_an_error():
    with pytest.raises(ValueError, match="The mean of no updates is undefined"):
        WeightedMean().finalize()


# ---- Means over several processes


@pytest.mark.parametrize("cut", [0, 1, 2, 4, 5])
def test_reduced_parts_equal_the_mean_of_all_states(cut):
    states = random_states(5, torch.float64)
    for state in states:
        state["count"] = torch.tensor(7)
    parts = [
        mean_of(states[:cut], WEIGHTS[:cut], states[0]),
        mean_of(states[cut:], WEIGHTS[cut:], states[0]),
    ]
    expected = mean_of(states, WEIGHTS).finalize()
    for part in reduced(*parts):
        assert (part.num_updates, part.total_weight) == (5, sum(WEIGHTS))
        for name in ("matrix", "scalar", "count"):
            torch.testing.assert_close(part.finalize()[name], expected[name], rtol=0, atol=1e-14)


def test_reduced_parts_of_equal_states_are_exact():
    (state,) = random_states(1, torch.float32)
    for part in reduced(mean_of([state] * 3, [1.0, 2.0, 3.0]), mean_of([state] * 2, [5.0, 0.1])):
        assert all(torch.equal(part.finalize()[name], state[name]) for name in state)
        assert (part.num_updates, part.total_weight) == (5, 11.1)


def test_reduced_parts_share_no_memory():
    state = {"w": torch.ones(1), "n": torch.tensor(1)}
    left, right = reduced(WeightedMean(state), mean_of([state], [1.0]))
    left.add({"w": torch.zeros(1), "n": torch.tensor(1)}, 1.0)
    assert (left.finalize()["w"].item(), right.finalize()["w"].item()) == (0.5, 1.0)


def test_reduction_without_states_and_reference_raises_an_error():
    with pytest.raises(ValueError, match="needs a reference for the processes without updates"):
        WeightedMean().reduction_tensors(1.0, 1)


def test_order_of_names_does_not_change_the_reduction():
    state = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}
    reversed_state = {"b": torch.tensor([4.0]), "a": torch.tensor([3.0])}
    for part in reduced(mean_of([state], [1.0], state), mean_of([reversed_state], [1.0], state)):
        assert {name: value.item() for name, value in part.finalize().items()} == {"a": 2.0, "b": 3.0}


def test_means_of_an_accumulator_are_reduced_by_name():
    def update(value: float) -> ClientUpdate:
        state, extra = {"w": torch.tensor([value])}, {"w": torch.tensor([10 * value])}
        return ClientUpdate(0, "a", state, num_examples=int(value), num_tokens=0, num_steps=1, extra=extra)

    reference = {"w": torch.zeros(1)}
    left, right = Accumulator(FedAvg(), reference, reference), Accumulator(FedAvg(), reference, reference)
    left.add(update(1.0))
    right.add(update(2.0))
    right.add(update(6.0))
    assert left.means.keys() == right.means.keys() == {"state", "extra"}
    for name in left.means:
        reduced(left.means[name], right.means[name])
    assert left.num_updates == 3
    assert left.mean.finalize()["w"].item() == pytest.approx((1 * 1 + 2 * 2 + 6 * 6) / 9, abs=1e-6)
    assert left.extra.finalize()["w"].item() == pytest.approx((10 + 20 + 60) / 3, abs=1e-5)  # each client once


# ---- Memory


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


@pytest.fixture
def only_new_objects():
    """Exclude the existing objects from the garbage collector, because there are many."""
    gc.freeze()
    yield
    gc.unfreeze()


def test_memory_does_not_grow_with_the_number_of_states(only_new_objects):
    accumulator = Accumulator(FedAvg(), {}, {})
    held = []
    for number in range(64):
        (state,) = random_states(1, torch.float32, seed=number)
        accumulator.add(ClientUpdate(0, "a", state, 1, 0, 1, extra={"c": torch.ones(3)}))
        del state
        if number in (0, 1, 63):
            held.append(live_tensors())
    assert held == [3, 3, 3]  # matrix, scalar, and c


@pytest.mark.parametrize("sizes", [(2, 3), (5, 0), (0, 1), (1, 0), (1, 1, 1)])
def test_reduced_parts_equal_the_mean_bit_for_bit(sizes):
    states = random_states(sum(sizes), torch.float32)
    weights = WEIGHTS[: len(states)]
    whole = mean_of(states, weights).finalize()
    parts = []
    for size in sizes:
        start = sum(part.num_updates for part in parts)
        parts.append(mean_of(states[start : start + size], weights[start : start + size], states[0]))
    for part in reduced(*parts):
        assert all(torch.equal(part.finalize()[name], whole[name]) for name in whole)


@pytest.mark.parametrize("shape", [(), (0, 3), (3, PIECE // 2), (PIECE + 1,)], ids=str)
def test_mean_in_pieces_equals_the_mean_of_the_whole_tensor(shape):
    states = [{"w": torch.randn(shape, generator=torch.Generator().manual_seed(seed))} for seed in range(3)]
    mean = WeightedMean()
    for weight, state in enumerate(states, start=1):
        mean.add(state, weight)
    expected = (sum(weight * state["w"].double() for weight, state in enumerate(states, start=1)) / 6).float()
    assert mean.finalize()["w"].equal(expected)
    transposed = WeightedMean()
    for weight, state in enumerate(states, start=1):
        transposed.add({"w": state["w"].t() if state["w"].ndim == 2 else state["w"]}, weight)
    assert transposed.finalize()["w"].equal(expected.t() if expected.ndim == 2 else expected)
