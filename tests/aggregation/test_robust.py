"""Robust aggregation: every rule against a reference in numpy and float64, and the properties that they share."""

from __future__ import annotations

import gc
import os
import random
import tempfile
import tracemalloc

import numpy as np
import pytest
import robust_reference as reference
import torch
from robust_reference import BEFORE, NUM_CLIENTS, before, client_states, run, vector, vectors

from hf_federated import CoordinateMedian, FedAvg, FedOpt, GeometricMedian, Krum, RoundFailedError, TrimmedMean
from hf_federated.aggregation import UpdateCollection
from hf_federated.messages.serialization import pack, unpack


RULES = {
    "median": (CoordinateMedian, lambda points: reference.median(points)),
    "trimmed mean": (lambda **kwargs: TrimmedMean(2, **kwargs), lambda points: reference.trimmed_mean(points, 2)),
    "krum": (lambda **kwargs: Krum(2, **kwargs), lambda points: reference.krum(points, 2)),
    "multi-krum": (lambda **kwargs: Krum(2, 4, **kwargs), lambda points: reference.krum(points, 2, 4)),
    "geometric median": (
        lambda **kwargs: GeometricMedian(2000, **kwargs),
        lambda points: reference.geometric_median(points, np.ones(len(points))),
    ),
}
all_rules = pytest.mark.parametrize("rule", RULES)


@all_rules
@pytest.mark.parametrize("num_clients", [7, 8, 9])
def test_rule_equals_the_reference_in_float64(rule, num_clients):
    build, expected = RULES[rule]
    states = client_states(num_clients)
    result = run(build(), before(), states)
    np.testing.assert_allclose(vector(result), expected(vectors(states)), rtol=0, atol=1e-8)
    assert list(result) == list(BEFORE)


@all_rules
def test_aggregation_does_not_change_the_global_state(rule):
    state = before()
    run(RULES[rule][0](), state, client_states())
    assert all(torch.equal(state[name], BEFORE[name]) for name in BEFORE)


