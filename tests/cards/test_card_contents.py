"""A card has what a run printed: the comparison with baselines, the learning curve, labels, and code that runs."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from federations import build_federation
from language import masking_tokenizer, tokenizer
from peft import LoraConfig, get_peft_model
from tiny import rows, tiny_model
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
)

from hf_federated.cards import RunRecord, render_saved
from hf_federated.cards.curve import CURVE_NAME
from hf_federated.cards.tables import metric_name
from hf_federated.experiments.train_recipe import closing_table


SVG = "{http://www.w3.org/2000/svg}"
RESULTS = {
    "metric": "f1_macro",
    "lower_is_better": False,
    "num_test_rows": 80,
    "num_test_clients": None,
    "strategy": None,
    "baselines": {
        "centralized": {
            "metrics": {"f1_macro": 0.912},
            "spread": {},
            "num_clients": 1,
            "num_epochs": 2.5,
            "seconds": 12.4,
            "clients": {"north": {"f1_macro": 0.5}},
        },
        "local": {
            "metrics": {"f1_macro": 0.604},
            "spread": {"f1_macro": 0.081},
            "num_clients": 5,
            "num_epochs": 3.0,
            "seconds": 31.0,
        },
    },
    "federated": {
        "metrics": {"f1_macro": 0.871},
        "num_epochs": 3.0,
        "bytes_up": 12_300_000,
        "bytes_down": 12_400_000,
        "seconds": 40.2,
        "further_tests": {"news": {"f1_macro": 0.7}},
    },
}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A trainer after two evaluated rounds."""
    trainer = build_federation(
        tmp_path_factory.mktemp("runs") / "tiny",
        trainer={"eval_dataset": rows(8, seed=3), "processing_class": tokenizer()},
        eval_strategy="epoch",
    )
    trainer.model.config.id2label = {0: "rotten | old", 1: "fresh"}
    trainer.train()
    return trainer


def written_card(trainer) -> str:
    trainer.create_model_card()
    return (trainer_folder(trainer) / "README.md").read_text(encoding="utf-8")


def trainer_folder(trainer) -> Path:
    return Path(trainer.args.output_dir)


def test_card_has_the_table_that_the_recipe_prints(trainer, monkeypatch):
    monkeypatch.setattr(trainer, "card_comparison", RESULTS)
    card = written_card(trainer)
    section = card.partition("### Comparison with baselines")[2].partition("\n###")[0]
    # Columns are separated by at least two spaces in a terminal, and by `|` in a card.
    printed = [re.split(r"\s{2,}", line.strip()) for line in closing_table(RESULTS)]
    shown = [
        [cell.strip() for cell in line.strip("|- ").split("|")]
        for line in section.splitlines()
        if line and "---" not in line
    ]
    assert shown == printed
    assert ["local-only (mean of 5)", "0.604 ±0.081", "3.00", "-", "-", "31"] in shown
    assert ["federated minus centralized: -4.1 points"] in shown
    assert "north" not in section


def test_a_card_without_baselines_has_no_comparison(trainer, monkeypatch):
    assert "Comparison" not in written_card(trainer)
    of_a_server = {"metric": "f1_macro", "federated": RESULTS["federated"]}
    for results in ({**RESULTS, "baselines": {}}, of_a_server):
        monkeypatch.setattr(trainer, "card_comparison", results)
        assert "Comparison" not in written_card(trainer)


def test_a_value_that_is_not_finite_is_shown_as_text(trainer, monkeypatch):
    results = {**RESULTS, "federated": {**RESULTS["federated"], "metrics": {"f1_macro": float("nan")}}}
    monkeypatch.setattr(trainer, "card_comparison", results)
    assert "| federated | nan |" in written_card(trainer)


def test_learning_curve_lies_next_to_the_card_and_has_the_logged_values(trainer):
    assert f"![Learning curve]({CURVE_NAME})" in written_card(trainer)
    svg = ElementTree.parse(trainer_folder(trainer) / CURVE_NAME).getroot()
    titles = [element.text for element in svg.iter(f"{SVG}text")]
    assert titles[0] == metric_name("eval_loss") and "Training loss" in titles
    hints = [element.text for element in svg.iter(f"{SVG}title")]
    for key in ("eval_loss", "loss"):
        values = [entry[key] for entry in trainer.state.log_history if key in entry and "train_runtime" not in entry]
        assert [f"{value:.4g}" for value in values[:2]] == [
            hint.split(": ")[1].split(" at ")[0]
            for hint in hints
            if hint.startswith(metric_name(key) if key != "loss" else "Training loss")
        ]


