"""Row numbers that are stored without the rows, and the source that they refer to."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stored_clients import files, rows, same

from hf_federated import FederatedDataset
from hf_federated.data import PartitionFileError
from hf_federated.data.storage.partition_file import StoredFile


def test_index_only_folder_restores_clients_from_the_source(clients, tmp_path):
    clients.save_to_disk(tmp_path / "index", index_only=True)
    assert sum(path.stat().st_size for path in (tmp_path / "index").rglob("*.parquet")) < 3000
    assert b"text 5" not in b"".join(files(tmp_path / "index").values())
    loaded = FederatedDataset.load_from_disk(tmp_path / "index", source=rows())
    assert same(loaded, clients)
    two = FederatedDataset.load_from_disk(tmp_path / "index", clients=["no", "Anna"], source=rows())
    assert same(two, clients.select_clients(["no", "Anna"]))


@pytest.mark.parametrize("keep_column", [False, True])
def test_index_only_folder_restores_the_columns_of_the_clients(tmp_path, keep_column):
    clients = FederatedDataset.from_column(rows(), "who", keep_column=keep_column)
    clients.save_to_disk(tmp_path / "index", index_only=True)
    loaded = FederatedDataset.load_from_disk(tmp_path / "index", source=rows())
    assert ("who" in loaded.column_names) == keep_column
    assert same(loaded, clients) and loaded.partitioning == clients.partitioning
    assert same(FederatedDataset.load_from_disk(tmp_path / "index", source=clients.source), clients)


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
