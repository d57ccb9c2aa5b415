"""Isolation of clients: the inputs of an update, and the state that local training leaves unchanged."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from language import masking_tokenizer
from peft import LoraConfig, get_peft_model
from tiny import arguments, rows, same_weights, tiny_model
from torch import nn
from transformers import BertForMaskedLM, DataCollatorForLanguageModeling, Trainer, TrainerCallback

from hf_federated import (
    AGGREGATIONS,
    Aggregation,
    FederatedCallback,
    FederatedConfig,
    FederatedTrainer,
    federate,
)
from hf_federated.engines import LocalEngine
from hf_federated.messages.serialization import pack


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CLIENTS = {"a": rows(6), "b": rows(8, seed=1), "c": rows(5, seed=2), "d": rows(9, seed=3)}


class UpdateRecorder(FederatedCallback):
    """Records the bytes of every update by round and client, and the global values after each round."""

    def __init__(self) -> None:
        self.updates: dict[tuple[int, str], bytes] = {}
        self.globals: list[bytes] = []

    def on_client_end(self, args, state, control, update, round, **kwargs) -> None:
        self.updates[round.number, update.client_id] = pack(update.state)

    def on_distill(self, args, state, control, round, **kwargs) -> None:
        self.globals.append(pack(round.state))


class ConstantAggregation(Aggregation):
    """Keeps the global state constant, so that updates of later rounds can be compared between federations."""

    def aggregate(self, accumulator, state):
        return state


def train_federation(
    train_dataset: Any,
    *callbacks: TrainerCallback,
    model: nn.Module | None = None,
    base: type[Trainer] = Trainer,
    client_callbacks: Sequence[TrainerCallback] = (),
    federation: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    **kwargs: Any,
) -> FederatedTrainer:
    """Train a federation for two rounds. `kwargs` are training arguments."""
    federated = federate(base)(
        model=tiny_model() if model is None else model,
        args=arguments(tempfile.mkdtemp(), **kwargs),
        train_dataset=train_dataset,
        callbacks=list(callbacks),
        client_callbacks=client_callbacks,
        federation=FederatedConfig(**{"num_rounds": 2, **(federation or {})}),
        **(trainer or {}),
    )
    federated.train()
    return federated


# ---- An update depends only on the global state, the client's data and the client's seed


@pytest.mark.parametrize("optimizer_state", ["reset", "carry"])
@pytest.mark.parametrize("other_clients", [["b"], ["d", "c", "b"]])
@pytest.mark.sampled(2)
def test_update_does_not_depend_on_other_clients(optimizer_state, other_clients) -> None:
    federation = {"aggregation": ConstantAggregation(), "client_optimizer_state": optimizer_state}
    all_clients, subset = UpdateRecorder(), UpdateRecorder()
    train_federation(CLIENTS, all_clients, federation=federation)
    train_federation({name: CLIENTS[name] for name in [*other_clients, "a"]}, subset, federation=federation)
    for round in range(2):
        assert subset.updates[round, "a"] == all_clients.updates[round, "a"]
        assert subset.updates[round, "a"] != subset.updates[round, "b"]
    # Every round has new dropout masks and a new order of examples.
    assert subset.updates[0, "a"] != subset.updates[1, "a"]


def test_update_does_not_depend_on_earlier_random_draws() -> None:
    undisturbed, disturbed = UpdateRecorder(), UpdateRecorder()

    class Draw(FederatedCallback):
        def on_client_begin(self, *args, **kwargs) -> None:
            torch.rand(3), np.random.rand(3), random.random()

    train_federation(CLIENTS, undisturbed)
    train_federation(CLIENTS, Draw(), disturbed)
    assert disturbed.updates == undisturbed.updates


def masked_language_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BertForMaskedLM(tiny_model().config)


def test_masks_of_seeded_collator_depend_on_the_client_and_not_on_other_clients() -> None:
    """A collator with a seed masks by its seed and the client's seed."""

    def updates(names: str, seed: int = 7) -> UpdateRecorder:
        collator = DataCollatorForLanguageModeling(masking_tokenizer(), seed=seed)
        recorder = UpdateRecorder()
        train_federation(
            {name: CLIENTS[name].remove_columns("labels") for name in names},
            recorder,
            model=masked_language_model(),
            trainer={"data_collator": collator, "eval_dataset": rows(4).remove_columns("labels")},
            federation={"aggregation": ConstantAggregation()},
            eval_strategy="steps",
        )
        assert collator.generator is None
        return recorder

    pair, three, other_seed = updates("ab"), updates("cba"), updates("ab", seed=8)
    for round in range(2):
        for name in "ab":
            assert three.updates[round, name] == pair.updates[round, name] != other_seed.updates[round, name]


