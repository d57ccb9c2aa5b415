"""Cards of split models: logged numbers, exchanged messages and their receivers."""

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
from hf_federated.cards.card_record import CardArguments
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


def test_metadata_describes_the_whole_model(trainer):
    card = ModelCard(str(render_split_card(trainer, "en", license="mit", tags="copa", dataset_tags="a/b")))
    assert (card.data.language, card.data.license, card.data.datasets) == ("en", "mit", ["a/b"])
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert card.data.tags[-3:] == ["split-learning", "client-batch", "copa"]
    last = [entry for entry in trainer.state.log_history if "eval_loss" in entry][-1]
    results = [(result.metric_type, result.metric_value) for result in card.data.eval_results]
    assert results == [("loss", last["eval_loss"])]


def test_table_of_the_cut_has_blocks_and_bytes(trainer, record):
    table = table_after(render_split(record), "## The cut")
    assert [row[1:3] for row in table[1:]] == [["each client", "0"], ["the server", "1 to 2"], ["each client", "3"]]
    sizes = trainer.model.part_bytes()
    assert [row[3] for row in table[1:]] == [f"{sizes[role]:,}" for role in ("head", "body", "tail")]
    # All parameters are trained, in float32.
    assert [int(row[4].replace(",", "")) * 4 for row in table[1:]] == list(sizes.values())


def test_tied_matrix_is_counted_once(tmp_path):
    tied = SplitRecord.from_trainer(
        split_trainer(tmp_path, clients_of(2), model=whole_model(tie_word_embeddings=True))
    )
    number = sum(value.numel() for value in whole_model(tie_word_embeddings=True).parameters())
    assert sum(part["num_trained"] for part in tied.parts.values()) == tied.model.num_parameters == number


def test_table_of_steps_has_the_last_logged_loss_and_bytes(trainer, record):
    table = table_after(render_split(record), "### Results by step")
    assert table[0] == ["Step", "Epoch", "Training loss", "Evaluation loss", "Bytes down", "Bytes up"]
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [row[0] for row in table[1:]] == [str(entry["step"]) for entry in evaluated] == ["3", "6"]
    for row, entry in zip(table[1:], evaluated, strict=True):
        last = losses[max(step for step in losses if step <= entry["step"])]
        assert row[2:4] == [f"{last:.4f}", f"{entry['eval_loss']:.4f}"]
        assert row[4:] == [f"{entry[f'federated/bytes_{direction}']:,}" for direction in ("down", "up")]
    assert evaluated[-1]["federated/bytes_up"] == trainer.ledger.bytes_up


def test_table_of_split_training_has_the_settings_of_the_run(trainer, record):
    table = dict(table_after(render_split(record), "## Split training")[1:])
    assert table["Strategy"].startswith("`client_batch`")
    assert table["Parts of the clients"] == "averaged every 2 optimizer steps: 3 times in this run"
    assert (table["Clients"], table["Completed optimizer steps"], table["Completed epochs"]) == ("2", "6 of 6", "2")
    assert table["Encryption"] == "none: messages were not encrypted"
    up = trainer.ledger.bytes_up
    assert f"({up:,} bytes), {round(up / 6):,} per optimizer step" in table["Bytes sent by clients"]


def test_card_names_every_field_of_the_messages(record):
    descriptions = {
        "client_id": "contains the name of the client",
        "step": "the optimizer step",
        "micro_step": "the index of the batch within the step",
        "hidden": "sent hidden states",
        "batch_size": "the number of examples",
        "mask": "the attention mask as bits",
        "mask_width": "the attention mask as bits",
        "seen": "the number of positions in the cache",
        "position_ids": "the position ids",
        "context_lengths": "the context length of each example",
        "training": "whether dropout",
        "grad": "gradients",
        "autocast": "autocast were enabled",
        "cache_id": "the number of a key/value cache",
        "reorder": "the beam that each sequence continues",
        "gradient": "sent the gradient of its loss",
        "num_targets": "the number of target tokens",
    }
    assert descriptions.keys() == {item.name for kind in (Forward, Backward) for item in dataclasses.fields(kind)}
    with_context = dataclasses.replace(record, exchanged={**record.exchanged, "context_lengths": True})
    text = section(render_split(with_context), "Exchanged information")
    assert not [name for name, description in descriptions.items() if description not in text]
    assert "context" not in section(render_split(record), "Exchanged information")
    transferred = {
        "client_id": "its name",
        "step": "the step",
        "num_rows": "the number of examples it had trained on",
        "state": "trained values",
    }
    assert transferred.keys() == {item.name for item in dataclasses.fields(PartParameters)}
    assert not [name for name, description in transferred.items() if description not in text]


