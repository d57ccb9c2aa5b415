"""Tests of summarization with causal models: training examples, prompts for generation, and ROUGE."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from causal import bytes_tokenizer, llama, pieces_tokenizer
from datasets import Dataset
from measure import milliseconds_per_example
from rouge_score.rouge_scorer import RougeScorer
from transformers import (
    EvalPrediction,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from hf_federated import FederatedConfig, FederatedDataset, federate
from hf_federated.tasks import Summarization


TASK = Summarization(max_source_length=64, max_target_length=12)


def rows(num_rows: int) -> Dataset:
    """Texts of different lengths, each with its city as the summary."""
    cities = ["paris", "rome"]
    return Dataset.from_dict(
        {
            "source": [f"{'a warm ' * (i % 5)}film in {cities[i % 2]}" for i in range(num_rows)],
            "target": [[cities[i % 2], "a city"] for i in range(num_rows)],
        }
    )


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return bytes_tokenizer([*rows(8)["source"], "a city TL;DR: rome", "TL;DR: paris"], vocab_size=320)


def gpt2(vocab_size: int) -> GPT2LMHeadModel:
    """A model with learned positions, so that padding on the wrong side changes the generated text."""
    shape = {"n_positions": 96, "n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=vocab_size, eos_token_id=0, bos_token_id=0, pad_token_id=0, **shape, **dropout)
        )


def arguments(folder, **kwargs) -> Seq2SeqTrainingArguments:
    values = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 5, "learning_rate": 1e-2, **kwargs}
    return Seq2SeqTrainingArguments(
        output_dir=str(folder),
        predict_with_generate=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **values,
    )


@pytest.mark.parametrize("make", [bytes_tokenizer, pieces_tokenizer])
def test_labels_are_target_tokens_of_whole_text(make):
    data = rows(6)
    tokenizer = make([*data["source"], "\nTL;DR: paris rome"])
    for row, encoded in zip(data, TASK.prepare(data, tokenizer), strict=True):
        prompt = f"{row['source']}\nTL;DR:"
        whole = [*tokenizer(f"{prompt} {row['target'][0]}")["input_ids"], tokenizer.eos_token_id]
        length = len(tokenizer(prompt)["input_ids"])
        assert encoded["input_ids"] == whole and encoded["prompt_length"] == length
        assert encoded["labels"] == [-100] * length + whole[length:]


def test_long_source_is_truncated_before_suffix(tokenizer):
    source, target = "a warm " * 40 + "film", "rome " * 40
    for max_length in (64, 20):
        task = Summarization(prefix="in: ", max_source_length=max_length, max_target_length=6)
        encoded = task.encode({"source": [source], "target": [target]}, tokenizer)
        prompt, answer = encoded["input_ids"][0][:max_length], encoded["input_ids"][0][max_length:]
        text = tokenizer.decode(prompt)
        assert encoded["prompt_length"] == [max_length] and text.startswith("in: a warm") and text.endswith("\nTL;DR:")
        assert len(answer) == 6 and answer[-1] == tokenizer.eos_token_id
    with pytest.raises(ValueError, match="Row 3 has .* tokens that cannot be truncated, but only 2 tokens fit"):
        Summarization(max_source_length=2).encode({"source": ["a"], "target": ["a"]}, tokenizer, [3])


def test_evaluation_examples_are_prompts(tokenizer):
    data = rows(6)
    prepared = TASK.prepare(data, tokenizer)
    for row, encoded in zip(data, TASK.for_evaluation(prepared, tokenizer), strict=True):
        assert tokenizer.decode(encoded["input_ids"]) == f"{row['source']}\nTL;DR:"
        assert encoded["labels"] == [-100] * (len(encoded["input_ids"]) - 1) + encoded["input_ids"][-1:]
    bare = TASK.prepare(data.remove_columns("target"), tokenizer, with_labels=False)
    assert "labels" not in bare.column_names
    assert TASK.for_evaluation(bare, tokenizer).to_list() == TASK.for_evaluation(prepared, tokenizer).to_list()


def test_prompts_are_padded_left_and_training_examples_right(tokenizer):
    prepared = TASK.prepare(rows(2), tokenizer)
    collate = TASK.data_collator(tokenizer)
    training, prompts = collate(list(prepared)), collate(list(TASK.for_evaluation(prepared, tokenizer)))
    assert training["attention_mask"][:, 0].tolist() == prompts["attention_mask"][:, -1].tolist() == [1, 1]
    assert training["attention_mask"][0, -1] == prompts["attention_mask"][0, 0] == 0
    assert training["labels"][0, -1] == prompts["labels"][0, 0] == -100
    without_labels = collate(list(TASK.prepare(rows(2), tokenizer, with_labels=False)))
    assert torch.equal(without_labels["input_ids"], prompts["input_ids"]) and "labels" not in without_labels


@pytest.mark.parametrize("build", [llama, gpt2])
def test_trainer_metrics_equal_generation_for_single_examples(tokenizer, tmp_path, build):
    data = rows(12)
    model = build(len(tokenizer))
    encoded = TASK.prepare(data, tokenizer)
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments(tmp_path, max_steps=6),
        train_dataset=encoded,
        eval_dataset=TASK.for_evaluation(encoded, tokenizer),
        data_collator=TASK.data_collator(tokenizer),
        compute_metrics=TASK.build_compute_metrics(tokenizer, rows=data),
        processing_class=tokenizer,
    )
    trainer.train()
    # 3 new tokens stay below the Trainer's length of 20, to which it also pads labels. 30 new tokens exceed it.
    for num_new in (3, 30):
        metrics = trainer.evaluate(max_new_tokens=num_new)
        scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
        scores = []
        for row in data:
            ids = tokenizer(f"{row['source']}\nTL;DR:", return_tensors="pt")
            written = model.generate(
                ids["input_ids"], attention_mask=ids["attention_mask"], max_new_tokens=num_new, do_sample=False
            )
            text = tokenizer.decode(written[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
            scores.append(scorer.score_multi(row["target"], text))
        for name in ("rouge1", "rouge2", "rougeL"):
            expected = np.mean([score[name].fmeasure for score in scores])
            assert metrics[f"eval_{name}"] == pytest.approx(expected)
        assert np.isfinite(metrics["eval_loss"])


@pytest.mark.parametrize("federated", [False, True])
def test_trainers_learn_task(tokenizer, tmp_path, federated):
    data = rows(20)
    encoded = TASK.prepare(data, tokenizer)
    model = llama(len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    shared = {
        "model": TASK.load_model(str(tmp_path / "model")),
        "eval_dataset": TASK.for_evaluation(encoded, tokenizer),
        "data_collator": TASK.data_collator(tokenizer),
        "compute_metrics": TASK.build_compute_metrics(tokenizer, rows=data),
        "processing_class": tokenizer,
    }
    assert shared["model"].generation_config.max_new_tokens == 12
    if federated:
        clients = FederatedDataset.from_dict({"north": data.select(range(10)), "south": data.select(range(10, 20))})
        trainer = federate(Seq2SeqTrainer)(
            args=arguments(tmp_path),
            train_dataset=TASK.prepare(clients, tokenizer),
            federation=FederatedConfig(num_rounds=8, local_epochs=2),
            **shared,
        )
    else:
        trainer = Seq2SeqTrainer(args=arguments(tmp_path, num_train_epochs=12), train_dataset=encoded, **shared)
    trainer.train()
    assert trainer.evaluate()["eval_rougeL"] > 0.9


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"source": ""}, "Row 1 has an empty text in the column 'source'"),
        ({"target": None}, "Row 1 has no target or an empty one in the column 'target'"),
    ],
)
def test_error_names_invalid_row(tokenizer, changed, message):
    data = Dataset.from_list([{"source": "a", "target": "a"}, {"source": "a", "target": "a", **changed}])
    with pytest.raises(ValueError, match=message):
        TASK.prepare(data, tokenizer)


def test_tokenizer_without_end_token_raises(tokenizer):
    without = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="has no token to end an answer. Set its eos_token"):
        TASK.prepare(rows(2), without)


def test_predictions_that_do_not_match_prompts_raise(tokenizer):
    with pytest.raises(ValueError, match="`rows` is missing, but prompts do not contain the targets"):
        TASK.build_compute_metrics(tokenizer)
    compute = TASK.build_compute_metrics(tokenizer, rows=rows(2))
    labels = np.array([[-100, -100, 9], [-100, 9, 0]])
    generated = np.array([[0, 8, 9, 5, 0], [8, 9, 5, 0, -100]])
    assert set(compute(EvalPrediction(generated, labels)).values()) == {0.0}
    with pytest.raises(ValueError, match="do not begin with the prompts.*`predict_with_generate=True`"):
        compute(EvalPrediction(generated + 1, labels))
    with pytest.raises(ValueError, match="do not begin with the prompts"):
        compute(EvalPrediction(np.zeros((2, 5, 20)), labels))
    with pytest.raises(ValueError, match="There are 1 predictions, but 2 `rows`"):
        compute(EvalPrediction(generated[:1], labels[:1]))


@pytest.mark.parametrize(("use_stemmer", "expected"), [(True, 1.0), (False, 0.0)])
def test_use_stemmer_compares_word_stems(use_stemmer, expected, tokenizer):
    task = dataclasses.replace(TASK, use_stemmer=use_stemmer)
    data = Dataset.from_dict({"source": ["a"], "target": [["cities"]]})
    compute = task.build_compute_metrics(tokenizer, rows=data)
    prompt, written = tokenizer("a\nTL;DR:")["input_ids"], tokenizer(" city")["input_ids"]
    labels = [-100] * (len(prompt) - 1) + prompt[-1:]
    prediction = EvalPrediction(np.array([[*prompt, *written]]), np.array([labels]))
    assert compute(prediction)["rouge1"] == expected
    assert TASK.use_stemmer


def test_encoding_takes_less_than_a_millisecond_per_example(tokenizer):
    batch = {"source": ["a warm film in paris " * 24] * 400, "target": ["a film in rome"] * 400}
    assert milliseconds_per_example(lambda: Summarization().encode(batch, tokenizer), 400) < 1
    assert milliseconds_per_example(lambda: TASK.encode(batch, tokenizer), 400) < 1