@all_rules
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_result_is_rounded_once_in_narrower_dtypes(rule, dtype):
    build, expected = RULES[rule]
    states = client_states(dtype=dtype)
    result = run(build(), before(dtype), states)
    rounded = torch.from_numpy(expected(vectors(states))).to(dtype).double().numpy()
    assert result["w"].dtype == dtype
    np.testing.assert_allclose(vector(result), rounded, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


def test_geometric_median_minimizes_the_sum_of_distances():
    states = client_states()
    points = vectors(states)
    center = vector(run(GeometricMedian(2000), before(), states))
    least = reference.sum_of_distances(points, center)
    generator = np.random.default_rng(0)
    for scale in (1e-3, 1e-1, 1.0):
        assert reference.sum_of_distances(points, center + scale * generator.normal(size=center.shape)) > least


def test_geometric_median_uses_the_weights_of_the_clients():
    states = client_states()
    examples = {client_id: 1 + number for number, client_id in enumerate(states)}
    result = run(GeometricMedian(2000, weighting="examples"), before(), states, examples)
    expected = reference.geometric_median(vectors(states), np.arange(1.0, 1 + len(states)))
    np.testing.assert_allclose(vector(result), expected, rtol=0, atol=1e-8)


@all_rules
def test_order_of_arrival_does_not_change_any_bit(rule):
    build, _ = RULES[rule]
    states = client_states()
    expected = run(build(), before(), states)
    shuffled = list(states.items())
    random.Random(0).shuffle(shuffled)
    result = run(build(), before(), dict(shuffled))
    assert all(torch.equal(result[name], expected[name]) for name in expected)


@all_rules
def test_names_of_the_clients_do_not_change_the_estimate(rule):
    build, _ = RULES[rule]
    states = client_states()
    expected = run(build(), before(), states)
    renamed = dict(zip(states, reversed(states.values()), strict=True))
    np.testing.assert_allclose(vector(run(build(), before(), renamed)), vector(expected), rtol=0, atol=1e-9)


@all_rules
@pytest.mark.parametrize("value", [1e6, -1e6, 1e30])
def test_two_hostile_clients_of_nine_leave_the_result_among_the_honest_clients(rule, value):
    build, _ = RULES[rule]
    states = client_states(dtype=torch.float32)
    hostile = {"client 1", "client 6"}
    for client_id in hostile:
        states[client_id] = {
            name: torch.full_like(tensor, value) if tensor.is_floating_point() else tensor
            for name, tensor in states[client_id].items()
        }
    honest = vectors({client_id: state for client_id, state in states.items() if client_id not in hostile})
    result = vector(run(build(), before(torch.float32), states))
    if rule in ("median", "trimmed mean"):
        assert (result >= honest.min(0)).all() and (result <= honest.max(0)).all()
    # The distance to the mean of the honest clients stays within the distances of the honest clients.
    center = honest.mean(0)
    spread = np.linalg.norm(honest - center, axis=1).max()
    assert np.linalg.norm(result - center) <= spread


@pytest.mark.parametrize("rule", ["median", "geometric median"])
def test_four_hostile_clients_of_nine_are_tolerated(rule):
    build, _ = RULES[rule]
    states = client_states()
    honest = vectors(dict(list(states.items())[4:]))
    for client_id in list(states)[:4]:
        states[client_id] = {name: tensor + 10**6 for name, tensor in states[client_id].items()}
    result = vector(run(build(), before(), states))
    assert np.linalg.norm(result - honest.mean(0)) < 10 * np.linalg.norm(honest - honest.mean(0), axis=1).max()


@all_rules
def test_clients_that_agree_give_exactly_their_state(rule):
    build, _ = RULES[rule]
    state = client_states(1, torch.float32)["client 0"]
    result = run(build(), before(torch.float32), {str(number): state for number in range(8)})
    assert all(torch.equal(result[name], state[name]) for name in state)


@pytest.mark.parametrize("algorithm", [CoordinateMedian(), TrimmedMean(), GeometricMedian()], ids=repr)
def test_one_client_gives_exactly_its_state(algorithm):
    states = client_states(1, torch.float32)
    result = run(algorithm, before(torch.float32), states)
    assert all(torch.equal(result[name], states["client 0"][name]) for name in result)


@pytest.mark.parametrize("algorithm", [CoordinateMedian(), TrimmedMean(0), GeometricMedian()], ids=repr)
def test_two_clients_give_their_mean(algorithm):
    states = client_states(2)
    expected = run(FedAvg(weighting="uniform"), before(), states)
    np.testing.assert_allclose(vector(run(algorithm, before(), states)), vector(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("algorithm", [TrimmedMean(0), Krum(0, NUM_CLIENTS)], ids=repr)
def test_rules_without_hostile_clients_give_the_mean(algorithm):
    states = client_states()
    expected = run(FedAvg(weighting="uniform"), before(), states)
    np.testing.assert_allclose(vector(run(algorithm, before(), states)), vector(expected), rtol=0, atol=1e-12)


def test_minority_cannot_choose_integer_tensors():
    states = client_states(5)
    states["client 4"]["count"] = torch.tensor(10**9)
    assert run(CoordinateMedian(), before(), states)["count"] == 5


@pytest.mark.parametrize("algorithm", [Krum(1), Krum(1, 2)], ids=repr)
def test_client_in_the_middle_of_the_others_cannot_choose_integer_tensors_of_krum(algorithm):
    """The distances leave integer tensors out, so this client is selected."""
    states = client_states(5)
    names = [name for name, value in BEFORE.items() if value.is_floating_point()]
    states["client 0"] = {name: torch.stack([state[name] for state in states.values()]).mean(0) for name in names}
    states["client 0"]["count"] = torch.tensor(-(2**62))
    assert run(algorithm, before(), states)["count"] == BEFORE["count"] + 2


def test_krum_selects_an_update_without_changing_a_bit():
    states = client_states(dtype=torch.float32)
    result = run(Krum(2), before(torch.float32), states)
    names = [name for name, value in BEFORE.items() if value.is_floating_point()]
    assert any(all(torch.equal(result[name], state[name]) for name in names) for state in states.values())


# ---- Too few clients, arguments


@pytest.mark.parametrize(
    ("algorithm", "num_clients", "message"),
    [
        (Krum(2), 6, "num_hostile=2 of 'krum' needs 2f \\+ 3 = 7 updates, but there are 6"),
        (Krum(0, 4), 3, "num_selected=4 of 'krum' needs f \\+ m = 4 updates, but there are 3"),
        (Krum(), 2, "num_hostile=0.2 of 'krum' needs 2f \\+ 3 = [35] updates, but there are 2"),
        (TrimmedMean(2), 4, "num_hostile=2 of 'trimmed_mean' needs at least 5 updates, but there are 4"),
    ],
    ids=repr,
)
def test_too_few_clients_are_refused_by_name(algorithm, num_clients, message):
    with pytest.raises(ValueError, match=message):
        algorithm.check_exchange(BEFORE, num_clients)
    with pytest.raises(RoundFailedError, match=message):
        run(algorithm, before(), client_states(num_clients))


def test_share_of_krum_is_limited_to_the_updates_of_a_round():
    with pytest.raises(ValueError, match="needs 2f \\+ 3 = 5 updates, but there are 4"):
        Krum().check_exchange(BEFORE, 4)
    states = client_states(4)
    assert all(
        value.equal(run(Krum(0), before(), states)[name]) for name, value in run(Krum(), before(), states).items()
    )


@pytest.mark.parametrize("num_hostile", [-1, 0.5, 1.0, -0.1, True, "2"])
def test_number_of_hostile_clients_is_a_count_or_a_share_below_one_half(num_hostile):
    with pytest.raises((ValueError, TypeError), match="num_hostile"):
        TrimmedMean(num_hostile)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"server_lr": 0.5}, "no effect without a server optimizer"),
        ({"server_optimizer": "sdg"}, "`server_optimizer` is 'sdg'"),
        ({"server_optimizer": "sgd", "server_kwargs": {"eta": 1}}, "Invalid `server_kwargs`"),
        ({"max_memory_mb": 0}, "`max_memory_mb` is 0; it must be positive"),
    ],
)
def test_wrong_arguments_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        CoordinateMedian(**kwargs)


