"""A distillation with kept public rows ends in the bytes of a distillation that reads them for each batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from datasets import Dataset
from distillation_setup import Recorder, distillation_trainer, same_clients
from tagging_setup import tagging_trainer
from tiny import rows, same_weights
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast

from hf_federated.clients.resident_rows import RESIDENT_ROWS
from hf_federated.distillation import PublicRows
from hf_federated.messages import public_order


NUM_PUBLIC, NUM_LABELED = 11, 7


def unequal(num_rows: int, seed: int) -> Dataset:
    """Examples of two to six tokens, with labels."""
    return rows(num_rows, seed).map(lambda row, index: {"input_ids": row["input_ids"][: 2 + index % 5]}, True)


def padding() -> DataCollatorWithPadding:
    tokenizer = Tokenizer(WordLevel({"<pad>": 0, "<unk>": 1}, unk_token="<unk>"))
    return DataCollatorWithPadding(PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>"))


def masking_at_random(features: list[dict[str, Any]]) -> dict[str, Any]:
    """Pad, and replace a quarter of the tokens."""
    batch = padding()(features)
    batch["input_ids"] = batch["input_ids"].masked_fill(torch.rand(batch["input_ids"].shape) < 0.25, 1)
    return batch


def texts_trainer(output_dir: Any, method: str, kwargs: dict[str, Any] | None = None, **settings: Any) -> Any:
    defaults: dict[str, Any] = {
        "train_dataset": {"a": unequal(5, 1), "b": unequal(6, 2)},
        "public_dataset": unequal(NUM_PUBLIC, 5).remove_columns("labels"),
        "server_dataset": unequal(NUM_LABELED, 6),
        "data_collator": padding(),
        "federation": {"num_rounds": 1, "local_epochs": 1},
        "different_models": False,
        "eval_dataset": None,
    }
    if method == "feddrs":
        del defaults["public_dataset"], defaults["server_dataset"]
    return distillation_trainer(output_dir, method, kwargs, **{**defaults, **settings})


def run(budget: int, build: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[bytes]]:
    """Train with a budget for kept rows. Return the trainer and all replies of the clients."""
    record, before = Recorder(), RESIDENT_ROWS.max_bytes
    RESIDENT_ROWS.max_bytes = budget
    try:
        trainer = build(*args, record=record, **kwargs)
        trainer.train()
    finally:
        RESIDENT_ROWS.max_bytes = before
        RESIDENT_ROWS.clear()
    # The server draws a new nonce for each request.
    replies = [dataclasses.replace(reply, nonce="") for reply in record.received]
    return trainer, [reply.to_bytes() for reply in replies]


CASES = {
    "DS-FL": (texts_trainer, "dsfl", {}, {}),
    "FedID": (texts_trainer, "fedid", {}, {}),
    "AdaFD": (texts_trainer, "adafd", {"weighting": "enwc"}, {}),
    "FedMD": (texts_trainer, "fedmd", {}, {}),
    "tags": (tagging_trainer, "dsfl", {}, {}),
    "random collator": (texts_trainer, "fedid", {}, {"data_collator": masking_at_random}),
    # The public examples take 688 bytes and those of the server 472, so they replace each other.
    "small budget": (texts_trainer, "fedid", {}, {"budget": 800}),
}
MORE_CASES = {
    "FedDRS": (texts_trainer, "feddrs", {"num_samples": 4, "sample_length": 5, "num_steps": 2}, {}),
    "FedDF": (texts_trainer, "feddf", {}, {}),
    "FedED": (texts_trainer, "feded", {}, {}),
    "FedAUX": (texts_trainer, "fedaux", {}, {}),
    "FedKD": (texts_trainer, "fedkd", {}, {}),
    "MHAT": (texts_trainer, "mhat", {}, {}),
    "Cronus": (texts_trainer, "cronus", {}, {}),
    "feedback on labels": (texts_trainer, "fedid", {"feedback": "mpl"}, {}),
    "FedID on tags": (tagging_trainer, "fedid", {}, {}),
}


def check_bit_identity(tmp_path: Any, build: Any, method: str, kwargs: dict[str, Any], settings: Any) -> None:
    budget = settings.pop("budget", RESIDENT_ROWS.max_bytes)
    kept, replies = run(budget, build, tmp_path / "kept", method, kwargs, **settings)
    read, expected = run(0, build, tmp_path / "read", method, kwargs, **settings)
    assert replies == expected
    assert same_weights(kept.model, read.model)
    assert same_clients(kept, read)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(4)
def test_kept_rows_do_not_change_a_bit(tmp_path, case):
    build, method, kwargs, settings = CASES[case]
    check_bit_identity(tmp_path, build, method, kwargs, dict(settings))


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_CASES)
def test_kept_rows_do_not_change_a_bit_of_other_methods(tmp_path, case):
    build, method, kwargs, settings = MORE_CASES[case]
    check_bit_identity(tmp_path, build, method, kwargs, dict(settings))


@pytest.mark.parametrize("method", ["dsfl", "fedid"])
def test_server_and_clients_read_each_public_row_once(tmp_path, monkeypatch, method):
    """They read it once together, in all rounds and epochs."""
    read: dict[int, list[int]] = {NUM_PUBLIC: [], NUM_LABELED: []}
    original = Dataset.__getitem__

    def counted(self: Dataset, key: Any) -> Any:
        if len(self) in read and not isinstance(key, str):
            read[len(self)].extend(key if isinstance(key, list) else [key])
        return original(self, key)

    trainer = texts_trainer(tmp_path, method, federation={"num_rounds": 2, "local_epochs": 1})
    monkeypatch.setattr(Dataset, "__getitem__", counted)
    trainer.train()
    assert sorted(read[NUM_PUBLIC]) == list(range(NUM_PUBLIC))
    assert len(set(read[NUM_LABELED])) == len(read[NUM_LABELED])
    assert bool(read[NUM_LABELED]) == (method == "fedid")


def test_mini_batches_follow_the_seed_of_their_epoch():
    """Changed indices, and a trace of the shapes of a run, leave no traces in the following mini-batches."""
    for seed in (3, 4, 5, None):
        with torch.device("meta"):
            assert PublicRows(2, 6, seed).indices(NUM_PUBLIC).shape == (4,)
        for _ in range(2):
            indices = PublicRows(2, 6, seed).indices(NUM_PUBLIC)
            assert torch.equal(indices, public_order(NUM_PUBLIC, seed)[2:6])
            indices.zero_()
