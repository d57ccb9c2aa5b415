"""Tests of SuperGLUE as classification and as seq2seq: encoding, training and evaluation."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from measure import SHAPE, milliseconds_per_example
from superglue_raw import FILES, benchmark
from tokenizers import Tokenizer, normalizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_federated import FederatedConfig, FederatedDataset, federate
from hf_federated.tasks import SuperGlueClassification, SuperGlueSeq2Seq, superglue_rows
from hf_federated.tasks.superglue import LABEL_NAMES, LABELS


ROWS = benchmark()


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    """A tokenizer with all words of the rows, in lower case, with the template `[CLS] text [SEP]`."""
    texts = " ".join([*ROWS["source"], *LABEL_NAMES]).lower()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = [*special, *dict.fromkeys(re.findall(r"\w+|[^\w\s]+", texts))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[SEP]", **names)


def arguments(folder: Any, cls: type[TrainingArguments] = TrainingArguments, **kwargs: Any) -> TrainingArguments:
    values = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_strategy": "no", "report_to": []}
    return cls(output_dir=str(folder), use_cpu=True, disable_tqdm=True, **{**values, **kwargs})


def outputs(predictions: Any, label_ids: Any) -> Any:
    return SimpleNamespace(predictions=predictions, label_ids=np.array(label_ids))


def logits_of(names: list[str], height: float = 5.0) -> np.ndarray:
    return height * np.eye(len(LABEL_NAMES))[[LABEL_NAMES.index(name) for name in names]]


# ---- Classification


def test_label_ids_are_positions_in_label_names_of_all_tasks(words):
    task = SuperGlueClassification()
    encoded = task.prepare(ROWS, words)
    assert [LABEL_NAMES[number] for number in encoded["labels"]] == ROWS["target"][:]
    assert task.model_kwargs["id2label"] == dict(enumerate(LABEL_NAMES))
    assert set(encoded.column_names) <= {*words.model_input_names, "labels"}
    assert words.decode(encoded[0]["input_ids"], skip_special_tokens=True).startswith("boolq question : is lunds")


def test_correct_logits_score_one_and_record_uses_logit_difference(words):
    task = SuperGlueClassification()
    labels = task.prepare(ROWS, words)["labels"]
    compute = task.build_compute_metrics(words, rows=ROWS)
    logits = logits_of(ROWS["target"])
    assert set(compute(outputs(logits, labels)).values()) == {1.0}
    # All candidates have the prediction Wrong, but the correct ones have the largest logit difference.
    correct, wrong = LABEL_NAMES.index("Correct"), LABEL_NAMES.index("Wrong")
    for row in np.flatnonzero(np.array(ROWS["target"]) == "Correct"):
        logits[row, [correct, wrong]] = 1.0, 4.0
    metrics = compute(outputs((logits, "hidden states"), labels))
    assert metrics["record_exact_match"] == 1.0 and metrics["accuracy"] < 1.0


def test_label_of_another_task_is_wrong(words):
    task = SuperGlueClassification()
    labels = task.prepare(ROWS, words)["labels"]
    metrics = task.build_compute_metrics(words, rows=ROWS)(outputs(logits_of(["Yes"] * len(ROWS)), labels))
    assert metrics["boolq_accuracy"] == 0.5
    assert [metrics[f"{name}_accuracy"] for name in ("cb", "copa", "rte", "wic", "wsc")] == [0.0] * 5
    assert metrics["multirc_f1a"] == metrics["multirc_exact_match"] == 0.0


@pytest.mark.parametrize("federated", [False, True])
def test_trainers_learn_all_tasks_with_one_head(words, tmp_path, federated):
    task = SuperGlueClassification(max_length=64)
    set_seed(0)
    config = BertConfig(**{**SHAPE, "vocab_size": len(words), "hidden_size": 32}, **task.model_kwargs)
    shared = {
        "model": BertForSequenceClassification(config),
        "eval_dataset": task.prepare(ROWS, words),
        "data_collator": task.data_collator(words),
        "compute_metrics": task.build_compute_metrics(words, rows=ROWS),
    }
    if federated:
        clients = FederatedDataset.from_column(ROWS.add_column("place", [i % 3 for i in range(len(ROWS))]), "place")
        trainer = federate(Trainer)(
            args=arguments(tmp_path),
            train_dataset=task.prepare(clients, words),
            federation=FederatedConfig(num_rounds=15, local_epochs=2, max_rows_per_round=8),
            **shared,
        )
    else:
        args = arguments(tmp_path, num_train_epochs=20)
        trainer = Trainer(args=args, train_dataset=shared["eval_dataset"], **shared)
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_superglue_score"] > 0.9
    assert {f"eval_{name}_score" for name in LABELS} < set(metrics)


# ---- Seq2seq


def test_targets_are_label_names(words):
    encoded = SuperGlueSeq2Seq().prepare(ROWS, words)
    texts = words.batch_decode(encoded["labels"][:], skip_special_tokens=True)
    assert texts == [name.lower() for name in ROWS["target"]]


def test_generated_text_is_compared_with_decoded_label_names(words):
    task = SuperGlueSeq2Seq()
    encoded = task.prepare(ROWS, words)
    length = max(map(len, encoded["labels"]))
    labels = np.array([ids + [-100] * (length - len(ids)) for ids in encoded["labels"]])
    compute = task.build_compute_metrics(words, rows=ROWS)
    # Generated IDs begin with a start token and are padded with −100 or the pad token.
    generated = np.pad(labels, ((0, 0), (1, 2)), constant_values=words.pad_token_id)
    assert set(compute(outputs(generated, labels)).values()) == {1.0}
    nonsense = np.full((len(ROWS), 3), words.convert_tokens_to_ids("bakery"))
    assert set(compute(outputs(nonsense, labels)).values()) == {0.0}
    # All candidates have the prediction Correct. The answer is the first candidate, which is Bo Ek for both queries.
    correct = words("Correct")["input_ids"]
    assert compute(outputs(np.tile(correct, (len(ROWS), 1)), labels))["record_exact_match"] == 0.5


def test_seq2seq_trainer_learns_task(words, tmp_path):
    task = SuperGlueSeq2Seq(max_source_length=64)
    rows = ROWS.filter(lambda row: row["task"] in ("cb", "wic", "copa"))
    set_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    ends = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": words.eos_token_id}
    model = T5ForConditionalGeneration(T5Config(vocab_size=len(words), **sizes, **ends))
    encoded = task.prepare(rows, words)
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments(tmp_path, Seq2SeqTrainingArguments, predict_with_generate=True, num_train_epochs=30),
        train_dataset=encoded,
        eval_dataset=encoded,
        data_collator=task.data_collator(words),
        compute_metrics=task.build_compute_metrics(words, rows=rows),
        processing_class=words,
    )
    trainer.train()
    assert trainer.evaluate()["eval_superglue_score"] > 0.9


def test_tokenizer_with_equal_label_encodings_raises(tokenizer, words):
    task = SuperGlueSeq2Seq()
    labels = np.zeros((len(ROWS), 1), dtype=np.int64)
    with pytest.raises(ValueError, match="The tokenizer encodes both 'No' and 'Yes' as ''. Use a tokenizer with"):
        task.build_compute_metrics(tokenizer, rows=ROWS)(outputs(labels, labels))
    # The maximum length allows only [CLS] and [SEP].
    with pytest.raises(ValueError, match="both .*max_target_length`, which is 2"):
        SuperGlueSeq2Seq(max_target_length=2).build_compute_metrics(words, rows=ROWS)(outputs(labels, labels))


def test_logits_as_predictions_raise(words):
    task = SuperGlueSeq2Seq()
    labels = words(ROWS["target"][:], padding=True, return_tensors="np")["input_ids"]
    with pytest.raises(ValueError, match="not token ids.*predict_with_generate=True"):
        task.build_compute_metrics(words, rows=ROWS)(outputs(np.zeros((len(ROWS), 4, 7)), labels))


# ---- Both formulations


TASKS = [SuperGlueClassification(), SuperGlueSeq2Seq()]


@pytest.mark.parametrize("task", TASKS)
def test_metrics_require_rows_in_evaluation_order(words, task):
    with pytest.raises(ValueError, match="Pass the evaluation dataset before encoding"):
        task.build_compute_metrics(words)
    compute = task.build_compute_metrics(words, rows=ROWS.select(range(len(ROWS) - 1, -1, -1)))
    targets = words(ROWS["target"][:], padding=True, return_tensors="np")["input_ids"]
    if isinstance(task, SuperGlueClassification):
        targets = np.array(task.prepare(ROWS, words)["labels"])
    with pytest.raises(ValueError, match="Pass the evaluated rows, in evaluation order"):
        compute(outputs(targets, targets))


@pytest.mark.parametrize("task", TASKS)
def test_unknown_task_or_label_raises(words, task):
    batch = {name: ROWS[name][:2] for name in ROWS.column_names}
    with pytest.raises(ValueError, match=r"Row 8 has the task 'qnli'; allowed are 'boolq', .*'wsc'"):
        task.encode({**batch, "task": ["boolq", "qnli"]}, words, [7, 8])
    with pytest.raises(ValueError, match=r"Row 7 has the label 'Match'; allowed for 'boolq' are 'No', 'Yes'"):
        task.encode({**batch, "target": ["Match", "No"]}, words, [7, 8])
    with pytest.raises(ValueError, match="Row 7 has the label None; allowed for 'boolq'"):
        task.encode({**batch, "target": [None, "No"]}, words, [7, 8])
    with pytest.raises(ValueError, match="There is no column 'task'"):
        task.encode({"source": ["a"], "target": ["Yes"]}, words)


@pytest.mark.parametrize("task", TASKS)
def test_rows_without_labels_are_encoded_for_prediction(words, task):
    encoded = task.prepare(ROWS.remove_columns("target"), words, with_labels=False)
    assert len(encoded) == len(ROWS) and "labels" not in encoded.column_names


@pytest.mark.parametrize("task", TASKS)
def test_encoding_takes_less_than_a_millisecond_per_example(words, task):
    source = superglue_rows("boolq", Dataset.from_list(FILES["boolq"]))[0]["source"] * 8
    batch = {"task": ["boolq"] * 400, "source": [source] * 400, "target": ["Yes"] * 400}
    assert milliseconds_per_example(lambda: task.encode(batch, words), 400) < 1