# ---- Server optimizer


@all_rules
def test_server_optimizer_steps_towards_the_estimate(rule):
    build, expected = RULES[rule]
    algorithm = build(server_optimizer="momentum", server_lr=0.5, server_kwargs={"server_momentum": 0.8})
    algorithm.setup(3, NUM_CLIENTS)
    state, x, velocity = before(), vector(BEFORE), 0.0
    for number in range(3):
        states = client_states(seed=number)
        state = run(algorithm, state, states)
        velocity = 0.8 * velocity + (x - expected(vectors(states)))
        x = x - 0.5 * velocity
        np.testing.assert_allclose(vector(state), x, rtol=0, atol=1e-7)


def test_server_optimizer_is_the_optimizer_of_fedopt():
    """Two equal clients have the same mean, median and trimmed mean."""
    state = client_states(1)["client 0"]
    states = {"a": state, "b": state}
    algorithms = [FedOpt("adam", 0.1), CoordinateMedian("adam", 0.1), TrimmedMean(0, "adam", 0.1)]
    results = []
    for algorithm in algorithms:
        algorithm.setup(1, 2)
        results.append(run(algorithm, before(), states))
    assert all(torch.equal(result["w"], results[0]["w"]) for result in results)


def test_resumed_server_optimizer_continues_with_the_same_bits():
    def build():
        algorithm = CoordinateMedian("adam", 0.1, {"server_lr_scheduler": "linear"})
        algorithm.setup(4, NUM_CLIENTS)
        return algorithm

    algorithm, state = build(), before()
    for number in range(4):
        if number == 2:
            tree = unpack(pack({"algorithm": algorithm.state_dict(), "state": state}))
        state = run(algorithm, state, client_states(seed=number))
    resumed, resumed_state = build(), tree["state"]
    resumed.load_state_dict(tree["algorithm"])
    for number in (2, 3):
        resumed_state = run(resumed, resumed_state, client_states(seed=number))
    assert torch.equal(resumed_state["w"], state["w"])
    assert pack(resumed.state_dict()) == pack(algorithm.state_dict())


