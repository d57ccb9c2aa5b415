"""Every algorithm gives the same bytes on every engine: weights, ledger, client states and logs."""

from __future__ import annotations

import json

import pytest
from conformance import REFERENCE, SCENARIOS, SLOW_SCENARIOS, STRICTEST, scenario

from hf_federated import AGGREGATIONS, DISTILLATIONS
from hf_federated.testing import ConformanceError
from hf_federated.testing.check_method import check_scenario
from hf_federated.testing.checks import Trials, find_lost_state_elsewhere, find_rank_difference
from hf_federated.testing.engines import ENGINES


MARKED_SCENARIOS = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW_SCENARIOS else name for name in SCENARIOS
]
OTHER_ENGINES = [
    pytest.param(name, marks=[] if name == STRICTEST else pytest.mark.slow) for name in ENGINES if name != REFERENCE
]
MOSTLY_SLOW = [
    pytest.param(name, marks=[] if "every_distillation_hook" in name else pytest.mark.slow) for name in SCENARIOS
]


@pytest.fixture(scope="module")
def trials(rank_worker, tmp_path_factory):
    """Call `trials(scenario)` to get the runs of a scenario, which share the run on the first engine."""
    found: dict[str, Trials] = {}

    def of(name: str) -> Trials:
        if name not in found:
            folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
            found[name] = Trials(scenario(name), folder, rank_worker, engine=REFERENCE)
        return found[name]

    return of


@pytest.mark.parametrize("engine", OTHER_ENGINES)
@pytest.mark.parametrize("name", MARKED_SCENARIOS)
@pytest.mark.sampled(6)
def test_every_engine_gives_the_same_bytes(trials, name, engine):
    assert not find_rank_difference(engine)(trials(name))


@pytest.mark.parametrize("name", MOSTLY_SLOW)
def test_a_run_resumed_on_another_engine_gives_the_same_bytes(trials, name):
    if scenario(name).num_rounds == 1:
        pytest.skip("a run of one round has nothing to resume")
    assert not find_lost_state_elsewhere(trials(name))


@pytest.mark.parametrize("name", MOSTLY_SLOW)
def test_every_algorithm_passes_the_checks_of_one_process(rank_worker, name):
    """In addition to the engines: isolation of the clients, random numbers, orders of replies, the estimate, kills."""
    if name != "aggregation mutual_kd":
        check_scenario(scenario(name), engines=("serialized",), worker=rank_worker)
        return
    with pytest.raises(ConformanceError) as raised:
        check_scenario(scenario(name), engines=("serialized",), worker=rank_worker)
    # The ranks of the factors that a client sends depend on the values of its changes.
    assert [outcome.check for outcome in raised.value.report.failures] == ["estimate"]


def test_every_registered_algorithm_has_a_scenario():
    names = {name.partition(" ")[2] for name in SCENARIOS}
    assert {*AGGREGATIONS, *DISTILLATIONS} <= names


def test_scenarios_train_different_models(trials):
    """A scenario that ignored its algorithm would agree on every engine."""
    names = [name for name in SCENARIOS if name not in SLOW_SCENARIOS]
    models = [json.dumps(trials(name).reference.notes()["log"][:-1]) for name in names]
    assert len(set(models)) == len(models)
