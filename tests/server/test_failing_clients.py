"""Invariant 7: a bad client is refused by name, and the round goes on if enough are left."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
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
from hf_federated.trainer.federation import Federation


CLIENTS = {"a": rows(4), "b": rows(4, seed=1), "c": rows(4, seed=2)}


def build(
    directory: Path,
    train_dataset: Any = None,
    federation: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    base: type[Trainer] = Trainer,
    **kwargs: Any,
) -> FederatedTrainer:
    """A federation of two rounds; `kwargs` are training arguments."""
    return federate(base)(
        **{"model": tiny_model(), "args": arguments(directory, **kwargs), **(trainer or {})},
        train_dataset=CLIENTS if train_dataset is None else train_dataset,
        federation=FederatedConfig(**{"num_rounds": 2, **(federation or {})}),
    )


class FailingFor(Trainer):
    """Raises in the loss of the clients named, whose first token is a sign."""

    def compute_loss(self, model, inputs, **kwargs):
        if (inputs["input_ids"][:, 0] == 31).any():
            raise OSError("the disk of this client is full")
        return super().compute_loss(model, inputs, **kwargs)


def marked(data: Dataset) -> Dataset:
    return data.map(lambda row: {"input_ids": [31, *row["input_ids"][1:]]})


GOOD = {name: data.map(lambda row: {"input_ids": [1, *row["input_ids"][1:]]}) for name, data in CLIENTS.items()}
ONE_FAILS = {**GOOD, "bad": marked(rows(4, seed=4))}


class Summary(FederatedCallback):
    """The clients that were refused, by round."""

    def __init__(self) -> None:
        self.rejected: dict[int, dict[str, str]] = {}

    def on_round_end(self, args, state, control, server, **kwargs) -> None:
        self.rejected[server.round] = dict(server.rejected)


def test_the_round_goes_on_without_a_client_that_raises(tmp_path) -> None:
    summary = Summary()
    trainer = build(tmp_path, ONE_FAILS, base=FailingFor, trainer={"callbacks": [summary]})
    trainer.train()
    without = build(tmp_path, GOOD, base=FailingFor)
    without.train()
    assert trainer.state.global_step == 2
    assert same_weights(trainer.model, without.model)
    for round in range(2):
        assert summary.rejected[round] == {
            "bad": f"Client 'bad', round {round}: OSError: the disk of this client is full"
        }
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["federated/num_failed"] == 1 and entry["federated/num_clients"] == 3 for entry in entries)


class PoisonUpdate(FederatedCallback):
    """Makes the update of some clients not finite, inside the client."""

    def __init__(self, value: float) -> None:
        self.value = value

    def on_train_end(self, args, state, control, model, **kwargs) -> None:
        if state.max_steps == 2:
            with torch.no_grad():
                next(model.parameters())[0, 0] = self.value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("postprocessors", [[], [ClipUpdate(1.0)]], ids=["plain", "clipped"])
def test_an_update_with_nan_is_refused_by_name_and_the_round_goes_on(tmp_path, value, postprocessors) -> None:
    summary = Summary()
    # The only client with two steps.
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset={**CLIENTS, "big": rows(8)},
        callbacks=[summary],
        client_callbacks=[PoisonUpdate(value)],
        postprocessors=postprocessors,
        federation=FederatedConfig(num_rounds=2, client_optimizer_state="carry"),
    )
    trainer.train()
    for round in range(2):
        (name, reason), *others = summary.rejected[round].items()
        assert (name, others) == ("big", [])
        assert f"Client 'big', round {round}: " in reason
        assert "holds NaN or infinite values, expected finite values" in reason
        assert postprocessors or "'bert.embeddings.word_embeddings.weight'" in reason
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_a_round_with_too_few_clients_stops_and_keeps_the_global_state(tmp_path) -> None:
    starts: list[dict[str, torch.Tensor]] = []

    class Start(FederatedCallback):
        def on_round_begin(self, args, state, control, server, **kwargs) -> None:
            starts.append(server.weights)

    class LaterFailing(FailingFor):
        def compute_loss(self, model, inputs, **kwargs):
            if self.local_training is None or self.local_training.round == 0:
                return Trainer.compute_loss(self, model, inputs, **kwargs)
            return super().compute_loss(model, inputs, **kwargs)

    trainer = build(
        tmp_path,
        ONE_FAILS,
        federation={"min_clients": 4, "num_rounds": 3},
        trainer={"callbacks": [Start()]},
        base=LaterFailing,
        save_strategy="steps",
    )
    with pytest.raises(RoundFailedError) as error:
        trainer.train()
    assert str(error.value) == (
        "Round 1: 3 of 4 clients delivered a valid update, but min_clients=4. The first failure: "
        "Client 'bad', round 1: OSError: the disk of this client is full"
    )
    assert isinstance(error.value.__cause__, OSError)
    assert all(torch.equal(parameter, starts[1][name]) for name, parameter in trainer.model.named_parameters())
    # What was saved is there, and the run goes on from it once the client is well again.
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    again = build(tmp_path, ONE_FAILS, federation={"num_rounds": 3}, save_strategy="steps")
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3


def test_a_round_in_which_all_clients_fail_says_why(tmp_path) -> None:
    trainer = build(tmp_path, {name: marked(data) for name, data in CLIENTS.items()}, base=FailingFor)
    with pytest.raises(RoundFailedError, match="Round 0: 0 of 3 clients.*Client 'a', round 0: OSError: the disk"):
        trainer.train()
    assert same_weights(trainer.model, tiny_model())


class ChangesWhatTrains(TrainerCallback):
    """Changes, in the one client with two steps, which parameters train."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_begin(self, args, state, control, model, **kwargs) -> None:
        if state.max_steps != 2:
            return
        if self.how == "adds":
            model.extra = nn.Linear(1, 1)
        else:
            model.bert.embeddings.word_embeddings.weight.requires_grad_(self.how == "unfreezes")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("adds", "'extra.weight' began to train"),
        ("unfreezes", "'bert.embeddings.word_embeddings.weight' began to train"),
        ("freezes", "'bert.embeddings.word_embeddings.weight' ceased to train"),
    ],
)
def test_a_client_that_trains_other_parameters_is_refused_by_name(tmp_path, how, words) -> None:
    summary = Summary()
    clients = {**CLIENTS, "big": rows(8)}
    settings = {"num_rounds": 2, "freeze": "embeddings" if how == "unfreezes" else None}
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path / "one"),
        train_dataset=clients,
        callbacks=[summary],
        client_callbacks=[ChangesWhatTrains(how)],
        federation=FederatedConfig(**settings),
    )
    trainer.train()
    assert list(summary.rejected[0]) == list(summary.rejected[1]) == ["big"] or how == "adds"
    assert f"Client 'big', round 0: ValueError: {words}" in summary.rejected[0]["big"]
    assert "before the trainer is built" in summary.rejected[0]["big"]
    if how != "adds":
        without = build(tmp_path / "two", federation=settings)
        without.train()
        assert same_weights(trainer.model, without.model)


