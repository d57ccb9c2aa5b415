"""The sums of the clients' contributions replace the updates of an algorithm that averages."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from hf_federated.aggregation import AGGREGATIONS, Accumulator, Aggregation, FedAvg, WeightedMean, build_aggregation
from hf_federated.messages import ClientUpdate
from hf_federated.messages.serialization import pack, unpack
from hf_federated.methods import WeightedSums


State = dict[str, torch.Tensor]

SETTINGS: dict[str, dict[str, Any]] = {
    "fedopt": {"server_optimizer": "adam", "server_lr": 0.1},
    "scaffold": {"server_lr": 0.5},
    # About one half of the changes are limited.
    "norm_bounded_mean": {"max_norm": 0.25},
    "centered_clipping": {"radius": 0.25},
}
NOT_LINEAR = {"median", "trimmed_mean", "geometric_median", "krum", "fltrust", "stacked_lora", "fedex_lora"}
LINEAR = sorted(AGGREGATIONS.keys() - NOT_LINEAR)
DTYPES = {"half": torch.bfloat16, "float16": torch.float16, "matrix": torch.float32, "scalar": torch.float64}
NUM_EXAMPLES = [30, 7, 250, 1, 64]


class Spread(Aggregation):
    """Adds the standard deviation of the clients, for which it sums the squares with other weights."""

    name: ClassVar[str] = "spread"

    def expected_extra(self, state: State) -> State:
        return {"bonus": torch.zeros(2)}

    def accumulator(self, state: State, extra: State | None = None) -> Accumulator:
        accumulator = super().accumulator(state, extra)
        floating = {name: value.double() for name, value in state.items() if value.is_floating_point()}
        accumulator.means["squares"] = WeightedMean(floating)
        return accumulator

    def accumulate(self, accumulator: Accumulator, update: ClientUpdate) -> None:
        super().accumulate(accumulator, update)
        squares = {name: value.double().square() for name, value in update.state.items() if value.is_floating_point()}
        accumulator.means["squares"].add(squares, float(update.num_steps))

    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        squares, bonus = accumulator.means["squares"], accumulator.extra.mean_of("bonus").sum()
        result = accumulator.mean.finalize()
        for name in DTYPES:
            mean = accumulator.mean.mean_of(name, wide=True).double()
            result[name] = (mean + bonus * (squares.mean_of(name) - mean.square()).abs().sqrt()).to(result[name])
        return result


class CountsInIntegers(FedAvg):
    def expected_extra(self, state: State) -> State:
        return {"seen": torch.zeros(3, dtype=torch.int64)}


def build(name: str) -> Aggregation:
    """Return an algorithm of a process. The server and each client have their own."""
    algorithm = Spread() if name == "spread" else build_aggregation(name, SETTINGS.get(name, {}))
    algorithm.setup(num_rounds=3, num_clients=len(NUM_EXAMPLES) + 2)
    return algorithm


def global_state(dtype: torch.dtype | None = None) -> State:
    """Return a state whose values have their own dtypes, or all the given one."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"half": (5,), "float16": (3,), "matrix": (4, 3), "scalar": ()}
    state = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(DTYPES[name])
        for name, shape in shapes.items()
    }
    state = {name: value if dtype is None else value.to(dtype) for name, value in state.items()}
    return {"count": torch.tensor([5, 6]), **state, "mask": torch.tensor([True, False])}


def client_updates(
    algorithm: Aggregation, state: State, num: int = len(NUM_EXAMPLES), round: int = 0
) -> list[ClientUpdate]:
    """Return updates whose values have the precision of `global_state()`, in any dtype."""
    updates = []
    for number in range(num):
        generator = torch.Generator().manual_seed(100 * round + number + 1)
        values = {}
        for name, value in global_state().items():
            if value.is_floating_point():
                change = 0.06 * torch.randn(value.shape, generator=generator, dtype=torch.float64)
                values[name] = (value.double() + change).to(value.dtype).to(state[name].dtype)
            else:
                values[name] = torch.full_like(value, number)
        extra = {
            name: (torch.rand(value.shape, generator=generator, dtype=torch.float64) + 0.1).to(value.dtype)
            for name, value in algorithm.expected_extra(state).items()
        }
        updates.append(
            ClientUpdate(round, f"client {number}", values, NUM_EXAMPLES[number], 0, num_steps=2 + number, extra=extra)
        )
    return updates


