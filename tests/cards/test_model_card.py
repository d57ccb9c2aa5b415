"""Model cards contain the logged numbers of the run and a header that the Hub can read."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import peft
import pytest
import torch
from datasets import Dataset
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback, TrainingArguments

from hf_federated import ClipUpdate, FederatedConfig, FederatedDataset, FederatedTrainer, FedOpt
from hf_federated.adapters import Exchange
from hf_federated.cards import RunRecord, render, render_model_card
from hf_federated.cards.facts import ModelFacts


SECRET = "the patient said"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def tiny_model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=2
        )
    )


def rows(num_rows: int = 24) -> Dataset:
    tokens = np.random.default_rng(0).integers(2, 16, (num_rows, 4))
    return Dataset.from_dict(
        {
            "input_ids": tokens.tolist(),
            "labels": (tokens[:, 0] > 8).astype(int).tolist(),
            "who": [f"client-{i % 4}" for i in range(num_rows)],
            "note": [SECRET] * num_rows,
        }
    )


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def trained(
    folder, model=None, eval_dataset=None, federation=None, options=None, trainer_class=FederatedTrainer, **arguments
):
    clients = FederatedDataset.from_column(rows(), "who")
    trainer = trainer_class(
        model=model or tiny_model(),
        args=TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=3,
            eval_strategy="epoch",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            **{"logging_strategy": "epoch", "save_strategy": "no", "learning_rate": 1e-2, **arguments},
        ),
        train_dataset=clients,
        eval_dataset=rows(12) if eval_dataset is None else eval_dataset,
        federation=federation
        or FederatedConfig(num_rounds=3, clients_per_round=0.5, aggregation=FedOpt(server_lr=0.5)),
        **{"compute_metrics": accuracy, **(options or {})},
    )
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def trainer(tmp_path_factory) -> FederatedTrainer:
    return trained(tmp_path_factory.mktemp("runs") / "tiny-federated")


@pytest.fixture(scope="module")
def record(trainer) -> RunRecord:
    return RunRecord.from_trainer(trainer)


def table_after(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without the alignment line."""
    below = text[text.index(f"\n{heading}\n") :]
    lines = re.search(r"((?:^\|.*\n)+)", below, re.MULTILINE)[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in [lines[0], *lines[2:]]]


# the header


def test_metadata_parses_back(trainer):
    card = ModelCard(str(render_model_card(trainer, language="en", license="mit", tags="reviews", dataset_tags="a/b")))
    assert card.data.library_name == "transformers"
    assert card.data.language == "en"
    assert card.data.license == "mit"
    assert card.data.datasets == ["a/b"]
    assert card.data.pipeline_tag == "text-classification"
    assert card.data.tags == ["federated-learning", "hf_federated", "generated_from_trainer", "fedopt", "reviews"]
    assert card.data.base_model is None  # the model was created from a configuration


def test_results_in_the_header_are_the_last_logged_results(trainer):
    last = [entry for entry in trainer.state.log_history if "eval_accuracy" in entry][-1]
    card = ModelCard(str(render_model_card(trainer)))
    found = {result.metric_type: result for result in card.data.eval_results}
    assert set(found) == {"loss", "accuracy"}
    assert found["accuracy"].metric_value == last["eval_accuracy"]
    assert found["loss"].metric_value == last["eval_loss"]
    assert found["loss"].dataset_type == "unknown"
    assert card.data.model_name == "tiny-federated"


def test_card_names_hub_dataset_and_its_commit(trainer, monkeypatch):
    evaluation = rows(12)
    # `load_dataset` stores this in the info of a dataset from the Hub
    evaluation.info.download_checksums = {f"hf://datasets/owner/reviews@{COMMIT}/test.parquet": None}
    evaluation.info.config_name = "default"
    monkeypatch.setattr(trainer, "eval_dataset", evaluation)
    card = render_model_card(trainer)
    assert card.data.datasets == ["owner/reviews"]
    result = card.data.eval_results[0]
    assert (result.dataset_name, result.dataset_type) == ("owner/reviews", "owner/reviews")
    assert (result.dataset_revision, result.dataset_config) == (COMMIT, "default")
    assert f"| Revision | {COMMIT} |" in card.text


def test_overridden_dataset_name_drops_the_commit(trainer, monkeypatch):
    evaluation = rows(12)
    evaluation.info.download_checksums = {f"hf://datasets/owner/reviews@{COMMIT}/test.parquet": None}
    monkeypatch.setattr(trainer, "eval_dataset", evaluation)
    assert COMMIT not in str(render_model_card(trainer, dataset_tags="other/reviews"))


