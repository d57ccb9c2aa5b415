"""Tests of question answering: context windows, answer spans, answers from logits, and training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset
from measure import SHAPE, milliseconds_per_example
from tiny import arguments
from transformers import BertConfig, BertForQuestionAnswering, EvalPrediction, Trainer

from hf_federated import FederatedConfig, FederatedTrainer
from hf_federated.tasks import QuestionAnswering


TASK = QuestionAnswering(max_length=10, stride=2, max_answer_length=4)


def row(**changed: object) -> dict[str, object]:
    context = "a warm film in paris a cold film in rome"
    answers = {"text": ["paris", "in paris"], "answer_start": [15, 12]}
    return {"id": "q", "question": " plot a ", "context": context, "answers": answers, **changed}


def batch(*rows: dict[str, object]) -> dict[str, list[object]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def model() -> BertForQuestionAnswering:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BertForQuestionAnswering(BertConfig(**SHAPE))


def feature_tokens(encoded: dict[str, list], tokenizer, feature: int) -> list[str]:
    return tokenizer.convert_ids_to_tokens(encoded["input_ids"][feature])


def test_windows_overlap_and_keep_the_question(tokenizer):
    encoded = TASK.encode(batch(row()), tokenizer)
    windows = [feature_tokens(encoded, tokenizer, feature) for feature in range(len(encoded["input_ids"]))]
    assert all(window[:4] == ["[CLS]", "plot", "a", "[SEP]"] and window[-1] == "[SEP]" for window in windows)
    assert all(len(window) <= 10 for window in windows)
    contexts = [window[4:-1] for window in windows]
    assert all(before[-2:] == after[:2] for before, after in zip(contexts, contexts[1:], strict=False))
    joined = contexts[0] + [token for context in contexts[1:] for token in context[2:]]
    assert joined == tokenizer.tokenize(row()["context"])
    assert encoded["attention_mask"] == [[1] * len(window) for window in windows]


def test_features_contain_example_id_and_character_offsets(tokenizer):
    encoded = TASK.encode(batch(row(), row(id=7, context="dull film dull", answers=[])), tokenizer, with_labels=False)
    contexts = {"q": row()["context"], "7": "dull film dull"}
    assert set(encoded["example_id"]) == set(contexts)
    for feature, example_id in enumerate(encoded["example_id"]):
        for position, token in enumerate(feature_tokens(encoded, tokenizer, feature)):
            begin, end = encoded["offset_starts"][feature][position], encoded["offset_ends"][feature][position]
            in_context = 4 <= position < len(encoded["input_ids"][feature]) - 1
            text = contexts[example_id][begin:end] if begin >= 0 else None
            assert text == (token.removeprefix("##") if in_context else None)


def test_only_windows_with_complete_answer_are_labeled(tokenizer):
    encoded = TASK.encode(batch(row()), tokenizer)
    num_complete = 0
    for feature in range(len(encoded["input_ids"])):
        tokens = feature_tokens(encoded, tokenizer, feature)
        span = slice(encoded["start_positions"][feature], encoded["end_positions"][feature] + 1)
        complete = any(tokens[i : i + 2] == ["par", "##is"] for i in range(len(tokens)))
        assert tokens[span] == (["par", "##is"] if complete else ["[CLS]"])
        num_complete += complete
    assert 0 < num_complete < len(encoded["input_ids"])


@pytest.mark.parametrize(
    "answers", [{"text": [" paris "], "answer_start": [14]}, [{"text": "par", "answer_start": 15}]]
)
def test_span_of_padded_or_partial_words_covers_their_tokens(tokenizer, answers):
    encoded = QuestionAnswering(max_length=32, stride=2).encode(batch(row(answers=answers)), tokenizer)
    tokens = feature_tokens(encoded, tokenizer, 0)
    span = tokens[encoded["start_positions"][0] : encoded["end_positions"][0] + 1]
    assert "".join(span).replace("##", "") in ("paris", "par")
    assert span[0] == "par"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"answers": {"text": ["rome"], "answer_start": [15]}},
            "'rome' at character 15, but the context has 'pari' there",
        ),
        ({"answers": {"text": ["rome"], "answer_start": [400]}}, "'rome' at character 400, outside the context"),
        ({"answers": {"text": ["rome"], "answer_start": [-4]}}, "'rome' at character -4, outside the context"),
        ({"answers": {"text": ["paris", "x"], "answer_start": [15, 0]}}, "'x' at character 0, but"),
        ({"answers": {"text": [], "answer_start": []}}, "no answer in the column 'answers'.*no_answer=True"),
        ({"question": " "}, "an empty text in the column 'question'"),
        ({"context": ""}, "an empty text in the column 'context'"),
        (
            {"question": "a plot a plot a"},
            "a question of 5 tokens. With 3 special tokens and a stride of 2, 10 tokens leave",
        ),
    ],
)
def test_error_names_invalid_row(tokenizer, changed, message):
    with pytest.raises(ValueError, match=f"Row 1 has .*{message}"):
        TASK.prepare(Dataset.from_list([row(), row(**changed)]), tokenizer)


def test_no_answer_allows_examples_without_answer(tokenizer):
    task = QuestionAnswering(max_length=10, stride=2, no_answer=True)
    for answers in ({"text": [], "answer_start": []}, {"text": [""], "answer_start": [0]}, []):
        encoded = task.encode(batch(row(answers=answers)), tokenizer)
        assert set(encoded["start_positions"]) == set(encoded["end_positions"]) == {0}


def test_invalid_arguments_and_left_padding_raise(tokenizer):
    with pytest.raises(ValueError, match="`max_length` is 64; it must be at least 129"):
        QuestionAnswering(max_length=64)
    tokenizer.padding_side = "left"
    try:
        with pytest.raises(ValueError, match='padding_side = "right"'):
            TASK.encode(batch(row()), tokenizer)
    finally:
        tokenizer.padding_side = "right"


def reference_answer(task, features, starts, ends, context):
    """Compute the answer with loops over all pairs of each feature's best starts and ends."""
    best, answer, null = -np.inf, "", np.inf
    for feature, start_logits, end_logits in zip(features, starts, ends, strict=True):
        inside = [i for i, begin in enumerate(feature["offset_starts"]) if begin >= 0]
        null = min(null, start_logits[feature["null_position"]] + end_logits[feature["null_position"]])
        best_starts = sorted(inside, key=lambda i: -start_logits[i])[: task.n_best]
        best_ends = sorted(inside, key=lambda i: -end_logits[i])[: task.n_best]
        for i in best_starts:
            for j in best_ends:
                if i <= j < i + task.max_answer_length and start_logits[i] + end_logits[j] > best:
                    best = start_logits[i] + end_logits[j]
                    answer = context[feature["offset_starts"][i] : feature["offset_ends"][j]]
    return "" if task.no_answer and null > best + task.null_threshold else answer


