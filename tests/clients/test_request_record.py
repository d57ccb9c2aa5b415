"""A client answers a request once, and again only if a server repeats it with the same content."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from hf_federated import FedAvg, FedID
from hf_federated.clients import Agreement, RefusedRequestError
from hf_federated.clients.request_record import MAX_REPLIES, RequestRecord, digest_of
from hf_federated.messages import Evaluate, Feedback, Fit, Predict
from hf_federated.messages.secure_aggregation import SecureFit, ShareKeys, SubmitMasked
from hf_federated.secure_aggregation import SecAgg


def fit(round: int, nonce: str, value: float = 0.0, seed: int = 0) -> Fit:
    return Fit(round, "a", seed, {"w": torch.full((2,), value)}, nonce=nonce)


def test_request_with_other_content_is_refused():
    record = RequestRecord()
    assert record.add(fit(0, "1"), 1, 1) is None
    assert record.add(fit(0, "2", value=1.0), 1, 1) == "is 0, in which the client has already answered 1"
    assert record.add(fit(0, "3", seed=1), 1, 1) is not None
    assert record.add(fit(0, "4"), 1, 1) is None  # the content of the first request


def test_later_request_ends_an_earlier_round():
    record = RequestRecord()
    for round in (0, 2):
        assert record.add(fit(round, f"{round}"), 1, 1) is None
    assert record.add(fit(1, "late"), 1, 1) == "is 1, but the client has answered requests of round 2"
    assert record.add(fit(0, "repeated"), 1, 1) is None


def test_request_from_another_state_is_another_request():
    """Otherwise a method that asks the same question before and after a training would get the first answer twice."""
    record = RequestRecord()
    record.add(fit(0, "1"), 1, 2)
    record.start = "1"
    assert record.earlier(fit(0, "2")) is None
    record.add(fit(0, "2"), 1, 2)
    assert record.add(fit(0, "3", value=1.0), 1, 2) is not None


def test_repeated_states_are_the_states_that_they_repeat():
    """A resumed server gives each repeated request a new nonce, and names the states by these nonces."""
    record = RequestRecord()
    for start, nonce in (("", "a"), ("a", "b"), ("", "a again"), ("a again", "b again")):
        record.start = start
        request = fit("ab".index(nonce[0]), nonce, value=float("ab".index(nonce[0])))
        assert record.earlier(request) == (nonce[0] if "again" in nonce else None)
        assert record.add(request, 1, 1) is None
    assert record.last == "b"


def test_amounts_of_a_round_are_summed():
    record = RequestRecord()
    requests = [Predict(0, "a", order, 0, 10, seed=0, nonce=str(order)) for order in range(3)]
    assert [record.add(request, 10, 25) is None for request in requests] == [True, True, False]


def test_client_trains_before_it_predicts_public_examples():
    record = RequestRecord()
    assert record.add(fit(0, "1"), 1, 2) is None
    assert record.add(Predict(0, "a", None, 0, 10, seed=0, nonce="2"), 10, 10) is None
    assert "of a later phase" in record.add(fit(0, "3", value=1.0), 1, 2)
    assert record.add(fit(0, "4"), 1, 2) is None  # repeated
    assert record.add(fit(1, "5"), 1, 2) is None


def test_client_takes_feedback_on_its_own_predictions_only(tmp_path):
    agreement = Agreement([FedID()], num_rounds=1, num_public_rows=10)
    agreement.record = RequestRecord(tmp_path)
    about = {"round": 0, "client_id": "a", "order": None, "start": 0, "stop": 4, "seed": 0}
    feedback = Feedback(**about, targets={}, feedback={}, step=0, num_training_steps=9, nonce="1")
    with pytest.raises(RefusedRequestError, match="feedback on predictions that the client has sent"):
        agreement.check(feedback)
    agreement.check(Predict(**about, keeps_graph=True, nonce="2"))
    agreement.check(feedback)
    with pytest.raises(RefusedRequestError, match="already answered 4"):
        agreement.check(replace(feedback, seed=1, nonce="3"))


def test_record_and_refusals_survive_the_process(tmp_path):
    record = RequestRecord(tmp_path, "agreed")
    record.add(fit(0, "1"), 1, 1)
    record.add_refusal("a reason")
    again = RequestRecord(tmp_path, "agreed")
    assert again.num_refused == 1 and again.last == "1"
    assert again.earlier(fit(0, "2")) == "1"
    assert again.add(fit(0, "3", value=1.0), 1, 1) is not None


@pytest.mark.parametrize("change", ["another agreement", "a complete run"])
def test_new_run_has_a_new_record(tmp_path, change):
    record = RequestRecord(tmp_path, "agreed")
    record.add(fit(0, "1"), 1, 1)
    record.add_refusal("a reason")
    if change == "a complete run":
        record.end()
    again = RequestRecord(tmp_path, "agreed" if change == "a complete run" else "other")
    assert again.num_refused == 0 and again.add(fit(0, "2", value=1.0), 1, 1) is None


def test_replies_are_kept_since_the_last_checkpoint():
    record = RequestRecord()
    for round in range(4):
        record.add(fit(round, f"{round}"), 1, 1)
    assert record.since(["0", "1"]) == ["3", "2"]
    assert record.since(["3"]) == [] and record.since(["unknown"]) == []


@pytest.mark.parametrize(
    "line", [b'{"kind": "fit"}', b'{"kind": 1, "client_id": 2, "round": 3}', b'{"refused": "", "x": 1}']
)
def test_damaged_record_names_the_file(tmp_path, line):
    path = RequestRecord(tmp_path, "agreed").path
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(ValueError, match="requests.jsonl' is damaged"):
        RequestRecord(tmp_path, "agreed")


def test_client_keeps_a_limited_number_of_replies():
    record = RequestRecord()
    for round in range(MAX_REPLIES + 5):
        record.add(fit(round, f"{round}"), 1, 1)
    assert record.since(["0"]) == [f"{round}" for round in range(MAX_REPLIES + 4, 4, -1)]


def test_two_requests_with_one_nonce_have_two_digests():
    record = RequestRecord()
    assert record.add(fit(0, "1"), 1, 1) is None
    assert record.add(fit(0, "1", value=1.0), 1, 1) is not None


def test_digest_covers_all_but_the_nonce():
    request = fit(0, "1")
    assert digest_of(replace(request, nonce="2")) == digest_of(request)
    changes = [{"round": 1}, {"client_id": "b"}, {"seed": 1}, {"settings": {"x": 1}}, {"extra": {"w": torch.ones(2)}}]
    assert len({digest_of(replace(request, **change)) for change in changes} | {digest_of(request)}) == 6


def test_client_evaluates_three_states_of_a_round(tmp_path):
    agreement = Agreement([], num_rounds=1)
    agreement.record = RequestRecord(tmp_path)
    for number in range(3):
        agreement.check(Evaluate(0, "a", {"w": torch.full((1,), float(number))}, nonce=str(number)))
    agreement.check(Evaluate(0, "a", {"w": torch.zeros(1)}, nonce="again"))
    with pytest.raises(
        RefusedRequestError, match=r"already answered 3\. The client agreed to 3 evaluations in a round"
    ):
        agreement.check(Evaluate(0, "a", {"w": torch.ones(1) * 9}, nonce="fourth"))


def test_requests_of_a_session_wait_for_the_disk_with_the_next_request(tmp_path, monkeypatch):
    """Each wait takes milliseconds, and a client without the secrets of a session cannot answer its requests."""
    synced: list[int] = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), sync(descriptor)))
    agreement = Agreement([FedAvg()], num_rounds=3, secure=SecAgg(max_weight=10))
    agreement.record = RequestRecord(tmp_path)
    empty: dict[str, torch.Tensor] = {}
    fields = {"session": "s", "num_clients": 3}
    waits = []
    for request in (
        SecureFit(0, "a", 0, {"w": torch.zeros(2)}, nonce="1", **fields),
        ShareKeys(0, "a", "s", empty, empty, empty, nonce="2"),
        SubmitMasked(0, "a", "s", empty, nonce="3"),
        SecureFit(1, "a", 0, {"w": torch.zeros(2)}, nonce="4", **fields),
    ):
        synced.clear()
        agreement.check(request)
        waits.append(len(synced))
    assert waits == [1, 0, 0, 1]
    assert RequestRecord(tmp_path).since(["1"]) == ["4", "3", "2"]
