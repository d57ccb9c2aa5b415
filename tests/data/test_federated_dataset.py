"""`FederatedDataset` assigns rows to clients, keeps no client view, and rejects invalid input early."""

from __future__ import annotations

import gc
import pickle
import weakref

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, IterableDataset, Value, concatenate_datasets

from hf_federated.data import (
    FederatedDataset,
    IidPartitioner,
    NaturalPartitioner,
    NestedPartitioner,
    Partition,
    Partitioner,
)


SPEAKERS = ["ann", "ben", "ann", "cy", "ben", "ann"]


def speeches() -> Dataset:
    dataset = Dataset.from_dict({"speaker": SPEAKERS, "text": list("abcdef"), "label": [0, 1, 1, 0, 0, 1]})
    return dataset.cast_column("label", ClassLabel(names=["no", "yes"]))


# from_column


def test_from_column_creates_one_client_per_value():
    clients = FederatedDataset.from_column(speeches(), "speaker")
    assert list(clients) == ["ann", "ben", "cy"]
    assert clients.num_rows == {"ann": 3, "ben": 2, "cy": 1}
    assert {i: clients[i]["text"][:] for i in clients} == {"ann": ["a", "c", "f"], "ben": ["b", "e"], "cy": ["d"]}


@pytest.mark.parametrize(
    ("values", "ids"),
    [([10, 9, 10], ["9", "10"]), ([True, False, True], ["False", "True"]), (["b", "a", "b"], ["a", "b"])],
)
def test_client_ids_are_strings_sorted_by_value(values, ids):
    clients = FederatedDataset.from_column(Dataset.from_dict({"who": values, "row": [0, 1, 2]}), "who")
    assert list(clients) == ids
    assert clients[ids[1]]["row"][:] == [0, 2]


@pytest.mark.parametrize(
    "change",
    [
        lambda dataset: dataset.select([5, 0, 3]),
        lambda dataset: dataset.select(range(2, 5)),
        lambda dataset: dataset.shuffle(seed=1),
        lambda dataset: dataset.filter(lambda row: row["label"] == 1),
        lambda dataset: dataset.sort("text", reverse=True),
        lambda dataset: dataset.shuffle(seed=1).select([4, 2, 0]).select([2, 1]),
    ],
    ids=["select", "contiguous", "shuffle", "filter", "sort", "nested"],
)
def test_from_column_respects_earlier_selections_of_the_source(change):
    changed = change(speeches())
    clients = FederatedDataset.from_column(changed, "speaker")
    for client_id in sorted(set(changed["speaker"][:])):
        expected = [row["text"] for row in changed if row["speaker"] == client_id]
        assert clients[client_id]["text"][:] == expected
    assert sum(clients.num_rows.values()) == len(changed)


def test_from_column_reads_a_source_with_several_chunks():
    clients = FederatedDataset.from_column(concatenate_datasets([speeches(), speeches().select([3, 1])]), "speaker")
    assert clients["cy"]["text"][:] == ["d", "d"]
    assert clients["ben"]["text"][:] == ["b", "e", "b"]


def test_min_rows_removes_small_clients():
    clients = FederatedDataset.from_column(speeches(), "speaker", min_rows=2)
    assert clients.num_rows == {"ann": 3, "ben": 2}
    assert clients.to_dataset()["text"][:] == ["a", "c", "f", "b", "e"]


def test_min_rows_above_every_client_raises_value_error():
    with pytest.raises(ValueError, match="None of the 3 values of 'speaker' has at least 4 rows. The largest has 3"):
        FederatedDataset.from_column(speeches(), "speaker", min_rows=4)


def test_missing_column_error_lists_existing_columns():
    with pytest.raises(ValueError, match="no column 'movie'. The columns are: speaker, text, label"):
        FederatedDataset.from_column(speeches(), "movie")


@pytest.mark.parametrize("values", [["a", None, "b"], [1, None, 2], [None, None, None]])
def test_null_value_error_names_the_row(values):
    row = values.index(None)
    with pytest.raises(ValueError, match=f"Row {row} has no value in the column 'who'"):
        FederatedDataset.from_column(Dataset.from_dict({"who": values}), "who")


