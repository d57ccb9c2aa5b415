"""Tests of `Task.prepare`: datasets and clients, reuse of cached results, and speed."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from measure import milliseconds_per_example
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hf_federated import FederatedDataset
from hf_federated.tasks import (
    LanguageModeling,
    QuestionAnswering,
    Seq2Seq,
    SequenceTagging,
    Summarization,
    TextClassification,
)
from hf_federated.tasks.base import Task
from hf_federated.tasks.mapping import fingerprint


QA = QuestionAnswering(max_length=12, stride=2)
BLOCKS = LanguageModeling(block_size=8)
CLASSIFICATION = TextClassification(["dull", "bright"])


def rows(num_rows: int) -> Dataset:
    """Columns for every task. Each example has different words, so that its features are distinguishable."""
    texts = [f"{'warm ' * (i % 9)}film in {['paris', 'rome'][i % 2]} a plot" for i in range(num_rows)]
    return Dataset.from_dict(
        {
            "id": [str(i) for i in range(num_rows)],
            "client": [f"client {i % 3}" for i in range(num_rows)],
            "text": texts,
            "label": [i % 2 for i in range(num_rows)],
            "question": ["plot"] * num_rows,
            "context": texts,
            "answers": [{"text": ["film"], "answer_start": [text.index("film")]} for text in texts],
        }
    )


def separate(clients: FederatedDataset) -> FederatedDataset:
    return FederatedDataset.from_dict(dict(clients))


# ---- Clients


@pytest.mark.parametrize("build", [lambda clients: clients, separate], ids=["cut", "separate"])
@pytest.mark.parametrize("task", [QA, BLOCKS, CLASSIFICATION], ids=["answers", "blocks", "classes"])
def test_prepared_client_equals_separately_prepared_dataset(tokenizer, task, build):
    clients = build(FederatedDataset.from_column(rows(30), "client"))
    prepared = task.prepare(clients, tokenizer)
    assert prepared.client_ids == clients.client_ids
    assert prepared.partitioning == clients.partitioning
    for client_id, client in clients.items():
        alone = task.prepare(client, tokenizer)
        assert prepared[client_id].to_dict() == alone.to_dict()
        assert prepared[client_id].features == alone.features


def test_shared_source_is_encoded_once_if_examples_stay_separate(tokenizer):
    clients = FederatedDataset.from_column(rows(30), "client")
    for task, at_once in ((CLASSIFICATION, True), (LanguageModeling(), True), (BLOCKS, False), (QA, False)):
        assert task.one_feature_per_example == at_once
        assert (task.prepare(clients, tokenizer).source is not None) == at_once


def test_blocks_contain_texts_of_one_client_only(tokenizer):
    city_of = {"north": "paris", "south": "rome"}
    clients = {name: Dataset.from_dict({"text": [f"in {city}"] * 5}) for name, city in city_of.items()}
    pooled = FederatedDataset.from_dict(clients).to_dataset().add_column("client", ["north"] * 5 + ["south"] * 5)
    for data in (FederatedDataset.from_dict(clients), FederatedDataset.from_column(pooled, "client")):
        prepared = BLOCKS.prepare(data, tokenizer)
        for name, city in city_of.items():
            text = tokenizer.decode([token for block in prepared[name]["input_ids"] for token in block])
            assert text.count(city) == 5 and all(other not in text for other in set(city_of.values()) - {city})


def test_error_names_client_and_invalid_row(tokenizer):
    clients = rows(9).to_dict()
    clients["context"][7] = " "
    data = FederatedDataset.from_column(Dataset.from_dict(clients), "client")
    with pytest.raises(ValueError, match="Client 'client 1': Row 2 has an empty text in the column 'context'"):
        QA.prepare(data, tokenizer)


def test_client_without_encoded_examples_raises():
    pieces = Tokenizer(WordPiece({"[UNK]": 0, "film": 1}, unk_token="[UNK]"))
    pieces.normalizer, pieces.pre_tokenizer = BertNormalizer(), Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="[UNK]")
    texts = {"north": ["film film"], "south": ["\ufffd"]}  # the replacement character for invalid bytes
    clients = FederatedDataset.from_dict({name: Dataset.from_dict({"text": text}) for name, text in texts.items()})
    with pytest.raises(ValueError, match="Client 'south' has 1 rows, but the tokenizer returns no tokens for them"):
        BLOCKS.prepare(clients, tokenizer)
    assert len(BLOCKS.prepare(clients["south"], tokenizer)) == 0


def test_iterable_dataset_is_encoded_lazily(tokenizer):
    stream = rows(4).to_iterable_dataset()
    expected = CLASSIFICATION.prepare(rows(4), tokenizer).to_list()
    assert list(CLASSIFICATION.prepare(stream, tokenizer)) == expected
    clients = FederatedDataset.from_dict({"a": stream, "b": rows(4)})
    prepared = CLASSIFICATION.prepare(clients, tokenizer)
    assert isinstance(prepared["a"], IterableDataset) and list(prepared["a"]) == prepared["b"].to_list() == expected


# ---- Reuse of cached results


def large(reverse: bool = False, words: int = 30_000, **kwargs) -> PreTrainedTokenizerFast:
    """WordPiece with a vocabulary of BERT's size. Words from `"w10"` on have two tokens."""
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "w", *map(str, range(10))])}
    vocabulary |= {f"##{number}": len(vocabulary) + number for number in range(words)}
    pieces = Tokenizer(WordPiece(dict(reversed(vocabulary.items())) if reverse else vocabulary, unk_token="[UNK]"))
    pieces.pre_tokenizer = Whitespace()
    pieces.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=pieces, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", **kwargs
    )