def test_base_model_is_a_hub_id_and_never_a_local_path(trainer, record, tmp_path):
    tiny_model().save_pretrained(tmp_path / "weights")
    local = BertForSequenceClassification.from_pretrained(tmp_path / "weights")
    card = render(dataclasses.replace(record, model=ModelFacts.from_model(local)))
    assert "loaded from a local directory" in card
    assert str(tmp_path) not in card and "base_model" not in card
    local.config.name_or_path = "owner/tiny-bert"
    card = ModelCard(render(dataclasses.replace(record, model=ModelFacts.from_model(local))))
    assert card.data.base_model == "owner/tiny-bert"
    assert render_model_card(trainer, finetuned_from="owner/other").data.base_model == "owner/other"
    # The example scripts of transformers pass `--model_name_or_path`, which can be a directory.
    assert render_model_card(trainer, finetuned_from=str(tmp_path / "weights")).data.base_model is None


def test_header_has_no_results_if_the_task_is_unknown(record):
    unknown = dataclasses.replace(record, model=dataclasses.replace(record.model, task=None))
    data = ModelCard(render(unknown)).data
    assert data.eval_results is None and data.pipeline_tag is None


# the body


def test_order_of_sections(record):
    headings = re.findall(r"^#+ .*$", render(record), re.MULTILINE)
    assert headings == [
        "# tiny-federated",
        "## Results",
        "### Results by round",
        "## Federation",
        "## Exchanged information",
        "## Data",
        "## Training arguments",
        "## How to use",
        "## Versions",
    ]


def test_table_of_rounds_has_the_logged_numbers(trainer, record):
    table = table_after(render(record), "### Results by round")
    assert table[0] == ["Round", "Training loss", "Evaluation loss", "Accuracy", "Clients", "Bytes down", "Bytes up"]
    logged: dict[int, dict] = {}
    for entry in trainer.state.log_history:
        for key, value in entry.items():
            logged.setdefault(entry["step"], {}).setdefault(key, value)
    assert len(table) == 1 + 3
    for number, row in enumerate(table[1:], start=1):
        entry = logged[number]
        assert row == [
            str(number),
            f"{entry['loss']:.4f}",
            f"{entry['eval_loss']:.4f}",
            f"{entry['eval_accuracy']:.4f}",
            f"{entry['federated/num_clients']:.0f}",
            f"{entry['federated/bytes_down']:,.0f}",
            f"{entry['federated/bytes_up']:,.0f}",
        ]


def test_federation_table_has_the_settings_of_the_run(trainer, record):
    table = dict(table_after(render(record), "## Federation")[1:])
    assert table["Algorithm"] == "`FedOpt(server_lr=0.5)`"
    assert table["Clients"] == "4"
    assert table["Clients per round"] == "50% of the clients"
    assert table["Completed rounds"] == "3 of 3"
    assert table["Local training per round"] == "1 epoch"
    assert table["Federation seed"] == str(trainer.args.seed)
    assert f"({trainer.ledger.bytes_up:,} bytes)" in table["Bytes from clients to server"]
    assert f"({trainer.ledger.bytes_down:,} bytes)" in table["Bytes from server to clients"]


def test_card_counts_exchanged_parameters_and_shows_no_dataset_text(trainer, record):
    exchange = Exchange(trainer.model)
    card = render(record)
    assert f"the trainable parameters: {len(exchange.names)} tensors with {exchange.num_values:,} values" in card
    assert SECRET not in card


def test_table_of_training_arguments(record):
    table = dict(table_after(render(record), "## Training arguments")[1:])
    assert table["`learning_rate`"] == "0.01"
    assert table["`per_device_train_batch_size`"] == "3"
    assert table["`lr_scheduler_type`"] == "linear"


def test_data_table_counts_clients_and_examples(record):
    table = dict(table_after(render(record), "## Data")[1:])
    assert table["Examples"] == "24" and table["Clients"] == "4"
    assert table["Examples per client"] == "6 to 6, median 6"
    assert table["Partitioning"] == "`from_column(column='who', keep_column=False)`"
    assert table["Dataset"] == "name not recorded"


def test_many_rounds_are_subsampled_with_the_first_and_the_last(record):
    many = [{"round": i, "eval_loss": 1 / i, "loss": 1.0} for i in range(1, 101)]
    card = render(dataclasses.replace(record, rounds=many))
    shown = [int(row[0]) for row in table_after(card, "### Results by round")[1:]]
    assert len(shown) == 20 and shown[0] == 1 and shown[-1] == 100
    assert "The table shows 20 of 100 rounds." in card


