"""Tests of the adapter for the partitioners of `flwr_datasets`."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from datasets import Dataset
from partition_checks import skewed_labels

from hf_federated.data import FederatedDataset


flower = pytest.importorskip("flwr_datasets.partitioner")


def reviews(num_rows: int = 300) -> Dataset:
    movies = [f"movie-{i % 7}" for i in range(num_rows)]
    return Dataset.from_dict({"label": skewed_labels(num_rows, 4), "movie": movies, "row": list(range(num_rows))})


MAKE = {
    "iid": lambda: flower.IidPartitioner(5),
    "dirichlet": lambda: flower.DirichletPartitioner(5, "label", alpha=0.5, min_partition_size=5, seed=1),
    "shards": lambda: flower.ShardPartitioner(5, "label", num_shards_per_partition=2, seed=1),
    "pathological": lambda: flower.PathologicalPartitioner(5, "label", num_classes_per_partition=2, seed=1),
    "linear": lambda: flower.LinearPartitioner(5),
    "natural": lambda: flower.NaturalIdPartitioner("movie"),
    "grouped": lambda: flower.GroupedNaturalIdPartitioner("movie", group_size=2),
    "sizes": lambda: flower.SizePartitioner([10, 20, 30]),
}
each = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


@each
@pytest.mark.parametrize(
    "change",
    [
        lambda dataset: dataset,
        lambda dataset: dataset.shuffle(seed=0),
        lambda dataset: dataset.select(range(50, 250)),
        lambda dataset: dataset.select([*range(100), *range(100)]),
        lambda dataset: dataset.with_format("numpy"),
    ],
    ids=["whole", "shuffled", "contiguous", "twice", "formatted"],
)
def test_clients_have_the_same_rows_as_in_flwr_datasets(make, change):
    dataset = change(reviews())
    reference = make()
    reference.dataset = dataset
    expected = [np.asarray(reference.load_partition(i)["row"][:]).tolist() for i in range(reference.num_partitions)]
    clients = FederatedDataset.from_dataset(dataset, make())
    assert [np.asarray(clients[client_id]["row"][:]).tolist() for client_id in clients] == expected
    assert clients.column_names == ["label", "movie", "row"]


@each
def test_partitioner_can_be_used_again(make):
    partitioner = make()
    first = FederatedDataset.from_dataset(reviews(), partitioner)
    second = FederatedDataset.from_dataset(reviews(), partitioner)
    assert first.num_rows == second.num_rows
    assert not partitioner.is_dataset_assigned()
    partitioner.dataset = reviews()
    assert len(partitioner.load_partition(0)) == next(iter(first.num_rows.values()))


def test_clients_have_natural_names_if_available():
    assert list(FederatedDataset.from_dataset(reviews(), MAKE["natural"]())) == [f"movie-{i}" for i in range(7)]
    assert list(FederatedDataset.from_dataset(reviews(), MAKE["iid"]())) == ["0", "1", "2", "3", "4"]


def test_partitioning_records_the_arguments():
    partitioning = FederatedDataset.from_dataset(reviews(), MAKE["dirichlet"]()).partitioning
    assert json.loads(json.dumps(partitioning)) == partitioning
    expected = {"partitioner": "FlowerPartitioner", "flwr_datasets": "DirichletPartitioner", "alpha": 0.5, "seed": 1}
    assert expected.items() <= partitioning.items()
    assert {"num_partitions": 5, "partition_by": "label", "min_partition_size": 5}.items() <= partitioning.items()


@pytest.mark.parametrize("name", ["VerticalEvenPartitioner", "VerticalSizePartitioner"])
def test_partitioners_that_split_columns_raise_error(name):
    arguments = {"num_partitions": 2} if name == "VerticalEvenPartitioner" else {"partition_sizes": [1, 1]}
    with pytest.raises(TypeError, match=f"{name} splits columns: every client gets all rows and some of the columns"):
        FederatedDataset.from_dataset(reviews(), getattr(flower, name)(**arguments))


def test_partitioner_with_assigned_dataset_raises_error():
    partitioner = flower.IidPartitioner(5)
    partitioner.dataset = reviews()
    with pytest.raises(ValueError, match="This IidPartitioner already has a dataset.*Create a new IidPartitioner"):
        FederatedDataset.from_dataset(reviews(), partitioner)


class RowsPartitioner(flower.Partitioner):
    def __init__(self, *rows: list[int]) -> None:
        super().__init__()
        self._rows = rows

    @property
    def num_partitions(self) -> int:
        return len(self._rows)

    def load_partition(self, partition_id: int) -> Dataset:
        return self.dataset.select(self._rows[partition_id])


def test_error_names_a_row_that_is_assigned_twice():
    with pytest.raises(ValueError, match="assigns row 3 2 times"):
        FederatedDataset.from_dataset(reviews(), RowsPartitioner([1, 3], [3, 5]))


def test_error_names_a_client_without_rows():
    with pytest.raises(ValueError, match="A client without rows cannot train: '1'"):
        FederatedDataset.from_dataset(reviews(), RowsPartitioner([1, 3], []))


def test_several_splits_raise_error():
    from hf_federated.data.partitioners.flower import FlowerPartitioner

    partitioner = FlowerPartitioner(flower.IidPartitioner(5))
    assert list(partitioner.partition_splits({"train": reviews()})) == ["train"]
    message = r"IidPartitioner of flwr_datasets can partition one split, got \['train', 'test'\]"
    with pytest.raises(ValueError, match=message):
        partitioner.partition_splits({"train": reviews(), "test": reviews()})


def test_flwr_datasets_is_not_imported():
    code = (
        "import sys; from datasets import Dataset; from hf_federated import FederatedDataset, IidPartitioner;"
        "FederatedDataset.from_dataset(Dataset.from_dict({'a': [1, 2]}), IidPartitioner(2));"
        "print('flwr_datasets' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
