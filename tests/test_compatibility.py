"""All pairs of features: a federation with both runs a round, or is refused with the alternative when it is built."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from feature_pairs import FEATURES, build, combination, find_pair, pairs
from tiny import arguments, rows, tiny_model

from hf_federated import AGGREGATIONS, DISTILLATIONS, FederatedConfig, FederatedTrainer, SplitFederatedTrainer
from hf_federated.compatibility import RULES
from hf_federated.distributed.process_group import process_group
from hf_federated.secure_aggregation import SECURE_AGGREGATIONS
from hf_federated.server.collectors import COLLECTORS
from hf_federated.testing.processes import WorkerProcess


pytest.importorskip("bitsandbytes")
pytest.importorskip("grpc")


def error_of(pair: tuple[str, str], directory: Path, worker: WorkerProcess) -> str:
    """Run a round of a federation with two features, and return the error. Empty if there is none."""
    parts, rule = find_pair(*pair)
    if parts.is_sharded and rule is not None:
        # A launch takes seconds. `engines/test_sharded_model.py` builds a trainer that a rule refuses.
        return f"ValueError: {rule.error(combination(parts))}"
    # A server refuses clients on other machines before they join.
    if parts.num_processes > 1 or (parts.is_networked and rule is None):
        codes = worker.ask({"directory": str(directory), "pair": pair})["codes"]
        logs = [(directory / f"rank-{number}.log").read_text() for number, code in enumerate(codes) if code]
        return logs[0] if logs else ""
    try:
        trainer = build(parts, directory)
    except ValueError as error:
        return f"ValueError: {error}"
    except Exception as error:
        return f"{type(error).__name__} when the trainer is built: {error}"
    try:
        trainer.train()
        return "" if trainer.state.global_step == 1 else f"{trainer.state.global_step} rounds"
    except Exception as error:
        return f"{type(error).__name__} in the round: {error}"


def partners(name: str, are_allowed: bool) -> list[tuple[str, str]]:
    """The pairs of a feature with later features, those that work or those that are refused."""
    return [pair for pair in pairs() if pair[0] == name and (find_pair(*pair)[1] is None) == are_allowed]


def is_runnable(pair: tuple[str, str]) -> bool:
    return all(FEATURES[name].runs for name in pair)


def assert_refused(pair: tuple[str, str], directory: Path, worker: WorkerProcess) -> None:
    rule = find_pair(*pair)[1]
    assert rule is not None
    error = error_of(pair, directory, worker)
    assert "ValueError: " in error and rule.alternative in error, f"{' and '.join(pair)}: {error or 'no error'}"


# What checks a rule outside of the construction of a federated trainer. Each has its own test.
OTHER_CHECKS = ("JoinedClient", "SplitFederatedTrainer")
NUMBERED_RULES = [number for number, rule in enumerate(RULES) if rule.checked_by not in OTHER_CHECKS]


@pytest.mark.parametrize("number", NUMBERED_RULES)
def test_every_rule_refuses_a_pair_with_the_alternative(number, tmp_path, rank_worker) -> None:
    pair = next((pair for pair in pairs() if find_pair(*pair)[1] is RULES[number]), None)
    assert pair is not None, f"{RULES[number].first.name} and {RULES[number].second.name}"
    assert_refused(pair, tmp_path, rank_worker)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_all_pairs_that_do_not_work_are_refused_with_the_alternative(name, tmp_path, rank_worker) -> None:
    for number, pair in enumerate(partners(name, are_allowed=False)):
        assert_refused(pair, tmp_path / str(number), rank_worker)


@functools.cache
def sample() -> dict[str, tuple[str, str]]:
    """For each feature, a pair that works. Most pairs are those of two features."""
    found: dict[str, tuple[str, str]] = {}
    allowed = [pair for pair in pairs() if is_runnable(pair) and find_pair(*pair)[1] is None]
    # Features far from each other in the list first, and two new ones if possible.
    allowed.sort(key=lambda pair: -abs(NUMBERS[pair[0]] - NUMBERS[pair[1]]))
    for num_new in (2, 1):
        for pair in allowed:
            if len(set(pair) - found.keys()) >= num_new:
                found |= {name: found.get(name, pair) for name in pair}
    return found


NUMBERS = {name: number for number, name in enumerate(FEATURES)}
TRAINED: set[tuple[str, str]] = set()


@pytest.mark.parametrize("name", [name for name, feature in FEATURES.items() if feature.runs])
@pytest.mark.sampled(33)
def test_each_feature_works_with_another_one(name, tmp_path, rank_worker) -> None:
    pair = sample()[name]
    if pair not in TRAINED:
        TRAINED.add(pair)
        assert not error_of(pair, tmp_path, rank_worker), " and ".join(pair)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_all_pairs_without_a_rule_work(name, tmp_path, rank_worker) -> None:
    errors = {}
    for number, pair in enumerate(partners(name, are_allowed=True)):
        if is_runnable(pair) and (error := error_of(pair, tmp_path / str(number), rank_worker)):
            errors[pair] = error
    assert not errors


def test_every_registered_method_is_among_the_features() -> None:
    # A collector other than the default is a feature.
    collectors = COLLECTORS.keys() - {FederatedConfig().collector}
    assert {*AGGREGATIONS, *DISTILLATIONS, *SECURE_AGGREGATIONS, *collectors} <= FEATURES.keys()


def alternatives(checked_by: str) -> set[str]:
    return {rule.alternative.rstrip(".") for rule in RULES if rule.checked_by == checked_by}


def test_split_trainer_refuses_secure_aggregation_with_the_alternative(tmp_path) -> None:
    federation = FederatedConfig(secure_aggregation="secagg")
    with pytest.raises(ValueError) as raised:
        SplitFederatedTrainer(tiny_model(), arguments(tmp_path), train_dataset={"a": rows(4)}, federation=federation)
    assert all(alternative in str(raised.value) for alternative in alternatives("SplitFederatedTrainer"))


@pytest.mark.parametrize(
    "federation",
    [
        {"parallelism": "clients"},
        {"secure_aggregation": "secagg", "secure_aggregation_kwargs": {"max_weight": 8, "pins": "none"}},
    ],
)
def test_client_of_several_processes_is_refused_with_the_alternative(tmp_path, monkeypatch, federation) -> None:
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset=rows(4),
        federation=FederatedConfig(num_rounds=1, **federation),
    )
    monkeypatch.setattr(process_group(), "world_size", 2)
    with pytest.raises(ValueError) as raised:
        trainer.join("127.0.0.1:1", client_id="north", insecure=True)
    assert any(alternative in str(raised.value) for alternative in alternatives("JoinedClient"))
