"""Postprocessors: order of the steps, clipping, and random numbers."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import arguments, rows, same_weights, tiny_model

from hf_federated import (
    ClipUpdate,
    FedAvg,
    FederatedCallback,
    FederatedConfig,
    FederatedTrainer,
    GaussianNoise,
    Postprocessor,
)
from hf_federated.messages import ClientUpdate, Fit
from hf_federated.messages.validation import InvalidUpdateError
from hf_federated.postprocessing import (
    run_client_receive,
    run_client_send,
    run_on_sums,
    run_server_receive,
    run_server_send,
)
from hf_federated.utils.random import derived_seed, isolated_rng


SENT = Fit(round=0, client_id="a", seed=0, state={"w": torch.tensor([1.0, -2.0]), "b": torch.tensor([0.5])})


def reply(**state):
    return ClientUpdate(0, "a", state, num_examples=3, num_tokens=5, num_steps=2, metrics={"loss": 1.0})


class Scale(Postprocessor):
    """Multiplies on the client and adds on the server. The operations do not commute."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def client_send(self, update, message, memory):
        return dataclasses.replace(update, state={name: v * self.factor for name, v in update.state.items()})

    def server_receive(self, update, state, memory):
        return dataclasses.replace(update, state={name: v + self.factor for name, v in update.state.items()})


class Square(Postprocessor):
    def client_send(self, update, message, memory):
        return dataclasses.replace(update, state={name: v**2 for name, v in update.state.items()})

    server_receive = client_send


def test_updates_are_changed_in_order_by_the_client_and_in_reverse_by_the_server():
    steps = [Scale(3.0), Square()]
    update = reply(w=torch.tensor([2.0]))
    assert run_client_send(steps, update, SENT, {}).state["w"].item() == (2.0 * 3.0) ** 2
    assert run_server_receive(steps, update, SENT.state, seed=0, memories={}).state["w"].item() == 2.0**2 + 3.0


def test_no_steps_return_the_same_object():
    update = reply(w=torch.ones(2))
    assert run_client_send([], update, SENT, {}) is update
    assert run_server_receive([], update, SENT.state, seed=0, memories={}) is update


def test_base_class_changes_nothing():
    update = reply(w=torch.ones(2))
    assert Postprocessor().client_send(update, SENT, {}) is update
    assert Postprocessor().server_receive(update, SENT.state, {}) is update
    assert Postprocessor().server_send(SENT, {}) is Postprocessor().client_receive(SENT, {}) is SENT
    assert not Postprocessor().changes_requests


def test_large_change_is_clipped_by_the_norm_over_all_tensors():
    change = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([-4.0])}
    update = reply(**{name: SENT.state[name] + change[name] for name in change})
    clipped = ClipUpdate(max_norm=2.0).client_send(update, SENT, {})
    for name in change:
        expected = SENT.state[name] + change[name] * (2.0 / 5.0)
        torch.testing.assert_close(clipped.state[name], expected, rtol=0, atol=1e-6)
    norm = torch.cat([clipped.state[name] - SENT.state[name] for name in change]).norm()
    assert norm.item() == pytest.approx(2.0, abs=1e-6)
    assert dataclasses.replace(clipped, state={}) == dataclasses.replace(update, state={})


def test_small_change_is_returned_bit_for_bit():
    update = reply(w=SENT.state["w"] + 0.1, b=SENT.state["b"])
    assert ClipUpdate(max_norm=1.0).client_send(update, SENT, {}) is update


def test_clipping_ignores_integer_tensors():
    sent = Fit(0, "a", 0, {"w": torch.zeros(2), "count": torch.tensor(1)})
    update = reply(w=torch.tensor([0.0, 8.0]), count=torch.tensor(1_000_000))
    clipped = ClipUpdate(max_norm=2.0).client_send(update, sent, {})
    assert clipped.state["w"].tolist() == [0.0, 2.0]
    assert clipped.state["count"].item() == 1_000_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_clipping_keeps_the_dtype(dtype):
    sent = Fit(0, "a", 0, {"w": torch.zeros(2, dtype=dtype)})
    clipped = ClipUpdate(max_norm=1.0).client_send(reply(w=torch.tensor([3.0, 4.0], dtype=dtype)), sent, {})
    assert clipped.state["w"].dtype == dtype
    torch.testing.assert_close(clipped.state["w"].double(), torch.tensor([0.6, 0.8]).double(), rtol=0, atol=3e-3)


def test_clipping_keeps_nan_values():
    clipped = ClipUpdate(max_norm=1.0).client_send(reply(w=torch.tensor([float("nan"), 1.0])), SENT, {})
    assert clipped.state["w"].isnan().any()


