"""An invalid client is rejected by name, and the round continues if enough clients remain."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import pytest
import torch
from datasets import Dataset
from federations import build_federation
from peft import LoraConfig, get_peft_model
from tiny import arguments, rows, same_weights, tiny_model
from torch import nn
from transformers import Trainer, TrainerCallback

from hf_federated import (
    ClipUpdate,
    FederatedCallback,
    FederatedConfig,
    FederatedDataset,
    FederatedTrainer,
    Postprocessor,
    RoundFailedError,
    federate,
)
from hf_federated.messages.validation import InvalidUpdateError


CLIENTS = {"a": rows(4), "b": rows(4, seed=1), "c": rows(4, seed=2)}


class FailsForMarkedExamples(Trainer):
    """Raises in the loss if the first token of an example is a marker."""

    def compute_loss(self, model, inputs, **kwargs):
        if (inputs["input_ids"][:, 0] == 31).any():
            raise OSError("the disk of this client is full")
        return super().compute_loss(model, inputs, **kwargs)


def marked(data: Dataset) -> Dataset:
    return data.map(lambda row: {"input_ids": [31, *row["input_ids"][1:]]})


UNMARKED = {name: data.map(lambda row: {"input_ids": [1, *row["input_ids"][1:]]}) for name, data in CLIENTS.items()}
ONE_FAILS = {**UNMARKED, "bad": marked(rows(4, seed=4))}


class RejectionRecorder(FederatedCallback):
    """Records the rejected clients of each round."""

    def __init__(self) -> None:
        self.rejected: dict[int, dict[str, str]] = {}

    def on_round_end(self, args, state, control, round, **kwargs) -> None:
        self.rejected[round.number] = dict(round.rejected)


def test_round_continues_without_a_client_that_raises(tmp_path) -> None:
    recorder = RejectionRecorder()
    trainer = build_federation(tmp_path, ONE_FAILS, base=FailsForMarkedExamples, trainer={"callbacks": [recorder]})
    trainer.train()
    without = build_federation(tmp_path, UNMARKED, base=FailsForMarkedExamples)
    without.train()
    assert trainer.state.global_step == 2
    assert same_weights(trainer.model, without.model)
    for round in range(2):
        assert recorder.rejected[round] == {
            "bad": f"Client 'bad', round {round + 1}: OSError: the disk of this client is full"
        }
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["federated/num_failed"] == 1 and entry["federated/num_clients"] == 3 for entry in entries)


class SetsNonFiniteValue(FederatedCallback):
    """Sets a parameter of a client with two steps to a value that is not finite."""

    def __init__(self, value: float) -> None:
        self.value = value

    def on_train_end(self, args, state, control, model, **kwargs) -> None:
        if state.max_steps == 2:
            with torch.no_grad():
                next(model.parameters())[0, 0] = self.value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("postprocessors", [[], [ClipUpdate(1.0)]], ids=["plain", "clipped"])
def test_non_finite_update_is_rejected_by_name_and_the_round_continues(tmp_path, value, postprocessors) -> None:
    recorder = RejectionRecorder()
    # "big" is the only client with two steps.
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset={**CLIENTS, "big": rows(8)},
        callbacks=[recorder],
        client_callbacks=[SetsNonFiniteValue(value)],
        postprocessors=postprocessors,
        federation=FederatedConfig(num_rounds=2, client_optimizer_state="carry"),
    )
    trainer.train()
    for round in range(2):
        (name, reason), *remaining = recorder.rejected[round].items()
        assert (name, remaining) == ("big", [])
        assert f"Client 'big', round {round + 1}: " in reason
        assert "holds NaN or infinite values, expected finite values" in reason
        assert postprocessors or "'bert.embeddings.word_embeddings.weight'" in reason
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_round_with_too_few_clients_fails_and_keeps_the_global_state(tmp_path) -> None:
    starts: list[dict[str, torch.Tensor]] = []

    class StateRecorder(FederatedCallback):
        def on_round_begin(self, args, state, control, round, **kwargs) -> None:
            starts.append(round.state)

    class FailsFromSecondRound(FailsForMarkedExamples):
        def compute_loss(self, model, inputs, **kwargs):
            if self.local_training is None or self.local_training.round == 0:
                return Trainer.compute_loss(self, model, inputs, **kwargs)
            return super().compute_loss(model, inputs, **kwargs)

    trainer = build_federation(
        tmp_path,
        ONE_FAILS,
        federation={"min_clients": 4, "num_rounds": 3},
        trainer={"callbacks": [StateRecorder()]},
        base=FailsFromSecondRound,
        save_strategy="steps",
    )
    with pytest.raises(RoundFailedError) as error:
        trainer.train()
    assert str(error.value) == (
        "Round 2: 1 of 4 clients failed. The remaining 3 are fewer than min_clients=4. The first failure: "
        "Client 'bad', round 2: OSError: the disk of this client is full"
    )
    assert isinstance(error.value.__cause__, OSError)
    assert all(torch.equal(parameter, starts[1][name]) for name, parameter in trainer.model.named_parameters())
    # The checkpoint of the first round remains, and a run in which the client works resumes from it.
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    resumed = build_federation(tmp_path, ONE_FAILS, federation={"num_rounds": 3}, save_strategy="steps")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3


def test_round_in_which_all_clients_fail_names_the_reason(tmp_path) -> None:
    trainer = build_federation(
        tmp_path, {name: marked(data) for name, data in CLIENTS.items()}, base=FailsForMarkedExamples
    )
    with pytest.raises(RoundFailedError, match="Round 1: 3 of 3 clients failed.*Client 'a', round 1: OSError: the d"):
        trainer.train()
    assert same_weights(trainer.model, tiny_model())


class AskedClients(FederatedCallback):
    """Records the clients that receive a message, by round."""

    def __init__(self) -> None:
        self.asked: dict[int, list[str]] = {}

    def on_client_begin(self, args, state, control, client_id, *, round, **kwargs) -> None:
        self.asked.setdefault(round.number, []).append(client_id)


@pytest.mark.parametrize(("min_clients", "asked"), [(4, "a"), (3, "abc"), (2, "abcd"), (1, "abcd")])
def test_round_stops_at_the_failure_that_leaves_too_few_clients(tmp_path, min_clients, asked) -> None:
    """The clients a and c fail. A round that cannot reach `min_clients` any more trains no further client."""
    clients = {"a": CLIENTS["a"], "b": UNMARKED["b"], "c": CLIENTS["c"], "d": UNMARKED["a"]}
    clients |= {name: marked(clients[name]) for name in "ac"}
    recorder = AskedClients()
    trainer = build_federation(
        tmp_path,
        clients,
        num_rounds=1,
        base=FailsForMarkedExamples,
        federation={"min_clients": min_clients},
        trainer={"callbacks": [recorder]},
    )
    num_allowed = 4 - min_clients
    if num_allowed >= 2:
        trainer.train()
    else:
        with pytest.raises(RoundFailedError) as error:
            trainer.train()
        assert str(error.value) == (
            f"Round 1: {num_allowed + 1} of 4 clients failed. The remaining {min_clients - 1} are fewer than "
            f"min_clients={min_clients}. The first failure: Client 'a', round 1: OSError: the disk of this client is "
            "full"
        )
    assert recorder.asked == {0: list(asked)}


class FailsInTwoWays(FailsForMarkedExamples):
    """Raises a further error, in another line, for examples with another marker."""

    def compute_loss(self, model, inputs, **kwargs):
        if (inputs["input_ids"][:, 0] == 30).any():
            raise OSError(f"the disk of a client with {len(inputs['input_ids'])} examples is full")
        return super().compute_loss(model, inputs, **kwargs)


def test_traceback_of_an_error_is_logged_once(tmp_path, caplog) -> None:
    """Each failure of each round is one line. The traceback repeats for an error in another line of code."""
    other = {size: rows(size).map(lambda row: {"input_ids": [30, *row["input_ids"][1:]]}) for size in (1, 2)}
    clients = {**ONE_FAILS, "bad too": marked(rows(4, seed=5)), "small": other[1], "smaller": other[2]}
    trainer = build_federation(tmp_path, clients, base=FailsInTwoWays, num_rounds=2)
    trainer.train()
    assert caplog.text.count("Traceback (most recent call last)") == 2
    rejected = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Rejected: ")]
    assert len(rejected) == 2 * 4
    assert rejected[:2] == [
        f"Rejected: Client {name!r}, round 1: OSError: the disk of this client is full" for name in ("bad", "bad too")
    ]
    assert rejected[3] == "Rejected: Client 'smaller', round 1: OSError: the disk of a client with 2 examples is full"


class ChangesTrainableParameters(TrainerCallback):
    """Changes the set of trainable parameters of the client with two steps."""

    def __init__(self, change: str) -> None:
        self.change = change

    def on_train_begin(self, args, state, control, model, **kwargs) -> None:
        if state.max_steps != 2:
            return
        if self.change == "adds":
            model.extra = nn.Linear(1, 1)
        else:
            model.bert.embeddings.word_embeddings.weight.requires_grad_(self.change == "unfreezes")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("adds", "'extra.weight' began to train"),
        ("unfreezes", "'bert.embeddings.word_embeddings.weight' began to train"),
        ("freezes", "'bert.embeddings.word_embeddings.weight' ceased to train"),
    ],
)
def test_client_that_trains_other_parameters_is_rejected_by_name(tmp_path, change, words) -> None:
    recorder = RejectionRecorder()
    clients = {**CLIENTS, "big": rows(8)}
    settings = {"num_rounds": 2, "freeze": "embeddings" if change == "unfreezes" else None}
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path / "one"),
        train_dataset=clients,
        callbacks=[recorder],
        client_callbacks=[ChangesTrainableParameters(change)],
        federation=FederatedConfig(**settings),
    )
    trainer.train()
    assert list(recorder.rejected[0]) == list(recorder.rejected[1]) == ["big"] or change == "adds"
    assert f"Client 'big', round 1: ValueError: {words}" in recorder.rejected[0]["big"]
    assert "before the trainer is built" in recorder.rejected[0]["big"]
    if change != "adds":
        without = build_federation(tmp_path / "two", CLIENTS, federation=settings)
        without.train()
        assert same_weights(trainer.model, without.model)


def test_update_with_other_parameter_names_is_rejected_by_name(tmp_path) -> None:
    class RenamesParameter(Postprocessor):
        def client_send(self, update, message, memory):
            if update.client_id != "b":
                return update
            state = dict(update.state)
            state["lora_B.other"] = state.pop("classifier.bias")
            return dataclasses.replace(update, state=state)

    def trainer(**federation: Any) -> FederatedTrainer:
        return FederatedTrainer(
            model=tiny_model(), args=arguments(tmp_path), train_dataset=CLIENTS, callbacks=[recorder],
            postprocessors=[RenamesParameter()], federation=FederatedConfig(num_rounds=1, **federation),
        )  # fmt: skip

    recorder = RejectionRecorder()
    trainer().train()
    assert list(recorder.rejected[0]) == ["b"]
    with pytest.raises(RoundFailedError) as error:
        trainer(min_clients=3).train()
    for words in (
        "Client 'b', round 1: 1 keys are missing, the first is 'classifier.bias'",
        "1 keys are unexpected, the first is 'lora_B.other'",
        "Train the same adapter or layers on all clients",
    ):
        assert words in str(error.value)
    assert isinstance(error.value.__cause__, InvalidUpdateError)


# ---- Errors outside clients


def test_error_of_the_client_store_ends_the_run(tmp_path) -> None:
    class BlocksStore(FederatedCallback):
        """Replaces the directory of the client states with a file in the second round."""

        def on_round_begin(self, args, state, control, round, **kwargs) -> None:
            if round.number == 1:
                shutil.rmtree(tmp_path / "client_store")
                (tmp_path / "client_store").write_text("")

    trainer = build_federation(
        tmp_path,
        CLIENTS,
        federation={"client_optimizer_state": "carry", "client_store": "disk"},
        trainer={"callbacks": [BlocksStore()]},
    )
    with pytest.raises(OSError, match=r"client_store/\w+\.safetensors'"):
        trainer.train()
    assert trainer.state.global_step == 1


# ---- Interrupted by the user


class Interrupted(Trainer):
    armed = True

    def compute_loss(self, model, inputs, **kwargs):
        if type(self).armed:
            type(self).armed = False
            raise KeyboardInterrupt
        return super().compute_loss(model, inputs, **kwargs)


def test_trainer_can_train_again_after_a_keyboard_interrupt(tmp_path) -> None:
    base = federate(type("Interrupted", (Interrupted,), {"armed": True}))
    options: dict[str, Any] = {"neftune_noise_alpha": 5.0, "gradient_accumulation_steps": 2}
    trainer = base(model=tiny_model(), args=arguments(tmp_path, **options), train_dataset=CLIENTS)
    user_args = trainer.args
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.args is user_args
    assert not trainer.model.get_input_embeddings()._forward_hooks
    assert trainer.neftune_noise_alpha == 5.0
    with torch.no_grad():
        for parameter, value in zip(trainer.model.parameters(), tiny_model().parameters(), strict=True):
            parameter.copy_(value)
    trainer.train()
    fresh = FederatedTrainer(model=tiny_model(), args=arguments(tmp_path, **options), train_dataset=CLIENTS)
    fresh.train()
    assert same_weights(trainer.model, fresh.model)


def model_with_batch_norm() -> nn.Module:
    """Build a model with two batch normalizations. Only the statistics of the trainable one are exchanged."""
    model = tiny_model()
    model.dropout = nn.Sequential(nn.BatchNorm1d(16), nn.BatchNorm1d(16, affine=False))
    return model


def lora_model() -> nn.Module:
    torch.manual_seed(0)
    return get_peft_model(tiny_model(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))


class RaisesInSecondRound(FederatedCallback):
    """Raises in an event of the second round. Records the global state of the last aggregation before the event."""

    def __init__(self, event: str, error: type[BaseException]) -> None:
        self.event = event
        self.error = error
        self.state: dict[str, torch.Tensor] = {}
        self.round = 0

    def on_round_begin(self, args, state, control, model, round, **kwargs) -> None:
        self.round = round.number
        self.record(model)

    def record(self, model: nn.Module) -> None:
        self.state = {name: value.clone() for name, value in model.state_dict().items()}

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.event == "in a client" and self.round == 1 and (state.global_step, state.max_steps) == (2, 3):
            raise self.error

    def on_client_end(self, args, state, control, update, **kwargs) -> None:
        if self.event == "between clients" and self.round == 1 and update.client_id == "b":
            raise self.error

    def on_aggregate(self, args, state, control, round, **kwargs) -> None:
        if self.event == "aggregation" and self.round == 1:
            raise self.error

    def on_distill(self, args, state, control, model, round, **kwargs) -> None:
        if self.event == "a state that cannot be written" and self.round == 1:
            self.record(model)
            _, *names = round.state
            round.state = {name: round.state[name] + 1 for name in names}


@pytest.mark.parametrize("build_model", [model_with_batch_norm, lora_model])
@pytest.mark.parametrize(
    ("event", "error"),
    [
        ("in a client", KeyboardInterrupt),
        ("between clients", ValueError),
        ("aggregation", SystemExit),
        ("a state that cannot be written", KeyError),
    ],
)
def test_model_contains_the_global_state_after_any_failed_round(tmp_path, build_model, event, error) -> None:
    failure = RaisesInSecondRound(event, error)
    trainer = build_federation(
        tmp_path,
        {**CLIENTS, "big": rows(12)},
        federation={"client_optimizer_state": "carry"},
        trainer={"model": build_model(), "callbacks": [failure], "client_callbacks": [failure]},
    )
    with pytest.raises(error):
        trainer.train()
    assert failure.round == 1
    state = trainer.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in failure.state.items())


def test_failed_client_evaluation_keeps_the_precision_of_the_model(tmp_path) -> None:
    def fail_for_one_client(prediction: Any) -> dict[str, float]:
        if len(prediction.label_ids) == len(CLIENTS["a"]):
            raise ValueError("no metric for these examples")
        return {}

    trainer = build_federation(
        tmp_path,
        CLIENTS,
        federation={"evaluate_clients": True, "exchange_dtype": "bfloat16"},
        trainer={"eval_dataset": FederatedDataset.from_dict(CLIENTS), "compute_metrics": fail_for_one_client},
    )
    with pytest.raises(RoundFailedError, match="no metric for these examples"):
        trainer.evaluate()
    assert same_weights(trainer.model, tiny_model())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failed_client_leaves_no_gradients(tmp_path, error) -> None:
    class RaisesAfterBackward(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            super().training_step(model, inputs, num_items_in_batch)
            raise error("after the backward pass")

    trainer = build_federation(tmp_path, CLIENTS, base=RaisesAfterBackward)
    with pytest.raises((RoundFailedError, KeyboardInterrupt)):
        trainer.train()
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
