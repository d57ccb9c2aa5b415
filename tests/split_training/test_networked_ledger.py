"""The ledger of a networked client counts all bytes between the client and the server."""

from __future__ import annotations

from pathlib import Path

from networked import Run, encrypted_link
from split_runs import LORA, clients_of

from hf_federated import SplitConfig
from hf_federated.messages.ledger import Ledger
from hf_federated.messages.serialization import unpack
from hf_federated.split_training.saving import FEDERATED_DIR, RUN_FILE


def train_encrypted(directory, resume=False, **changes):
    """Train a run over encrypted links. Return it with the bytes that each client sent and received."""
    run = Run(directory, clients_of(4, 2), SplitConfig(), LORA, links=encrypted_link, **changes)
    links = {name: trainer.model.boundary.link.server for name, trainer in run.trainers.items()}
    run.train(resume)
    assert not run.errors and all(min(link.up, link.down) > 0 for link in links.values())
    return run, {name: (link.up, link.down) for name, link in links.items()}


def totals(ledger):
    return ledger.bytes_up, ledger.bytes_down


def test_ledger_counts_all_bytes_of_encrypted_link(tmp_path):
    run, transferred = train_encrypted(tmp_path)
    assert {name: totals(trainer.ledger) for name, trainer in run.trainers.items()} == transferred


def test_ledger_of_resumed_client_adds_bytes_of_joining_again(tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 1}
    first, _ = train_encrypted(tmp_path, **changes)
    step = first.trainers["client 0"].state.max_steps
    run, transferred = train_encrypted(tmp_path, resume=True, **changes)
    for name, trainer in run.trainers.items():
        path = Path(tmp_path / name / f"checkpoint-{step}" / FEDERATED_DIR / RUN_FILE)
        saved = totals(Ledger.from_state_dict(unpack(path.read_bytes())["ledger"]))
        assert totals(trainer.ledger) == tuple(sum(pair) for pair in zip(saved, transferred[name], strict=True))
