"""Clients do not repeat the warning of torch about pinned memory without an accelerator."""

from __future__ import annotations

import warnings

import pytest
import torch
from federations import CLIENTS, build_federation
from tiny import arguments

from hf_federated import FederatedDataset
from hf_federated.clients import client_arguments


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator uses pinned memory")
def test_training_and_evaluation_of_clients_do_not_warn_about_pinned_memory(tmp_path) -> None:
    clients = FederatedDataset.from_dict(CLIENTS)
    trainer = build_federation(
        tmp_path,
        federation={"evaluate_clients": True},
        trainer={"eval_dataset": clients},
        use_cpu=False,
        eval_strategy="epoch",
    )
    assert trainer.args.dataloader_pin_memory
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    # One warning in each evaluation of the global model, as in the plain Trainer.
    assert sum("pin_memory" in str(warning.message) for warning in caught) == 2
    assert trainer.args.dataloader_pin_memory


@pytest.mark.parametrize("pins", [True, False])
def test_client_keeps_the_setting_with_an_accelerator(tmp_path, monkeypatch, pins) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *args, **kwargs: True)
    args = arguments(tmp_path, use_cpu=False, dataloader_pin_memory=pins)
    assert client_arguments(args, local_epochs=1, local_steps=None).dataloader_pin_memory is pins