def test_null_outside_the_selection_is_ignored():
    dataset = Dataset.from_dict({"who": ["a", None, "b"]}).select([2, 0])
    assert FederatedDataset.from_column(dataset, "who").num_rows == {"a": 1, "b": 1}


def test_empty_string_as_client_id_raises_value_error():
    with pytest.raises(ValueError, match="Row 1 has an empty string in the column 'who'"):
        FederatedDataset.from_column(Dataset.from_dict({"who": ["a", "", "b"]}), "who")


@pytest.mark.parametrize("values", [[0.5, 1.5], [["a"], ["b"]], [{"a": 1}, {"a": 2}]])
def test_column_type_that_cannot_name_clients_raises_type_error(values):
    with pytest.raises(TypeError, match="do not name clients"):
        FederatedDataset.from_column(Dataset.from_dict({"who": values}), "who")


def test_empty_dataset_raises_value_error():
    with pytest.raises(ValueError, match="no rows"):
        FederatedDataset.from_column(speeches().select([]), "speaker")


@pytest.mark.parametrize("make", [FederatedDataset.from_column, FederatedDataset.from_dataset])
def test_dataset_dict_and_stream_without_clients_raise_error(make):
    second = "speaker" if make == FederatedDataset.from_column else IidPartitioner(2)
    with pytest.raises(TypeError, match=r"splits \['train'\]"):
        make(DatasetDict(train=speeches()), second)
    with pytest.raises((TypeError, ValueError), match="IterableDataset"):
        make(speeches().to_iterable_dataset(), second)


def test_column_with_the_client_is_dropped_unless_it_is_kept():
    dropped = FederatedDataset.from_column(speeches(), "speaker")
    assert (
        dropped.column_names == dropped["ann"].column_names == dropped.to_dataset().column_names == ["text", "label"]
    )
    assert dropped.partitioning["keep_column"] is False
    kept = FederatedDataset.from_column(speeches(), "speaker", keep_column=True)
    assert kept.column_names == ["speaker", "text", "label"]
    assert kept["ben"]["speaker"][:] == ["ben", "ben"]
    assert {i: kept[i]["text"][:] for i in kept} == {i: dropped[i]["text"][:] for i in dropped}


def test_column_with_the_client_is_kept_if_it_is_the_only_column():
    clients = FederatedDataset.from_column(Dataset.from_dict({"who": ["b", "a", "b"]}), "who")
    assert clients["b"]["who"][:] == ["b", "b"]


def test_error_for_a_dropped_column_names_keep_column():
    clients = FederatedDataset.from_column(speeches(), "speaker")
    with pytest.raises(ValueError, match="no column 'speaker'.*It names the clients.*Pass keep_column=True"):
        clients.remove_columns("speaker")


@pytest.mark.parametrize(
    "partitioner",
    [
        NaturalPartitioner("speaker"),
        NestedPartitioner(NaturalPartitioner("speaker"), IidPartitioner(1)),
        NestedPartitioner(IidPartitioner(1), NaturalPartitioner("speaker")),
    ],
    ids=["natural", "outer", "inner"],
)
def test_from_dataset_drops_the_column_of_a_natural_partitioner(partitioner):
    clients = FederatedDataset.from_dataset(speeches(), partitioner)
    assert clients.column_names == ["text", "label"]
    assert sorted(clients.to_dataset()["text"][:]) == list("abcdef")


def test_natural_partitioner_keeps_its_column_on_request():
    clients = FederatedDataset.from_dataset(speeches(), NaturalPartitioner("speaker", keep_column=True))
    assert clients["cy"]["speaker"][:] == ["cy"]
    assert clients.partitioning["keep_column"] is True


# from_dataset


def test_from_dataset_assigns_all_rows():
    clients = FederatedDataset.from_dataset(speeches(), IidPartitioner(num_clients=4, seed=0))
    assert clients.num_rows == {"0": 2, "1": 2, "2": 1, "3": 1}
    assert sorted(text for client_id in clients for text in clients[client_id]["text"]) == list("abcdef")
    assert clients.partitioning == {"partitioner": "IidPartitioner", "num_clients": 4, "seed": 0}


class FixedPartitioner(Partitioner):
    def __init__(self, result):
        object.__setattr__(self, "result", result)

    def partition(self, dataset):
        return self.result


