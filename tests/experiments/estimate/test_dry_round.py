"""Dry rounds of trainers and of recipes, compared with the ledgers of real runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import conformance
import numpy as np
import pytest
import torch
from asking_method import AskingAverage, NeedsTrainingAverage
from datasets import Dataset
from federations import build_federation
from peft import LoraConfig, get_peft_model
from tiny import arguments, rows, tiny_model
from transformers import BertConfig, BertForSequenceClassification

from hf_federated import (
    ClientPart,
    ClipUpdate,
    FedAvg,
    FederatedConfig,
    FederatedTrainer,
    FedID,
    GaussianNoise,
    Postprocessor,
    QuantizeChanges,
)
from hf_federated.engines import LocalEngine
from hf_federated.experiments.estimate.dry_parties import DryFederation
from hf_federated.experiments.estimate.dry_round import DryRoundError, describe_trainer, dry_round, dry_run
from hf_federated.experiments.estimate.recipe_estimate import estimate_recipe
from hf_federated.experiments.execution import build_run
from hf_federated.experiments.recipe.recipe import load_recipe
from hf_federated.messages import ClientUpdate, Fit
from hf_federated.messages.ledger import Ledger
from hf_federated.server.collectors import BufferedCollector


FAST = (
    "aggregation scaffold",
    "aggregation median",
    "distillation fedid",
    "distillation fedaux",
    "secure_aggregation lightsecagg",
)
SCENARIOS = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
    for name in conformance.SCENARIOS
    if name != "aggregation mutual_kd"
]


def build_scenario(name: str, directory: Any) -> FederatedTrainer:
    model, federation, training, others = conformance.scenario(name).build()
    training["eval_strategy"] = "no"
    return FederatedTrainer(
        model=model,
        args=arguments(directory, num_train_epochs=2, **training),
        federation=FederatedConfig(**federation),
        engine=LocalEngine(),
        **others,
    )


def bytes_by_client(ledger: Ledger) -> dict[str, Any]:
    return ledger.to_dict()["rounds"]


def compare_with_run(trainer: FederatedTrainer) -> Ledger:
    """Compare the dry rounds of a trainer with its run, by round, client and direction."""
    dry = dry_round(trainer, trainer.federation.num_rounds)
    trainer.train()
    assert bytes_by_client(dry) == bytes_by_client(trainer.ledger)
    return dry


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.sampled(3)
def test_bytes_of_every_method_are_those_of_a_run(tmp_path, name):
    compare_with_run(build_scenario(name, tmp_path))


@pytest.mark.slow
def test_mutual_kd_is_estimated_without_its_compression(tmp_path):
    trainer = build_scenario("aggregation mutual_kd", tmp_path)
    dry = dry_round(trainer)
    trainer.train()
    measured, estimated = trainer.ledger.rounds()[0], dry.rounds()[0]
    assert estimated["bytes_down"] == measured["bytes_down"]
    # Factors are sent if they have fewer bytes than their matrix, but three tensors have a longer header than one.
    assert estimated["bytes_up"] > 0.98 * measured["bytes_up"]


class HalfOfTheTensors(Postprocessor):
    """A step of the user: a client sends every second tensor, and a count that grows."""

    def client_send(self, update: ClientUpdate, message: Fit, memory: dict[str, Any]) -> ClientUpdate:
        memory["count"] = memory.get("count", 0) + 1
        kept = {name: update.state[name] for name in list(update.state)[::2]}
        return dataclasses.replace(update, state=kept, metrics={**update.metrics, "count": float(memory["count"])})

    def server_receive(
        self, update: ClientUpdate, state: dict[str, torch.Tensor], memory: dict[str, Any]
    ) -> ClientUpdate:
        return dataclasses.replace(update, state={**state, **update.state})


class SendLargeValues(Postprocessor):
    """A step of the user that reads values: changes above a threshold, of which there are none."""

    def client_send(self, update: ClientUpdate, message: Fit, memory: dict[str, Any]) -> ClientUpdate:
        large = [float((value - message.state[name]).abs().max()) > 1e9 for name, value in update.state.items()]
        return dataclasses.replace(update, metrics={**update.metrics, "num_large": float(sum(large))})


class EqualChangesPart(ClientPart):
    """Divides each change by the largest change, which must not be zero, and prepares this in `on_batch`."""

    def receive(self, message: Fit) -> None:
        self.before = message.state

    def on_batch(self, model: Any, inputs: Any, num_items: Any) -> None:
        self.scale = 1e-3

    def send(self, update: ClientUpdate) -> ClientUpdate:
        changes = {name: value - self.before[name] for name, value in update.state.items()}
        largest = max(float(change.abs().max()) for change in changes.values())
        return dataclasses.replace(
            update, state={name: self.before[name] + change / largest * self.scale for name, change in changes.items()}
        )


class EqualChanges(FedAvg):
    client_part = EqualChangesPart


CLIENTS = {"a": rows(5), "client with a long name": rows(130, seed=1), "c": rows(12, seed=2)}
VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {"federation": {"exchange_dtype": "bfloat16", "aggregation": "scaffold"}},
    "balance": {"federation": {"balance": "min", "clients_per_round": 2}},
    "steps": {"federation": {"local_steps": 11, "client_optimizer_state": "carry"}},
    "accumulation": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.0},
    "fedbuff": {
        "federation": {"collector": "fedbuff", "collector_kwargs": {"buffer_size": 2}, "aggregation": "fedprox"},
        "num_rounds": 5,
    },
    "clipping": {"trainer": {"postprocessors": [ClipUpdate(0.1), GaussianNoise(0.1)]}},
    "steps of the user": {"trainer": {"postprocessors": [HalfOfTheTensors(), SendLargeValues()]}},
    "all": {"federation": {"exchange": "all", "freeze": "embeddings+1"}},
    "local head": {"federation": {"keep_local": "head", "aggregation": "fedavg"}},
    "8 bits": {"trainer": {"postprocessors": [QuantizeChanges()]}, "num_rounds": 3},
    "4 bits": {"trainer": {"postprocessors": [QuantizeChanges(bits=4)]}, "federation": {"clients_per_round": 2}},
    "division by the change": {"federation": {"aggregation": EqualChanges()}},
    "secure aggregation": {
        "federation": {"secure_aggregation": "secagg", "secure_aggregation_kwargs": {"max_weight": 200}},
        "num_rounds": 2,
    },
    "asking": {"federation": {"aggregation": AskingAverage()}, "num_rounds": 3},
    "asking, with values": {"federation": {"aggregation": AskingAverage(reads_values=True)}, "num_rounds": 3},
}


SLOW_VARIANTS = ("accumulation", "balance", "clipping", "steps of the user", "4 bits", "all")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW_VARIANTS else []) for name in VARIANTS]
)
@pytest.mark.sampled(4)
def test_bytes_depend_on_the_settings_as_in_a_run(tmp_path, name):
    compare_with_run(build_federation(tmp_path, CLIENTS, **VARIANTS[name]))


def test_bytes_of_an_adapter_are_those_of_a_run(tmp_path):
    model = get_peft_model(tiny_model(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))
    trainer = build_federation(
        tmp_path, CLIENTS, federation={"aggregation": "geometric_median"}, trainer={"model": model}
    )
    compare_with_run(trainer)


def test_method_with_its_own_messages_is_estimated_in_all_phases_and_in_later_rounds(tmp_path):
    ledger = compare_with_run(build_federation(tmp_path, federation={"aggregation": AskingAverage()}))
    first, second = ledger.rounds()
    assert second["bytes_down"] > 1.5 * first["bytes_down"]  # from the second round on, the velocity is sent
    fedavg = dry_round(build_federation(tmp_path)).rounds()[0]
    assert first["bytes_up"] > fedavg["bytes_up"] and first["bytes_down"] > fedavg["bytes_down"]


def test_estimate_of_a_recipe_with_a_method_of_the_user_is_the_ledger_of_its_run(recipe_path, texts_dir):
    settings = ["federation.aggregation=asking_method:AskingAverage", f"data={{path: {texts_dir}, test_split: test}}"]
    loaded = load_recipe(recipe_path, [*settings, "partition={name: iid, num_clients: 3}", "federation.num_rounds=2"])
    estimate = estimate_recipe(loaded)
    trainer = build_run(loaded).trainer
    trainer.train()
    unit, measured = estimate.units[0], trainer.ledger.rounds()[0]
    assert (unit.bytes_down, unit.bytes_up) == (measured["bytes_down"], measured["bytes_up"])
    assert {item.name: item.count for item in unit.exchanges} == {"ask_norms": 2, "fit": 1}
    assert (estimate.run_bytes_down, estimate.run_bytes_up) == (trainer.ledger.bytes_down, trainer.ledger.bytes_up)


def test_estimate_of_a_recipe_with_secure_aggregation_is_the_ledger_of_its_run(recipe_path, texts_dir):
    settings = [
        "federation={num_rounds: 1, secure_aggregation: secagg, secure_aggregation_kwargs: {max_weight: 100}}",
        f"data={{path: {texts_dir}, test_split: test}}",
        "partition={name: iid, num_clients: 3}",
    ]
    loaded = load_recipe(recipe_path, settings)
    unit = estimate_recipe(loaded).units[0]
    trainer = build_run(loaded).trainer
    trainer.train()
    measured = trainer.ledger.rounds()[0]
    assert (unit.bytes_down, unit.bytes_up) == (measured["bytes_down"], measured["bytes_up"])
    phases = ("secure_fit", "share_keys", "submit_masked", "confirm_survivors", "unmask")
    assert {item.name: item.count for item in unit.exchanges} == dict.fromkeys(phases, 1)


def test_reply_that_needs_a_training_is_an_error_that_names_the_cause(tmp_path):
    trainer = build_federation(tmp_path, federation={"aggregation": NeedsTrainingAverage()})
    cause = "No reply to the message 'ask_norms': RuntimeError: No local training runs"
    with pytest.raises(DryRoundError, match=cause):
        dry_round(trainer)


def test_dry_round_changes_neither_the_trainer_nor_random_numbers(tmp_path):
    """Also with values: ClipUpdate reads them."""
    trainer = build_federation(tmp_path, trainer={"postprocessors": [ClipUpdate(1.0)]})
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    generators = torch.get_rng_state(), np.random.get_state()[1].copy()
    dry_round(trainer, 2)
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert np.array_equal(np.random.get_state()[1], generators[1])
    assert trainer.ledger.rounds() == []


def test_dry_round_does_not_start_the_collector_of_the_trainer(tmp_path):
    collector = BufferedCollector(2)
    trainer = build_federation(tmp_path, federation={"collector": collector})
    trainer.train()
    order, context = list(collector.recorded_order), collector.context
    dry_round(trainer, 2)
    assert order and collector.recorded_order == order and collector.context is context


def test_many_mini_batches_count_as_the_one_in_the_middle(tmp_path):
    """Only the digits of integers differ between the mini-batches, and a message is padded to multiples of 8 bytes."""
    public = Dataset.from_dict({name: values * 15 for name, values in rows(10, seed=20).to_dict().items()})
    trainer = FederatedTrainer(
        model=tiny_model(problem_type="single_label_classification"),
        args=arguments(tmp_path, per_device_train_batch_size=4),
        train_dataset={"a": rows(8), "b": rows(8, seed=1)},
        public_dataset=public,
        server_dataset=rows(6, seed=21),
        client_model_init=lambda client_id: tiny_model(problem_type="single_label_classification"),
        federation=FederatedConfig(num_rounds=1, distillation=FedID()),
    )
    run = dry_run(describe_trainer(trainer))
    trainer.train()
    num_requests = 1 + 2 * 38  # 150 examples in mini-batches of 4
    assert [sum(items.values()) for items in run.exchanges[0].values()] == [num_requests] * 2
    for name in ("bytes_down", "bytes_up"):
        measured = trainer.ledger.rounds()[0][name]
        assert run.ledger.rounds()[0][name] == pytest.approx(measured, abs=8 * 2 * num_requests)
    assert (run.server.num_trained, run.clients.student.num_trained) == (3 * 38, 2 * 38)


def test_dry_round_of_a_large_model_allocates_no_weights(tmp_path):
    from test_estimated_memory import measured_bytes

    config = BertConfig(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=8, vocab_size=8000
    )
    with torch.device("meta"):
        model = BertForSequenceClassification(config)
    federation = DryFederation(
        config=FederatedConfig(num_rounds=2, federation_seed=0, aggregation="scaffold"),
        args=arguments(tmp_path),
        model=model,
        aggregation=conformance.AGGREGATIONS["scaffold"](),
        distillation=None,
        postprocessors=(),
        num_examples={"a": 10, "b": 20},
    )
    peak, _ = measured_bytes(lambda: dry_run(federation, 2) and None)
    assert peak < 0.001 * sum(parameter.nbytes for parameter in model.parameters())
