"""`check_method` accepts methods without a fault, and names the fault of other methods."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import faulty_methods
import pytest
from faulty_methods import Counting, Distilling, RefusesNothing, RefusesRanks, WrongDtype
from federations import build_federation
from secure_sum import SecureSum

import hf_federated
from hf_federated import FedAvg
from hf_federated.engines import RankEngine
from hf_federated.postprocessing import QuantizeChanges
from hf_federated.server.collectors import BufferedCollector
from hf_federated.testing import ConformanceError, ConformanceReport, check_method
from hf_federated.testing.check_method import checks_of, scenario_of
from hf_federated.testing.checks import CHECKS, CrashedRunError, Trials
from hf_federated.testing.report import Outcome
from hf_federated.testing.results import RunResult


ONE_PROCESS = ("local", "serialized")
# The check that finds the fault of each method first, and a part of the message.
FAULTS = {
    "LosesArgument": ("settings", "has no attribute 'momentum'"),
    "WrongDtype": ("trains", "'client 0', round 1: .* is torch.float64, expected torch.float32"),
    "UndeclaredReply": ("messages", "Count cannot be sent to another process: the kind 'count' is not declared"),
    "GlobalGenerator": ("random numbers", "of step 1"),
    "UnseededLoss": ("random numbers", "of step 1"),
    "ChangesMessage": ("serialized", "of step 1"),
    "DependsOnOrder": ("order of replies", "41 of 41 tensors of the final model"),
    "ContinuesLocally": ("server weights", "41 of 41 tensors of the final model"),
    "ReadsServer": ("separate clients", "of step 2"),
    "SharesInstance": ("separate clients", "of step 2"),
    "KeepsOnInstance": ("memory", "of step 2"),
    "ReadsOtherClients": ("other clients", "client 'client 4' sends another reply number 1 to the same messages"),
    "SendsLarge": ("estimate", r"Round 1, client 'client 0': dry rounds estimate \[\d+, \d+\] bytes down and up"),
    "ForgetsState": ("killed and resumed", "of step 2"),
}


@pytest.fixture
def trials(rank_worker, tmp_path):
    """Call `trials(cls)` to get the runs of a method."""
    return lambda cls: Trials(scenario_of(cls), tmp_path, rank_worker, sys.path)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.sampled(7)
def test_check_finds_its_fault(trials, name):
    check_name, problem = FAULTS[name]
    (check,) = (check for check in CHECKS if check.name == check_name)
    outcome = check.outcome(trials(getattr(faulty_methods, name)))
    assert re.search(problem, outcome.problem)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_first_failure_names_the_fault(rank_worker, capsys, name):
    check_name, problem = FAULTS[name]
    with pytest.raises(ConformanceError, match=problem) as raised:
        check_method(getattr(faulty_methods, name), engines=ONE_PROCESS, worker=rank_worker)
    assert raised.value.check == check_name
    assert capsys.readouterr().out == f"{raised.value.report}\n"


def test_failed_run_skips_the_checks_that_need_it(rank_worker):
    with pytest.raises(
        ConformanceError, match=r"WrongDtype\(\) fails the check 'trains'.*\n(.*\n)*Traceback"
    ) as raised:
        check_method(WrongDtype, engines=ONE_PROCESS, verbose=False, worker=rank_worker)
    outcomes = raised.value.report.outcomes
    assert [outcome.check for outcome in raised.value.report.failures] == ["trains"]
    assert outcomes[1].remedy
    assert {outcome.skipped for outcome in outcomes[2:]} == {"the run on LocalEngine failed"}


@pytest.mark.slow
def test_secure_sum_passes_on_every_engine(rank_worker, capsys):
    """A method with its own messages, questions at both ends of a round, and a memory on the client."""
    report = check_method(SecureSum, worker=rank_worker)
    assert [str(outcome).split() for outcome in report.outcomes] == [[*check.name.split(), "ok"] for check in CHECKS]
    assert capsys.readouterr().out == f"{report}\n"


@pytest.mark.slow
@pytest.mark.parametrize("method", [Counting, Counting(0.5), Distilling], ids=str)
def test_method_without_a_fault_passes_on_every_engine(rank_worker, method):
    assert not check_method(method, worker=rank_worker).failures


@pytest.mark.slow
def test_clients_continue_in_their_epochs_on_every_engine(rank_worker):
    """With these lengths, rounds end within epochs and the last step of an epoch has fewer micro-batches."""
    report = check_method(
        FedAvg,
        federation={"local_steps": 2},
        training={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        worker=rank_worker,
    )
    assert not report.failures


@pytest.mark.parametrize(
    ("codes", "problem"),
    [
        ([-9, 0], "The run was killed by signal 9 (it may take 150 seconds). Its last output: waiting."),
        ([-9, 1], "The run ended with this error: ValueError: no share."),
    ],
    ids=["time limit", "another process waits"],
)
def test_problem_of_a_run_is_that_of_the_process_that_caused_it(tmp_path, codes, problem):
    for rank, output in enumerate(["waiting\n", "ValueError: no share.\n"]):
        (tmp_path / f"rank-{rank}.log").write_text(output)
    assert str(CrashedRunError(RunResult(tmp_path), codes)) == problem


# ---- Engines that a method refuses


@pytest.mark.slow
def test_refused_engine_is_not_checked_but_must_be_refused(rank_worker):
    report = check_method(RefusesRanks, engines=("local", "ranks"), worker=rank_worker)
    names = [outcome.check for outcome in report.outcomes]
    assert names[-1] == "refuses ranks" and not {"1 rank", "2 ranks"} & {*names}


@pytest.mark.parametrize(
    ("cls", "problem"), [(RefusesRanks, ""), (RefusesNothing, "The constructor raised no error.")]
)
def test_constructor_must_raise_the_declared_error(trials, cls, problem):
    check = checks_of(cls(), ("local", "ranks"))[-1]
    assert check.name == "refuses ranks" and check.outcome(trials(cls)).problem == problem


def test_trainer_refuses_the_engine(tmp_path):
    with pytest.raises(
        ValueError, match=r"RefusesRanks\(\) does not run on RankEngine: it needs one process. Use Loc"
    ):
        build_federation(tmp_path, federation={"aggregation": RefusesRanks()}, trainer={"engine": RankEngine()})


@pytest.mark.slow
def test_collector_that_leaves_requests_open_refuses_ranks(rank_worker):
    report = check_method(BufferedCollector, {"buffer_size": 2}, worker=rank_worker)
    outcomes = {outcome.check: outcome for outcome in report.outcomes}
    assert "refuses ranks" in outcomes and "2 ranks" not in outcomes
    assert "order" in outcomes["network"].skipped


@pytest.mark.slow
def test_postprocessor_with_memories_passes(rank_worker):
    report = check_method(QuantizeChanges, {"bits": 8}, worker=rank_worker)
    assert [outcome.check for outcome in report.outcomes if outcome.skipped] == ["settings"]


# ---- Arguments


@pytest.mark.slow
def test_script_checks_a_class_of_its_folder(tmp_path):
    """The worker finds the module in `sys.path` of the script, and a class of the script itself is refused."""
    (tmp_path / "my_averages.py").write_text("from hf_federated import FedAvg\n\n\nclass Mine(FedAvg):\n    pass\n")
    script = (
        "from hf_federated import FedAvg\n"
        "from hf_federated.testing import check_method\n"
        "from my_averages import Mine\n"
        "class Here(FedAvg):\n    pass\n"
        "try:\n    check_method(Here)\nexcept ValueError as error:\n    print(error)\n"
        "check_method(Mine, engines=['local'])\n"
    )
    (tmp_path / "check.py").write_text(script)
    path = str(Path(hf_federated.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "check.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = result.stdout.splitlines()
    assert lines[0].startswith("__main__:Here cannot be imported by other processes") and lines[1] == "Mine()"
    assert len(lines) > 8 and all(line.endswith(" ok") for line in lines[2:])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"method": 3}, "`method` is 3. Pass a subclass of Aggregation"),
        ({"method": QuantizeChanges()}, "or an instance of another one than the last"),
        (
            {"method": Counting(), "arguments": {"weighting": "uniform"}},
            "`arguments` is set, but `method` is an instance",
        ),
        ({"method": Counting, "arguments": {"largest_share": {1}}}, "cannot be sent to another process: .*set"),
        (
            {"method": Counting, "engines": ["gpu"]},
            "`engines` contains 'gpu'; allowed are 'local', 'serialized', 'ranks'",
        ),
    ],
    ids=lambda value: None,
)
def test_wrong_argument_is_refused(arguments, error):
    with pytest.raises((TypeError, ValueError), match=error):
        check_method(**arguments)


def test_class_of_a_function_is_refused():
    class Local(FedAvg):
        pass

    with pytest.raises(
        ValueError, match="<locals>.Local cannot be imported by other processes.*top level of a module"
    ):
        check_method(Local)


def test_report_lists_the_outcomes():
    report = ConformanceReport(
        "Mine()",
        (Outcome("settings"), Outcome("trains", "It failed.", "Fix it.", log="a log"), Outcome("memory", "No.")),
    )
    lines = str(report).splitlines()
    assert [line.split(maxsplit=1)[0] for line in lines] == ["Mine()", "settings", "trains", "memory"]
    assert lines[2].endswith("FAILED: It failed. Fix it.")
    text = "Mine() fails the check 'trains': It failed. Fix it. Also failed, maybe for the same reason: memory.\na log"
    assert str(ConformanceError(report)) == text
