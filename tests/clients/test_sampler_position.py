"""With `local_steps`, a client continues in each round after its last batch, and reads epochs as `Trainer`."""

from __future__ import annotations

import gc
import math
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import arguments, same_weights, tiny_model
from torch.utils.data import DataLoader
from transformers import Trainer

from hf_federated import FederatedConfig, federate
from hf_federated.clients import ClientSampler
from hf_federated.messages.serialization import pack


BATCH_SIZE = 2


def numbered(start: int, num_rows: int) -> Dataset:
    """Examples whose first token is their number."""
    numbers = range(num_rows)
    columns = {"labels": [i % 2 for i in numbers], "length": [1 + i % 3 for i in numbers]}
    return Dataset.from_dict({"input_ids": [[start + i, 1, 2] for i in numbers], **columns})


CLIENTS = {"north": numbered(5, 7), "south": numbered(20, 5)}


class RecordingTrainer(Trainer):
    """Records the number of each example that it trains on."""

    read: list[list[int]]

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.read.append(inputs["input_ids"][:, 0].tolist())
        return super().training_step(model, inputs, num_items_in_batch)


class OwnSamplerTrainer(RecordingTrainer):
    """Shuffles with a sampler that has a generator and no epochs, as GRPO does."""

    def _get_train_sampler(self, train_dataset=None):
        return OwnSampler(len(self.train_dataset))


class OwnSampler(torch.utils.data.Sampler):
    def __init__(self, num_examples: int) -> None:
        self.num_examples = num_examples
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self):
        yield from torch.randperm(self.num_examples, generator=self.generator).tolist()

    def __len__(self) -> int:
        return self.num_examples


class OwnLoaderTrainer(RecordingTrainer):
    """Builds a data loader of torch that accelerate does not prepare."""

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset.remove_columns("length"), BATCH_SIZE, collate_fn=self.data_collator)


class Wrapped:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self):
        yield from self.loader

    def __len__(self) -> int:
        return len(self.loader)


class WrappedLoaderTrainer(OwnLoaderTrainer):
    def get_train_dataloader(self):
        return Wrapped(super().get_train_dataloader())


SEQUENTIAL = RecordingTrainer, {"train_sampling_strategy": "sequential"}
BY_LENGTH = RecordingTrainer, {"train_sampling_strategy": "group_by_length"}
UNSEEDED = RecordingTrainer, {"accelerator_config": {"use_seedable_sampler": False}}
OWN = OwnSamplerTrainer, {}
DEFAULT = RecordingTrainer, {}
SAMPLERS = {"default": DEFAULT, "sequential": SEQUENTIAL, "by length": BY_LENGTH, "unseeded": UNSEEDED, "own": OWN}
SAMPLERS |= {"own loader": (OwnLoaderTrainer, {}), "wrapped loader": (WrappedLoaderTrainer, {})}


def build(
    folder: Path,
    sampler: Any,
    clients: Any = CLIENTS,
    federation: Any = None,
    server_dataset: Any = None,
    **kwargs: Any,
) -> Any:
    base, args = sampler
    others = {} if server_dataset is None else {"server_dataset": server_dataset}
    trainer = (base if federation is None else federate(base))(
        model=tiny_model(),
        args=arguments(folder, per_device_train_batch_size=BATCH_SIZE, **{**args, **kwargs}),
        train_dataset=clients,
        **others,
        **({} if federation is None else {"federation": FederatedConfig(**federation)}),
    )
    trainer.read = []
    return trainer


@pytest.mark.parametrize(
    ("name", "local_steps", "accumulation"), [*((name, 3, 1) for name in SAMPLERS), ("own", 1, 1), ("own", 1, 2)]
)
@pytest.mark.sampled(4)
def test_every_example_is_read_before_a_client_starts_again(tmp_path, name, local_steps, accumulation) -> None:
    num_batches = math.ceil(len(CLIENTS["north"]) / BATCH_SIZE)
    num_rounds = math.ceil(num_batches / (local_steps * accumulation))
    federation = {"num_rounds": num_rounds, "local_steps": local_steps}
    trainer = build(tmp_path, SAMPLERS[name], federation=federation, gradient_accumulation_steps=accumulation)
    trainer.train()
    expected = {row["input_ids"][0] for client in CLIENTS.values() for row in client}
    assert {number for batch in trainer.read for number in batch} == expected


@pytest.mark.parametrize(
    ("name", "local_steps", "accumulation"),
    [
        ("default", 3, 1),
        # The last step of an epoch has one micro-batch: it ends a round, begins a round, and is a round.
        ("default", 3, 3),
        ("default", 2, 3),
        ("default", 1, 3),
        # A round has more than an epoch.
        ("by length", 5, 3),
        *((name, 2, 3) for name in SAMPLERS if name != "default"),
    ],
)
@pytest.mark.sampled(4)
def test_one_client_equals_the_plain_trainer(tmp_path, name, local_steps, accumulation) -> None:
    """The model has dropout, so a round must also leave the global generators as the plain trainer."""
    num_rounds = math.ceil(7 / local_steps)
    accumulate = {"gradient_accumulation_steps": accumulation}
    plain = build(tmp_path, SAMPLERS[name], CLIENTS["north"], max_steps=num_rounds * local_steps, **accumulate)
    plain.train()
    federation = {"num_rounds": num_rounds, "local_steps": local_steps, "client_optimizer_state": "carry"}
    federated = build(tmp_path, SAMPLERS[name], {"north": CLIENTS["north"]}, federation, **accumulate)
    federated.train()
    assert federated.read == plain.read
    assert same_weights(federated.model, plain.model)
    optimizer = federated.engine.worker.models.store.get("north")["optimizer"]
    assert pack(optimizer) == pack(plain.optimizer.state_dict())


