"""Tests of language modeling: examples or blocks, causal or masked, and perplexity over tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from measure import SHAPE, assert_padding_keeps_logits, milliseconds_per_example
from tiny import arguments
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    EvalPrediction,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
)

from hf_federated import FederatedConfig, FederatedTrainer
from hf_federated.tasks import LanguageModeling


CAUSAL = LanguageModeling(max_length=16)
MASKED = LanguageModeling("masked", max_length=16, mlm_probability=0.4)


def texts(num_rows: int) -> Dataset:
    return Dataset.from_dict(
        {"text": [f"{'warm ' * (i % 3)}film in {['paris', 'rome'][i % 2]}" for i in range(num_rows)]}
    )


def llama() -> LlamaForCausalLM:
    shape = {name: value for name, value in SHAPE.items() if name != "hidden_dropout_prob"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**shape, pad_token_id=0, bos_token_id=2, eos_token_id=3))


def bert() -> BertForMaskedLM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BertForMaskedLM(BertConfig(**SHAPE))


def test_texts_stay_separate_examples_by_default(tokenizer):
    encoded = CAUSAL.encode({"text": ["a film", "in rome " * 9]}, tokenizer)
    assert encoded["input_ids"][0] == encoded["labels"][0] == [2, 5, 8, 3]
    assert [len(mask) for mask in encoded["attention_mask"]] == [4, 16]
    assert "labels" not in MASKED.encode({"text": ["a film"]}, tokenizer)


def test_blocks_contain_all_tokens(tokenizer):
    data = texts(7)
    ids = [token for row in tokenizer(data["text"][:])["input_ids"] for token in row]
    encoded = LanguageModeling(block_size=8).prepare(data, tokenizer)
    assert [token for block in encoded["input_ids"] for token in block] == ids
    assert {len(block) for block in encoded["input_ids"][:-1]} == {8}
    assert encoded["labels"][:] == encoded["input_ids"][:]
    assert [len(mask) for mask in encoded["attention_mask"]] == [len(block) for block in encoded["input_ids"]]


def test_blocks_have_one_end_token_between_texts(tokenizer):
    tokenizer.eos_token = "[SEP]"  # the template already ends with this token
    try:
        encoded = LanguageModeling(block_size=4).encode({"text": ["a film", "a"]}, tokenizer)
    finally:
        tokenizer.eos_token = None
    assert encoded["input_ids"] == [[2, 5, 8, 3], [2, 5, 3]]


def test_end_token_used_for_padding_keeps_its_label(tokenizer):
    data = [{"input_ids": [5, 0], "attention_mask": [1, 1], "labels": [5, 0]}]
    data.append({"input_ids": [5, 6, 0], "attention_mask": [1, 1, 1], "labels": [5, 6, 0]})
    assert CAUSAL.data_collator(tokenizer)(data)["labels"].tolist() == [[5, 0, -100], [5, 6, 0]]


def test_only_masked_tokens_have_labels(tokenizer):
    torch.manual_seed(0)
    encoded = list(MASKED.prepare(texts(40), tokenizer))
    collated = MASKED.data_collator(tokenizer)(encoded)
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in encoded], batch_first=True)
    hidden = collated["labels"] != -100
    assert (collated["labels"][hidden] == ids[hidden]).all()
    assert (collated["input_ids"][~hidden] == ids[~hidden]).all()
    assert not hidden[ids < 4].any()
    assert 0.25 < hidden[ids >= 4].float().mean() < 0.55


def test_perplexity_equals_mean_loss_over_all_tokens():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 9, 20, generator=generator)
    labels = torch.randint(20, (4, 9), generator=generator)
    for row, length in enumerate([9, 2, 5, 1]):
        labels[row, length:] = -100
    for task, scores, right in ((CAUSAL, logits[:, :-1], labels[:, 1:]), (MASKED, logits, labels)):
        expected = math.exp(torch.nn.functional.cross_entropy(scores.reshape(-1, 20), right.reshape(-1)).item())
        # Batches of different sizes, as in an evaluation.
        parts = [slice(0, 1), slice(1, 4)]
        sums = torch.cat([task.preprocess_logits_for_metrics((logits[part],), labels[part]) for part in parts])
        metrics = task.build_compute_metrics()(EvalPrediction(sums.numpy(), labels.numpy()))
        assert metrics == {"perplexity": pytest.approx(expected, rel=1e-4)}


def test_logits_as_predictions_raise():
    with pytest.raises(ValueError, match="preprocess_logits_for_metrics=task"):
        CAUSAL.build_compute_metrics()(EvalPrediction(np.zeros((2, 3, 20)), np.zeros((2, 3))))


def test_error_names_row_with_empty_text(tokenizer):
    with pytest.raises(ValueError, match="Row 1 has an empty text in the column 'text'"):
        CAUSAL.prepare(Dataset.from_dict({"text": ["a", " "]}), tokenizer)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"objective": "prefix"}, "`objective` is 'prefix'; allowed are 'causal', 'masked'"),
        ({"block_size": 1}, "`block_size` is 1; it must be at least 2"),
        ({"block_size": 8, "max_length": 8}, "Set only one of them"),
        ({"mlm_probability": 1.0}, "`mlm_probability` is 1.0"),
    ],
)
def test_invalid_arguments_raise(kwargs, message):
    with pytest.raises(ValueError, match=message):
        LanguageModeling(**kwargs)


def test_objective_selects_model_class():
    assert CAUSAL.model_class is AutoModelForCausalLM
    assert MASKED.model_class is AutoModelForMaskedLM


def test_padding_changes_no_logits(tokenizer):
    encoded = list(CAUSAL.prepare(texts(6), tokenizer))
    assert_padding_keeps_logits(llama(), encoded, CAUSAL.data_collator(tokenizer))


@pytest.mark.parametrize("federated", [False, True])
@pytest.mark.parametrize(("task", "build", "below"), [(CAUSAL, llama, 4), (MASKED, bert, 8)])
def test_trainers_learn_task(tokenizer, tmp_path, task, build, below, federated):
    encoded = task.prepare(texts(24), tokenizer)
    shared = {
        "model": build(),
        "eval_dataset": encoded,
        "data_collator": task.data_collator(tokenizer),
        "compute_metrics": task.build_compute_metrics(tokenizer),
        "preprocess_logits_for_metrics": task.preprocess_logits_for_metrics,
    }
    if federated:
        clients = {"north": encoded.select(range(12)), "south": encoded.select(range(12, 24))}
        trainer = FederatedTrainer(
            args=arguments(tmp_path), train_dataset=clients, federation=FederatedConfig(num_rounds=5), **shared
        )
    else:
        trainer = Trainer(args=arguments(tmp_path, num_train_epochs=5), train_dataset=encoded, **shared)
    assert trainer.evaluate()["eval_perplexity"] > 15
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_perplexity"] < below


def test_encoding_takes_less_than_a_millisecond_per_example(tokenizer):
    batch = {"text": ["a bright warm film in paris " * 16] * 400}
    for task in (LanguageModeling(max_length=128), LanguageModeling(block_size=128)):
        assert milliseconds_per_example(lambda task=task: task.encode(batch, tokenizer), 400) < 1


# ---- Evaluation


def test_evaluation_masks_same_tokens_each_time_and_at_least_one_per_example(tokenizer):
    task = LanguageModeling("masked", mlm_probability=0.05)
    rows = Dataset.from_dict({"text": ["snow in rome"] * 50 + ["rome"]})
    features = task.prepare(rows, tokenizer)
    fixed = task.for_evaluation(features, tokenizer)
    collate = task.data_collator(tokenizer)
    first, again = (collate([dict(row) for row in fixed]) for _ in range(2))
    assert torch.equal(first["input_ids"], again["input_ids"]) and torch.equal(first["labels"], again["labels"])
    assert ((first["labels"] != -100).sum(dim=1) >= 1).all()
    hidden = first["labels"] != -100
    originals = collate([{**row, "labels": [0] * len(row["input_ids"])} for row in features])["input_ids"]
    assert torch.equal(first["input_ids"][~hidden], originals[~hidden])
    assert torch.equal(first["labels"][hidden], originals[hidden])
    assert task.for_evaluation(features, tokenizer, seed=1)["labels"][:] != fixed["labels"][:]
    causal = LanguageModeling()
    assert causal.for_evaluation(features, tokenizer) is features


def test_encoder_has_causal_attention_only_for_causal_objective(tmp_path):
    BertModel(BertConfig(**SHAPE)).save_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    changed = torch.tensor([[5, 6, 7, 9]])
    for objective, attends_to_next_tokens in (("causal", False), ("masked", True)):
        model = LanguageModeling(objective).load_model(str(tmp_path)).eval()
        with torch.no_grad():
            same = torch.allclose(model(ids).logits[:, :3], model(changed).logits[:, :3], atol=1e-6)
        assert same != attends_to_next_tokens
