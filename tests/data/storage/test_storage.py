"""Save federated datasets to disk and load them again."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, IterableDataset, load_dataset

from hf_federated import FederatedDataset, FederatedDatasetDict, IidPartitioner
from hf_federated.data import PartitionFile, PartitionFileError
from hf_federated.data.source import content_hash
from hf_federated.data.storage import folder as folder_module
from hf_federated.data.storage.partition_file import StoredFile


NAMES = ["Anna", "default", "007", "no", "Zoë/..", "con"]


def rows(num_rows: int = 120, seed: int = 0) -> Dataset:
    generator = np.random.default_rng(seed)
    dataset = Dataset.from_dict(
        {
            "who": [NAMES[i % len(NAMES)] for i in range(num_rows)],
            "text": [f"text {i}" for i in range(num_rows)],
            "label": generator.integers(0, 3, num_rows),
        }
    )
    return dataset.cast_column("label", ClassLabel(names=["bad", "fair", "good"]))


@pytest.fixture
def clients() -> FederatedDataset:
    return FederatedDataset.from_column(rows(), "who")


def file_of(raw: dict) -> list[dict]:
    return raw["clients"][0]["splits"]["train"]["files"][:1]


def same(left: FederatedDataset, right: FederatedDataset) -> bool:
    return list(left) == list(right) and all(
        left[i][:] == right[i][:] and left[i].features == right[i].features for i in left
    )


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
    with pytest.raises(KeyError, match="no client 'Bob'"):
        FederatedDataset.load_from_disk(tmp_path / "clients", clients=["no", "Bob"])
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


def test_index_only_folder_restores_clients_from_the_source(clients, tmp_path):
    clients.save_to_disk(tmp_path / "index", index_only=True)
    assert sum(path.stat().st_size for path in (tmp_path / "index").rglob("*.parquet")) < 3000
    assert b"text 5" not in b"".join(files(tmp_path / "index").values())
    loaded = FederatedDataset.load_from_disk(tmp_path / "index", source=rows())
    assert same(loaded, clients)
    two = FederatedDataset.load_from_disk(tmp_path / "index", clients=["no", "Anna"], source=rows())
    assert same(two, clients.select_clients(["no", "Anna"]))


def test_index_only_folder_rejects_a_changed_source(clients, tmp_path):
    clients.save_to_disk(tmp_path / "index", index_only=True)
    with pytest.raises(ValueError, match="Pass these rows with source=dataset"):
        FederatedDataset.load_from_disk(tmp_path / "index")
    changed = rows().map(lambda row, number: {"text": "other" if number == 7 else row["text"]}, with_indices=True)
    for source in (rows().shuffle(seed=0), rows().select(range(119)), rows(seed=1), changed):
        with pytest.raises(PartitionFileError, match="rows of source differ from the partitioned rows"):
            FederatedDataset.load_from_disk(tmp_path / "index", source=source)
    clients.save_to_disk(tmp_path / "rows")
    with pytest.raises(ValueError, match="Remove the argument source"):
        FederatedDataset.load_from_disk(tmp_path / "rows", source=rows())
    separate = FederatedDataset.from_dict({"a": rows()})
    with pytest.raises(ValueError, match="each client has a separate dataset"):
        separate.save_to_disk(tmp_path / "separate", index_only=True)


def test_damaged_file_error_names_file_and_client(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    path = tmp_path / "clients" / "data" / "007" / "train-00000-of-00001.parquet"
    original = path.read_bytes()
    for damaged in (original[:-1], original[:100] + b"\xff" + original[101:], b""):
        path.write_bytes(damaged)
        with pytest.raises(PartitionFileError, match=r"data/007/train-00000-of-00001.parquet of client '007' differs"):
            FederatedDataset.load_from_disk(tmp_path / "clients")


def test_files_that_do_not_match_partition_json_raise_errors(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    text = (tmp_path / "clients" / "partition.json").read_text()
    (tmp_path / "clients" / "partition.json").write_text(
        text.replace('"num_rows": 20', '"num_rows": 21', 1).replace('"num_rows": 20', '"num_rows": 19', 1)
    )
    with pytest.raises(PartitionFileError, match="'007' contain 20 rows, but partition.json lists 21"):
        FederatedDataset.load_from_disk(tmp_path / "clients")
    (tmp_path / "clients" / "partition.json").write_text(
        text.replace('["bad", "fair", "good"]', '["good", "fair", "bad"]')
    )
    with pytest.raises(
        PartitionFileError, match="'007' differ from partition.json in their columns, types or label names: label"
    ):
        FederatedDataset.load_from_disk(tmp_path / "clients")


def test_files_changed_after_loading_raise_an_error_on_access(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    loaded = FederatedDataset.load_from_disk(tmp_path / "clients")
    clients.map(lambda row: {"text": row["text"].upper()}).save_to_disk(tmp_path / "clients")
    for read in (lambda: loaded["no"], loaded.to_dataset, lambda: loaded.save_to_disk(tmp_path / "again")):
        with pytest.raises(PartitionFileError, match="differs from its entry in partition.json"):
            read()
    shutil.rmtree(tmp_path / "clients")
    with pytest.raises(PartitionFileError, match="of client 'no' is missing"):
        loaded["no"]


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


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw.update(format="other"), "not written by hf_federated"),
        (lambda raw: raw.update(format_version=2), "format version 2"),
        (lambda raw: raw.pop("features"), "incomplete or damaged"),
        (lambda raw: raw.update(clients=[]), "lists no client"),
        (lambda raw: raw.update(clients=raw["clients"] * 2), "or lists a client twice"),
        (lambda raw: raw.update(clients={}), "clients must be a list"),
        (lambda raw: raw.update(splits=["../x"]), "not in"),
        (lambda raw: raw.update(splits=["train", "train"]), "a split twice"),
        (lambda raw: raw.update(features={"x": {"dtype": "float7", "_type": "Value"}}), "incomplete or damaged"),
        (lambda raw: raw.update(partitioning={"train": "iid"}), "partitioning must be a dict"),
        (lambda raw: raw["clients"][0].update(id=""), "does not match its id"),
        (lambda raw: raw["clients"][0].update(name="default"), "does not match its id"),
        (lambda raw: raw["clients"][0].update(name=raw["clients"][1]["name"]), "does not match its id"),
        (
            lambda raw: raw["clients"][0]["splits"].update(raw["clients"][1]["splits"]),
            "is not in the folder of the client",
        ),
        (lambda raw: raw["clients"][0]["splits"]["train"]["files"].extend(file_of(raw)), "lists a file twice"),
        (lambda raw: raw["clients"][0]["splits"]["train"].update(num_rows="20"), "num_rows must be a int"),
        (lambda raw: raw["clients"][0]["splits"]["train"].update(num_rows=0), "must have rows in 'train'"),
        (lambda raw: raw["clients"][0]["splits"]["train"].update(files=[]), "and either files or an index"),
        (lambda raw: raw["clients"][0]["splits"]["train"]["files"][0].update(path="../../x"), "is not a valid path"),
        (lambda raw: raw["clients"][0]["splits"]["train"]["files"][0].update(path="/etc/x"), "is not a valid path"),
        (
            lambda raw: raw["clients"][0]["splits"]["train"]["files"][0].update(path="data/../x/a.parquet"),
            "is not a valid path",
        ),
        (lambda raw: raw["clients"][0]["splits"]["train"]["files"][0].update(sha256="0"), "is not a SHA-256"),
        (lambda raw: raw["clients"][0]["splits"]["train"]["files"][0].update(extra=1), "incomplete or damaged"),
    ],
)
def test_invalid_partition_file_raises_an_error(clients, tmp_path, damage, message):
    clients.save_to_disk(tmp_path / "clients")
    path = tmp_path / "clients" / "partition.json"
    raw = json.loads(path.read_text())
    damage(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(PartitionFileError, match=message):
        FederatedDataset.load_from_disk(tmp_path / "clients")


def test_invalid_index_raises_value_error(clients, tmp_path):
    clients.save_to_disk(tmp_path / "index", index_only=True)
    path = tmp_path / "index" / "index" / "train.parquet"
    good = pq.read_table(path)["row"].to_numpy()

    def with_index(table):
        pq.write_table(table, path)
        text = (tmp_path / "index" / "partition.json").read_text()
        raw = json.loads(text)
        raw["index"]["train"]["file"] = vars(StoredFile.describe(tmp_path / "index", "index/train.parquet"))
        raw["index"]["train"]["num_source_rows"] = 10**12
        (tmp_path / "index" / "partition.json").write_text(json.dumps(raw))
        return FederatedDataset.load_from_disk(tmp_path / "index", source=rows())

    assert same(with_index(pa.table({"row": good})), clients)
    repeated = good.copy()
    repeated[0] = repeated[1]
    for numbers, message in (
        ({"number": good}, "must have one column `row`"),
        ({"row": good.astype(float)}, "must have one column `row`"),
        ({"row": pa.array([None, *good[1:].tolist()], pa.int32())}, "null row number"),
        ({"row": good - 1}, "names row -1"),
        ({"row": good + 1}, "names row 120"),
        ({"row": repeated}, "2 times"),
        ({"row": good[:-1]}, "has 119 rows, but partition.json lists 120"),
    ):
        with pytest.raises(ValueError, match=message):
            with_index(pa.table(numbers))


def test_invalid_json_and_folders_without_partition_json_raise_errors(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    (tmp_path / "clients" / "partition.json").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(PartitionFileError, match="is not JSON"):
        FederatedDataset.load_from_disk(tmp_path / "clients")
    rows().save_to_disk(tmp_path / "plain")
    for folder in ("plain", "nowhere"):
        with pytest.raises(FileNotFoundError, match="is not a federated dataset"):
            FederatedDataset.load_from_disk(tmp_path / folder)


def test_save_replaces_a_federated_dataset_but_no_foreign_files(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    clients.select_clients(["no"]).save_to_disk(tmp_path / "clients")
    assert list(FederatedDataset.load_from_disk(tmp_path / "clients")) == ["no"]
    assert [path.name for path in (tmp_path / "clients" / "data").iterdir()] == ["no"]
    assert [path.name for path in tmp_path.iterdir()] == ["clients"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("...")
    (tmp_path / "file").write_text("...")
    for place in ("other", "file"):
        with pytest.raises(FileExistsError, match="is or contains something else than a federated dataset"):
            clients.save_to_disk(tmp_path / place)
    # A foreign file in the folder of a federated dataset, and a file of another tool with the name partition.json.
    (tmp_path / "clients" / "data" / "codebook.csv").write_text("...")
    with pytest.raises(FileExistsError, match="data/codebook.csv"):
        clients.save_to_disk(tmp_path / "clients")
    (tmp_path / "other" / "partition.json").write_text("{}")
    with pytest.raises(FileExistsError, match="is or contains something else than a federated dataset"):
        clients.save_to_disk(tmp_path / "other")
    assert (tmp_path / "other" / "thesis.tex").read_text() == "..."
    assert (tmp_path / "clients" / "data" / "codebook.csv").read_text() == "..."


def test_save_follows_symlinks_and_rejects_the_current_directory(clients, tmp_path, monkeypatch):
    clients.save_to_disk(tmp_path / "clients")
    (tmp_path / "link").symlink_to("clients")
    clients.select_clients(["no"]).save_to_disk(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert list(FederatedDataset.load_from_disk(tmp_path / "clients")) == ["no"]
    monkeypatch.chdir(tmp_path / "clients" / "data")
    for place in (".", tmp_path / "clients"):
        with pytest.raises(ValueError, match="is or contains the current directory"):
            clients.save_to_disk(place)


def test_failed_save_keeps_the_existing_folder(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    before = files(tmp_path / "clients")
    stream = IterableDataset.from_generator(lambda: iter([{"who": "b", "text": "t", "label": 0}]))
    with pytest.raises(TypeError, match="IterableDataset"):
        FederatedDataset.from_dict({"b": stream}).save_to_disk(tmp_path / "clients")
    with pytest.raises(ValueError, match="no column 'stars'"):
        clients.save_to_disk(tmp_path / "clients", label_column="stars")
    with pytest.raises(ValueError, match="is not a valid split name"):
        clients.save_to_disk(tmp_path / "clients", split="../train")
    assert files(tmp_path / "clients") == before
    assert [path.name for path in tmp_path.iterdir()] == ["clients"]


def test_killed_save_keeps_the_old_folder(clients, tmp_path, monkeypatch):
    clients.save_to_disk(tmp_path / "clients")
    before = files(tmp_path / "clients")
    write = folder_module._write_shards

    def killed(folder, name, *args):
        if name == "3":
            os.kill(os.getpid(), signal.SIGKILL)
        return write(folder, name, *args)

    monkeypatch.setattr(folder_module, "_write_shards", killed)
    replacement = FederatedDataset.from_dict({str(i): Dataset.from_dict({"text": ["a"]}) for i in range(5)})
    process = multiprocessing.get_context("fork").Process(
        target=replacement.save_to_disk, args=(tmp_path / "clients",)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert files(tmp_path / "clients") == before
    assert same(FederatedDataset.load_from_disk(tmp_path / "clients"), clients)


def test_error_after_save_killed_between_renames_names_the_old_folder(clients, tmp_path, monkeypatch):
    clients.save_to_disk(tmp_path / "clients")
    rename = os.rename

    def killed(source, target):
        if Path(source).name == "new":
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    monkeypatch.setattr(os, "rename", killed)
    replacement = clients.select_clients(["no"])
    process = multiprocessing.get_context("fork").Process(
        target=replacement.save_to_disk, args=(tmp_path / "clients",)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(FileNotFoundError, match="The previous version is in (.*); move it back") as caught:
        FederatedDataset.load_from_disk(tmp_path / "clients")
    monkeypatch.undo()
    os.rename(str(caught.value).split("version is in ")[1].split("; move")[0], tmp_path / "clients")
    assert same(FederatedDataset.load_from_disk(tmp_path / "clients"), clients)


def refuse_renames(monkeypatch, refused, error: OSError) -> None:
    """Make `os.rename(source, target)` raise `error` if `refused(source, target)` is true."""
    rename = os.rename

    def failing(source, target):
        if refused(Path(source), Path(target)):
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)


def test_failed_rename_restores_the_old_folder(clients, tmp_path, monkeypatch):
    clients.save_to_disk(tmp_path / "clients")
    refuse_renames(monkeypatch, lambda source, target: source.name == "new", OSError("the disk is gone"))
    with pytest.raises(OSError, match="the disk is gone"):
        clients.select_clients(["no"]).save_to_disk(tmp_path / "clients")
    assert same(FederatedDataset.load_from_disk(tmp_path / "clients"), clients)
    assert [path.name for path in tmp_path.iterdir()] == ["clients"]


def test_old_folder_that_cannot_be_restored_is_kept(clients, tmp_path, monkeypatch):
    clients.save_to_disk(tmp_path / "clients")
    refuse_renames(monkeypatch, lambda source, target: target.name == "clients", OSError("the disk is gone"))
    with pytest.raises(OSError, match="the disk is gone"):
        clients.select_clients(["no"]).save_to_disk(tmp_path / "clients")
    monkeypatch.undo()
    (kept,) = tmp_path.glob(".clients-*/old")
    assert same(FederatedDataset.load_from_disk(kept), clients)


def test_rename_error_names_the_folder_and_mentions_mount_points(clients, tmp_path, monkeypatch):
    clients.save_to_disk(tmp_path / "clients")
    busy = OSError(errno.EBUSY, "Device or resource busy")
    refuse_renames(monkeypatch, lambda source, target: source.name == "clients", busy)
    with pytest.raises(OSError, match="a mount point cannot be replaced.*clients"):
        clients.save_to_disk(tmp_path / "clients")
    assert [path.name for path in tmp_path.iterdir()] == ["clients"]


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