def contributions(name: str, updates: Sequence[ClientUpdate], state: State, centered: bool) -> list[Any]:
    """Each client computes its contribution with its own algorithm."""
    return [build(name).accumulator(state).contribution(update, state if centered else None) for update in updates]


def added(parts: Sequence[dict[str, WeightedSums]]) -> dict[str, WeightedSums]:
    return functools.reduce(lambda left, right: {name: left[name] + right[name] for name in left}, parts)


def assert_close(left: State, right: State, tolerance: float = 1e-12) -> None:
    """Compare the floating tensors relative to the largest value."""
    for name in DTYPES:
        assert left[name].dtype == right[name].dtype
        largest = float(right[name].abs().max())
        torch.testing.assert_close(left[name].double(), right[name].double(), rtol=0, atol=tolerance * largest)


def test_which_algorithms_are_linear():
    state = global_state()
    linear = {name for name in AGGREGATIONS if build(name).accumulator(state).is_linear}
    assert linear == AGGREGATIONS.keys() - NOT_LINEAR
    # A limit that depends on the norms of the other clients.
    assert not build_aggregation("norm_bounded_mean").accumulator(state).is_linear
    assert not build_aggregation("centered_clipping").accumulator(state).is_linear


@pytest.mark.parametrize("centered", [False, True], ids=["values", "changes"])
@pytest.mark.parametrize("name", [*LINEAR, "spread"])
def test_sum_of_contributions_gives_the_plain_result(name, centered):
    """The states are float64, so the result is not rounded to a narrower dtype."""
    state, (plain, server) = global_state(torch.float64), (build(name), build(name))
    for round in range(2):  # the server keeps the optimizer or control variates of the first round
        updates = client_updates(plain, state, round=round)
        expected_sums, loaded = plain.accumulator(state), server.accumulator(state)
        for update in updates:
            expected_sums.add(update)
        # The center of the clipped algorithms is known to the server.
        parts = [server.accumulator(state).contribution(update, state if centered else None) for update in updates]
        loaded.load_sums([added(parts)], state if centered else None)
        assert loaded.num_updates == expected_sums.num_updates == len(updates)
        expected, result = plain.aggregate(expected_sums, state), server.aggregate(loaded, state)
        assert_close(result, expected)
        if name != "local_only":
            assert not torch.equal(expected["matrix"], state["matrix"])
        for integer in ("count", "mask"):
            assert torch.equal(result[integer], state[integer])
        state = {**state, **{key: expected[key] for key in DTYPES}}


@pytest.mark.parametrize("centered", [False, True], ids=["values", "changes"])
@pytest.mark.parametrize("name", [*LINEAR, "spread"])
def test_sum_of_contributions_of_half_precision_gives_the_plain_result_in_its_dtypes(name, centered):
    state, plain, server = global_state(), build(name), build(name)
    updates = client_updates(plain, state)
    expected_sums, loaded = plain.accumulator(state), server.accumulator(state)
    for update in updates:
        expected_sums.add(update)
    loaded.load_sums(contributions(name, updates, state, centered), state if centered else None)
    for mean_name, mean in expected_sums.means.items():
        if mean.num_updates:
            wide, expected = loaded.means[mean_name].finalize(wide=True), mean.finalize(wide=True)
            for key, value in expected.items():
                assert wide[key].dtype == value.dtype
                if value.is_floating_point():
                    # The plain sums of half precision are float32.
                    rounding = 1e-12 if value.dtype == torch.float64 else 1e-6
                    largest = float(value.abs().max())
                    torch.testing.assert_close(wide[key], value, rtol=0, atol=rounding * largest)
    result, expected = server.aggregate(loaded, state), plain.aggregate(expected_sums, state)
    for key, dtype in DTYPES.items():
        assert result[key].dtype == dtype
        torch.testing.assert_close(result[key], expected[key], rtol=torch.finfo(dtype).eps, atol=1e-12)