def test_server_rejects_an_update_that_was_not_clipped():
    state = {"w": torch.zeros(2)}
    for length, is_clipped in ((1.0, True), (1.005, True), (1.02, False), (1e30, False)):
        update = ClientUpdate(4, "a", {"w": torch.tensor([length, 0.0])}, num_examples=1, num_tokens=0, num_steps=1)
        if is_clipped:
            assert run_server_receive([ClipUpdate(1.0)], update, state, 0, {}) is update
            continue
        with pytest.raises(InvalidUpdateError, match=r"^Client 'a', round 5: the norm .* ClipUpdate\(max_norm=1\)"):
            run_server_receive([ClipUpdate(1.0)], update, state, 0, {})
        # The norm of noise is larger. Noise before the clipping is clipped.
        assert run_server_receive([ClipUpdate(1.0), GaussianNoise(1.0)], update, state, 0, {}) is update
        with pytest.raises(InvalidUpdateError):
            run_server_receive([GaussianNoise(1.0), ClipUpdate(1.0)], update, state, 0, {})


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan")])
def test_max_norm_must_be_positive(max_norm):
    with pytest.raises(ValueError, match=f"`max_norm` is {max_norm}; it must be positive"):
        ClipUpdate(max_norm=max_norm)


def test_updates_of_a_federated_run_are_clipped(tmp_path):
    class Norms(FederatedCallback):
        """Record the norm of the change of each accepted update."""

        norms: list[float] = []

        def on_client_end(self, args, state, control, update, round=None, **kwargs):
            changes = [update.state[name] - round.state[name] for name in round.state]
            self.norms.append(torch.cat([change.flatten() for change in changes]).norm().item())

    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset={"a": rows(4), "b": rows(4, seed=1)},
        callbacks=[Norms()],
        postprocessors=[ClipUpdate(max_norm=0.01)],
        federation=FederatedConfig(num_rounds=1),
    )
    trainer.train()
    assert Norms.norms == pytest.approx([0.01, 0.01], rel=1e-3)


# ---- Messages to clients, sums, and memories


