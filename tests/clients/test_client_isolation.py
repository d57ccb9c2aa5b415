"""Invariants 2 to 5: what a client's update depends on, what leaves a client, what stays behind, and memory."""

from __future__ import annotations

import gc
import random
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from language import masking_tokenizer
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from tiny import arguments, rows, same_weights, tiny_model
from torch import nn
from transformers import BertForMaskedLM, DataCollatorForLanguageModeling, Trainer, TrainerCallback

from hf_federated import (
    AGGREGATIONS,
    Aggregation,
    FedAvg,
    FederatedCallback,
    FederatedConfig,
    FederatedTrainer,
    FedOpt,
    FedProx,
    Scaffold,
    federate,
)
from hf_federated.messages import ClientUpdate, read_message
from hf_federated.messages.serialization import pack


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CLIENTS = {"a": rows(6), "b": rows(8, seed=1), "c": rows(5, seed=2), "d": rows(9, seed=3)}


class Recorder(FederatedCallback):
    """The bytes of every update's values, by round and client, and the global values after each round."""

    def __init__(self) -> None:
        self.updates: dict[tuple[int, str], bytes] = {}
        self.messages: list[ClientUpdate] = []
        self.globals: list[bytes] = []

    def on_client_end(self, args, state, control, update, server, **kwargs) -> None:
        self.updates[server.round, update.client_id] = pack(update.state)
        self.messages.append(update)

    def on_distill(self, args, state, control, server, **kwargs) -> None:
        self.globals.append(pack(server.weights))


class Standstill(Aggregation):
    """The global state stays what it was, so that updates of later rounds can be compared between federations."""

    def aggregate(self, accumulator, state):
        return state


def trained(
    train_dataset: Any,
    *callbacks: TrainerCallback,
    model: nn.Module | None = None,
    base: type[Trainer] = Trainer,
    client_callbacks: Sequence[TrainerCallback] = (),
    federation: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    **kwargs: Any,
) -> FederatedTrainer:
    """A federation of two rounds, trained; `kwargs` are training arguments."""
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


# ---- 2: the global state, its own data, its own seed


@pytest.mark.parametrize("optimizer_state", ["reset", "carry"])
@pytest.mark.parametrize("others", [["b"], ["d", "c", "b"]])
def test_an_update_does_not_depend_on_the_other_clients(optimizer_state, others) -> None:
    federation = {"aggregation": Standstill(), "client_optimizer_state": optimizer_state}
    all_of_them, some = Recorder(), Recorder()
    trained(CLIENTS, all_of_them, federation=federation)
    trained({name: CLIENTS[name] for name in [*others, "a"]}, some, federation=federation)
    for round in range(2):
        assert some.updates[round, "a"] == all_of_them.updates[round, "a"]
        assert some.updates[round, "a"] != some.updates[round, "b"]
    # Dropout and shuffling are new in every round.
    assert some.updates[0, "a"] != some.updates[1, "a"]


def test_an_update_does_not_depend_on_what_was_drawn_before() -> None:
    undisturbed, disturbed = Recorder(), Recorder()

    class Draw(FederatedCallback):
        def on_client_begin(self, *args, **kwargs) -> None:
            torch.rand(3), np.random.rand(3), random.random()

    trained(CLIENTS, undisturbed)
    trained(CLIENTS, Draw(), disturbed)
    assert disturbed.updates == undisturbed.updates


def masked_language_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BertForMaskedLM(tiny_model().config)


def test_what_a_collator_with_a_seed_masks_is_the_clients_own() -> None:
    def updates(names: str, seed: int = 7) -> Recorder:
        collator = DataCollatorForLanguageModeling(masking_tokenizer(), seed=seed)
        recorder = Recorder()
        trained(
            {name: CLIENTS[name].remove_columns("labels") for name in names},
            recorder,
            model=masked_language_model(),
            trainer={"data_collator": collator, "eval_dataset": rows(4).remove_columns("labels")},
            federation={"aggregation": Standstill()},
            eval_strategy="steps",
        )
        assert collator.generator is None
        return recorder

    pair, three, other_seed = updates("ab"), updates("cba"), updates("ab", seed=8)
    for round in range(2):
        for name in "ab":
            assert three.updates[round, name] == pair.updates[round, name] != other_seed.updates[round, name]


