"""The ledger of a networked client: all bytes between it and the server."""

from __future__ import annotations

from pathlib import Path

from networked import Run, sealed
from split_runs import LORA, clients_of

from hf_federated import SplitConfig
from hf_federated.messages.ledger import Ledger
from hf_federated.messages.serialization import unpack
from hf_federated.split_training.saving import FEDERATED_DIR, RUN_FILE


def sealed_run(directory, resume=False, **changes):
    """A run that is over, and what the links of its clients carried, up and down."""
    run = Run(directory, clients_of(4, 2), SplitConfig(), LORA, links=sealed, **changes)
    links = {name: trainer.model.boundary.link.server for name, trainer in run.trainers.items()}
    run.train(resume)
    assert not run.errors and all(min(link.up, link.down) > 0 for link in links.values())
    return run, {name: (link.up, link.down) for name, link in links.items()}


def totals(ledger):
    return ledger.bytes_up, ledger.bytes_down


def test_a_sealed_client_counts_what_crosses(tmp_path):
    run, carried = sealed_run(tmp_path)
    assert {name: totals(trainer.ledger) for name, trainer in run.trainers.items()} == carried


def test_a_resumed_client_counts_what_it_sent_to_join_once_more(tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 1}
    first, _ = sealed_run(tmp_path, **changes)
    step = first.trainers["client 0"].state.max_steps
    run, carried = sealed_run(tmp_path, resume=True, **changes)
    for name, trainer in run.trainers.items():
        path = Path(tmp_path / name / f"checkpoint-{step}" / FEDERATED_DIR / RUN_FILE)
        saved = totals(Ledger.from_dict(unpack(path.read_bytes())["ledger"]))
        assert totals(trainer.ledger) == tuple(sum(pair) for pair in zip(saved, carried[name], strict=True))