@pytest.mark.parametrize("centered", [False, True], ids=["values", "changes"])
def test_sums_of_half_precision_are_as_exact_as_those_of_float64(centered):
    narrow, wide = global_state(), global_state(torch.float64)
    algorithm = build("fednova")
    parts = []
    for state in (narrow, wide):
        updates = client_updates(algorithm, state)
        parts.append(added(contributions("fednova", updates, state, centered))["state"].values)
    for name in DTYPES:
        assert parts[0][name].dtype == torch.float64
        assert torch.equal(parts[0][name], parts[1][name])


@pytest.mark.parametrize("centered", [False, True], ids=["values", "changes"])
def test_values_of_a_contribution_are_weighted_changes(centered):
    state, algorithm = global_state(), build("scaffold")
    update = client_updates(algorithm, state)[2]
    algorithm.weighting = "examples"
    center = state if centered else None
    result = algorithm.accumulator(state).contribution(update, center)
    assert list(result) == ["state", "extra"]
    assert (result["state"].weight, result["extra"].weight) == (NUM_EXAMPLES[2], 1.0)
    for name in DTYPES:
        change = update.state[name].double() - (state[name].double() if centered else 0)
        assert torch.equal(result["state"].values[name], NUM_EXAMPLES[2] * change)
        # A control variate has the name of its parameter. It is no parameter, so nothing is subtracted.
        assert torch.equal(result["extra"].values[name], update.extra[name].double())


@pytest.mark.parametrize("centered", [False, True], ids=["values", "changes"])
@pytest.mark.parametrize("name", ["fedavg", "fednova", "spread"])
def test_one_client_gives_the_same_bits_as_its_update(name, centered):
    state, algorithm = global_state(), build(name)
    for update in client_updates(algorithm, state):
        plain, loaded = algorithm.accumulator(state), algorithm.accumulator(state)
        plain.add(update)
        loaded.load_sums(contributions(name, [update], state, centered), state if centered else None)
        for key in DTYPES:
            assert torch.equal(loaded.mean.finalize()[key], plain.mean.finalize()[key])
            assert torch.equal(loaded.mean.finalize()[key], update.state[key])


def test_order_of_the_contributions_does_not_matter():
    state, algorithm = global_state(), build("fedavg")
    updates = client_updates(algorithm, state, num=4)
    updates = [ClientUpdate(0, update.client_id, update.state, update.num_examples, 0, 1) for update in updates]
    parts = contributions("fedavg", updates, state, centered=True)
    results = []
    for order in itertools.permutations(parts):
        accumulator = algorithm.accumulator(state)
        accumulator.load_sums(order, state)
        results.append(accumulator.mean.finalize())
    for result in results[1:]:
        assert_close(result, results[0])
        for name, dtype in DTYPES.items():
            assert dtype == torch.float64 or torch.equal(result[name], results[0][name])


def test_no_contributions_leave_the_accumulator_empty():
    state = global_state()
    accumulator = FedAvg().accumulator(state)
    accumulator.load_sums([])
    # The sums of a mean without updates.
    accumulator.load_sums([{name: mean.sums() for name, mean in FedAvg().accumulator(state).means.items()}])
    assert accumulator.num_updates == 0
    with pytest.raises(ValueError, match="The mean of no updates is undefined"):
        FedAvg().aggregate(accumulator, state)


def test_contributions_and_updates_can_be_added_to_the_same_accumulator():
    state, algorithm = global_state(torch.float64), build("spread")
    updates = client_updates(algorithm, state)
    expected, mixed = algorithm.accumulator(state), algorithm.accumulator(state)
    for update in updates:
        expected.add(update)
    mixed.add(updates[0])
    mixed.load_sums(contributions("spread", updates[1:3], state, centered=True), state)
    mixed.load_sums(contributions("spread", updates[3:], state, centered=False))
    assert_close(algorithm.aggregate(mixed, state), algorithm.aggregate(expected, state))
    assert torch.equal(mixed.mean.finalize()["count"], updates[0].state["count"])


