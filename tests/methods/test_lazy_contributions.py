"""The values of a contribution are computed from the update when they are read, with the bits of a sum in float64."""

from __future__ import annotations

import pytest
import torch

from hf_federated import Aggregation, FedAvg, FedNova
from hf_federated.aggregation import Accumulator, WeightedMean
from hf_federated.messages import ClientUpdate
from hf_federated.methods import WeightedSums
from hf_federated.server.bound_sum import BoundSum
from hf_federated.server.bound_update import BoundUpdate
from hf_federated.utils.lazy_tensors import LazyTensors, Reader
from hf_federated.utils.weighted_mean import PIECE


State = dict[str, torch.Tensor]

# More values than any memory holds. A stride of 0 repeats one value.
NUM_VALUES = 10**14


def state_of(seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    values = {
        "matrix": torch.randn(3, 5, generator=generator),
        "scalar": torch.randn((), generator=generator),
        "empty": torch.randn(0, 4, generator=generator),
        "transposed": torch.randn(4, 3, generator=generator).T,
        "half": torch.randn(5, generator=generator).to(torch.bfloat16),
        "float16": torch.randn(3, generator=generator).to(torch.float16),
        "wide": torch.randn(2, generator=generator, dtype=torch.float64),
        "parameter": torch.nn.Parameter(torch.randn(2, generator=generator)),
    }
    return {**values, "count": torch.tensor([seed])}


def update_of(state: State, num_examples: int = 3, extra: State | None = None) -> ClientUpdate:
    return ClientUpdate(0, "a", state, num_examples, num_tokens=0, num_steps=1, extra=extra or {})


def test_layout_of_a_contribution_is_known_without_computing_a_value():
    huge = torch.ones(1).expand(NUM_VALUES)
    state = {"b": huge, "count": torch.tensor(1), "a": torch.zeros(())}
    accumulator = FedAvg().accumulator(state)
    contribution = accumulator.contribution(update_of({**state, "a": torch.ones(())}), state)
    values = contribution["state"].values
    assert list(values) == ["b", "a"] and len(values) == 2 and "count" not in values
    assert values.shapes == accumulator.shapes["state"] == {"b": huge.shape, "a": torch.Size([])}
    assert values["a"].item() == 3.0
    assert next(values.pieces("b", 4)).tolist() == [0.0] * 4
    with pytest.raises(KeyError):
        values["count"]


@pytest.mark.parametrize("centered", [False, True], ids=["values", "changes"])
def test_values_and_their_pieces_have_the_bits_of_float64_sums(centered):
    before, after = state_of(0), state_of(1)
    values = FedAvg().accumulator(before).contribution(update_of(after), before if centered else None)["state"].values
    assert list(values) == [name for name in before if name != "count"]
    for name, value in values.items():
        center = before[name].detach().double() if centered else 0.0
        expected = 3.0 * (after[name].detach().double() - center)
        assert value.dtype == torch.float64 and not value.requires_grad
        assert value.shape == expected.shape and torch.equal(value, expected)
        pieces = list(values.pieces(name, 4))
        assert all(0 < len(piece) <= 4 for piece in pieces)
        assert torch.equal(torch.cat([torch.empty(0).double(), *pieces]), expected.reshape(-1))


def test_values_are_computed_again_at_each_reading():
    state = {"w": torch.zeros(2)}
    update = update_of({"w": torch.ones(2)})
    values = FedAvg().accumulator(state).contribution(update, state)["state"].values
    values["w"].zero_()
    for piece in values.pieces("w", 1):
        piece.zero_()
    assert values["w"].tolist() == [3.0, 3.0] and update.state["w"].tolist() == [1.0, 1.0]


def test_loading_sums_computes_each_tensor_once():
    computed = []

    def open(name: str) -> Reader:
        computed.append(name)
        return lambda start, stop: torch.ones(stop - start, dtype=torch.float64)

    state = {"b": torch.zeros(3), "a": torch.zeros(())}
    accumulator = FedAvg().accumulator(state)
    values = LazyTensors(accumulator.shapes["state"], open)
    assert computed == []
    accumulator.load_sums([{"state": WeightedSums(2.0, 2, values), "extra": WeightedSums(0.0, 0, {})}])
    assert computed == ["b", "a"]
    assert accumulator.mean.finalize()["b"].tolist() == [0.5, 0.5, 0.5]


class SeveralStates(Aggregation):
    """Add several states of an update to each mean, and read means."""

    def accumulator(self, state: State, extra: State | None = None) -> Accumulator:
        accumulator = super().accumulator(state, extra)
        accumulator.means["merged"] = WeightedMean({"w": state["w"]})
        accumulator.means["taken"] = WeightedMean({"w": state["w"]})
        return accumulator

    def accumulate(self, accumulator: Accumulator, update: ClientUpdate) -> None:
        accumulator.means["state"].add(update.state, 3.0)
        accumulator.means["state"].add(update.extra, 2.0)
        accumulator.means["merged"].add(update.state, 2.0)
        other = accumulator.means["merged"].empty(copies=False)
        other.add(update.extra, 1.0)
        accumulator.means["merged"].merge(other)
        other = accumulator.means["taken"].empty(copies=False)
        other.add(update.extra, 5.0)
        accumulator.means["taken"].merge(other)
        accumulator.means["taken"].add(update.state, 1.0)
        read = accumulator.means["state"].empty(copies=False)
        read.add(update.state, 3.0)
        self.wide_means = [mean.mean_of("w", wide=True) for mean in (read, accumulator.means["taken"])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_states_of_one_update_are_summed_without_changing_them(dtype):
    state, first, second = ({"w": torch.tensor([number, 1.0], dtype=dtype)} for number in (0.0, 5.0, 7.0))
    algorithm = SeveralStates()
    contribution = algorithm.accumulator(state).contribution(update_of(first, extra=second), state)
    assert contribution["state"].num_updates == 2 and contribution["state"].weight == 5.0
    assert contribution["state"].values["w"].tolist() == [3 * 5.0 + 2 * 7.0, 0.0]
    # Other means have no center.
    assert contribution["merged"].values["w"].tolist() == [2 * 5.0 + 7.0, 3.0]
    assert contribution["taken"].values["w"].tolist() == [5.0 + 5 * 7.0, 6.0]
    assert first["w"].tolist() == [5.0, 1.0] and second["w"].tolist() == [7.0, 1.0]
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    assert [mean.dtype for mean in algorithm.wide_means] == [wide, wide]
    assert algorithm.wide_means[0].tolist() == [5.0, 1.0]


def test_reduced_tensors_are_copies_of_the_state():
    state = {"w": torch.ones(2), "count": torch.tensor([1])}
    mean = WeightedMean(state).empty(copies=False)
    mean.add(state, 1.0)
    for tensor in sum(mean.reduction_tensors(1.0, 1), []):
        tensor.zero_()
    assert state["w"].tolist() == [1.0, 1.0] and state["count"].tolist() == [1]


def test_mean_without_updates_has_zeros():
    state = {"w": torch.zeros(2)}
    update = update_of({"w": torch.ones(2)}, extra={"normalizer": torch.tensor(2.0).double()})
    contribution = FedNova().accumulator(state).contribution(update, state)
    assert contribution["extra"].num_updates == 0
    assert contribution["extra"].values["normalizer"].item() == 0.0
    assert [piece.tolist() for piece in contribution["extra"].values.pieces("normalizer", 4)] == [[0.0]]
    assert contribution["normalizer"].values["normalizer"].item() == 6.0
    assert contribution["state"].values["w"].tolist() == [1.5, 1.5]


@pytest.mark.parametrize("num_updates", [1, 2])
def test_sums_are_loaded_in_pieces_with_the_bits_of_whole_tensors(num_updates):
    generator = torch.Generator().manual_seed(0)
    shape = (3, PIECE // 2 + 1)
    reference = {"w": torch.randn(shape, generator=generator), "t": torch.randn(shape[::-1], generator=generator).T}
    sums = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name in reference}
    lengths: list[int] = []

    def open(name: str) -> Reader:
        def read(start: int, stop: int) -> torch.Tensor:
            lengths.append(stop - start)
            return sums[name].reshape(-1)[start:stop].clone()

        return read

    lazy = LazyTensors({name: value.shape for name, value in sums.items()}, open)
    mean = WeightedMean(reference)
    mean.add_sums(WeightedSums(3.0, num_updates, lazy), reference)
    for name, value in mean.finalize(wide=True).items():
        own = reference[name].double()
        expected = sums[name] / 3.0 + own if num_updates == 1 else sums[name].add(own, alpha=3.0) / 3.0
        assert torch.equal(value, expected), name
        assert value.stride() == reference[name].stride()
    assert max(lengths) == PIECE


def test_norm_of_a_sum_is_computed_in_pieces():
    """A float64 copy of all values would need twice the memory of the model."""
    bound = BoundSum(BoundUpdate(max_ratio=2.0))
    values = torch.full((2 * PIECE + 3,), 2.0)
    lengths: list[int] = []

    def read(start: int, stop: int) -> torch.Tensor:
        lengths.append(stop - start)
        return values[start:stop].double()

    lazy = LazyTensors({"w": values.shape}, lambda name: read)
    bound.check(WeightedSums(4.0, 2, lazy), {"w": values}, num_steps=1, round=0)
    assert bound.state_dict() == pytest.approx([0.5 * len(values) ** 0.5])
    assert max(lengths) == PIECE
