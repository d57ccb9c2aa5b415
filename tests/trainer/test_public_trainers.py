"""Each public trainer of TRL and of sentence-transformers under `federate`, and the table in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from public_trainers import TRAINERS, installed_trainers
from tiny import same_weights

from hf_federated import FederatedCallback, FederatedConfig, FederatedDataset, federate
from hf_federated.clients import UnsupportedTrainerError


pytest.importorskip("trl")
pytest.importorskip("sentence_transformers")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "trl.md"
WORKS, REFUSED, NOT_CHECKED = "yes", "refused", "not checked"


def documented() -> dict[str, tuple[str, str]]:
    """The table of trainers: whether each of them works, and the number of changed lines or the reason."""
    (table,) = re.findall("<!-- trainers -->(.*?)<!-- end of trainers -->", PAGE.read_text(), re.DOTALL)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    return {trainer.strip("`"): (works, text) for trainer, package, works, text in rows}


DOCUMENTED = documented()
WORKING = [name for name, (works, _) in DOCUMENTED.items() if works == WORKS]
# The other trainers that work are slow tests. Other files test trainers of TRL.
SAMPLE = {"CrossEncoderTrainer", "SparseEncoderTrainer"}
working = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in WORKING]
)


@pytest.fixture(autouse=True)
def without_ci(monkeypatch) -> None:
    """TRL reads more of a dataset for its usage report, which it does not send from a CI."""
    monkeypatch.delenv("CI", raising=False)


class CountExamples(FederatedCallback):
    def __init__(self) -> None:
        self.numbers: list[tuple[str, int]] = []

    def on_client_end(self, args, state, control, update, **kwargs) -> None:
        self.numbers.append((update.client_id, update.num_examples))


def test_table_has_every_installed_trainer() -> None:
    """A new trainer of a new version fails here: add it to `public_trainers.py` and to the table."""
    assert installed_trainers() == DOCUMENTED.keys() == TRAINERS.keys()
    assert {works for works, _ in DOCUMENTED.values()} <= {WORKS, REFUSED, NOT_CHECKED}
    assert all(DOCUMENTED[name][1] == str(TRAINERS[name].num_changed_lines) for name in WORKING)


@working
def test_trainer_trains_two_clients(tmp_path, name) -> None:
    spec, count = TRAINERS[name], CountExamples()
    clients = {client_id: spec.rows(client_id, 4) for client_id in ("north", "south")}
    trainer = spec.build(
        federate(spec.trainer_class),
        tmp_path,
        FederatedDataset.from_dict(clients),
        federation=FederatedConfig(num_rounds=2),
        callbacks=[count],
    )
    before = {key: value.clone() for key, value in trainer.model.named_parameters()}
    trainer.train()
    assert count.numbers == [("north", 4), ("south", 4)] * 2
    assert any(not torch.equal(before[key], value) for key, value in trainer.model.named_parameters())
    trainer.save_model(str(tmp_path / "saved"))
    assert list((tmp_path / "saved").rglob("*.safetensors"))


@working
def test_one_client_equals_the_plain_trainer(tmp_path, name) -> None:
    spec = TRAINERS[name]
    plain = spec.build(spec.trainer_class, tmp_path, spec.rows("north", 4), {"num_train_epochs": 2})
    plain.train()
    federated = spec.build(
        federate(spec.trainer_class),
        tmp_path,
        spec.rows("north", 4),
        federation=FederatedConfig(num_rounds=2, client_optimizer_state="carry"),
    )
    federated.train()
    assert same_weights(plain.model, federated.model)


@pytest.mark.parametrize("name", [name for name, (works, _) in DOCUMENTED.items() if works == REFUSED])
def test_refused_trainer_names_the_reason_of_the_table(tmp_path, name) -> None:
    spec = TRAINERS[name]
    with pytest.raises(UnsupportedTrainerError) as raised:
        federate(spec.trainer_class)(train_dataset={"north": spec.rows("north", 4)})
    assert DOCUMENTED[name][1].replace("`", "") in str(raised.value).replace("`", "")
