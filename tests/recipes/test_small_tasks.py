"""Tests of `prepare_small_tasks.py` of the FedDRS recipes, which writes eight tasks and a small model."""

from __future__ import annotations

import gzip
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer


SCRIPT = str(Path(__file__).parents[2] / "recipes" / "feddrs" / "prepare_small_tasks.py")
GROUPS = ("comp.graphics", "comp.windows.x", "rec.autos", "sci.med", "talk.politics.guns", "alt.atheism")


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """Write compressed JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def prepared(monkeypatch, model_dir, tmp_path):
    """The output folder of the script."""
    for split in ("train", "test"):
        texts = [{"text": f"a {split} film {name}", "label_name": name} for name in GROUPS]
        write(tmp_path / "news" / f"{split}.jsonl.gz", [*texts, {"text": " ", "label_name": "rec.autos"}])
        for domain in ("automotive", "baby", "health"):
            rows = [{"text": f"{split} {domain} {label}", "label": label} for label in (0, 1, 2)]
            write(tmp_path / "reviews" / f"{domain}_{split}.jsonl.gz", rows)
    for split in ("train", "validation"):
        rows = [{"sentence": f"{split} {label}", "label": label} for label in ("positive", "negative")]
        write(tmp_path / "sst2" / f"{split}.jsonl.gz", rows)
    given = [f"--newsgroups={tmp_path / 'news'}", f"--sst2={tmp_path / 'sst2'}", f"--reviews={tmp_path / 'reviews'}"]
    given += [f"--encoder={model_dir}", f"--output-dir={tmp_path / 'out'}", "--max-train-rows=2", "--hidden-size=5"]
    monkeypatch.setattr(sys, "argv", [SCRIPT, *given])
    runpy.run_path(SCRIPT, run_name="__main__")
    return tmp_path / "out"


def test_tasks_have_their_labels_and_caps(prepared):
    train, test = load_dataset(str(prepared / "data"), split=["train", "test"])
    of_task = {task: set() for task in test["task"]}
    for row in test:
        of_task[row["task"]].add(row["label"])
    sentiments = {"neutral", "positive", "negative"}
    assert of_task == {
        "newsgroups-comp": {"comp.graphics", "comp.windows.x"},
        "newsgroups-rec": {"rec.autos"},
        "newsgroups-sci": {"sci.med"},
        "newsgroups-talk": {"talk.politics.guns"},
        "sst2": {"positive", "negative"},
        **{f"reviews-{domain}": sentiments for domain in ("automotive", "baby", "health")},
    }
    assert max(train["task"][:].count(task) for task in of_task) == 2
    assert all("test" in text or "validation" in text for text in test["text"])


def test_model_is_a_classifier_of_the_mean_of_the_word_embeddings(prepared, model_dir):
    model = AutoModelForSequenceClassification.from_pretrained(prepared / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(prepared / "model")
    inputs = tokenizer(["a dull film", "a warm plot and a cold plot"], padding=True, return_tensors="pt")
    words = AutoModelForSequenceClassification.from_pretrained(model_dir).base_model.embeddings.eval()
    states, mask = words(inputs["input_ids"]), inputs["attention_mask"][..., None]
    mean = (states * mask).sum(1) / mask.sum(1)
    torch.testing.assert_close(model(**inputs).logits, model.head(features=mean).logits)
    torch.testing.assert_close(model.train()(**inputs).logits, model.eval()(**inputs).logits)  # without dropout
    assert sorted(model.config.label2id) == list(model.config.label2id) and len(model.config.label2id) == 8
