"""`QuantizeChanges`: both directions against float64 arithmetic, error feedback, rejected updates, lost memories."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from tiny import arguments, rows, same_weights, tiny_model

from hf_federated import ClipUpdate, FederatedConfig, FederatedTrainer, QuantizeChanges
from hf_federated.engines import LocalEngine
from hf_federated.messages import ClientUpdate, Fit
from hf_federated.messages.serialization import pack, unpack
from hf_federated.messages.validation import InvalidUpdateError, check_update
from hf_federated.postprocessing import (
    Postprocessor,
    SendChanges,
    run_client_receive,
    run_client_send,
    run_server_receive,
    run_server_send,
)


State = dict[str, torch.Tensor]
Memories = dict[str, dict[str, Any]]
KEY = "0 QuantizeChanges"
SHAPES = {"matrix": (30, 20), "row": (70,), "scalar": ()}


def state_of(seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {name: (scale * torch.randn(shape, generator=generator)).to(dtype) for name, shape in SHAPES.items()}


def added(state: State, change: State) -> State:
    return {name: value + change[name] for name, value in state.items()}


class Conversation:
    """
    A server and one client. All messages and memories are serialized between two calls.

    Args:
        state (`dict[str, torch.Tensor]`): The global state.
        steps (`Postprocessor`): The steps.
    """

    def __init__(self, state: State, *steps: Postprocessor) -> None:
        self.state, self.steps = state, steps
        self.server: Memories = {}
        self.client: Memories = {}
        self.round = 0
        self.accepted_round: int | None = None

    def send(self) -> Fit:
        """Send the global state. Return the message on the wire."""
        message = Fit(self.round, "a", self.round, self.state, accepted_round=self.accepted_round)
        self.sent = run_server_send(self.steps, message, self.server)
        self.server = unpack(pack(self.server))
        return Fit.from_bytes(self.sent.to_bytes())

    def receive(self, message: Fit) -> Fit:
        """Return the message that the client uses for training."""
        received = run_client_receive(self.steps, message, self.client)
        self.client = unpack(pack(self.client))
        return received

    def reply(self, message: Fit, state: State) -> ClientUpdate:
        """Send the trained state of the client. Return the update on the wire."""
        update = ClientUpdate(self.round, "a", state, num_examples=1, num_tokens=0, num_steps=1)
        update = run_client_send(self.steps, update, message, self.client)
        self.client = unpack(pack(self.client))
        return ClientUpdate.from_bytes(update.to_bytes())

    def arrive(self, update: ClientUpdate) -> State:
        """Return the state that the server aggregates."""
        arrived = run_server_receive(self.steps, update, self.state, self.round, self.server).state
        self.server = unpack(pack(self.server))
        return arrived

    def run(self, change: State, is_accepted: bool = True) -> State:
        """Run a round in which the client changes its state, and return what the server aggregates."""
        received = self.receive(self.send())
        arrived = self.arrive(self.reply(received, added(received.state, change)))
        if is_accepted:
            self.state, self.accepted_round = arrived, self.round
        self.round += 1
        return arrived


# ---- Values


def decoded(packed: torch.Tensor, shape: tuple[int, ...], bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Decode a sent tensor of bytes with numpy in float64. Return the values and half of a step for each value."""
    num_values = math.prod(shape)
    width = max(1, min(num_values, 256))
    group = width if bits == 8 else 64
    num_groups = math.ceil(width / group)
    values, half_steps = [], []
    for row in packed.numpy():
        scales = row[: 4 * num_groups].copy().view(np.float32).astype(np.float64)
        zeros = row[4 * num_groups : 8 * num_groups].copy().view(np.float32).astype(np.float64)
        integers = row[8 * num_groups :]
        if bits == 8:
            integers = integers.view(np.int8).astype(np.float64) + 128
        else:
            integers = np.stack([integers & 15, integers >> 4], axis=1).reshape(-1)[:width].astype(np.float64)
        scale, zero = (np.repeat(numbers, group)[:width] for numbers in (scales, zeros))
        values.append(zero + scale * integers)
        half_steps.append(scale / 2)
    return tuple(np.concatenate(parts)[:num_values].reshape(shape) for parts in (values, half_steps))


