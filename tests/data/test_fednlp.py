"""FedNLP HDF5 files. The fixtures write the files in the same way as the loaders of FedNLP."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
from datasets import ClassLabel, Dataset, List, Value

from hf_federated import FederatedDataset, FederatedDatasetDict, IidPartitioner


METHOD = "niid_label_clients=12_alpha=1.0"


def write(path, attributes, **fields):
    texts = h5py.string_dtype("utf-8", None)
    with h5py.File(path, "w") as file:
        file["attributes"] = json.dumps(attributes)
        for field, values in fields.items():
            for number, value in enumerate(values):
                is_texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
                file[f"{field}/{number}"] = np.array(value, dtype=texts) if is_texts else value


def write_partition(path, clients, method=METHOD):
    with h5py.File(path, "w") as file:
        file[f"{method}/n_clients"] = len(clients)
        for name, splits in clients.items():
            for split, numbers in splits.items():
                file[f"{method}/partition_data/{name}/{split}"] = np.array(numbers, dtype=np.int64)


@pytest.fixture
def news(tmp_path):
    texts = [f"newsgroup text {number} é" for number in range(48)]
    labels = [["sci.space", "alt.atheism", "rec.autos"][number % 3] for number in range(48)]
    attributes = {
        "task_type": "text_classification",
        "num_labels": 3,
        "label_vocab": {"sci.space": 2, "alt.atheism": 0, "rec.autos": 1},
        "index_list": list(range(48)),
    }
    write(tmp_path / "news_data.h5", attributes, X=texts, Y=labels)
    # The keys of twelve clients are listed in the order of strings: 0, 1, 10, 11, 2, …
    clients = {str(i): {"train": [i, i + 12, i + 24][::-1], "test": [i + 36]} for i in range(12)}
    write_partition(tmp_path / "news_partition.h5", clients)
    return tmp_path / "news_data.h5", tmp_path / "news_partition.h5", texts, labels


def test_clients_have_the_rows_of_the_partition_file_in_order(news):
    data, partition, texts, labels = news
    both = FederatedDatasetDict.from_fednlp_h5(data, partition, METHOD)
    assert both.client_ids == [str(i) for i in range(12)]
    for i in range(12):
        for split, numbers in (("train", [i + 24, i + 12, i]), ("test", [i + 36])):
            client = both[split][str(i)]
            assert client["text"][:] == [texts[number] for number in numbers]
            assert client.features["label"].int2str(client["label"][:]) == [labels[number] for number in numbers]
    assert both["train"].features["label"] == ClassLabel(names=["alt.atheism", "rec.autos", "sci.space"])
    test = FederatedDataset.from_fednlp_h5(data, partition, METHOD, split="test")
    assert test["11"][:] == both["test"]["11"][:]
    assert test.partitioning == {"partitioner": "fednlp", "method": METHOD}


def test_every_task_is_read_into_its_columns(tmp_path):
    vocabulary = {"O": 0, "B-PER": 1, "I-PER": 2}
    write(
        tmp_path / "tags.h5",
        {"task_type": "seq_tagging", "label_vocab": vocabulary},
        X=[["Anna", "spoke"], ["no"]],
        Y=[["B-PER", "O"], ["O"]],
    )
    write(
        tmp_path / "spans.h5",
        {"task_type": "span_extraction", "index_list": [0, 1], "label_index_list": ["SQuAD", "NewsQA"]},
        context_X=["a b", "c d"],
        question_X=["what?", "who?"],
        Y=[(0, 1), (2, 3)],
        question_ids=["q0", "q1"],
    )
    write(tmp_path / "pairs.h5", {"index_list": [0, 1]}, X=["long", "text"], Y=["short", "t"])
    write(tmp_path / "plain.h5", {"index_list": [0, 1]}, X=["one", "two"])
    write_partition(tmp_path / "partition.h5", {"0": {"train": [1], "test": []}, "1": {"train": [0], "test": []}})

    def read(name):
        both = FederatedDatasetDict.from_fednlp_h5(tmp_path / name, tmp_path / "partition.h5", METHOD)
        assert list(both) == ["train"]
        return both["train"]

    tags = read("tags.h5")
    assert tags["1"][0] == {"tokens": ["Anna", "spoke"], "tags": [1, 0]}
    assert tags.features["tags"] == List(ClassLabel(names=list(vocabulary)))
    assert read("spans.h5")["0"][0] == {
        "id": "q1", "context": "c d", "question": "who?", "answer_start": 2, "answer_end": 3, "domain": "NewsQA",
    }  # fmt: skip
    assert read("pairs.h5")["0"][0] == {"source": "text", "target": "t"}
    assert read("plain.h5")["0"][0] == {"text": "two"}


def test_written_files_are_read_back_and_match_the_fednlp_layout(tmp_path):
    rows = Dataset.from_dict({"text": [f"text {i}" for i in range(40)], "label": [i % 3 for i in range(40)]})
    rows = rows.cast_column("label", ClassLabel(names=["a", "b", "c"]))
    both = FederatedDatasetDict(
        train=FederatedDataset.from_dataset(rows.select(range(30)), IidPartitioner(5)),
        test=FederatedDataset.from_dataset(rows.select(range(30, 40)), IidPartitioner(5)),
    )
    paths = tmp_path / "d.h5", tmp_path / "p.h5"
    both.to_fednlp_h5(*paths, method="uniform", task_type="text_classification")
    again = FederatedDatasetDict.from_fednlp_h5(*paths, "uniform")
    for split in both:
        assert list(again[split]) == list(both[split])
        for client_id in both[split]:
            assert again[split][client_id][:] == both[split][client_id][:]
    # The loader of FedNLP reads the files in this way.
    with h5py.File(paths[0]) as data, h5py.File(paths[1]) as partition:
        attributes = json.loads(data["attributes"][()])
        number = partition["uniform"]["partition_data"]["3"]["test"][()][0]
        assert data["X"][str(number)][()].decode("utf-8") == both["test"]["3"]["text"][0]
        assert data["Y"][str(number)][()].decode("utf-8") in attributes["label_vocab"]
        assert int(partition["uniform"]["n_clients"][()]) == 5
    assert attributes["train_index_list"] == list(range(30)) and attributes["num_labels"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.h5", "p.h5"]


@pytest.mark.parametrize("task_type", ["seq_tagging", "span_extraction", "seq2seq", "lm"])
def test_written_rows_of_every_task_are_read_back(tmp_path, task_type):
    columns = {
        "seq_tagging": {"tokens": [["a", "b"], ["c"], ["d"]], "tags": [["O", "B-X"], ["O"], ["B-X"]]},
        "span_extraction": {
            "id": ["1", "2", "3"], "context": ["xy"] * 3, "question": ["?"] * 3,
            "answer_start": [0, 1, 0], "answer_end": [1, 2, 2],
        },
        "seq2seq": {"source": ["a", "b", "c"], "target": ["x", "y", "z"]},
        "lm": {"text": ["a", "b", "c"]},
    }[task_type]  # fmt: skip
    clients = FederatedDatasetDict(train=FederatedDataset.from_dict({"anna": Dataset.from_dict(columns)}))
    paths = tmp_path / "d.h5", tmp_path / "p.h5"
    clients.to_fednlp_h5(*paths, method="m", task_type=task_type)
    again = FederatedDatasetDict.from_fednlp_h5(*paths, "m")["train"]["0"]
    if task_type == "seq_tagging":
        again = again.cast_column("tags", List(ClassLabel(names=["B-X", "O"]))).cast_column(
            "tags", List(Value("string"))
        )
        assert again["tokens"][:] == columns["tokens"]
    else:
        assert again[:] == columns


def test_inconsistent_files_raise_errors(news, tmp_path):
    data, partition, *_ = news
    with pytest.raises(ValueError, match=f"no partition 'uniform'. It has: {METHOD}"):
        FederatedDataset.from_fednlp_h5(data, partition, "uniform")
    with pytest.raises(ValueError, match="no split 'dev'. It has: train, test"):
        FederatedDataset.from_fednlp_h5(data, partition, METHOD, split="dev")
    write_partition(tmp_path / "far.h5", {"0": {"train": [1, 99], "test": [2]}})
    with pytest.raises(ValueError, match="no row 99 in 'X'"):
        FederatedDataset.from_fednlp_h5(data, tmp_path / "far.h5", METHOD)
    write_partition(tmp_path / "twice.h5", {"0": {"train": [1, 2]}, "1": {"train": [3, 2]}})
    with pytest.raises(ValueError, match="contains row 2 of train twice"):
        FederatedDataset.from_fednlp_h5(data, tmp_path / "twice.h5", METHOD)
    write(tmp_path / "other.h5", {"task_type": "regression"}, X=["a"] * 48)
    with pytest.raises(ValueError, match="Unknown task_type 'regression'"):
        FederatedDataset.from_fednlp_h5(tmp_path / "other.h5", partition, METHOD)
    clients = FederatedDatasetDict(train=FederatedDataset.from_dict({"a": Dataset.from_dict({"text": ["x"]})}))
    write_partition(tmp_path / "both.h5", {"0": {"train": [1], "test": [1]}})
    with pytest.raises(ValueError, match="contains row 1 in both train and test"):
        FederatedDataset.from_fednlp_h5(data, tmp_path / "both.h5", METHOD)
    write_partition(tmp_path / "none.h5", {"0": {"train": [], "test": []}})
    with pytest.raises(ValueError, match="no client of .* has rows"):
        FederatedDataset.from_fednlp_h5(data, tmp_path / "none.h5", METHOD)
    with h5py.File(tmp_path / "real.h5", "w") as file:
        file[f"{METHOD}/partition_data/0/train"] = np.array([0.7])
    with pytest.raises(ValueError, match="client 0 are float64"):
        FederatedDataset.from_fednlp_h5(data, tmp_path / "real.h5", METHOD)
    with pytest.raises(FileExistsError, match="is not replaced"):
        FederatedDatasetDict.from_fednlp_h5(data, partition, METHOD).to_fednlp_h5(
            data, tmp_path / "new.h5", "m", "text_classification"
        )
    write_partition(tmp_path / "some.h5", {"0": {"train": [0], "test": [1]}, "1": {"train": [2]}})
    assert FederatedDatasetDict.from_fednlp_h5(data, tmp_path / "some.h5", METHOD).num_rows == {
        "train": {"0": 1, "1": 1},
        "test": {"0": 1},
    }
    with pytest.raises(ValueError, match="Row 1 of train has no value in 'text'"):
        nulls = FederatedDataset.from_dict({"a": Dataset.from_dict({"text": ["x", None]})})
        FederatedDatasetDict(train=nulls).to_fednlp_h5(tmp_path / "n.h5", tmp_path / "m.h5", "m", "lm")
    assert not (tmp_path / "n.h5").exists()
    with pytest.raises(ValueError, match="no column 'label'"):
        clients.to_fednlp_h5(tmp_path / "d.h5", tmp_path / "p.h5", "m", "text_classification")
    assert not (tmp_path / "d.h5").exists()
