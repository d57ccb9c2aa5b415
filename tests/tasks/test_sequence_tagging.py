"""Tests of sequence tagging: tags at first sub-tokens, training with both trainers, and metrics over words."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, List
from measure import SHAPE, assert_padding_keeps_logits, milliseconds_per_example
from seqeval.metrics import f1_score
from tiny import arguments
from transformers import BertConfig, BertForTokenClassification, EvalPrediction, Trainer

from hf_federated import FederatedConfig, FederatedDataset, FederatedTrainer
from hf_federated.tasks import SequenceTagging


NAMES = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
TASK = SequenceTagging(tag_names=NAMES)


def sentences(num_rows: int) -> Dataset:
    """Sentences with locations and persons, whose names have two sub-tokens per word."""
    place, person = [("in", "O"), ("paris", "B-LOC"), ("rome", "I-LOC")], [("anna", "B-PER"), ("warm", "O")]
    rows = [[*person, *place[: 2 + i % 2]][i % 3 :] for i in range(num_rows)]
    return Dataset.from_dict(
        {"tokens": [[word for word, _ in row] for row in rows], "ner_tags": [[tag for _, tag in row] for row in rows]}
    )


def model() -> BertForTokenClassification:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BertForTokenClassification(BertConfig(**SHAPE, **TASK.model_kwargs))


def test_first_sub_token_has_tag_of_word(tokenizer):
    batch = {"tokens": [["in", "paris", "rome"], ["annas"]], "ner_tags": [["O", "B-LOC", "I-LOC"], [3]]}
    encoded = TASK.encode(batch, tokenizer)
    assert [tokenizer.convert_ids_to_tokens(ids) for ids in encoded["input_ids"]] == [
        ["[CLS]", "in", "par", "##is", "rom", "##e", "[SEP]"],
        ["[CLS]", "ann", "##a", "##s", "[SEP]"],
    ]
    assert encoded["labels"] == [[-100, 0, 1, -100, 2, -100, -100], [-100, 3, -100, -100, -100]]
    assert encoded["attention_mask"] == [[1] * 7, [1] * 5]


def test_repeated_words_keep_their_tags(tokenizer):
    encoded = TASK.encode({"tokens": [["a", "a", "paris", "paris"]], "ner_tags": [[0, 1, 2, 3]]}, tokenizer)
    assert encoded["labels"] == [[-100, 0, 1, 2, -100, 3, -100, -100]]


def test_empty_and_truncated_words_do_not_shift_tags(tokenizer):
    batch = {"tokens": [["in", " ", "paris", "", "in"]], "ner_tags": [[0, 4, 1, 3, 2]]}
    assert TASK.encode(batch, tokenizer)["labels"] == [[-100, 0, 1, -100, 2, -100]]
    assert SequenceTagging(NAMES, max_length=4).encode(batch, tokenizer)["labels"] == [[-100, 0, 1, -100]]


def test_raw_tag_of_minus_100_is_kept(tokenizer):
    assert TASK.encode({"tokens": [["in", "a"]], "ner_tags": [[-100, 0]]}, tokenizer)["labels"] == [
        [-100, -100, 0, -100]
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"tokens": ["in"], "ner_tags": ["B-ORG"]},
            "Row 1 has the tag 'B-ORG' in the column 'ner_tags'; allowed are 'O', 'B-LOC'.*or 0 to 4",
        ),
        ({"tokens": [], "ner_tags": []}, "Row 1 has no words in the column 'tokens'"),
        ({"tokens": [" ", ""], "ner_tags": ["O", "O"]}, "Row 1 has no words in the column"),
        ({"tokens": ["in", "a"], "ner_tags": ["O"]}, "Row 1 has 1 tags in the column 'ner_tags', but 2 words"),
        ({"tokens": ["in"], "ner_tags": None}, "Row 1 has no tags in the column 'ner_tags'"),
    ],
)
def test_error_names_invalid_row(tokenizer, row, message):
    with pytest.raises(ValueError, match=message):
        TASK.prepare(Dataset.from_list([{"tokens": ["a"], "ner_tags": ["O"]}, row]), tokenizer)


@pytest.mark.parametrize("tag", [5, -1, None])
def test_tag_ids_out_of_range_raise(tokenizer, tag):
    with pytest.raises(ValueError, match=f"Row 0 of the batch has the tag {tag}"):
        TASK.encode({"tokens": [["a"]], "ner_tags": [[tag]]}, tokenizer)


def test_examples_without_tags_are_encoded_for_prediction(tokenizer):
    assert "labels" not in TASK.encode({"tokens": [["a"]]}, tokenizer, with_labels=False)


def test_from_dataset_reads_tag_names():
    rows = sentences(4)
    assert SequenceTagging.from_dataset(rows).tag_names == ("O", "B-LOC", "B-PER", "I-LOC")
    cast = rows.cast_column("ner_tags", List(ClassLabel(names=NAMES)))
    assert SequenceTagging.from_dataset(cast).tag_names == tuple(NAMES)
    with pytest.raises(ValueError, match="tags have no names"):
        SequenceTagging.from_dataset(Dataset.from_dict({"tokens": [["a"]], "ner_tags": [[1]]}))


def test_padding_changes_no_logits(tokenizer):
    encoded = TASK.prepare(sentences(6), tokenizer)
    assert len({len(ids) for ids in encoded["input_ids"]}) > 1
    assert_padding_keeps_logits(model(), list(encoded), TASK.data_collator(tokenizer))


def test_metrics_equal_seqeval_over_words(tokenizer):
    rows = sentences(20)
    collated = TASK.data_collator(tokenizer)(list(TASK.prepare(rows, tokenizer)))
    labels = collated["labels"].numpy()
    generator = np.random.default_rng(0)
    guesses = [
        [NAMES[generator.integers(5)] if generator.random() < 0.4 else t for t in tags] for tags in rows["ner_tags"]
    ]
    # Positions that are not the start of a word have random tags, which must not affect the metrics.
    predicted = generator.integers(5, size=labels.shape)
    for row, guess in enumerate(guesses):
        predicted[row, np.flatnonzero(labels[row] != -100)] = [NAMES.index(tag) for tag in guess]
    logits = np.eye(5)[predicted]
    compute_metrics = TASK.build_compute_metrics(tokenizer)
    metrics = compute_metrics(EvalPrediction(predicted, labels))
    assert metrics["span_f1"] == pytest.approx(f1_score(list(rows["ner_tags"]), guesses))
    pairs = [
        pair for tags, guess in zip(rows["ner_tags"], guesses, strict=True) for pair in zip(tags, guess, strict=True)
    ]
    assert metrics["token_accuracy"] == pytest.approx(np.mean([tag == guess for tag, guess in pairs]))
    assert compute_metrics(EvalPrediction(logits, labels)) == metrics


def test_tags_without_spans_have_only_accuracy():
    task = SequenceTagging(["NOUN", "VERB"])
    metrics = task.build_compute_metrics()(EvalPrediction(np.array([[0, 1]]), np.array([[0, -100]])))
    assert metrics == {"token_accuracy": 1.0}


def test_bilou_tags_use_bilou_scheme():
    task = SequenceTagging(["O", "B-X", "L-X", "U-X"])
    labels = np.array([[1, 2, 3]])
    assert task.build_compute_metrics()(EvalPrediction(labels, labels))["span_f1"] == 1.0


@pytest.mark.parametrize("federated", [False, True])
def test_trainers_learn_task(tokenizer, tmp_path, federated):
    rows = sentences(36)
    shared = {
        "model": model(),
        "eval_dataset": TASK.prepare(rows, tokenizer),
        "data_collator": TASK.data_collator(tokenizer),
        "compute_metrics": TASK.build_compute_metrics(tokenizer),
        "preprocess_logits_for_metrics": TASK.preprocess_logits_for_metrics,
    }
    if federated:
        clients = FederatedDataset.from_dict({"north": rows.select(range(18)), "south": rows.select(range(18, 36))})
        trainer = FederatedTrainer(
            args=arguments(tmp_path),
            train_dataset=TASK.prepare(clients, tokenizer),
            federation=FederatedConfig(num_rounds=8),
            **shared,
        )
    else:
        trainer = Trainer(
            args=arguments(tmp_path, num_train_epochs=5), train_dataset=TASK.prepare(rows, tokenizer), **shared
        )
    trainer.train()
    assert trainer.evaluate()["eval_span_f1"] > 0.9


def test_encoding_takes_less_than_a_millisecond_per_example(tokenizer):
    words = ["anna", "in", "paris", "warm", "film"] * 12
    batch = {"tokens": [words] * 500, "ner_tags": [["B-PER", "O", "B-LOC", "O", "O"] * 12] * 500}
    assert milliseconds_per_example(lambda: TASK.encode(batch, tokenizer), 500) < 1