def test_a_saved_record_shows_the_curve_that_lies_next_to_it(trainer):
    card = written_card(trainer)
    RunRecord.from_trainer(trainer).save(trainer_folder(trainer) / "run_record.json")
    assert render_saved(trainer_folder(trainer) / "run_record.json") == card


def test_baselines_are_lines_of_the_learning_curve(trainer, monkeypatch):
    changed = {"metrics": {"loss": 0.5}, "spread": {}, "further_tests": {}}
    baselines = {name: {**result, **changed} for name, result in RESULTS["baselines"].items()}
    results = {**RESULTS, "metric": "loss", "baselines": baselines, "federated": {**RESULTS["federated"], **changed}}
    monkeypatch.setattr(trainer, "card_comparison", results)
    written_card(trainer)
    texts = [
        each.text for each in ElementTree.parse(trainer_folder(trainer) / CURVE_NAME).getroot().iter(f"{SVG}text")
    ]
    assert {"centralized 0.5", "local-only 0.5"} <= set(texts)


def test_a_card_of_one_round_has_no_curve(tmp_path):
    one = build_federation(tmp_path, num_rounds=1)
    one.train()
    assert "Learning curve" not in written_card(one)
    assert not (tmp_path / CURVE_NAME).exists()


def test_card_names_the_labels(trainer):
    section = written_card(trainer).partition("## Labels")[2].partition("\n##")[0]
    assert [line for line in section.splitlines() if line][2:] == ["| 0 | rotten \\| old |", "| 1 | fresh |"]


def test_generated_label_names_are_left_out(tmp_path):
    untrained = build_federation(tmp_path)
    assert "## Labels" not in written_card(untrained)


# ---- The code of the card

# Larger than the ids of the tokenizer and of the examples.
NUM_TOKENS = 64


def bert(**config):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return BertConfig(vocab_size=NUM_TOKENS, **sizes, **config)


def token_rows(seed=0):
    data = rows(4, seed=seed)
    return data.remove_columns("labels").add_column("labels", [[0] * len(ids) for ids in data["input_ids"]])


def decoder():
    return GPT2LMHeadModel(GPT2Config(vocab_size=NUM_TOKENS, n_embd=8, n_layer=1, n_head=2, n_positions=64))


def run_code(card: str, paths: dict[str, str]) -> str:
    """Run the code of the section *How to use*, with real paths."""
    code = re.search(r"## How to use\n\n```python\n(.*?)```", card, re.DOTALL)[1]
    for name, path in paths.items():
        code = code.replace(name, path)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "card", "exec"), {})
    return output.getvalue()


SLOW = [
    pytest.param(kind, marks=pytest.mark.slow) for kind in ("token-classification", "text-generation", "fill-mask")
]


@pytest.mark.parametrize("kind", ["text-classification", "adapter", *SLOW])
def test_pipeline_of_the_card_runs(tmp_path, kind):
    words, collator, clients = tokenizer(), None, {"north": rows(4), "south": rows(4, seed=1)}
    if kind == "token-classification":
        model, clients = (
            BertForTokenClassification(bert(num_labels=3)),
            {"north": token_rows(), "south": token_rows(1)},
        )
    elif kind in ("fill-mask", "text-generation"):
        words = masking_tokenizer()
        model = BertForMaskedLM(bert()) if kind == "fill-mask" else decoder()
        clients = {name: data.remove_columns("labels") for name, data in clients.items()}
        collator = DataCollatorForLanguageModeling(words, mlm=kind == "fill-mask")
    else:
        model = tiny_model(num_labels=3)
    base = tmp_path / "base"
    if kind == "adapter":
        tiny_model().base_model.save_pretrained(base)  # without a classifier of three labels
        model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))
    options = {"model": model, "processing_class": words, "data_collator": collator}
    run = build_federation(
        tmp_path / "run",
        clients,
        num_rounds=1,
        trainer={key: value for key, value in options.items() if value is not None},
    )
    run.train()
    run.save_model()
    task = "text-classification" if kind == "adapter" else kind
    card = written_card(run)
    assert f'pipeline("{task}"' in card
    paths = {"path/to/this/repository": str(tmp_path / "run"), "path/to/the/base/model": str(base)}
    printed = run_code(card, paths)
    # A tiny model may find no entity in the text.
    expected = {"text-generation": "generated_text", "token-classification": "["}.get(task, "score")
    assert expected in printed


def test_a_model_without_a_saved_tokenizer_has_no_pipeline(tmp_path):
    assert "pipeline(" not in written_card(build_federation(tmp_path))