def test_partitioner_with_wrong_return_type_raises_type_error():
    with pytest.raises(TypeError, match=r"FixedPartitioner.partition\(\) must return a Partition, got \[\]"):
        FederatedDataset.from_dataset(speeches(), FixedPartitioner([]))
    with pytest.raises(TypeError, match="expected a Partitioner, got 3"):
        FederatedDataset.from_dataset(speeches(), 3)


def test_partition_with_nonexistent_row_raises_value_error():
    partition = Partition(["a"], np.array([6]), np.array([0, 1]))
    with pytest.raises(ValueError, match="names row 6, but the dataset has the rows 0 to 5"):
        FederatedDataset.from_dataset(speeches(), FixedPartitioner(partition))


# from_dict


def test_from_dict_keeps_client_datasets_and_order():
    first, second = speeches().select([0, 1]), speeches().select([2])
    clients = FederatedDataset.from_dict({"b": first, "a": second})
    assert list(clients) == ["b", "a"]
    assert clients["b"] is first
    assert clients.num_rows == {"b": 2, "a": 1}
    assert clients.source is None
    assert clients.to_dataset()["text"][:] == ["a", "b", "c"]


def test_from_dict_accepts_a_dataset_dict():
    clients = FederatedDataset.from_dict(DatasetDict(left=speeches().select([0]), right=speeches().select([1])))
    assert clients.num_rows == {"left": 1, "right": 1}


def test_integer_ids_become_strings():
    assert list(FederatedDataset.from_dict({2: speeches(), np.int64(1): speeches()})) == ["2", "1"]


@pytest.mark.parametrize("key", [1.0, True, None, ("a", 1)])
def test_ids_of_other_types_raise_type_error(key):
    with pytest.raises(TypeError, match="must be a string or an integer"):
        FederatedDataset.from_dict({key: speeches()})


def test_ids_with_the_same_string_raise_value_error():
    with pytest.raises(ValueError, match="'1' occurs twice"):
        FederatedDataset.from_dict({1: speeches(), "1": speeches()})


def test_ids_with_a_lone_surrogate_raise_value_error():
    # Python reads a Latin-1 file name or a file with `errors="surrogateescape"` like this.
    for build in (
        lambda: FederatedDataset.from_dict({"caf\udce9": speeches()}),
        lambda: Partition(["caf\udce9"], np.array([0, 1]), np.array([0, 2])),
    ):
        with pytest.raises(ValueError, match=r"client id 'caf\\udce9' has a lone surrogate"):
            build()


def test_from_dict_rejects_invalid_mappings():
    with pytest.raises(ValueError, match="the mapping is empty"):
        FederatedDataset.from_dict({})
    with pytest.raises(ValueError, match="empty string"):
        FederatedDataset.from_dict({"": speeches()})
    with pytest.raises(TypeError, match="got list"):
        FederatedDataset.from_dict([speeches()])
    with pytest.raises(TypeError, match="client 'a' is a list"):
        FederatedDataset.from_dict({"a": [{"text": "x"}]})


def test_empty_client_error_names_all_empty_clients():
    empty = speeches().select([])
    with pytest.raises(ValueError, match="cannot train: 'b', 'd'"):
        FederatedDataset.from_dict({"a": speeches(), "b": empty, "c": speeches(), "d": empty})


def test_different_columns_error_names_the_columns():
    with pytest.raises(ValueError, match=r"compared with 'a', 'b' lacks \['text'\] and adds \['words'\]"):
        FederatedDataset.from_dict({"a": speeches(), "b": speeches().rename_column("text", "words")})


def test_different_types_error_names_the_column():
    with pytest.raises(ValueError, match="differ in the column 'label': 'b' has Value"):
        FederatedDataset.from_dict({"a": speeches(), "b": speeches().cast_column("label", Value("int64"))})


def test_different_order_of_label_names_raises_value_error():
    reordered = speeches().cast_column("label", Value("int64")).cast_column("label", ClassLabel(names=["yes", "no"]))
    with pytest.raises(ValueError, match="differ in the column 'label'.*one order of names"):
        FederatedDataset.from_dict({"a": speeches(), "b": reordered})


def test_clients_may_have_a_different_column_order():
    reordered = speeches().select_columns(["label", "text", "speaker"])
    clients = FederatedDataset.from_dict({"a": speeches(), "b": reordered})
    assert clients.to_dataset()["text"][:] == list("abcdef") * 2


