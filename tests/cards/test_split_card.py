"""The card of a split model says what the run logged, what crossed the boundary, and who received it."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from split_runs import LORA, clients_of, rows_of, split_trainer, whole_model
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

from hf_federated import SplitConfig
from hf_federated.audits import AuditConfig, Inversion, LeakageAudit, TargetRecovery
from hf_federated.cards import SplitRecord, render_saved, render_split, render_split_card
from hf_federated.cards.record import CardArguments
from hf_federated.split.messages import Backward, Forward
from hf_federated.split_training import PartParameters


CARDS = Path(__file__).parents[2] / "model_cards"


def trained(folder, clients=(6, 4), split=None, **settings):
    values = {"eval_dataset": rows_of(9), "eval_strategy": "epoch", "logging_steps": 2, **settings}
    trainer = split_trainer(folder, clients_of(*clients), split, **values)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny-split"
    return trained(folder, split=SplitConfig(strategy="client_batch", average_every=2), num_train_epochs=2)


@pytest.fixture(scope="module")
def record(trainer):
    return SplitRecord.from_trainer(trainer)


def table_after(text: str, heading: str) -> list[list[str]]:
    lines = re.search(r"((?:^\|.*\n)+)", text[text.index(f"\n{heading}\n") :], re.MULTILINE)[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in [lines[0], *lines[2:]]]


def section(text: str, heading: str) -> str:
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_metadata_is_of_the_whole_model_and_parses_back(trainer):
    card = ModelCard(str(render_split_card(trainer, "en", license="mit", tags="copa", dataset_tags="a/b")))
    assert (card.data.language, card.data.license, card.data.datasets) == ("en", "mit", ["a/b"])
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert card.data.tags[-3:] == ["split-learning", "client-batch", "copa"]
    last = [entry for entry in trainer.state.log_history if "eval_loss" in entry][-1]
    assert [(found.metric_type, found.metric_value) for found in card.data.eval_results] == [
        ("loss", last["eval_loss"])
    ]


def test_the_cut_has_the_models_blocks_and_bytes(trainer, record):
    table = table_after(render_split(record), "## The cut")
    assert [row[1:3] for row in table[1:]] == [["each client", "0"], ["the server", "1 to 2"], ["each client", "3"]]
    sizes = trainer.model.part_bytes()
    assert [row[3] for row in table[1:]] == [f"{sizes[role]:,}" for role in ("head", "body", "tail")]
    # Everything is trained, in float32.
    assert [int(row[4].replace(",", "")) * 4 for row in table[1:]] == list(sizes.values())


def test_a_tied_matrix_counts_once(tmp_path):
    tied = SplitRecord.from_trainer(
        split_trainer(tmp_path, clients_of(2), model=whole_model(tie_word_embeddings=True))
    )
    number = sum(own.numel() for own in whole_model(tie_word_embeddings=True).parameters())
    assert sum(part["num_trained"] for part in tied.parts.values()) == tied.model.num_parameters == number


def test_evaluations_stand_with_the_loss_and_bytes_logged_by_then(trainer, record):
    table = table_after(render_split(record), "### Over steps")
    assert table[0] == ["Step", "Epoch", "Training loss", "Evaluation loss", "Bytes down", "Bytes up"]
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [row[0] for row in table[1:]] == [str(entry["step"]) for entry in evaluated] == ["3", "6"]
    for row, entry in zip(table[1:], evaluated, strict=True):
        last = losses[max(step for step in losses if step <= entry["step"])]
        assert row[2:4] == [f"{last:.4f}", f"{entry['eval_loss']:.4f}"]
        assert row[4:] == [f"{entry[f'federated/bytes_{way}']:,}" for way in ("down", "up")]
    assert evaluated[-1]["federated/bytes_up"] == trainer.ledger.bytes_up


def test_the_training_table_says_what_was_run(trainer, record):
    table = dict(table_after(render_split(record), "## Split training")[1:])
    assert table["Strategy"].startswith("`client_batch`")
    assert table["Clients' parts"] == "averaged every 2 optimizer steps: 3 times in this run"
    assert (table["Clients"], table["Optimizer steps run"], table["Epochs run"]) == ("2", "6 of 6", "2")
    assert table["Encryption"] == "none: messages were not sealed"
    up = trainer.ledger.bytes_up
    assert f"({up:,} bytes), {round(up / 6):,} an optimizer step" in table["Bytes that clients sent"]


def test_every_field_of_a_clients_messages_is_named(record):
    words = {
        "client_id": "names the client",
        "step": "the optimizer step",
        "micro_step": "the batch within it",
        "hidden": "sent hidden states",
        "batch_size": "the number of rows",
        "mask": "the mask as bits",
        "mask_width": "the mask as bits",
        "seen": "how many positions it holds",
        "position_ids": "the numbers of positions",
        "context_lengths": "the length of each row's context",
        "training": "whether dropout",
        "grad": "gradients",
        "autocast": "autocast were on",
        "cache_id": "the number of a key/value cache",
        "gradient": "sent the gradient of its loss",
        "num_targets": "how many target tokens",
    }
    assert words.keys() == {item.name for kind in (Forward, Backward) for item in dataclasses.fields(kind)}
    asked = dataclasses.replace(record, exchanged={**record.exchanged, "context_lengths": True})
    left = section(render_split(asked), "What left the clients")
    assert not [name for name, said in words.items() if said not in left]
    assert "context" not in section(render_split(record), "What left the clients")
    handed = {
        "client_id": "its name",
        "step": "the step",
        "num_rows": "how many rows",
        "state": "values that it trains",
    }
    assert handed.keys() == {item.name for item in dataclasses.fields(PartParameters)}
    assert not [name for name, said in handed.items() if said not in left]


@pytest.mark.parametrize(
    ("split", "third", "targets"),
    [
        (SplitConfig(), "The next client", False),
        (SplitConfig(average_every=2), "Whoever averages", False),
        (SplitConfig(average_every=50), None, False),
        (SplitConfig(strategy="client_batch"), None, True),
        (SplitConfig(strategy="server_hierarchical", average_every=1), "Whoever averages", False),
    ],
    ids=lambda value: f"{value.strategy}-{value.average_every}" if isinstance(value, SplitConfig) else None,
)
def test_who_received_what_follows_from_what_was_done(tmp_path, split, third, targets):
    text = render_split(SplitRecord.from_trainer(trained(tmp_path, split=split, eval_strategy="no")))
    left = section(text, "What left the clients")
    rows = table_after(text, "## What left the clients")[1:]
    assert [row[0] for row in rows] == ["The server", "A client", *([third] if third else [])]
    assert ("target counts" in rows[0][1]) == ("target tokens" in left) == targets
    assert "parameters" not in rows[0][1]
    assert ("No client sent parameters" in left) == (third is None)
    if third:
        assert "Not for the server" in rows[2][1] and "The embedding is among them" in rows[2][1]


def test_nothing_is_handed_over_before_the_second_clients_turn(tmp_path):
    run = trained(tmp_path, max_steps=2, eval_strategy="no")
    assert "No client sent parameters" in render_split(SplitRecord.from_trainer(run))


def test_the_claim_is_on_every_card(record):
    reveal = section(render_split(record), "What hidden states reveal")
    assert "honest-but-curious server" in reveal and "hf-federated audit" in reveal
    assert "embeddings of the tokens" not in reveal


def test_a_saved_audit_is_in_the_place_of_the_claim_for_the_cut_of_the_card(record, tmp_path):
    record.save(tmp_path / "run.json")
    found = [Inversion(cut, "float32", "search", recall, 0.9, 0.8, 0.9, 0.8) for cut, recall in ((1, 0.9), (2, 0.7))]
    LeakageAudit(AuditConfig(head_blocks=[1, 2]), 300, 50, 2000, 0, 0.05, 0.9, found, []).save(tmp_path / "audit.json")
    card = render_saved(tmp_path / "run.json", tmp_path / "audit.json")
    reveal = section(card, "What hidden states reveal")
    assert "honest-but-curious server" in reveal and "No measurement" not in card
    assert "1 block before the cut, 90.0 % of the tokens" in reveal and "70.0 %" not in card
    plain = render_split(record)
    assert card == plain.replace(section(plain, "What hidden states reveal"), reveal)


def test_an_audit_of_another_cut_or_of_another_kind_of_run_is_refused(record, tmp_path):
    dataclasses.replace(record, split={**record.split, "head_blocks": 4}).save(tmp_path / "run.json")
    found = [Inversion(1, "float32", "search", 0.9, 0.9, 0.8, 0.9, 0.8)]
    LeakageAudit(AuditConfig(head_blocks=[1]), 300, 50, 2000, 0, 0.05, 0.9, found, []).save(tmp_path / "audit.json")
    with pytest.raises(ValueError, match="4"):
        render_saved(tmp_path / "run.json", tmp_path / "audit.json")
    with pytest.raises(ValueError, match="quickstart.json is not the record of a split model"):
        render_saved(CARDS / "quickstart.json", tmp_path / "audit.json")


def test_an_audit_of_another_wire_or_tail_is_refused_and_its_model_named(record, tmp_path):
    record.save(tmp_path / "run.json")
    found = [Inversion(1, "int8", "search", 0.9, 0.9, 0.8, 0.9, 0.8)]
    config = AuditConfig(head_blocks=[1], wire_dtypes=["int8"])
    audit = LeakageAudit(config, 300, 50, 2000, 0, 0.05, 0.9, found, [], model_name="another")
    audit.save(tmp_path / "audit.json")
    with pytest.raises(ValueError, match="give it --wire-dtypes float32"):
        render_saved(tmp_path / "run.json", tmp_path / "audit.json")
    own = dataclasses.replace(record, split={**record.split, "wire_dtype": "int8"})
    own.save(tmp_path / "run.json")
    assert "Measured on `another` at" in render_saved(tmp_path / "run.json", tmp_path / "audit.json")
    targets = [TargetRecovery(2, "int8", "all", 0.9, 0.9, 0.9, 100)]
    dataclasses.replace(audit, config=dataclasses.replace(config, tail_blocks=2), targets=targets).save(
        tmp_path / "audit.json"
    )
    with pytest.raises(ValueError, match="tail has 1 block, and the audit's 2: give it --tail-blocks 1"):
        render_saved(tmp_path / "run.json", tmp_path / "audit.json")


def test_a_cut_at_the_embedding_is_called_what_it_is(record):
    open_cut = dataclasses.replace(record, split={**record.split, "head_blocks": 0})
    assert "embeddings of the tokens, from which whoever has the embedding matrix reads" in render_split(open_cut)


def test_sealed_messages_hide_nothing_from_the_server(tmp_path):
    pytest.importorskip("cryptography")
    text = str(render_split_card(trained(tmp_path, split=SplitConfig(encryption=True), eval_strategy="no")))
    assert "AES-256-GCM" in dict(table_after(text, "## Split training")[1:])["Encryption"]
    assert "nothing from the server. Parameters that went elsewhere were not." in text


def test_a_saved_record_renders_to_the_same_card(record, tmp_path):
    record.save(tmp_path / "run.json")
    assert SplitRecord.load(tmp_path / "run.json") == record
    assert render_saved(tmp_path / "run.json") == render_split(record)


@pytest.mark.parametrize("adapter", [None, LORA], ids=["whole", "lora"])
def test_the_snippet_loads_what_was_saved(tmp_path, adapter):
    base = tmp_path / "base"
    whole_model().save_pretrained(base)
    run = trained(tmp_path / "run", model=LlamaForCausalLM.from_pretrained(base), adapter=adapter)
    run.save_model()
    run.create_model_card()
    card = ModelCard.load(tmp_path / "run" / "README.md")
    assert card.data.library_name == ("peft" if adapter else "transformers")
    assert str(tmp_path) not in str(card) and "loaded from a local directory" in card.text
    code = section(card.text, "How to use").split("```python\n")[1].split("```")[0]
    names: dict = {}
    exec(
        code.replace("path/to/this/repository", str(tmp_path / "run")).replace("path/to/the/base/model", str(base)),
        names,
    )
    assert isinstance(names["model"], PeftModel if adapter else LlamaForCausalLM)
    tokens = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        difference = names["model"].eval()(tokens).logits - run.model.eval()(tokens).logits
    assert difference.abs().max() <= 1e-5


def test_a_trainer_that_has_not_run_claims_nothing(tmp_path):
    text = str(render_split_card(split_trainer(tmp_path, clients_of(2, 2), eval_dataset=rows_of(9))))
    assert "## Results" not in text and "### Over steps" not in text
    assert "Nothing: no step was trained." in text and "The server |" not in text


def test_a_card_written_in_training_has_the_users_arguments(tmp_path):
    class WriteCard(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            run.create_model_card()

    run = split_trainer(tmp_path / "midway", clients_of(4), save_strategy="epoch", gradient_accumulation_steps=2)
    run.add_callback(WriteCard())
    run.train()
    table = dict(table_after(ModelCard.load(tmp_path / "midway" / "README.md").text, "## Training arguments")[1:])
    assert (table["`gradient_accumulation_steps`"], table["`max_grad_norm`"]) == ("2", "1.0")


def test_arguments_of_a_card_are_those_of_trainer():
    names = list(inspect.signature(Trainer.create_model_card).parameters)[1:]
    assert [item.name for item in dataclasses.fields(CardArguments)] == names