@pytest.mark.parametrize("bits", [8, 4])
def test_states_and_residuals_of_several_rounds_equal_float64_arithmetic(bits):
    """The update of the third round is rejected, and the update of the fifth round does not arrive."""
    talk = Conversation(state_of(0), QuantizeChanges(bits))
    known: dict[str, np.ndarray] = {}
    residual = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for round in range(8):
        talk.round = round
        state = {name: value.double().numpy() for name, value in talk.state.items()}
        message = talk.send()
        received = talk.receive(message)
        expected = {}
        for name, shape in SHAPES.items():
            if not known:
                assert torch.equal(message.state[name], talk.state[name])
                expected[name] = state[name]
                continue
            change, half_steps = decoded(message.state[name], shape, bits)
            assert (abs(change - (state[name] - known[name])) <= half_steps + 1e-6).all()
            expected[name] = known[name] + change
        trained = added(received.state, state_of(10 + round, scale=0.1))
        update = talk.reply(received, trained)
        arrived = None if round == 4 else talk.arrive(update)
        next_residual = {}
        for name, shape in SHAPES.items():
            np.testing.assert_allclose(received.state[name].double().numpy(), expected[name], rtol=0, atol=2e-6)
            wanted = trained[name].double().numpy() - expected[name] + residual[name]
            change, half_steps = decoded(update.state[name], shape, bits)
            assert (abs(change - wanted) <= half_steps + 2e-6).all()
            next_residual[name] = wanted - change
            if arrived is not None:
                np.testing.assert_allclose(arrived[name].double().numpy(), state[name] + change, rtol=0, atol=2e-6)
        if round not in (2, 4):
            known, residual = expected, next_residual
            talk.state, talk.accepted_round = arrived, round
        else:  # The other clients change the global state.
            talk.state = added(talk.state, state_of(20 + round, scale=0.1))
    assert known and any(value.any() for value in residual.values())


@pytest.mark.parametrize(("bits", "ratio"), [(8, 3.8), (4, 6.2)])
def test_messages_take_a_quarter_or_a_sixth_of_the_bytes_in_both_directions(bits, ratio):
    state = {name: torch.randn(256, 300) for name in ("a", "b")}
    talk = Conversation(state, QuantizeChanges(bits))
    talk.run(state)
    message = talk.send()
    update = talk.reply(talk.receive(message), talk.state)
    full = Fit(1, "a", 1, state).num_bytes
    assert full / message.num_bytes > ratio and full / update.num_bytes > ratio


@pytest.mark.parametrize("bits", [8, 4])
def test_error_feedback_lets_the_sum_of_sent_changes_follow_the_true_sum(bits):
    """Small changes next to a large one are lost in each round without feedback."""
    change = {"w": torch.cat([torch.tensor([1.0, 0.0]), torch.full((62,), 0.2 / (255 if bits == 8 else 15))])}
    with_feedback, without = (Conversation({"w": torch.zeros(64)}, QuantizeChanges(bits)) for _ in range(2))
    for _ in range(30):
        for talk in (with_feedback, without):
            talk.run(change)
        without.client[KEY]["next_residual"] = {}
    step = 1.0 / (255 if bits == 8 else 15)
    true = 30 * change["w"]
    assert (with_feedback.state["w"] - true).abs().max() <= 1.1 * step
    assert (without.state["w"] - true).abs().max() > 5 * step


