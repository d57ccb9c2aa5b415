"""The card of a run with secure aggregation: against whom it protects, what it hides, and what leaves a client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiny import arguments, rows, tiny_model

from hf_federated import FederatedConfig, FederatedTrainer
from hf_federated.cards import RunRecord, render
from hf_federated.cards.exchange_text import UPDATE_FIELDS


SETTINGS = {"max_weight": 8, "num_colluding": 1}


def run(tmp_path, **secure: Any) -> FederatedTrainer:
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset={name: rows(4, seed=seed) for seed, name in enumerate(("north", "south", "east"))},
        federation=FederatedConfig(
            num_rounds=1, secure_aggregation="secagg", secure_aggregation_kwargs={**SETTINGS, **secure}
        ),
    )
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def trainer(tmp_path_factory) -> FederatedTrainer:
    return run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def record(trainer) -> RunRecord:
    return RunRecord.from_trainer(trainer)


def with_secure(record: RunRecord, **fields: Any) -> str:
    """The card of a record whose protocol has other settings."""
    secure = {**record.exchanged["secure_aggregation"], **fields}
    return render(replace(record, exchanged={**record.exchanged, "secure_aggregation": secure}))


def test_card_lists_what_leaves_a_client_in_place_of_an_update(record):
    text = render(record)
    assert "integers of 32 bits and masks" in text and "the sums of the weights, the numbers of examples" in text
    assert not any(field in text for field in UPDATE_FIELDS)
    assert "sent back" not in text and "values of a client:" not in text


def test_card_of_a_simulation_claims_no_protection(record):
    assert "(SecAgg) protected against no server, because one launch simulated the server and all" in render(record)


def test_card_names_the_server_against_which_pinned_keys_protect(record):
    text = with_secure(record, is_simulated=False)
    assert "a dishonest server that works with at most 1 client; the keys of the clients were pinned." in text
    assert "hid each client's update, its loss and its counts." in text
    assert "did not hide the sum of at least 3 updates" in text and "only differential privacy" in text


def test_card_without_pinned_keys_claims_no_protection_against_a_dishonest_server(record):
    text = with_secure(record, is_simulated=False, pins="none")
    assert "against a server that follows the protocol and works with at most 1 client;" in text
    assert "were not pinned, so a dishonest server could take the place of clients." in text


def test_card_without_masks_claims_nothing_hidden(tmp_path):
    text = render(RunRecord.from_trainer(run(tmp_path, masks=False)))
    assert "`masks=False`" in text and "It did not hide the updates," in text
    assert "and masks" not in text and "public keys" not in text


def test_log_has_no_learning_rate_because_clients_hide_theirs(trainer):
    entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert "learning_rate" not in entry and entry["federated/num_clients"] == 3