@pytest.mark.parametrize(
    ("split", "receiver", "has_target_counts"),
    [
        (SplitConfig(), "The next client", False),
        (SplitConfig(average_every=2), "The aggregator", False),
        (SplitConfig(average_every=50), None, False),
        (SplitConfig(strategy="client_batch"), None, True),
        (SplitConfig(strategy="server_hierarchical", average_every=1), "The aggregator", False),
    ],
    ids=lambda value: f"{value.strategy}-{value.average_every}" if isinstance(value, SplitConfig) else None,
)
def test_receivers_of_each_strategy(tmp_path, split, receiver, has_target_counts):
    text = render_split(SplitRecord.from_trainer(trained(tmp_path, split=split, eval_strategy="no")))
    messages = section(text, "Exchanged information")
    rows = table_after(text, "## Exchanged information")[1:]
    assert [row[0] for row in rows] == ["The server", "A client", *([receiver] if receiver else [])]
    assert ("target token counts" in rows[0][1]) == ("target tokens" in messages) == has_target_counts
    assert "parameters" not in rows[0][1]
    assert ("No client sent parameters" in messages) == (receiver is None)
    if receiver:
        assert "not intended for the server" in rows[2][1] and "parameters include the embedding" in rows[2][1]


def test_no_parameters_are_sent_before_the_second_clients_turn(tmp_path):
    run = trained(tmp_path, max_steps=2, eval_strategy="no")
    assert "No client sent parameters" in render_split(SplitRecord.from_trainer(run))


def test_every_card_has_the_leakage_claim(record):
    leakage = section(render_split(record), "What hidden states reveal")
    assert "honest-but-curious server" in leakage and "hf-federated audit" in leakage
    assert "token embeddings" not in leakage


def test_saved_audit_replaces_the_claim_with_results_at_the_cut_of_the_card(record, tmp_path):
    record.save(tmp_path / "run.json")
    inversions = [
        Inversion(cut, "float32", "search", recall, 0.9, 0.8, 0.9, 0.8) for cut, recall in ((1, 0.9), (2, 0.7))
    ]
    LeakageAudit(AuditConfig(head_blocks=[1, 2]), 300, 50, 2000, 0, 0.05, 0.9, inversions, []).save(
        tmp_path / "audit.json"
    )
    card = render_saved(tmp_path / "run.json", tmp_path / "audit.json")
    leakage = section(card, "What hidden states reveal")
    assert "honest-but-curious server" in leakage and "No measurement" not in card
    assert "90.0% of the tokens with 1 block before the cut" in leakage and "70.0%" not in card
    plain = render_split(record)
    assert card == plain.replace(section(plain, "What hidden states reveal"), leakage)


def test_audit_of_another_cut_or_of_a_run_without_split_raises(record, tmp_path):
    dataclasses.replace(record, split={**record.split, "head_blocks": 4}).save(tmp_path / "run.json")
    inversions = [Inversion(1, "float32", "search", 0.9, 0.9, 0.8, 0.9, 0.8)]
    LeakageAudit(AuditConfig(head_blocks=[1]), 300, 50, 2000, 0, 0.05, 0.9, inversions, []).save(
        tmp_path / "audit.json"
    )
    with pytest.raises(ValueError, match="4"):
        render_saved(tmp_path / "run.json", tmp_path / "audit.json")
    with pytest.raises(ValueError, match="quickstart.json is not the record of a split model"):
        render_saved(CARDS / "quickstart.json", tmp_path / "audit.json")


