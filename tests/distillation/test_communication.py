"""Number of values that each method sends, against the formulas of Ma et al. (FedID, EMNLP 2023), table 5.

There are `N` public examples, `C` classes, `K` clients and `T` rounds. A method whose clients send predictions and
receive the ensemble costs `N·C·(K+1)·T` values if a broadcast to all clients counts once. The ledger counts a
broadcast once for each client. The tests subtract the header of each message: a message has the format of safetensors,
which begins with the length of its header.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
from datasets import Dataset
from distillation_setup import (
    BATCH_SIZE,
    METHODS,
    NUM_CLASSES,
    NUM_PUBLIC,
    SHARED_MODEL,
    SIZES,
    Recorder,
    distillation_trainer,
)
from tiny import rows, tiny_model

from hf_federated.distillation import PredictionCodec, build_distillation
from hf_federated.messages import CLASS_COUNT, ClientUpdate, Message


NUM_CLIENTS, NUM_ROUNDS = len(SIZES), 2
NUM_VALUES = NUM_PUBLIC * NUM_CLASSES
FLOAT_BYTES = 4
NUM_PARAMETERS = sum(parameter.numel() for parameter in tiny_model().parameters())

# Number of values that each client receives in a round.
DOWN = {
    "adafd": NUM_VALUES,
    "cronus": NUM_VALUES,
    "dsfl": NUM_VALUES,
    "fedaux": NUM_PARAMETERS,
    "feddf": NUM_PARAMETERS,
    "feddrs": NUM_PARAMETERS,
    "feded": NUM_PARAMETERS,
    "fedkd": 0,
    "fedmd": NUM_VALUES,
    "mhat": NUM_VALUES,
    "chain_rule": 2 * NUM_VALUES,
    "per_example": NUM_VALUES + NUM_PUBLIC,
    "mpl_sampled": NUM_VALUES,
    "mpl": NUM_VALUES,
    "none": NUM_VALUES,
}

# Number of values that a client sends in a round, for methods that send parameters or scores of public examples.
UP = {
    "fedaux": NUM_VALUES + NUM_PARAMETERS + NUM_PUBLIC,
    "feddf": NUM_VALUES + NUM_PARAMETERS,
    "feddrs": NUM_PARAMETERS,
}


def trained(tmp_path, method, kwargs=None, num_rounds=NUM_ROUNDS, **trainer_kwargs):
    """Train with one local step per round and record the messages."""
    record = Recorder()
    federation = {"num_rounds": num_rounds, "local_epochs": 1, "local_steps": 1}
    trainer = distillation_trainer(
        tmp_path, method, kwargs, federation=federation, record=record, eval_dataset=None, **trainer_kwargs
    )
    trainer.train()
    return trainer, record


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Call `finished(method, kwargs)` to get the trainer and the recorder of a run, which tests only read."""
    runs = {}

    def run(method, kwargs):
        key = repr((method, build_distillation(method, kwargs).settings()))
        if key not in runs:
            num_rounds = 1 if method == "fedkd" else NUM_ROUNDS
            runs[key] = trained(tmp_path_factory.mktemp(method), method, kwargs, num_rounds)
        return runs[key]

    return run


def four_classes(num_rows, seed):
    tokens = rows(num_rows, seed)["input_ids"]
    return Dataset.from_dict({"input_ids": tokens, "labels": [row[0] % 4 for row in tokens]})


FOUR_CLASSES = {
    "model": tiny_model(num_labels=4),
    "client_model_init": lambda client_id: tiny_model(ord(client_id), num_labels=4),
    "train_dataset": {client_id: four_classes(size, ord(client_id)) for client_id, size in SIZES.items()},
    "server_dataset": four_classes(6, seed=6),
}


def header_bytes(message: Message) -> int:
    return 8 + int.from_bytes(message.to_bytes()[:8], "little")


def tensor_bytes(trainer, messages, round, client_id, direction) -> int:
    """Bytes that the ledger counted in a direction, without headers."""
    counted = trainer.ledger.account(round, client_id)[("down", "up").index(direction)]
    return counted - sum(
        header_bytes(message) for message in messages if (message.round, message.client_id) == (round, client_id)
    )


@pytest.mark.parametrize(("method", "kwargs"), METHODS)
@pytest.mark.sampled(6)
def test_number_of_sent_values_matches_the_formulas(finished, method, kwargs):
    num_rounds = 1 if method == "fedkd" else NUM_ROUNDS
    trainer, record = finished(method, kwargs)
    down = FLOAT_BYTES * DOWN[kwargs.get("feedback", method)]
    up = FLOAT_BYTES * UP.get(method, NUM_VALUES)
    for round in range(num_rounds):
        for client_id in SIZES:
            assert tensor_bytes(trainer, record.sent, round, client_id, "down") == down
            assert tensor_bytes(trainer, record.received, round, client_id, "up") == up
    assert len(trainer.ledger.rounds()) == num_rounds