class Remember(Postprocessor):
    """Record the order of all calls. Count the calls of each method in the memory."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def _call(self, method: str, value, memory):
        self.calls.append(f"{self.name}.{method}")
        memory[method] = memory.get(method, 0) + 1
        return value

    def server_send(self, message, memory):
        return self._call("server_send", message, memory)

    def client_receive(self, message, memory):
        return self._call("client_receive", message, memory)

    def client_send(self, update, message, memory):
        return self._call("client_send", update, memory)

    def server_receive(self, update, state, memory):
        return self._call("server_receive", update, memory)

    def on_sums(self, sums, round, memory):
        return self._call(f"on_sums of round {round.number}", sums, memory)


ROUND = SimpleNamespace(number=3, cohort=("a",), state=SENT.state)


def test_steps_run_in_their_order_in_both_directions_and_keep_their_memories():
    calls: list[str] = []
    steps = [Remember("first", calls), Scale(1.0), Remember("last", calls)]
    server: dict[str, dict] = {}
    client: dict[str, dict] = {}
    common: dict[str, dict] = {}
    update = reply(w=torch.ones(2))
    for _ in range(2):
        message = run_client_receive(steps, run_server_send(steps, SENT, server), client)
        sent = run_client_send(steps, update, message, client)
        run_server_receive(steps, sent, SENT.state, SENT.seed, server)
        run_on_sums(steps, FedAvg().accumulator(SENT.state), ROUND, 0, common)
    assert calls[:10] == calls[10:] == [
        "first.server_send", "last.server_send", "last.client_receive", "first.client_receive",
        "first.client_send", "last.client_send", "last.server_receive", "first.server_receive",
        "first.on_sums of round 3", "last.on_sums of round 3",
    ]  # fmt: skip
    # `Scale` has no memory.
    assert server == {key: {"server_send": 2, "server_receive": 2} for key in ("0 Remember", "2 Remember")}
    assert client == {key: {"client_receive": 2, "client_send": 2} for key in ("0 Remember", "2 Remember")}
    assert common == {key: {"on_sums of round 3": 2} for key in ("0 Remember", "2 Remember")}


def test_memories_stay_as_they_were_after_an_error():
    class Fails(Postprocessor):
        def client_send(self, update, message, memory):
            raise RuntimeError("no")

    memories = {"0 Remember": {"client_send": 1}}
    with pytest.raises(RuntimeError):
        run_client_send([Remember("a", []), Fails()], reply(), SENT, memories)
    assert memories == {"0 Remember": {"client_send": 1}}


def test_emptied_memory_is_removed():
    class Forget(Postprocessor):
        def client_send(self, update, message, memory):
            memory.clear()
            return update

    memories = {"0 Forget": {"kept": 1}}
    run_client_send([Forget()], reply(), SENT, memories)
    assert memories == {}


@pytest.mark.parametrize("method", ["server_send", "client_receive"])
def test_step_that_changes_messages_to_clients_is_recognized(method):
    step = type("Step", (Postprocessor,), {method: lambda self, message, memory: message})()
    assert step.changes_requests


def test_noise_on_the_sums_reaches_the_new_state():
    class CentralNoise(Postprocessor):
        def on_sums(self, sums, round, memory):
            mean = sums.mean.finalize()
            noisy = FedAvg().accumulator(round.state)
            noisy.add(reply(**{name: value + torch.randn_like(value) for name, value in mean.items()}))
            return noisy

    def aggregated(steps, seed):
        sums = FedAvg().accumulator(SENT.state)
        for client_id, value in (("a", 1.0), ("b", 3.0)):
            state = {name: torch.full_like(tensor, value) for name, tensor in SENT.state.items()}
            sums.add(ClientUpdate(3, client_id, state, num_examples=1, num_tokens=0, num_steps=1))
        return FedAvg().aggregate(run_on_sums(steps, sums, ROUND, seed, {}), SENT.state)

    assert {name: value.tolist() for name, value in aggregated([], 0).items()} == {"w": [2.0, 2.0], "b": [2.0]}
    noisy, again, other = (aggregated([CentralNoise()], seed)["w"] for seed in (0, 0, 1))
    with isolated_rng(derived_seed(derived_seed(0, 3), "sums")):
        torch.testing.assert_close(noisy, 2 + torch.randn(2))
    assert torch.equal(noisy, again)
    assert not torch.equal(noisy, other)


# ---- Random numbers


def test_each_direction_has_its_own_random_numbers():
    """A message and an update of the same seed must not get the same noise."""

    class Draw(Postprocessor):
        drawn: list[float] = []

        def draw(self, value, *_):
            self.drawn.append(torch.rand(()).item())
            return value

        server_send = client_receive = client_send = server_receive = on_sums = draw

    run_server_send([Draw()], SENT, {})
    run_client_receive([Draw()], SENT, {})
    run_client_send([Draw()], reply(), SENT, {})
    run_server_receive([Draw()], reply(), SENT.state, SENT.seed, {})
    run_on_sums([Draw()], FedAvg().accumulator(SENT.state), ROUND, SENT.seed, {})
    assert len(set(Draw.drawn)) == 5
    expected = []
    for purpose in ("client side", "server side"):
        with isolated_rng(derived_seed(SENT.seed, purpose)):
            expected.append(torch.rand(()).item())
    assert Draw.drawn[2:4] == expected  # as in 0.1


class NoiseRecorder(Postprocessor):
    """Record the random numbers that both sides draw from each global generator."""

    def __init__(self) -> None:
        self.drawn: dict[str, list[tuple[float, float, float]]] = {"client": [], "server": []}

    def draw(self, side: str) -> None:
        self.drawn[side].append((torch.rand(()).item(), float(np.random.rand()), random.random()))

    def client_send(self, update, message, memory):
        self.draw("client")
        return update

    def server_receive(self, update, state, memory):
        self.draw("server")
        return update


def trained_with(tmp_path, *steps: Postprocessor, clients=("a", "b"), **federation) -> FederatedTrainer:
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset={name: rows(4) for name in clients},
        postprocessors=steps,
        federation=FederatedConfig(num_rounds=2, **federation),
    )
    trainer.train()
    return trainer


def test_random_numbers_are_distinct_and_reproducible(tmp_path):
    first, second, other = NoiseRecorder(), NoiseRecorder(), NoiseRecorder()
    trained_with(tmp_path, first)
    torch.rand(3), np.random.rand(3), random.random()
    trained_with(tmp_path, second)
    trained_with(tmp_path, other, federation_seed=7)
    assert first.drawn == second.drawn
    draws = [draw for noise in (first, other) for side in noise.drawn.values() for draw in side]
    assert len(draws) == 2 * 2 * 4
    assert all(len(set(numbers)) == len(draws) for numbers in zip(*draws, strict=True))


def test_random_numbers_of_a_client_do_not_depend_on_other_clients(tmp_path):
    pair, three = NoiseRecorder(), NoiseRecorder()
    trained_with(tmp_path, pair, clients=("b", "c"))
    trained_with(tmp_path, three, clients=("a", "b", "c"))
    for side in ("client", "server"):
        assert three.drawn[side][1:3] + three.drawn[side][4:] == pair.drawn[side]


@pytest.mark.parametrize("clients", [("a",), ("a", "b")])
def test_postprocessors_do_not_change_other_random_numbers(tmp_path, clients):
    """A single client trains with the global generators, as the plain Trainer does."""
    quiet = trained_with(tmp_path, clients=clients)
    drawn_after = torch.rand(3), np.random.rand(3), random.random()
    noisy = trained_with(tmp_path, NoiseRecorder(), clients=clients)
    assert same_weights(quiet.model, noisy.model)
    assert torch.equal(drawn_after[0], torch.rand(3)) and (drawn_after[1] == np.random.rand(3)).all()
    assert drawn_after[2] == random.random()
