"""Federated data sets on disk."""

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
from hf_federated.data import PartitionFile, PartitionFileError, storage
from hf_federated.data.source import content_hash
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


def test_what_was_saved_is_what_is_loaded(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    loaded = FederatedDataset.load_from_disk(tmp_path / "clients")
    assert same(loaded, clients)
    assert loaded.partitioning == clients.partitioning
    assert loaded.features == clients.features
    assert loaded.num_rows == clients.num_rows
    assert loaded.to_dataset()[:] == clients.to_dataset()[:]


def test_loaded_clients_can_be_mapped_selected_and_saved_again(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    loaded = FederatedDataset.load_from_disk(tmp_path / "clients")
    longer = loaded.map(lambda row: {"length": len(row["text"])})
    assert same(longer.remove_columns("length"), clients)
    assert longer["no"]["length"][:] == [len(text) for text in clients["no"]["text"][:]]
    assert same(loaded.select_clients(["no", "Anna"]), clients.select_clients(["no", "Anna"]))
    loaded.save_to_disk(tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "clients")


def test_only_the_clients_asked_for_are_opened_in_the_order_asked_for(clients, tmp_path):
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


def test_datasets_loads_the_same_folder(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    folder, cache = str(tmp_path / "clients"), str(tmp_path / "cache")
    everyone = load_dataset(folder, split="train", cache_dir=cache)
    assert sorted(everyone["text"][:]) == sorted(rows()["text"][:])
    assert everyone.features == clients.features
    escaped = {"Anna": "_41nna", "default": "_64efault", "Zoë/..": "_5ao_c3_ab_2f_2e_2e", "con": "_63on"}
    for client_id in clients:
        one = load_dataset(folder, escaped.get(client_id, client_id), split="train", cache_dir=cache)
        assert one[:] == clients[client_id][:]


def test_above_a_thousand_clients_there_is_one_configuration_and_a_warning(tmp_path, caplog):
    numbers = Dataset.from_dict({"n": list(range(1001))})
    FederatedDataset.from_dataset(numbers, IidPartitioner(1001)).save_to_disk(tmp_path / "many")
    assert (tmp_path / "many" / "README.md").read_text().count("config_name") == 1
    assert "1001 clients" in caplog.text and "load_dataset" in caplog.text


def test_the_same_data_gives_the_same_bytes(clients, tmp_path):
    clients.save_to_disk(tmp_path / "one", label_column="label")
    FederatedDataset.from_column(rows(), "who").save_to_disk(tmp_path / "two", label_column="label")
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_large_clients_are_spread_over_files(tmp_path):
    clients = FederatedDataset.from_dict({"a": Dataset.from_dict({"text": ["x" * 1000] * 100 + ["y"]})})
    clients.save_to_disk(tmp_path / "clients", max_shard_size="20KB")
    paths = sorted(path.name for path in (tmp_path / "clients" / "data" / "a").iterdir())
    assert len(paths) == 6 and paths[0] == "train-00000-of-00006.parquet"
    assert same(FederatedDataset.load_from_disk(tmp_path / "clients"), clients)
    assert len(load_dataset(str(tmp_path / "clients"), "a", split="train", cache_dir=str(tmp_path / "c"))) == 101


def test_counts_of_labels_are_published_only_when_asked_for(clients, tmp_path):
    clients.save_to_disk(tmp_path / "without")
    assert "label_counts" not in (tmp_path / "without" / "partition.json").read_text()
    clients.save_to_disk(tmp_path / "with", label_column="label")
    stored = PartitionFile.read(tmp_path / "with")
    assert (stored.label_column, stored.label_names) == ("label", ["bad", "fair", "good"])
    for client in stored.clients:
        labels = clients[client.client_id]["label"][:]
        assert client.splits["train"].label_counts == [labels.count(label) for label in range(3)]
    assert "| good" in (tmp_path / "with" / "README.md").read_text()


def test_splits_are_saved_together_and_a_client_may_lack_one(tmp_path):
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


def test_splits_with_other_label_names_are_an_error(tmp_path):
    test = rows(30).cast_column("label", ClassLabel(names=["good", "fair", "bad"]))
    both = FederatedDatasetDict(
        train=FederatedDataset.from_column(rows(), "who"), test=FederatedDataset.from_column(test, "who")
    )
    with pytest.raises(ValueError, match="'train' and 'test' differ"):
        both.save_to_disk(tmp_path / "both")
    assert not any(tmp_path.iterdir())


def test_row_numbers_alone_give_the_same_clients_over_the_same_rows(clients, tmp_path):
    clients.save_to_disk(tmp_path / "index", index_only=True)
    assert sum(path.stat().st_size for path in (tmp_path / "index").rglob("*.parquet")) < 3000
    assert b"text 5" not in b"".join(files(tmp_path / "index").values())
    loaded = FederatedDataset.load_from_disk(tmp_path / "index", source=rows())
    assert same(loaded, clients)
    two = FederatedDataset.load_from_disk(tmp_path / "index", clients=["no", "Anna"], source=rows())
    assert same(two, clients.select_clients(["no", "Anna"]))


def test_row_numbers_refuse_other_rows(clients, tmp_path):
    clients.save_to_disk(tmp_path / "index", index_only=True)
    with pytest.raises(ValueError, match="Pass those rows: source=dataset"):
        FederatedDataset.load_from_disk(tmp_path / "index")
    changed = rows().map(lambda row, number: {"text": "other" if number == 7 else row["text"]}, with_indices=True)
    for source in (rows().shuffle(seed=0), rows().select(range(119)), rows(seed=1), changed):
        with pytest.raises(PartitionFileError, match="source= are not those that were cut"):
            FederatedDataset.load_from_disk(tmp_path / "index", source=source)
    clients.save_to_disk(tmp_path / "rows")
    with pytest.raises(ValueError, match="takes no source="):
        FederatedDataset.load_from_disk(tmp_path / "rows", source=rows())
    apart = FederatedDataset.from_dict({"a": rows()})
    with pytest.raises(ValueError, match="each client has its own"):
        apart.save_to_disk(tmp_path / "apart", index_only=True)


def test_a_file_that_is_not_the_one_that_was_written_is_refused_by_name(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    path = tmp_path / "clients" / "data" / "007" / "train-00000-of-00001.parquet"
    original = path.read_bytes()
    for damaged in (original[:-1], original[:100] + b"\xff" + original[101:], b""):
        path.write_bytes(damaged)
        with pytest.raises(PartitionFileError, match=r"data/007/train-00000-of-00001.parquet of client '007' is not"):
            FederatedDataset.load_from_disk(tmp_path / "clients")


def test_files_that_do_not_hold_what_partition_json_says_are_refused(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    text = (tmp_path / "clients" / "partition.json").read_text()
    (tmp_path / "clients" / "partition.json").write_text(
        text.replace('"num_rows": 20', '"num_rows": 21', 1).replace('"num_rows": 20', '"num_rows": 19', 1)
    )
    with pytest.raises(PartitionFileError, match="'007' hold 20 rows; partition.json says 21"):
        FederatedDataset.load_from_disk(tmp_path / "clients")
    (tmp_path / "clients" / "partition.json").write_text(
        text.replace('["bad", "fair", "good"]', '["good", "fair", "bad"]')
    )
    with pytest.raises(PartitionFileError, match="'007' have other columns, types or label names .*: label"):
        FederatedDataset.load_from_disk(tmp_path / "clients")


def test_files_that_change_after_loading_are_refused_when_they_are_read(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    loaded = FederatedDataset.load_from_disk(tmp_path / "clients")
    clients.map(lambda row: {"text": row["text"].upper()}).save_to_disk(tmp_path / "clients")
    for read in (lambda: loaded["no"], loaded.to_dataset, lambda: loaded.save_to_disk(tmp_path / "again")):
        with pytest.raises(PartitionFileError, match="is not the one that partition.json lists"):
            read()
    shutil.rmtree(tmp_path / "clients")
    with pytest.raises(PartitionFileError, match="of client 'no' is missing"):
        loaded["no"]


def test_a_relative_folder_stays_the_one_that_was_loaded(clients, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clients.save_to_disk("clients")
    loaded = FederatedDataset.load_from_disk("clients")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    clients.map(lambda row: {"text": "other"}).save_to_disk("clients")
    assert same(loaded, clients)


def test_types_that_parquet_does_not_have_come_back(tmp_path):
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
        (lambda raw: raw.update(clients=raw["clients"] * 2), "or one twice"),
        (lambda raw: raw.update(clients={}), "clients must be a list"),
        (lambda raw: raw.update(splits=["../x"]), "not in"),
        (lambda raw: raw.update(splits=["train", "train"]), "a split twice"),
        (lambda raw: raw.update(features={"x": {"dtype": "float7", "_type": "Value"}}), "incomplete or damaged"),
        (lambda raw: raw.update(partitioning={"train": "iid"}), "partitioning must be a dict"),
        (lambda raw: raw["clients"][0].update(id=""), "not its own"),
        (lambda raw: raw["clients"][0].update(name="default"), "not its own"),
        (lambda raw: raw["clients"][0].update(name=raw["clients"][1]["name"]), "not its own"),
        (lambda raw: raw["clients"][0]["splits"].update(raw["clients"][1]["splits"]), "not a path of its own"),
        (lambda raw: raw["clients"][0]["splits"]["train"]["files"].extend(file_of(raw)), "lists a file twice"),
        (lambda raw: raw["clients"][0]["splits"]["train"].update(num_rows="20"), "num_rows must be a int"),
        (lambda raw: raw["clients"][0]["splits"]["train"].update(num_rows=0), "lie nowhere"),
        (lambda raw: raw["clients"][0]["splits"]["train"].update(files=[]), "lie nowhere"),
        (lambda raw: raw["clients"][0]["splits"]["train"]["files"][0].update(path="../../x"), "not a path of its own"),
        (lambda raw: raw["clients"][0]["splits"]["train"]["files"][0].update(path="/etc/x"), "not a path of its own"),
        (
            lambda raw: raw["clients"][0]["splits"]["train"]["files"][0].update(path="data/../x/a.parquet"),
            "not a path",
        ),
        (lambda raw: raw["clients"][0]["splits"]["train"]["files"][0].update(sha256="0"), "no SHA-256"),
        (lambda raw: raw["clients"][0]["splits"]["train"]["files"][0].update(extra=1), "incomplete or damaged"),
    ],
)
def test_a_damaged_partition_file_is_refused(clients, tmp_path, damage, message):
    clients.save_to_disk(tmp_path / "clients")
    path = tmp_path / "clients" / "partition.json"
    raw = json.loads(path.read_text())
    damage(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(PartitionFileError, match=message):
        FederatedDataset.load_from_disk(tmp_path / "clients")


def test_an_index_that_lies_is_refused(clients, tmp_path):
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
    twice = good.copy()
    twice[0] = twice[1]
    for numbers, message in (
        ({"number": good}, "must hold one column `row`"),
        ({"row": good.astype(float)}, "must hold one column `row`"),
        ({"row": pa.array([None, *good[1:].tolist()], pa.int32())}, "is null"),
        ({"row": good - 1}, "names row -1"),
        ({"row": good + 1}, "names row 120"),
        ({"row": twice}, "2 times"),
        ({"row": good[:-1]}, "has 119 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            with_index(pa.table(numbers))


def test_text_that_is_no_json_and_folders_without_a_partition_are_refused(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    (tmp_path / "clients" / "partition.json").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(PartitionFileError, match="is not JSON"):
        FederatedDataset.load_from_disk(tmp_path / "clients")
    rows().save_to_disk(tmp_path / "plain")
    for folder in ("plain", "nowhere"):
        with pytest.raises(FileNotFoundError, match="holds no federated data set"):
            FederatedDataset.load_from_disk(tmp_path / folder)


def test_saving_again_replaces_what_was_there_and_nothing_else(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    clients.select_clients(["no"]).save_to_disk(tmp_path / "clients")
    assert list(FederatedDataset.load_from_disk(tmp_path / "clients")) == ["no"]
    assert [path.name for path in (tmp_path / "clients" / "data").iterdir()] == ["no"]
    assert [path.name for path in tmp_path.iterdir()] == ["clients"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("...")
    (tmp_path / "file").write_text("...")
    for place in ("other", "file"):
        with pytest.raises(FileExistsError, match="something else"):
            clients.save_to_disk(tmp_path / place)
    # something else beside a federated data set, and another tool's file of the same name
    (tmp_path / "clients" / "data" / "codebook.csv").write_text("...")
    with pytest.raises(FileExistsError, match="data/codebook.csv"):
        clients.save_to_disk(tmp_path / "clients")
    (tmp_path / "other" / "partition.json").write_text("{}")
    with pytest.raises(FileExistsError, match="something else"):
        clients.save_to_disk(tmp_path / "other")
    assert (tmp_path / "other" / "thesis.tex").read_text() == "..."
    assert (tmp_path / "clients" / "data" / "codebook.csv").read_text() == "..."


def test_a_link_is_followed_and_the_current_directory_refused(clients, tmp_path, monkeypatch):
    clients.save_to_disk(tmp_path / "clients")
    (tmp_path / "link").symlink_to("clients")
    clients.select_clients(["no"]).save_to_disk(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert list(FederatedDataset.load_from_disk(tmp_path / "clients")) == ["no"]
    monkeypatch.chdir(tmp_path / "clients" / "data")
    for place in (".", tmp_path / "clients"):
        with pytest.raises(ValueError, match="is the current directory or holds it"):
            clients.save_to_disk(place)


def test_what_cannot_be_saved_leaves_what_was_there(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    before = files(tmp_path / "clients")
    stream = IterableDataset.from_generator(lambda: iter([{"who": "b", "text": "t", "label": 0}]))
    with pytest.raises(TypeError, match="IterableDataset"):
        FederatedDataset.from_dict({"b": stream}).save_to_disk(tmp_path / "clients")
    with pytest.raises(ValueError, match="no column 'stars'"):
        clients.save_to_disk(tmp_path / "clients", label_column="stars")
    with pytest.raises(ValueError, match="cannot name a split"):
        clients.save_to_disk(tmp_path / "clients", split="../train")
    assert files(tmp_path / "clients") == before
    assert [path.name for path in tmp_path.iterdir()] == ["clients"]


def test_a_killed_save_leaves_the_old_folder_or_the_new_one(clients, tmp_path, monkeypatch):
    clients.save_to_disk(tmp_path / "clients")
    before = files(tmp_path / "clients")
    write = storage._write_shards

    def killed(folder, name, *args):
        if name == "3":
            os.kill(os.getpid(), signal.SIGKILL)
        return write(folder, name, *args)

    monkeypatch.setattr(storage, "_write_shards", killed)
    one = FederatedDataset.from_dict({str(i): Dataset.from_dict({"text": ["a"]}) for i in range(5)})
    process = multiprocessing.get_context("fork").Process(target=one.save_to_disk, args=(tmp_path / "clients",))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert files(tmp_path / "clients") == before
    assert same(FederatedDataset.load_from_disk(tmp_path / "clients"), clients)


def test_a_save_killed_between_its_renames_says_where_the_data_lie(clients, tmp_path, monkeypatch):
    clients.save_to_disk(tmp_path / "clients")
    rename = os.rename

    def killed(source, target):
        if Path(source).name == "new":
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    monkeypatch.setattr(os, "rename", killed)
    one = clients.select_clients(["no"])
    process = multiprocessing.get_context("fork").Process(target=one.save_to_disk, args=(tmp_path / "clients",))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(FileNotFoundError, match="What was there lies in (.*); move it back") as caught:
        FederatedDataset.load_from_disk(tmp_path / "clients")
    monkeypatch.undo()
    os.rename(str(caught.value).split("lies in ")[1].split("; move")[0], tmp_path / "clients")
    assert same(FederatedDataset.load_from_disk(tmp_path / "clients"), clients)


def refuse_renames(monkeypatch, refused, error: OSError) -> None:
    """Lets `os.rename(source, target)` fail where `refused(source, target)` says so."""
    rename = os.rename

    def failing(source, target):
        if refused(Path(source), Path(target)):
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)


def test_a_rename_that_fails_brings_the_old_folder_back(clients, tmp_path, monkeypatch):
    clients.save_to_disk(tmp_path / "clients")
    refuse_renames(monkeypatch, lambda source, target: source.name == "new", OSError("the disk is gone"))
    with pytest.raises(OSError, match="the disk is gone"):
        clients.select_clients(["no"]).save_to_disk(tmp_path / "clients")
    assert same(FederatedDataset.load_from_disk(tmp_path / "clients"), clients)
    assert [path.name for path in tmp_path.iterdir()] == ["clients"]


def test_an_old_folder_that_cannot_be_put_back_is_kept(clients, tmp_path, monkeypatch):
    clients.save_to_disk(tmp_path / "clients")
    refuse_renames(monkeypatch, lambda source, target: target.name == "clients", OSError("the disk is gone"))
    with pytest.raises(OSError, match="the disk is gone"):
        clients.select_clients(["no"]).save_to_disk(tmp_path / "clients")
    monkeypatch.undo()
    (kept,) = tmp_path.glob(".clients-*/old")
    assert same(FederatedDataset.load_from_disk(kept), clients)


def test_a_folder_that_cannot_be_moved_is_named_with_what_it_may_be(clients, tmp_path, monkeypatch):
    clients.save_to_disk(tmp_path / "clients")
    busy = OSError(errno.EBUSY, "Device or resource busy")
    refuse_renames(monkeypatch, lambda source, target: source.name == "clients", busy)
    with pytest.raises(OSError, match="a mount point cannot be replaced.*clients"):
        clients.save_to_disk(tmp_path / "clients")
    assert [path.name for path in tmp_path.iterdir()] == ["clients"]


@pytest.mark.parametrize("value", [np.float32(1), float("nan"), {1, 2}])
def test_a_setting_that_is_no_json_is_named(tmp_path, value):
    clients = FederatedDataset.from_dataset(rows(), IidPartitioner(3))
    clients.partitioning["temperature"] = value
    with pytest.raises(ValueError, match="temperature=.* of IidPartitioner cannot be written as JSON"):
        clients.save_to_disk(tmp_path / "clients")
    assert not any(tmp_path.iterdir())


def test_a_split_whose_name_is_too_long_for_a_file_is_refused(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients", split="a" * 100)
    with pytest.raises(ValueError, match="100 characters at most"):
        clients.save_to_disk(tmp_path / "others", split="a" * 101)


@pytest.mark.parametrize("size", [0, -5, 1.5, "foo", None, True])
def test_a_size_that_is_none_is_refused(clients, tmp_path, size):
    with pytest.raises(ValueError, match="max_shard_size must be a size"):
        clients.save_to_disk(tmp_path / "clients", max_shard_size=size)
    assert not any(tmp_path.iterdir())


def test_a_client_is_read_each_time_under_one_fingerprint(tmp_path):
    clients = FederatedDataset.from_dataset(rows(1000), IidPartitioner(100))
    clients.save_to_disk(tmp_path / "clients")
    loaded = FederatedDataset.load_from_disk(tmp_path / "clients")
    assert loaded["7"] is not loaded["7"]
    assert loaded["7"]._fingerprint == loaded["7"]._fingerprint != loaded["8"]._fingerprint


def test_parquet_files_carry_their_types(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    path = tmp_path / "clients" / "data" / "no" / "train-00000-of-00001.parquet"
    assert b"ClassLabel" in pq.read_schema(path).metadata[b"huggingface"]
