"""A federated data set gives each client its rows, keeps none of the views, and refuses what would go wrong later."""

from __future__ import annotations

import gc
import pickle
import weakref

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, IterableDataset, Value, concatenate_datasets

from hf_federated.data import FederatedDataset, IidPartitioner, Partition, Partitioner


SPEAKERS = ["ann", "ben", "ann", "cy", "ben", "ann"]


def speeches() -> Dataset:
    dataset = Dataset.from_dict({"speaker": SPEAKERS, "text": list("abcdef"), "label": [0, 1, 1, 0, 0, 1]})
    return dataset.cast_column("label", ClassLabel(names=["no", "yes"]))


# from_column


def test_each_value_of_the_column_becomes_a_client():
    clients = FederatedDataset.from_column(speeches(), "speaker")
    assert list(clients) == ["ann", "ben", "cy"]
    assert clients.num_rows == {"ann": 3, "ben": 2, "cy": 1}
    assert {i: clients[i]["text"][:] for i in clients} == {"ann": ["a", "c", "f"], "ben": ["b", "e"], "cy": ["d"]}


@pytest.mark.parametrize(
    ("values", "ids"),
    [([10, 9, 10], ["9", "10"]), ([True, False, True], ["False", "True"]), (["b", "a", "b"], ["a", "b"])],
)
def test_clients_are_named_by_str_and_sorted_by_value(values, ids):
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
def test_indices_of_the_source_are_honoured(change):
    changed = change(speeches())
    clients = FederatedDataset.from_column(changed, "speaker")
    for client_id in sorted(set(changed["speaker"][:])):
        expected = [row["text"] for row in changed if row["speaker"] == client_id]
        assert clients[client_id]["text"][:] == expected
    assert sum(clients.num_rows.values()) == len(changed)


def test_a_source_of_several_chunks_is_read_as_one():
    clients = FederatedDataset.from_column(concatenate_datasets([speeches(), speeches().select([3, 1])]), "speaker")
    assert clients["cy"]["text"][:] == ["d", "d"]
    assert clients["ben"]["text"][:] == ["b", "e", "b"]


def test_min_rows_leaves_small_clients_out():
    clients = FederatedDataset.from_column(speeches(), "speaker", min_rows=2)
    assert clients.num_rows == {"ann": 3, "ben": 2}
    assert clients.to_dataset()["text"][:] == ["a", "c", "f", "b", "e"]


def test_min_rows_that_nobody_has_is_refused():
    with pytest.raises(ValueError, match="None of the 3 values of 'speaker' has the 4 rows .*; the largest has 3"):
        FederatedDataset.from_column(speeches(), "speaker", min_rows=4)


def test_a_missing_column_lists_those_there_are():
    with pytest.raises(ValueError, match="no column 'movie'. The columns are: speaker, text, label"):
        FederatedDataset.from_column(speeches(), "movie")


@pytest.mark.parametrize("values", [["a", None, "b"], [1, None, 2], [None, None, None]])
def test_a_row_without_a_value_is_named(values):
    row = values.index(None)
    with pytest.raises(ValueError, match=f"Row {row} has no value in the column 'who'"):
        FederatedDataset.from_column(Dataset.from_dict({"who": values}), "who")


def test_a_null_that_was_filtered_out_does_no_harm():
    dataset = Dataset.from_dict({"who": ["a", None, "b"]}).select([2, 0])
    assert FederatedDataset.from_column(dataset, "who").num_rows == {"a": 1, "b": 1}


def test_an_empty_string_names_no_client():
    with pytest.raises(ValueError, match="Row 1 has the empty string in the column 'who'"):
        FederatedDataset.from_column(Dataset.from_dict({"who": ["a", "", "b"]}), "who")


@pytest.mark.parametrize("values", [[0.5, 1.5], [["a"], ["b"]], [{"a": 1}, {"a": 2}]])
def test_values_that_name_nothing_are_refused(values):
    with pytest.raises(TypeError, match="do not name clients"):
        FederatedDataset.from_column(Dataset.from_dict({"who": values}), "who")


def test_a_data_set_without_rows_has_no_clients():
    with pytest.raises(ValueError, match="no rows"):
        FederatedDataset.from_column(speeches().select([]), "speaker")


@pytest.mark.parametrize("make", [FederatedDataset.from_column, FederatedDataset.from_dataset])
def test_splits_and_streams_are_refused(make):
    second = "speaker" if make == FederatedDataset.from_column else IidPartitioner(2)
    with pytest.raises(TypeError, match=r"splits \['train'\]"):
        make(DatasetDict(train=speeches()), second)
    with pytest.raises(TypeError, match="expected a datasets.Dataset, got IterableDataset"):
        make(speeches().to_iterable_dataset(), second)


# from_dataset


