"""Arguments of a split trainer, its errors, and its data order."""

from __future__ import annotations

import contextlib
import json
import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from split_runs import (
    LORA,
    PREFIX,
    STRATEGIES,
    arguments,
    clients_of,
    rows_of,
    split_trainer,
    trained_values,
    whole_model,
)
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments

from hf_federated import FederatedDataset, SplitConfig, SplitFederatedTrainer, SplitModel, split_federate
from hf_federated.split_training.messages import PartParameters
from hf_federated.split_training.optimization import JointOptimizer, Party
from hf_federated.split_training.step_plan import SplitSteps, StepPlan


def test_config_parses_with_training_arguments_and_loads_from_disk(tmp_path):
    parser = HfArgumentParser((TrainingArguments, SplitConfig))
    line = ["--output_dir", str(tmp_path), "--strategy", "client_batch", "--average_every", "50"]
    _, config = parser.parse_args_into_dataclasses(line)
    config.save_pretrained(tmp_path)
    assert SplitConfig.from_pretrained(tmp_path) == config == SplitConfig("client_batch", average_every=50)
    with pytest.raises(ValueError, match="Unknown fields \\['period'\\]"):
        SplitConfig.from_dict({"period": 3})


def test_saved_config_with_a_wrong_type_is_refused(tmp_path):
    for name, value, problem in (
        ("head_blocks", True, "is a value of type bool, expected int"),
        ("body_devices", [1], "has an item that is a value of type int, expected str"),
    ):
        values = {**SplitConfig().to_dict(), name: value}
        (tmp_path / SplitConfig.file_name).write_text(json.dumps(values), encoding="utf-8")
        with pytest.raises(ValueError, match=f"is not a valid SplitConfig: `{name}` {problem}"):
            SplitConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "parallel"}, "choose one of serial, client_batch"),
        ({"average_every": 0}, "at least 1"),
        ({"average_every": 2.0}, "number of optimizer steps"),
        ({"strategy": "client_batch", "steps_per_turn": 2}, "applies to strategy='serial' only"),
        ({"tail_blocks": 0}, "at least the last block"),
        ({"head_blocks": -1}, "number of blocks"),
        ({"wire_dtype": "int2"}, "choose one of auto"),
    ],
)
def test_invalid_config_field_is_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        SplitConfig(**settings)


