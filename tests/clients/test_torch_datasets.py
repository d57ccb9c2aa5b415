"""Map-style datasets of torch as clients train as in `Trainer`. Operations that need columns raise an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from federations import build_federation
from tiny import arguments, rows, same_weights, tiny_model
from torch.utils.data import ConcatDataset, Subset
from torch.utils.data import Dataset as TorchDataset
from transformers import Trainer, default_data_collator

from hf_federated import FederatedConfig, FederatedDataset, FederatedTrainer
from hf_federated.data import describe_partition, label_counts
from hf_federated.tasks import TextClassification


class Examples(TorchDataset):
    """Tokenized examples with a field that the model does not take."""

    def __init__(self, examples: Dataset) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.examples[index], "number": index}


class WithoutLength(TorchDataset):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [index]}


SIZES = {"north": 9, "south": 6}


def clients() -> dict[str, Examples]:
    return {name: Examples(rows(size, seed=size)) for name, size in SIZES.items()}


# ---- Training


def test_clients_with_datasets_of_torch_train_as_with_the_same_rows(tmp_path):
    same = {name: examples.examples for name, examples in clients().items()}
    options = {"federation": {"aggregation": "fedopt", "log_clients": True}}
    of_torch = build_federation(tmp_path / "torch", clients(), **options)
    of_rows = build_federation(tmp_path / "rows", same, **options)
    for trainer in (of_torch, of_rows):
        trainer.train()
    assert same_weights(of_torch.model, of_rows.model)
    entry = of_torch.state.log_history[-2]
    assert {name: entry[f"client/{name}/num_examples"] for name in SIZES} == SIZES


def test_one_dataset_of_torch_equals_the_plain_trainer(tmp_path):
    models = [tiny_model(), tiny_model()]
    Trainer(models[0], arguments(tmp_path / "plain", num_train_epochs=2), train_dataset=Examples(rows(10))).train()
    FederatedTrainer(
        models[1],
        arguments(tmp_path / "federated"),
        train_dataset=Examples(rows(10)),
        federation=FederatedConfig(num_rounds=2, client_optimizer_state="carry"),
    ).train()
    assert same_weights(*models)


def test_collator_receives_all_fields_if_columns_are_not_removed(tmp_path):
    seen: list[set[str]] = []

    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        seen.extend(set(example) for example in examples)
        return default_data_collator([{k: v for k, v in example.items() if k != "number"} for example in examples])

    trainer = build_federation(
        tmp_path, clients(), num_rounds=1, trainer={"data_collator": collate}, remove_unused_columns=False
    )
    trainer.train()
    assert len(seen) == 15 and all("number" in fields for fields in seen)


def test_limit_on_examples_selects_a_subset(tmp_path):
    same = {name: examples.examples for name, examples in clients().items()}
    trainers = [
        build_federation(
            tmp_path / str(number),
            data,
            num_rounds=1,
            federation={"max_rows_per_round": 5, "log_clients": True},
        )
        for number, data in enumerate((clients(), same))
    ]
    for trainer in trainers:
        trainer.train()
    assert same_weights(*(trainer.model for trainer in trainers))
    assert trainers[0].state.log_history[-2]["client/north/num_examples"] == 5


def test_clients_are_evaluated_on_datasets_of_torch(tmp_path):
    same = {name: examples.examples for name, examples in clients().items()}
    results = []
    for number, data in enumerate((clients(), same)):
        trainer = build_federation(
            tmp_path / str(number),
            data,
            federation={"evaluate_clients": True},
            trainer={"eval_dataset": FederatedDataset.from_dict(data)},
        )
        results.append((trainer.evaluate(), trainer.client_metrics))
    for name in ("eval_loss", "federated/eval_loss_worst"):
        assert results[0][0][name] == results[1][0][name]
    assert results[0][1]["south"]["eval_loss"] == results[1][1]["south"]["eval_loss"]


def test_run_with_datasets_of_torch_saves_its_card(tmp_path):
    trainer = build_federation(tmp_path, clients(), num_rounds=1)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    assert "| Examples per client | 6 to 9, median 7.5 |" in (tmp_path / "README.md").read_text()


# ---- The federated dataset


def test_what_is_known_of_a_dataset_of_torch():
    federated = FederatedDataset.from_dict(clients())
    assert federated.num_rows == SIZES
    assert federated.column_names == [] and federated.features is None
    assert isinstance(federated["north"], Examples)
    assert "15 (6 to 9 per client, median 7.5)" in repr(federated)
    assert len(federated.pooled_examples()) == 15 and isinstance(federated.pooled_examples(), ConcatDataset)


def test_shuffle_and_train_test_split_select_subsets():
    federated = FederatedDataset.from_dict(clients())
    shuffled = federated.shuffle(seed=2)["north"]
    assert isinstance(shuffled, Subset)
    assert sorted(example["number"] for example in shuffled) == list(range(9))
    splits = federated.train_test_split(test_size=0.3)
    assert splits.num_rows == {"train": {"north": 6, "south": 4}, "test": {"north": 3, "south": 2}}
    numbers = [example["number"] for split in ("train", "test") for example in splits[split]["north"]]
    assert sorted(numbers) == list(range(9))


@pytest.mark.parametrize(
    "call",
    [
        lambda federated, folder: federated.map(lambda row: row),
        lambda federated, folder: federated.filter(lambda row: True),
        lambda federated, folder: federated.remove_columns("number"),
        lambda federated, folder: federated.with_transform(lambda batch: batch),
        lambda federated, folder: federated.class_encode_column("labels"),
        lambda federated, folder: federated.train_test_split(stratify_by_column="labels"),
        lambda federated, folder: federated.to_dataset(),
        lambda federated, folder: federated.save_to_disk(folder / "clients"),
        lambda federated, folder: label_counts(federated, "labels"),
        lambda federated, folder: describe_partition(federated, "labels"),
    ],
    ids=["map", "filter", "columns", "transform", "classes", "stratify", "pool", "save", "labels", "describe"],
)
def test_operations_on_columns_name_the_client_and_its_dataset(tmp_path, call):
    with pytest.raises(TypeError, match=r"Client 'north' is a torch.utils.data.Dataset \(Examples\).*Dataset"):
        call(FederatedDataset.from_dict(clients()), tmp_path)


def test_dataset_of_torch_without_length_or_examples_is_refused():
    with pytest.raises(TypeError, match="client 'a' is a torch.utils.data.Dataset .WithoutLength. without a length"):
        FederatedDataset.from_dict({"a": WithoutLength()})
    with pytest.raises(ValueError, match="A client without rows cannot train: 'a'"):
        FederatedDataset.from_dict({"a": Examples(rows(4).select([]))})


def test_task_needs_datasets_with_columns(tmp_path):
    from language import tokenizer

    with pytest.raises(ValueError, match="`task` encodes columns of raw examples, but the columns .* are unknown"):
        build_federation(
            tmp_path,
            clients(),
            trainer={"task": TextClassification(["no", "yes"]), "processing_class": tokenizer()},
        )
