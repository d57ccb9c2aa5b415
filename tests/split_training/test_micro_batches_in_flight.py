"""Messages of a networked client travel together: a step costs two exchanges, and the results stay the same."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from networked import DirectLink, Run
from split_runs import LORA, STRATEGIES, clients_of, split_trainer, whole_model

from hf_federated import SplitConfig
from hf_federated.split_training import run_link
from hf_federated.split_training.messages import (
    BeginStep,
    BeginStepReply,
    Bundle,
    EndStep,
    EndStepReply,
    LateReply,
    as_tensor,
    as_view,
    read_message,
)
from hf_federated.split_training.pending_messages import StepProgress


def config_of(strategy, **changes):
    return SplitConfig(strategy=strategy, average_every=None if strategy == "serial" else 2, **changes)


class CountingLink(DirectLink):
    """Link that counts the exchanges of each step, and the kinds of messages in them."""

    def __init__(self, server, client_id, exchanges):
        super().__init__(server, client_id)
        self.exchanges = exchanges

    def exchange(self, blob):
        message = read_message(blob)
        messages = [message]
        if isinstance(message, Bundle):
            messages = [read_message(as_view(content)) for content in message.messages]
        self.exchanges.append([type(item).kind.removeprefix("split_") for item in messages])
        return super().exchange(blob)


def exchanges_of(tmp_path, split, num_rows=8, **changes):
    """The kinds of messages in each exchange of the only client of a run of two steps."""
    exchanges = []
    run = Run(
        tmp_path, clients_of(num_rows), split, LORA, links=lambda *args: CountingLink(*args, exchanges), **changes
    )
    run.train()
    assert not run.errors
    return exchanges


@pytest.mark.parametrize("strategy", ["serial", "server_hierarchical"])
def test_step_with_several_micro_batches_costs_two_exchanges(strategy, tmp_path):
    exchanges = exchanges_of(
        tmp_path, config_of(strategy), per_device_train_batch_size=1, gradient_accumulation_steps=4
    )
    assert exchanges[1:5] == [
        ["begin", *["forward"] * 4],
        ["backward"] * 4,
        ["step", "begin", *["forward"] * 4],
        ["backward"] * 4,
    ]
    assert exchanges[0] == ["join"] and exchanges[5] == ["step"] and len(exchanges) == 7  # the last is Finish


def test_windows_limit_the_micro_batches_in_flight(tmp_path):
    split = config_of("serial", micro_batches_in_flight=2)
    exchanges = exchanges_of(tmp_path, split, 6, per_device_train_batch_size=1, gradient_accumulation_steps=3)
    assert exchanges[1:5] == [["begin", "forward", "forward"], ["backward"] * 2, ["forward"], ["backward"]]


def test_the_server_computes_the_norm_if_a_step_has_a_deadline_or_several_clients(tmp_path):
    for name, split, changes in (
        ("deadline", config_of("serial"), {"deadline": 60.0}),
        ("clients", config_of("client_batch"), {}),
    ):
        exchanges = exchanges_of(tmp_path / name, split, 4, **changes)
        assert exchanges[1:4] == [["begin", "forward"], ["backward"], ["step"]]


@pytest.mark.parametrize(
    ("strategy", "tied", "window"),
    [
        ("serial", True, 8),
        ("serial", False, 2),
        ("client_batch", True, 8),
        pytest.param("server_hierarchical", True, 8, marks=pytest.mark.slow),
        pytest.param("serial", True, 1, marks=pytest.mark.slow),
        pytest.param("client_batch", False, 2, marks=pytest.mark.slow),
    ],
)
def test_micro_batches_in_flight_do_not_change_a_bit(strategy, tied, window, tmp_path):
    clients = clients_of(7, 5, 6) if strategy != "serial" else clients_of(7, 5)
    changes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "max_grad_norm": 0.3}
    models = [whole_model(tie_word_embeddings=tied) for _ in range(2)]
    split = config_of(strategy, micro_batches_in_flight=window)
    trainer = split_trainer(tmp_path / "one", clients, split, None, models[0], **changes)
    trainer.train()
    run = Run(tmp_path, clients, split, None, model=models[1], **changes)
    run.train()
    assert not run.errors
    expected = dict(trainer.model.named_parameters())
    for client_id in clients:
        assert all(torch.equal(value, expected[name]) for name, value in run.values()[client_id].items())
    server = run.values()[next(iter(run.server.server_model.parties))]
    assert all(torch.equal(value, expected[f"server_body.{name}"]) for name, value in server.items())
    norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    assert min(norms) > changes["max_grad_norm"]


def test_micro_batches_in_flight_draw_the_random_numbers_of_micro_batches_in_turn(tmp_path):
    changes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}
    models = [whole_model(attention_dropout=0.2) for _ in range(2)]
    trainer = split_trainer(tmp_path / "one", clients_of(6), config_of("serial"), LORA, models[0], **changes)
    trainer.train()
    run = Run(tmp_path, clients_of(6), config_of("serial"), LORA, model=models[1], **changes)
    run.train()
    expected = dict(trainer.model.named_parameters())
    assert not run.errors
    assert all(torch.equal(value, expected[name]) for name, value in run.values()["client 0"].items())


def test_large_messages_travel_separately(tmp_path, monkeypatch):
    monkeypatch.setattr(run_link, "MAX_BUNDLE_BYTES", 1)
    exchanges = exchanges_of(tmp_path, config_of("serial"), 4, per_device_train_batch_size=1)
    assert max(map(len, exchanges)) == 1


def test_server_refuses_a_bundle_in_a_bundle_and_too_many_messages(tmp_path):
    run = Run(tmp_path, clients_of(2), config_of("serial"), LORA)
    begin = BeginStep("client 0", 0, 1, 1).to_bytes()
    bundle = Bundle("client 0", [as_tensor(begin)])
    with pytest.raises(ValueError, match="a bundle in a bundle"):
        run.server.answer("client 0", Bundle("client 0", [as_tensor(bundle.to_bytes())]).to_bytes())
    with pytest.raises(ValueError, match="messages"):
        Bundle("client 0", [as_tensor(begin)] * 1000)
    other = Bundle("client 0", [as_tensor(BeginStep("client 1", 0, 1, 1).to_bytes())])
    with pytest.raises(ValueError, match="in the name of 'client 1'"):
        run.server.answer("client 0", other.to_bytes())


class AnsweringLink:
    """Link to a server that gives fixed answers."""

    def __init__(self, *answers):
        self.answers = collections.deque(answers)

    def exchange(self, blob):
        return self.answers.popleft().to_bytes()

    def end_step(self):
        pass


def bundle_of(*messages):
    return Bundle("a", [as_tensor(message.to_bytes()) for message in messages])


def test_client_that_is_late_does_not_use_the_other_answers():
    link = run_link.RunLink(AnsweringLink(bundle_of(BeginStepReply("a", 0), LateReply("a", 0))), "a")
    noted = []
    link.defer(BeginStep("a", 0, 1, 1), BeginStepReply, noted.append)
    with pytest.raises(run_link.LateError):
        link.exchange(EndStep("a", 0, 1.0).to_bytes())
    assert not noted
    link.flush()  # nothing is sent twice


def test_missing_answers_are_an_error():
    link = run_link.RunLink(AnsweringLink(bundle_of(BeginStepReply("a", 0))), "a")
    link.defer(BeginStep("a", 0, 1, 1), BeginStepReply)
    with pytest.raises(ValueError, match="has 1 answers. The client agreed to an answer to each of 2 messages"):
        link.exchange(EndStep("a", 0, 1.0).to_bytes())


def test_another_norm_of_the_server_is_an_error(tmp_path):
    class FalseLink(DirectLink):
        def exchange(self, blob):
            answer = super().exchange(blob)
            message = read_message(blob)
            if not isinstance(message, Bundle):
                return answer
            answers = Bundle.from_bytes(answer).messages
            for number, content in enumerate(answers):
                if b"split_stepped" in bytes(as_view(content)):
                    reply = EndStepReply.from_bytes(as_view(content))
                    answers[number] = as_tensor(dataclasses.replace(reply, norm=2 * reply.norm).to_bytes())
            return Bundle(self.client_id, answers).to_bytes()

    run = Run(tmp_path, clients_of(4), config_of("serial"), LORA, links=FalseLink)
    run.train()
    assert "`norm` of an answer of kind 'split_stepped' is" in str(run.errors["client 0"])


@pytest.mark.parametrize("number", [0, 65, 2.0, True])
def test_number_of_micro_batches_in_flight_is_checked(number):
    with pytest.raises(ValueError, match="micro_batches_in_flight"):
        SplitConfig(micro_batches_in_flight=number)


@pytest.mark.parametrize("strategy", STRATEGIES[:1])
def test_failure_of_a_micro_batch_ends_the_run_of_its_client(strategy, tmp_path):
    run = Run(
        tmp_path,
        clients_of(6),
        config_of(strategy),
        LORA,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=3,
    )
    trainer = run.trainers["client 0"]
    compute_loss, calls = trainer.compute_loss, []

    def fail_in_second_micro_batch(*args, **kwargs):
        calls.append(1)
        loss = compute_loss(*args, **kwargs)
        if len(calls) == 3 and loss is not None:
            raise RuntimeError("broken loss")
        return loss

    trainer.compute_loss = fail_in_second_micro_batch
    run.train()
    assert str(run.errors["client 0"]) == "broken loss"


def test_server_computes_the_norm_of_its_gradients_once_in_a_step(tmp_path):
    run = Run(tmp_path, clients_of(4), config_of("serial"), LORA)
    (party,) = run.server.server_model.parties.values()
    squared_norm, calls = party.squared_norm, []
    party.squared_norm = lambda: calls.append(1) or squared_norm()
    run.train()
    assert not run.errors and len(calls) == run.server.step == 2


def test_gradients_of_a_client_whose_step_has_ended_are_not_complete():
    progress = StepProgress(config_of("serial"), 1)
    assert not progress.has_all_gradients("client 0")
    progress.begin(BeginStep("client 0", 0, 1, 1))
    assert not progress.has_all_gradients("client 0")
