"""What a client announces when it joins: the sizes that its messages refer to."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset
from federations import setup_of
from language import language_model, sentences, tokenizer
from tiny import arguments, rows, tiny_model

from hf_federated import ClientSpec, FederatedConfig, FederatedDataset, FederatedTrainer, NetworkEngine
from hf_federated.messages import Announcement
from hf_federated.messages.validation import UpdateLimits
from hf_federated.tasks import LanguageModeling
from hf_federated.trainer.claim_limits import ClaimLimits
from hf_federated.trainer.join import JoinedClient, announcement_of


def announced(directory, client_id: str = "north", federation: Any = (), **kwargs: Any) -> Announcement:
    trainer = FederatedTrainer(
        **{"model": tiny_model(), "args": arguments(directory), "train_dataset": {"north": rows(6)}, **kwargs},
        federation=FederatedConfig(**{"num_rounds": 1, **dict(federation)}),
    )
    joined = JoinedClient(setup_of(trainer), trainer.args, client_id, None)
    return announcement_of(joined.setup, trainer.args, client_id)


def test_client_announces_its_examples_and_its_batch(tmp_path):
    batches = arguments(tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=2)
    evaluation = FederatedDataset.from_dict({"north": rows(5)})
    assert announced(tmp_path, args=batches, eval_dataset=evaluation) == Announcement(6, 6, 5, examples_per_step=6)


def test_evaluation_examples_are_found_by_the_name_of_the_client(tmp_path):
    """The training examples of a plain dataset have no name."""
    evaluation = FederatedDataset.from_dict({"north": rows(5), "south": rows(4)})
    found = announced(tmp_path, "south", train_dataset=rows(6), eval_dataset=evaluation)
    assert (found.num_examples, found.num_eval_examples) == (6, 4)


def test_stream_is_announced_without_a_number(tmp_path):
    stream = {"north": rows(6).to_iterable_dataset()}
    found = announced(tmp_path, federation={"local_steps": 2}, train_dataset=stream)
    assert (found.num_examples, found.num_encoded_examples) == (None, None)


@pytest.mark.parametrize(
    ("method", "announces"), [("fedkd", True), ("feddrs", True), ("feddf", False), (None, False)], ids=str
)
def test_class_counts_are_announced_if_the_method_needs_them(tmp_path, method, announces):
    public = {"public_dataset": rows(4, seed=1)} if method in ("fedkd", "feddf") else {}
    options = {"distillation_kwargs": {"sample_length": 4}} if method == "feddrs" else {}
    found = announced(tmp_path, federation={"distillation": method, **options}, **public)
    labels = rows(6)["labels"]
    assert found.class_counts == ([labels.count(0), labels.count(1)] if announces else None)


def test_client_with_own_arguments_announces_its_own_batch(tmp_path):
    spec = ClientSpec(args=arguments(tmp_path, per_device_train_batch_size=7))
    federation = {"distillation": "dsfl"}
    found = announced(tmp_path, federation=federation, public_dataset=rows(4, seed=1), clients={"north": spec})
    assert found.examples_per_step == 7


def test_packed_examples_limit_the_claims_of_a_client(tmp_path):
    """An update counts the packed examples, which the server cannot pack."""
    raw = Dataset.from_dict({"text": sentences("north", 9)})
    common = {"model": language_model(), "task": LanguageModeling(block_size=4), "processing_class": tokenizer()}
    found = announced(tmp_path, train_dataset={"north": raw}, **common)
    num_tokens = sum(len(text.split()) for text in raw["text"])
    assert found.num_examples == 9 and 9 != found.num_encoded_examples <= num_tokens // 3
    engine = NetworkEngine(["north"], address="127.0.0.1:0", insecure=True)
    server = FederatedTrainer(
        args=arguments(tmp_path), engine=engine, federation=FederatedConfig(num_rounds=1), **common
    )
    engine._announce("north", found)
    limits = ClaimLimits(setup_of(server), server.args, {"north": None})("north", None)
    assert limits.num_examples == found.num_encoded_examples


@pytest.mark.parametrize("num_examples", [1000, None], ids=["dataset", "stream"])
def test_batch_of_a_client_limits_its_claims(tmp_path, num_examples):
    """The batch of the server does not matter, because the batch sizes of the parties may differ."""
    engine = NetworkEngine(["north"], address="127.0.0.1:0", insecure=True)
    server = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path, per_device_train_batch_size=2),
        engine=engine,
        federation=FederatedConfig(num_rounds=1, local_steps=3),
    )
    engine._announce("north", Announcement(num_examples, num_examples, 0, examples_per_step=64))
    limits = ClaimLimits(setup_of(server), server.args, {"north": None})("north", None)
    # An example may have two sequences of 16 tokens. A stream may read the batches of two steps for one of them.
    num_seen = 3 * 64 * (1 if num_examples else 2)
    assert limits == UpdateLimits(num_examples or num_seen, 3, num_seen * 2 * 16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((-1, 8, 0, 4), "num_examples"),
        ((8, None, 0, 4), "both or none"),
        ((None, None, True, 4), "num_eval_examples"),
        ((8, 8, 0, 4, [5, 4]), "9 examples, but the client announces 8"),
        ((None, None, 0, 4, [1]), "1 examples, but the client announces None"),
        ((8, 8, 0, 4, [-1, 1]), "class_counts"),
        ((8, 8, 0, 4, [1] * 20_000), "class_counts"),
        ((8, 7, 0, 4, None, False, 2), "`num_dropped_examples` is 2, .* num_examples=8 and num_encoded_examples=7"),
        ((None, None, 0, 4, None, False, 1), "`num_dropped_examples` is 1, .* num_examples=None"),
        ((8, 7, 0, 4, None, False, -1), "num_dropped_examples"),
        ((None, None, 0, 4, None, True, 1), "`hides_counts` is True, .* num_dropped_examples=1"),
    ],
)
def test_contradictory_announcement_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Announcement.from_bytes(Announcement(*fields).to_bytes())
