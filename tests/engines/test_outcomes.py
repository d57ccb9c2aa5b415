"""A resumed run uses the replies that the interrupted run used."""

from __future__ import annotations

import logging

import pytest

from hf_federated.engines.outcomes import FILE_NAME, Outcome, RecordedOutcomes
from hf_federated.engines.requests import OpenRequest


OUTCOMES = [
    Outcome(0, "a"),
    Outcome(0, "b", "no reply within 5 seconds"),
    Outcome(1, "a"),
    Outcome(1, "b"),
]


def interrupted(folder, outcomes=OUTCOMES) -> None:
    """Write the outcomes of a run that was killed."""
    first = RecordedOutcomes(folder)
    for outcome in outcomes:
        first.add(outcome)
    first.write()


def request_of(round: int) -> OpenRequest:
    return OpenRequest(lambda client_id: None, None, round)


def test_resumed_run_knows_the_outcomes_after_its_checkpoint(tmp_path):
    interrupted(tmp_path)
    resumed = RecordedOutcomes(tmp_path)
    resumed.resume(num_used=0)
    assert resumed.failure(0, "b") == "no reply within 5 seconds" and resumed.failure(0, "a") is None
    assert resumed.awaits({"a": request_of(0)}) and not resumed.awaits({"b": request_of(0), "c": request_of(1)})
    later = RecordedOutcomes(tmp_path)
    later.resume(num_used=2)
    assert later.failure(0, "b") is None and later.next_client() == "a"


def test_repeated_outcomes_are_not_written_again(tmp_path):
    interrupted(tmp_path)
    content = (tmp_path / FILE_NAME).read_bytes()
    resumed = RecordedOutcomes(tmp_path)
    resumed.resume(num_used=2)
    for outcome in OUTCOMES[2:]:
        resumed.add(outcome)
    resumed.write()
    assert (tmp_path / FILE_NAME).read_bytes() == content
    assert resumed.num_used == 4 and resumed.next_client() is None


def test_outcomes_of_an_earlier_run_are_dropped(tmp_path):
    interrupted(tmp_path)
    RecordedOutcomes(tmp_path).write()
    resumed = RecordedOutcomes(tmp_path)
    resumed.resume(num_used=0)
    assert resumed.next_client() is None


def test_run_that_uses_no_outcome_writes_no_file(tmp_path):
    RecordedOutcomes(tmp_path / "network").write()
    assert not list(tmp_path.iterdir())


def test_outcome_that_differs_ends_the_repetition(tmp_path, caplog):
    interrupted(tmp_path, [*OUTCOMES, Outcome(2, "a")])
    resumed = RecordedOutcomes(tmp_path)
    resumed.resume(num_used=0)
    resumed.add(OUTCOMES[1])
    resumed.add(OUTCOMES[0])
    with caplog.at_level(logging.WARNING):
        resumed.add(Outcome(1, "b", "the client was absent for 30 s"))
    assert "client 'b' replied then, and the round did not use client 'b' (the client was absent" in caplog.text
    assert resumed.next_client() is None
    resumed.write()
    again = RecordedOutcomes(tmp_path)
    again.resume(num_used=0)
    assert [again.failure(round, "b") for round in (0, 1)] == [
        "no reply within 5 seconds",
        "the client was absent for 30 s",
    ]
    assert not again.awaits({"a": request_of(2)}) and not again.awaits({"a": request_of(1)})


@pytest.mark.parametrize("line", [b"[]", b'{"round": 0}', b'{"round": -1, "client_id": "a", "failure": null}'])
def test_damaged_file_is_named(tmp_path, line):
    (tmp_path / FILE_NAME).write_bytes(line + b"\n")
    with pytest.raises(ValueError, match="outcomes.jsonl' is damaged"):
        RecordedOutcomes(tmp_path).resume(num_used=0)
