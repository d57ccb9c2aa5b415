"""A client with a stream continues in each round after the last example of its previous round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset
from federations import build_federation
from packaging.version import Version
from tiny import arguments, rows, same_weights, tiny_model
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback

from hf_federated import FederatedCallback, FederatedConfig, FederatedDataset, FederatedTrainer
from hf_federated._compat import has_exact_state
from hf_federated.clients.streams import ClientStream
from hf_federated.messages.serialization import pack, unpack


NUM_EXAMPLES = 22
BATCH_SIZE = 4


class TorchStream(IterableDataset):
    """A stream of torch that always starts at its first example."""

    def __init__(self, examples: Dataset) -> None:
        self.examples = examples

    def __iter__(self) -> Iterator[Any]:
        yield from self.examples


class TorchStreamWithState(TorchStream):
    """A stream of torch that saves and loads its position."""

    def __init__(self, examples: Dataset) -> None:
        super().__init__(examples)
        self.start = self.index = 0
        self.loaded: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for index in range(start, len(self.examples)):
            self.index = index + 1
            yield self.examples[index]

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["index"]
        self.loaded.append(self.start)


def upper(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"input_ids": [[token % 31 + 1 for token in tokens] for tokens in batch["input_ids"]]}


STREAMS = {
    "one shard": lambda: rows(NUM_EXAMPLES).to_iterable_dataset(),
    "shards": lambda: rows(NUM_EXAMPLES).to_iterable_dataset(num_shards=3),
    "mapped": lambda: rows(NUM_EXAMPLES).to_iterable_dataset(num_shards=2).map(upper, batched=True, batch_size=5),
    "filtered": lambda: rows(40).to_iterable_dataset().filter(lambda row: row["input_ids"][1] % 2 == 0),
    "shuffled": lambda: rows(NUM_EXAMPLES).to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=7),
    "torch": lambda: TorchStream(rows(NUM_EXAMPLES)),
    "torch with state": lambda: TorchStreamWithState(rows(NUM_EXAMPLES)),
}


class BatchRecorder(TrainerCallback):
    """Records the tokens of every batch that a model receives in training."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.batches: list[list[list[int]]] = []
        model.register_forward_pre_hook(self.record, with_kwargs=True)

    def record(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if model.training:
            self.batches.append(kwargs["input_ids"].tolist())


def model_without_dropout() -> Any:
    """A round starts an iteration of the data loader, which draws a number, so dropout masks differ from one run."""
    return tiny_model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def plain_batches(tmp_path: Any, stream: Any, max_steps: int, **kwargs: Any) -> tuple[Any, list[Any]]:
    model = model_without_dropout()
    recorder = BatchRecorder(model)
    Trainer(model, arguments(tmp_path / "plain", max_steps=max_steps, **kwargs), train_dataset=stream).train()
    return model, recorder.batches


def federated_batches(tmp_path: Any, stream: Any, num_rounds: int, **kwargs: Any) -> tuple[Any, list[Any], Any]:
    model = model_without_dropout()
    recorder = BatchRecorder(model)
    trainer = FederatedTrainer(
        model,
        arguments(tmp_path / "federated", **kwargs),
        train_dataset=stream,
        federation=FederatedConfig(num_rounds=num_rounds, local_steps=2, client_optimizer_state="carry"),
    )
    trainer.train()
    return model, recorder.batches, trainer


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.sampled(5)
def test_rounds_over_one_stream_equal_the_plain_trainer(tmp_path, name, accumulation):
    """Seven rounds of two steps go through the stream of 22 examples more than twice."""
    options = {"gradient_accumulation_steps": accumulation}
    plain, expected = plain_batches(tmp_path, STREAMS[name](), max_steps=14, **options)
    federated, found, _ = federated_batches(tmp_path, STREAMS[name](), num_rounds=7, **options)
    assert found == expected
    assert same_weights(plain, federated)
    if name not in ("filtered", "shuffled", "mapped"):
        every_row = rows(NUM_EXAMPLES)["input_ids"][:]
        assert [row for batch in found for row in batch][:NUM_EXAMPLES] == every_row


def test_stream_with_state_is_not_read_again(tmp_path):
    stream = TorchStreamWithState(rows(NUM_EXAMPLES))
    loaded = stream.loaded
    federated_batches(tmp_path, stream, num_rounds=3)
    assert loaded == [8, 16]  # two batches of four in each of the first two rounds


def test_each_client_continues_in_its_own_stream(tmp_path):
    data = {name: rows(NUM_EXAMPLES, seed) for seed, name in enumerate(("north", "south"))}
    model = tiny_model()
    recorder = BatchRecorder(model)
    trainer = build_federation(
        tmp_path,
        {name: examples.to_iterable_dataset() for name, examples in data.items()},
        num_rounds=2,
        federation={"local_steps": 2},
        trainer={"model": model},
    )
    trainer.train()
    tokens = {name: examples["input_ids"][:] for name, examples in data.items()}
    expected = [tokens[name][start : start + 4] for first in (0, 8) for name in tokens for start in (first, first + 4)]
    assert recorder.batches == expected


def test_positions_are_the_state_of_the_client_and_hold_only_plain_values(tmp_path):
    _, _, trainer = federated_batches(tmp_path, rows(NUM_EXAMPLES).to_iterable_dataset(), num_rounds=3)
    kept = trainer.engine.worker.models.store.get("0")["stream"]
    # Three rounds of two batches: the 22 examples have six batches, of which the last has two examples.
    assert (kept["epoch"], kept["num_examples"]) == (1, 0)
    assert unpack(pack(kept)) == kept


class CountRecorder(FederatedCallback):
    """Records the number of examples of each update, by client."""

    def __init__(self) -> None:
        self.num_examples: dict[str, list[int]] = {}

    def on_client_end(self, args: Any, state: Any, control: Any, update: Any, **kwargs: Any) -> None:
        self.num_examples.setdefault(update.client_id, []).append(update.num_examples)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_update_of_a_stream_counts_the_examples_of_its_batches(tmp_path, accumulation):
    """The average weights the updates by these numbers. The last batch before the end of a stream is smaller."""
    recorder = CountRecorder()
    trainer = build_federation(
        tmp_path,
        {"short": rows(6).to_iterable_dataset(), "long": rows(100, seed=1).to_iterable_dataset()},
        num_rounds=2,
        federation={"local_steps": 3},
        trainer={"callbacks": [recorder]},
        gradient_accumulation_steps=accumulation,
    )
    trainer.train()
    # Batches of the short stream: 4, 2, 4 in the first round and 2, 4, 2 in the second one. With two batches per step,
    # each step takes an epoch.
    short = [10, 8] if accumulation == 1 else [18, 18]
    assert recorder.num_examples == {"short": short, "long": [12 * accumulation] * 2}


def test_stream_of_datasets_is_not_read_again_if_its_state_is_exact():
    exact = Version(datasets.__version__).release >= (5, 2)
    for name in ("one shard", "shards", "mapped", "filtered"):
        assert has_exact_state(STREAMS[name]()) == exact
        stream = ClientStream("a", STREAMS[name]())
        next(stream.batches(torch.utils.data.DataLoader(stream, batch_size=BATCH_SIZE)))
        assert (stream.position()["state"] is not None) == exact
    shuffled = STREAMS["shuffled"]()
    for stream in (shuffled, shuffled.map(upper, batched=True), datasets.concatenate_datasets([shuffled, shuffled])):
        assert not has_exact_state(stream)


@pytest.mark.parametrize(
    ("client_store", "name"),
    [
        *(("disk", name) for name in ("shards", "shuffled", "torch", "torch with state")),
        ("memory", "shards"),
        *(pytest.param("memory", name, marks=pytest.mark.slow) for name in ("shuffled", "torch", "torch with state")),
    ],
)
@pytest.mark.sampled(2)
def test_resumed_run_reads_the_same_examples(tmp_path, name, client_store):
    def build(directory: Any, num_rounds: int) -> FederatedTrainer:
        return build_federation(
            directory,
            {"a": STREAMS[name](), "b": STREAMS["mapped"]()},
            num_rounds=num_rounds,
            federation={"local_steps": 2, "client_store": client_store, "clients_per_round": 1},
            save_strategy="epoch",
            lr_scheduler_type="constant",
        )

    whole = build(tmp_path / "whole", 6)
    whole.train()
    build(tmp_path / "parts", 3).train()
    resumed = build(tmp_path / "parts", 6)
    resumed.train(resume_from_checkpoint=True)
    assert same_weights(whole.model, resumed.model)


def test_failed_client_reads_the_same_examples_again(tmp_path):
    """A failed training leaves the position unchanged, as all other state of the client."""
    model = tiny_model()
    recorder = BatchRecorder(model)

    class FailsOnce(TrainerCallback):
        num_steps = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.num_steps += 1
            if self.num_steps == 2:
                raise RuntimeError("out of memory")

    trainer = FederatedTrainer(
        model,
        arguments(tmp_path),
        train_dataset={"a": TorchStream(rows(12)), "b": TorchStream(rows(12))},
        federation=FederatedConfig(num_rounds=3, local_steps=1, clients_per_round=2, min_clients=1),
        client_callbacks=[FailsOnce()],
    )
    trainer.train()
    tokens = rows(12)["input_ids"][:]
    # The clients take turns, and "b" fails after its batch in the first round.
    assert recorder.batches[0::2] == [tokens[0:4], tokens[4:8], tokens[8:12]]
    assert recorder.batches[1::2] == [tokens[0:4], tokens[0:4], tokens[4:8]]


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (rows(8).to_iterable_dataset().filter(lambda row: False), "The stream of client 'empty' has no example"),
        (TorchStream(rows(8).select([])), "The stream of client 'empty' has no example"),
    ],
    ids=["datasets", "torch"],
)
def test_stream_without_examples_fails_with_the_name_of_its_client(tmp_path, caplog, stream, words):
    trainer = build_federation(
        tmp_path,
        {"empty": stream, "full": rows(8).to_iterable_dataset()},
        federation={"local_steps": 1, "min_clients": 1},
    )
    trainer.train()
    assert words in caplog.text