@pytest.mark.parametrize("bits", [8, 4])
def test_state_of_the_client_follows_the_global_state_without_drift(bits):
    talk = Conversation(state_of(0), QuantizeChanges(bits))
    talk.run(state_of(1))
    errors = []
    for round in range(20):
        message = talk.send()
        received = talk.receive(message)
        errors.append((received.state["matrix"] - talk.state["matrix"]).abs().max().item())
        talk.arrive(talk.reply(received, received.state))
        talk.accepted_round, talk.round = talk.round, talk.round + 1
        talk.state = added(talk.state, state_of(30 + round, scale=0.1))
    largest_change = 0.1 * 8  # Normal values, and the error of the round before.
    assert max(errors) <= largest_change / (255 if bits == 8 else 15)
    # A constant global state arrives exactly, up to rounding, because each round sends what the last one lost.
    for _ in range(8):
        received = talk.receive(talk.send())
        talk.arrive(talk.reply(received, received.state))
        talk.accepted_round, talk.round = talk.round, talk.round + 1
    assert (received.state["matrix"] - talk.state["matrix"]).abs().max() < 1e-5


def test_errors_on_the_way_down_do_not_enter_the_global_state():
    """A client that changes nothing leaves the global state as it is, although it received another state."""
    talk = Conversation(state_of(0), QuantizeChanges(4))
    talk.run({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    talk.state = before = added(talk.state, state_of(1))
    received = talk.receive(talk.send())
    assert not torch.allclose(received.state["matrix"], before["matrix"], atol=1e-2)
    arrived = talk.arrive(talk.reply(received, received.state))
    torch.testing.assert_close(arrived, before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes_are_restored_and_integers_are_exact(dtype):
    talk = Conversation({**state_of(0, dtype), "count": torch.tensor([2**53 + 1])}, QuantizeChanges())
    change: State = {**state_of(1, dtype, 0.1), "count": torch.tensor([1])}
    for round in range(3):
        received = talk.receive(talk.send())
        trained = added(received.state, change)
        arrived = talk.arrive(talk.reply(received, trained))
        for state in (received.state, arrived):
            assert [state[name].dtype for name in talk.state] == [value.dtype for value in talk.state.values()]
        assert received.state["count"].tolist() == [2**53 + 1 + round]
        assert arrived["count"].tolist() == [2**53 + 2 + round]
        tolerance = {torch.bfloat16: 0.03, torch.float16: 4e-3, torch.float64: 2e-3}[dtype]
        torch.testing.assert_close(arrived["matrix"], trained["matrix"], rtol=tolerance, atol=tolerance)
        talk.state, talk.accepted_round, talk.round = arrived, round, round + 1


def test_change_of_bfloat16_values_is_not_rounded_to_bfloat16():
    talk = Conversation({"w": torch.tensor([256.0], dtype=torch.bfloat16)}, QuantizeChanges())
    received = talk.receive(talk.send())
    # The change of -255.5 is -256 in bfloat16. A block of one value is exact.
    assert talk.arrive(talk.reply(received, {"w": torch.tensor([0.5], dtype=torch.bfloat16)}))["w"].tolist() == [0.5]


def test_transposed_parameters_are_sent_in_both_directions():
    """The change of a parameter has the memory layout of the parameter."""
    talk = Conversation({"w": torch.randn(4, 300).t()}, QuantizeChanges())
    for _ in range(3):
        before, change = talk.state, {"w": torch.randn(4, 300).t()}
        talk.run(change)
        torch.testing.assert_close(talk.state["w"] - before["w"], change["w"], rtol=0, atol=0.05)


# ---- Rejected updates and lost memories


@pytest.mark.parametrize("num_accepted", [0, 2])
def test_rejected_updates_leave_no_trace(num_accepted):
    plain, disturbed = (Conversation(state_of(0), QuantizeChanges(4)) for _ in range(2))
    for round in range(num_accepted):
        plain.run(state_of(1 + round))
        disturbed.run(state_of(1 + round))
    for attempt in range(2):
        disturbed.run(state_of(50 + attempt, scale=30.0), is_accepted=False)
    message = disturbed.send()  # The client does not receive this message.
    disturbed.round += 1
    plain.round = disturbed.round
    message = plain.send()
    assert disturbed.send().to_bytes() == message.to_bytes()
    received = [talk.receive(message) for talk in (plain, disturbed)]
    update = plain.reply(received[0], added(received[0].state, state_of(9)))
    assert disturbed.reply(received[1], added(received[1].state, state_of(9))).to_bytes() == update.to_bytes()
    assert pack(disturbed.client) == pack(plain.client) and pack(disturbed.server) == pack(plain.server)


def test_lost_memory_of_the_client_is_an_error():
    talk = Conversation(state_of(0), QuantizeChanges())
    talk.run(state_of(1))
    talk.client = {}
    with pytest.raises(ValueError, match="Client 'a', round 2: the memory of QuantizeChanges, of round None"):
        talk.receive(talk.send())


def test_lost_memory_of_the_server_is_an_error():
    talk = Conversation(state_of(0), QuantizeChanges())
    talk.run(state_of(1))
    talk.server = {}
    with pytest.raises(ValueError, match="accepted_round=0. Resume the server and the client"):
        talk.send()


def test_server_of_an_older_checkpoint_is_an_error():
    talk = Conversation(state_of(0), QuantizeChanges())
    talk.run(state_of(1))
    kept = (talk.state, talk.server, talk.accepted_round, talk.round)
    talk.run(state_of(2))
    talk.run(state_of(3))
    talk.state, talk.server, talk.accepted_round, talk.round = kept
    with pytest.raises(ValueError, match="of round 1, does not belong to the message with accepted_round=0"):
        talk.receive(talk.send())


def test_memory_of_another_run_is_an_error():
    """The rounds are equal, but the values of the states are not."""
    talk, other = (Conversation(state_of(seed), QuantizeChanges()) for seed in (0, 1))
    for conversation in (talk, other):
        conversation.run(state_of(2))
    talk.client = other.client
    with pytest.raises(ValueError, match="does not belong to the message"):
        talk.receive(talk.send())


def test_client_without_the_step_on_its_server_is_an_error():
    with pytest.raises(ValueError, match="does not belong to the message"):
        run_client_receive([QuantizeChanges()], Fit(0, "a", 0, state_of(0)), {})


def test_memories_stay_as_they_were_if_the_model_changes_in_place():
    """The tensors of the first message may be the parameters of the server's model."""
    state = state_of(0)
    talk = Conversation(state, QuantizeChanges())
    message = run_server_send(talk.steps, Fit(0, "a", 0, state), talk.server)
    kept = pack(talk.server)
    for value in state.values():
        value.mul_(2)
    assert pack(talk.server) == kept
    assert torch.equal(message.state["row"], state["row"] / 2)


# ---- Values and tensors that are refused


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_update_with_values_that_are_not_finite_is_rejected_by_name(value):
    talk = Conversation(state_of(0), QuantizeChanges())
    received = talk.receive(talk.send())
    trained = added(received.state, state_of(1))
    trained["matrix"][3, 4] = value
    with pytest.raises(InvalidUpdateError, match="Client 'a', round 1: 'matrix' has NaN or infinite values"):
        talk.arrive(talk.reply(received, trained))
    talk.round = 1
    # The residual of the rejected update is dropped.
    change = state_of(2)
    arrived = talk.run(change)
    torch.testing.assert_close(arrived, added(talk.sent.state, change), rtol=0, atol=0.1)


@pytest.mark.parametrize("num_rounds", [0, 1])
def test_global_state_with_nan_is_refused_by_name(num_rounds):
    talk = Conversation(state_of(0), QuantizeChanges())
    for _ in range(num_rounds):
        talk.run(state_of(1))
    talk.state["row"][5] = math.nan
    with pytest.raises(ValueError, match="'row' has NaN or infinite values"):
        talk.receive(talk.send())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {**state, "row": torch.zeros(70)}, r"'row' of encoded tensors is torch.float32"),
        (lambda state: {**state, "row": state["row"][:, 1:]}, r"'row' .* of shape \(1, 77\); .* of shape \(1, 78\)"),
        (lambda state: {name: state[name] for name in ("row", "scalar")}, "the first is 'matrix'"),
        (lambda state: {**state, "other": state["row"]}, "1 keys are unexpected, the first is 'other'"),
    ],
)
def test_update_of_another_form_is_rejected_by_name(change, message):
    talk = Conversation(state_of(0), QuantizeChanges())
    received = talk.receive(talk.send())
    update = talk.reply(received, received.state)
    update = dataclasses.replace(update, state=change(update.state))
    with pytest.raises(InvalidUpdateError, match=f"Client 'a', round 1.*{message}"):
        arrived = run_server_receive(talk.steps, update, talk.state, 0, talk.server)
        check_update(arrived, talk.state, {}, ())


