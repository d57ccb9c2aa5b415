"""Tests of text classification: encoding, training with both trainers, and metrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset
from measure import SHAPE, assert_padding_keeps_logits, milliseconds_per_example
from sklearn.metrics import f1_score, matthews_corrcoef
from tiny import arguments
from transformers import BertConfig, BertForSequenceClassification, EvalPrediction, Trainer

from hf_federated import FederatedConfig, FederatedDataset, FederatedTrainer
from hf_federated.tasks import TextClassification


TASK = TextClassification(label_names=["bad", "good"], max_length=16)


def reviews(num_rows: int) -> Dataset:
    """Reviews in which bright films are good and dull films are bad."""
    return Dataset.from_dict(
        {
            "text": [f"a {['dull', 'bright'][i % 2]} film{' in paris' * (i % 3)}" for i in range(num_rows)],
            "label": [["bad", "good"][i % 2] for i in range(num_rows)],
        }
    )


def model(task: TextClassification = TASK) -> BertForSequenceClassification:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BertForSequenceClassification(BertConfig(**SHAPE, **task.model_kwargs))


def test_texts_and_labels_are_encoded(tokenizer):
    encoded = TASK.encode({"text": ["a bright film", "paris"], "label": ["good", 0]}, tokenizer)
    assert encoded["input_ids"] == [[2, 5, 7, 8, 3], [2, 13, 14, 3]]
    assert encoded["attention_mask"] == [[1] * 5, [1] * 4]
    assert encoded["labels"] == [1, 0]


def test_text_pairs_are_encoded_as_one_example(tokenizer):
    task = TextClassification(["no", "yes"], text_column=("premise", "hypothesis"))
    encoded = task.encode({"premise": ["a film"], "hypothesis": ["a plot"], "label": [1]}, tokenizer)
    assert encoded["input_ids"] == [[2, 5, 8, 3, 5, 9, 3]]
    assert task.columns == ("premise", "hypothesis", "label")


def test_long_texts_are_truncated(tokenizer):
    assert TASK.encode({"text": ["film " * 50], "label": [0]}, tokenizer)["input_ids"] == [[2, *[8] * 14, 3]]


def test_examples_without_labels_are_encoded_for_prediction(tokenizer):
    assert "labels" not in TASK.encode({"text": ["a film"]}, tokenizer, with_labels=False)
    with pytest.raises(ValueError, match="no column 'label'; the columns are 'text'.*with_labels=False"):
        TASK.encode({"text": ["a film"]}, tokenizer)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"text": "  "}, "Row 1 has an empty text in the column 'text'"),
        ({"text": None}, "Row 1 has None instead of a text"),
        ({"label": None}, "Row 1 has no label in the column 'label'"),
        ({"label": "great"}, "has the label 'great' in the column 'label'; allowed are 'bad', 'good', or 0 to 1"),
    ],
)
def test_error_names_invalid_row(tokenizer, changed, message):
    rows = Dataset.from_list([{"text": "a film", "label": "good"}, {"text": "a film", "label": "bad", **changed}])
    with pytest.raises(ValueError, match=message):
        TASK.prepare(rows, tokenizer)


@pytest.mark.parametrize("label", [-1, 2, 0.5])
def test_label_ids_out_of_range_raise(tokenizer, label):
    with pytest.raises(ValueError, match="Row 0 of the batch has"):
        TASK.encode({"text": ["a film"], "label": [label]}, tokenizer)


def test_error_names_row_number_across_batches(tokenizer):
    rows = Dataset.from_dict({"text": ["a film"] * 5 + [""], "label": ["bad"] * 6})
    with pytest.raises(ValueError, match="Row 5 has an empty text"):
        TASK.prepare(rows, tokenizer, batch_size=2)


def test_from_dataset_reads_label_names():
    rows = reviews(4)
    assert TextClassification.from_dataset(rows).label_names == ("bad", "good")
    cast = rows.cast_column("label", ClassLabel(names=["good", "bad", "fair"]))
    assert TextClassification.from_dataset(cast).label_names == ("good", "bad", "fair")
    with pytest.raises(ValueError, match="labels have no names"):
        TextClassification.from_dataset(Dataset.from_dict({"text": ["a"], "label": [1]}))


@pytest.mark.parametrize(
    "kwargs",
    [{"label_names": []}, {"label_names": ["a", "a"]}, {"label_names": ["a"], "max_length": 0},
     {"label_names": ["a"], "text_column": ("a", "b", "c")}, {"label_names": ["a"], "metric": "mcc"}],
)  # fmt: skip
def test_invalid_arguments_raise(kwargs):
    with pytest.raises(ValueError, match="`(label_names|max_length|text_column|metric)` is"):
        TextClassification(**kwargs)


def test_load_model_sets_labels(tmp_path):
    model().save_pretrained(tmp_path)
    loaded = TextClassification(["x", "y", "z"]).load_model(str(tmp_path), ignore_mismatched_sizes=True)
    assert loaded.config.id2label == {0: "x", 1: "y", 2: "z"}
    assert loaded.classifier.out_features == 3


def test_padding_changes_no_logits(tokenizer):
    encoded = TASK.prepare(reviews(6), tokenizer)
    assert len({len(ids) for ids in encoded["input_ids"]}) > 1
    assert_padding_keeps_logits(model(), list(encoded), TASK.data_collator(tokenizer))


def test_metrics_use_label_with_highest_logit():
    logits = np.random.default_rng(0).normal(size=(40, 2))
    labels = np.random.default_rng(1).integers(2, size=40)
    best = logits.argmax(axis=1)
    for predictions in (logits, (logits, "hidden states")):
        metrics = TASK.build_compute_metrics()(EvalPrediction(predictions, labels))
        assert metrics["accuracy"] == pytest.approx((best == labels).mean())
        assert metrics["f1_macro"] == pytest.approx(f1_score(labels, best, average="macro"))


@pytest.mark.parametrize(
    ("metric", "reference"),
    [("f1", f1_score), ("matthews_correlation", matthews_corrcoef), ("f1_macro", None), ("accuracy", None)],
)
def test_metric_argument_selects_main_metric(metric, reference):
    logits = np.random.default_rng(0).normal(size=(40, 2))
    labels = (np.random.default_rng(1).random(40) < 0.7).astype(int)
    task = TextClassification(["other", "paraphrase"], metric=metric)
    metrics = task.build_compute_metrics()(EvalPrediction(logits, labels))
    assert task.main_metric == metric
    assert metrics.keys() == {"accuracy", "f1_macro", "f1_weighted", metric}
    if reference is not None:
        assert metrics[metric] == pytest.approx(reference(labels, logits.argmax(axis=1)))


def test_f1_requires_two_labels():
    with pytest.raises(ValueError, match="but there are 3. Use 'f1_macro'"):
        TextClassification(["entailment", "neutral", "contradiction"], metric="f1")


def test_trainer_learns_task(tokenizer, tmp_path):
    encoded = TASK.prepare(reviews(32), tokenizer)
    trainer = Trainer(
        model=model(),
        args=arguments(tmp_path, num_train_epochs=10),
        train_dataset=encoded,
        eval_dataset=encoded,
        data_collator=TASK.data_collator(tokenizer),
        compute_metrics=TASK.build_compute_metrics(tokenizer),
    )
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] == 1.0


def test_federated_trainer_learns_task(tokenizer, tmp_path):
    rows = reviews(32)
    clients = FederatedDataset.from_dict({"north": rows.select(range(16)), "south": rows.select(range(16, 32))})
    trainer = FederatedTrainer(
        model=model(),
        args=arguments(tmp_path),
        train_dataset=TASK.prepare(clients, tokenizer),
        eval_dataset=TASK.prepare(rows, tokenizer),
        data_collator=TASK.data_collator(tokenizer),
        compute_metrics=TASK.build_compute_metrics(tokenizer),
        federation=FederatedConfig(num_rounds=8),
    )
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] == 1.0


def test_encoding_takes_less_than_a_millisecond_per_example(tokenizer):
    batch = {"text": ["a bright warm film in paris " * 16] * 500, "label": ["good"] * 500}
    task = TextClassification(["bad", "good"], max_length=128)
    assert milliseconds_per_example(lambda: task.encode(batch, tokenizer), 500) < 1


def test_error_lists_a_bounded_number_of_labels(tokenizer):
    task = TextClassification(label_names=[f"intent {number}" for number in range(150)])
    with pytest.raises(ValueError, match=r"'intent 19', … \(150 names\), or 0 to 149\.") as error:
        task.encode({"text": ["a film"], "label": ["refund"]}, tokenizer)
    assert "intent 20" not in str(error.value)
