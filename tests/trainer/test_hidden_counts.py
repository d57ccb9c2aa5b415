"""With secure aggregation, clients on other machines hide their numbers of examples, and the server needs none."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Any

import pytest
from federations import setup_of
from threaded_clients import changed, honest, run_with_threads
from tiny import arguments, rows, tiny_model

from hf_federated import ClientSpec, FederatedConfig, FederatedDataset, FederatedTrainer, NetworkEngine
from hf_federated.cards import RunRecord, render
from hf_federated.cli.main import main
from hf_federated.messages import Announcement
from hf_federated.messages.validation import UpdateLimits
from hf_federated.trainer.announcement_limits import AnnouncementError, AnnouncementLimits
from hf_federated.trainer.claim_limits import ClaimLimits
from hf_federated.trainer.join import JoinedClient, announcement_of
from hf_federated.trainer.setup import FederationSetup


HIDDEN = Announcement(None, None, 0, examples_per_step=4, hides_counts=True)
SHOWN = Announcement(90, 95, 7, examples_per_step=4)
NAMES = ("north", "south", "east")


@pytest.fixture
def hiding(monkeypatch):
    """Parties whose settings contain secure aggregation. Their updates are plain, so that the server can read them."""
    monkeypatch.setattr(FederationSetup, "hides_counts", True)


def client(directory, federation: Any = (), **kwargs: Any) -> FederatedTrainer:
    return FederatedTrainer(
        **{
            "model": tiny_model(),
            "args": arguments(directory),
            "train_dataset": {"north": rows(6)},
            "eval_dataset": FederatedDataset.from_dict({"north": rows(5)}),
            **kwargs,
        },
        federation=FederatedConfig(**{"num_rounds": 1, **dict(federation)}),
    )


def server(directory, **federation: Any) -> FederatedTrainer:
    engine = NetworkEngine(NAMES, address="127.0.0.1:0", insecure=True)
    return FederatedTrainer(
        model=tiny_model(),
        args=arguments(directory),
        engine=engine,
        federation=FederatedConfig(num_rounds=1, **federation),
    )


@pytest.mark.parametrize(("protocol", "is_hidden"), [("secagg", True), (None, False)])
def test_secure_aggregation_hides_the_numbers_of_a_client(tmp_path, protocol, is_hidden):
    trainer = client(tmp_path, args=arguments(tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=2))
    found = announcement_of(setup_of(trainer, secure_aggregation=protocol), trainer.args, "north")
    shown = Announcement(6, 6, 5, examples_per_step=6)
    assert found == (Announcement(None, None, 0, examples_per_step=6, hides_counts=True) if is_hidden else shown)
    assert Announcement.from_bytes(found.to_bytes()) == found


@pytest.mark.usefixtures("hiding")
@pytest.mark.parametrize("case", ["class counts", "stream", "own arguments"])
def test_no_client_announces_a_number(tmp_path, case):
    step = 8
    if case == "class counts":
        trainer = client(tmp_path, {"distillation": "fedkd"}, public_dataset=rows(4, seed=1))
    elif case == "stream":
        trainer = client(tmp_path, {"local_steps": 2}, train_dataset={"north": rows(6).to_iterable_dataset()})
    else:
        step = 7
        spec = ClientSpec(args=arguments(tmp_path, per_device_train_batch_size=step))
        options = {"public_dataset": rows(4, seed=1), "clients": {"north": spec}}
        trainer = client(tmp_path, {"distillation": "dsfl"}, **options)
    args = arguments(tmp_path, per_device_train_batch_size=8)
    found = announcement_of(setup_of(trainer), args, "north")
    assert found == Announcement(None, None, 0, examples_per_step=step, hides_counts=True)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"num_examples": 8, "num_encoded_examples": 9}, "num_examples=8, num_encoded_examples=9"),
        ({"num_examples": 0, "num_encoded_examples": 0}, "num_examples=0, num_encoded_examples=0"),
        ({"num_eval_examples": 3}, "num_eval_examples=3"),
        ({"class_counts": []}, "class_counts"),
    ],
)
def test_hidden_numbers_that_are_announced_contradict_themselves(fields, shown):
    with pytest.raises(ValueError, match=f"`hides_counts` is True, but the client announces {shown}."):
        Announcement.from_bytes(dataclasses.replace(HIDDEN, **fields).to_bytes())


def test_log_does_not_call_hidden_numbers_a_stream():
    assert HIDDEN.describe(HIDDEN) == "hidden numbers of examples"
    assert dataclasses.replace(HIDDEN, hides_counts=False).describe(HIDDEN).startswith("hides_counts=False (before: T")


@pytest.mark.usefixtures("hiding")
@pytest.mark.parametrize(
    ("announced", "shown"),
    [
        (SHOWN, "num_examples=90, num_encoded_examples=95, num_eval_examples=7"),
        (dataclasses.replace(SHOWN, class_counts=[1]), "num_eval_examples=7, class_counts"),
        (dataclasses.replace(HIDDEN, hides_counts=False), "a stream"),
    ],
    ids=["numbers", "class counts", "stream"],
)
@pytest.mark.parametrize("has_started", [True, False], ids=["started", "before the start"])
def test_server_refuses_numbers_of_a_client_with_other_settings(tmp_path, announced, shown, has_started):
    limits = AnnouncementLimits(setup_of(server(tmp_path)))
    others = dict.fromkeys(NAMES[:2], HIDDEN)
    if has_started:
        limits.start(others)
    refused = limits.refused({**others, "east": announced}, "east")
    assert list(refused) == ["east"]
    assert "Client 'east' announced " in refused["east"] and f"{shown}, but with" in refused["east"]
    assert refused["east"].endswith("Set `secure_aggregation` to the same value for all parties.")
    assert limits.refused({**others, "east": HIDDEN}, "east") == {}


def test_server_without_secure_aggregation_refuses_hidden_numbers(tmp_path):
    limits = AnnouncementLimits(setup_of(server(tmp_path, local_steps=2)))
    refused = limits.refused({"north": SHOWN, "south": HIDDEN}, "south")
    assert refused["south"].startswith("Client 'south' hides its numbers of examples, but the server uses no `secure_")


@pytest.mark.usefixtures("hiding")
@pytest.mark.parametrize("limit", [None, 5, {"south": 3}, dict.fromkeys(NAMES, 3)], ids=repr)
@pytest.mark.parametrize("training", [{"local_epochs": 2}, {"local_steps": 3}], ids=repr)
def test_server_compares_no_hidden_numbers(tmp_path, limit, training):
    """`max_weight` limits the weights, also if a client has larger batches than the others."""
    federation = {**training, "max_examples_per_client": limit, "aggregation_kwargs": {"weighting": "tokens"}}
    trainer = server(tmp_path, **federation)
    limits = AnnouncementLimits(setup_of(trainer))
    announced = {**dict.fromkeys(NAMES, HIDDEN), "east": dataclasses.replace(HIDDEN, examples_per_step=10**6)}
    assert not any(limits.refused(announced, name) for name in announced)
    limits.start(announced)
    assert not any(limits.refused(announced, name) for name in announced)
    again = AnnouncementLimits(setup_of(trainer))
    again.load_state_dict(limits.state_dict())
    again.start(announced)
    trainer.engine.announcements.update(announced)
    assert ClaimLimits(setup_of(trainer), trainer.args, dict.fromkeys(NAMES))("east", None) == UpdateLimits()


@pytest.mark.usefixtures("hiding")
@pytest.mark.parametrize("limit", [5, {"north": 5}, {"south": 9}], ids=repr)
def test_client_compares_its_own_number_although_it_hides_it(tmp_path, limit):
    trainer = client(tmp_path, {"max_examples_per_client": limit})
    joined = JoinedClient(setup_of(trainer), trainer.args, "north", None)
    with pytest.raises(AnnouncementError, match="Client 'north' announced num_examples=6, but max_examples_per_"):
        joined.connect(lambda settings, announced: pytest.fail("The client has connected."))


@pytest.mark.usefixtures("hiding")
def test_client_sends_the_hidden_announcement(tmp_path):
    trainer = client(tmp_path)
    sent = []
    joined = JoinedClient(setup_of(trainer), trainer.args, "north", None)
    joined.connect(lambda settings, announced: sent.append(Announcement.from_bytes(announced)))
    assert sent == [dataclasses.replace(HIDDEN, examples_per_step=trainer.args.train_batch_size)]


@pytest.mark.usefixtures("hiding")
@pytest.mark.parametrize(
    ("training", "num_seen"),
    [({"local_epochs": 3}, 8 * 3), ({"local_epochs": 1, "max_rows_per_round": 8}, 8), ({"local_steps": 3}, 3 * 4)],
    ids=repr,
)
def test_federation_runs_resumes_and_describes_itself_without_the_numbers(
    tmp_path, training, num_seen, caplog, monkeypatch, capsys
):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    replies, announced = dict.fromkeys(NAMES, changed(num_steps=3)), dict.fromkeys(NAMES, HIDDEN)
    with caplog.at_level(logging.INFO, "transformers"):
        trainer, rejected = run_with_threads(tmp_path, replies, announced, **training)
    assert rejected == [{}, {}] and trainer.state.global_step == 2
    assert "joined with hidden numbers of examples." in caplog.text and "stream" not in caplog.text
    lines = [line.strip() for line in caplog.messages]
    steps = training.get("local_steps", "unknown (hidden)")
    for name, value in (("examples of all clients", "unknown (hidden)"), ("local steps", steps)):
        assert f"Num {name} = {value}" in lines
    last = trainer.state.log_history[-1]
    expected = num_seen * len(NAMES) * 2 / last["train_runtime"]
    assert last["train_samples_per_second"] == pytest.approx(expected, rel=0.01, abs=1e-3)
    found = json.loads((tmp_path / "network" / "status.json").read_text())
    assert {each["num_examples"] for each in found["clients"].values()} == {None}
    assert main(["status", str(tmp_path)]) == 0 and "stream" not in capsys.readouterr().out
    resumed, rejected = run_with_threads(
        tmp_path, replies, announced, resume_from=tmp_path / "checkpoint-1", **training
    )
    assert rejected == [{}] and resumed.state.global_step == 2


@pytest.mark.usefixtures("hiding")
def test_card_lists_no_hidden_number(tmp_path, monkeypatch):
    trainer, _ = run_with_threads(tmp_path, dict.fromkeys(NAMES, honest), dict.fromkeys(NAMES, HIDDEN))
    protected = dataclasses.replace(trainer.federation, secure_aggregation="secagg")
    monkeypatch.setattr(FederatedTrainer, "federation", protected)
    record = RunRecord.from_trainer(trainer)
    text = render(record)
    assert record.exchanged["announced"] == ["its number of examples in an optimizer step"]
    assert "The clients hid their numbers of examples." in text and "could claim" not in text
    assert record.train_data.num_rows is None and record.train_data.rows_per_client is None
    assert "| Clients | 3 |" in text and "stream" not in text