def test_bits_must_be_8_or_4():
    with pytest.raises(ValueError, match="`bits` is 16; it must be 8 or 4"):
        QuantizeChanges(16)


# ---- Together with other steps


def test_clipped_changes_are_quantized_and_checked():
    talk = Conversation(state_of(0), ClipUpdate(max_norm=1.0), QuantizeChanges())
    for _ in range(3):
        before = talk.state
        talk.run(state_of(1))
        change = torch.cat([(talk.state[name] - before[name]).flatten() for name in SHAPES])
        assert change.norm().item() == pytest.approx(1.0, abs=0.01)
    with pytest.raises(InvalidUpdateError, match="ClipUpdate"):
        received = talk.receive(talk.send())
        update = ClientUpdate(talk.round, "a", added(received.state, state_of(1)), 1, 0, 1)
        talk.arrive(QuantizeChanges().client_send(update, received, {}))


@pytest.mark.parametrize("shape", [(30, 20), (2, 160)])
def test_exchange_dtype_narrows_only_what_is_not_quantized(shape):
    """In 4 bits, the bytes of a tensor of shape (2, 160) have the shape of the tensor."""
    talk = Conversation({"w": torch.zeros(shape)}, QuantizeChanges(4), SendChanges(torch.bfloat16))
    for _ in range(3):
        before, change = talk.state, {"w": torch.randn(shape)}
        talk.run(change)
        torch.testing.assert_close(talk.state["w"] - before["w"], change["w"], rtol=0, atol=0.5)


