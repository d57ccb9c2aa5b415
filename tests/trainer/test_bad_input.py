"""Unsupported input is refused when the trainer is built. The error names the change to make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import DatasetDict, IterableDataset
from federations import CLIENTS, build_federation
from tiny import arguments, rows, same_weights, tiny_model
from transformers import Trainer

from hf_federated import FederatedConfig, FederatedTrainer


def stream(num_rows: int, seed: int = 0) -> IterableDataset:
    return rows(num_rows, seed).to_iterable_dataset()


# ---- Refused input


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"max_steps": 5}, "max_steps=5 counts optimizer steps, but a round has local_epochs=1.*Set `local_steps`"),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
            "reduce_lr_on_plateau.*'linear' or 'cosine'",
        ),
        ({"lr_scheduler_type": "greedy", "eval_strategy": "epoch"}, "greedy.*'linear' or 'cosine'"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True .*per_device_train_batch_size"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_unsupported_training_arguments_are_refused(tmp_path, kwargs, words) -> None:
    trainer = {"eval_dataset": rows(4)} if kwargs.get("eval_strategy") else {}
    with pytest.raises(ValueError, match=words):
        build_federation(tmp_path, trainer=trainer, **kwargs)


@pytest.mark.parametrize(
    ("max_steps", "federation", "words"),
    [
        (1000, {"local_steps": 50, "num_rounds": 5}, "max_steps=1000 and local_steps=50 make 20 rounds.*num_rounds=5"),
        (
            1000,
            {"local_steps": 300},
            r"not a multiple of local_steps=300. Set `max_steps` to 900 \(3 rounds\) or 1200 \(4 rounds\)",
        ),
        (20, {"local_steps": 50}, r"not a multiple of local_steps=50. Set `max_steps` to 50 \(1 rounds?\)"),
        (20, {"num_rounds": 5}, "max_steps=20 counts optimizer steps.*Or remove `max_steps` and set `num_rounds`"),
    ],
)
def test_contradictory_max_steps_is_refused(tmp_path, max_steps, federation, words) -> None:
    with pytest.raises(ValueError, match=words):
        build_federation(tmp_path, federation={"num_rounds": None, **federation}, max_steps=max_steps)


@pytest.mark.parametrize("num_rounds", [None, 20])
def test_max_steps_determines_the_number_of_rounds(tmp_path, num_rounds) -> None:
    federation = {"num_rounds": num_rounds, "local_steps": 50}
    trainer = build_federation(tmp_path, federation=federation, max_steps=1000, num_train_epochs=3)
    assert trainer.federation.num_rounds == 1000 // 50


@pytest.mark.parametrize("argv", ["train it.py", "-c", ""])
def test_several_gpus_in_one_process_are_refused_with_the_launch_command(tmp_path, monkeypatch, argv) -> None:
    """`TrainingArguments` counts the visible GPUs. The script is unknown in a notebook and with `python -c`."""
    script = "script.py"
    if argv.endswith(".py"):
        path = tmp_path / argv
        path.touch()
        argv, script = str(path), f"'{path}'"
    monkeypatch.setattr("sys.argv", [argv])
    args = arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError) as error:
        build_federation(tmp_path, trainer={"args": args})
    assert f"`accelerate launch --num_processes 2 {script}`" in str(error.value)
    assert f"`CUDA_VISIBLE_DEVICES=0 python {script}`" in str(error.value)


@pytest.mark.parametrize(
    ("federation", "words"),
    [
        (
            {"aggregation": "fedmagic"},
            "`aggregation` is 'fedmagic'; did you mean 'fedavg'. Allowed are 'fedavg', .*'scaffold', .*'local_only', "
            ".*a reference to your own class",
        ),
        ({"aggregation_kwargs": {"mu": 1}}, "unexpected keyword argument 'mu'. Allowed arguments are .*weighting"),
        (
            {"clients_per_round": 0.1},
            "clients_per_round=0.1 rounds to 0 of 3 clients.*at least 0.333 .*number of clients",
        ),
        ({"clients_per_round": 4}, "clients_per_round=4, but the federation has 3 clients"),
        (
            {"clients_per_round": 2, "min_clients": 3},
            "min_clients=3, but a round samples 2 clients. Lower `min_clients`",
        ),
        ({"evaluate_clients": True}, "evaluate_clients=True needs `eval_dataset` to be a FederatedDataset"),
        ({"exchange": "adapter"}, "needs a PEFT model.*get_peft_model.*exchange='trainable'"),
        ({"freeze": "9"}, "asks for 9 layers; BertForSequenceClassification has 2"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_invalid_federation_settings_are_refused(tmp_path, federation, words) -> None:
    with pytest.raises(ValueError, match=words):
        build_federation(tmp_path, federation=federation)


@pytest.mark.parametrize(
    ("train_dataset", "words"),
    [
        (
            DatasetDict(train=rows(4), test=rows(4)),
            r"\['test', 'train'\], which are splits.*FederatedDataset.from_dict",
        ),
        ({"a": rows(4), "empty": rows(4).select([])}, "A client without rows cannot train: 'empty'. Leave it out"),
        ({"a": stream(4), "b": stream(4)}, "Client 'a' has a stream .*Set `local_steps`"),
        ({name: data.rename_column("labels", "stars") for name, data in CLIENTS.items()}, "no label column.*rename"),
        ({}, "client"),
    ],
    ids=["splits", "empty client", "streams", "no labels", "no clients"],
)
def test_invalid_training_data_is_refused(tmp_path, train_dataset, words) -> None:
    with pytest.raises(ValueError, match=words):
        build_federation(tmp_path, train_dataset)


@pytest.mark.parametrize("attribute", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_sharded_models_are_refused(tmp_path, attribute) -> None:
    class Sharded(Trainer):
        """A trainer in the state that `accelerate launch` sets up, independent of the training arguments."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            setattr(self, attribute, True)

    with pytest.raises(ValueError, match="(FSDP with .*: 1`|DeepSpeed) does not work .*plain data parallelism"):
        build_federation(tmp_path, base=Sharded)


