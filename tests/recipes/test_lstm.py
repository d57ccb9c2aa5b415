"""Tests of the LSTM of the FedNLP recipes: its states, padding, and the folder that recipes load."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tiny import arguments
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from hf_federated import FederatedConfig, FederatedTrainer


FOLDER = Path(__file__).parents[2] / "recipes" / "fednlp"
TEXTS = ["The cat sat on the mat", "the dog sat", "A Cat and a dog"]


@pytest.fixture(params=[False, True], ids=["lstm", "bilstm"])
def saved(request, tmp_path, monkeypatch):
    """A folder with an LSTM that reads the words of `TEXTS`."""
    monkeypatch.syspath_prepend(str(FOLDER))
    script = runpy.run_path(str(FOLDER / "prepare_lstm.py"))
    assert script["write_model"](TEXTS, str(tmp_path), request.param, 100) == 7  # five words occur twice
    yield tmp_path
    sys.modules.pop("lstm", None)


def test_folder_has_a_tokenizer_and_a_model_for_each_task(saved):
    tokenizer = AutoTokenizer.from_pretrained(saved)
    encoded = tokenizer(TEXTS, padding=True, return_tensors="pt")
    assert tokenizer.convert_ids_to_tokens(encoded["input_ids"][1])[:4] == ["the", "dog", "sat", "[PAD]"]
    assert tokenizer.convert_ids_to_tokens(encoded["input_ids"][0])[-1] == "[UNK]"
    for auto_class, shape in (
        (AutoModelForSequenceClassification, (3, 4)),
        (AutoModelForTokenClassification, (3, 6, 4)),
    ):
        model = auto_class.from_pretrained(saved, trust_remote_code=True, num_labels=4)
        assert model(**encoded).logits.shape == shape


def test_loss_and_states_are_those_of_torch_without_padding(saved):
    tokenizer = AutoTokenizer.from_pretrained(saved)
    encoded = tokenizer(TEXTS, padding=True, return_tensors="pt")
    model = AutoModelForTokenClassification.from_pretrained(saved, trust_remote_code=True, num_labels=4)
    model = model.double().eval()
    labels = torch.where(encoded["attention_mask"].bool(), encoded["input_ids"] % 4, -100)
    output = model(**encoded, labels=labels)
    losses = []
    for row, text in enumerate(TEXTS):
        ids = torch.tensor(tokenizer(text)["input_ids"])
        states, _ = model.lstm(model.embeddings(ids)[None])
        logits = model.classifier(states[0])
        torch.testing.assert_close(output.logits[row, : len(ids)], logits, rtol=1e-12, atol=1e-12)
        losses.append(torch.nn.functional.cross_entropy(logits, ids % 4, reduction="none"))
    torch.testing.assert_close(output.loss, torch.cat(losses).mean(), rtol=1e-12, atol=1e-12)


def test_classification_reads_the_mean_of_the_states(saved):
    tokenizer = AutoTokenizer.from_pretrained(saved)
    encoded = tokenizer(TEXTS, padding=True, return_tensors="pt")
    model = AutoModelForSequenceClassification.from_pretrained(saved, trust_remote_code=True, num_labels=4)
    model = model.double().eval()
    logits = model(**encoded).logits
    for row, text in enumerate(TEXTS):
        states, _ = model.lstm(model.embeddings(torch.tensor(tokenizer(text)["input_ids"]))[None])
        torch.testing.assert_close(logits[row], model.classifier(states[0].mean(dim=0)), rtol=1e-12, atol=1e-12)


def test_model_uses_torch_and_transformers_only():
    lines = (FOLDER / "lstm.py").read_text(encoding="utf-8").splitlines()
    imports = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert imports == {"__future__", "typing", "torch", "transformers"}


def test_averaging_trains_the_model(saved, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(saved)
    encoded = dict(tokenizer(TEXTS * 4, padding=True)) | {"labels": [0, 1, 0] * 4}
    trainer = FederatedTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(saved, trust_remote_code=True, num_labels=2),
        args=arguments(tmp_path / "run", learning_rate=0.01, per_device_train_batch_size=4),
        train_dataset={name: Dataset.from_dict(encoded) for name in "ab"},
        eval_dataset=Dataset.from_dict(encoded),
        processing_class=tokenizer,
        federation=FederatedConfig(num_rounds=3, aggregation="fedavg"),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 0.01