def test_two_clients_with_the_same_rows_mask_differently() -> None:
    recorder, masks = Recorder(), []

    class Masks(Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            masks.append(inputs["labels"].sum().item())
            return super().compute_loss(model, inputs, **kwargs)

    data = rows(8).remove_columns("labels")
    trained(
        {"a": data, "b": data},
        recorder,
        model=masked_language_model(),
        base=Masks,
        trainer={"data_collator": DataCollatorForLanguageModeling(masking_tokenizer(), seed=7)},
        federation={"aggregation": Standstill()},
    )
    assert len(set(recorder.updates.values())) == 4
    assert len(set(masks)) == 8


class Tempered(Trainer):
    """A loss with a parameter of its own, trained beside the model."""

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
def test_parameters_that_would_not_travel_are_refused_by_name(clients) -> None:
    with pytest.raises(ValueError, match="optimizer trains 'criterion.temperature'.*would not travel.*into the model"):
        trained(clients, base=Tempered)


def test_an_optimizer_may_hold_what_is_frozen() -> None:
    class Everything(Trainer):
        def create_optimizer(self) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    trained(CLIENTS, base=Everything, federation={"freeze": "embeddings"})


def test_federation_seed_changes_the_updates_but_not_the_order_of_rows() -> None:
    class Batches(Trainer):
        seen: dict[int, list[Any]] = {}

        def compute_loss(self, model, inputs, **kwargs):
            self.seen.setdefault(self.federation.federation_seed, []).append(inputs["input_ids"].tolist())
            return super().compute_loss(model, inputs, **kwargs)

    recorders = {seed: Recorder() for seed in (1, 2)}
    for seed, recorder in recorders.items():
        trained(CLIENTS, recorder, base=Batches, federation={"federation_seed": seed})
    assert Batches.seen[1] == Batches.seen[2]
    assert recorders[1].updates[0, "a"] != recorders[2].updates[0, "a"]


def test_two_clients_with_the_same_rows_draw_differently() -> None:
    recorder = Recorder()
    trained({"a": rows(8), "b": rows(8)}, recorder)
    assert recorder.updates[0, "a"] != recorder.updates[0, "b"]


def test_clients_with_equal_rows_come_to_one_clients_update() -> None:
    many, one = Recorder(), Recorder()
    a = trained({str(i): rows(8) for i in range(5)}, many, model=tiny_model(**NO_DROPOUT))
    b = trained({"0": rows(8)}, one, model=tiny_model(**NO_DROPOUT))
    assert set(many.updates.values()) == set(one.updates.values())
    assert many.globals == one.globals
    assert same_weights(a.model, b.model)


def test_running_the_same_federation_twice_gives_the_same_bytes() -> None:
    first, second = Recorder(), Recorder()
    trained(CLIENTS, first, federation={"clients_per_round": 2})
    trained(dict(reversed(CLIENTS.items())), second, federation={"clients_per_round": 2})
    assert first.updates == second.updates
    assert first.globals == second.globals


# ---- 3: the server's weights arrive


class Poison(FederatedCallback):
    """Overwrites what the resident model holds just before a client gets the server's weights."""

    def __init__(self, only_trainable: bool) -> None:
        self.only_trainable = only_trainable

    @torch.no_grad()
    def on_client_begin(self, args, state, control, model, **kwargs) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad or not self.only_trainable:
                parameter.fill_(7.0)
        for buffer in model.buffers():
            buffer.zero_()


def lora(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))


@pytest.mark.parametrize("aggregation", ["fedavg", "fedprox", "fedopt", "scaffold"])
def test_poisoned_local_weights_change_nothing(aggregation) -> None:
    clean, poisoned = Recorder(), Recorder()
    trained(CLIENTS, clean, federation={"aggregation": aggregation})
    trained(CLIENTS, Poison(only_trainable=False), poisoned, federation={"aggregation": aggregation})
    assert poisoned.updates == clean.updates
    assert poisoned.globals == clean.globals