def largest_headers(record) -> dict[type[Message], tuple[int, int, int]]:
    """The longest header of each type of message in the first round, with its numbers of tensors and class counts."""
    largest: dict[type[Message], tuple[int, int, int]] = {}
    for message in record.sent + record.received:
        if message.round > 0:
            continue
        blob = message.to_bytes()
        names = json.loads(blob[8 : header_bytes(message)])
        counts = sum(name.startswith(CLASS_COUNT) for name in getattr(message, "metrics", {}))
        size = (header_bytes(message), len(names), counts)
        largest[type(message)] = max(size, largest.get(type(message), size))
    return largest


@pytest.mark.parametrize(("method", "kwargs"), METHODS)
@pytest.mark.sampled(6)
def test_headers_do_not_grow_with_examples_or_classes(finished, tmp_path, method, kwargs):
    """Headers cannot hold values that the formulas leave out."""
    _, record = finished(method, kwargs)
    trainer_kwargs = FOUR_CLASSES | {"public_dataset": four_classes(2 * NUM_PUBLIC, seed=5)}
    if method in SHARED_MODEL:
        del trainer_kwargs["client_model_init"]
    if method == "feddrs":
        del trainer_kwargs["public_dataset"], trainer_kwargs["server_dataset"]
    _, larger = trained(
        tmp_path,
        method,
        kwargs,
        num_rounds=1,
        args={"per_device_train_batch_size": 2 * BATCH_SIZE},
        **trainer_kwargs,
    )
    before, after = largest_headers(record), largest_headers(larger)
    assert before.keys() == after.keys()
    for kind, (length, num_tensors, num_counts) in after.items():
        # Additional digits of shapes, offsets and other numbers, and the entries of class counts.
        allowed = 3 * num_tensors + 32 + 48 * (num_counts - before[kind][2])
        assert length - before[kind][0] <= allowed, kind


@pytest.mark.parametrize(
    ("method", "kwargs", "num_broadcasts"),
    [("mhat", {}, 1), ("dsfl", {}, 1), ("fedid", {"feedback": "none"}, 1), ("fedid", {}, 2)],
)
def test_number_of_values_matches_the_paper_when_broadcasts_count_once(finished, method, kwargs, num_broadcasts):
    trainer, record = finished(method, kwargs)
    total = sum(
        tensor_bytes(trainer, record.received, round, client_id, "up")
        for round in range(NUM_ROUNDS)
        for client_id in SIZES
    ) + sum(tensor_bytes(trainer, record.sent, round, "a", "down") for round in range(NUM_ROUNDS))
    assert total / FLOAT_BYTES == NUM_VALUES * (NUM_CLIENTS + num_broadcasts) * NUM_ROUNDS


def test_feddrs_costs_the_same_as_fedavg_plus_a_label_histogram(tmp_path):
    kwargs = next(kwargs for method, kwargs in METHODS if method == "feddrs")
    _, record = trained(tmp_path / "a", "feddrs", kwargs, num_rounds=1)
    without = {"different_models": False, "public_dataset": None, "server_dataset": None}
    _, plain = trained(tmp_path / "b", None, num_rounds=1, **without)
    assert [message.num_bytes for message in record.sent] == [message.num_bytes for message in plain.sent]
    for reply, averaged in zip(record.received, plain.received, strict=True):
        assert reply.metrics.keys() - averaged.metrics.keys() == {f"{CLASS_COUNT}{n}" for n in range(NUM_CLASSES)}
        # The histogram is in the header.
        with_histogram = dataclasses.replace(averaged, metrics={**reply.metrics, **averaged.metrics})
        assert reply.num_bytes == with_histogram.num_bytes


@pytest.mark.parametrize(
    "prediction",
    [
        {"prediction_dtype": "float16"},
        {"prediction_dtype": "bfloat16"},
        {"prediction_dtype": "int8"},
        {"top_k": 2},
        {"top_k": 1, "prediction_dtype": "int8"},
    ],
)
@pytest.mark.parametrize("method", ["dsfl", "fedid"])
@pytest.mark.sampled(4)
def test_compressed_predictions_have_the_size_that_the_codec_computes(tmp_path, method, prediction):
    trainer, record = trained(
        tmp_path,
        method,
        prediction,
        num_rounds=1,
        **FOUR_CLASSES,
    )
    codec = PredictionCodec(prediction.get("prediction_dtype", "float32"), prediction.get("top_k"))
    predictions = NUM_PUBLIC * codec.num_bytes({"logits": (1, 4)})
    # `top_k` does not apply to gradients.
    feedback = NUM_PUBLIC * codec.dense.num_bytes({"logits": (1, 4)}) if method == "fedid" else 0
    for client_id in SIZES:
        assert tensor_bytes(trainer, record.received, 0, client_id, "up") == predictions
        assert tensor_bytes(trainer, record.sent, 0, client_id, "down") == predictions + feedback
    assert predictions < NUM_PUBLIC * 4 * FLOAT_BYTES


def test_local_training_messages_contain_no_tensors(finished):
    _, record = finished("mhat", {})
    for message in record.sent + record.received:
        if message.kind in ("fit", ClientUpdate.kind):
            assert header_bytes(message) == message.num_bytes