def test_fingerprint_is_equal_exactly_for_equal_settings():
    tokenizer = large()
    expected = fingerprint(tokenizer, QA)
    assert expected == fingerprint(large(reverse=True), QA) == fingerprint(tokenizer, dataclasses.replace(QA))
    tokenizer("w1 w2", truncation=True, max_length=3, padding="max_length")
    assert fingerprint(tokenizer, QA) == expected
    changed = [large(words=29_999), large(truncation_side="left"), large(model_max_length=8), large(sep_token="w")]
    different = [fingerprint(other, QA) for other in changed] + [fingerprint(tokenizer, BLOCKS)]
    assert None not in different and len({expected, *different}) == 6


def test_fingerprint_includes_vocabulary_outside_backend():
    first, second = large(), large()
    first.words, second.words = [{f"w{i}": i for i in range(2000)} for _ in range(2)]
    assert fingerprint(first) == fingerprint(second)
    second.words["w7"] = 7000
    assert fingerprint(first) != fingerprint(second)
    first.words, second.words = list("ab" * 1000), list("ba" * 1000)
    assert fingerprint(first) != fingerprint(second)


def test_cached_results_are_reused_only_for_equal_settings(tokenizer, tmp_path):
    rows(6).save_to_disk(tmp_path)
    data = Dataset.load_from_disk(tmp_path)

    def files(task: Task = CLASSIFICATION, data: Dataset = data, **kwargs) -> list[str]:
        return [file["filename"] for file in task.prepare(data, tokenizer, **kwargs).cache_files]

    assert files() and files() == files()
    shorter = dataclasses.replace(CLASSIFICATION, max_length=4)
    different = [files(), files(shorter), files(with_labels=False), files(data=data.select(range(3))), files(QA)]
    different.append(files(batch_size=2))
    assert len({tuple(names) for names in different}) == 6
    assert [len(ids) for ids in shorter.prepare(data, tokenizer)["input_ids"]] == [4] * 6


def test_shared_cache_file_for_clients_raises(tokenizer, tmp_path):
    clients = FederatedDataset.from_column(rows(6), "client")
    with pytest.raises(ValueError, match=r"`prepare` got \['cache_file_name'\], but each client has a separate"):
        QA.prepare(clients, tokenizer, cache_file_name=str(tmp_path / "features.arrow"))


def test_tokenizer_that_cannot_be_pickled_still_encodes(tokenizer, caplog):
    tokenizer.unpicklable = (word for word in "ab")
    try:
        with caplog.at_level(logging.ERROR):
            assert fingerprint(tokenizer) is None
            assert len(CLASSIFICATION.prepare(rows(3), tokenizer)) == 3
    finally:
        del tokenizer.unpicklable


# ---- Speed

TASKS = {
    "classification": CLASSIFICATION,
    "tagging": SequenceTagging(["O", "B-LOC", "I-LOC"]),
    "answers": QuestionAnswering(max_length=384, stride=128),
    "seq2seq": Seq2Seq(source_column="text", target_column="question"),
    "summaries": Summarization(source_column="text", target_column="question"),
    "causal": LanguageModeling(),
    "blocks": LanguageModeling(block_size=128),
    "masked": LanguageModeling("masked"),
}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_preparing_takes_less_than_a_millisecond_per_example_of_120_words(task):
    words = np.random.default_rng(0).integers(1, 2000, size=(300, 120))
    texts = [" ".join(f"w{word}" for word in line) for line in words]
    data = Dataset.from_dict(
        {
            "id": [str(i) for i in range(300)],
            "text": texts,
            "label": [i % 2 for i in range(300)],
            "tokens": [text.split() for text in texts],
            "ner_tags": [[0] * 119 + [1]] * 300,
            "question": [" ".join(text.split()[-12:]) for text in texts],
            "context": texts,
            "answers": [{"text": [text.split()[-1]], "answer_start": [text.rindex(" ") + 1]} for text in texts],
        }
    )
    tokenizer = large(sep_token="[SEP]")
    assert milliseconds_per_example(lambda: task.prepare(data, tokenizer), 300) < 1
