"""Tests of SuperGLUE for causal models: encoding of cloze questions, candidate scores, training and evaluation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from causal import bytes_tokenizer, llama, pieces_tokenizer
from datasets import Dataset, concatenate_datasets
from measure import milliseconds_per_example
from superglue_raw import files
from tiny import arguments
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Trainer

from hf_federated import FederatedConfig, FederatedDataset, federate
from hf_federated.tasks import SuperGlueCloze, superglue_cloze_rows
from hf_federated.tasks.superglue import LABELS, score_candidates


TASK = SuperGlueCloze(max_length=128)
ROWS = concatenate_datasets([superglue_cloze_rows(name, files(name)) for name in LABELS])
ANSWERED = ROWS.filter(lambda row: row["label"] >= 0)
SEVERAL_WORDS = ("copa", "record", "wsc")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return bytes_tokenizer(ROWS["source"])


def batch_of(rows: Dataset, **changes: Any) -> dict[str, list[Any]]:
    return {**rows[:], **changes}


def reference_sums(task: SuperGlueCloze, rows: Dataset, tokenizer: Any, model: Any) -> list[np.ndarray]:
    """Σ log p of each candidate: each text is tokenized whole and evaluated alone, without padding, in float64."""
    model = model.double().eval()
    sums = []
    for prompt, row in zip(task.prompts(rows[:])[0], rows, strict=True):
        row_sums = []
        for candidate in row["candidates"]:
            ids = tokenizer(f"{prompt} {candidate}")["input_ids"]
            ids += [tokenizer.eos_token_id] if row["task"] in SEVERAL_WORDS else []
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0]
            begin = len(tokenizer(prompt)["input_ids"])
            log_probabilities = torch.log_softmax(logits, dim=-1)
            row_sums.append(sum(log_probabilities[i - 1, ids[i]].item() for i in range(begin, len(ids))))
        sums.append(np.array(row_sums))
    model.float()
    return sums


def trainer_of(folder: Any, tokenizer: Any, model: Any, task: SuperGlueCloze = TASK, **kwargs: Any) -> Trainer:
    features = task.for_evaluation(task.prepare(ROWS, tokenizer), tokenizer)
    return Trainer(
        model=model,
        args=arguments(folder, **kwargs),
        train_dataset=task.prepare(ANSWERED, tokenizer),
        eval_dataset=features,
        data_collator=task.data_collator(tokenizer),
        compute_metrics=task.build_compute_metrics(tokenizer, features, ROWS),
        preprocess_logits_for_metrics=task.preprocess_logits_for_metrics,
    )


# ---- Encoding


def test_prompts_contain_whole_question():
    prompts = dict(zip(ROWS["task"], TASK.prompts(ROWS[:])[0], strict=True))
    assert prompts["boolq"].endswith("Question: did the bakery close? Answer:")
    assert prompts["copa"] == '"he sang" or "he got wet"? It rained, so'
    assert prompts["rte"] == '"Rome is well-off"? ____ "Snow fell in Rome."\nAnswer:'
    # The blank is at the end of this query. In the other query, text follows the blank.
    assert prompts["record"].endswith("\nIt was found by")
    texts, truncatable_spans = SuperGlueCloze(blank="<mask>", slot=" So:").prompts(ROWS[:])
    assert '"? <mask> "Snow fell in Rome." So:' in texts[-3 - 2]
    begin, end = truncatable_spans[-3 - 2]
    assert texts[-3 - 2][begin:end] == "Snow fell in Rome."


def test_labels_contain_only_answer(tokenizer):
    for row, encoded in zip(ROWS, TASK.prepare(ROWS, tokenizer), strict=True):
        labels, ids = encoded["labels"], encoded["input_ids"]
        answer = [label for label in labels if label != -100]
        assert len(labels) == len(ids) == len(encoded["attention_mask"])
        assert ids[len(ids) - len(answer) :] == answer
        text = f" {row['candidates'][row['label']]}" if row["label"] >= 0 else ""
        end = "<end>" if text and row["task"] in SEVERAL_WORDS else ""
        assert tokenizer.decode(answer) == text + end


@pytest.mark.parametrize("make", [bytes_tokenizer, pieces_tokenizer])
def test_tokens_equal_tokens_of_whole_text(make):
    tokenizer = make([*ROWS["source"], "yes no maybe"])
    task = SuperGlueCloze(end_answers=False)
    features = task.for_evaluation(task.prepare(ROWS, tokenizer), tokenizer)
    texts = {
        (row["id"], number): f"{prompt} {candidate}"
        for prompt, row in zip(task.prompts(ROWS[:])[0], ROWS, strict=True)
        for number, candidate in enumerate(row["candidates"])
    }
    order = list(zip(features["id"], features["candidate"], strict=True))
    assert sorted(order) == sorted(texts)
    assert features["input_ids"][:] == tokenizer([texts[key] for key in order])["input_ids"]
    # Examples are sorted by length, so that batches have little padding.
    lengths = list(map(len, features["input_ids"]))
    assert lengths == sorted(lengths) and len(set(lengths)) > 1


def test_long_questions_lose_end_of_truncatable_part(tokenizer):
    whole, row = TASK.prepare(ROWS, tokenizer), 0
    assert ROWS[row]["task"] == "boolq"
    ids, length = whole[row]["input_ids"], len(whole[row]["input_ids"])
    question = tokenizer(". Question: is lund's bakery still open? Answer:")["input_ids"]
    answer = tokenizer(" no")["input_ids"]
    # All candidates have the same prompt, which leaves enough tokens for the longest candidate.
    longer = max(map(len, whole[row]["candidates"])) - len(answer)
    for cut in (1, 10):
        shorter = SuperGlueCloze(max_length=length + longer - cut).prepare(ROWS.select([row]), tokenizer)[0]
        part_length = length - len(question) - len(answer)
        assert shorter["input_ids"] == ids[: part_length - cut] + question + answer
        assert shorter["labels"] == [-100] * (length - cut - len(answer)) + answer
    with pytest.raises(ValueError, match=rf"Row 0 has {len(question)} tokens that cannot be truncated, but only 5"):
        SuperGlueCloze(max_length=5 + longer + len(answer)).prepare(ROWS.select([row]), tokenizer)


def test_text_after_blank_is_truncated_equally_for_all_candidates(tokenizer):
    rows = superglue_cloze_rows("cb", files("cb"))
    task = SuperGlueCloze(max_length=26)
    features = task.for_evaluation(task.prepare(rows, tokenizer), tokenizer)
    for row in features:
        text = tokenizer.decode(row["input_ids"])
        assert len(row["input_ids"]) <= 26 and text.startswith('"it is') and '"\nAnswer:' in text
    for row_id in rows["id"]:
        row_features = features.filter(lambda row, row_id=row_id: row["id"] == row_id)
        questions = {tuple(row["input_ids"][: row["labels"].count(-100)]) for row in row_features}
        assert len(row_features) == 3 and len(questions) == 1


def test_training_on_row_without_correct_answer_raises(tokenizer):
    collate = TASK.data_collator(tokenizer)
    with pytest.raises(ValueError, match="An example of this batch has no answer.*answered_only=True"):
        collate(list(TASK.prepare(ROWS.filter(lambda row: row["label"] < 0), tokenizer)))


def test_rows_without_labels_give_same_evaluation_examples(tokenizer):
    unlabeled = TASK.prepare(ROWS.remove_columns(["label", "target"]), tokenizer, with_labels=False)
    assert "labels" not in unlabeled.column_names
    labeled = TASK.for_evaluation(TASK.prepare(ROWS, tokenizer), tokenizer)
    assert TASK.for_evaluation(unlabeled, tokenizer).to_list() == labeled.to_list()


# ---- Scores


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("concat", [True, False])
def test_trainer_scores_equal_scores_of_single_candidates(tokenizer, tmp_path, monkeypatch, side, concat):
    monkeypatch.setattr(tokenizer, "padding_side", side)
    model = llama(len(tokenizer))
    trainer = trainer_of(
        tmp_path, tokenizer, model, per_device_eval_batch_size=7, eval_do_concat_batches=concat, eval_strategy="epoch"
    )
    expected = reference_sums(TASK, ROWS, tokenizer, model)
    features = trainer.eval_dataset
    predictions = trainer.predict(features)
    sums = predictions.predictions if concat else np.concatenate(predictions.predictions)
    assert sums.shape == (sum(map(len, expected)),)
    row_sums = dict(zip(ROWS["id"], expected, strict=True))
    candidates = zip(features["id"], features["candidate"], strict=True)
    np.testing.assert_allclose(sums, [row_sums[name][number] for name, number in candidates], atol=1e-4)
    # Compare two of the metrics with values computed by hand.
    best = [int(values.argmax()) for values in expected]
    correct = []
    for row, chosen in zip(ROWS, best, strict=True):
        if row["task"] == "record":
            correct.append(row["candidates"][chosen] in row["answers"])
        elif row["task"] == "wsc":
            correct.append((chosen == 0) == (row["target"] == "Same"))
        else:
            correct.append(chosen == row["label"])
    assert predictions.metrics["test_accuracy"] == pytest.approx(np.mean(correct))
    copa = [value for row, value in zip(ROWS, correct, strict=True) if row["task"] == "copa"]
    assert predictions.metrics["test_copa_accuracy"] == pytest.approx(np.mean(copa))


def test_correct_scores_give_metrics_of_one_and_negated_scores_are_wrong(tokenizer):
    features = TASK.for_evaluation(TASK.prepare(ROWS, tokenizer), tokenizer)
    compute = TASK.build_compute_metrics(tokenizer, features, ROWS)
    rows = {row["id"]: row for row in ROWS}
    is_right = []
    for name, number in zip(features["id"], features["candidate"], strict=True):
        row = rows[name]
        # If the noun of a WSC row is wrong, the correct noun is the other candidate.
        is_right.append(number == row["label"] if row["label"] >= 0 else number == 1)
    sums = np.where(is_right, -1.0, -9.0)
    metrics = compute(SimpleNamespace(predictions=sums))
    known = [row for row in ROWS if row["label"] >= 0]
    losses = [np.log(1 + (len(row["candidates"]) - 1) * np.exp(-8)) for row in known]
    assert {name: value for name, value in metrics.items() if value != 1.0} == {
        "log_loss": pytest.approx(np.mean(losses))
    }
    assert {f"{name}_score" for name in LABELS} < set(metrics)
    wrong = compute(SimpleNamespace(predictions=-sums))
    assert wrong["accuracy"] == wrong["record_exact_match"] == wrong["multirc_f1a"] == wrong["cb_accuracy"] == 0.0
    # Predictions as a list of batches, with more outputs than logits.
    batches = [(part, "hidden states") for part in np.split(sums, [5, 9])]
    assert compute(SimpleNamespace(predictions=batches)) == metrics


def test_score_is_softmax_for_one_word_and_sum_for_several_words():
    sums = np.array([-1000.0, -1001.0, -1003.0])
    weights = [1.0, np.exp(-1), np.exp(-3)]
    for name in LABELS:
        expected = sums if name in SEVERAL_WORDS else np.array(weights) / sum(weights)
        np.testing.assert_allclose(score_candidates(name, sums), expected)


def test_end_token_lets_longer_candidate_win(tokenizer, tmp_path):
    row = {**ROWS.filter(lambda row: row["task"] == "record")[0], "candidates": ["Ada", "Ada Lund"], "label": 1}
    rows = Dataset.from_list([row] * 4)
    sums = {}
    for end_answers in (True, False):
        task, model = SuperGlueCloze(end_answers=end_answers), llama(len(tokenizer))
        args = arguments(tmp_path, num_train_epochs=12)
        train = task.prepare(rows, tokenizer)
        collate = task.data_collator(tokenizer)
        Trainer(model=model, args=args, train_dataset=train, data_collator=collate).train()
        batch = collate(list(task.for_evaluation(train.select([0]), tokenizer)))
        with torch.no_grad():
            logits = model.eval()(**batch).logits
        sums[end_answers] = task.preprocess_logits_for_metrics(logits, batch["labels"]).tolist()
    assert sums[True][1] > sums[True][0]
    assert sums[False][0] >= sums[False][1]  # a longer candidate with the same start is never more likely


@pytest.mark.parametrize("federated", [False, True])
def test_trainers_learn_all_tasks(tokenizer, tmp_path, federated):
    trainer = trainer_of(tmp_path, tokenizer, llama(len(tokenizer)), num_train_epochs=15)
    if federated:
        number = [i % 2 for i in range(len(ANSWERED))]
        clients = FederatedDataset.from_column(ANSWERED.add_column("place", number), "place")
        trainer = federate(Trainer)(
            model=llama(len(tokenizer)),
            args=trainer.args,
            train_dataset=TASK.prepare(clients, tokenizer),
            eval_dataset=trainer.eval_dataset,
            data_collator=trainer.data_collator,
            compute_metrics=trainer.compute_metrics,
            preprocess_logits_for_metrics=TASK.preprocess_logits_for_metrics,
            federation=FederatedConfig(num_rounds=5, local_epochs=5),
        )
    trainer.train()
    metrics = trainer.evaluate()
    # The WSC row with the wrong noun is not in the training data.
    scores = [metrics[f"eval_{name}_score"] for name in LABELS if name != "wsc"]
    assert np.mean(scores) > 0.9


# ---- Errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": ["boolq", "qnli"]}, "Row 8 has the task 'qnli'; allowed are 'boolq', .*'wsc'"),
        ({"label": [0, 2]}, "Row 8 has the label 2; allowed are the candidate numbers 0 to 1"),
        ({"label": [0, None]}, "Row 8 has the label None"),
        ({"label": [0, -1]}, "Row 8 has the label -1"),
        ({"source": ["", "[M]"], "mask_start": [0, 0]}, "Row 7 has an empty text in the column 'source'"),
        ({"mask_start": [0, 0]}, r"Row 7 has no \[M\] at character 0 of its source"),
        ({"candidates": [["no", "yes"], []]}, r"Row 8 has the candidates \[\]; at least one is required"),
        ({"candidates": [["no", " "], ["no", "yes"]]}, r"Row 7 has the candidates \['no', ' '\]"),
    ],
)
def test_error_names_invalid_row(tokenizer, changes, message):
    with pytest.raises(ValueError, match=message):
        TASK.encode(batch_of(ROWS.select([0, 1]), **changes), tokenizer, [7, 8])


def test_error_names_missing_column(tokenizer):
    with pytest.raises(ValueError, match="There is no column 'candidates'; the columns are 'id'"):
        TASK.encode(batch_of(ROWS.select([0, 1]).remove_columns("candidates")), tokenizer)


def test_tokenizers_without_end_token_or_candidate_tokens_raise(tokenizer):
    without = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="has no token to end an answer. Set its eos_token"):
        TASK.prepare(ROWS, without)
    # This tokenizer drops all other letters.
    letters = Tokenizer(BPE({letter: number for number, letter in enumerate("is:")}, []))
    letters.pre_tokenizer = Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=letters)
    with pytest.raises(ValueError, match="Row 0 has the candidate 'ö', but the tokenizer returns no tokens for it"):
        TASK.encode(batch_of(ROWS.select([0]), candidates=[["ö", "is"]]), words, [0])
    with pytest.raises(ValueError, match="Row 0 has candidates with equal tokens: is, iös"):
        TASK.encode(batch_of(ROWS.select([0]), candidates=[["is", "iös"]]), words, [0])


def test_metrics_require_candidates_and_matching_rows(tokenizer):
    prepared = TASK.prepare(ROWS, tokenizer)
    features = TASK.for_evaluation(prepared, tokenizer)
    for missing in ((None, ROWS), (features, None), (prepared, ROWS)):
        with pytest.raises(ValueError, match="`features` or `rows` is missing or has no candidates"):
            TASK.build_compute_metrics(tokenizer, *missing)
    with pytest.raises(ValueError, match="`features` and `rows` have different IDs"):
        TASK.build_compute_metrics(tokenizer, features, ROWS.select(range(5)))
    twice = concatenate_datasets([ROWS, ROWS])
    with pytest.raises(ValueError, match="Row 0 has the same id .* as another row of `rows`"):
        TASK.build_compute_metrics(tokenizer, features, twice)
    compute = TASK.build_compute_metrics(tokenizer, features, ROWS)
    with pytest.raises(ValueError, match=r"shape \(3, 5, 7\) instead of .*preprocess_logits_for_metrics"):
        compute(SimpleNamespace(predictions=np.zeros((3, 5, 7))))


def test_metrics_do_not_depend_on_the_order_of_rows_or_features(tokenizer):
    features = TASK.for_evaluation(TASK.prepare(ROWS, tokenizer), tokenizer)
    sums = np.random.default_rng(0).normal(size=len(features))
    expected = TASK.build_compute_metrics(tokenizer, features, ROWS)(SimpleNamespace(predictions=sums))
    order = np.random.default_rng(1).permutation(len(features))
    shuffled = TASK.build_compute_metrics(tokenizer, features.select(order), ROWS.shuffle(seed=2))
    assert shuffled(SimpleNamespace(predictions=sums[order])) == pytest.approx(expected)


def test_encoding_takes_less_than_a_millisecond_per_example(tokenizer):
    rows = superglue_cloze_rows("boolq", Dataset.from_list([files("boolq")[0]] * 400))
    long = [f"{'It opened in Lund. ' * 20}{source}" for source in rows["source"]]
    batch = batch_of(
        rows,
        source=long,
        mask_start=[text.index("[M]") for text in long],
        passage_end=[text.index(". Question") for text in long],
    )
    for task in (SuperGlueCloze(), SuperGlueCloze(max_length=64)):
        assert milliseconds_per_example(lambda task=task: task.encode(batch, tokenizer), 400) < 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_raise(value, tokenizer):
    features = TASK.for_evaluation(TASK.prepare(ROWS, tokenizer), tokenizer)
    compute = TASK.build_compute_metrics(tokenizer, features, ROWS)
    sums = np.full(len(features), -1.0)
    compute(SimpleNamespace(predictions=sums))
    sums[[number for number, name in enumerate(features["id"]) if name == features["id"][0]]] = value
    with pytest.raises(ValueError, match="contain NaN, or none is finite"):
        compute(SimpleNamespace(predictions=sums))