def test_a_poisoned_adapter_changes_nothing() -> None:
    clean, poisoned = Recorder(), Recorder()
    trained(CLIENTS, clean, model=lora(tiny_model()))
    trained(CLIENTS, Poison(only_trainable=True), poisoned, model=lora(tiny_model()))
    assert poisoned.updates == clean.updates


def test_clients_diverge_during_a_round_and_agree_after_it() -> None:
    starts: list[bytes] = []

    class AtStart(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs) -> None:
            starts.append(pack({name: value.clone() for name, value in model.named_parameters()}))

    recorder = Recorder()
    trainer = trained(CLIENTS, recorder, client_callbacks=[AtStart()])
    assert len(starts) == 2 * len(CLIENTS)
    first, second = set(starts[: len(CLIENTS)]), set(starts[len(CLIENTS) :])
    assert len(first) == len(second) == 1
    assert len(set(recorder.updates.values())) == 2 * len(CLIENTS)
    assert second == {recorder.globals[0]}
    assert pack({name: value.clone() for name, value in trainer.model.named_parameters()}) == recorder.globals[1]


# ---- 4: nothing leaves a client but what its messages declare


class AsOverANetwork(FederatedCallback):
    """Every message goes through its bytes, and the clients' side of the algorithm is an instance of its own."""

    def __init__(self, algorithm: Aggregation) -> None:
        self.algorithm = algorithm

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        engine = self.trainer.engine
        engine.serialize = True
        engine.worker._algorithm = self.algorithm


@pytest.mark.parametrize("aggregation", ["fedavg", "fedprox", "fedopt", "scaffold"])
def test_messages_are_all_that_server_and_clients_share(aggregation) -> None:
    federation = {"aggregation": aggregation, "client_optimizer_state": "carry"}
    direct = trained(CLIENTS, federation=federation)
    network = AsOverANetwork(AGGREGATIONS[aggregation]())
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tempfile.mkdtemp()),
        train_dataset=CLIENTS,
        callbacks=[network],
        federation=FederatedConfig(num_rounds=2, **federation),
    )
    network.trainer = trainer
    trainer.train()
    assert same_weights(trainer.model, direct.model)
    assert trainer.ledger.to_dict() == direct.ledger.to_dict()


def test_rows_never_travel() -> None:
    recorder = Recorder()
    note = "the patient said"
    data = {name: rows(6, seed=i).add_column("note", [note] * 6) for i, name in enumerate("ab")}
    trained(data, recorder)
    for message in recorder.messages:
        blob = message.to_bytes()
        assert note.encode() not in blob
        assert set(read_message(blob).metrics) <= {"loss", "grad_norm", "learning_rate", "total_flos"}


ADAPTERS = {
    "lora": LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]),
    "ia3": IA3Config(task_type="SEQ_CLS", target_modules=["key"], feedforward_modules=[]),
    "prompt": PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3),
    "p-tuning": PromptEncoderConfig(task_type="SEQ_CLS", num_virtual_tokens=3, encoder_hidden_size=8),
    "prefix": PrefixTuningConfig(
        task_type="SEQ_CLS", num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=8
    ),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_base_weights_of_a_peft_model_never_travel(adapter) -> None:
    base = tiny_model()
    model = get_peft_model(base, ADAPTERS[adapter])
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: value.clone() for name, value in model.state_dict().items() if name not in trains}
    recorder = Recorder()
    trained(CLIENTS, recorder, model=model)
    for message in recorder.messages:
        assert set(message.state) == trains
    assert all(name.startswith("base_model.model.classifier") or "default" in name.split(".") for name in trains)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_frozen_layers_never_travel() -> None:
    recorder = Recorder()
    trained(CLIENTS, recorder, federation={"freeze": "embeddings+1"})
    names = set(recorder.messages[0].state)
    assert names and not any("embeddings" in name or "layer.0." in name for name in names)
    assert any("layer.1." in name for name in names)


# ---- 5: memory does not grow with the number of clients