def test_table_shows_evaluated_rounds_if_there_are_any(record):
    many = [{"round": i, "loss": 1.0, **({"eval_loss": 0.5} if i % 10 == 0 else {})} for i in range(1, 101)]
    card = render(dataclasses.replace(record, rounds=many))
    assert [int(row[0]) for row in table_after(card, "### Results by round")[1:]] == list(range(10, 101, 10))


def test_header_omits_numbers_that_are_not_finite(record, tmp_path):
    results = {"round": 3, "best_by": None, "metrics": {"eval_loss": "nan", "eval_accuracy": 0.5}}
    diverged = dataclasses.replace(record, results=results)
    diverged.save(tmp_path / "run.json")
    card = ModelCard(render(RunRecord.load(tmp_path / "run.json")))
    assert [result.metric_type for result in card.data.eval_results] == ["accuracy"]
    assert ["Evaluation loss", "nan"] in table_after(card.text, "## Results")


def test_saved_record_renders_to_the_same_card(record, tmp_path):
    record.save(tmp_path / "run.json")
    assert render(RunRecord.load(tmp_path / "run.json")) == render(record)


# other runs


def test_results_over_clients_are_the_logged_results(tmp_path):
    run = trained(
        tmp_path,
        eval_dataset=FederatedDataset.from_column(rows(), "who"),
        federation=FederatedConfig(num_rounds=1, evaluate_clients=True),
    )
    card = render_model_card(run)
    logged = {key: value for entry in run.state.log_history for key, value in entry.items()}
    table = table_after(card.text, "### Results by client")
    assert table[0] == ["Metric", "Mean", "Worst", "Best", "Spread"]
    by_metric = {row[0]: row[1:] for row in table[1:]}
    assert by_metric["Accuracy"] == [
        f"{logged[f'federated/eval_accuracy_{name}']:.4f}" for name in ("mean", "worst", "best", "spread")
    ]
    assert "| Evaluation data |  |\n" in card.text and card.text.count("| Clients | 4 |") == 3
    for client_id, metrics in run.client_metrics.items():
        assert f"| {client_id} |" in card.text
        assert f"{metrics['eval_accuracy']:.4f}" in card.text


def test_card_names_no_client_above_twenty_clients(tmp_path):
    named_rows = rows(24).remove_columns("who").add_column("who", [f"name-{i}" for i in range(21)] + ["name-0"] * 3)
    run = trained(
        tmp_path,
        eval_dataset=FederatedDataset.from_column(named_rows, "who"),
        federation=FederatedConfig(num_rounds=1, evaluate_clients=True),
    )
    card = str(render_model_card(run))
    assert "### Results by client" in card
    assert "name-" not in card


def test_results_over_clients_belong_to_the_saved_weights(tmp_path):
    calls = itertools.count()
    run = trained(
        tmp_path,
        eval_dataset=FederatedDataset.from_column(rows(), "who"),
        federation=FederatedConfig(num_rounds=3, evaluate_clients=True),
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="eval_earliest",
        options={"compute_metrics": lambda prediction: {"earliest": -next(calls)}},
    )
    assert run.state.best_global_step == 1
    logged = next(e for e in run.state.log_history if "federated/eval_loss_mean" in e)
    card = render_model_card(run).text
    row = next(row for row in table_after(card, "### Results by client") if row[0] == "Evaluation loss")
    assert row[1] == f"{logged['federated/eval_loss_mean']:.4f}"
    assert "| Client |" not in card  # the clients' metrics belong to the last round, not to the best round
    run.evaluate()
    assert "| Client |" in render_model_card(run).text


def test_card_omits_failures_if_rounds_were_not_logged(tmp_path):
    unlogged = trained(tmp_path, federation=FederatedConfig(num_rounds=2), logging_strategy="no")
    assert "Failed or rejected updates" not in str(render_model_card(unlogged))


def test_card_of_an_adapter_names_peft_and_the_base_model(tmp_path):
    base = tiny_model()
    base.config.name_or_path = "owner/tiny-bert"
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))
    run = trained(tmp_path, model=model, federation=FederatedConfig(num_rounds=1))
    card = ModelCard(str(render_model_card(run)))
    assert card.data.library_name == "peft"
    assert card.data.base_model == "owner/tiny-bert"
    assert "lora" in card.data.tags
    assert card.data.pipeline_tag == "text-classification"
    assert "the adapter's parameters" in card.text
    assert 'BertForSequenceClassification.from_pretrained("owner/tiny-bert", num_labels=2)' in card.text


def adapter_model(name="owner/tiny-bert"):
    base = tiny_model()
    base.name_or_path = base.config.name_or_path = name  # as `from_pretrained` sets both
    base.add_model_tags("reviews")
    return get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))


