"""The run log: finished runs survive crashes, and only records with the planned settings count as finished."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hf_federated.experiments.benchmark.grid import BenchmarkSection, plan_runs
from hf_federated.experiments.benchmark.run_log import LOG_NAME, RunLog, find_finished, read_records
from hf_federated.experiments.errors import CommandError
from hf_federated.utils import file_lock


ROOT = Path(__file__).parents[3]
# Writes two runs, prints a line, and then waits in the third run until it is killed.
WORKER = """
import sys, time
from pathlib import Path
from hf_federated.experiments.benchmark.run_log import RunLog
with RunLog(Path(sys.argv[1])) as log:
    for seed in (0, 1):
        log.append({"run": "é", "seed": seed, "digest": "d"})
    print("running", flush=True)
    time.sleep(600)
"""


def record(seed: int, digest: str = "d", **more):
    return {"run": "é", "seed": seed, "digest": digest, **more}


def write(folder: Path, *records) -> Path:
    with RunLog(folder) as log:
        for item in records:
            log.append(item)
    return folder / LOG_NAME


def test_written_record_is_read_back_unchanged(tmp_path):
    given = record(0, value=0.5, history=[{"round": 1, "accuracy": 0.25}], bytes_up=None)
    path = write(tmp_path / "new" / "folder", given)
    assert read_records(path.parent) == [given]
    assert path.read_text(encoding="utf-8").count("\n") == 1


def test_numbers_that_are_not_finite_are_written_as_null(tmp_path):
    path = write(tmp_path, record(0, value=float("nan"), metrics={"loss": np.float32("inf"), "f1": np.float64(0.5)}))
    line = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda text: pytest.fail(text))
    assert line["value"] is None and line["metrics"] == {"loss": None, "f1": 0.5}


def test_truncated_last_line_loses_only_its_own_run(tmp_path):
    path = write(tmp_path, record(0), record(1))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole)):
        path.write_bytes(whole[:end])
        kept = (
            [record(0)] if end < len(whole) - 1 else [record(0), record(1)]
        )  # at the last position, only the newline is missing
        assert read_records(tmp_path) == kept and path.read_bytes() == whole[:end]  # reading does not modify the file
        with RunLog(tmp_path) as log:
            assert log.records == kept
            log.append(record(2))
        assert read_records(tmp_path) == [*kept, record(2)]


def test_log_with_a_truncated_first_line_is_empty(tmp_path):
    (tmp_path / LOG_NAME).write_bytes(b'{"run": "\xc3')
    with RunLog(tmp_path) as log:
        assert log.records == [] and (tmp_path / LOG_NAME).read_bytes() == b""


@pytest.mark.parametrize("damage", ["not JSON", "[1]", "", '{"run": "a"', "\x00\x00", '{"run": "a", "seed": "1"}'])
def test_damaged_line_is_reported_with_its_line_number(tmp_path, damage):
    path = write(tmp_path, record(0), record(1))
    first, second = path.read_text(encoding="utf-8").splitlines()
    path.write_text(f"{first}\n{damage}\n{second}\n", encoding="utf-8")
    before = path.read_bytes()
    for read in (lambda: read_records(tmp_path), lambda: RunLog(tmp_path).__enter__()):
        with pytest.raises(CommandError, match=r"runs.jsonl, line 2: is not"):
            read()
    assert path.read_bytes() == before


def test_error_on_opening_releases_the_lock(tmp_path):
    (tmp_path / LOG_NAME).write_text("damage\n", encoding="utf-8")
    rejected = RunLog(tmp_path)  # keeps a reference, because garbage collection would release the lock
    with pytest.raises(CommandError, match="line 1"):
        rejected.__enter__()
    (tmp_path / LOG_NAME).unlink()
    with RunLog(tmp_path) as log:
        log.append(record(0))


def test_records_with_different_settings_are_stale(tmp_path):
    runs = plan_runs({"x": 1}, BenchmarkSection({"é": {}, "b": {}}, seeds=[0, 1]))
    first, unlogged, second, _ = runs
    records = [
        record(0, "another", value=1),
        record(0, first.digest, value=2),
        record(0, first.digest, value=3),
        record(0, "another", value=4),
        record(1, "another", value=5),
        record(7, first.digest, value=6),
        {**record(0, first.digest), "run": "c"},
    ]
    path = write(tmp_path, *records)
    done = find_finished(read_records(tmp_path), runs)
    assert {key: item["value"] for key, item in done.records.items()} == {("é", 0): 3}  # the last matching record
    assert done.stale == [second] and unlogged not in done.stale
    assert len(path.read_text(encoding="utf-8").splitlines()) == len(records)  # no record is removed


def test_only_one_benchmark_can_write_to_a_folder(tmp_path):
    with RunLog(tmp_path):
        with pytest.raises(CommandError, match="another benchmark is running in this folder: .*--output-dir"):
            RunLog(tmp_path).__enter__()
        with RunLog(tmp_path / "other") as other_log:
            other_log.append(record(0))
    with RunLog(tmp_path) as log:
        assert log.records == []


def test_log_is_written_on_systems_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(file_lock, "fcntl", None)
    with RunLog(tmp_path), RunLog(tmp_path) as log:
        log.append(record(0))
    assert read_records(tmp_path) == [record(0)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_raises_and_adds_no_record(tmp_path):
    with RunLog(tmp_path) as log:
        (tmp_path / LOG_NAME).symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space left"):
            log.append(record(0))
        assert log.records == []


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL and no lock of this kind")
def test_killed_writer_keeps_its_finished_runs_and_releases_the_lock(tmp_path):
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path)], stdout=subprocess.PIPE, env=env)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"running\n"
        with pytest.raises(CommandError, match="another benchmark is running"):
            RunLog(tmp_path).__enter__()
        assert read_records(tmp_path) == [record(0), record(1)]  # while the writer is running
    finally:
        process.kill()
        process.wait()
    with open(tmp_path / LOG_NAME, "ab") as file:
        file.write(json.dumps(record(2)).encode()[:20])  # an incomplete third record
    with RunLog(tmp_path) as log:
        assert log.records == [record(0), record(1)]
        log.append(record(2))
    assert [item["seed"] for item in read_records(tmp_path)] == [0, 1, 2]