def live_bytes() -> int:
    """Bytes of all living tensors that are not views of each other."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if isinstance(tensor, torch.Tensor)
    }
    return sum(storages.values())


def peak_bytes(num_clients: int, aggregation: Aggregation) -> int:
    """The largest amount of memory in tensors at any time a client has answered."""
    peak = 0

    class Measure(FederatedCallback):
        def on_client_end(self, args, state, control, **kwargs) -> None:
            nonlocal peak
            # What was made by now is frozen out of sight in `train()`; the same for any number of clients.
            peak = max(peak, live_bytes())

    data = rows(4)
    trained({str(i): data for i in range(num_clients)}, Measure(), federation={"aggregation": aggregation})
    return peak


@pytest.mark.usefixtures("nothing_is_frozen")
@pytest.mark.parametrize("aggregation", [FedAvg(), FedProx(), FedOpt("adam", server_lr=0.1)], ids=lambda a: a.name)
def test_memory_does_not_grow_with_the_number_of_clients(aggregation) -> None:
    few, many = (peak_bytes(num_clients, aggregation) for num_clients in (3, 24))
    model_bytes = sum(parameter.nbytes for parameter in tiny_model().parameters())
    assert few > model_bytes
    # Short of one more update.
    assert many - few < model_bytes / 2


@pytest.mark.usefixtures("nothing_is_frozen")
def test_nothing_of_a_client_stays_until_the_next_one_trains() -> None:
    measured = []

    class Measure(FederatedCallback):
        def on_client_begin(self, args, state, control, **kwargs) -> None:
            measured.append(live_bytes())

    data = rows(4)
    trained({str(i): data for i in range(4)}, Measure(), federation={"aggregation": FedAvg()})
    model_bytes = sum(parameter.nbytes for parameter in tiny_model().parameters())
    # The model, the global weights, and their sum in float64; no update and no moments of an optimizer.
    assert max(measured) < 4.5 * model_bytes


@pytest.mark.usefixtures("nothing_is_frozen")
def test_scaffold_keeps_one_control_variate_a_client() -> None:
    model_bytes = sum(parameter.nbytes for parameter in tiny_model().parameters())
    few, many = (peak_bytes(num_clients, Scaffold()) for num_clients in (3, 24))
    assert (many - few) / model_bytes == pytest.approx(21, rel=0.05)


# ---- Nothing else is touched


def generators() -> tuple[Any, ...]:
    numpy_state = np.random.get_state()
    return random.getstate(), numpy_state[1].tolist(), numpy_state[2], torch.get_rng_state().tolist()


def test_global_generators_are_untouched_by_a_federation() -> None:
    trainer = FederatedTrainer(
        model=tiny_model(), args=arguments(tempfile.mkdtemp()), train_dataset=CLIENTS, eval_dataset=None
    )
    before = generators()
    trainer.train()
    assert generators() == before


def test_global_generators_are_untouched_by_a_failing_client() -> None:
    class Failing(Trainer):
        def compute_loss(self, *args, **kwargs):
            torch.rand(1)
            raise RuntimeError("out of luck")

    trainer = federate(Failing)(model=tiny_model(), args=arguments(tempfile.mkdtemp()), train_dataset=CLIENTS)
    before = generators()
    with pytest.raises(RuntimeError):
        trainer.train()
    assert generators() == before


def test_what_a_client_sets_on_its_trainer_stays_with_it() -> None:
    class Counting(Trainer):
        count = 0
        counts: list[int] = []

        def compute_loss(self, *args, **kwargs):
            self.count += 1
            self.counts.append(self.count)
            return super().compute_loss(*args, **kwargs)

    trainer = trained({"a": rows(4), "b": rows(4)}, base=Counting)
    assert Counting.counts == [1] * 4
    assert trainer.count == 0


def test_a_clients_data_set_is_not_left_on_the_trainer() -> None:
    trainer = trained(CLIENTS)
    assert list(trainer.train_dataset) == list(CLIENTS)
    assert not isinstance(trainer.train_dataset, Dataset)
    assert trainer.accelerator._dataloaders == []
