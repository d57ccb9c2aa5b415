"""A folder that `save_to_disk` writes restores the clients, and `load_dataset` can read it."""

from __future__ import annotations

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, load_dataset
from stored_clients import files, rows, same

from hf_federated import FederatedDataset, FederatedDatasetDict, IidPartitioner
from hf_federated.data import PartitionFile, PartitionFileError
from hf_federated.data.source import content_hash


def test_loaded_dataset_equals_the_saved_dataset(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    loaded = FederatedDataset.load_from_disk(tmp_path / "clients")
    assert same(loaded, clients)
    assert loaded.partitioning == clients.partitioning
    assert loaded.features == clients.features
    assert loaded.num_rows == clients.num_rows
    assert loaded.to_dataset()[:] == clients.to_dataset()[:]


def test_loaded_dataset_can_be_mapped_selected_and_saved_again(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    loaded = FederatedDataset.load_from_disk(tmp_path / "clients")
    longer = loaded.map(lambda row: {"length": len(row["text"])})
    assert same(longer.remove_columns("length"), clients)
    assert longer["no"]["length"][:] == [len(text) for text in clients["no"]["text"][:]]
    assert same(loaded.select_clients(["no", "Anna"]), clients.select_clients(["no", "Anna"]))
    loaded.save_to_disk(tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "clients")


def test_load_reads_only_the_requested_clients_in_order(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    for name in ("_41nna", "_64efault"):
        shutil.rmtree(tmp_path / "clients" / "data" / name)
    loaded = FederatedDataset.load_from_disk(tmp_path / "clients", clients=["no", "007"])
    assert same(loaded, clients.select_clients(["no", "007"]))
    with pytest.raises(PartitionFileError, match="of client 'Anna' is missing"):
        FederatedDataset.load_from_disk(tmp_path / "clients")
    with pytest.raises(KeyError, match="no client 'Bob' in the split 'train'. There are 6 clients"):
        FederatedDataset.load_from_disk(tmp_path / "clients", clients=["no", "Bob"])
    for cls, place in ((FederatedDataset, " in the split 'train'"), (FederatedDatasetDict, "")):
        with pytest.raises(KeyError, match=f"no client 'ana'{place}. Did you mean 'Anna'?"):
            cls.load_from_disk(tmp_path / "clients", clients=["no", "ana"])
    with pytest.raises(TypeError, match="got the string 'no'"):
        FederatedDataset.load_from_disk(tmp_path / "clients", clients="no")


def test_load_dataset_reads_the_saved_folder(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    folder, cache = str(tmp_path / "clients"), str(tmp_path / "cache")
    all_rows = load_dataset(folder, split="train", cache_dir=cache)
    assert sorted(all_rows["text"][:]) == sorted(rows()["text"][:])
    assert all_rows.features == clients.features
    escaped = {"Anna": "_41nna", "default": "_64efault", "Zoë/..": "_5ao_c3_ab_2f_2e_2e", "con": "_63on"}
    for client_id in clients:
        client = load_dataset(folder, escaped.get(client_id, client_id), split="train", cache_dir=cache)
        assert client[:] == clients[client_id][:]


@pytest.mark.slow
def test_more_than_a_thousand_clients_give_one_configuration_and_a_warning(tmp_path, caplog):
    numbers = Dataset.from_dict({"n": list(range(1001))})
    FederatedDataset.from_dataset(numbers, IidPartitioner(1001)).save_to_disk(tmp_path / "many")
    assert (tmp_path / "many" / "README.md").read_text().count("config_name") == 1
    assert "1001 clients" in caplog.text and "load_dataset" in caplog.text


def test_saving_the_same_data_twice_writes_identical_files(clients, tmp_path):
    clients.save_to_disk(tmp_path / "one", label_column="label")
    FederatedDataset.from_column(rows(), "who").save_to_disk(tmp_path / "two", label_column="label")
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_large_client_is_split_into_several_files(tmp_path):
    clients = FederatedDataset.from_dict({"a": Dataset.from_dict({"text": ["x" * 1000] * 100 + ["y"]})})
    clients.save_to_disk(tmp_path / "clients", max_shard_size="20KB")
    paths = sorted(path.name for path in (tmp_path / "clients" / "data" / "a").iterdir())
    assert len(paths) == 6 and paths[0] == "train-00000-of-00006.parquet"
    assert same(FederatedDataset.load_from_disk(tmp_path / "clients"), clients)
    assert len(load_dataset(str(tmp_path / "clients"), "a", split="train", cache_dir=str(tmp_path / "c"))) == 101


def test_label_counts_are_written_only_on_request(clients, tmp_path):
    clients.save_to_disk(tmp_path / "without")
    assert "label_counts" not in (tmp_path / "without" / "partition.json").read_text()
    clients.save_to_disk(tmp_path / "with", label_column="label")
    stored = PartitionFile.read(tmp_path / "with")
    assert (stored.label_column, stored.label_names) == ("label", ["bad", "fair", "good"])
    for client in stored.clients:
        labels = clients[client.client_id]["label"][:]
        assert client.splits["train"].label_counts == [labels.count(label) for label in range(3)]
    assert "| good" in (tmp_path / "with" / "README.md").read_text()


def test_several_splits_are_saved_together_and_a_client_may_lack_a_split(tmp_path):
    train = FederatedDataset.from_column(rows(), "who")
    test = FederatedDataset.from_column(rows(30, seed=1).select(range(3)), "who")
    both = FederatedDatasetDict(train=train, test=test)
    both.save_to_disk(tmp_path / "both", label_column="label")
    loaded = FederatedDatasetDict.load_from_disk(tmp_path / "both")
    assert list(loaded) == ["train", "test"]
    assert all(same(loaded[split], both[split]) for split in both)
    assert list(FederatedDataset.load_from_disk(tmp_path / "both", split="test")) == list(test)
    some = FederatedDatasetDict.load_from_disk(tmp_path / "both", clients=["con", "Anna"])
    assert {split: list(clients) for split, clients in some.items()} == {"train": ["con", "Anna"], "test": ["Anna"]}
    cache = str(tmp_path / "cache")
    assert list(load_dataset(str(tmp_path / "both"), "_63on", cache_dir=cache)) == ["train"]
    assert list(load_dataset(str(tmp_path / "both"), "_41nna", cache_dir=cache)) == ["train", "test"]
    with pytest.raises(ValueError, match="no split 'dev'. The splits are: train, test"):
        FederatedDataset.load_from_disk(tmp_path / "both", split="dev")


def test_splits_with_different_label_names_raise_value_error(tmp_path):
    test = rows(30).cast_column("label", ClassLabel(names=["good", "fair", "bad"]))
    both = FederatedDatasetDict(
        train=FederatedDataset.from_column(rows(), "who"), test=FederatedDataset.from_column(test, "who")
    )
    with pytest.raises(ValueError, match="'train' and 'test' differ"):
        both.save_to_disk(tmp_path / "both")
    assert not any(tmp_path.iterdir())


def test_relative_path_is_resolved_when_the_folder_is_loaded(clients, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clients.save_to_disk("clients")
    loaded = FederatedDataset.load_from_disk("clients")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    clients.map(lambda row: {"text": "other"}).save_to_disk("clients")
    assert same(loaded, clients)


def test_types_without_parquet_equivalent_are_restored(tmp_path):
    times = pa.table(
        {
            "second": pa.array([1, None, 3], pa.timestamp("s")),
            "zone": pa.array([1, 2, 3], pa.timestamp("s", tz="UTC")),
            "day": pa.array([86_400_000, 0, None], pa.date64()),
            "clock": pa.array([1, 2, 3], pa.time32("s")),
            "dtype": pa.array([1.5, None, 2.5], pa.float16()),
        }
    )
    clients = FederatedDataset.from_dict({"a": Dataset(times)})
    clients.save_to_disk(tmp_path / "clients")
    loaded = FederatedDataset.load_from_disk(tmp_path / "clients")
    assert same(loaded, clients)
    assert loaded.to_dataset().features == clients["a"].features
    assert content_hash(loaded["a"]) == content_hash(clients["a"])


@pytest.mark.parametrize("value", [np.float32(1), float("nan"), {1, 2}])
def test_setting_without_json_representation_is_named(tmp_path, value):
    clients = FederatedDataset.from_dataset(rows(), IidPartitioner(3))
    clients.partitioning["temperature"] = value
    with pytest.raises(ValueError, match="temperature=.* of IidPartitioner cannot be written as JSON"):
        clients.save_to_disk(tmp_path / "clients")
    assert not any(tmp_path.iterdir())


def test_split_name_longer_than_100_characters_raises_value_error(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients", split="a" * 100)
    with pytest.raises(ValueError, match="at most 100 characters"):
        clients.save_to_disk(tmp_path / "too_long", split="a" * 101)


@pytest.mark.parametrize("size", [0, -5, 1.5, "foo", None, True])
def test_invalid_max_shard_size_raises_value_error(clients, tmp_path, size):
    with pytest.raises(ValueError, match="max_shard_size must be a size"):
        clients.save_to_disk(tmp_path / "clients", max_shard_size=size)
    assert not any(tmp_path.iterdir())


def test_client_is_read_on_each_access_with_a_stable_fingerprint(tmp_path):
    clients = FederatedDataset.from_dataset(rows(1000), IidPartitioner(100))
    clients.save_to_disk(tmp_path / "clients")
    loaded = FederatedDataset.load_from_disk(tmp_path / "clients")
    assert loaded["7"] is not loaded["7"]
    assert loaded["7"]._fingerprint == loaded["7"]._fingerprint != loaded["8"]._fingerprint


def test_parquet_files_contain_the_features(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    path = tmp_path / "clients" / "data" / "no" / "train-00000-of-00001.parquet"
    assert b"ClassLabel" in pq.read_schema(path).metadata[b"huggingface"]
