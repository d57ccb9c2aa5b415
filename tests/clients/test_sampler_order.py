"""The steps of rounds with `local_steps` are the steps of a long training, for any sampler and any lengths."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_federated.clients.sampler_position import SamplerPosition
from hf_federated.clients.sampling import set_epoch


BATCH_SIZE = 4


def prepared(loader: DataLoader) -> Any:
    """The data loader as `Trainer` prepares it."""
    configuration = DataLoaderConfiguration(use_seedable_sampler=True)
    return Accelerator(cpu=True, dataloader_config=configuration).prepare(loader)


def examples(number: int) -> Dataset:
    return Dataset.from_dict({"number": list(range(number)), "label": [i % 2 for i in range(number)]})


def with_sampler(sampler: Callable[[Dataset], Any]) -> Callable[[int], Any]:
    def build(number: int) -> Any:
        rows = examples(number)
        return prepared(DataLoader(rows, batch_size=BATCH_SIZE, sampler=sampler(rows), collate_fn=numbers))

    return build


def with_batch_sampler(name: str, is_prepared: bool = True) -> Callable[[int], Any]:
    def build(number: int) -> Any:
        samplers = pytest.importorskip("sentence_transformers.sampler", reason="needs sentence-transformers")
        rows, generator = examples(number), torch.Generator().manual_seed(5)
        source = RandomSampler(rows, generator=generator) if name == "DefaultBatchSampler" else rows
        sampler = getattr(samplers, name)(
            source, BATCH_SIZE, drop_last=False, valid_label_columns=["label"], generator=generator, seed=5
        )
        loader = DataLoader(rows, batch_sampler=sampler, collate_fn=numbers)
        return prepared(loader) if is_prepared else loader

    return build


def repeated(rows: Dataset) -> Any:
    utils = pytest.importorskip("trl.trainer.utils", reason="needs the extra `trl`")
    return utils.RepeatSampler(rows, mini_repeat_count=2, batch_size=1, repeat_count=3, seed=5)


def numbers(rows: list[dict[str, Any]]) -> list[int]:
    return [row["number"] for row in rows]


# Each sampler, with the number of times that it yields an example in an epoch. `None` if it leaves examples out.
SAMPLERS: dict[str, tuple[Callable[[int], Any], int | None]] = {
    "default": (with_sampler(RandomSampler), 1),
    "sequential": (with_sampler(SequentialSampler), 1),
    "group_by_length": (
        with_sampler(lambda rows: LengthGroupedSampler(2, lengths=[1 + i % 4 for i in range(len(rows))])),
        1,
    ),
    "RepeatSampler": (with_sampler(repeated), 6),
    "DefaultBatchSampler": (with_batch_sampler("DefaultBatchSampler"), 1),
    "DefaultBatchSampler with its own generator": (with_batch_sampler("DefaultBatchSampler", is_prepared=False), 1),
    "NoDuplicatesBatchSampler": (with_batch_sampler("NoDuplicatesBatchSampler"), 1),
    "GroupByLabelBatchSampler": (with_batch_sampler("GroupByLabelBatchSampler"), None),
}


def loader_of(build: Callable[[int], Any], number: int) -> Any:
    """A data loader. The default sampler reads the global seed when it is built."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return build(number)


def steps_of_training(loader: Any, accumulation: int, num_steps: int) -> list[list[Any]]:
    """The micro-batches of each step of one long training."""
    torch.manual_seed(0)
    steps: list[list[Any]] = []
    for epoch in itertools.count():
        set_epoch(loader, epoch)
        # `Trainer` does not ask for more batches, which would draw from the generator of some samplers.
        batches = list(itertools.islice(loader, len(loader)))
        for start in range(0, len(batches), accumulation):
            steps.append(batches[start : start + accumulation])
            if len(steps) == num_steps:
                return steps
    return steps


def steps_of_rounds(
    build: Callable[[int], Any], number: int, accumulation: int, local_steps: int, num_rounds: int
) -> list[list[Any]]:
    """The micro-batches of each step of all rounds. A round reads batches as `Trainer` does."""
    torch.manual_seed(0)
    steps: list[list[Any]] = []
    kept: dict[str, Any] | None = None
    for round in range(1, num_rounds + 1):
        loader = loader_of(build, number)
        args = SimpleNamespace(gradient_accumulation_steps=accumulation, max_steps=local_steps)
        position = SamplerPosition(loader, args, kept)
        length = len(loader)
        steps_per_epoch = math.ceil(length / accumulation)
        for _ in range(math.ceil(local_steps / steps_per_epoch) + 2 * position.is_within_epoch):
            if len(steps) == round * local_steps:
                break
            batches, num_batches = position.batches(loader), 0
            last = length % args.gradient_accumulation_steps or args.gradient_accumulation_steps
            for step in range(steps_per_epoch):
                wanted = last if step == steps_per_epoch - 1 else args.gradient_accumulation_steps
                if len(steps) == round * local_steps or not (read := list(itertools.islice(batches, wanted))):
                    break
                num_batches += len(read)
                steps.append(read)
                # The trainer updates the weights after these numbers of batches only.
                assert num_batches % args.gradient_accumulation_steps == 0 or num_batches == length
        kept = position.state()
    return steps


@pytest.mark.parametrize("name", SAMPLERS)
@settings(max_examples=5, deadline=None, database=None)
@given(
    number=st.integers(4, 28),
    accumulation=st.integers(1, 4),
    local_steps=st.integers(1, 5),
    num_rounds=st.integers(1, 6),
)
def test_rounds_read_every_example_once_in_each_epoch(name, number, accumulation, local_steps, num_rounds) -> None:
    build, num_repeats = SAMPLERS[name]
    loader = loader_of(build, number)
    num_steps = num_rounds * local_steps
    steps = steps_of_rounds(build, number, accumulation, local_steps, num_rounds)
    assert steps == steps_of_training(loader, accumulation, num_steps)
    if num_repeats is not None:
        batches = [batch for micro_batches in steps for batch in micro_batches]
        for start in range(0, len(batches) - len(loader) + 1, len(loader)):
            read = Counter(itertools.chain.from_iterable(batches[start : start + len(loader)]))
            assert read == dict.fromkeys(range(number), num_repeats)


def test_position_is_two_numbers_if_the_epoch_seeds_the_generator() -> None:
    """In several processes, accelerate gives the default sampler a generator."""
    build = with_sampler(lambda rows: RandomSampler(rows, generator=torch.Generator()))
    loader = loader_of(build, 11)
    position = SamplerPosition(loader, SimpleNamespace(gradient_accumulation_steps=1, max_steps=2))
    list(itertools.islice(position.batches(loader), 2))
    assert position.state() == {"epoch": 0, "num_batches": 2}
