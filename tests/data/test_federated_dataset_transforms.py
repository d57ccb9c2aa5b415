"""`filter`, `shuffle`, `train_test_split`, `class_encode_column` and formats of a `FederatedDataset`."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, concatenate_datasets, enable_progress_bars
from datasets.utils.logging import disable_progress_bar

from hf_federated.data import FederatedDataset, FederatedDatasetDict


SITES = ["c"] * 12 + ["a"] * 30 + ["b"] * 1 + ["a"] * 10
KINDS = ["one source", "from_dict", "folder"]


def rows() -> Dataset:
    """53 examples of three sites. The label of every third example is 1."""
    return Dataset.from_dict(
        {
            "site": SITES,
            "number": list(range(len(SITES))),
            "label": [int(number % 3 == 0) for number in range(len(SITES))],
            "word": [["good", "bad", None][number % 3] for number in range(len(SITES))],
        }
    )


@pytest.fixture(params=KINDS)
def clients(request, tmp_path) -> FederatedDataset:
    partitioned = FederatedDataset.from_column(rows(), "site")
    if request.param == "from_dict":
        return FederatedDataset.from_dict(dict(partitioned.items()))
    if request.param == "folder":
        partitioned.save_to_disk(tmp_path / "clients")
        return FederatedDataset.load_from_disk(tmp_path / "clients")
    return partitioned


def numbers(clients: FederatedDataset) -> dict[str, list[int]]:
    return {client_id: clients[client_id]["number"][:] for client_id in clients}


# filter


def test_filter_keeps_rows_with_their_client(clients):
    before = numbers(clients)
    kept = clients.filter(lambda row: row["number"] % 2 == 0)
    assert numbers(kept) == {i: [number for number in before[i] if number % 2 == 0] for i in before}
    assert kept.partitioning == clients.partitioning
    batched = clients.filter(lambda column: [value % 2 == 0 for value in column], input_columns="number", batched=True)
    assert numbers(batched) == numbers(kept)


def test_filter_without_rows_of_a_client_raises_unless_the_client_is_dropped(clients):
    with pytest.raises(ValueError, match="no row remains of 1 clients: 'b'. Pass drop_empty_clients=True"):
        clients.filter(lambda row: row["number"] != 42)
    kept = clients.filter(lambda row: row["number"] != 42, drop_empty_clients=True)
    assert list(kept) == ["a", "c"] and kept.num_rows == {"a": 40, "c": 12}
    with pytest.raises(ValueError, match="false for all rows of all clients"):
        clients.filter(lambda row: False, drop_empty_clients=True)


def test_filter_assigns_repeated_rows_of_the_source_to_the_right_client():
    source = concatenate_datasets([rows(), rows()]).select([0, 60, 0, 12, 12, 53])
    clients = FederatedDataset.from_column(source, "site")
    seen: list[int] = []

    def every_second(row, number):
        seen.append(row["number"])
        return number % 2 == 0

    kept = clients.filter(every_second, with_indices=True, load_from_cache_file=False)
    assert seen == [12, 12, 0, 7, 0, 0]  # client "a", then client "c"
    assert numbers(kept) == {"a": [12], "c": [0, 0]}


def test_filter_copies_no_rows_and_keeps_the_row_numbers_of_the_source(tmp_path):
    clients = FederatedDataset.from_column(rows(), "site").filter(lambda row: row["number"] < 45)
    clients.save_to_disk(tmp_path / "index", index_only=True)
    loaded = FederatedDataset.load_from_disk(tmp_path / "index", source=rows())
    assert numbers(loaded) == numbers(clients)


# shuffle


def test_shuffle_permutes_the_rows_of_each_client(clients):
    before, shuffled = numbers(clients), numbers(clients.shuffle(seed=3))
    assert list(shuffled) == list(before)
    assert {i: sorted(values) for i, values in shuffled.items()} == {i: sorted(values) for i, values in before.items()}
    assert shuffled["a"] != before["a"] and shuffled["c"] != before["c"]
    assert numbers(clients.shuffle(seed=3)) == shuffled != numbers(clients.shuffle(seed=4))


def test_shuffle_of_a_client_does_not_depend_on_the_other_clients(clients):
    assert numbers(clients.select_clients(["c"]).shuffle())["c"] == numbers(clients.shuffle())["c"]


def test_shuffle_fills_the_buffer_of_a_stream():
    streams = FederatedDataset.from_dict({"s": rows().to_iterable_dataset(), "d": rows()})
    shuffled = streams.shuffle(seed=1, buffer_size=53)
    assert sorted(row["number"] for row in shuffled["s"]) == list(range(53))
    assert [row["number"] for row in shuffled["s"]] != list(range(53))
    assert sorted(shuffled["d"]["number"][:]) == list(range(53)) != shuffled["d"]["number"][:]


# train_test_split


def test_train_test_split_takes_a_share_of_every_client(clients):
    splits = clients.train_test_split(test_size=0.1)
    assert isinstance(splits, FederatedDatasetDict)
    sizes = {i: len(values) for i, values in numbers(clients).items()}
    test = {i: math.ceil(0.1 * size) for i, size in sizes.items() if size > 1}
    assert splits.num_rows == {"train": {i: sizes[i] - test.get(i, 0) for i in sizes}, "test": test}
    for client_id, before in numbers(clients).items():
        parts = [numbers(split).get(client_id, []) for split in splits.values()]
        assert sorted(parts[0] + parts[1]) == sorted(before)
        assert all(part == [number for number in before if number in set(part)] for part in parts)


def test_train_test_split_depends_on_seed_and_client_only(clients):
    first, other = (numbers(clients.train_test_split(seed=seed)["test"]) for seed in (0, 1))
    assert first == numbers(clients.train_test_split(seed=0)["test"]) != other
    assert numbers(clients.select_clients(["c"]).train_test_split(seed=0)["test"])["c"] == first["c"]


def test_train_test_split_keeps_the_share_of_each_label(clients):
    splits = clients.train_test_split(test_size=0.3, stratify_by_column="label")
    for client_id in ("a", "c"):
        labels = clients[client_id]["label"][:]
        num_test = math.ceil(0.3 * len(labels))
        expected = {label: num_test * count / len(labels) for label, count in Counter(labels).items()}
        found = Counter(splits["test"][client_id]["label"][:])
        assert sum(found.values()) == num_test
        assert all(abs(found[label] - share) < 1 for label, share in expected.items())


def test_rows_without_a_value_are_a_stratum():
    words = ["x"] * 10 + [None] * 10
    clients = FederatedDataset.from_dict({"one": Dataset.from_dict({"word": words})})
    test = clients.train_test_split(test_size=0.2, stratify_by_column="word")["test"]["one"]["word"][:]
    assert Counter(test) == {"x": 2, None: 2}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, (9, 3)),
        ({"test_size": 5}, (7, 5)),
        ({"train_size": 4}, (4, 8)),
        ({"train_size": 0.6}, (7, 5)),
        ({"test_size": 0.25, "train_size": 0.5}, (6, 3)),
        ({"test_size": 2, "train_size": 3}, (3, 2)),
        ({"test_size": 0.99}, (1, 11)),
    ],
    ids=str,
)
def test_sizes_of_train_test_split_are_those_of_datasets(sizes, expected):
    twelve = rows().select(range(12))
    splits = FederatedDataset.from_dict({"one": twelve}).train_test_split(**sizes)
    assert (len(splits["train"]["one"]), len(splits["test"]["one"])) == expected
    if sizes != {"test_size": 0.99}:  # `datasets` would take all twelve rows for the test and raise
        of_datasets = twelve.train_test_split(**sizes)
        assert (len(of_datasets["train"]), len(of_datasets["test"])) == expected


def test_test_rows_follow_the_training_rows_without_shuffle(clients):
    splits = clients.select_clients(["c"]).train_test_split(test_size=0.25, shuffle=False)
    before = numbers(clients)["c"]
    assert (numbers(splits["train"])["c"], numbers(splits["test"])["c"]) == (before[:9], before[9:])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"test_size": 1.0}, r"test_size=1.0. Set it to a share .* above 0.0 and below 1.0"),
        ({"train_size": 0}, "train_size=0. Set it to a share"),
        ({"test_size": 0.7, "train_size": 0.5}, "add up to more than 1"),
        ({"test_size": 3}, "client 'b' has 1 rows, which are too few for test_size=3.*Set a share"),
        ({"stratify_by_column": "label", "shuffle": False}, "draws rows, but shuffle=False"),
        ({"stratify_by_column": "mood"}, "no column 'mood'. The columns are: number, label, word"),
    ],
    ids=str,
)
def test_invalid_arguments_of_train_test_split_raise_value_error(clients, arguments, words):
    with pytest.raises(ValueError, match=words):
        clients.train_test_split(**arguments)


def test_split_without_any_test_row_raises_value_error(clients):
    with pytest.raises(ValueError, match="give no client a test row"):
        clients.select_clients(["b"]).train_test_split(test_size=0.5)


# class_encode_column


def test_class_names_are_the_sorted_values_of_all_clients(clients):
    encoded = clients.class_encode_column("word")
    assert encoded.features["word"] == ClassLabel(names=["bad", "good"])
    for client_id in clients:
        expected = [{"bad": 0, "good": 1, None: None}[word] for word in clients[client_id]["word"][:]]
        assert encoded[client_id].features["word"].names == ["bad", "good"]
        assert encoded[client_id]["word"][:] == expected
        assert encoded[client_id]["number"][:] == clients[client_id]["number"][:]


def test_missing_values_become_a_class_on_request(clients):
    encoded = clients.class_encode_column("word", include_nulls=True)
    assert encoded.features["word"].names == ["None", "bad", "good"]
    assert encoded["c"]["word"][:3] == [2, 1, 0]


def test_class_names_equal_those_of_datasets():
    whole = Dataset.from_dict({"site": ["a", "b", "a"], "label": [10, 9, 2]})
    encoded = FederatedDataset.from_column(whole, "site").class_encode_column("label")
    expected = whole.class_encode_column("label")
    assert encoded.features["label"].names == expected.features["label"].names == ["10", "2", "9"]
    assert encoded["a"]["label"][:] == [expected["label"][0], expected["label"][2]]


def test_class_names_are_the_same_in_all_splits():
    train = FederatedDataset.from_dict({"a": Dataset.from_dict({"word": ["x", "z"]})})
    test = FederatedDataset.from_dict({"a": Dataset.from_dict({"word": ["y"]})})
    splits = FederatedDatasetDict(train=train, test=test).class_encode_column("word")
    assert splits["train"].features == splits["test"].features
    assert (splits["train"]["a"]["word"][:], splits["test"]["a"]["word"][:]) == ([0, 2], [1])


def test_columns_that_cannot_name_classes_are_refused(clients):
    with pytest.raises(ValueError, match="no column 'mood'"):
        clients.class_encode_column("mood")
    with pytest.raises(ValueError, match="the column 'word' is a ClassLabel, expected a column of values"):
        clients.class_encode_column("word").class_encode_column("word")
    scores = FederatedDataset.from_dict({"a": Dataset.from_dict({"score": [0.5]})})
    with pytest.raises(TypeError, match="the column 'score' has the type double.*cast_column"):
        scores.class_encode_column("score")


# formats and columns


@pytest.mark.parametrize("column", ["word", "score"])
def test_class_encode_column_reads_the_stored_values_and_keeps_the_format(clients, column):
    """With the format `torch`, a column of integers with a missing value has the values 1.0 and nan."""
    scores = {"good": 7, "bad": 70, None: None}
    clients = clients.map(lambda row: {"score": scores[row["word"]]})
    encoded = clients.with_format("torch", columns=["number"]).class_encode_column(column)
    assert list(encoded["c"][0]) == ["number"] and encoded["c"][0]["number"].item() == 0
    expected = clients.class_encode_column(column)
    assert encoded.features == expected.features
    assert {i: rows.with_format(None)[column][:] for i, rows in encoded.items()} == {
        i: rows[column][:] for i, rows in expected.items()
    }
    upper = clients.with_transform(lambda batch: {"upper": [number + 1 for number in batch["number"]]})
    assert upper.class_encode_column(column)["c"][:2] == {"upper": [1, 2]}


def test_transform_runs_when_rows_are_read(clients):
    doubled = clients.with_transform(lambda batch: {"double": [2 * number for number in batch["number"]]})
    assert doubled["c"][:2] == {"double": [0, 2]}
    assert "number" in doubled.with_format(None)["c"][0]
    assert isinstance(clients.with_format("numpy")["c"][0]["number"], np.int64)


def test_rename_columns_renames_several_columns(clients):
    renamed = clients.rename_columns({"label": "labels", "number": "id"})
    assert renamed.column_names == ["id", "labels", "word"]
    with pytest.raises(ValueError, match="no column 'labels'"):
        clients.rename_columns({"labels": "x"})


def test_methods_of_a_dict_apply_to_every_split():
    splits = FederatedDataset.from_column(rows(), "site").train_test_split(test_size=0.2)
    changed = splits.filter(lambda row: row["number"] % 2 == 0).shuffle().rename_columns({"number": "id"})
    formatted = changed.with_format("numpy").with_transform(lambda batch: {"id": batch["id"]})
    for split, clients in splits.items():
        expected = {i: sorted(n for n in values if n % 2 == 0) for i, values in numbers(clients).items()}
        assert {i: sorted(formatted[split][i][:]["id"]) for i in formatted[split]} == expected


@pytest.mark.parametrize(
    "call",
    [
        lambda clients: clients.train_test_split(),
        lambda clients: clients.with_transform(lambda batch: batch),
        lambda clients: clients.with_format("torch"),
        lambda clients: clients.class_encode_column("word"),
    ],
    ids=["train_test_split", "with_transform", "with_format", "class_encode_column"],
)
def test_error_names_a_client_with_a_stream(call):
    streams = FederatedDataset.from_dict({"rows": rows(), "stream": rows().to_iterable_dataset()})
    with pytest.raises(TypeError, match="client 'stream' has a stream .IterableDataset."):
        call(streams)


# progress bars


@pytest.mark.parametrize(
    ("call", "label"),
    [
        (lambda clients: clients.map(lambda row: {"length": 1}, load_from_cache_file=False), "Map"),
        (lambda clients: clients.filter(lambda row: True, load_from_cache_file=False), "Filter"),
        (lambda clients: clients.class_encode_column("word"), "Encoding classes"),
    ],
    ids=["map", "filter", "class_encode_column"],
)
def test_one_progress_bar_is_shown_for_all_clients(capfd, call, label):
    partitioned = FederatedDataset.from_column(rows(), "site")
    clients = FederatedDataset.from_dict({i: partitioned[i] for i in partitioned})
    enable_progress_bars()
    try:
        call(clients)
    finally:
        disable_progress_bar()
    bars = [line for line in capfd.readouterr().err.replace("\r", "\n").splitlines() if "%" in line]
    assert bars and all(line.startswith(f"{label}:") and "client" in line for line in bars)
