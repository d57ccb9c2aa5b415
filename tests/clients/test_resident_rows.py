"""Kept rows give the batches of the data collator, bit for bit, and each row is read once."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    BatchEncoding,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    DefaultDataCollator,
    PreTrainedTokenizerFast,
    default_data_collator,
)

from hf_federated.clients.pure_collators import is_pure
from hf_federated.clients.resident_rows import ResidentRows, read_rows
from hf_federated.tasks.causal import CausalCollator


NUM_ROWS = 12
VOCABULARY = {"[PAD]": 0, "[MASK]": 1, "[UNK]": 2, **{f"w{number}": 3 + number for number in range(20)}}


class TokenizerWithOwnPadding(PreTrainedTokenizerFast):
    def _pad(self, *args: Any, **kwargs: Any) -> Any:
        return {"length": 7}


def tokenizer(side: str = "right", kind: type = PreTrainedTokenizerFast) -> Any:
    backend = Tokenizer(WordLevel(VOCABULARY, unk_token="[UNK]"))
    names = {"pad_token": "[PAD]", "mask_token": "[MASK]", "unk_token": "[UNK]"}
    return kind(tokenizer_object=backend, padding_side=side, **names)


def texts() -> Dataset:
    draw = random.Random(0)
    ids = [[draw.randrange(3, 23) for _ in range(draw.randint(1, 9))] for _ in range(NUM_ROWS)]
    types = [[draw.randrange(2) for _ in row] for row in ids]
    label = [draw.randrange(3) for _ in ids]
    columns = {"label": label, "input_ids": ids, "token_type_ids": types, "special_tokens_mask": types}
    return Dataset.from_dict(columns)


def tagged() -> Dataset:
    rows = texts().remove_columns("label")
    return rows.add_column("labels", [[-100, *row[1:]] for row in rows["input_ids"]])


def vectors() -> Dataset:
    draw = np.random.default_rng(0)
    return Dataset.from_dict(
        {
            "x": draw.random((NUM_ROWS, 5)).tolist(),
            "image": draw.integers(0, 9, (NUM_ROWS, 2, 3)).tolist(),
            "flag": draw.integers(0, 2, NUM_ROWS).astype(bool).tolist(),
            "text": ["a"] * NUM_ROWS,
            "label": draw.random(NUM_ROWS).tolist(),
        }
    )


def translations() -> Dataset:
    rows = texts().select_columns("input_ids")
    return rows.add_column("labels", [list(range(3, 4 + number)) for number in range(NUM_ROWS)])


def fixed_texts() -> Dataset:
    """Examples of one length."""
    rows = texts().remove_columns("special_tokens_mask")
    return rows.map(lambda row: {"input_ids": [*row["input_ids"], *[5] * 9][:9], "token_type_ids": [1] * 9})


CASES = {
    "default": (vectors, lambda side: default_data_collator),
    "default, as an object": (vectors, lambda side: DefaultDataCollator()),
    "texts": (texts, lambda side: DataCollatorWithPadding(tokenizer(side))),
    "texts, multiple of 4": (texts, lambda side: DataCollatorWithPadding(tokenizer(side), pad_to_multiple_of=4)),
    "texts, all of one length": (
        texts,
        lambda side: DataCollatorWithPadding(tokenizer(side), padding="max_length", max_length=11),
    ),
    "texts without padding": (fixed_texts, lambda side: DataCollatorWithPadding(tokenizer(side), padding=False)),
    "tags": (tagged, lambda side: DataCollatorForTokenClassification(tokenizer(side))),
    "translations": (translations, lambda side: DataCollatorForSeq2Seq(tokenizer(side), pad_to_multiple_of=2)),
    "causal": (tagged, lambda side: CausalCollator(pad_token_id=4)),
    "causal without mask": (tagged, lambda side: CausalCollator(pad_token_id=4, with_attention_mask=False)),
}

# Batches of one example, with repeated examples, in any order, of all examples.
BATCHES = [[3], [4], [4, 3], [5, 1], [7, 7, 0, 3], list(range(NUM_ROWS)), [11, 2], [3], [8, 6, 10]]


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert list(found) == list(expected)
    for name in expected:
        assert found[name].dtype == expected[name].dtype, name
        assert found[name].stride() == expected[name].stride(), name
        assert torch.equal(found[name], expected[name]), name


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The positions of all examples that are read from a `datasets.Dataset`, in order."""
    found: list[int] = []
    original = Dataset.__getitem__

    def counted(self: Dataset, key: Any) -> Any:
        found.extend(range(len(self))[key] if isinstance(key, slice) else key if isinstance(key, list) else [key])
        return original(self, key)

    monkeypatch.setattr(Dataset, "__getitem__", counted)
    yield found


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("format", [None, "numpy", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_batches_equal_those_of_the_collator(case, format, side):
    build, collator_of = CASES[case]
    dataset, collator, rows = build().with_format(format), collator_of(side), ResidentRows()
    assert is_pure(collator)
    for batch in BATCHES:
        expected = collator([dataset[row] for row in batch])
        assert_same(rows.batch(dataset, torch.tensor(batch), collator), expected)
        assert_same(collator(read_rows(dataset, batch)), expected)
    assert rows.num_bytes > 0
    many = BATCHES * 3
    for known in (rows, ResidentRows()):
        for batch, found in zip(many, known.batches(dataset, many, collator), strict=True):
            assert_same(found, collator([dataset[row] for row in batch]))


@pytest.mark.parametrize("case", CASES)
def test_each_row_is_read_once(case, reads):
    build, collator_of = CASES[case]
    dataset, collator, rows = build(), collator_of("right"), ResidentRows()
    reads.clear()
    rows.batch(dataset, [4, 2], collator)
    assert sorted(reads) == [2, 4]
    for _ in range(3):
        for batch in BATCHES:
            rows.batch(dataset, batch, collator)
    assert sorted(reads) == list(range(NUM_ROWS))


def test_datasets_with_the_same_content_share_their_rows(reads):
    """Each client drops the labels of the public examples, which creates another object."""
    public, rows = texts(), ResidentRows()
    clients = [public.remove_columns("label") for _ in range(10)]
    reads.clear()
    for client in clients:
        rows.batch(client, range(NUM_ROWS), DataCollatorWithPadding(tokenizer()))
    assert reads == list(range(NUM_ROWS))
    # Token IDs, types, special tokens and the attention mask, each with one padding value.
    assert rows.num_bytes == 4 * 8 * (1 + sum(map(len, public["input_ids"])))


def test_rows_are_dropped_with_the_last_dataset_that_has_them():
    public, rows, collator = texts(), ResidentRows(), DataCollatorWithPadding(tokenizer())
    first, second = public.remove_columns("label"), public.remove_columns("label")
    for dataset in (first, second):
        rows.batch(dataset, [0], collator)
    del first, dataset
    assert rows.num_bytes > 0
    del second
    assert rows.num_bytes == 0


def test_other_rows_at_the_same_place_are_read_again():
    """Python gives the address of a deleted object to a new object."""
    rows = ResidentRows()
    for seed in range(20):
        dataset = Dataset.from_dict({"x": [[float(seed)]]})
        assert rows.batch(dataset, [0], default_data_collator)["x"].item() == seed
        del dataset


def test_a_changed_dataset_gives_the_changed_rows():
    dataset, rows = vectors().select_columns("x"), ResidentRows()
    rows.batch(dataset, [0], default_data_collator)
    dataset.set_format("torch", dtype=torch.float64)
    assert_same(rows.batch(dataset, [0], default_data_collator), default_data_collator([dataset[0]]))
    shuffled = dataset.shuffle(seed=1)
    assert_same(rows.batch(shuffled, [0], default_data_collator), default_data_collator([shuffled[0]]))


@pytest.mark.parametrize("padding", [True, "max_length"])
def test_changed_settings_of_the_tokenizer_take_effect(padding):
    dataset, rows = texts(), ResidentRows()
    collator = DataCollatorWithPadding(tokenizer(), padding, max_length=10)
    for change in ({"padding_side": "left"}, {"pad_token": "w3"}, {"model_input_names": ["input_ids"]}):
        rows.batch(dataset, [0, 1, 2], collator)
        for name, value in change.items():
            setattr(collator.tokenizer, name, value)
        assert_same(rows.batch(dataset, [0, 1, 2], collator), collator([dataset[row] for row in (0, 1, 2)]))


def test_changing_a_batch_does_not_change_the_rows():
    dataset, rows = vectors(), ResidentRows()
    for _ in range(2):
        batch = rows.batch(dataset, [1, 2], default_data_collator)
        assert_same(batch, default_data_collator([dataset[1], dataset[2]]))
        batch["x"].zero_()


@pytest.mark.parametrize("case", ["default", "texts"])
def test_rows_that_are_read_in_inference_mode_serve_later_training(case):
    build, collator_of = CASES[case]
    dataset, collator, rows = build(), collator_of("right"), ResidentRows()
    with torch.inference_mode():
        assert_same(rows.batch(dataset, [0, 1], collator), collator([dataset[0], dataset[1]]))
    for batch in BATCHES:
        found = rows.batch(dataset, batch, collator)
        assert_same(found, collator([dataset[row] for row in batch]))
        assert not any(value.is_inference() for value in found.values())


def test_a_default_device_applies_to_the_batch():
    dataset, rows = vectors(), ResidentRows()
    for _ in range(2):
        with torch.device("meta"):
            batch = rows.batch(dataset, [0, 1], default_data_collator)
        assert {value.device.type for value in batch.values()} == {"meta"}
    assert_same(rows.batch(dataset, [0, 1], default_data_collator), default_data_collator([dataset[0], dataset[1]]))


def masking(**kwargs: Any) -> DataCollatorForLanguageModeling:
    return DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.5, **kwargs)


class SubclassOfPureCollator(DataCollatorWithPadding):
    pass


def replaced_method() -> Any:
    collator = DataCollatorForTokenClassification(tokenizer())
    collator.torch_call = lambda features: None
    return collator


@pytest.mark.parametrize(
    "collator",
    [
        pytest.param(masking(), id="masks tokens"),
        pytest.param(SubclassOfPureCollator(tokenizer()), id="subclass"),
        pytest.param(lambda features: default_data_collator(features), id="function"),
        pytest.param(replaced_method(), id="replaced method"),
        pytest.param(DefaultDataCollator(return_tensors="np"), id="numpy"),
        pytest.param(DataCollatorWithPadding(tokenizer(kind=TokenizerWithOwnPadding)), id="own padding"),
        pytest.param(DataCollatorForSeq2Seq(tokenizer(), model=torch.nn.Identity()), id="with a model"),
        pytest.param(CausalCollator(0, continue_prompts=True), id="side depends on the batch"),
    ],
)
def test_other_collators_are_not_pure(collator):
    assert not is_pure(collator)


def test_a_collator_that_draws_random_numbers_runs_for_each_batch():
    dataset, rows, collator = texts().select_columns("input_ids"), ResidentRows(), masking()
    torch.manual_seed(0)
    expected = [collator([dataset[row] for row in (0, 1, 2)]) for _ in range(4)]
    torch.manual_seed(0)
    found = [rows.batch(dataset, [0, 1, 2], collator) for _ in range(4)]
    for batch, one in zip(found, expected, strict=True):
        assert_same(batch, one)
    assert any(not torch.equal(found[0]["input_ids"], batch["input_ids"]) for batch in found)
    assert rows.num_bytes == 0


def test_a_transform_that_draws_random_numbers_runs_for_each_access():
    draws = iter(range(100))

    def transform(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        number = float(next(draws))
        return {"x": [[number] for _ in batch["x"]]}

    dataset, rows = vectors().with_transform(transform), ResidentRows()
    assert rows.batch(dataset, [4, 4], default_data_collator)["x"].tolist() == [[0.0], [1.0]]
    assert rows.batch(dataset, [4, 4], default_data_collator)["x"].tolist() == [[2.0], [3.0]]


def test_a_torch_dataset_is_read_for_each_batch():
    class Augmented(torch.utils.data.Dataset):
        num_reads = 0

        def __getitem__(self, index: int) -> dict[str, Any]:
            self.num_reads += 1
            return {"x": torch.tensor([index, self.num_reads])}

    dataset, rows = Augmented(), ResidentRows()
    for expected in ([[3, 1], [1, 2]], [[3, 3], [1, 4]]):
        assert rows.batch(dataset, [3, 1], default_data_collator)["x"].tolist() == expected


UNEQUAL = {
    "missing value": {"x": [1, 2, None, 4], "label": [0, 1, 0, 1]},
    "missing label": {"x": [1, 2, 3, 4], "label": [0, 1, None, 1]},
    "other shape": {"x": [[1], [2], [3, 3], [4]]},
    "empty list": {"x": [[], [], [1], [2]]},
}


@pytest.mark.parametrize("first", [[0, 1], [2], [2, 3], [3]])
@pytest.mark.parametrize("case", UNEQUAL)
def test_rows_that_one_tensor_cannot_hold_are_collated_for_each_batch(case, first):
    """The collator's batches, and its errors, depend on the first example of a batch."""
    dataset, rows = Dataset.from_dict(UNEQUAL[case]), ResidentRows()

    def outcome(function: Any) -> Any:
        try:
            return function()
        except Exception as error:
            return type(error), str(error)

    for batch in (first, [3], [0, 1], [2], [0, 2], [2, 3], [3, 2, 1], [0]):
        found = outcome(lambda batch=batch: rows.batch(dataset, batch, default_data_collator))
        expected = outcome(lambda batch=batch: default_data_collator([dataset[row] for row in batch]))
        if isinstance(expected, tuple):
            assert found == expected
        else:
            assert_same(found, expected)


def test_labels_of_another_length_are_collated_for_each_batch():
    dataset = tagged().map(lambda row: {"labels": [*row["labels"], 7]})
    rows, collator = ResidentRows(), DataCollatorForTokenClassification(tokenizer())
    assert_same(rows.batch(dataset, [2], collator), collator([dataset[2]]))
    with pytest.raises(ValueError, match="length"):
        rows.batch(dataset, [0, 1, 2], collator)


def test_labels_that_are_longer_than_their_text_are_collated_for_each_batch():
    """Next to a longer text, the collator accepts them."""
    examples = {"input_ids": [[3, 4], [3, 4, 5, 6], [7]], "labels": [[1, 1, 1], [2, 2, 2, 2], [3]]}
    rows, collator = ResidentRows(), DataCollatorForTokenClassification(tokenizer())
    dataset = Dataset.from_dict(examples)
    for batch in ([0, 1], [2, 1], [1, 2, 0]):
        assert_same(rows.batch(dataset, batch, collator), collator([dataset[row] for row in batch]))


def test_empty_texts_are_collated_for_each_batch():
    dataset = Dataset.from_dict({"input_ids": [[3], [], [4, 5]], "attention_mask": [[1], [], [1, 1]]})
    rows, collator = ResidentRows(), DataCollatorWithPadding(tokenizer())
    for batch in ([0, 1, 2], [1], [2, 1]):
        assert_same(rows.batch(dataset, batch, collator), collator([dataset[row] for row in batch]))


@pytest.mark.parametrize("num_uses", [0, 1])
def test_a_missing_padding_token_raises_the_error_of_the_tokenizer(num_uses):
    rows, dataset, collator = ResidentRows(), texts(), DataCollatorWithPadding(tokenizer())
    for _ in range(num_uses):
        rows.batch(dataset, [0, 1], collator)
    collator.tokenizer.pad_token = None
    with pytest.raises(ValueError, match="does not have a padding token"):
        rows.batch(dataset, [0, 1], collator)


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="the installed version of datasets has no JSON columns")
def test_json_values_are_collated_for_each_batch():
    """Their type differs between rows, so the type of a tensor depends on the batch."""
    features = datasets.Features({"x": datasets.Json()})
    rows, dataset = ResidentRows(), Dataset.from_dict({"x": [1, 2.5, 3]}, features=features)
    for batch in ([0, 1], [0], [2, 0]):
        assert_same(
            rows.batch(dataset, batch, default_data_collator), default_data_collator([dataset[row] for row in batch])
        )


def numbered(seed: int) -> Dataset:
    """Ten rows of 80 bytes."""
    return Dataset.from_dict({"x": [[10 * seed + row] * 10 for row in range(10)]})


def test_rows_that_exceed_the_budget_are_not_kept(reads):
    rows, dataset = ResidentRows(max_bytes=799), numbered(0)
    for _ in range(2):
        assert rows.batch(dataset, [3], default_data_collator)["x"].tolist() == [[3] * 10]
    assert reads == [3, 3, 3]  # the first batch shows the size of the rows
    assert rows.num_bytes == 0


def test_the_least_recently_used_rows_are_dropped(reads):
    rows, examples = ResidentRows(max_bytes=1700), [numbered(seed) for seed in range(3)]
    for number in (0, 1, 0, 2, 0, 1):
        rows.batch(examples[number], [0], default_data_collator)
        assert rows.num_bytes <= rows.max_bytes
    # Rows 1 made room for rows 2, and were read again.
    assert len(reads) == 4


def test_without_a_budget_no_rows_are_kept(reads):
    rows, dataset = ResidentRows(max_bytes=0), numbered(0)
    for _ in range(2):
        rows.batch(dataset, [0, 5], default_data_collator)
    assert reads == [0, 5, 0, 5]


def test_threads_get_the_same_batches():
    dataset, rows, collator = texts(), ResidentRows(), DataCollatorWithPadding(tokenizer())
    expected = [collator([dataset[row] for row in batch]) for batch in BATCHES]
    found: list[list[BatchEncoding]] = [[] for _ in range(4)]

    def read(results: list[BatchEncoding]) -> None:
        results.extend(rows.batch(dataset, batch, collator) for batch in BATCHES)

    threads = [threading.Thread(target=read, args=[results]) for results in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results in found:
        for batch, one in zip(results, expected, strict=True):
            assert_same(batch, one)


def test_deletions_during_other_uses_are_counted():
    """Garbage collection deletes datasets in any thread, also while another thread reads rows."""
    rows = ResidentRows(max_bytes=4000)

    def read(first: int) -> None:
        for seed in range(first, first + 20):
            dataset = numbered(seed)
            assert rows.batch(dataset, [3], default_data_collator)["x"][0, 0] == 10 * seed + 3

    threads = [threading.Thread(target=read, args=[first]) for first in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rows.num_bytes == 0
