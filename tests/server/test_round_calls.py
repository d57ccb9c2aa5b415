"""The number of files and calls of the package that a round goes through, as upper limits."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from federations import build_federation
from tiny import rows

import hf_federated
from hf_federated.trainer.federation import Federation
from hf_federated.trainer.run_recorder import RunRecorder


PACKAGE = str(Path(hf_federated.__file__).parent)

# By `local_loop`: numbers of files, of calls in another file than the call before, and of calls of a further client.
# The lean loop ("auto") replaces calls of `Trainer`, which are not counted, by calls of six files of the package.
LIMITS = {"trainer": (35, 273, 209), "auto": (41, 331, 246)}
# The log of the run, which a callback writes.
MAX_CALLS_OF_THE_LOG_FOR_A_FURTHER_CLIENT = 11


class RoundProfile:
    """Counts the calls of the package in the second round, in which all caches of the run are filled."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.num_changes = 0
        self._last = ""

    def record(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(PACKAGE):
            return
        self.calls[file] += 1
        self.num_changes += file != self._last
        self._last = file


def profile_round(
    directory: Path,
    num_clients: int,
    monkeypatch: pytest.MonkeyPatch,
    writes_log: bool = False,
    local_loop: str = "auto",
) -> RoundProfile:
    """Profile a round of FedAvg. Callbacks are no part of a round."""
    clients = {f"c{seed}": rows(4, seed=seed) for seed in range(num_clients)}
    trainer = build_federation(
        directory / str(num_clients), clients, num_rounds=3, federation={"local_loop": local_loop}
    )
    if not writes_log:
        trainer.remove_callback(RunRecorder)
    profile, run_round = RoundProfile(), Federation.run_round

    def profiled_round(self, number):
        if number != 1:
            return run_round(self, number)
        before = sys.getprofile()
        sys.setprofile(profile.record)
        try:
            return run_round(self, number)
        finally:
            sys.setprofile(before)

    with monkeypatch.context() as patched:
        patched.setattr(Federation, "run_round", profiled_round)
        trainer.train()
    return profile


@pytest.mark.parametrize("local_loop", LIMITS)
def test_round_goes_through_few_files_and_calls(tmp_path, monkeypatch, local_loop):
    """A reader who follows a round, and a client of a large cohort, pay for each of them."""
    max_files, max_changes, max_calls = LIMITS[local_loop]
    of_two, of_three = (profile_round(tmp_path, number, monkeypatch, local_loop=local_loop) for number in (2, 3))
    assert sum(of_two.calls.values()) > 100, "The profile has recorded no round."
    assert len(of_two.calls) <= max_files, sorted(of_two.calls)
    assert of_two.num_changes <= max_changes
    further = of_three.calls - of_two.calls
    assert sum(further.values()) <= max_calls, further.most_common()


def test_the_log_of_a_run_adds_few_calls_for_a_client(tmp_path, monkeypatch):
    def further_calls(writes_log: bool) -> int:
        folder = tmp_path / str(writes_log)
        two, three = (profile_round(folder, number, monkeypatch, writes_log) for number in (2, 3))
        return sum((three.calls - two.calls).values())

    assert (
        further_calls(writes_log=True) - further_calls(writes_log=False) <= MAX_CALLS_OF_THE_LOG_FOR_A_FURTHER_CLIENT
    )
