"""Norms, inner products and checks of values add one number over the processes that hold shards of a state."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from hf_federated import ClipUpdate
from hf_federated.aggregation.change_sketch import ChangeSketch
from hf_federated.aggregation.update_statistics import distance, squared_norm
from hf_federated.messages import ClientUpdate, Fit
from hf_federated.messages.validation import InvalidUpdateError, first_non_finite
from hf_federated.server.bound_update import BoundUpdate
from hf_federated.utils.shards import Shards, first_over_shards, states_in_shards, sum_over_shards


# The shard of this process. The other process has the same values in the other rows of the tensor.
BEFORE = {"w": torch.zeros(2, 2)}
AFTER = {"w": torch.tensor([[1.0, 2.0], [2.0, 4.0]])}
NORM = math.sqrt(2 * 25)


def doubled(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.mul_(2)


@pytest.fixture
def sharded() -> Iterator[None]:
    with states_in_shards(Shards({"w": torch.Size([4, 2])}, doubled, rank=1)):
        yield


def update(state: dict[str, torch.Tensor]) -> ClientUpdate:
    return ClientUpdate(0, "a", state, num_examples=1, num_tokens=0, num_steps=1)


@pytest.mark.usefixtures("sharded")
def test_distances_are_those_of_whole_states() -> None:
    assert float(distance(AFTER, BEFORE)) == pytest.approx(NORM)
    assert squared_norm(AFTER, BEFORE) == pytest.approx(NORM**2)


@pytest.mark.usefixtures("sharded")
def test_clipped_update_has_the_largest_norm_as_a_whole() -> None:
    step = ClipUpdate(max_norm=1.0)
    clipped = step.client_send(update(AFTER), Fit(0, "a", seed=0, state=BEFORE), {})
    assert float(clipped.state["w"].norm()) == pytest.approx(1 / math.sqrt(2))
    assert clipped.state["w"].dtype == torch.float32
    step.check_update(clipped, BEFORE)
    # The shard alone is below the bound.
    with pytest.raises(InvalidUpdateError, match="the norm of its change is 7.07"):
        ClipUpdate(max_norm=6.0).check_update(update(AFTER), BEFORE)


@pytest.mark.usefixtures("sharded")
def test_bound_measures_whole_updates() -> None:
    bound = BoundUpdate(max_ratio=30.0)
    bound.begin_round(BEFORE)
    assert bound.measure(update(AFTER))["state"] == pytest.approx(NORM)
    # The typical norm of a state of zeros counts all values.
    with pytest.raises(InvalidUpdateError, match="the norm of the global state is 0.0283"):
        bound.measure(update({"w": torch.full((2, 2), 1e6)}))


def test_processes_agree_on_the_first_tensor_that_is_not_finite() -> None:
    found_by_other = torch.tensor([0, 1, 0], dtype=torch.float64)
    shards = Shards({}, lambda tensors: tensors[0].add_(found_by_other), rank=0)
    state = {name: torch.zeros(2) for name in "abc"}
    with states_in_shards(shards):
        assert first_non_finite(state) == "b"
        assert first_over_shards("abc", "c") == "b"
    assert first_non_finite(state) is None


def test_sketches_of_shards_estimate_the_inner_products_of_whole_changes() -> None:
    first, second = (torch.randn(2, 5000, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    second += 0.5 * first
    sketches = []
    for change in (first, second):
        total = torch.zeros(1021, dtype=torch.float64)
        for rank in range(2):
            with states_in_shards(Shards({}, lambda tensors: None, rank)):
                total += ChangeSketch({"w": torch.zeros(5000)}, seed=3)({"w": change[rank]})
        sketches.append(total)
    scale = float(first.norm() * second.norm())
    assert float(sketches[0] @ sketches[1]) == pytest.approx(float((first * second).sum()), abs=4 * 0.044 * scale)
    # With equal signs, rows of different shards would count as one row.
    opposite = torch.zeros(1021, dtype=torch.float64)
    for rank in range(2):
        with states_in_shards(Shards({}, lambda tensors: None, rank)):
            opposite += ChangeSketch({"w": torch.zeros(5000)}, seed=3)({"w": (-1) ** rank * first[0]})
    assert float(opposite @ opposite) == pytest.approx(2 * float(first[0] @ first[0]), rel=0.3)


@pytest.mark.usefixtures("sharded")
def test_length_of_a_message_is_that_of_the_message_with_whole_tensors() -> None:
    whole = torch.arange(8.0).reshape(4, 2)
    message = Fit(0, "a", seed=0, state={"w": whole[:2]}, extra={"w": whole[:2].double()})
    expected = Fit(0, "a", seed=0, state={"w": whole}, extra={"w": whole.double()})
    assert message.num_bytes == len(expected.to_bytes())


def test_whole_states_need_no_sum() -> None:
    values = torch.ones(2)
    assert sum_over_shards(values) is values and first_over_shards("ab", "b") == "b"
