"""Private rows that are public too are counted in a warning."""

from __future__ import annotations

from datasets import Dataset
from distilled import NUM_PUBLIC, distilled
from tiny import rows

from hf_federated import FederatedDataset
from hf_federated.clients.participants import Participants, count_overlap
from hf_federated.tasks import TextClassification


def test_rows_that_are_private_and_public_are_counted(tmp_path, caplog):
    public = rows(NUM_PUBLIC, seed=5)
    shared = Dataset.from_list([*public.select(range(3)), *rows(4, seed=1)])
    distilled(tmp_path, "dsfl", train_dataset={"a": shared, "b": rows(4, seed=2)})
    assert "3 of the clients' rows are public rows too" in caplog.text


def test_nothing_is_said_where_there_is_none(tmp_path, caplog):
    distilled(tmp_path, "dsfl")
    assert "public rows too" not in caplog.text


def test_texts_are_compared_and_labels_are_not():
    task = TextClassification(label_names=["bad", "good"])
    public = Dataset.from_dict({"text": ["fine", "dull"], "id": [7, 8]})
    clients = FederatedDataset.from_dict(
        {"a": Dataset.from_dict({"text": ["fine", "warm", "fine"], "label": [1, 0, 0], "id": [1, 2, 3]})}
    )
    assert count_overlap(clients, Participants(task=task, public_dataset=public)) == 2