def test_iterable_client_has_unknown_size_and_cannot_be_pooled():
    stream = speeches().to_iterable_dataset()
    clients = FederatedDataset.from_dict({"a": speeches(), "b": stream})
    assert clients.num_rows == {"a": 6, "b": None}
    assert "unknown for 1 iterable clients, 6 for the remaining clients" in repr(clients)
    mapped = clients.map(lambda row: {"text": row["text"].upper()})
    assert isinstance(mapped["b"], IterableDataset)
    assert [row["text"] for row in mapped["b"]] == list("ABCDEF")
    with pytest.raises(TypeError, match="Client 'b' is an IterableDataset"):
        clients.to_dataset()


# access to clients


def test_client_datasets_are_not_kept_in_memory():
    clients = FederatedDataset.from_column(speeches(), "speaker")
    view = clients["ann"]
    reference = weakref.ref(view)
    del view
    gc.collect()
    assert reference() is None


def test_client_dataset_has_a_stable_fingerprint():
    # `map` finds its cache by the fingerprint. A random fingerprint would preprocess each client again in every round.
    clients, again = (FederatedDataset.from_column(speeches(), "speaker") for _ in range(2))
    assert clients["ann"]._fingerprint == again["ann"]._fingerprint
    assert clients["ann"]._fingerprint != clients["ben"]._fingerprint


def test_membership_equality_and_sizes_open_no_client(monkeypatch):
    clients = FederatedDataset.from_column(speeches(), "speaker")
    monkeypatch.setattr(Dataset, "select", lambda *args, **kwargs: pytest.fail("a client was opened"))
    assert "ann" in clients and "dan" not in clients and 3 not in clients
    assert clients == clients and clients != FederatedDataset.from_column(speeches(), "speaker")
    assert len({clients, clients}) == 1
    assert len(clients) == 3 and list(clients.num_rows) == clients.client_ids
    assert "num_clients: 3" in repr(clients)


def test_unknown_client_error_suggests_similar_ids():
    clients = FederatedDataset.from_column(speeches(), "speaker")
    with pytest.raises(KeyError, match="no client 'anne'. Did you mean 'ann'?"):
        clients["anne"]
    with pytest.raises(KeyError, match="no client 0. There are 3 clients, the first is 'ann'"):
        clients[0]
    with pytest.raises(KeyError, match="Did you mean 'ben'"):
        clients.select_clients(["ann", "bene"])
    with pytest.raises(KeyError, match="no client 'BEN'. Did you mean 'ben'"):
        clients["BEN"]


def test_client_dataset_keeps_the_format_of_the_source():
    clients = FederatedDataset.from_column(speeches().with_format("numpy"), "speaker")
    assert isinstance(clients["ann"][0]["label"], np.int64)


def test_federated_dataset_can_be_pickled():
    clients = pickle.loads(pickle.dumps(FederatedDataset.from_column(speeches(), "speaker")))
    assert clients["ben"]["text"][:] == ["b", "e"]


# select_clients, to_dataset


def test_select_clients_keeps_the_given_order():
    clients = FederatedDataset.from_column(speeches(), "speaker").select_clients(["cy", "ann"])
    assert clients.num_rows == {"cy": 1, "ann": 3}
    assert clients["ann"]["text"][:] == ["a", "c", "f"]
    assert clients.to_dataset()["text"][:] == ["d", "a", "c", "f"]


def test_select_clients_rejects_empty_repeated_and_string_arguments():
    clients = FederatedDataset.from_column(speeches(), "speaker")
    with pytest.raises(ValueError, match="the list of ids is empty"):
        clients.select_clients([])
    with pytest.raises(ValueError, match="'ann' occurs twice"):
        clients.select_clients(["ann", "ann"])
    with pytest.raises(TypeError, match="expected a list of ids, got the string 'ann'"):
        clients.select_clients("ann")


# transformations


@pytest.fixture(params=["one source", "from_dict"])
def clients(request) -> FederatedDataset:
    partitioned = FederatedDataset.from_column(speeches().shuffle(seed=2), "speaker", keep_column=True)
    return partitioned if request.param == "one source" else FederatedDataset.from_dict(dict(partitioned.items()))