@pytest.mark.parametrize(
    ("share", "num_clients", "expected"), [(0.07, 100, 7), (0.5, 3, 2), (0.01, 3, 1), (1.0, 3, 3)]
)
def test_share_of_clients_is_rounded_up_to_a_count(share, num_clients, expected):
    """0.07 · 100 is slightly more than 7 in floating point."""
    assert SplitConfig(min_clients=share).resolve_min_clients(num_clients) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "no"}, "reduce_lr_on_plateau"),
        ({"train_sampling_strategy": "group_by_length"}, "'random' or 'sequential'"),
        ({"auto_find_batch_size": True}, "per_device_train_batch_size that fits"),
        ({"label_smoothing_factor": 0.1}, "weights clients by their target tokens"),
        ({"torch_compile": True}, "torch_compile"),
    ],
)
def test_error_of_unsupported_argument_names_an_alternative(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        split_trainer(tmp_path, clients_of(2, 2), SplitConfig(strategy="client_batch"), **changes)


def test_invalid_constructor_arguments_are_rejected(tmp_path):
    model, args = whole_model(), arguments(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="every party needs its own"):
        SplitFederatedTrainer(model, args, train_dataset=rows_of(0), optimizers=(optimizer, None))
    with pytest.raises(ValueError, match="Pass `model` instead"):
        SplitFederatedTrainer(model, args, train_dataset=rows_of(0), model_init=whole_model)
    with pytest.raises(ValueError, match="Override `compute_loss`"):
        SplitFederatedTrainer(model, args, split=SplitConfig(strategy="client_batch"), compute_loss_func=len)
    with pytest.raises(ValueError, match="`model` has type Linear, but must be a SplitModel"):
        SplitFederatedTrainer(torch.nn.Linear(1, 1), args, train_dataset=rows_of(0))
    with pytest.raises(ValueError, match="`train_dataset` is missing"):
        SplitFederatedTrainer(model, args).train()
    with pytest.raises(ValueError, match="requires a train_dataset"):
        SplitFederatedTrainer(model, args).get_train_dataloader()
    with pytest.raises(ValueError, match="is a stream"):
        SplitFederatedTrainer(model, args, train_dataset={"a": rows_of(0).to_iterable_dataset()})
    with pytest.raises(ValueError, match="A client without rows cannot train: 'b'"):
        SplitFederatedTrainer(model, args, train_dataset={"a": rows_of(0), "b": rows_of(0).select([])}).train()
    with pytest.raises(ValueError, match="head_blocks=1, but SplitConfig has head_blocks=2"):
        SplitFederatedTrainer(SplitModel.from_model(model), args, split=SplitConfig(head_blocks=2))
    with pytest.raises(ValueError, match="blocks"):
        SplitFederatedTrainer(model, args, split=SplitConfig(head_blocks=4))


def test_prefix_tuning_with_activation_checkpointing_is_rejected(tmp_path):
    trainer = split_trainer(tmp_path, rows_of(0, 2), adapter=PREFIX, activation_checkpointing=True)
    with pytest.raises(ValueError, match="set activation_checkpointing=False, or use LoRA"):
        trainer.train()


def test_client_batch_requires_labels(tmp_path):
    rows = rows_of(0).remove_columns("labels")
    trainer = split_trainer(tmp_path, {"a": rows, "b": rows}, SplitConfig(strategy="client_batch"))
    with pytest.raises(ValueError, match="no labels to count"):
        trainer.train()


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_client_with_nan_weights_is_named_before_averaging(strategy, tmp_path):
    trainer = split_trainer(tmp_path, clients_of(4, 4), SplitConfig(strategy=strategy, average_every=1), LORA)
    create = trainer.create_optimizer

    def poisoned(*args):
        optimizer = create(*args)
        client = trainer.active_run.clients["client 1"]
        next(iter(client.trained_parameters().values())).data.fill_(float("nan"))
        return optimizer

    trainer.create_optimizer = poisoned
    with pytest.raises(ValueError, match="client 1' are not finite|'client 1'.*not finite"):
        trainer.train()


def test_no_party_is_updated_if_gradients_of_one_are_not_finite():
    parties = {}
    for name, gradient in (("server/a", 1.0), ("a", 1.0), ("server/b", 1.0), ("b", float("inf"))):
        module = torch.nn.Linear(2, 2)
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        parties[name] = Party(name, module, torch.optim.SGD(module.parameters(), lr=0.1))
    joint = JointOptimizer(parties, max_grad_norm=1.0)
    joint.groups = [["server/a", "a"], ["server/b", "b"]]
    before = {
        name: [parameter.detach().clone() for parameter in party.module.parameters()]
        for name, party in parties.items()
    }
    with pytest.raises(ValueError, match="gradients of 'b' are not finite"):
        joint.step()
    for name, party in parties.items():
        assert all(torch.equal(*pair) for pair in zip(party.module.parameters(), before[name], strict=True)), name


def test_exchanged_parameters_are_validated():
    with pytest.raises(ValueError, match="'w' of client 'a' has NaN"):
        PartParameters("a", 3, 1, {"w": torch.tensor([float("nan")])})
    with pytest.raises(ValueError, match="num_rows must have type int"):
        PartParameters("a", 3, 1.0, {})
    for num_rows in (-1, 10**400):
        with pytest.raises(ValueError, match=f"num_rows of client 'a' is {num_rows}. It must be between 0 and"):
            PartParameters("a", 3, num_rows, {})
    message = PartParameters("a", 3, 1, {"w": torch.ones(2)})
    assert torch.equal(PartParameters.from_bytes(message.to_bytes()).state["w"], torch.ones(2))


def test_plan_includes_every_step_of_every_client_once():
    steps = {"a": 3, "b": 1, "c": 2}
    assert list(StepPlan(steps, simultaneous=True)) == [{"a": 0, "b": 0, "c": 0}, {"a": 1, "c": 1}, {"a": 2}]
    assert list(StepPlan(steps, simultaneous=False)) == [{"a": 0}, {"a": 1}, {"a": 2}, {"b": 0}, {"c": 0}, {"c": 1}]
    turns = [{"a": 0}, {"a": 1}, {"b": 0}, {"c": 0}, {"c": 1}, {"a": 2}]
    assert list(StepPlan(steps, simultaneous=False, steps_per_turn=2)) == turns


@pytest.mark.parametrize("steps_per_turn", [None, 1, 3])
def test_plan_of_many_steps_needs_no_memory(steps_per_turn):
    plan = StepPlan({"a": 10**12, "b": 2}, simultaneous=False, steps_per_turn=steps_per_turn)
    assert len(plan) == 10**12 + 2 and plan[-1] == ({"b": 1} if steps_per_turn is None else {"a": 10**12 - 1})
    with pytest.raises(IndexError):
        plan[len(plan)]


def test_every_example_is_used_once_per_epoch_in_a_new_order():
    rows = {name: Dataset.from_dict({"x": list(range(start, start + 5))}) for name, start in (("a", 0), ("b", 5))}
    collate = dict.fromkeys(rows, lambda batch: [row["x"] for row in batch])
    steps = SplitSteps(
        rows, collate, 2, 2, simultaneous=True, steps_per_turn=None, seed=3, shuffle=True, drop_last=False
    )
    epochs = []
    for epoch in (0, 1, 0):
        steps.set_epoch(epoch)
        epochs.append([steps[number] for number in range(len(steps))])
        seen = [
            x for step in epochs[-1] for client_batches in step.values() for batch in client_batches for x in batch
        ]
        assert sorted(seen) == list(range(10))
    assert epochs[0] == epochs[2] != epochs[1]
    orders = [[x for step in epochs[0] for batch in step[client_id] for x in batch] for client_id in rows]
    assert orders[0] != [x - 5 for x in orders[1]]
    assert [len(client_batches) for step in epochs[0] for client_batches in step.values()] == [2, 2, 1, 1]


def test_federated_dataset_can_be_trained_on_and_evaluated(tmp_path):
    clients = FederatedDataset.from_dict(clients_of(4, 4))
    trainer = SplitFederatedTrainer(
        whole_model(),
        arguments(tmp_path, include_num_input_tokens_seen="all"),
        train_dataset=clients,
        eval_dataset={"all": clients},
    )
    before = trainer.evaluate()["eval_all_loss"]
    trainer.train()
    assert trainer.state.num_input_tokens_seen == 8 * 7
    assert trainer.evaluate(clients)["eval_loss"] < before
    assert trainer.predict(clients["client 0"]).predictions.shape == (4, 7, 40)


def test_serial_run_with_many_clients(tmp_path):
    clients = {str(number): rows_of(number, 1, 4) for number in range(30)}
    trainer = split_trainer(tmp_path, clients, SplitConfig(strategy="serial"), LORA, max_steps=3)
    assert trainer.train().global_step == 3


def test_interrupted_run_keeps_trained_weights_in_model(tmp_path):
    class Interrupt(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    models = []
    for callbacks in ([], [Interrupt()]):
        trainer = split_trainer(tmp_path, clients_of(4, 4), max_steps=1)
        for callback in callbacks:
            trainer.add_callback(callback)
        with pytest.raises(KeyboardInterrupt) if callbacks else contextlib.nullcontext():
            trainer.train()
        models.append(trained_values(trainer.model))
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_random_numbers_of_loss_differ_between_steps_and_clients(tmp_path):
    drawn = []

    class Drawing(SplitFederatedTrainer):
        def compute_loss(self, *args, **kwargs):
            drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
            return super().compute_loss(*args, **kwargs)

    for _ in range(2):
        Drawing(whole_model(), arguments(tmp_path), train_dataset=clients_of(4, 4)).train()
    assert drawn[:4] == drawn[4:] and all(len(set(values)) == 4 for values in zip(*drawn, strict=True))


def test_create_optimizer_of_split_subclass_is_rejected(tmp_path):
    class CustomTrainer(SplitFederatedTrainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    with pytest.raises(TypeError, match="CustomTrainer.create_optimizer created no optimizers for the parties"):
        CustomTrainer(whole_model(), arguments(tmp_path), train_dataset=rows_of(0, 2)).train()


def test_custom_create_optimizer_is_used_for_every_party(tmp_path):
    class CustomTrainer(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return self.optimizer

    optimizer_types = []

    class RecordOptimizers(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            optimizer_types.append([type(party.optimizer) for party in trainer.active_run.parties.values()])

    trainer = split_federate(CustomTrainer)(whole_model(), arguments(tmp_path), train_dataset=clients_of(2, 2))
    trainer.add_callback(RecordOptimizers())
    trainer.train()
    assert optimizer_types == [[torch.optim.SGD] * 3] * 2