def test_federation_without_train_dataset_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="`federation` needs a `train_dataset`: a FederatedDataset, or a mapping"):
        FederatedTrainer(tiny_model(), arguments(tmp_path), federation=FederatedConfig())


def test_drop_last_is_refused_if_a_client_has_less_than_a_batch(tmp_path) -> None:
    with pytest.raises(
        ValueError,
        match="1 clients have fewer examples than a batch of 4.*'short'.*Set `dataloader_drop_last` to False",
    ):
        build_federation(tmp_path, {**CLIENTS, "short": rows(3)}, dataloader_drop_last=True)


def test_model_without_trainable_parameters_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="No parameter of the model requires a gradient.*Unfreeze"):
        build_federation(tmp_path, trainer={"model": tiny_model().requires_grad_(False)})


def test_hyperparameter_search_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="build a FederatedTrainer for each trial"):
        build_federation(tmp_path).hyperparameter_search()


def test_override_that_does_not_start_the_rounds_is_named(tmp_path) -> None:
    class OwnSchedule(FederatedTrainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(self.model.parameters()))
            return self.lr_scheduler

    trainer = OwnSchedule(tiny_model(), arguments(tmp_path), train_dataset=CLIENTS)
    with pytest.raises(
        AttributeError, match=r"have not started.*call `super\(\)\.create_scheduler\(num_training_steps"
    ):
        trainer.train()


def test_label_column_is_required_only_without_custom_loss(tmp_path) -> None:
    class CustomLoss(Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            return model(**inputs).logits.pow(2).mean()

    unlabeled = {name: data.remove_columns("labels") for name, data in CLIENTS.items()}
    with pytest.raises(ValueError, match="no label column"):
        build_federation(tmp_path, unlabeled)
    build_federation(tmp_path, unlabeled, base=CustomLoss).train()


# ---- Accepted input


def test_client_with_one_example_trains(tmp_path) -> None:
    trainer = build_federation(tmp_path, {"one": rows(1), "more": rows(6)}, federation={"log_clients": True})
    trainer.train()
    entry = trainer.state.log_history[-2]
    assert (entry["client/one/num_examples"], entry["client/one/num_steps"]) == (1, 1)
    assert (entry["client/more/num_examples"], entry["client/more/num_steps"]) == (6, 2)


def test_streams_train_with_local_steps(tmp_path) -> None:
    trainer = build_federation(
        tmp_path, {"a": stream(12), "b": stream(20, 1)}, federation={"local_steps": 2, "log_clients": True}
    )
    trainer.train()
    entry = trainer.state.log_history[-2]
    # Two batches of four.
    assert entry["client/a/num_examples"] == entry["client/b/num_examples"] == 8
    assert not same_weights(trainer.model, tiny_model())
