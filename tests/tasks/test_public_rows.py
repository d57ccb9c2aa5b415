"""Tests of the predicted positions that tasks mark in public examples."""

from __future__ import annotations

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, normalizers
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from hf_federated.tasks import LanguageModeling, QuestionAnswering, Seq2Seq, SequenceTagging, TextClassification


def letters(**settings):
    pieces = Tokenizer(WordPiece({"<pad>": 0, "<unk>": 1, "a": 2, "b": 3, "##a": 4, "##b": 5}, unk_token="<unk>"))
    pieces.pre_tokenizer = Whitespace()
    pieces.normalizer = normalizers.Replace("-", "")
    return PreTrainedTokenizerFast(tokenizer_object=pieces, pad_token="<pad>", unk_token="<unk>", **settings)


def test_words_are_numbered_at_first_sub_tokens():
    task = SequenceTagging(["O", "X"])
    rows = Dataset.from_dict({"tokens": [["ab", "a", "ba"], ["b"], ["a", "-", "b"]], "ner_tags": [["?"], [], ["O"]]})
    encoded = task.prepare_public(rows, letters())
    assert encoded["labels"][:] == [[0, -100, 1, 2, -100], [0], [0, 2]]
    assert encoded["num_positions"][:] == [3, 1, 3]
    assert "tokens" not in encoded.column_names


def test_truncated_words_count_in_num_positions():
    rows = Dataset.from_dict({"tokens": [["ab", "a", "ba"], ["aaab", "b"]]})
    encoded = SequenceTagging(["O", "X"], max_length=3).prepare_public(rows, letters())
    assert encoded["labels"][:] == [[0, -100, 1], [0, -100, -100]]
    assert encoded["num_positions"][:] == [3, 2]


def test_causal_text_marks_all_tokens_except_last():
    encoded = LanguageModeling().prepare_public(Dataset.from_dict({"text": ["a b a", "b"]}), letters())
    assert encoded["labels"][:] == [[0, 1, -100], [-100]]
    assert encoded["num_positions"][:] == [2, 0]


def test_seq2seq_marks_all_target_tokens():
    rows = Dataset.from_dict({"source": ["a", "b"], "target": ["ab a", "b"]})
    encoded = Seq2Seq().prepare_public(rows, letters())
    assert encoded["labels"][:] == [[2, 5, 2], [3]] and encoded["num_positions"][:] == [3, 1]
    with pytest.raises(ValueError, match="no column 'target'"):
        Seq2Seq().prepare_public(rows.remove_columns("target"), letters())


def test_examples_with_one_prediction_are_encoded_without_labels():
    rows = Dataset.from_dict({"text": ["a b", "b"], "label": [0, 1]})
    encoded = TextClassification(["no", "yes"]).prepare_public(rows, letters())
    assert {"labels", "num_positions"}.isdisjoint(encoded.column_names) and encoded["input_ids"][:] == [[2, 3], [3]]


def test_prediction_unit_of_each_task():
    units = {
        "row": TextClassification(["no", "yes"]),
        "word": SequenceTagging(["O"]),
        "token": LanguageModeling(),
    }
    assert all(task.prediction_unit == unit for unit, task in units.items())
    assert Seq2Seq().prediction_unit == "token"
    assert LanguageModeling(objective="masked").prediction_unit is None
    assert QuestionAnswering().prediction_unit is None
    with pytest.raises(NotImplementedError, match="QuestionAnswering does not mark the positions"):
        QuestionAnswering().encode_public({}, letters())
