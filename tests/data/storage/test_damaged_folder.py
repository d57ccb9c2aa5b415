"""Damaged files, files that do not match `partition.json`, and an invalid `partition.json`."""

from __future__ import annotations

import json
import shutil

import pytest
from stored_clients import rows

from hf_federated import FederatedDataset
from hf_federated.data import PartitionFileError


def file_of(raw: dict) -> list[dict]:
    return raw["clients"][0]["splits"]["train"]["files"][:1]


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


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw.update(format="other"), "not written by hf_federated"),
        (lambda raw: raw.update(format_version=2), "format version 2"),
        (lambda raw: raw.pop("features"), "incomplete or damaged"),
        (lambda raw: raw.update(clients=[]), "lists no client"),
        (lambda raw: raw.update(clients=raw["clients"] * 2), "or lists a client twice"),
        (lambda raw: raw.update(clients={}), "clients must be of type list"),
        (lambda raw: raw.update(splits=["../x"]), "not in"),
        (lambda raw: raw.update(splits=["train", "train"]), "a split twice"),
        (lambda raw: raw.update(features={"x": {"dtype": "float7", "_type": "Value"}}), "incomplete or damaged"),
        (lambda raw: raw.update(features={"x": []}), "incomplete or damaged"),
        (lambda raw: raw.update(partitioning={"train": "iid"}), "partitioning must be of type dict"),
        (lambda raw: raw["clients"][0].update(id=""), "does not match its id"),
        (lambda raw: raw["clients"][0].update(name="default"), "does not match its id"),
        (lambda raw: raw["clients"][0].update(name=raw["clients"][1]["name"]), "does not match its id"),
        (
            lambda raw: raw["clients"][0]["splits"].update(raw["clients"][1]["splits"]),
            "is not in the folder of the client",
        ),
        (lambda raw: raw["clients"][0]["splits"]["train"]["files"].extend(file_of(raw)), "lists a file twice"),
        (lambda raw: raw["clients"][0]["splits"]["train"].update(num_rows="20"), "num_rows must be of type int"),
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


def test_invalid_json_and_folders_without_partition_json_raise_errors(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    (tmp_path / "clients" / "partition.json").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(PartitionFileError, match="is not JSON"):
        FederatedDataset.load_from_disk(tmp_path / "clients")
    rows().save_to_disk(tmp_path / "plain")
    for folder in ("plain", "nowhere"):
        with pytest.raises(FileNotFoundError, match="is not a federated dataset"):
            FederatedDataset.load_from_disk(tmp_path / folder)
