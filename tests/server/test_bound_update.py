"""The bound on the change of one client: its arithmetic, its groups, and runs with a client that sends huge values."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics

import pytest
import torch
from federations import build_federation
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import rows, same_weights

from hf_federated import FedAvg, FederatedCallback, FederatedConfig, RoundFailedError
from hf_federated.aggregation import build_aggregation
from hf_federated.engines import LocalEngine
from hf_federated.messages import ClientUpdate
from hf_federated.messages.validation import InvalidUpdateError
from hf_federated.server.bound_update import (
    HARMLESS_RATIO,
    HISTORY_LENGTH,
    LOWEST,
    MAX_GROUPS,
    BoundUpdate,
    GroupedAccumulator,
    Magnitude,
)


STATE = {"w": torch.ones(4), "count": torch.tensor(3)}


def update(name: str, norm: float, num_steps: int = 1, **extra: torch.Tensor) -> ClientUpdate:
    """An update whose change has a norm."""
    state = {**STATE, "w": STATE["w"] + torch.tensor([norm, 0.0, 0.0, 0.0], dtype=torch.float64).float()}
    return ClientUpdate(0, name, state, num_examples=1, num_tokens=0, num_steps=num_steps, extra=extra)


def decide(bound: BoundUpdate, norms: dict[str, float], round: int = 0) -> list[str]:
    bound.begin_round(STATE)
    magnitudes = {name: bound.measure(update(name, norm)) for name, norm in norms.items()}
    groups = {name: bound.group_of(magnitude) for name, magnitude in magnitudes.items()}
    return list(bound.decide(magnitudes, groups, round))


def test_magnitude_is_the_norm_of_the_change_per_step():
    bound = BoundUpdate(30.0)
    bound.begin_round(STATE)
    assert bound.measure(update("a", 3.0))["state"] == pytest.approx(3.0)
    assert bound.measure(update("a", 3.0, num_steps=16))["state"] == pytest.approx(3.0 / 8)
    with_extra = update("a", 3.0, c=torch.tensor([3.0, 4.0]), scores=torch.ones(3))
    assert bound.measure(with_extra) == pytest.approx({"state": 3.0})
    bound.begin_round(STATE, {"c"})
    assert bound.measure(with_extra) == pytest.approx({"state": 3.0, "extra": 5.0})
    changes = BoundUpdate(30.0, sends_changes=True)
    changes.begin_round(STATE)
    assert changes.measure(update("a", 0.0))["state"] == pytest.approx(2.0)


def test_norm_of_huge_values_does_not_overflow():
    bound = BoundUpdate(30.0)
    bound.begin_round({"w": torch.full((4,), 3e38)})
    huge = dataclasses.replace(update("a", 0.0), state={"w": torch.full((4,), -3e38)})
    assert bound.measure(huge)["state"] == pytest.approx(1.2e39)


def test_norm_that_was_known_at_the_check_gives_the_same_magnitude():
    generator = torch.Generator().manual_seed(0)
    before = {str(size): torch.randn(size, generator=generator) for size in (1, 7, 300, 70_000)}
    after = {name: value + 0.1 * torch.randn(len(value), generator=generator) for name, value in before.items()}
    bound = BoundUpdate(30.0)
    bound.begin_round(before)
    norms = [torch.linalg.vector_norm(after[name] - before[name]) for name in before]
    norm = bound.norm_of(after, before)
    assert norm == torch.linalg.vector_norm(torch.stack(norms)).item()
    trained = dataclasses.replace(update("a", 0.0), state=after)
    assert bound.measure(trained) == bound.measure(trained, norm=norm) == bound.measure(trained, dict(before))
    assert BoundUpdate(math.inf).norm_of(after, before) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sends_changes", [False, True])
def test_norm_is_finite_for_finite_values_only(value, sends_changes):
    bound = BoundUpdate(30.0, sends_changes=sends_changes)
    state = {"w": torch.full((4,), 3e38), "half": torch.zeros(3, dtype=torch.float16)}
    bound.begin_round(state)
    for name, finite in {"w": -3e38, "half": 60_000.0}.items():
        changed = {**state, name: torch.full_like(state[name], finite)}
        assert math.isfinite(bound.norm_of(changed, state))
        changed[name][-1] = value
        assert not math.isfinite(bound.norm_of(changed, state))


def test_change_out_of_proportion_to_the_state_is_rejected_when_it_arrives():
    bound = BoundUpdate(30.0)
    bound.begin_round(STATE)
    bound.measure(update("a", 1e3))
    with pytest.raises(InvalidUpdateError, match=r"^Client 'a', round 1: the norm of its change is 1e\+30"):
        bound.measure(update("a", 1e30))


def test_first_round_is_bounded_by_its_median():
    assert decide(BoundUpdate(30.0), {"a": 1.0, "b": 2.0, "c": 3.0, "d": 29.0, "e": 200.0}) == ["e"]
    # With two clients, either of them may be hostile.
    assert decide(BoundUpdate(30.0), {"a": 1.0, "b": 1e3}) == []
    assert decide(BoundUpdate(30.0), {"a": 0.0, "b": 0.0, "c": 0.0}) == []


def test_hostile_majority_of_a_cohort_raises_the_bound_by_at_most_the_ratio():
    bound = BoundUpdate(10.0)
    for round in range(3):
        assert decide(bound, {"a": 1.0, "b": 1.1, "c": 0.9}, round) == []
    assert decide(bound, {"a": 1e3, "b": 1e3, "c": 1.0}, 3) == ["a", "b"]
    # A median of 50 is within the bound, so the bound follows it.
    assert decide(bound, {"a": 40.0, "b": 50.0, "c": 60.0}, 4) == []


def test_growing_changes_of_a_warm_up_are_accepted():
    bound = BoundUpdate(30.0)
    for round in range(12):
        scale = 2.0**round
        assert decide(bound, {"a": scale * 1e-3, "b": scale * 2e-3, "c": scale * 3e-3}, round) == []


def test_history_is_limited_and_restored():
    bound, restored = BoundUpdate(30.0), BoundUpdate(30.0)
    for round in range(HISTORY_LENGTH + 5):
        decide(bound, {"a": 1.0, "b": 1.0 + round, "c": 30.0}, round)
    restored.load_state_dict(bound.state_dict())
    assert len(restored.state_dict()["state"]) == HISTORY_LENGTH
    norms = {"a": 1.0, "b": 1500.0, "c": 30.0}
    assert decide(bound, norms, 99) == decide(restored, norms, 99) == ["b"]


def test_infinite_ratio_measures_nothing():
    bound = BoundUpdate(math.inf)
    assert not bound.is_active and decide(bound, {"a": 1.0, "b": 1.0, "c": 1e30}) == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(1e-6, 9e3), min_size=3, max_size=12),
    st.lists(st.floats(1e-3, 1e2), max_size=4),
    st.floats(1.5, 100),
)
def test_rejected_updates_are_above_the_bound_and_groups_agree(norms, medians, max_ratio):
    bound = BoundUpdate(max_ratio)
    bound.load_state_dict({"state": medians} if medians else {})
    bound.begin_round(STATE)
    magnitudes = {str(i): bound.measure(update(str(i), norm)) for i, norm in enumerate(norms)}
    median = statistics.median(each["state"] for each in magnitudes.values())
    limit = max_ratio * median
    if medians:
        reference = statistics.median(medians)
        limit = max_ratio * max(reference, min(median, max_ratio * reference))
    groups = {name: bound.group_of(magnitude) for name, magnitude in magnitudes.items()}
    rejected = bound.decide(magnitudes, groups, 0)
    for name, magnitude in magnitudes.items():
        assert bound.is_accepted(groups[name]) is (name not in rejected)
        assert (name in rejected) or magnitude["state"] <= 2.001 * limit
        assert (name not in rejected) or magnitude["state"] >= 0.999 * limit


def test_sum_of_groups_equals_the_sum_of_their_updates():
    updates = [update(name, norm) for name, norm in {"a": 1.0, "b": 2.0, "c": 4.0, "d": 1e3}.items()]
    grouped, expected = GroupedAccumulator(lambda: FedAvg().accumulator(STATE)), FedAvg().accumulator(STATE)
    for number, each in enumerate(updates):
        grouped.add(each.client_id, (("state", number, number),)).add(each)
        if number != 3:
            expected.add(each)
    total = grouped.settle(lambda group: group != (("state", 3, 3),))
    assert total.first_client == "a" and total.num_updates == 3
    assert all(value.equal(expected.mean.finalize()[name]) for name, value in total.mean.finalize().items())
    assert grouped.settle(lambda group: True).num_updates == 0


def collect(magnitudes: dict[str, Magnitude]) -> tuple[list[str], list[str], dict[str, float]]:
    """Collect a first round. Return the clients that were dropped, those out of bounds, and the sum of the others."""
    bound = BoundUpdate(30.0)
    bound.begin_round(STATE, {"c"})
    grouped = GroupedAccumulator(lambda: FedAvg("uniform").accumulator(STATE), max_ratio=bound.max_ratio)
    dropped = []
    for name, magnitude in magnitudes.items():
        grouped.add(name, bound.group_of(magnitude)).add(update(name, magnitude["state"]))
        dropped += grouped.limit()
        assert len(grouped._groups) <= MAX_GROUPS
    kept = {name: magnitude for name, magnitude in magnitudes.items() if name not in dropped}
    rejected = list(bound.decide(kept, grouped.by_client(), 0))
    total = grouped.settle(bound.is_accepted)
    assert total.num_updates == len(kept) - len(rejected) and total.first_client not in (*dropped, *rejected)
    return dropped, rejected, {name: float(value[0]) for name, value in total.mean.finalize().items() if value.ndim}


@pytest.mark.parametrize("seed", range(5))
def test_honest_updates_of_very_different_sizes_are_all_accepted(seed):
    """Clients that have converged hardly change. With control variates, there are groups for two norms."""
    order = random.Random(seed)
    sizes = [1.0] * 12 + [2.0**-power for power in range(1, 12)] + [7.0, 20.0]
    clients = [(size, other) for size in sizes for other in (1e-3, 1e-2, 0.1)]
    order.shuffle(clients)
    magnitudes = {str(i): {"state": size, "extra": other} for i, (size, other) in enumerate(clients)}
    dropped, rejected, mean = collect(magnitudes)
    assert dropped == rejected == []
    assert mean["w"] == pytest.approx(1.0 + statistics.fmean(size for size, _ in clients), rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_hostile_sizes_far_apart_are_dropped_or_rejected_and_honest_ones_are_not(seed):
    order = random.Random(seed)
    honest = {f"h{i}": {"state": 0.5 + 0.1 * i} for i in range(14)}
    hostile = {f"x{i}": {"state": 1e3 * 2.0 ** (9 * i)} for i in range(11)}
    names = [*honest, *hostile]
    order.shuffle(names)
    dropped, rejected, mean = collect({name: {**honest, **hostile}[name] for name in names})
    assert {*dropped, *rejected} == {*hostile} and dropped
    assert mean["w"] == pytest.approx(1.0 + statistics.fmean(each["state"] for each in honest.values()), rel=1e-5)


@pytest.mark.parametrize(
    "sizes",
    [[2.0 ** -(8 * i) for i in range(1, 9)], [2.0**7, *(2.0 ** -(8 * i) for i in range(1, 9))]],
    ids=["below the honest sizes", "above and below"],
)
@pytest.mark.parametrize("part", ["state", "extra"])
@pytest.mark.parametrize("seed", range(3))
def test_hostile_sizes_do_not_get_the_majority_dropped_or_rejected(part, sizes, seed):
    """A majority must neither be the highest group when a group is dropped, nor share a group with a huge update."""
    everything = {f"h{i}": {"state": 1.0, "extra": 1.0} | {part: 1.0 + 0.01 * i} for i in range(20)}
    everything |= {f"x{i}": {"state": 1.0, "extra": 1.0} | {part: size} for i, size in enumerate(sizes)}
    names = [*everything]
    random.Random(seed).shuffle(names)
    dropped, rejected, _ = collect({name: everything[name] for name in names})
    assert {*dropped, *rejected} == {f"x{i}" for i, size in enumerate(sizes) if size > 1}


@given(st.lists(st.floats(1e-12, 1e4), min_size=3, max_size=30), st.sampled_from([1.1, 2.0, 8.0, 30.0, 1e3]))
@settings(max_examples=60, deadline=None)
def test_no_change_is_dropped_and_changes_below_the_median_are_accepted(sizes, max_ratio):
    bound = BoundUpdate(max_ratio)
    bound.begin_round(STATE)
    groups = GroupedAccumulator(lambda: FedAvg().accumulator(STATE), max_ratio=max_ratio)
    magnitudes = {str(i): {"state": size} for i, size in enumerate(sizes)}
    for name, magnitude in magnitudes.items():
        groups.add(name, bound.group_of(magnitude))
        assert groups.limit() == []
    rejected = bound.decide(magnitudes, groups.by_client(), 0)
    assert all(magnitudes[name]["state"] > statistics.median_low(sizes) for name in rejected)


def test_norm_of_additional_tensors_that_overflows_is_rejected():
    bound = BoundUpdate(30.0)
    bound.begin_round(STATE, {"c"})
    with pytest.raises(InvalidUpdateError, match="^Client 'a', round 1: the norm of its additional tensors overflows"):
        bound.measure(update("a", 1.0, c=torch.full((4,), 1e300, dtype=torch.float64)))


def test_groups_of_updates_on_disk_are_merged_and_dropped():
    median = build_aggregation("median")
    updates = [update(name, norm) for name, norm in {"a": 1.0, "b": 2.0, "c": 9.0, "d": 1e3}.items()]
    grouped, expected = GroupedAccumulator(lambda: median.accumulator(STATE)), median.accumulator(STATE)
    for number, each in enumerate(updates):
        grouped.add(each.client_id, (("state", number, number),)).add(each)
        if number != 3:
            expected.add(each)
    total = grouped.settle(lambda group: group != (("state", 3, 3),))
    found, wanted = median.aggregate(total, STATE), median.aggregate(expected, STATE)
    assert all(found[name].equal(wanted[name]) for name in STATE)
    assert found["w"][0] == 3.0


# ---- Runs


CLIENTS = {name: rows(8, seed=seed) for seed, name in enumerate("abcde")}


class Scaling(LocalEngine):
    """Multiplies the change of a client, or sets all of its values."""

    def __init__(self, client_id: str, factor: float = 1.0, value: float | None = None, from_round: int = 0) -> None:
        super().__init__()
        self._client_id, self._factor, self._value, self._from_round = client_id, factor, value, from_round

    def _deliver(self, message):
        reply = super()._deliver(message)
        if reply.client_id != self._client_id or reply.round < self._from_round:
            return reply
        state = {
            name: message.state[name] + self._factor * (value - message.state[name])
            if self._value is None
            else torch.full_like(value, self._value)
            for name, value in reply.state.items()
        }
        return dataclasses.replace(reply, state=state)


class Rejections(FederatedCallback):
    def __init__(self) -> None:
        self.rejected: list[dict[str, str]] = []

    def on_round_end(self, args, state, control, round, **kwargs):
        self.rejected.append(dict(round.rejected))


def run(directory, engine=None, clients=CLIENTS, training=None, **federation):
    rejections = Rejections()
    trainer = build_federation(
        directory,
        clients,
        num_rounds=3,
        federation=federation,
        trainer={"callbacks": [rejections], "engine": engine},
        **(training or {}),
    )
    trainer.train()
    return trainer, rejections.rejected


@pytest.mark.parametrize("client_id", ["a", "c", "e"])
@pytest.mark.parametrize("attack", [{"value": 1e30}, {"value": 1e2}, {"factor": 300.0}, {"factor": -300.0}], ids=str)
@pytest.mark.sampled(6)
def test_huge_update_is_rejected_by_name_and_honest_clients_go_on(tmp_path, client_id, attack, caplog):
    trainer, rejected = run(tmp_path, Scaling(client_id, **attack))
    assert [list(reasons) for reasons in rejected] == [[client_id]] * 3
    assert sum(f"Rejected: Client {client_id!r}" in text for text in caplog.messages) == 3
    assert all(parameter.abs().max() < 5 for parameter in trainer.model.parameters())
    log = next(entry for entry in trainer.state.log_history if "federated/num_failed" in entry)
    assert (log["federated/num_clients"], log["federated/num_failed"]) == (4, 1)


@pytest.mark.parametrize("factor", [100.0, -100.0])
def test_scaled_update_is_rejected_in_every_round_of_a_decreasing_schedule(tmp_path, factor):
    training = {"lr_scheduler_type": "linear", "learning_rate": 1e-3}
    _, rejected = run(tmp_path, Scaling("c", factor), training=training)
    assert [list(reasons) for reasons in rejected] == [["c"]] * 3


def test_run_with_a_rejected_client_equals_a_run_in_which_it_fails(tmp_path):
    class Failing(LocalEngine):
        def _receive(self, clients, until):
            client_id, reply = super()._receive(clients, until)
            return client_id, None if client_id == "c" else reply

    hostile, _ = run(tmp_path / "hostile", Scaling("c", 300.0))
    failing, _ = run(tmp_path / "failing", Failing())
    assert same_weights(hostile.model, failing.model)


def test_bound_can_be_switched_off(tmp_path):
    _, rejected = run(tmp_path, Scaling("a", 300.0), max_update_ratio=None)
    assert rejected == [{}] * 3


def test_scaffold_bounds_the_control_variates(tmp_path):
    class Poisoned(LocalEngine):
        def _deliver(self, message):
            reply = super()._deliver(message)
            if reply.client_id != "b":
                return reply
            return dataclasses.replace(reply, extra={name: value + 1e6 for name, value in reply.extra.items()})

    trainer, rejected = run(tmp_path, Poisoned(), aggregation="scaffold")
    assert all("additional tensors" in reasons["b"] for reasons in rejected)


@pytest.mark.parametrize("factor", [1e-300, 1e-6, 1e-2, 1e6])
def test_fednova_bounds_what_a_reported_normalizer_makes_of_a_change(tmp_path, factor):
    """The server divides a change by the normalizer, so a tiny normalizer would make the change huge."""

    class Misreporting(LocalEngine):
        def _deliver(self, message):
            reply = super()._deliver(message)
            if reply.client_id != "b":
                return reply
            return dataclasses.replace(reply, extra={name: value * factor for name, value in reply.extra.items()})

    clients = {
        name: rows(size, seed=seed) for seed, (name, size) in enumerate({**dict.fromkeys("abc", 8), "d": 80}.items())
    }
    _, rejected = run(tmp_path, Misreporting(), clients, {"optim": "sgd"}, aggregation="fednova")
    assert [list(reasons) for reasons in rejected] == [["b"]] * 3


def test_resumed_run_has_the_bound_of_the_interrupted_run(tmp_path):
    arguments = {"save_strategy": "steps", "save_steps": 1, "num_rounds": 3}
    whole = build_federation(
        tmp_path / "whole", CLIENTS, trainer={"engine": Scaling("a", 100.0, from_round=2)}, **arguments
    )
    whole.train()
    resumed = build_federation(
        tmp_path / "whole", CLIENTS, trainer={"engine": Scaling("a", 100.0, from_round=2)}, **arguments
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert same_weights(whole.model, resumed.model)
    assert resumed._federation._bound.state_dict() == whole._federation._bound.state_dict()


def test_round_fails_with_too_few_clients_within_the_bound(tmp_path):
    with pytest.raises(RoundFailedError, match=r"1 of 5 clients failed. The remaining 4 .*'c', round 1: the"):
        run(tmp_path, Scaling("c", 300.0), min_clients=1.0)


def test_many_hostile_magnitudes_do_not_raise_memory_or_reject_honest_clients(tmp_path):
    class Decoys(LocalEngine):
        """Most clients send changes of very different sizes."""

        def _deliver(self, message):
            reply = super()._deliver(message)
            number = int(reply.client_id)
            if number >= 9:
                return reply
            change = 50.0 * 1.8**number
            state = {
                name: message.state[name] + change * (value - message.state[name])
                for name, value in reply.state.items()
            }
            return dataclasses.replace(reply, state=state)

    clients = {f"{number:02}": rows(8, seed=number) for number in range(19)}
    _, rejected = run(tmp_path, Decoys(), clients)
    assert all(set(reasons) <= {f"{number:02}" for number in range(9)} for reasons in rejected)
    assert len(rejected[0]) >= 8


# ---- Settings


def test_min_clients_may_be_a_share():
    config = FederatedConfig(min_clients=0.5)
    assert [config.min_clients_of(number) for number in (1, 2, 3, 10)] == [1, 1, 2, 5]
    assert FederatedConfig(min_clients=0.1).min_clients_of(30) == 3
    assert FederatedConfig(min_clients=2).min_clients_of(30) == 2
    assert FederatedConfig(min_clients=1.0).min_clients_of(7) == 7


@pytest.mark.parametrize("value", [0, 0.0, 1.5, True, "2", math.nan])
def test_min_clients_is_a_count_or_a_share(value):
    with pytest.raises(ValueError, match="`min_clients` is"):
        FederatedConfig(min_clients=value)


@pytest.mark.parametrize("value", [0, 1.0, -3.0, math.nan])
def test_ratio_is_above_one(value):
    with pytest.raises(ValueError, match="`max_update_ratio` is .*above 1"):
        FederatedConfig(max_update_ratio=value)


@pytest.mark.parametrize("is_relative", [True, False])
def test_bound_follows_a_decreasing_learning_rate(is_relative):
    """With a bound from past rounds only, 100 times the change of a late round would be accepted."""
    rates = [0.9, 0.7, 0.5, 0.3, 0.1]
    bound = BoundUpdate(30.0, relative_learning_rate=lambda round: rates[round] if is_relative else 1.0)
    rejected = []
    for round, rate in enumerate(rates):
        bound.begin_round(STATE, round=round)
        norms = {"a": rate, "b": 1.1 * rate, "c": 0.9 * rate, "d": 100 * rate}
        magnitudes = {name: bound.measure(update(name, norm)) for name, norm in norms.items()}
        groups = {name: bound.group_of(magnitude) for name, magnitude in magnitudes.items()}
        rejected.append(list(bound.decide(magnitudes, groups, round)))
    assert rejected == ([["d"]] * 5 if is_relative else [["d"], ["d"], ["d"], [], []])


def test_harmless_changes_do_not_depend_on_the_learning_rate_of_the_round():
    """Otherwise the number of groups in a first round with warmup would not be sufficient."""
    for rate in (1.0, 1e-3):
        bound = BoundUpdate(30.0, relative_learning_rate=lambda round, rate=rate: rate)
        bound.begin_round(STATE)
        harmless = HARMLESS_RATIO * float(STATE["w"].norm())
        groups = [bound.group_of({"state": norm / rate}) for norm in (0.9 * harmless, 1.1 * harmless)]
        assert groups[0] == (("state", LOWEST, LOWEST),) != groups[1]
