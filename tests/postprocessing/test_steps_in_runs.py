"""Postprocessors in a run: their memories on both sides, the sums of a round, resumes and rejected updates."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from federations import CLIENTS, build_federation
from tiny import same_weights

from hf_federated import FederatedCallback, Postprocessor
from hf_federated.engines import LocalEngine
from hf_federated.messages import ClientUpdate
from hf_federated.server import StepMemories


class Counting(Postprocessor):
    """Counts the messages on each side, and changes the numbers of the run by the counts."""

    def server_send(self, message, memory):
        memory["sent"] = memory.get("sent", 0) + 1
        return dataclasses.replace(message, settings={**message.settings, "sent": memory["sent"]})

    def client_receive(self, message, memory):
        memory["received"] = torch.tensor(float(message.settings["sent"])) + memory.get("received", 0)
        return message

    def client_send(self, update, message, memory):
        state = {name: self._shift(value, memory["received"]) for name, value in update.state.items()}
        return dataclasses.replace(update, state=state)

    def server_receive(self, update, state, memory):
        memory["arrived"] = [*memory.get("arrived", []), update.round]
        return update

    def on_sums(self, sums, round, memory):
        memory["rounds"] = memory.get("rounds", 0) + 1
        shift = torch.randn(()) * 1e-3 * memory["rounds"]
        means = sums.mean.finalize(wide=True)
        sums.means["state"] = type(sums.mean)(round.state)
        sums.means["state"].add({name: (value + shift).to(round.state[name]) for name, value in means.items()}, 1.0)
        return sums

    def _shift(self, value, count):
        return value + 1e-4 * count if value.is_floating_point() else value


class Messages(FederatedCallback):
    """Keeps what the server sends to the clients."""

    def __init__(self):
        self.messages = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.first = True

    def on_round_begin(self, args, state, control, round, **kwargs):
        if self.first:
            self.first = False
            worker = self.trainer.engine.worker
            handle = worker.handle
            worker.handle = lambda message: self.messages.append(message) or handle(message)


def train(directory, num_rounds=3, resume=None, engine=None, callbacks=(), **federation):
    trainer = build_federation(
        directory,
        num_rounds=num_rounds,
        federation=federation,
        trainer={"postprocessors": [Counting()], "engine": engine, "callbacks": list(callbacks)},
        save_strategy="steps",
        save_steps=1,
    )
    for callback in callbacks:
        callback.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("client_store", ["memory", "disk"])
@pytest.mark.parametrize("checkpoint", [1, 2])
def test_resumed_run_continues_all_memories(tmp_path, client_store, checkpoint) -> None:
    whole = train(tmp_path / "whole", client_store=client_store, clients_per_round=2)
    path = str(tmp_path / "whole" / f"checkpoint-{checkpoint}")
    resumed = train(tmp_path / "resumed", resume=path, client_store=client_store, clients_per_round=2)
    assert same_weights(whole.model, resumed.model)
    assert whole.ledger.to_dict() == resumed.ledger.to_dict()


def test_serialized_messages_give_the_same_result(tmp_path) -> None:
    direct = train(tmp_path / "direct")
    serialized = train(tmp_path / "serialized", engine=LocalEngine(serialize=True))
    assert same_weights(direct.model, serialized.model)


def test_client_and_server_keep_their_own_memory_of_each_client(tmp_path) -> None:
    messages = Messages()
    trainer = train(tmp_path, callbacks=[messages])
    assert [message.settings["sent"] for message in messages.messages] == [1] * 3 + [2] * 3 + [3] * 3
    for client_id in CLIENTS:
        memory = trainer.engine.worker.models.get_state(client_id)["steps"]["0 Counting"]
        assert memory["received"].item() == 1 + 2 + 3


def test_next_message_names_the_last_round_whose_update_was_used(tmp_path) -> None:
    class FailsOnce(Counting):
        def client_send(self, update, message, memory):
            update = super().client_send(update, message, memory)
            if (update.client_id, update.round) == ("south", 1):
                return dataclasses.replace(update, state={name: value * 0 for name, value in update.state.items()})
            return update

        def check_update(self, update, state):
            if not any(value.any() for value in update.state.values()):
                raise ValueError("it is zero")

    messages = Messages()
    trainer = build_federation(
        tmp_path, num_rounds=4, trainer={"postprocessors": [FailsOnce()], "callbacks": [messages]}
    )
    messages.trainer = trainer
    trainer.train()
    accepted = {name: [m.accepted_round for m in messages.messages if m.client_id == name] for name in CLIENTS}
    assert accepted["south"] == [None, 0, 0, 2]
    assert accepted["north"] == accepted["west"] == [None, 0, 1, 2]


def test_steps_change_the_sums_before_the_aggregation(tmp_path) -> None:
    class AddsOne(Postprocessor):
        def on_sums(self, sums, round, memory):
            mean = sums.mean.finalize()
            sums.means["state"] = type(sums.mean)(round.state)
            sums.means["state"].add({name: value + 1 for name, value in mean.items()}, 1.0)
            return sums

    plain = build_federation(tmp_path / "plain", num_rounds=1)
    plain.train()
    changed = build_federation(tmp_path / "changed", num_rounds=1, trainer={"postprocessors": [AddsOne()]})
    changed.train()
    for name, value in plain.exchange.read().items():
        torch.testing.assert_close(changed.exchange.read()[name], value + 1)


def test_server_forgets_a_memory_that_a_step_empties() -> None:
    class Toggling(Postprocessor):
        def server_receive(self, update, state, memory):
            memory.clear() if memory else memory.update(received=1)
            return update

    memories = StepMemories([Toggling()])
    update = ClientUpdate(0, "north", {}, num_examples=1, num_tokens=0, num_steps=1)
    kept = []
    for _ in range(3):
        memories.receive(update, {}, seed=0)
        kept.append(memories.store.get("north")["memories"])
    assert kept == [{"0 Toggling": {"received": 1}}, {}, {"0 Toggling": {"received": 1}}]