# ---- A run


def trained(directory, store: str, *steps: Postprocessor, checkpoint: str | None = None) -> FederatedTrainer:
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(directory, learning_rate=1e-2, save_strategy="steps", save_steps=1),
        train_dataset={name: rows(4, seed=seed) for seed, name in enumerate("abc")},
        postprocessors=steps,
        engine=LocalEngine(serialize=True),
        federation=FederatedConfig(num_rounds=4, clients_per_round=2, client_store=store),
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_resumed_run_ends_in_the_same_weights_as_an_uninterrupted_run(tmp_path, store):
    plain = trained(tmp_path / "plain", store)
    whole = trained(tmp_path / "whole", store, QuantizeChanges())
    resumed = trained(
        tmp_path / "resumed", store, QuantizeChanges(), checkpoint=str(tmp_path / "whole" / "checkpoint-2")
    )
    assert same_weights(whole.model, resumed.model)
    assert whole.ledger.to_dict() == resumed.ledger.to_dict()
    assert whole.ledger.bytes_up < plain.ledger.bytes_up / 2
    start, exact, quantized = (
        torch.cat([value.flatten() for value in model.state_dict().values()])
        for model in (tiny_model(), plain.model, whole.model)
    )
    assert 0 < (quantized - exact).norm() < 0.1 * (exact - start).norm()