def test_workers_that_read_the_stream_are_refused(tmp_path):
    with pytest.raises(ValueError, match="dataloader_num_workers=2, but client 'a' has a stream.*Set `dataload"):
        build_federation(
            tmp_path,
            {"a": rows(8).to_iterable_dataset()},
            federation={"local_steps": 1},
            dataloader_num_workers=2,
        )


def test_stream_of_torch_needs_local_steps(tmp_path):
    with pytest.raises(ValueError, match="Client 'a' has a stream .*Set `local_steps`"):
        build_federation(tmp_path, {"a": TorchStream(rows(8))})


# ---- A stream of all clients


def site_stream() -> datasets.IterableDataset:
    examples = rows(NUM_EXAMPLES)
    sites = [["north", "south", "east"][number % 3] for number in range(NUM_EXAMPLES)]
    return examples.add_column("site", sites).to_iterable_dataset()


def test_from_column_splits_a_stream_into_clients():
    clients = FederatedDataset.from_column(site_stream(), "site", clients=["south", "north"])
    assert list(clients) == ["south", "north"] and clients.num_rows == {"south": None, "north": None}
    assert clients.column_names == ["input_ids", "labels"]
    tokens = rows(NUM_EXAMPLES)["input_ids"][:]
    assert [row["input_ids"] for row in clients["south"]] == tokens[1::3]
    kept = FederatedDataset.from_column(site_stream(), "site", clients=["north"], keep_column=True)
    assert {row["site"] for row in kept["north"]} == {"north"}


