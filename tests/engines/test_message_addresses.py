"""The address at which a message arrives changes no result, although it changes the last digits of matrix products."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from federations import build_federation
from networked import DirectLink, Run
from split_runs import LORA, VOCABULARY, clients_of
from tiny import rows, same_weights, tiny_model
from torch.nn.functional import linear
from transformers import Olmo2Config, Olmo2ForCausalLM

from hf_federated import Aggregation, Distillation, SplitConfig
from hf_federated.messages.serialization import FlatTree, pack, unpack
from hf_federated.testing.engines import SHIFTS, ShiftedMessages, shifted
from hf_federated.transport.protocol import join_chunks


NUM_CLASSES = 8


def projection(num_rows: int, num_columns: int) -> torch.Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(0))


class ProjectedAggregation(Aggregation):
    """Adds a projection of the received weights of each client to the mean."""

    name: ClassVar[str] = "projected"

    def accumulate(self, accumulator: Any, update: Any) -> None:
        for value in update.state.values():
            if value.ndim == 2:
                value[:, :4] += linear(value, projection(4, value.shape[1]))
        super().accumulate(accumulator, update)


@dataclass(kw_only=True, repr=False, eq=False)
class ProjectedTargets(Distillation):
    """The server projects the received predictions, and the clients project the received targets."""

    name: ClassVar[str] = "projected"
    broadcasts: ClassVar[str] = "logits"

    def ensemble(self, predictions: Any, cohort: Any) -> torch.Tensor:
        return sum(linear(logits, projection(NUM_CLASSES, NUM_CLASSES)) for logits in predictions.values())

    def server_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (logits - targets).square().mean()

    def broadcast(self, ensemble: torch.Tensor, server: Any) -> torch.Tensor:
        return ensemble

    def client_loss(self, logits: torch.Tensor, targets: torch.Tensor, settings: Any) -> torch.Tensor:
        return (logits - linear(targets, projection(NUM_CLASSES, NUM_CLASSES))).square().mean()


@pytest.mark.parametrize("shift", SHIFTS)
def test_received_numbers_are_aligned_and_integers_share_the_memory_of_the_message(shift):
    tree = {"float": projection(3, 3), "half": torch.ones(3).half(), "complex": torch.ones(3) * 1j}
    tree["empty"] = torch.ones(0)
    integers = {"integer": torch.arange(1, 4), "bytes": torch.ones(3, dtype=torch.uint8)}
    blob = shifted(pack(tree | integers), shift)
    found = unpack(blob)
    assert all(torch.equal(found[name], value) for name, value in (tree | integers).items())
    assert all(found[name].data_ptr() % 16 == 0 for name in tree)
    blob[:] = bytes(len(blob))
    assert not any(found[name].any() for name in integers)


@pytest.mark.parametrize("name", ["value", "the value"])
def test_tensors_of_a_message_that_arrives_in_chunks_share_the_memory_of_the_message(name):
    """The lengths of the headers differ by 8 bytes."""
    blob = pack(FlatTree({name: projection(4, 4)}))
    message = join_chunks([blob[:10], blob[10:]], len(blob))
    value = unpack(message)[name]
    assert value.data_ptr() % 16 == 0 and torch.equal(value, projection(4, 4))
    message[-64:] = bytes(64)
    assert not value.any()


class ShiftedLink(DirectLink):
    """Link to a server in the same process. Both sides read their messages from memory at the address of `shift`."""

    def __init__(self, shift: int, *args: Any) -> None:
        super().__init__(*args)
        self._shift = shift

    def exchange(self, blob: bytes) -> memoryview:
        return shifted(super().exchange(shifted(blob, self._shift)), self._shift)


def split_values(directory: Path, link: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Train a model whose blocks start with a product: OLMo 2 normalizes after attention."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Olmo2ForCausalLM(
            Olmo2Config(
                vocab_size=VOCABULARY,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=4,
                num_attention_heads=2,
                max_position_embeddings=64,
            )
        )
    run = Run(directory, clients_of(4, 2), SplitConfig(), LORA, links=link, model=model)
    run.train()
    assert not run.errors
    return run.values()


def test_hidden_states_at_any_address_give_identical_weights(tmp_path):
    expected = split_values(tmp_path / "expected", DirectLink)
    for shift in SHIFTS:
        found = split_values(tmp_path / str(shift), functools.partial(ShiftedLink, shift))
        for party, values in expected.items():
            assert all(torch.equal(found[party][name], value) for name, value in values.items()), (party, shift)


METHODS = {
    "states": ({"aggregation": ProjectedAggregation()}, {}),
    "targets": ({"distillation": ProjectedTargets()}, {"public_dataset": rows(14, seed=5)}),
}


@pytest.mark.parametrize("received", METHODS)
def test_states_and_targets_at_any_address_give_identical_weights(received, tmp_path):
    federation, datasets = METHODS[received]
    models = []
    for shift in (0, *SHIFTS):
        trainer = build_federation(
            tmp_path / str(shift),
            federation=federation,
            trainer={"model": tiny_model(num_labels=NUM_CLASSES), "engine": ShiftedMessages(shift), **datasets},
        )
        trainer.train()
        models.append(trainer.model)
    assert all(same_weights(model, models[0]) for model in models)
