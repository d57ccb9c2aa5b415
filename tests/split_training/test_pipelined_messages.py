"""Messages of a networked client that are in flight together: their order, their errors, and the unchanged results."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from loopback import SESSION_CONFIG, Relay, wait_until
from networked import DirectLink, Run, encrypted_link
from split_runs import LORA, clients_of, whole_model

from hf_federated import SplitConfig
from hf_federated.messages.serialization import packed_kind
from hf_federated.security.encrypted_link import EncryptedLink
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
from hf_federated.split_training.run_link import LateError, RunLink
from hf_federated.transport import GrpcLink, GrpcServer


SEVERAL_BATCHES = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}


@pytest.fixture
def small_bundles(monkeypatch):
    """Send each message of a tiny model as soon as it is posted."""
    monkeypatch.setattr(run_link, "MIN_BUNDLE_BYTES", 1)


class PipelinedLink(DirectLink):
    """
    Link on which several messages can be in flight. A thread answers them in order.

    Attributes:
        events (`list`): Names of sent and answered messages, in the order of the events.
    """

    max_in_flight = 8

    def __init__(self, server, client_id):
        super().__init__(server, client_id)
        self.events = []
        self.pool = ThreadPoolExecutor(1)

    def submit(self, blob):
        name = self.name_of(blob)
        self.events.append(f"send {name}")

        def answer():
            answered = self.exchange(blob)
            self.events.append(f"answer {name}")
            return answered

        return self.pool.submit(answer)

    @staticmethod
    def name_of(blob):
        messages = [blob]
        if packed_kind(blob) == Bundle.kind:
            messages = [as_view(content) for content in Bundle.from_bytes(blob).messages]
        # A view can be read only once.
        kinds = [packed_kind(message).removeprefix("split_") for message in messages]
        numbers = [getattr(read_message(message), "micro_step", "") for message in messages]
        return " ".join(f"{kind}{number}" for kind, number in zip(kinds, numbers, strict=True))


def parameters_of(run):
    return {(party, name): value for party, part in run.values().items() for name, value in part.items()}


def assert_equal_runs(run, expected):
    assert not run.errors and not expected.errors
    left, right = parameters_of(run), parameters_of(expected)
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("strategy", ["serial", "client_batch", "server_hierarchical"])
def test_messages_in_flight_do_not_change_a_bit(strategy, tmp_path, small_bundles):
    clients = clients_of(7, 5)
    split = SplitConfig(strategy=strategy, average_every=None if strategy == "serial" else 2)
    together = Run(tmp_path / "1", clients, split, None, links=PipelinedLink, **SEVERAL_BATCHES)
    bundled = Run(tmp_path / "2", clients, split, None, **SEVERAL_BATCHES)
    for run in (together, bundled):
        run.train()
    assert_equal_runs(together, bundled)


def test_random_numbers_do_not_depend_on_the_number_of_bundles(tmp_path, small_bundles):
    class ImmediateLink(PipelinedLink):
        """
        Answers each message when it is sent, in the thread of the client.

        Threads of a process draw random numbers from the same generators.
        """

        def submit(self, blob):
            answer = Future()
            answer.set_result(self.exchange(blob))
            return answer

    clients = clients_of(7)
    models = [whole_model(attention_dropout=0.2) for _ in range(2)]
    together = Run(
        tmp_path / "1", clients, SplitConfig(), None, model=models[0], links=ImmediateLink, **SEVERAL_BATCHES
    )
    bundled = Run(tmp_path / "2", clients, SplitConfig(), None, model=models[1], **SEVERAL_BATCHES)
    for run in (together, bundled):
        run.train()
    assert_equal_runs(together, bundled)


def test_each_message_is_sent_before_the_next_is_computed_and_the_previous_is_answered(tmp_path, small_bundles):
    links, events_before_answers = [], {"begin forward0": "send forward2", "forward2": "send backward0"}

    class SlowLink(PipelinedLink):
        def submit(self, blob):
            awaited = events_before_answers.get(self.name_of(blob))
            if awaited is not None and awaited not in self.events:
                self.pool.submit(wait_until, lambda: awaited in self.events)
            return super().submit(blob)

    def make_link(server, client_id):
        links.append(SlowLink(server, client_id))
        return links[0]

    run = Run(tmp_path, clients_of(3), SplitConfig(), LORA, links=make_link, **SEVERAL_BATCHES)
    run.train()
    assert not run.errors
    events = links[0].events
    sent = [event.removeprefix("send ") for event in events if event.startswith("send")]
    answered = [event.removeprefix("answer ") for event in events if event.startswith("answer")]
    assert (
        sent[:6] == ["begin forward0", "forward1", "forward2", "backward0", "backward1", "backward2"] == answered[:6]
    )
    # All hidden states are in flight together, and the first gradient does not wait for the last hidden states.
    assert events.index("send forward2") < events.index("answer begin forward0")
    assert events.index("send backward0") < events.index("answer forward2")


def test_an_encrypted_link_has_several_messages_in_flight(tmp_path, small_bundles):
    class Carrier:
        """Connection to an encrypted server on which several messages can be in flight."""

        max_in_flight = 8

        def __init__(self, server):
            self.server = server
            self.pool = ThreadPoolExecutor(1)
            self.num_submitted = 0

        def submit(self, sealed):
            self.num_submitted += 1
            return self.pool.submit(self.server.exchange, sealed)

        def __getattr__(self, name):
            return getattr(self.server, name)

    carriers = []

    def make_link(server, client_id):
        link = encrypted_link(server, client_id)
        carriers.append(Carrier(link.server))
        return EncryptedLink(link.session, carriers[-1])

    clients = clients_of(6)
    encrypted = Run(tmp_path / "1", clients, SplitConfig(), None, links=make_link, **SEVERAL_BATCHES)
    plain = Run(tmp_path / "2", clients, SplitConfig(), None, **SEVERAL_BATCHES)
    for run in (encrypted, plain):
        run.train()
    assert_equal_runs(encrypted, plain)
    assert carriers[0].num_submitted == 2 * 6


def test_cut_connections_do_not_change_a_bit(tmp_path, small_bundles):
    class CutLink(GrpcLink):
        """Its connection is cut after every fourth message, while several messages are in flight."""

        num_submitted = 0

        def submit(self, blob):
            answer = super().submit(blob)
            self.num_submitted += 1
            if self.num_submitted % 4 == 3:
                relays[0].cut()
            return answer

    clients = clients_of(9)
    with contextlib.ExitStack() as stack:
        relays = []

        def make_link(server, client_id):
            grpc_server = stack.enter_context(
                GrpcServer(server.answer, None, [client_id], SESSION_CONFIG, insecure=True)
            )
            relays.append(stack.enter_context(Relay(grpc_server)))
            return stack.enter_context(CutLink(relays[0].address, None, client_id, SESSION_CONFIG, insecure=True))

        cut = Run(tmp_path / "1", clients, SplitConfig(), None, links=make_link, **SEVERAL_BATCHES)
        cut.train()
        assert len(relays[0].connections) > 3
    uncut = Run(tmp_path / "2", clients, SplitConfig(), None, **SEVERAL_BATCHES)
    uncut.train()
    assert_equal_runs(cut, uncut)


class ManualLink:
    """
    Link whose messages in flight are answered by the test.

    Attributes:
        sent (`list`): The messages in flight and their pending answers.
        exchanged (`list[bytes]`): The other messages, which are answered at once.
    """

    def __init__(self, max_in_flight=3):
        self.max_in_flight = max_in_flight
        self.sent = []
        self.exchanged = []

    def submit(self, blob):
        self.sent.append((blob, Future()))
        return self.sent[-1][1]

    def exchange(self, blob):
        self.exchanged.append(blob)
        return EndStepReply("a", read_message(blob).step, 2.0).to_bytes()

    def end_step(self):
        pass


@pytest.fixture
def messages():
    """Five control messages and their answers."""
    return [EndStep("a", step, 1.0).to_bytes() for step in range(5)], [
        EndStepReply("a", step, 2.0).to_bytes() for step in range(5)
    ]


def bundle_of(blobs):
    return Bundle("a", [as_tensor(blob) for blob in blobs]).to_bytes()


def test_the_last_message_in_flight_is_a_bundle_of_all_that_remain(messages, small_bundles):
    blobs, replies = messages
    link = ManualLink(max_in_flight=3)
    run = RunLink(link, "a")
    posted = [run.post(blob) for blob in blobs]
    assert [blob for blob, _ in link.sent] == blobs[:2]
    link.sent[0][1].set_result(replies[0])
    assert posted[0].answer() == replies[0]
    assert link.sent[2][0] == bundle_of(blobs[2:])
    link.sent[1][1].set_result(replies[1])
    link.sent[2][1].set_result(bundle_of(replies[2:]))
    assert [bytes(message.answer()) for message in posted] == replies


def test_small_messages_wait_for_each_other(messages, monkeypatch):
    blobs, replies = messages
    begin = BeginStep("a", 0, 1, 1).to_bytes()
    monkeypatch.setattr(run_link, "MIN_BUNDLE_BYTES", len(begin) + len(blobs[0]))
    link = ManualLink(max_in_flight=8)
    run = RunLink(link, "a")
    run.defer(BeginStep("a", 0, 1, 1), BeginStepReply)
    posted = [run.post(blob) for blob in blobs[:4]]
    assert [blob for blob, _ in link.sent] == [bundle_of([begin, blobs[0]]), bundle_of(blobs[1:3])]
    link.sent[0][1].set_result(bundle_of([BeginStepReply("a", 0).to_bytes(), replies[0]]))
    link.sent[1][1].set_result(bundle_of(replies[1:3]))
    # An answer is needed, so the fourth message waits no longer.
    assert bytes(posted[0].answer()) == replies[0]
    assert link.sent[2][0] == blobs[3]
    link.sent[2][1].set_result(replies[3])
    assert bytes(posted[3].answer()) == replies[3]


def test_error_of_a_message_in_flight_belongs_to_its_bundle_only(messages, small_bundles):
    blobs, replies = messages
    link = ManualLink(max_in_flight=8)
    run = RunLink(link, "a")
    posted = [run.post(blob) for blob in blobs[:3]]
    link.sent[0][1].set_result(LateReply("a", 0).to_bytes())
    link.sent[1][1].set_exception(ValueError("refused"))
    link.sent[2][1].set_result(replies[2])
    with pytest.raises(LateError):
        posted[0].answer()
    with pytest.raises(ValueError, match="refused"):
        posted[1].answer()
    assert posted[2].answer() == replies[2]
    assert run.exchange(blobs[3]) == replies[3] and link.exchanged == [blobs[3]]


def test_abandoned_messages_are_not_sent_and_answers_in_flight_are_received(messages, monkeypatch):
    blobs, replies = messages
    monkeypatch.setattr(run_link, "MIN_BUNDLE_BYTES", 2 * len(blobs[0]))
    link = ManualLink(max_in_flight=8)
    run = RunLink(link, "a")
    for blob in blobs[:3]:
        run.post(blob)
    link.sent[0][1].set_result(bundle_of(replies[:2]))
    run.abandon()
    assert len(link.sent) == 1
    assert run.exchange(blobs[3]) == replies[3]


def test_error_of_a_deferred_message_is_raised_with_the_answer_to_the_next_message(messages, monkeypatch):
    blobs, replies = messages
    monkeypatch.setattr(run_link, "MAX_BUNDLE_BYTES", 1)
    monkeypatch.setattr(run_link, "MIN_BUNDLE_BYTES", 1)
    link = ManualLink(max_in_flight=8)
    run = RunLink(link, "a")
    run.defer(BeginStep("a", 0, 1, 1), BeginStepReply)
    posted = run.post(blobs[0])
    link.sent[0][1].set_exception(ValueError("refused"))
    link.sent[1][1].set_result(replies[0])
    with pytest.raises(ValueError, match="refused"):
        posted.answer()
    run.abandon()
    # No message is in flight, whose error the next exchange would raise.
    assert run.exchange(blobs[3]) == replies[3] and link.exchanged == [blobs[3]]
    with pytest.raises(ValueError, match="refused"):
        posted.answer()


def test_abandoned_messages_leave_the_deferred_messages(messages):
    link = ManualLink(max_in_flight=8)
    run = RunLink(link, "a")
    run.defer(BeginStep("a", 0, 1, 1), BeginStepReply)
    run.post(messages[0][0])
    run.abandon()
    assert not link.sent
    link.exchange = lambda blob: link.exchanged.append(blob) or BeginStepReply("a", 0).to_bytes()
    run.flush()
    assert link.exchanged == [BeginStep("a", 0, 1, 1).to_bytes()]


def test_message_that_cannot_be_sent_raises_its_error_when_the_answer_is_read(messages, small_bundles):
    class RefusingLink(ManualLink):
        def submit(self, blob):
            raise ValueError("too large")

    posted = RunLink(RefusingLink(), "a").post(messages[0][0])
    with pytest.raises(ValueError, match="too large"):
        posted.answer()


def test_failure_of_a_micro_batch_leaves_no_message_in_flight(tmp_path, small_bundles):
    links, after_failure = [], []

    class SlowLink(PipelinedLink):
        def submit(self, blob):
            self.pool.submit(time.sleep, 0.05)
            return super().submit(blob)

    def make_link(server, client_id):
        links.append(SlowLink(server, client_id))
        return links[-1]

    run = Run(tmp_path, clients_of(6), SplitConfig(), LORA, links=make_link, **SEVERAL_BATCHES)
    trainer, client_lost = run.trainers["client 0"], run.server.client_lost
    calls = []

    def fail_in_second_micro_batch(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise ArithmeticError("the second micro-batch fails")
        return type(trainer).compute_loss(trainer, *args, **kwargs)

    trainer.compute_loss = fail_in_second_micro_batch
    # The client calls it with the error.
    run.server.client_lost = lambda client_id: (after_failure.extend(links[0].events), client_lost(client_id))
    run.train()
    assert "the second micro-batch fails" in str(run.errors["client 0"])
    sent = [event for event in after_failure if event.startswith("send")]
    answered = [event for event in after_failure if event.startswith("answer")]
    assert len(sent) == len(answered) > 0
    assert run.server.state.removed