@pytest.mark.parametrize("format", ["torch", "numpy"])
def test_from_column_splits_a_stream_of_tensors(format):
    examples = rows(NUM_EXAMPLES).add_column("site", [number % 3 for number in range(NUM_EXAMPLES)])
    stream = examples.to_iterable_dataset().with_format(format)
    clients = FederatedDataset.from_column(stream, "site", clients=["2", "0"])
    tokens = examples["input_ids"][:]
    assert [row["input_ids"].tolist() for row in clients["2"]] == tokens[2::3]


def test_from_column_selects_and_orders_the_clients_of_a_dataset():
    whole = Dataset.from_dict({"site": [3, 1, 2, 1], "text": list("abcd")})
    clients = FederatedDataset.from_column(whole, "site", clients=["2", "1"])
    assert {i: clients[i]["text"][:] for i in clients} == {"2": ["c"], "1": ["b", "d"]}
    with pytest.raises(KeyError, match="no client '4'"):
        FederatedDataset.from_column(whole, "site", clients=["4"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, r"values of 'site' in an IterableDataset are unknown.*clients=\["),
        ({"clients": ["north"], "min_rows": 2}, "min_rows=2, but the number of rows"),
        ({"clients": []}, "the list of ids is empty"),
        ({"clients": ["a", "a"]}, "'a' occurs twice"),
    ],
    ids=str,
)
def test_invalid_arguments_for_a_stream_raise_value_error(arguments, words):
    with pytest.raises(ValueError, match=words):
        FederatedDataset.from_column(site_stream(), "site", **arguments)


def test_missing_column_of_a_stream_raises_value_error():
    with pytest.raises(ValueError, match="no column 'ward'. The columns are: input_ids, labels, site"):
        FederatedDataset.from_column(site_stream(), "ward", clients=["a"])


def test_clients_of_one_stream_train_on_their_own_rows(tmp_path):
    model = tiny_model()
    recorder = BatchRecorder(model)
    clients = FederatedDataset.from_column(site_stream(), "site", clients=["north", "south"])
    build_federation(tmp_path, clients, num_rounds=1, federation={"local_steps": 1}, trainer={"model": model}).train()
    tokens = rows(NUM_EXAMPLES)["input_ids"][:]
    assert recorder.batches == [tokens[0::3][:4], tokens[1::3][:4]]
    assert np.shape(recorder.batches) == (2, BATCH_SIZE, 6)
