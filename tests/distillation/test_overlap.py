"""The warning about private examples that are also public."""

from __future__ import annotations

from datasets import Dataset
from distillation_setup import NUM_PUBLIC, distillation_trainer
from tiny import rows

from hf_federated import FederatedDataset
from hf_federated.clients.participants import Participants, count_overlap
from hf_federated.tasks import TextClassification


def test_warning_counts_private_examples_that_are_public(tmp_path, caplog):
    public = rows(NUM_PUBLIC, seed=5)
    shared = Dataset.from_list([*public.select(range(3)), *rows(4, seed=1)])
    distillation_trainer(tmp_path, "dsfl", train_dataset={"a": shared, "b": rows(4, seed=2)})
    assert "3 of the clients' examples are also public examples" in caplog.text


def test_no_warning_without_overlap(tmp_path, caplog):
    distillation_trainer(tmp_path, "dsfl")
    assert "public rows too" not in caplog.text


def test_overlap_compares_texts_and_ignores_labels():
    task = TextClassification(label_names=["bad", "good"])
    public = Dataset.from_dict({"text": ["fine", "dull"], "id": [7, 8]})
    clients = FederatedDataset.from_dict(
        {"a": Dataset.from_dict({"text": ["fine", "warm", "fine"], "label": [1, 0, 0], "id": [1, 2, 3]})}
    )
    assert count_overlap(clients, Participants(task=task, public_dataset=public)) == 2