def test_one_client_shuffles_each_epoch_as_the_plain_trainer(tmp_path) -> None:
    plain = build(tmp_path, OWN, CLIENTS["north"], num_train_epochs=3)
    plain.train()
    federated = build(tmp_path, OWN, {"north": CLIENTS["north"]}, {"num_rounds": 3})
    federated.train()
    assert federated.read == plain.read and len({str(plain.read[i : i + 4]) for i in (0, 4, 8)}) == 3


@pytest.mark.parametrize("name", ["default", "unseeded", "own"])
def test_resumed_client_continues_at_its_position(tmp_path, name) -> None:
    federation = {"num_rounds": 4, "local_steps": 3}
    whole = build(tmp_path, SAMPLERS[name], federation=federation, save_strategy="epoch")
    whole.train()
    resumed = build(tmp_path, SAMPLERS[name], federation=federation, save_strategy="epoch")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.read == whole.read[12:]
    assert same_weights(whole.model, resumed.model)


def test_training_on_the_examples_of_the_server_continues_after_a_resume(tmp_path) -> None:
    """FLTrust trains the global model on the server's own examples in each round."""

    def run() -> Any:
        federation = {"num_rounds": 3, "local_steps": 1, "aggregation": "fltrust"}
        return build(tmp_path, DEFAULT, federation=federation, server_dataset=numbered(26, 6), save_strategy="epoch")

    whole = run()
    whole.train()
    of_server = [number for batch in whole.read for number in batch if number >= 26]
    assert sorted(of_server) == list(range(26, 32))
    resumed = run()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.read == whole.read[-len(resumed.read) :] and same_weights(whole.model, resumed.model)


def test_client_that_trains_on_a_part_of_its_examples_starts_anew(tmp_path) -> None:
    trainer = build(tmp_path, SEQUENTIAL, federation={"num_rounds": 2, "local_steps": 1, "max_rows_per_round": 4})
    trainer.train()
    # The first two of the four examples of a round, in order.
    assert len(trainer.read) == 4 and all(batch == sorted(batch) for batch in trainer.read)


def test_client_keeps_its_position_in_rounds_without_it(tmp_path) -> None:
    """The position of a client counts its own rounds only, and is two numbers."""
    federation = {"num_rounds": 6, "local_steps": 1, "clients_per_round": 1}
    trainer = build(tmp_path, DEFAULT, federation=federation)
    trainer.train()
    first_of_south = min(CLIENTS["south"]["input_ids"])[0]
    read = {"north": [], "south": []}
    for batch in trainer.read:
        read["south" if batch[0] >= first_of_south else "north"].append(batch)
    assert all(read.values())
    for client_id, batches in read.items():
        plain = build(tmp_path, DEFAULT, CLIENTS[client_id], max_steps=len(batches))
        plain.train()
        assert batches == plain.read
        epoch, used = divmod(len(batches), math.ceil(len(CLIENTS[client_id]) / BATCH_SIZE))
        expected = {"epoch": epoch, "num_batches": used} if used else {"epoch": epoch}
        assert trainer.engine.worker.models.store.get(client_id) == {"sampler": expected}


def test_training_within_an_epoch_leaves_no_worker_of_the_data_loader(tmp_path, monkeypatch) -> None:
    """torch waits several seconds for a worker that ends in a garbage collection."""
    federation = {"num_rounds": 1, "local_steps": 1}
    trainer = build(tmp_path, DEFAULT, {"north": numbered(5, 12)}, federation, dataloader_num_workers=1)
    monkeypatch.setattr(gc, "collect", lambda *args: 0)
    gc.disable()
    try:
        trainer.train()
        assert not multiprocessing.active_children()
    finally:
        gc.enable()


def test_rounds_of_whole_epochs_keep_no_position(tmp_path) -> None:
    trainer = build(tmp_path, DEFAULT, federation={"num_rounds": 1})
    trainer.train()
    assert trainer.engine.worker.models.store.get("north") == {}


def test_position_survives_a_round_on_a_part_of_the_examples(tmp_path) -> None:
    """With `balance`, the smaller client of a cohort trains on all of its examples, and the larger one on a part."""
    clients = {"north": CLIENTS["north"], "south": CLIENTS["south"], "west": numbered(10, 12)}
    federation = {"num_rounds": 5, "local_steps": 1, "clients_per_round": 2, "balance": "min", "federation_seed": 2}
    trainer = build(tmp_path, DEFAULT, clients, {**federation, "client_optimizer_state": "carry"})
    sampler = ClientSampler(list(clients), 2, seed=2)
    others = [set(sampler(round)) - {"north"} for round in range(5) if "north" in sampler(round)]
    assert others == [{"south"}, {"south"}, {"west"}, {"south"}]
    trainer.train()
    expected = {"epoch": 0, "num_batches": others.count({"west"})}
    assert trainer.engine.worker.models.store.get("north")["sampler"] == expected
