"""`exchange_codec`: both directions against float64 arithmetic, old references, rejected updates and whole runs."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
from tiny import arguments, rows, same_weights, tiny_model

from hf_federated import FederatedConfig, FederatedTrainer
from hf_federated.codecs import Codec, Float32, Int4, Int8, PowerSGD, TopK
from hf_federated.engines import LocalEngine
from hf_federated.messages import ClientUpdate, Fit
from hf_federated.messages.serialization import pack, unpack
from hf_federated.messages.validation import InvalidUpdateError, check_update
from hf_federated.methods import Round
from hf_federated.postprocessing import (
    EncodeState,
    EncodeUpdate,
    Memories,
    exchange_codec_steps,
    run_client_receive,
    run_client_send,
)
from hf_federated.server import StepMemories


State = dict[str, torch.Tensor]
SHAPES = {"matrix": (30, 20), "row": (300,), "scalar": ()}
CODECS = [Int8(), Int4(), TopK(0.2), PowerSGD(2)]
# Rank 2 of the matrix, or the largest fifth, is far from the whole change.
PRECISE = [Int8(), Int4()]


def state_of(seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {name: (scale * torch.randn(shape, generator=generator)).to(dtype) for name, shape in SHAPES.items()}


def added(state: State, change: State) -> State:
    return {name: value + change[name] for name, value in state.items()}


class Federation:
    """
    A server and its clients. All messages and memories are serialized between two calls.

    Args:
        state (`dict[str, torch.Tensor]`): The global state.
        steps (`Postprocessor`): The steps.
    """

    def __init__(self, state: State, *steps) -> None:
        self.state, self.steps, self.number = state, steps, 0
        self.server = StepMemories(steps)
        self.clients: dict[str, Memories] = {}

    def send(self, client_id: str) -> Fit:
        """Return the message of a client on the wire."""
        message = self.server.send(Fit(self.number, client_id, 7, self.state))
        self.server.load_state_dict(unpack(pack(self.server.state_dict())))
        return Fit.from_bytes(message.to_bytes())

    def receive(self, message: Fit) -> Fit:
        """Return the message that the client uses for training."""
        memories = self.clients.setdefault(message.client_id, {})
        received = run_client_receive(self.steps, message, memories)
        self.clients[message.client_id] = unpack(pack(memories))
        return received

    def reply(self, message: Fit, state: State) -> ClientUpdate:
        """Return the update of a client with a trained state on the wire."""
        update = ClientUpdate(message.round, message.client_id, state, num_examples=1, num_tokens=0, num_steps=1)
        memories = self.clients[message.client_id]
        update = run_client_send(self.steps, update, message, memories)
        self.clients[message.client_id] = unpack(pack(memories))
        return ClientUpdate.from_bytes(update.to_bytes())

    def arrive(self, update: ClientUpdate) -> State:
        """Return the state that the server aggregates."""
        return self.server.receive(update, self.state, 7).state

    def run(self, changes: dict[str, State], is_accepted: bool = True) -> dict[str, State]:
        """Run a round in which clients change their state, and return what the server aggregates."""
        arrived = {}
        for client_id, change in changes.items():
            received = self.receive(self.send(client_id))
            arrived[client_id] = self.arrive(self.reply(received, added(received.state, change)))
        if is_accepted:
            self.server.accept(dict.fromkeys(changes, self.number))
        self.end_round()
        return arrived

    def end_round(self) -> None:
        self.server.on_sums(None, Round(self.number, tuple(self.clients), self.state), seed=0)  # type: ignore[arg-type]
        self.number += 1


def steps(codec: Codec) -> list[EncodeState | EncodeUpdate]:
    return [EncodeState(codec), EncodeUpdate(codec)]


# ---- The way down


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_reference_is_the_decoded_state_of_the_last_round(codec):
    """Float64 arithmetic follows the reference from the messages alone."""
    federation, reference = Federation(state_of(0), *steps(codec)), None
    for number in range(6):
        message = federation.send("a")
        received = federation.receive(message)
        state = {name: value.double().numpy() for name, value in federation.state.items()}
        if reference is None:
            assert message.to_bytes() == federation.send("a").to_bytes()
            reference = state
        else:
            like = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
            change = codec.decode(message.state, like)
            reference = {name: value + change[name].double().numpy() for name, value in reference.items()}
        for name, value in received.state.items():
            np.testing.assert_allclose(value.double().numpy(), reference[name], rtol=0, atol=2e-6)
        federation.arrive(federation.reply(received, received.state))
        federation.server.accept({"a": number})
        federation.end_round()
        federation.state = added(federation.state, state_of(10 + number, scale=0.1))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_error_on_the_way_down_does_not_add_up(codec):
    """A constant global state arrives, because each change contains what the last change lost."""
    federation = Federation(state_of(0), *steps(codec))
    federation.run({"a": state_of(1)})
    errors = []
    for number in range(80):
        if number < 40:
            federation.state = added(federation.state, state_of(10 + number, scale=0.1))
        received = federation.receive(federation.send("a"))
        errors.append(max(float((received.state[name] - federation.state[name]).abs().max()) for name in SHAPES))
        federation.server.accept({"a": federation.number})
        federation.arrive(federation.reply(received, received.state))
        federation.end_round()
    assert max(errors[20:40]) < 3 * max(errors[:20])
    assert errors[-1] < (1e-5 if codec in PRECISE else 0.2 * max(errors))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_client_that_left_out_a_round_receives_the_same_state_as_the_others(codec):
    federation = Federation(state_of(0), *steps(codec))
    zero = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    federation.run({"a": zero, "b": zero})
    for number in range(3):
        federation.state = added(federation.state, state_of(number, scale=0.1))
        federation.run({"a": zero})
    federation.state = added(federation.state, state_of(9, scale=0.1))
    change, whole = federation.send("a"), federation.send("b")
    assert change.num_bytes < 0.8 * whole.num_bytes
    received = [federation.receive(message).state for message in (change, whole)]
    assert all(torch.equal(received[0][name], received[1][name]) for name in SHAPES)
    assert not torch.equal(received[0]["matrix"], federation.state["matrix"])


def test_server_keeps_one_reference_for_all_clients():
    federation = Federation(state_of(0), *steps(Int8()))
    zero = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    sizes = []
    for num_clients in (2, 20):
        federation.run({f"client {number}": zero for number in range(num_clients)})
        kept = [federation.server.store.get(name).get("memories", {}) for name in federation.clients]
        sizes.append(len(pack([federation.server.state_dict(), *kept])))
    assert sizes[1] < 1.5 * sizes[0]


def test_process_without_clients_of_a_round_has_the_reference_of_the_other_processes():
    busy, idle = (Federation(state_of(0), *steps(Int4())) for _ in range(2))
    for number in range(3):
        busy.run({"a": state_of(number)})
        idle.end_round()
        busy.state = idle.state = added(busy.state, state_of(10 + number))
    busy.end_round()
    idle.end_round()
    assert pack(busy.server.state_dict()) == pack(idle.server.state_dict())


def test_repeated_message_of_a_round_is_the_same():
    federation = Federation(state_of(0), *steps(PowerSGD(2)))
    for number in range(3):
        messages = [federation.send("a").to_bytes() for _ in range(2)]
        assert messages[0] == messages[1]
        federation.run({"a": state_of(number)})
        federation.state = added(federation.state, state_of(10 + number))


# ---- The way up


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_sum_of_what_arrives_is_the_sum_of_the_changes_without_the_last_error(codec):
    """The updates of two rounds are not used. Changes are those of the state that the client received."""
    federation = Federation(state_of(0), *steps(codec))
    true, sent = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    for number in range(20):
        is_accepted = number not in (3, 11)
        before = federation.state
        change = state_of(10 + number, scale=0.1 if is_accepted else 5.0)
        received = federation.receive(federation.send("a"))
        trained = added(received.state, change)
        arrived = federation.arrive(federation.reply(received, trained))
        if is_accepted:
            federation.server.accept({"a": number})
            for name in SHAPES:
                true[name] += (trained[name].double() - received.state[name].double()).numpy()
                sent[name] += (arrived[name].double() - before[name].double()).numpy()
            federation.state = arrived
        federation.end_round()
    residual = federation.clients["a"]["1 EncodeUpdate"]["next"]
    for name in SHAPES:
        error = residual[name]["residual"][name].double().numpy()
        np.testing.assert_allclose(sent[name], true[name] - error, rtol=0, atol=1e-6 * 20)
        assert name != "matrix" or abs(error).max() > 1e-4


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_rejected_updates_leave_no_trace_in_the_next_update(codec):
    plain, disturbed = (Federation(state_of(0), *steps(codec)) for _ in range(2))
    for number in range(2):
        for federation in (plain, disturbed):
            federation.run({"a": state_of(number)})
    disturbed.run({"a": state_of(50, scale=30.0)}, is_accepted=False)
    # In the other federation, the client does not take part in the round.
    plain.end_round()
    updates = []
    for federation in (plain, disturbed):
        message = federation.send("a")
        received = federation.receive(message)
        updates.append(federation.reply(received, added(received.state, state_of(9))).to_bytes())
    assert updates[0] == updates[1]
    assert pack(plain.clients) == pack(disturbed.clients)


def test_errors_on_the_way_down_do_not_enter_the_global_state():
    """A client that changes nothing leaves the global state as it is, although it received another state."""
    for steps_of in (steps(Int4()), [EncodeState(Int4()), EncodeUpdate(Float32(), error_feedback=False)]):
        federation = Federation(state_of(0), *steps_of)
        federation.run({"a": {name: torch.zeros(shape) for name, shape in SHAPES.items()}})
        federation.state = before = added(federation.state, state_of(1))
        received = federation.receive(federation.send("a"))
        assert not torch.allclose(received.state["matrix"], before["matrix"], atol=1e-2)
        arrived = federation.arrive(federation.reply(received, received.state))
        torch.testing.assert_close(arrived, before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes_are_restored_and_integers_are_exact(dtype):
    federation = Federation({**state_of(0, dtype=dtype), "count": torch.tensor([2**53 + 1])}, *steps(Int8()))
    for number in range(3):
        received = federation.receive(federation.send("a"))
        trained = added(received.state, {**state_of(number, 0.1, dtype), "count": torch.tensor([1])})
        arrived = federation.arrive(federation.reply(received, trained))
        for state in (received.state, arrived):
            assert [state[name].dtype for name in federation.state] == [v.dtype for v in federation.state.values()]
        assert arrived["count"].tolist() == [2**53 + 2 + number]
        federation.server.accept({"a": number})
        federation.end_round()
        federation.state = arrived


# ---- Lost memories


def test_client_that_lost_its_memory_takes_part_again_after_one_round(caplog):
    federation = Federation(state_of(0), *steps(Int8()))
    for number in range(2):
        federation.run({"a": state_of(number)})
    federation.clients.clear()
    with pytest.raises(ValueError, match=r"'a', round 3: the client lacks the state .* \(accepted_round=1\)"):
        federation.receive(federation.send("a"))
    federation.end_round()
    federation.run({"a": state_of(5)})
    assert "what the codec lost in earlier rounds is not sent" in caplog.text
    federation.run({"a": state_of(6)})


def test_reference_of_another_run_is_an_error():
    federation, other = (Federation(state_of(seed), *steps(Int8())) for seed in (0, 1))
    for each in (federation, other):
        each.run({"a": state_of(2)})
    federation.clients = other.clients
    with pytest.raises(ValueError, match="the client lacks the state to which the changes of the message belong"):
        federation.receive(federation.send("a"))


def test_memory_of_another_checkpoint_is_an_error():
    """The server resumes from a checkpoint in which it knows the update of the first round only."""
    federation = Federation(state_of(0), EncodeUpdate(Int8()))
    for number in range(3):
        federation.run({"a": state_of(number)})
    federation.server.accept({"a": 0})
    with pytest.raises(ValueError, match="EncodeUpdate, of round 1, does not belong to .* accepted_round=0"):
        federation.receive(federation.send("a"))


# ---- Values and tensors that are refused


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: {**state, "row": torch.zeros(300, dtype=torch.float16)},
            "'row' of encoded tensors is torch.fl",
        ),
        (lambda state: {**state, "row": state["row"][1:]}, "'row' of encoded tensors is .* sends"),
        (lambda state: {**state, "matrix": state["matrix"].view(-1).repeat(1000)}, "'matrix' of encoded tensors is"),
        (lambda state: {name: state[name] for name in ("row", "scalar")}, r"hold \[\]; .* sends \['matrix'\]"),
        (lambda state: {**state, "other": state["row"]}, "1 keys are unexpected, the first is 'other'"),
    ],
)
def test_update_of_another_form_is_rejected_by_name(codec, change, message):
    federation = Federation(state_of(0), *steps(codec))
    received = federation.receive(federation.send("a"))
    update = federation.reply(received, received.state)
    update = dataclasses.replace(update, state=change(update.state))
    with pytest.raises(InvalidUpdateError, match=f"Client 'a', round 1.*{message}"):
        check_update(federation.server.receive(update, federation.state, 7), federation.state, {}, ())


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_update_with_values_that_are_not_finite_is_rejected_by_name(codec, value):
    federation = Federation(state_of(0), *steps(codec))
    received = federation.receive(federation.send("a"))
    trained = added(received.state, state_of(1))
    trained["matrix"][3, 4] = value
    update = federation.reply(received, trained)
    with pytest.raises(InvalidUpdateError, match="Client 'a', round 1: 'matrix'"):
        check_update(federation.server.receive(update, federation.state, 7), federation.state, {}, ())


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_message_of_another_form_is_refused_by_a_client(codec):
    federation = Federation(state_of(0), *steps(codec))
    federation.run({"a": state_of(1)})
    message = federation.send("a")
    for state in ({}, {**message.state, "matrix": message.state["matrix"].view(-1)[1:]}):
        with pytest.raises(ValueError, match="'matrix'"):
            federation.receive(dataclasses.replace(message, state=state))


# ---- The configuration


def config(codec, **kwargs) -> FederatedConfig:
    return FederatedConfig(num_rounds=4, exchange_codec=codec, exchange_codec_kwargs=kwargs)


def test_steps_follow_the_direction():
    def names(direction: str, **settings) -> list[str]:
        found = exchange_codec_steps(dataclasses.replace(config("topk", share=0.3, direction=direction), **settings))
        return [f"{type(step).__name__} {step.codec}" for step in found]

    assert names("both") == ["EncodeState TopK(share=0.3)", "EncodeUpdate TopK(share=0.3)"]
    assert names("up") == ["EncodeUpdate TopK(share=0.3)"]
    assert names("down") == ["EncodeState TopK(share=0.3)", "EncodeUpdate Float32()"]
    assert names("down", secure_aggregation="secagg") == ["EncodeState TopK(share=0.3)"]


@pytest.mark.parametrize(
    ("codec", "kwargs", "message"),
    [
        (
            "int9",
            {},
            "`exchange_codec` is 'int9'; did you mean 'int8'? Allowed are 'int8', 'int4', 'topk', 'powersgd'",
        ),
        (None, {"share": 0.1}, "exchange_codec_kwargs={'share': 0.1} is set, but `exchange_codec` is None"),
        ("int8", {"share": 0.1}, "Invalid `exchange_codec_kwargs` of 'int8'"),
        ("topk", {"share": 2}, "`share` is 2; it must be above 0 and at most 1"),
        ("powersgd", {"rank": 0}, "`rank` is 0; it must be at least 1"),
        ("int8", {"direction": "sideways"}, "direction of exchange_codec_kwargs"),
    ],
)
def test_wrong_arguments_are_refused(codec, kwargs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        exchange_codec_steps(config(codec, **kwargs))


def test_instance_is_saved_with_its_arguments_and_the_direction():
    saved = config(TopK(0.3), direction="up").to_dict()
    assert (saved["exchange_codec"], saved["exchange_codec_kwargs"]) == ("topk", {"share": 0.3, "direction": "up"})
    assert repr(exchange_codec_steps(FederatedConfig.from_dict(saved))[0].codec) == "TopK(share=0.3)"


# ---- Runs


def trained(directory, codec, checkpoint: str | None = None, clients_per_round: int = 3, **kwargs) -> FederatedTrainer:
    settings = {"clients_per_round": clients_per_round, "client_store": "disk"}
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(directory, learning_rate=1e-2, save_strategy="steps", save_steps=1),
        train_dataset={name: rows(4, seed=seed) for seed, name in enumerate("abc")},
        engine=LocalEngine(serialize=True),
        federation=dataclasses.replace(config(codec, **kwargs), **settings),
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def test_codec_that_loses_nothing_gives_the_bytes_of_a_run_without_codec(tmp_path):
    plain = trained(tmp_path / "plain", None)
    for name, codec, kwargs in (("share", "topk", {"share": 1.0}), ("32 bits", Float32(), {})):
        exact = trained(tmp_path / name, codec, **kwargs)
        assert same_weights(plain.model, exact.model)
        assert plain.ledger.to_dict() == exact.ledger.to_dict()


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("codec", "kwargs", "clients_per_round"),
    [
        pytest.param("int8", {}, 3, marks=SLOW),
        pytest.param("int4", {"direction": "up"}, 2, marks=SLOW),
        pytest.param("topk", {"share": 0.2}, 2, marks=SLOW),
        ("powersgd", {"rank": 1}, 2),
    ],
)
def test_resumed_run_ends_in_the_same_weights_as_an_uninterrupted_run(tmp_path, codec, kwargs, clients_per_round):
    whole = trained(tmp_path / "whole", codec, clients_per_round=clients_per_round, **kwargs)
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    resumed = trained(tmp_path / "resumed", codec, checkpoint, clients_per_round, **kwargs)
    assert same_weights(whole.model, resumed.model)
    assert whole.ledger.to_dict() == resumed.ledger.to_dict()


def test_codec_reduces_the_bytes_in_the_chosen_direction(tmp_path):
    plain = trained(tmp_path / "plain", None)
    for direction in ("up", "down"):
        encoded = trained(tmp_path / direction, "int8", direction=direction)
        # The first round sends all of the state.
        assert (encoded.ledger.bytes_down < 0.7 * plain.ledger.bytes_down) == (direction != "up")
        assert (encoded.ledger.bytes_up < 0.5 * plain.ledger.bytes_up) == (direction != "down")
        before, exact, lossy = (
            torch.cat([value.flatten() for value in model.state_dict().values()])
            for model in (tiny_model(), plain.model, encoded.model)
        )
        assert 0 < (lossy - exact).norm() < 0.2 * (exact - before).norm()
