"""Alignment: clients whose classes have another order than those of the server."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from distillation_setup import SIZES, client_model, distillation_trainer
from tiny import rows, same_weights

from hf_federated import DSFL, FederatedDataset, FedID
from hf_federated.distillation import Alignment


REVERSED = "b"


class ReversedForOneClient(Alignment):
    def to_server(self, client_id, logits):
        return logits.flip(-1) if client_id == REVERSED else logits

    def to_client(self, client_id, targets):
        return targets.flip(-1) if client_id == REVERSED else targets


@dataclass(kw_only=True, repr=False, eq=False)
class Aligned(DSFL):
    alignment = ReversedForOneClient()


def reversed_model(client_id):
    """The model of a client. The classes of one client have the reversed order."""
    model = client_model(client_id)
    if client_id == REVERSED:
        with torch.no_grad():
            model.classifier.weight.copy_(model.classifier.weight.flip(0))
            model.classifier.bias.copy_(model.classifier.bias.flip(0))
    return model


def examples(reverse: bool) -> FederatedDataset:
    clients = {name: rows(size, seed=number) for number, (name, size) in enumerate(SIZES.items())}
    if reverse:
        clients[REVERSED] = clients[REVERSED].map(lambda row: {"labels": 1 - row["labels"]})
    return FederatedDataset.from_dict(clients)


@pytest.mark.parametrize("serialize", [False, True])
def test_reversed_classes_of_a_client_give_the_same_server(tmp_path, serialize) -> None:
    """The order of the classes changes the rounding of the client's gradients only."""
    plain = distillation_trainer(tmp_path / "a", DSFL(), train_dataset=examples(False), client_model_init=client_model)
    plain.train()
    aligned = distillation_trainer(
        tmp_path / "b", Aligned(), train_dataset=examples(True), client_model_init=reversed_model
    )
    aligned.engine.serialize = serialize
    aligned.train()
    for name, value in plain.exchange.read().items():
        torch.testing.assert_close(aligned.exchange.read()[name], value, rtol=0, atol=1e-6)
    assert plain.ledger.to_dict() == aligned.ledger.to_dict()
    first, second = (trainer.engine.worker.models.open(REVERSED).trainer.model for trainer in (plain, aligned))
    torch.testing.assert_close(first.classifier.weight, second.classifier.weight.flip(0), rtol=0, atol=1e-6)


def test_without_the_alignment_the_server_learns_other_targets(tmp_path) -> None:
    plain = distillation_trainer(tmp_path / "a", DSFL(), train_dataset=examples(False), client_model_init=client_model)
    plain.train()
    other = distillation_trainer(
        tmp_path / "b", DSFL(), train_dataset=examples(True), client_model_init=reversed_model
    )
    other.train()
    assert not same_weights(plain.model, other.model)


def test_identity_encodes_the_targets_once_for_all_clients() -> None:
    targets = torch.tensor([[0.25, 0.75]])
    assert isinstance(DSFL().alignment.encode_targets(targets, DSFL().encoding), dict)
    assert FedID().alignment.is_identity
    encoded = Aligned().alignment.encode_targets(targets, Aligned().encoding)
    assert torch.equal(encoded("a")["values"], targets)
    assert torch.equal(encoded(REVERSED)["values"], targets.flip(-1))