def test_clients_with_equal_examples_mask_differently() -> None:
    recorder, label_sums = UpdateRecorder(), []

    class MaskCounter(Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            label_sums.append(inputs["labels"].sum().item())
            return super().compute_loss(model, inputs, **kwargs)

    data = rows(8).remove_columns("labels")
    train_federation(
        {"a": data, "b": data},
        recorder,
        model=masked_language_model(),
        base=MaskCounter,
        trainer={"data_collator": DataCollatorForLanguageModeling(masking_tokenizer(), seed=7)},
        federation={"aggregation": ConstantAggregation()},
    )
    assert len(set(recorder.updates.values())) == 4
    assert len(set(label_sums)) == 8


class LearnedTemperatureTrainer(Trainer):
    """A trainer whose loss has a parameter outside the model, which the optimizer trains."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.criterion = nn.ParameterDict({"temperature": nn.Parameter(torch.ones(()))})

    def create_optimizer(self) -> Any:
        super().create_optimizer()
        self.optimizer.add_param_group({"params": list(self.criterion.parameters())})
        return self.optimizer

    def compute_loss(self, model, inputs, **kwargs):
        logits = model(input_ids=inputs["input_ids"]).logits * self.criterion["temperature"]
        return nn.functional.cross_entropy(logits, inputs["labels"])


@pytest.mark.parametrize("clients", [CLIENTS, {"a": CLIENTS["a"]}], ids=["many", "one"])
def test_optimizer_with_parameters_outside_the_model_is_refused_by_name(clients) -> None:
    with pytest.raises(ValueError, match="trains 'criterion.temperature'.*would not be exchanged.*to the model"):
        train_federation(clients, base=LearnedTemperatureTrainer)


def test_optimizer_may_contain_frozen_parameters() -> None:
    class Everything(Trainer):
        def create_optimizer(self) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    train_federation(CLIENTS, base=Everything, federation={"freeze": "embeddings"})


def test_federation_seed_changes_the_updates_but_not_the_order_of_examples() -> None:
    class Batches(Trainer):
        seen: dict[int, list[Any]] = {}

        def compute_loss(self, model, inputs, **kwargs):
            self.seen.setdefault(self.federation.federation_seed, []).append(inputs["input_ids"].tolist())
            return super().compute_loss(model, inputs, **kwargs)

    recorders = {seed: UpdateRecorder() for seed in (1, 2)}
    for seed, recorder in recorders.items():
        train_federation(CLIENTS, recorder, base=Batches, federation={"federation_seed": seed})
    assert Batches.seen[1] == Batches.seen[2]
    assert recorders[1].updates[0, "a"] != recorders[2].updates[0, "a"]


def test_clients_with_equal_examples_send_different_updates() -> None:
    recorder = UpdateRecorder()
    train_federation({"a": rows(8), "b": rows(8)}, recorder)
    assert recorder.updates[0, "a"] != recorder.updates[0, "b"]


def test_equal_clients_without_dropout_give_the_result_of_one_client() -> None:
    with_many, one = UpdateRecorder(), UpdateRecorder()
    a = train_federation({str(i): rows(8) for i in range(5)}, with_many, model=tiny_model(**NO_DROPOUT))
    b = train_federation({"0": rows(8)}, one, model=tiny_model(**NO_DROPOUT))
    assert set(with_many.updates.values()) == set(one.updates.values())
    assert with_many.globals == one.globals
    assert same_weights(a.model, b.model)


def test_repeated_run_gives_identical_updates() -> None:
    first, second = UpdateRecorder(), UpdateRecorder()
    train_federation(CLIENTS, first, federation={"clients_per_round": 2})
    train_federation(dict(reversed(CLIENTS.items())), second, federation={"clients_per_round": 2})
    assert first.updates == second.updates
    assert first.globals == second.globals


# ---- Clients train from the server's weights


class OverwriteWeights(FederatedCallback):
    """Overwrites the weights of the resident model before a client receives the server's weights."""

    def __init__(self, only_trainable: bool) -> None:
        self.only_trainable = only_trainable

    @torch.no_grad()
    def on_client_begin(self, args, state, control, model, **kwargs) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad or not self.only_trainable:
                parameter.fill_(7.0)
        for buffer in model.buffers():
            buffer.zero_()


# Every algorithm in which clients train the global model alone, and the training arguments that it needs.
AVERAGING = [
    name
    for name, algorithm in AGGREGATIONS.items()
    if algorithm.exchanges_parameters and not algorithm.trains_private_models and not algorithm.trains_on_server
    # The conformance suite checks the methods for LoRA factors.
    if not algorithm.needs_lora
]
# The clients of these algorithms train as those of `fedavg` or `median`.
SLOW = ("fedexp", "trimmed_mean", "geometric_median", "krum", "norm_bounded_mean", "centered_clipping")
MARKED = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in AVERAGING]
TRAINING = {"fednova": {"optim": "sgd", "learning_rate": 0.05}}
# Four clients allow no hostile client.
KWARGS = {"krum": {"num_hostile": 0}}