def test_computing_a_contribution_does_not_change_the_accumulator():
    state, algorithm = global_state(), build("spread")
    first, second = client_updates(algorithm, state, num=2)
    accumulator = algorithm.accumulator(state)
    accumulator.add(first)
    before = {name: mean.finalize() for name, mean in accumulator.means.items()}
    accumulator.contribution(second, state)
    assert (accumulator.num_updates, accumulator.first_client) == (1, "client 0")
    for name, mean in accumulator.means.items():
        assert all(torch.equal(value, before[name][key]) for key, value in mean.finalize().items())


def test_contributions_of_all_clients_have_the_same_layout_and_can_be_serialized():
    state, algorithm = global_state(), build("fednova")
    layouts = []
    for update in client_updates(algorithm, state):
        shuffled = dict(reversed(update.state.items()))
        update = ClientUpdate(0, "a", shuffled, update.num_examples, 0, 1, extra=update.extra)
        contribution = algorithm.accumulator(state).contribution(update, state)
        tree = {
            name: {"weight": sums.weight, "num_updates": sums.num_updates, "values": sums.values}
            for name, sums in contribution.items()
        }
        read = {name: WeightedSums(**fields) for name, fields in unpack(pack(tree)).items()}
        loaded, received = algorithm.accumulator(state), algorithm.accumulator(state)
        loaded.load_sums([contribution], state)
        received.load_sums([read], state)
        assert all(
            torch.equal(value, loaded.mean.finalize()[name]) for name, value in received.mean.finalize().items()
        )
        layouts.append(
            [(name, key, value.shape, value.dtype) for name in read for key, value in read[name].values.items()]
        )
    assert all(layout == layouts[0] for layout in layouts)
    # FedNova adds to its own mean instead of `extra`, which therefore contains no update.
    assert contribution["extra"].num_updates == 0 and not contribution["extra"].values["normalizer"]


@pytest.mark.parametrize("name", sorted(NOT_LINEAR))
def test_algorithm_that_compares_updates_is_refused_with_an_alternative(name):
    state, algorithm = global_state(), build_aggregation(name)
    accumulator = algorithm.accumulator(state)
    (update,) = client_updates(FedAvg(), state, num=1)
    for call in (lambda: accumulator.contribution(update), lambda: accumulator.load_sums([])):
        with pytest.raises(ValueError, match=rf"not sufficient for {type(algorithm).__name__}\(.*such as FedAvg"):
            call()
    assert accumulator.num_updates == 0


def test_integers_that_only_clients_have_are_refused():
    state, algorithm = global_state(), CountsInIntegers()
    accumulator = algorithm.accumulator(state)
    assert not accumulator.is_linear
    (update,) = client_updates(algorithm, state, num=1)
    with pytest.raises(ValueError, match="integer tensor 'seen' of a client .*Use a floating tensor"):
        accumulator.contribution(update)


def test_contribution_with_other_names_or_shapes_is_refused():
    state, algorithm = global_state(), build("fedavg")
    (update,) = client_updates(algorithm, state, num=1)
    accumulator = algorithm.accumulator(state)
    contribution = accumulator.contribution(update)
    with pytest.raises(ValueError, match=r"has the means \['state'\], but the accumulator has"):
        accumulator.load_sums([{"state": contribution["state"]}])
    values = dict(contribution["state"].values)
    for wrong in (
        {**values, "matrix": values["matrix"][:1]},
        {name: values[name] for name in values if name != "matrix"},
    ):
        broken = {**contribution, "state": WeightedSums(1.0, 1, wrong)}
        for given in ([broken], [contribution, broken]):
            with pytest.raises(ValueError, match="sums of 'matrix' have the shape"):
                accumulator.load_sums(given)
    with pytest.raises(ValueError, match="sums of 'matrix' have the shape"):
        other = {name: value for name, value in update.state.items() if name != "matrix"}
        accumulator.contribution(ClientUpdate(0, "a", other, 1, 0, 1))
    with pytest.raises(ValueError, match="A weight must be positive and finite, got 0"):
        accumulator.load_sums([{**contribution, "state": WeightedSums(0.0, 1, values)}])
    assert accumulator.num_updates == 0


def test_sums_of_a_mean_without_a_reference_raise_an_error():
    with pytest.raises(ValueError, match="needs a reference for its sums"):
        WeightedMean().sums()