def test_audit_of_another_wire_dtype_or_tail_raises(record, tmp_path):
    record.save(tmp_path / "run.json")
    inversions = [Inversion(1, "int8", "search", 0.9, 0.9, 0.8, 0.9, 0.8)]
    config = AuditConfig(head_blocks=[1], wire_dtypes=["int8"])
    audit = LeakageAudit(config, 300, 50, 2000, 0, 0.05, 0.9, inversions, [], model_name="another")
    audit.save(tmp_path / "audit.json")
    with pytest.raises(ValueError, match="Run the audit with --wire-dtypes float32"):
        render_saved(tmp_path / "run.json", tmp_path / "audit.json")
    int8_record = dataclasses.replace(record, split={**record.split, "wire_dtype": "int8"})
    int8_record.save(tmp_path / "run.json")
    assert "In a measurement on `another`, the strongest" in render_saved(
        tmp_path / "run.json", tmp_path / "audit.json"
    )
    targets = [TargetRecovery(2, "int8", "all", 0.9, 0.9, 0.9, 100)]
    dataclasses.replace(audit, config=dataclasses.replace(config, tail_blocks=2), targets=targets).save(
        tmp_path / "audit.json"
    )
    with pytest.raises(
        ValueError, match="tail of the model has 1 block, but .* a tail of 2. Run the audit with --tail-blocks 1"
    ):
        render_saved(tmp_path / "run.json", tmp_path / "audit.json")


def test_claim_without_blocks_before_the_cut(record):
    without_blocks = dataclasses.replace(record, split={**record.split, "head_blocks": 0})
    text = render_split(without_blocks)
    assert "received the token embeddings, and any party with the embedding matrix can read the text" in text


def test_encrypted_messages_hide_nothing_from_the_server(tmp_path):
    pytest.importorskip("cryptography")
    text = str(render_split_card(trained(tmp_path, split=SplitConfig(encryption=True), eval_strategy="no")))
    assert "AES-256-GCM" in dict(table_after(text, "## Split training")[1:])["Encryption"]
    assert "nothing from the server. Parameters that were sent to other parties were not encrypted." in text


def test_saved_record_renders_to_the_same_card(record, tmp_path):
    record.save(tmp_path / "run.json")
    assert SplitRecord.load(tmp_path / "run.json") == record
    assert render_saved(tmp_path / "run.json") == render_split(record)


@pytest.mark.parametrize("adapter", [None, LORA], ids=["whole", "lora"])
def test_usage_snippet_loads_the_saved_model(tmp_path, adapter):
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


def test_card_of_an_untrained_trainer_has_no_results(tmp_path):
    text = str(render_split_card(split_trainer(tmp_path, clients_of(2, 2), eval_dataset=rows_of(9))))
    assert "## Results" not in text and "### Results by step" not in text
    assert "Nothing was exchanged, because no training step was run." in text and "The server |" not in text


def test_card_written_during_training_has_the_users_arguments(tmp_path):
    class WriteCard(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            run.create_model_card()

    run = split_trainer(tmp_path / "midway", clients_of(4), save_strategy="epoch", gradient_accumulation_steps=2)
    run.add_callback(WriteCard())
    run.train()
    table = dict(table_after(ModelCard.load(tmp_path / "midway" / "README.md").text, "## Training arguments")[1:])
    assert (table["`gradient_accumulation_steps`"], table["`max_grad_norm`"]) == ("2", "1.0")


def test_card_arguments_match_those_of_trainer():
    names = list(inspect.signature(Trainer.create_model_card).parameters)[1:]
    assert [item.name for item in dataclasses.fields(CardArguments)] == [*names, "dataset_name"]


def test_dataset_name_of_trl_is_the_dataset_of_the_card(trainer, tmp_path):
    assert SplitRecord.from_trainer(trainer, dataset_name="trl-lib/Capybara").metadata["dataset_tags"] == [
        "trl-lib/Capybara"
    ]
    assert SplitRecord.from_trainer(trainer, dataset_name=str(tmp_path)).metadata["dataset_tags"] == []
    both = SplitRecord.from_trainer(trainer, dataset_name="trl-lib/Capybara", dataset_tags="owner/chats")
    assert both.metadata["dataset_tags"] == ["owner/chats"]