def test_keys_that_differ_between_clients_are_refused_by_name(tmp_path) -> None:
    class OtherAdapter(Postprocessor):
        def client_side(self, update, message):
            if update.client_id != "b":
                return update
            state = dict(update.state)
            state["lora_B.other"] = state.pop("classifier.bias")
            return dataclasses.replace(update, state=state)

    def trainer(**federation: Any) -> FederatedTrainer:
        return FederatedTrainer(
            model=tiny_model(), args=arguments(tmp_path), train_dataset=CLIENTS, callbacks=[summary],
            postprocessors=[OtherAdapter()], federation=FederatedConfig(num_rounds=1, **federation),
        )  # fmt: skip

    summary = Summary()
    trainer().train()
    assert list(summary.rejected[0]) == ["b"]
    with pytest.raises(RoundFailedError) as error:
        trainer(min_clients=3).train()
    for words in (
        "Client 'b', round 0: 1 keys are missing, the first is 'classifier.bias'",
        "1 keys are unexpected, the first is 'lora_B.other'",
        "Train the same adapter or layers on all clients",
    ):
        assert words in str(error.value)
    assert isinstance(error.value.__cause__, InvalidUpdateError)


# ---- What is no client's fault


def test_a_store_that_cannot_be_written_ends_the_run_and_no_client(tmp_path) -> None:
    class InTheWay(FederatedCallback):
        """Where clients keep their state is something else from the second round on."""

        def on_round_begin(self, args, state, control, server, **kwargs) -> None:
            if server.round == 1:
                shutil.rmtree(tmp_path / "client_store")
                (tmp_path / "client_store").write_text("")

    trainer = build(
        tmp_path,
        federation={"client_optimizer_state": "carry", "client_store": "disk"},
        trainer={"callbacks": [InTheWay()]},
    )
    with pytest.raises(OSError, match=r"client_store/\w+\.safetensors'"):
        trainer.train()
    assert trainer.state.global_step == 1