def test_saved_adapter_has_the_card_of_the_run_with_the_header_of_peft(tmp_path):
    model = adapter_model()
    model.save_pretrained(tmp_path / "plain")
    of_peft = ModelCard.load(tmp_path / "plain" / "README.md").data
    run = trained(tmp_path / "run", model=model, federation=FederatedConfig(num_rounds=1), save_strategy="epoch")
    for folder in (tmp_path / "run", tmp_path / "elsewhere", tmp_path / "run" / "checkpoint-1"):
        if "checkpoint" not in folder.name:
            run.save_model(str(folder))
        card = ModelCard.load(folder / "README.md")
        assert card.text.lstrip().startswith("# run\n") and "## Federation" in card.text
        assert card.data.base_model == of_peft.base_model == "owner/tiny-bert"
        assert card.data.library_name == of_peft.library_name == "peft"
        assert card.data.peft_version == peft.__version__
        assert set(of_peft.tags) == {"base_model:adapter:owner/tiny-bert", "lora", "reviews", "transformers"}
        assert {*of_peft.tags, "federated-learning", "hf_federated", "fedavg"} <= set(card.data.tags)
        assert len(card.data.tags) == len(set(card.data.tags))


def test_saved_adapter_keeps_the_arguments_of_the_written_card(tmp_path):
    run = trained(tmp_path / "run", model=adapter_model(), federation=FederatedConfig(num_rounds=1))
    run.create_model_card(license="mit", tags="hospital", dataset_tags="owner/reports")
    run.save_model()
    data = ModelCard.load(tmp_path / "run" / "README.md").data
    assert (data.license, data.datasets) == ("mit", ["owner/reports"]) and "hospital" in data.tags


def test_card_of_a_saved_adapter_names_no_local_base_model(tmp_path):
    run = trained(tmp_path / "run", model=adapter_model(str(tmp_path)), federation=FederatedConfig(num_rounds=1))
    run.save_model()
    text = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert str(tmp_path) not in text and "base_model" not in text


def test_saving_a_full_model_writes_no_card(tmp_path):
    run = trained(tmp_path / "run", federation=FederatedConfig(num_rounds=1))
    run.save_model()
    assert not (tmp_path / "run" / "README.md").exists()


def test_card_names_postprocessors(tmp_path):
    run = trained(
        tmp_path, federation=FederatedConfig(num_rounds=1), options={"postprocessors": [ClipUpdate(max_norm=2.0)]}
    )
    table = dict(table_after(str(render_model_card(run)), "## Federation")[1:])
    assert table["Postprocessing of updates"] == "`ClipUpdate(max_norm=2.0)`"


def test_card_written_during_training_has_the_users_arguments(tmp_path):
    class WriteCard(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            run["trainer"].create_model_card()

    class RememberTrainer(FederatedTrainer):
        def train(self, *args, **kwargs):
            run.setdefault("trainer", self)
            return super().train(*args, **kwargs)

    run: dict = {}
    folder = tmp_path / "midway"
    trained(
        folder,
        trainer_class=RememberTrainer,
        federation=FederatedConfig(num_rounds=1),
        options={"callbacks": [WriteCard()]},
        save_strategy="epoch",
        gradient_accumulation_steps=2,
    )
    card = ModelCard.load(folder / "README.md")
    assert card.text.lstrip().startswith("# midway\n")
    table = dict(table_after(card.text, "## Training arguments")[1:])
    assert table["`gradient_accumulation_steps`"] == "2"
    assert table["`max_grad_norm`"] == "1.0"


def test_card_reports_the_best_round_if_its_weights_are_loaded(tmp_path):
    run = trained(
        tmp_path,
        federation=FederatedConfig(num_rounds=3),
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        learning_rate=1.0,  # large enough for different results in each round
    )
    best = run.state.best_global_step
    logged = next(e for e in run.state.log_history if e["step"] == best and "eval_loss" in e)
    card = render_model_card(run)
    found = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert found["loss"] == logged["eval_loss"]
    assert f"the global model after round {best}. This round has the best `eval_loss`" in card.text


def test_card_of_an_untrained_trainer_has_no_results(tmp_path):
    untrained = FederatedTrainer(
        model=tiny_model(),
        args=TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True),
        train_dataset=FederatedDataset.from_column(rows(), "who"),
        federation=FederatedConfig(num_rounds=2),
    )
    card = render_model_card(untrained)
    assert card.data.eval_results is None
    assert "## Results" not in card.text and "### Results by round" not in card.text
    assert dict(table_after(card.text, "## Federation")[1:])["Completed rounds"] == "0 of 2"
