"""Recipes for causal models: cloze questions with an adapter, generated summaries, and split models."""

from __future__ import annotations

import json

import numpy as np
import pytest
from datasets import concatenate_datasets, load_dataset
from huggingface_hub import ModelCard
from superglue_raw import files
from transformers import AutoTokenizer, Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_federated.cards import render_saved
from hf_federated.experiments.benchmark.measured_run import measure_run
from hf_federated.experiments.recipe.recipe import load_recipe, parse_recipe
from hf_federated.experiments.recipe.schema import RecipeError
from hf_federated.experiments.recipe.yaml_file import read_values
from hf_federated.experiments.train_recipe import closing_table, train_recipe
from hf_federated.tasks import Summarization, superglue_cloze_rows
from hf_federated.tasks.superglue import LABELS


def test_cloze_recipe_trains_an_adapter_and_scores_all_tasks(recipe_path, llama_dir, tmp_path):
    rows = {name: superglue_cloze_rows(name, files(name)) for name in LABELS}
    concatenate_datasets(list(rows.values())).to_parquet(tmp_path / "cloze" / "test.parquet")
    trained = [rows[name].filter(lambda row: row["label"] >= 0) for name in LABELS]
    concatenate_datasets(trained).to_parquet(tmp_path / "cloze" / "train.parquet")
    overrides = [
        f"model={{name_or_path: {llama_dir}, lora: {{r: 2}}}}",
        f"data={{path: {tmp_path / 'cloze'}, test_split: test}}",
        "task={name: superglue-cloze, max_length: 200}",
        "partition={name: natural, column: task}",
        "federation.clients_per_round=3",
        "plots=true",
    ]
    results = train_recipe(load_recipe(recipe_path, overrides))
    assert results["metric"] == "superglue_score" and results["num_train_clients"] == 8
    metrics = results["federated"]["metrics"]
    assert metrics["superglue_score"] == pytest.approx(np.mean([metrics[f"{name}_score"] for name in LABELS]))
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()


def test_summarization_recipe_generates_summaries(recipe_path, llama_dir, texts_dir, tmp_path):
    overrides = [
        f"model.name_or_path={llama_dir}",
        f"data={{path: {texts_dir}, test_split: test}}",
        "task={name: summarization, target_column: targets, max_target_length: 4}",
        "partition={name: natural, column: site}",
        "compare=[centralized]",
    ]
    results = train_recipe(load_recipe(recipe_path, overrides))
    assert results["metric"] == "rougeL" and results["num_test_rows"] == 12
    assert 0 <= results["federated"]["metrics"]["rougeL"] <= 1
    assert 0 <= results["baselines"]["centralized"]["metrics"]["rougeL"] <= 1


def test_saved_split_model_has_the_same_summarization_score_as_in_training(
    recipe_path, llama_dir, texts_dir, tmp_path
):
    overrides = [
        f"model.name_or_path={llama_dir}",
        f"data={{path: {texts_dir}, test_split: test}}",
        "task={name: summarization, target_column: targets, max_target_length: 4}",
        "partition={name: iid, num_clients: 2}",
        "federation=null",
        "training.num_train_epochs=3",
        "training.eval_strategy=epoch",
        "training.learning_rate=0.01",
        "split={strategy: serial, encryption: true}",
        "compare=[centralized]",
    ]
    results = train_recipe(load_recipe(recipe_path, overrides))
    assert results["metric"] == "rougeL" and results["num_test_rows"] == 12
    assert 0 < results["baselines"]["centralized"]["metrics"]["rougeL"] <= 1
    # The saved, unsplit model gives the same metric.
    task = Summarization(target_column="targets", max_target_length=4)
    tokenizer = AutoTokenizer.from_pretrained(llama_dir)
    rows = load_dataset(str(texts_dir), split="test")
    features = task.for_evaluation(task.prepare(rows, tokenizer), tokenizer)
    trainer = Seq2SeqTrainer(
        task.load_model(str(tmp_path / "run")),
        Seq2SeqTrainingArguments(str(tmp_path / "whole"), predict_with_generate=True, report_to=[], use_cpu=True),
        data_collator=task.data_collator(tokenizer),
        eval_dataset=features,
        processing_class=tokenizer,
        compute_metrics=task.build_compute_metrics(tokenizer, features, rows),
    )
    split_score = results["federated"]["metrics"]["rougeL"]
    assert split_score > 0.1 and trainer.evaluate()["eval_rougeL"] == pytest.approx(split_score)


