"""The model card of a networked client describes the client's part and the messages that the server relays."""

from __future__ import annotations

import dataclasses

import pytest
from huggingface_hub import ModelCard
from networked import Run, encrypted_link
from split_runs import LORA, clients_of, rows_of

from hf_federated import SplitConfig
from hf_federated.cards import SplitRecord, render_saved, render_split
from hf_federated.split_training.messages import (
    CONTROL_MESSAGES,
    BeginStepReply,
    EndStepReply,
    FetchEnvelopeReply,
    JoinReply,
    PeerRemovedReply,
    ResendReply,
    SendEnvelopeReply,
)


CONFIGS = [
    SplitConfig(),
    SplitConfig(average_every=3),
    SplitConfig(strategy="client_batch"),
    SplitConfig(strategy="server_hierarchical", average_every=2),
]


def trained(directory, split, sizes=(6, 4), **changes) -> Run:
    """Train a run whose clients evaluate before they leave."""
    run = Run(directory, clients_of(*sizes), split, LORA, **changes)
    for trainer in run.trainers.values():
        leave = trainer.leave

        def evaluate_and_leave(trainer=trainer, leave=leave):
            trainer.evaluate(rows_of(9))
            leave()

        trainer.leave = evaluate_and_leave
    run.train()
    assert not run.errors
    return run


def cells(text: str) -> dict[str, str]:
    """First cell to second cell of all tables."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {line[0].strip(): line[1].strip() for line in lines}


@pytest.mark.parametrize("split", CONFIGS, ids=lambda parameter: f"{parameter.strategy}-{parameter.average_every}")
def test_card_of_networked_client_describes_its_part(split, tmp_path):
    run = trained(tmp_path, split)
    trainer = run.trainers["client 1"]
    trainer.create_model_card(license="mit")
    card = ModelCard.load(tmp_path / "client 1" / "README.md")
    text, table = card.text, cells(card.text)
    for phrase in (
        "all parties in one process",
        "were not.",
        "are joined: it is",
        "from_pretrained",
        "the full model",
    ):
        assert phrase not in text
    assert "the part of one client only. Each of 2 clients kept" in text and "hf-federated split-merge" in text
    assert card.data.library_name == "hf_federated" and card.data.eval_results[0].metric_type == "loss"
    assert (table["Clients"], table["Examples"]) == ("2", "4") and "Examples per client" not in table
    assert f"({trainer.ledger.bytes_up:,} bytes)" in table["Bytes sent by this client"]
    number = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
    assert f"the {number:,} trained values" in text
    assert "sent through the server in envelopes. An envelope is encrypted" in text
    assert "envelopes for other clients, which it cannot read" in table["The server"]
    assert "trained parameters" not in table["The server"]
    hands_over = split.strategy == "serial" and split.average_every is None
    assert ("The next client" in table) == hands_over != ("The first client" in table)
    assert "end" in table["Parts of the clients"] or "saved part is the mean" in table["Parts of the clients"]
    assert "| Body | the server | 1 to 2 | not known to this client | not known to this client |" in text
    assert "none in addition to" in table["Encryption"]


def test_card_mentions_every_field_of_control_messages(tmp_path):
    run = trained(tmp_path, SplitConfig(), (2, 2))
    left = render_split(SplitRecord.from_trainer(run.trainers["client 0"])).split("## Exchanged information")[1]
    words = {
        "client_id": "with its name",
        "digest": "a digest of the settings",
        "num_steps": "its number of optimizer steps per epoch",
        "checkpoints": "the steps of its checkpoints",
        "introduction": "public keys for other clients",
        "introductions": "their public keys",
        "steps_of": "their numbers of optimizer steps per epoch",
        "resume_step": "the steps of its checkpoints",
        "step": "In each step",
        "num_batches": "its number of batches",
        "num_rows": "its number of batches and examples",
        "squared_norm": "the squared norm of its gradients",
        "norm": "the gradient norm over all participants of a step",
        "recipient": "sees the sender, the receiver",
        "sender": "sees the sender",
        "sealed": "in envelopes",
        "is_broadcast": "whether the parameters are for all other clients",
        "peer": "the server names it to the clients that wait for it",
        "recipients": "sees the sender, the receiver",
        "messages": "",  # a bundle of the other messages
    }
    kinds = [
        *CONTROL_MESSAGES.values(),
        JoinReply,
        BeginStepReply,
        EndStepReply,
        SendEnvelopeReply,
        FetchEnvelopeReply,
        PeerRemovedReply,
        ResendReply,
    ]
    assert words.keys() == {item.name for kind in kinds for item in dataclasses.fields(kind)}
    assert not [name for name, phrase in words.items() if phrase not in left]


def test_card_of_single_client_reports_no_parameter_exchange(tmp_path):
    run = trained(tmp_path, SplitConfig(strategy="client_batch"), (4,))
    text = render_split(SplitRecord.from_trainer(run.trainers["client 0"]))
    assert "There was no other client. No parameters were sent." in text and "envelopes for" not in text


def test_card_states_that_encryption_hides_nothing_from_server(tmp_path):
    run = trained(tmp_path, SplitConfig(encryption=True), (2, 2), links=encrypted_link)
    text = render_split(SplitRecord.from_trainer(run.trainers["client 0"]))
    assert cells(text)["Encryption"] == "AES-256-GCM between this client and the server"
    assert "nothing from the server." in text and "envelopes and handshakes, the overhead of encryption" in text


def test_card_of_stopped_run_does_not_claim_average(tmp_path):
    run = Run(tmp_path, clients_of(4, 4), SplitConfig(strategy="client_batch"), LORA)
    trainer = run.trainers["client 1"]
    step = trainer.training_step

    def stop(*args):
        trainer.control.should_training_stop = True
        return step(*args)

    trainer.training_step = stop
    run.train()
    table = cells(render_split(SplitRecord.from_trainer(trainer)))
    assert table["Parts of the clients"].endswith("the saved part is this client's own")


def test_card_before_training_makes_no_claims(tmp_path):
    run = Run(tmp_path, clients_of(2, 2), SplitConfig(), LORA)
    record = SplitRecord.from_trainer(run.trainers["client 0"])
    text = render_split(record)
    assert "No hidden states were exchanged, because no training step was run." in text and "The server |" not in text
    record.save(tmp_path / "record.json")
    assert render_saved(tmp_path / "record.json") == text