def test_transformations_keep_the_assignment_to_clients(clients):
    changed = (
        clients.map(lambda row: {"who": row["speaker"] + row["text"]})
        .remove_columns(["speaker"])
        .rename_column("label", "labels")
        .cast_column("labels", Value("int64"))
        .select_columns(["who", "labels"])
    )
    assert changed.column_names == ["who", "labels"]
    assert changed.features["labels"] == Value("int64")
    assert changed.partitioning == clients.partitioning
    for client_id in clients:
        before = clients[client_id]
        assert changed[client_id]["who"][:] == [client_id + text for text in before["text"]]
        assert changed[client_id]["labels"][:] == before["label"][:]


def test_map_that_changes_the_number_of_rows_raises_value_error(clients):
    with pytest.raises(ValueError, match=r"map\(\.\.\., by_client=True\)"):
        clients.map(lambda rows: {"text": rows["text"] * 2}, batched=True, remove_columns=["speaker", "label"])


@pytest.mark.parametrize(
    "change",
    [
        lambda clients: clients.remove_columns("texts"),
        lambda clients: clients.select_columns(["text", "texts"]),
        lambda clients: clients.rename_column("texts", "words"),
        lambda clients: clients.cast_column("texts", Value("string")),
    ],
)
def test_transformation_of_missing_column_lists_existing_columns(clients, change):
    with pytest.raises(ValueError, match="no column 'texts'. The columns are: speaker, text, label"):
        change(clients)


def blocks_of_two(rows):
    """Join the texts of a batch and cut them into blocks of two letters. The remainder is dropped."""
    joined = "".join(rows["text"])
    return {"text": [joined[start : start + 2] for start in range(0, len(joined) - 1, 2)]}


def test_map_by_client_does_not_mix_rows_of_clients_and_can_change_their_number():
    rows = Dataset.from_dict({"site": ["n", "s", "n", "s", "n"], "text": ["a", "xy", "bc", "zuv", "de"]})
    clients = FederatedDataset.from_column(rows, "site").select_columns("text")
    mapped = clients.map(blocks_of_two, batched=True, by_client=True)
    assert {client_id: mapped[client_id]["text"][:] for client_id in mapped} == {"n": ["ab", "cd"], "s": ["xy", "zu"]}
    assert mapped.partitioning == clients.partitioning
    # A batch is never larger than `batch_size`.
    assert clients.map(blocks_of_two, batched=True, batch_size=1, by_client=True)["n"]["text"][:] == ["bc", "de"]
    with pytest.raises(ValueError, match="cache_file_name would give all clients the rows of the first client"):
        clients.map(blocks_of_two, batched=True, by_client=True, cache_file_name="cache")


def test_map_by_client_that_leaves_a_client_without_rows_names_the_client():
    clients = FederatedDataset.from_column(Dataset.from_dict({"site": ["n", "s"], "text": ["ab", "x"]}), "site")
    with pytest.raises(ValueError, match="A client without rows cannot train: 's'"):
        clients.select_columns("text").map(blocks_of_two, batched=True, by_client=True)


def test_map_processes_only_rows_that_belong_to_a_client():
    seen: list[str] = []

    def record(rows):
        seen.extend(rows["text"])
        return {"length": [len(text) for text in rows["text"]]}

    clients = FederatedDataset.from_column(speeches(), "speaker").select_clients(["cy", "ben"])
    mapped = clients.map(record, batched=True, load_from_cache_file=False)
    assert seen == ["d", "b", "e"]
    assert mapped["ben"]["text"][:] == ["b", "e"]
    assert mapped.num_rows == {"cy": 1, "ben": 2}


@pytest.mark.parametrize("name", ["cache_file_name", "new_fingerprint"])
def test_map_with_one_cache_for_separate_datasets_raises_value_error(tmp_path, name):
    clients = FederatedDataset.from_dict(
        {"a": Dataset.from_dict({"x": [1, 2]}), "b": Dataset.from_dict({"x": [3, 4]})}
    )
    with pytest.raises(ValueError, match=f"{name} would give all clients the rows of the first client"):
        clients.map(lambda row: row, **{name: str(tmp_path / "cache")})
    assert clients.map(lambda row: {"x": row["x"] + 1})["b"]["x"][:] == [4, 5]