@pytest.mark.parametrize("adapter", ["lora: {r: 2}", "prefix: {num_virtual_tokens: 2}"])
def test_benchmark_runs_split_models_and_their_baseline(recipe_path, llama_dir, cloze_dir, adapter, tmp_path):
    overrides = [
        f"model={{name_or_path: {llama_dir}, {adapter}}}",
        f"data={{path: {cloze_dir}, test_split: validation}}",
        "task={name: superglue-cloze, max_length: 200}",
        "partition={name: iid, num_clients: 2}",
        "federation=null",
        "training.num_train_epochs=2",
        "training.eval_strategy=epoch",
        "split={strategy: client_batch, average_every: 1}",
    ]
    values = read_values(recipe_path, overrides)
    results = {name: measure_run(values, name, tmp_path / name) for name in ("federated", "centralized")}
    assert results["federated"]["num_epochs"] == results["centralized"]["num_epochs"] == 2
    assert results["federated"]["bytes_up"] > 0 and results["federated"]["num_clients"] == 2
    for result in results.values():
        assert 0 <= result["metrics"]["accuracy"] <= 1
    assert results["federated"]["step_name"] == "optimizer step"
    assert results["federated"]["history"][-1]["round"] == results["federated"]["num_rounds"]


@pytest.mark.parametrize("adapter", ["null", "{r: 2}"])
def test_split_recipe_trains_with_its_baseline_and_writes_all_outputs(
    recipe_path, llama_dir, cloze_dir, adapter, tmp_path, capsys
):
    overrides = [
        f"model={{name_or_path: {llama_dir}, lora: {adapter}}}",
        f"data={{path: {cloze_dir}, test_split: validation}}",
        "task={name: superglue-cloze, max_length: 200}",
        "partition={name: iid, num_clients: 2}",
        "federation=null",
        "training.num_train_epochs=2",
        "training.eval_strategy=epoch",
        "split={strategy: client_batch, average_every: 1}",
        "compare=[centralized]",
        "card={license: mit, tags: [copa]}",
        "plots=true",
    ]
    results = train_recipe(load_recipe(recipe_path, overrides))
    folder, table = tmp_path / "run", capsys.readouterr().out
    assert "\n".join(closing_table(results)) in table and "split (client_batch) minus centralized" in table
    assert json.loads((folder / "results.json").read_text()) == results
    for name in ("partition.png", "learning_curve.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    card = ModelCard.load(folder / "README.md")
    assert card.text.strip() == ModelCard(render_saved(folder / "run_record.json")).text.strip()
    assert card.data.license == "mit" and "copa" in card.data.tags
    assert {result.metric_type: result.metric_value for result in card.data.eval_results}["accuracy"] == (
        results["federated"]["metrics"]["accuracy"]
    )
    assert f"({results['federated']['bytes_up']:,} bytes)" in card.text
    assert (folder / ("adapter_model.safetensors" if adapter != "null" else "model.safetensors")).is_file()


def test_incompatible_fields_of_a_split_recipe_are_rejected(recipe_path):
    for override, message in (
        ("federation.num_rounds=3", "split and federation are both set"),
        ("split.strategy=parallel", "choose one of serial"),
        ("split.period=3", "period"),
        ("model.prefix={num_virtual_tokens: 2}", "either lora or prefix"),
    ):
        changes = ["split={strategy: serial}", "federation=null", "model.lora={r: 2}", override]
        with pytest.raises(RecipeError, match=message):
            parse_recipe(read_values(recipe_path, changes))