def test_a_partitioner_cuts_the_data_set():
    clients = FederatedDataset.from_dataset(speeches(), IidPartitioner(num_clients=4, seed=0))
    assert clients.num_rows == {"0": 2, "1": 2, "2": 1, "3": 1}
    assert sorted(text for client_id in clients for text in clients[client_id]["text"]) == list("abcdef")
    assert clients.partitioning == {"partitioner": "IidPartitioner", "num_clients": 4, "seed": 0}


class FixedPartitioner(Partitioner):
    def __init__(self, result):
        object.__setattr__(self, "result", result)

    def partition(self, dataset):
        return self.result


def test_a_partitioner_that_returns_something_else_is_named():
    with pytest.raises(TypeError, match=r"FixedPartitioner.partition\(\) must return a Partition, got \[\]"):
        FederatedDataset.from_dataset(speeches(), FixedPartitioner([]))
    with pytest.raises(TypeError, match="expected a Partitioner, got 3"):
        FederatedDataset.from_dataset(speeches(), 3)


def test_rows_that_are_not_there_are_refused():
    partition = Partition(["a"], np.array([6]), np.array([0, 1]))
    with pytest.raises(ValueError, match="names row 6, but the data set has the rows 0 to 5"):
        FederatedDataset.from_dataset(speeches(), FixedPartitioner(partition))


# from_dict


def test_from_dict_keeps_each_client_as_it_is():
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


def test_whole_numbers_become_strings():
    assert list(FederatedDataset.from_dict({2: speeches(), np.int64(1): speeches()})) == ["2", "1"]


@pytest.mark.parametrize("key", [1.0, True, None, ("a", 1)])
def test_other_keys_are_refused(key):
    with pytest.raises(TypeError, match="must be a string or a whole number"):
        FederatedDataset.from_dict({key: speeches()})


def test_ids_that_become_the_same_string_are_refused():
    with pytest.raises(ValueError, match="'1' occurs twice"):
        FederatedDataset.from_dict({1: speeches(), "1": speeches()})


def test_bad_mappings_are_refused():
    with pytest.raises(ValueError, match="the mapping is empty"):
        FederatedDataset.from_dict({})
    with pytest.raises(ValueError, match="empty string"):
        FederatedDataset.from_dict({"": speeches()})
    with pytest.raises(TypeError, match="got list"):
        FederatedDataset.from_dict([speeches()])
    with pytest.raises(TypeError, match="client 'a' is a list"):
        FederatedDataset.from_dict({"a": [{"text": "x"}]})


def test_clients_without_rows_are_named():
    empty = speeches().select([])
    with pytest.raises(ValueError, match="cannot train: 'b', 'd'"):
        FederatedDataset.from_dict({"a": speeches(), "b": empty, "c": speeches(), "d": empty})


def test_different_columns_are_named():
    with pytest.raises(ValueError, match=r"'b' lacks \['text'\] and has \['words'\] beyond those of 'a'"):
        FederatedDataset.from_dict({"a": speeches(), "b": speeches().rename_column("text", "words")})


def test_different_types_are_named():
    with pytest.raises(ValueError, match="differ in the column 'label': 'b' has Value"):
        FederatedDataset.from_dict({"a": speeches(), "b": speeches().cast_column("label", Value("int64"))})


def test_another_order_of_label_names_is_refused():
    turned = speeches().cast_column("label", Value("int64")).cast_column("label", ClassLabel(names=["yes", "no"]))
    with pytest.raises(ValueError, match="differ in the column 'label'.*one order of names"):
        FederatedDataset.from_dict({"a": speeches(), "b": turned})


def test_columns_may_stand_in_another_order():
    turned = speeches().select_columns(["label", "text", "speaker"])
    clients = FederatedDataset.from_dict({"a": speeches(), "b": turned})
    assert clients.to_dataset()["text"][:] == list("abcdef") * 2


def test_an_iterable_client_has_no_number_of_rows_and_is_not_pooled():
    stream = speeches().to_iterable_dataset()
    clients = FederatedDataset.from_dict({"a": speeches(), "b": stream})
    assert clients.num_rows == {"a": 6, "b": None}
    assert "unknown for 1 iterable clients, 6 in the others" in repr(clients)
    mapped = clients.map(lambda row: {"text": row["text"].upper()})
    assert isinstance(mapped["b"], IterableDataset)
    assert [row["text"] for row in mapped["b"]] == list("ABCDEF")
    with pytest.raises(TypeError, match="Client 'b' is an IterableDataset"):
        clients.to_dataset()


# a mapping of views


def test_views_are_not_retained():
    clients = FederatedDataset.from_column(speeches(), "speaker")
    view = clients["ann"]
    seen = weakref.ref(view)
    del view
    gc.collect()
    assert seen() is None