@pytest.mark.parametrize("no_answer", [False, True])
@pytest.mark.parametrize("n_best", [1, 3, 20])
def test_answers_equal_exhaustive_search(tokenizer, no_answer, n_best):
    task = QuestionAnswering(
        max_length=10, stride=2, max_answer_length=3, n_best=n_best, no_answer=no_answer, null_threshold=-6.0
    )
    rows = Dataset.from_list([row(id=str(i), context=" ".join(row()["context"].split()[i % 3 :])) for i in range(30)])
    features = task.prepare(rows, tokenizer, with_labels=False)
    # As `Trainer` concatenates batches: padded with -100 to the longest feature.
    starts, ends = np.random.default_rng(n_best).normal(size=(2, len(features), 12))
    for i, ids in enumerate(features["input_ids"]):
        starts[i, len(ids) :] = ends[i, len(ids) :] = -100
    expected = []
    for example in rows:
        own = [i for i, example_id in enumerate(features["example_id"]) if example_id == example["id"]]
        expected.append(reference_answer(task, [features[i] for i in own], starts[own], ends[own], example["context"]))
    assert task.postprocess(starts, ends, features, rows) == expected
    assert not no_answer or 0 < expected.count("") < len(expected)


def test_metrics_use_best_gold_answer(tokenizer):
    rows = Dataset.from_list([row()])
    features = TASK.prepare(rows, tokenizer)
    starts, ends = np.full((2, len(features), 10), -9.0)
    feature = features["start_positions"].index(max(features["start_positions"]))
    starts[feature, features[feature]["start_positions"] - 1] = 5.0  # "in paris", the second gold answer
    ends[feature, features[feature]["end_positions"]] = 5.0
    compute_metrics = TASK.build_compute_metrics(tokenizer, features, rows)
    assert compute_metrics(EvalPrediction((starts, ends), None)) == {"exact_match": 1.0, "token_f1": 1.0}