def lora(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))


@pytest.mark.parametrize("aggregation", MARKED)
@pytest.mark.sampled(3)
def test_overwritten_local_weights_do_not_change_updates(aggregation) -> None:
    clean, overwritten = UpdateRecorder(), UpdateRecorder()
    federation = {"aggregation": aggregation, "aggregation_kwargs": KWARGS.get(aggregation, {})}
    training = TRAINING.get(aggregation, {})
    train_federation(CLIENTS, clean, federation=federation, **training)
    train_federation(CLIENTS, OverwriteWeights(only_trainable=False), overwritten, federation=federation, **training)
    assert overwritten.updates == clean.updates
    assert overwritten.globals == clean.globals


def test_overwritten_local_adapter_does_not_change_updates() -> None:
    clean, overwritten = UpdateRecorder(), UpdateRecorder()
    train_federation(CLIENTS, clean, model=lora(tiny_model()))
    train_federation(CLIENTS, OverwriteWeights(only_trainable=True), overwritten, model=lora(tiny_model()))
    assert overwritten.updates == clean.updates


def test_clients_start_each_round_from_the_same_weights_and_end_with_different_ones() -> None:
    """Every client of a round receives the global weights of the round before."""
    starts: list[bytes] = []

    class AtStart(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs) -> None:
            starts.append(pack({name: value.clone() for name, value in model.named_parameters()}))

    recorder = UpdateRecorder()
    trainer = train_federation(CLIENTS, recorder, client_callbacks=[AtStart()])
    assert len(starts) == 2 * len(CLIENTS)
    first, second = set(starts[: len(CLIENTS)]), set(starts[len(CLIENTS) :])
    assert len(first) == len(second) == 1
    assert len(set(recorder.updates.values())) == 2 * len(CLIENTS)
    assert second == {recorder.globals[0]}
    assert pack({name: value.clone() for name, value in trainer.model.named_parameters()}) == recorder.globals[1]


# ---- Server and clients share only messages


@pytest.mark.parametrize("aggregation", MARKED)
@pytest.mark.sampled(3)
def test_serialized_messages_give_the_same_result_as_direct_calls(aggregation) -> None:
    """Clients can then run on other machines."""
    kwargs = KWARGS.get(aggregation, {})
    federation = {"aggregation": aggregation, "aggregation_kwargs": kwargs, "client_optimizer_state": "carry"}
    training = TRAINING.get(aggregation, {})
    direct = train_federation(CLIENTS, federation=federation, **training)
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tempfile.mkdtemp(), **training),
        train_dataset=CLIENTS,
        engine=LocalEngine(serialize=True),
        federation=FederatedConfig(num_rounds=2, **federation),
    )
    trainer.train()
    assert same_weights(trainer.model, direct.model)
    assert trainer.ledger.to_dict() == direct.ledger.to_dict()


# ---- Local training does not change other state


def generators() -> tuple[Any, ...]:
    numpy_state = np.random.get_state()
    return random.getstate(), numpy_state[1].tolist(), numpy_state[2], torch.get_rng_state().tolist()


def test_training_does_not_change_global_generators() -> None:
    trainer = FederatedTrainer(
        model=tiny_model(), args=arguments(tempfile.mkdtemp()), train_dataset=CLIENTS, eval_dataset=None
    )
    before = generators()
    trainer.train()
    assert generators() == before


def test_failing_client_does_not_change_global_generators() -> None:
    class Failing(Trainer):
        def compute_loss(self, *args, **kwargs):
            torch.rand(1)
            raise RuntimeError("out of luck")

    trainer = federate(Failing)(model=tiny_model(), args=arguments(tempfile.mkdtemp()), train_dataset=CLIENTS)
    before = generators()
    with pytest.raises(RuntimeError):
        trainer.train()
    assert generators() == before


def test_trainer_attributes_set_by_a_client_are_not_visible_to_other_clients() -> None:
    class Counting(Trainer):
        count = 0
        counts: list[int] = []

        def compute_loss(self, *args, **kwargs):
            self.count += 1
            self.counts.append(self.count)
            return super().compute_loss(*args, **kwargs)

    trainer = train_federation({"a": rows(4), "b": rows(4)}, base=Counting)
    assert Counting.counts == [1] * 4
    assert trainer.count == 0


def test_trainer_keeps_its_federated_dataset_after_training() -> None:
    trainer = train_federation(CLIENTS)
    assert list(trainer.train_dataset) == list(CLIENTS)
    assert not isinstance(trainer.train_dataset, Dataset)
    assert trainer.accelerator._dataloaders == []
