"""Tests of text classification with the words of a causal model: encoding, metrics and training."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from causal import bytes_tokenizer, llama, pieces_tokenizer
from datasets import ClassLabel, Dataset
from sklearn.metrics import accuracy_score, f1_score, log_loss
from tiny import arguments

from hf_federated import FederatedDataset, SplitConfig, SplitFederatedTrainer
from hf_federated.tasks import ClozeClassification


TASK = ClozeClassification(["bad", "good"], ["dull", "bright"], max_length=48)
ROWS = Dataset.from_dict(
    {"text": ["a dull film", " a bright plot ", "the dull plot of it all"], "label": ["bad", "good", "bad"]}
)


@pytest.fixture(scope="module")
def tokenizer():
    return bytes_tokenizer(ROWS["text"])


def reviews(num_rows: int) -> Dataset:
    """Reviews in which films that begin with x are good."""
    texts = [f"{'yx'[row % 2]} film" for row in range(num_rows)]
    return Dataset.from_dict({"text": texts, "label": [0, 1] * (num_rows // 2)})


@pytest.mark.parametrize("make", [bytes_tokenizer, pieces_tokenizer])
def test_tokens_equal_tokens_of_the_whole_text(make):
    tokenizer = make([*ROWS["text"], "It was dull bright"])
    features = TASK.prepare(ROWS, tokenizer)
    texts = [f"{text.strip()} It was" for text in ROWS["text"]]
    for row, text in enumerate(texts):
        word = TASK.words[["bad", "good"].index(ROWS["label"][row])]
        assert features[row]["input_ids"] == tokenizer(f"{text} {word}")["input_ids"]
        length = features[row]["prompt_length"]
        assert features[row]["labels"] == [-100] * length + features[row]["input_ids"][length:]
    examples = TASK.for_evaluation(features, tokenizer)
    order = list(zip(examples["id"], examples["candidate"], strict=True))
    assert sorted(order) == [(row, word) for row in range(3) for word in range(2)]
    assert [examples["answer"][number] for number in range(6)] == [
        int(ROWS["label"][row] == "good") for row, _ in order
    ]
    expected = tokenizer([f"{texts[row]} {TASK.words[word]}" for row, word in order])["input_ids"]
    assert examples["input_ids"][:] == expected


def test_template_names_the_columns():
    task = ClozeClassification(
        ["no", "yes"], ["no", "yes"], template="{a} / {b} Is {a} like {b}?", label_column="same"
    )
    assert task.columns == ("a", "b", "same")
    assert task.prompts({"a": [" x "], "b": ["yy"]}) == (["x / yy Is x like yy?"], [(0, 1)])
    assert task.find_empty({"a": ["x", ""], "b": [None, "y"]}) == [True, True]


def test_long_texts_lose_their_end(tokenizer):
    task = ClozeClassification(["bad", "good"], ["dull", "bright"], max_length=30)
    rows = Dataset.from_dict({"text": ["abcdefgh" * 10], "label": [1]})
    ids = task.prepare(rows, tokenizer)[0]["input_ids"]
    text = tokenizer.decode(ids).strip()
    assert len(ids) == 30 and text.startswith("abcdefgh") and text.endswith(" It was bright")
    assert "abcdefgh" * 10 not in text
    with pytest.raises(ValueError, match="Row 0 has .* tokens that cannot be truncated"):
        ClozeClassification(["bad", "good"], ["dull", "bright"], max_length=3).prepare(rows, tokenizer)


def test_names_and_numbers_are_labels(tokenizer):
    numbers = ROWS.cast_column("label", ClassLabel(names=["bad", "good"]))
    assert TASK.prepare(numbers, tokenizer)["labels"][:] == TASK.prepare(ROWS, tokenizer)["labels"][:]
    unlabeled = TASK.encode({"text": ["a film"]}, tokenizer, with_labels=False)
    assert "labels" not in unlabeled and len(unlabeled["input_ids"][0]) == unlabeled["prompt_length"][0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"words": ["dull"]}, "2 `label_names` and 1 `words`"),
        ({"label_names": ["bad"], "words": ["dull"]}, "at least two labels"),
        ({"words": ["dull", " "]}, "no word can be empty"),
        ({"template": "It was"}, "must contain the name of at least one text column"),
        ({"template": "{} was"}, "must contain the name of at least one text column"),
        ({"template": "{text"}, "`template` is '{text', which is not a format string"),
        ({"template": "{text!r}"}, "without a format"),
        ({"template": "{text:>10}"}, "without a format"),
        ({"template": "{text} {label}"}, "contains the label column 'label'"),
        ({"words": "bg"}, "one for each label"),
        ({"max_length": 1}, "at least 2"),
    ],
)
def test_invalid_arguments_are_refused(settings, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        ClozeClassification(**{"label_names": ["bad", "good"], "words": ["dull", "bright"], **settings})


@pytest.mark.parametrize("words", [["dull", " dull"], ["dull", "dullx"], ["dullx", "dull"]])
def test_words_that_begin_with_another_word_are_refused(words, tokenizer):
    task = ClozeClassification(["bad", "good"], words)
    with pytest.raises(ValueError, match="the tokens of a word begin with the tokens of another word"):
        task.prepare(ROWS, tokenizer)


def test_metrics_equal_those_of_scikit_learn(tokenizer):
    rows = reviews(40)
    features = TASK.for_evaluation(TASK.prepare(rows, tokenizer), tokenizer)
    sums = np.random.default_rng(0).normal(size=len(features)) * 3
    metrics = TASK.build_compute_metrics(tokenizer, features, rows)(SimpleNamespace(predictions=sums))
    table = np.zeros((40, 2))
    table[features["id"], features["candidate"]] = sums
    probabilities = np.exp(table) / np.exp(table).sum(1, keepdims=True)
    labels, predictions = rows["label"], table.argmax(1)
    assert metrics["log_loss"] == pytest.approx(log_loss(labels, probabilities), rel=1e-12)
    assert metrics["accuracy"] == accuracy_score(labels, predictions)
    assert metrics["f1_macro"] == pytest.approx(f1_score(labels, predictions, average="macro"))
    sums[3] = np.nan
    with pytest.raises(ValueError, match="contain NaN"):
        TASK.build_compute_metrics(tokenizer, features, rows)(SimpleNamespace(predictions=sums))
    for other in (reviews(38), rows.select([*range(1, 40), 0])):
        with pytest.raises(ValueError, match="different rows, or the same rows in another order"):
            TASK.build_compute_metrics(tokenizer, features, other)
    with pytest.raises(ValueError, match="`features` or `rows` is missing"):
        TASK.build_compute_metrics(tokenizer, features)


def test_clients_of_a_split_model_learn_the_task(tokenizer, tmp_path):
    train, test = reviews(64), reviews(20)
    features = TASK.for_evaluation(TASK.prepare(test, tokenizer), tokenizer)
    clients = FederatedDataset.from_dict({str(n): train.select(range(32 * n, 32 * n + 32)) for n in range(2)})
    torch.manual_seed(0)
    trainer = SplitFederatedTrainer(
        model=llama(len(tokenizer), num_layers=3),
        args=arguments(tmp_path, max_steps=40, learning_rate=1e-2, per_device_train_batch_size=8),
        split=SplitConfig(strategy="client_batch", average_every=5),
        train_dataset=TASK.prepare(clients, tokenizer),
        eval_dataset=features,
        data_collator=TASK.data_collator(tokenizer),
        compute_metrics=TASK.build_compute_metrics(tokenizer, features, test),
        preprocess_logits_for_metrics=TASK.preprocess_logits_for_metrics,
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_accuracy"] == 1.0 and after["eval_log_loss"] < 0.1 < 0.3 < before["eval_log_loss"]
