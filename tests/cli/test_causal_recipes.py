"""Tasks of causal models as recipes name them: cloze questions with an adapter, summaries that are generated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from causal import bytes_tokenizer, llama
from datasets import concatenate_datasets
from superglue_raw import files

from hf_federated.cli.recipe import load_recipe
from hf_federated.cli.train import train
from hf_federated.tasks import superglue_cloze_rows
from hf_federated.tasks.superglue import LABELS


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = bytes_tokenizer(["a dull film", "a bright plot"], vocab_size=270)
    tokenizer.save_pretrained(folder)
    llama(len(tokenizer)).save_pretrained(folder)
    return folder


def test_a_recipe_fills_blanks(recipe_path, llama_dir, tmp_path):
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
    results = train(load_recipe(recipe_path, overrides))
    assert results["metric"] == "superglue_score" and results["num_train_clients"] == 8
    metrics = results["federated"]["metrics"]
    assert metrics["superglue_score"] == pytest.approx(np.mean([metrics[f"{name}_score"] for name in LABELS]))
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()


def test_a_recipe_writes_summaries(recipe_path, llama_dir, texts_dir, tmp_path):
    overrides = [
        f"model.name_or_path={llama_dir}",
        f"data={{path: {texts_dir}, test_split: test}}",
        "task={name: summarization, target_column: targets, max_target_length: 4}",
        "partition={name: natural, column: site}",
        "compare=[centralized]",
    ]
    results = train(load_recipe(recipe_path, overrides))
    assert results["metric"] == "rougeL" and results["num_test_rows"] == 12
    assert 0 <= results["federated"]["metrics"]["rougeL"] <= 1
    assert 0 <= results["baselines"]["centralized"]["metrics"]["rougeL"] <= 1
