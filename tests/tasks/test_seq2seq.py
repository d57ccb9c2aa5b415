"""Tests of seq2seq: encoding of sources and targets, training with generation, and ROUGE of generated texts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset
from measure import milliseconds_per_example
from rouge_score.rouge_scorer import RougeScorer
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    EvalPrediction,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from hf_federated import FederatedConfig, FederatedDataset, federate
from hf_federated.tasks import Seq2Seq


TASK = Seq2Seq(max_source_length=16, max_target_length=6)


def rows(num_rows: int) -> Dataset:
    """Texts with their city as the headline."""
    cities = ["paris", "rome"]
    return Dataset.from_dict(
        {
            "source": [f"{'warm ' * (i % 3)}film in {cities[i % 2]}" for i in range(num_rows)],
            "target": [cities[i % 2] for i in range(num_rows)],
        }
    )


def model() -> BartForConditionalGeneration:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BartForConditionalGeneration(
            BartConfig(
                vocab_size=20,
                d_model=16,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=16,
                decoder_ffn_dim=16,
                max_position_embeddings=32,
                dropout=0.0,
                init_std=0.2,
                pad_token_id=0,
                bos_token_id=2,
                eos_token_id=3,
                decoder_start_token_id=3,
                forced_eos_token_id=3,
            )
        )


def arguments(folder, **kwargs) -> Seq2SeqTrainingArguments:
    return Seq2SeqTrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        predict_with_generate=True,
        generation_max_length=6,
        generation_num_beams=1,
        save_strategy="no",
        logging_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **kwargs,
    )


def test_sources_and_targets_are_encoded(tokenizer):
    task = Seq2Seq(prefix="cold: ", max_source_length=5, max_target_length=4)
    encoded = task.encode({"source": ["in rome a film"], "target": ["rome"]}, tokenizer)
    assert encoded["input_ids"] == [[2, 11, 1, 12, 3]]
    assert encoded["attention_mask"] == [[1] * 5]
    assert encoded["labels"] == [tokenizer("rome")["input_ids"]]
    assert task.encode({"source": ["a"], "target": ["film " * 9]}, tokenizer)["labels"] == [[2, 8, 8, 3]]


def test_labels_are_padded_with_minus_100(tokenizer):
    encoded = TASK.encode({"source": ["film", "film"], "target": ["a", "a film in"]}, tokenizer)
    features = [{name: encoded[name][i] for name in encoded} for i in range(2)]
    collated = TASK.data_collator(tokenizer)(features)
    assert collated["labels"].tolist() == [[2, 5, 3, -100, -100], [2, 5, 8, 12, 3]]


def test_training_uses_first_of_several_targets(tokenizer):
    encoded = TASK.encode({"source": ["film"], "target": [["rome", "paris"]]}, tokenizer)
    assert encoded["labels"] == [tokenizer("rome")["input_ids"]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"source": ""}, "Row 1 has an empty text in the column 'source'"),
        ({"target": None}, "Row 1 has no target or an empty one in the column 'target'"),
        ({"target": " "}, "Row 1 has no target or an empty one"),
    ],
)
def test_error_names_invalid_row(tokenizer, changed, message):
    data = Dataset.from_list([{"source": "a", "target": "a"}, {"source": "a", "target": "a", **changed}])
    with pytest.raises(ValueError, match=message):
        TASK.prepare(data, tokenizer)


def test_metrics_decode_generated_ids(tokenizer):
    labels = np.array([[2, 8, 12, 15, 16, 3], [2, 5, 3, -100, -100, -100]])
    generated = np.array([[3, 2, 8, 12, 13, 14, 3], [3, 2, 5, 3, 0, -100, -100]])
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    texts = [[tokenizer.decode(ids[ids >= 4]) for ids in part] for part in (labels, generated)]
    expected = [scorer.score(target, text) for target, text in zip(*texts, strict=True)]
    metrics = TASK.build_compute_metrics(tokenizer)(EvalPrediction(generated, labels))
    assert metrics == pytest.approx(
        {name: np.mean([score[name].fmeasure for score in expected]) for name in ("rouge1", "rouge2", "rougeL")}
    )
    assert 0 < metrics["rouge2"] < metrics["rouge1"] < 1


def test_metrics_with_raw_rows_use_all_targets(tokenizer):
    raw = Dataset.from_dict({"source": ["a film"], "target": [["plot", "a warm film"]]})
    labels, generated = np.array([[2, 9, 3]]), np.array([[2, 5, 10, 8, 3]])
    assert TASK.build_compute_metrics(tokenizer)(EvalPrediction(generated, labels))["rougeL"] == 0.0
    assert TASK.build_compute_metrics(tokenizer, rows=raw)(EvalPrediction(generated, labels))["rougeL"] == 1.0
    with pytest.raises(ValueError, match="2 predictions, but 1 `rows`"):
        TASK.build_compute_metrics(tokenizer, rows=raw)(EvalPrediction(generated.repeat(2, axis=0), labels))


def test_logits_as_predictions_raise(tokenizer):
    with pytest.raises(ValueError, match="not token ids.*predict_with_generate=True"):
        TASK.build_compute_metrics(tokenizer)(EvalPrediction((np.zeros((1, 3, 20)), None), np.zeros((1, 3))))


def test_padding_changes_no_logits(tokenizer):
    encoded = TASK.prepare(rows(2), tokenizer)
    assert len(encoded[0]["input_ids"]) < len(encoded[1]["input_ids"])
    collate, bart = TASK.data_collator(tokenizer), model().eval()
    with torch.no_grad():
        together, alone = bart(**collate(list(encoded))).logits, bart(**collate([encoded[0]])).logits
    torch.testing.assert_close(together[0, : alone.shape[1]], alone[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("federated", [False, True])
def test_trainers_learn_task(tokenizer, tmp_path, federated):
    raw = rows(24)
    encoded = TASK.prepare(raw, tokenizer)
    shared = {
        "model": model(),
        "eval_dataset": encoded,
        "data_collator": TASK.data_collator(tokenizer),
        "compute_metrics": TASK.build_compute_metrics(tokenizer, rows=raw),
        "processing_class": tokenizer,
    }
    if federated:
        clients = FederatedDataset.from_dict({"north": raw.select(range(12)), "south": raw.select(range(12, 24))})
        trainer = federate(Seq2SeqTrainer)(
            args=arguments(tmp_path),
            train_dataset=TASK.prepare(clients, tokenizer),
            federation=FederatedConfig(num_rounds=10),
            **shared,
        )
    else:
        trainer = Seq2SeqTrainer(args=arguments(tmp_path, num_train_epochs=8), train_dataset=encoded, **shared)
    trainer.train()
    assert trainer.evaluate()["eval_rougeL"] > 0.9


def test_encoding_takes_less_than_a_millisecond_per_example(tokenizer):
    batch = {"source": ["a bright warm film in paris " * 16] * 400, "target": ["a film in rome"] * 400}
    task = Seq2Seq(max_source_length=128)
    assert milliseconds_per_example(lambda: task.encode(batch, tokenizer), 400) < 1