def test_mismatched_logits_features_and_rows_raise(tokenizer):
    rows = Dataset.from_list([row(), row(id="r")])
    features = TASK.prepare(rows, tokenizer)
    logits = np.zeros((len(features), 10))
    with pytest.raises(ValueError, match="logits for 1 features"):
        TASK.postprocess(logits[:1], logits[:1], features, rows)
    with pytest.raises(ValueError, match="`features` and `rows` have different IDs"):
        TASK.postprocess(logits, logits, features, rows.select([0]))
    with pytest.raises(ValueError, match="Row 0 has the same id 'q'"):
        TASK.postprocess(logits, logits, features, Dataset.from_list([row(), row()]))
    with pytest.raises(ValueError, match="`features` or `rows` is missing"):
        TASK.build_compute_metrics(tokenizer)


def test_padding_changes_no_logits(tokenizer):
    encoded = TASK.encode(batch(row(), row(context="in rome", answers=[])), tokenizer, with_labels=False)
    inputs = [{name: encoded[name][i] for name in ("input_ids", "attention_mask")} for i in (0, -1)]
    assert len(inputs[0]["input_ids"]) > len(inputs[1]["input_ids"])
    collate, qa = TASK.data_collator(tokenizer), model().eval()
    with torch.no_grad():
        together, alone = qa(**collate(inputs)), qa(**collate([inputs[1]]))
    length = len(inputs[1]["input_ids"])
    torch.testing.assert_close(together.start_logits[1, :length], alone.start_logits[0])
    torch.testing.assert_close(together.end_logits[1, :length], alone.end_logits[0])


@pytest.mark.parametrize("federated", [False, True])
def test_trainers_learn_task(tokenizer, tmp_path, federated):
    cities = ["paris", "rome"]
    rows = Dataset.from_list(
        [
            row(
                id=str(i),
                context=f"{'warm film ' * (i % 4)}in {cities[i % 2]} a plot",
                answers=[{"text": cities[i % 2], "answer_start": 3 + 10 * (i % 4)}],
            )
            for i in range(24)
        ]
    )
    features = TASK.prepare(rows, tokenizer)
    shared = {
        "model": model(),
        "eval_dataset": features,
        "data_collator": TASK.data_collator(tokenizer),
        "compute_metrics": TASK.build_compute_metrics(tokenizer, features, rows),
    }
    if federated:
        clients = {"north": rows.select(range(12)), "south": rows.select(range(12, 24))}
        trainer = FederatedTrainer(
            args=arguments(tmp_path),
            train_dataset={name: TASK.prepare(part, tokenizer) for name, part in clients.items()},
            federation=FederatedConfig(num_rounds=10),
            **shared,
        )
    else:
        trainer = Trainer(args=arguments(tmp_path, num_train_epochs=8), train_dataset=features, **shared)
    trainer.train()
    assert trainer.evaluate()["eval_exact_match"] > 0.9


def test_encoding_takes_less_than_a_millisecond_per_example(tokenizer):
    long = batch(*[row(id=str(i), context="a warm film in paris a cold film in rome " * 12) for i in range(300)])
    task = QuestionAnswering(max_length=128, stride=32)
    assert milliseconds_per_example(lambda: task.encode(long, tokenizer), 300) < 1