# ---- Memory and disk


@all_rules
def test_block_size_does_not_change_the_estimate(rule):
    build, _ = RULES[rule]
    states = client_states(dtype=torch.float32)
    expected = run(build(), before(torch.float32), states)
    small = run(build(max_memory_mb=1e-3), before(torch.float32), states)
    np.testing.assert_allclose(vector(small), vector(expected), rtol=1e-6, atol=1e-9)


@all_rules
def test_memory_does_not_grow_with_the_number_of_clients(rule, monkeypatch):
    build, _ = RULES[rule]
    num_values, blocks = 100_000, []
    largest = {}
    original = torch.Tensor.double

    def recorded(self):
        result = original(self)
        blocks.append(result.nbytes)
        return result

    monkeypatch.setattr(torch.Tensor, "double", recorded)
    for num_clients in (8, 40):
        blocks.clear()
        algorithm = build(max_memory_mb=1)
        state = {"w": torch.zeros(num_values)}
        accumulator = algorithm.accumulator(state)
        for number in range(num_clients):
            update = {"w": torch.full((num_values,), float(number))}
            accumulator.add(reference.as_update(f"client {number}", update))
        tracemalloc.start()
        algorithm.aggregate(accumulator, state)
        traced = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        largest[num_clients] = max([traced, *blocks])
        assert largest[num_clients] < 1.2e6 + 8 * num_values
    assert largest[40] < 1.3 * largest[8]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="lists the open files of Linux")
def test_updates_leave_no_file_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def num_open():
        count = 0
        for number in os.listdir("/proc/self/fd"):
            try:
                count += str(tmp_path) in os.readlink(f"/proc/self/fd/{number}")
            except FileNotFoundError:
                continue
        return count

    algorithm = CoordinateMedian()
    accumulator = algorithm.accumulator(before())
    for client_id, state in client_states().items():
        accumulator.add(reference.as_update(client_id, state))
    # The file has no name from the start, so not even a killed process leaves it behind.
    assert num_open() == 1 and not list(tmp_path.iterdir())
    algorithm.aggregate(accumulator, before())
    assert num_open() == 0
    # A round that fails before the aggregation drops its accumulator.
    accumulator = algorithm.accumulator(before())
    accumulator.add(reference.as_update("a", before()))
    assert num_open() == 1
    del accumulator
    gc.collect()
    assert num_open() == 0


def test_full_disk_is_reported_with_the_needed_space(monkeypatch):
    updates = UpdateCollection({"w": torch.zeros(1_000_000)})

    class Full:
        def seek(self, position):
            pass

        def write(self, data):
            raise OSError(28, "No space left on device")

    updates._file = Full()
    with pytest.raises(OSError, match="need 4 MB for each client of the cohort"):
        updates.add("a", {"w": torch.zeros(1_000_000)})


def test_collection_refuses_a_second_update_of_a_client():
    updates = UpdateCollection({"w": torch.zeros(1)})
    updates.add("a", {"w": torch.zeros(1)})
    with pytest.raises(ValueError, match="'a' has already been added"):
        updates.add("a", {"w": torch.zeros(1)})


def test_collections_of_two_processes_become_equal():
    states = client_states(5, torch.bfloat16)
    parts = [UpdateCollection(before(torch.bfloat16)) for _ in range(2)]
    for number, (client_id, state) in enumerate(states.items()):
        parts[number % 2].add(client_id, state, 1.0 + number)
    weights = [part.weights for part in parts]
    for owner, known in enumerate(weights):
        for client_id, weight in known.items():
            pieces = [part.transfer(client_id, weight) for part in parts]
            for both in zip(*pieces, strict=True):
                both[1 - owner].copy_(both[owner])
    for part in parts:
        assert part.weights == {client_id: 1.0 + number for number, client_id in enumerate(sorted(states))}
        for client_id, state in states.items():
            assert all(torch.equal(part.read(client_id, name), state[name]) for name in state)