# ---- Stopped by the user


class Interrupted(Trainer):
    armed = True

    def compute_loss(self, model, inputs, **kwargs):
        if type(self).armed:
            type(self).armed = False
            raise KeyboardInterrupt
        return super().compute_loss(model, inputs, **kwargs)


def test_an_interrupt_passes_through_and_the_trainer_can_train_again(tmp_path) -> None:
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


def normalised_model() -> nn.Module:
    """Its running statistics travel, one of them an integer, and those of the frozen normalisation stay."""
    model = tiny_model()
    model.dropout = nn.Sequential(nn.BatchNorm1d(16), nn.BatchNorm1d(16, affine=False))
    return model


def lora_model() -> nn.Module:
    torch.manual_seed(0)
    return get_peft_model(tiny_model(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))


class EndsInTheSecondRound(FederatedCallback):
    """Raises in an event of the second round; keeps the global state of the last aggregation before it."""

    def __init__(self, event: str, error: type[BaseException]) -> None:
        self.event = event
        self.error = error
        self.state: dict[str, torch.Tensor] = {}
        self.round = 0

    def on_round_begin(self, args, state, control, model, server, **kwargs) -> None:
        self.round = server.round
        self.keep(model)

    def keep(self, model: nn.Module) -> None:
        self.state = {name: value.clone() for name, value in model.state_dict().items()}

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.event == "in a client" and self.round == 1 and (state.global_step, state.max_steps) == (2, 3):
            raise self.error

    def on_client_end(self, args, state, control, update, **kwargs) -> None:
        if self.event == "between clients" and self.round == 1 and update.client_id == "b":
            raise self.error

    def on_aggregate(self, args, state, control, server, **kwargs) -> None:
        if self.event == "aggregation" and self.round == 1:
            raise self.error

    def on_distill(self, args, state, control, model, server, **kwargs) -> None:
        if self.event == "a state that cannot be written" and self.round == 1:
            self.keep(model)
            first, *others = server.weights
            server.weights = {name: server.weights[name] + 1 for name in others}


@pytest.mark.parametrize("build_model", [normalised_model, lora_model])
@pytest.mark.parametrize(
    ("event", "error"),
    [
        ("in a client", KeyboardInterrupt),
        ("between clients", ValueError),
        ("aggregation", SystemExit),
        ("a state that cannot be written", KeyError),
    ],
)
def test_whatever_ends_a_round_the_model_holds_the_global_state(tmp_path, build_model, event, error) -> None:
    ends = EndsInTheSecondRound(event, error)
    trainer = build(
        tmp_path,
        {**CLIENTS, "big": rows(12)},
        federation={"client_optimizer_state": "carry"},
        trainer={"model": build_model(), "callbacks": [ends], "client_callbacks": [ends]},
    )
    with pytest.raises(error):
        trainer.train()
    assert ends.round == 1
    now = trainer.model.state_dict()
    assert all(torch.equal(now[name], value) for name, value in ends.state.items())


def test_a_failed_evaluation_of_a_client_leaves_the_models_own_precision(tmp_path) -> None:
    def fail(prediction: Any) -> dict[str, float]:
        raise ValueError("no metric for these rows")

    trainer = build(
        tmp_path,
        federation={"evaluate_clients": True, "exchange_dtype": "bfloat16"},
        trainer={"eval_dataset": FederatedDataset.from_dict(CLIENTS)},
    )
    running = Federation(trainer._setup, trainer.args, None)
    trainer.compute_metrics = fail
    with pytest.raises(RoundFailedError, match="no metric for these rows"):
        running.evaluate_clients()
    assert same_weights(trainer.model, tiny_model())


@pytest.mark.parametrize("after", [RuntimeError, KeyboardInterrupt])
def test_a_failed_client_leaves_no_gradient_to_the_next(tmp_path, after) -> None:
    class AfterBackward(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            super().training_step(model, inputs, num_items_in_batch)
            raise after("after the backward pass")

    trainer = build(tmp_path, base=AfterBackward)
    with pytest.raises((RoundFailedError, KeyboardInterrupt)):
        trainer.train()
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
