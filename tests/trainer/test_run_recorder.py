"""The log of a run has what the trainer logged, also after a resume, a kill and a full disk."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from federations import CLIENTS, build_federation
from tiny import rows, same_weights
from transformers import Trainer

from hf_federated import FederatedCallback, RoundFailedError
from hf_federated.reporting.run_log import CLIENTS_NAME, LOG_NAME, read_clients, read_log
from hf_federated.reporting.run_view import RunView, read_run
from hf_federated.trainer.output_lock import output_dir_lock
from hf_federated.trainer.run_recorder import RunRecorder


CHECKPOINTS = {"save_strategy": "steps", "save_steps": 1}
SECURE = {"secure_aggregation": "secagg", "secure_aggregation_kwargs": {"max_weight": 10}}


class FailsForMarkedExamples(Trainer):
    """Raises in the loss if the first token of an example is a marker."""

    def compute_loss(self, model, inputs, **kwargs):
        if (inputs["input_ids"][:, 0] == 31).any():
            raise OSError("the disk of this client is full")
        return super().compute_loss(model, inputs, **kwargs)


class Stop(FederatedCallback):
    """Fails, or kills the process, when the first client of a round begins."""

    def __init__(self, round: int, kills: bool = False) -> None:
        self.round, self.kills = round, kills

    def on_client_begin(self, args, state, control, client_id, round, **kwargs):
        if round.number + 1 == self.round:
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("stopped by the test")


def rounds_of(run: RunView) -> list[dict[str, float]]:
    """What does not depend on the time."""
    return [
        {
            **entry.logs,
            "num_done": entry.num_done,
            "down": entry.bytes_down,
            "up": entry.bytes_up,
            "over": entry.is_over,
        }
        for entry in run.rounds
    ]


def expected_rounds(trainer) -> list[dict[str, float]]:
    """The rounds from the log of the trainer and from its ledger."""
    expected, down, up = [], 0, 0
    for row in trainer.ledger.rounds():
        down, up = down + row["bytes_down"], up + row["bytes_up"]
        logs: dict[str, float] = {}
        for entry in trainer.state.log_history:
            if entry["step"] == row["round"] + 1 and "train_runtime" not in entry:
                logs |= {name: entry[name] for name in entry if not re.fullmatch("step|epoch|.*(time|second)", name)}
        expected.append({**logs, "num_done": row["num_clients"], "down": down, "up": up, "over": True})
    return expected


@pytest.fixture
def evaluated(tmp_path):
    return {"trainer": {"eval_dataset": rows(4, seed=9)}, "eval_strategy": "epoch"}


def test_log_has_what_the_trainer_logged(tmp_path, evaluated):
    trainer = build_federation(tmp_path, num_rounds=3, federation={"aggregation": "fedprox"}, **evaluated)
    trainer.train()
    run = read_run(tmp_path)
    assert (run.state, run.start.method, run.start.num_rounds, run.start.num_clients) == ("complete", "FedProx", 3, 3)
    assert rounds_of(run) == expected_rounds(trainer)
    assert "eval_loss" in run.rounds[-1].logs
    assert run.start.federation["aggregation"] == "fedprox" and run.start.arguments["learning_rate"] == 0.01
    assert sum(entry.seconds for entry in run.rounds) < run.updated - run.start.time
    accounts = trainer.ledger.clients()
    for name, client in run.clients.items():
        assert (client.state, client.num_failures) == ("done", 0)
        assert {name: getattr(client, name) for name in accounts[name]} == accounts[name]


def test_log_changes_no_weight(tmp_path):
    first, second = build_federation(tmp_path / "a"), build_federation(tmp_path / "b")
    second.remove_callback(RunRecorder)
    first.train(), second.train()
    assert same_weights(first.model, second.model)
    assert not (tmp_path / "b" / LOG_NAME).exists()


def test_failed_clients_are_named_with_their_reason(tmp_path):
    clients = {"bad\x1b[31m": rows(4).map(lambda row: {"input_ids": [31, *row["input_ids"][1:]]})}
    good = {name: data.map(lambda row: {"input_ids": [1, *row["input_ids"][1:]]}) for name, data in CLIENTS.items()}
    trainer = build_federation(tmp_path, {**good, **clients}, base=FailsForMarkedExamples)
    trainer.train()
    run = read_run(tmp_path)
    assert [(entry.num_done, entry.num_failed) for entry in run.rounds] == [(3, 1), (3, 1)]
    assert "OSError" in run.rounds[0].failed["bad\x1b[31m"]
    client = run.clients["bad\x1b[31m"]
    assert (client.state, client.num_failures, client.num_rounds) == ("failed", 2, 2)
    assert "OSError" in client.reason and "\x1b" not in client.reason


def test_a_resumed_run_forgets_the_rounds_after_its_checkpoint(tmp_path, evaluated):
    whole = build_federation(tmp_path / "whole", num_rounds=4, **evaluated)
    whole.train()
    build_federation(tmp_path / "run", num_rounds=4, **evaluated, **CHECKPOINTS).train()
    abandoned = read_run(tmp_path / "run")
    evaluated["trainer"]["callbacks"] = [Stop(round=3)]
    resumed = build_federation(tmp_path / "run", num_rounds=4, **evaluated, **CHECKPOINTS)
    with pytest.raises(RuntimeError, match="stopped by the test"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    run = read_run(tmp_path / "run")
    assert run.state == "failed: RuntimeError: stopped by the test"
    assert [entry.number for entry in run.rounds] == [1, 2]
    assert rounds_of(run) == rounds_of(abandoned)[:2]
    assert run.start.resumed == [1]
    # The client of the abandoned rounds has no bytes of these rounds.
    assert {client.num_rounds for client in run.clients.values()} == {2}

    evaluated["trainer"]["callbacks"] = []
    resumed = build_federation(tmp_path / "run", num_rounds=4, **evaluated, **CHECKPOINTS)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    run = read_run(tmp_path / "run")
    assert rounds_of(run) == rounds_of(read_run(tmp_path / "whole"))
    assert run.start.resumed == [1, 2]
    assert run.clients["north"].bytes_up == whole.ledger.clients()["north"]["bytes_up"]


def test_rounds_of_another_run_in_the_folder_are_not_taken_over(tmp_path):
    first = build_federation(tmp_path / "first", num_rounds=3, **CHECKPOINTS)
    first.train()
    build_federation(tmp_path / "other", num_rounds=3, learning_rate=0.3).train()
    resumed = build_federation(tmp_path / "other", num_rounds=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    run = read_run(tmp_path / "other")
    losses = [entry["loss"] for entry in first.state.log_history if "loss" in entry]
    assert [entry.logs["loss"] for entry in run.rounds] == losses
    assert [entry.seconds is None for entry in run.rounds] == [True, True, False]


def test_a_second_call_of_train_begins_a_new_log(tmp_path):
    trainer = build_federation(tmp_path, num_rounds=2)
    trainer.train()
    began = read_run(tmp_path).start.time
    trainer.train()
    run = read_run(tmp_path)
    assert run.start.time > began and [entry.number for entry in run.rounds] == [1, 2]


def test_a_torn_line_at_any_byte_leaves_the_rounds_before_it(tmp_path):
    build_federation(tmp_path, num_rounds=2).train()
    path = tmp_path / LOG_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    whole, last = b"".join(lines[:3]), lines[3]
    expected = read_log(tmp_path)[:3]
    for length in range(len(last)):
        path.write_bytes(whole + last[:length])
        assert read_log(tmp_path) == expected
    assert read_run(tmp_path).state == "stopped"


def test_a_failed_run_names_its_error_and_an_interrupted_run_too(tmp_path):
    for error, state in (
        (RoundFailedError("too few"), "failed: RoundFailedError: too few"),
        (KeyboardInterrupt(), "interrupted"),
    ):

        class Fails(FederatedCallback):
            def on_aggregate(self, args, state, control, error=error, **kwargs):
                raise error

        with pytest.raises(type(error)):
            build_federation(tmp_path, trainer={"callbacks": [Fails()]}).train()
        assert read_run(tmp_path).state == state


def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path, caplog):
    class Blocks(FederatedCallback):
        def on_client_begin(self, args, state, control, round, **kwargs):
            path = tmp_path / LOG_NAME
            if round.number == 1 and path.is_file():
                path.unlink()
                path.mkdir()

    trainer = build_federation(tmp_path, num_rounds=3, trainer={"callbacks": [Blocks()]})
    trainer.train()
    assert trainer.state.global_step == 3
    assert caplog.text.count("is no longer written") == 1


def test_only_the_owner_reads_the_files(tmp_path):
    build_federation(tmp_path).train()
    assert {os.stat(tmp_path / name).st_mode & 0o777 for name in (LOG_NAME, CLIENTS_NAME)} == {0o600}


def test_secure_aggregation_logs_no_value_of_a_client(tmp_path):
    trainer = build_federation(tmp_path, federation=SECURE)
    trainer.train()
    run = read_run(tmp_path)
    assert [entry.num_done for entry in run.rounds] == [3, 3]
    assert {(client.state, client.loss) for client in run.clients.values()} == {("done", None)}


def test_state_of_a_run_while_it_lasts(tmp_path):
    seen = []

    class Looks(FederatedCallback):
        def on_client_begin(self, args, state, control, **kwargs):
            run = read_run(tmp_path)
            seen.append((run.state, run.num_finished))

        def on_aggregate(self, args, state, control, **kwargs):
            seen.append(read_run(tmp_path).rounds[-1].is_over)

    build_federation(tmp_path, trainer={"callbacks": [Looks()]}).train()
    assert seen == [*[("running", 0)] * 3, False, *[("running", 1)] * 3, False]
    assert read_run(tmp_path).state == "complete"


def test_a_held_folder_without_an_end_is_running(tmp_path):
    build_federation(tmp_path).train()
    path = tmp_path / LOG_NAME
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert read_run(tmp_path).state == "stopped"
    with output_dir_lock(tmp_path):
        assert read_run(tmp_path).state == "running"


@pytest.mark.slow
def test_a_killed_run_is_stopped_and_its_log_continues(tmp_path):
    """The run gets SIGKILL in the third of its four rounds."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from test_run_recorder import CHECKPOINTS, Stop, build_federation\n"
        "trainer = build_federation(sys.argv[1], num_rounds=4, trainer={'callbacks': [Stop(3, kills=True)]},"
        " **CHECKPOINTS)\n"
        "trainer.train()\n"
    )
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", code, str(tmp_path / "run"), str(tests)]
    assert subprocess.run(command, env=environment, capture_output=True).returncode == -signal.SIGKILL
    run = read_run(tmp_path / "run")
    assert (run.state, run.num_finished) == ("stopped", 2)
    assert {client.state for client in run.clients.values()} <= {"waiting", "done"}
    assert read_clients(tmp_path / "run") is not None
    torch.manual_seed(0)
    build_federation(tmp_path / "run", num_rounds=4, **CHECKPOINTS).train(resume_from_checkpoint=True)
    build_federation(tmp_path / "whole", num_rounds=4).train()
    assert rounds_of(read_run(tmp_path / "run")) == rounds_of(read_run(tmp_path / "whole"))