def test_two_views_of_a_client_share_a_fingerprint():
    # map() finds its cache by the fingerprint; a random one would preprocess each client again in every round
    clients, again = (FederatedDataset.from_column(speeches(), "speaker") for _ in range(2))
    assert clients["ann"]._fingerprint == again["ann"]._fingerprint
    assert clients["ann"]._fingerprint != clients["ben"]._fingerprint


def test_asking_whether_a_client_exists_opens_none(monkeypatch):
    clients = FederatedDataset.from_column(speeches(), "speaker")
    monkeypatch.setattr(Dataset, "select", lambda *args, **kwargs: pytest.fail("a client was opened"))
    assert "ann" in clients and "dan" not in clients and 3 not in clients
    assert clients == clients and clients != FederatedDataset.from_column(speeches(), "speaker")
    assert len({clients, clients}) == 1
    assert len(clients) == 3 and list(clients.num_rows) == clients.client_ids
    assert "num_clients: 3" in repr(clients)


def test_an_unknown_client_gets_names_that_look_alike():
    clients = FederatedDataset.from_column(speeches(), "speaker")
    with pytest.raises(KeyError, match="no client 'anne'. Did you mean 'ann'?"):
        clients["anne"]
    with pytest.raises(KeyError, match="no client 0. There are 3, first 'ann'"):
        clients[0]
    with pytest.raises(KeyError, match="Did you mean 'ben'"):
        clients.select_clients(["ann", "bene"])


def test_views_keep_the_format_of_the_source():
    clients = FederatedDataset.from_column(speeches().with_format("numpy"), "speaker")
    assert isinstance(clients["ann"][0]["label"], np.int64)


def test_a_federated_data_set_can_be_pickled():
    clients = pickle.loads(pickle.dumps(FederatedDataset.from_column(speeches(), "speaker")))
    assert clients["ben"]["text"][:] == ["b", "e"]


# select_clients, to_dataset


def test_select_clients_keeps_the_order_asked_for():
    clients = FederatedDataset.from_column(speeches(), "speaker").select_clients(["cy", "ann"])
    assert clients.num_rows == {"cy": 1, "ann": 3}
    assert clients["ann"]["text"][:] == ["a", "c", "f"]
    assert clients.to_dataset()["text"][:] == ["d", "a", "c", "f"]


def test_select_clients_refuses_none_twice_and_a_string():
    clients = FederatedDataset.from_column(speeches(), "speaker")
    with pytest.raises(ValueError, match="the list of ids is empty"):
        clients.select_clients([])
    with pytest.raises(ValueError, match="'ann' occurs twice"):
        clients.select_clients(["ann", "ann"])
    with pytest.raises(TypeError, match="expected a list of ids, got the string 'ann'"):
        clients.select_clients("ann")


# changing rows and columns


@pytest.fixture(params=["one source", "from_dict"])
def clients(request) -> FederatedDataset:
    cut = FederatedDataset.from_column(speeches().shuffle(seed=2), "speaker")
    return cut if request.param == "one source" else FederatedDataset.from_dict(dict(cut.items()))


def test_changes_keep_whose_the_rows_are(clients):
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


def test_a_map_that_changes_the_number_of_rows_is_refused(clients):
    with pytest.raises(ValueError, match=r"FederatedDataset.from_dict\(\{client_id: clients\[client_id\].map"):
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
def test_a_column_that_does_not_exist_lists_those_that_do(clients, change):
    with pytest.raises(ValueError, match="no column 'texts'. The columns are: speaker, text, label"):
        change(clients)


def test_one_source_is_mapped_once_and_without_rows_of_nobody():
    seen: list[str] = []

    def remember(rows):
        seen.extend(rows["text"])
        return {"length": [len(text) for text in rows["text"]]}

    clients = FederatedDataset.from_column(speeches(), "speaker").select_clients(["cy", "ben"])
    mapped = clients.map(remember, batched=True, load_from_cache_file=False)
    assert seen == ["d", "b", "e"]
    assert mapped["ben"]["text"][:] == ["b", "e"]
    assert mapped.num_rows == {"cy": 1, "ben": 2}


@pytest.mark.parametrize("name", ["cache_file_name", "new_fingerprint"])
def test_clients_of_their_own_are_not_mapped_into_one_cache(tmp_path, name):
    clients = FederatedDataset.from_dict(
        {"a": Dataset.from_dict({"x": [1, 2]}), "b": Dataset.from_dict({"x": [3, 4]})}
    )
    with pytest.raises(ValueError, match=f"{name} would give all the first's rows"):
        clients.map(lambda row: row, **{name: str(tmp_path / "cache")})
    assert clients.map(lambda row: {"x": row["x"] + 1})["b"]["x"][:] == [4, 5]
