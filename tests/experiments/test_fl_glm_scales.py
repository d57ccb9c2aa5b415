"""The FL-GLM recipes run at the paper's scale, on small random models of the real classes with real tokenizers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from chatglm_repository import write_repository
from datasets import Dataset
from superglue_raw import files
from transformers import LlamaConfig, LlamaForCausalLM

from hf_federated.experiments.benchmark.grid import plan_runs, read_section
from hf_federated.experiments.benchmark.measured_run import measure_run
from hf_federated.experiments.recipe.recipe import parse_recipe, partitioner_has_seed
from hf_federated.experiments.recipe.yaml_file import read_values
from hf_federated.tasks import superglue_cloze_rows


FOLDER = Path(__file__).parents[2] / "recipes" / "fl_glm"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml") if "\nscales:" in path.read_text(encoding="utf-8"))
# The task of SuperGLUE of each recipe; the columns of the other recipes.
TASKS = {
    "strategies": "cb",
    "figures6_to_8_participants": "cb",
    "wic": "wic",
    "multirc": "multirc",
    "record": "record",
}
TASKS |= {"figure5_skewed_labels": "copa", "table6_averaging_period": "copa"}
# Epochs of the recipes whose default scale has other data and other epochs.
EPOCHS = {"figure5_skewed_labels": 3, "table6_averaging_period": 3, "figures6_to_8_participants": 2}
COLUMNS = {
    "summaries": ("source", "targets"),
    "cnn_dailymail": ("article", "highlights"),
    "xsum": ("document", "summary"),
}
TEXTS = ["a warm film in Paris", "It rained in Lund, so he got wet!", "yes no maybe Rome\nTL;DR: Answer:"] * 8


def llama2_dir(folder: Path) -> Path:
    """A small model of the class of Llama 2, and a tokenizer of the class of Llama 2 with a SentencePiece file."""
    sentencepiece = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    settings = {"vocab_size": 300, "model_type": "bpe", "hard_vocab_limit": False, "byte_fallback": True}
    settings |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_writer=written, **settings)
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    values = json.dumps({"tokenizer_class": "LlamaTokenizer", **names})
    (folder / "tokenizer_config.json").write_text(values, encoding="utf-8")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=320, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Models of the scales."""
    folder = tmp_path_factory.mktemp("models")
    llama2 = llama2_dir(folder / "llama2")
    return {"llama2": llama2, "paper": write_repository(folder / "chatglm", 1, TEXTS)}


def write_data(recipe: str, folder: Path) -> Path:
    """A few examples for a recipe, in the layout of `prepare_data.py` or of the Hub."""
    if recipe in COLUMNS:
        source, target = COLUMNS[recipe]
        summary: Any = [["Rome"], ["a film"]] * 4 if recipe == "summaries" else ["Rome", "a film"] * 4
        rows = Dataset.from_dict({source: TEXTS[:8], target: summary})
    else:
        rows = superglue_cloze_rows(TASKS[recipe], files(TASKS[recipe]), answered_only=True)
        rows = rows.select([number % len(rows) for number in range(4)])
        rows = rows.map(lambda row, number: {"id": f"row-{number}"}, with_indices=True)
        for column in ("iid_owner", "skewed_owner"):
            rows = rows.add_column(column, ["first", "second"] * (len(rows) // 2))
    for split in ("train", "validation", "test"):
        rows.to_parquet(folder / f"{split}.parquet")
    return folder


def planned_runs(recipe: str, scale: str, model: Path, data: Path) -> list[Any]:
    length = "task.max_source_length=40" if recipe in COLUMNS else "task.max_length=240"
    changes = [f"scale={scale}", f"model.name_or_path={model}", f"data.path={data}", "data.name=null"]
    changes += ["data.revision=null", "training.use_cpu=true", "training.num_train_epochs=1", length]
    if recipe in COLUMNS:
        changes.append("task.max_target_length=4")
    values = read_values(FOLDER / f"{recipe}.yaml", changes)
    return plan_runs(values, read_section(values), partitioner_has_seed)


@pytest.mark.parametrize("recipe", RECIPES)
def test_paper_scale_names_the_models_and_settings_of_the_paper(recipe):
    for scale, name in (("paper", "zai-org/chatglm-6b"), ("llama2", "meta-llama/Llama-2-7b-hf")):
        values = read_values(FOLDER / f"{recipe}.yaml", [f"scale={scale}"])
        parse_recipe(values)
        parsed = parse_recipe(values)
        assert parsed.model.name_or_path == name and parsed.model.prefix == {"num_virtual_tokens": 128}
        assert parsed.model.lora is None
        assert bool((parsed.model.kwargs or {}).get("trust_remote_code")) is (scale == "paper")
        training = parsed.training
        assert (training["learning_rate"], training["warmup_steps"], training["weight_decay"]) == (2e-2, 0, 0.0)
        if recipe in EPOCHS:
            assert training["num_train_epochs"] == EPOCHS[recipe]


def test_prefixes_have_the_size_of_grouped_keys_and_values(tmp_path):
    """ChatGLM2 has fewer heads of keys and values than heads of queries, in a field that PEFT does not read."""
    model = write_repository(tmp_path / "model", 2, TEXTS)
    (tmp_path / "data").mkdir()
    runs = planned_runs("wic", "paper", model, write_data("wic", tmp_path / "data"))
    result = measure_run(runs[0].values, runs[0].method, tmp_path / "run")
    assert result["bytes_up"] > 0


SOME = [
    ("summaries", "paper", "Client-batch"),
    ("wic", "paper", "Serial, averaged"),
    ("record", "llama2", "Server-hierarchical"),
]
ALL = [(recipe, scale, None) for recipe in RECIPES for scale in ("paper", "llama2")]


@pytest.mark.parametrize(
    ("recipe", "scale", "only"), [*SOME, *(pytest.param(*item, marks=pytest.mark.slow) for item in ALL)]
)
def test_recipe_takes_a_step_and_evaluates_on_a_small_model(recipe, scale, only, models, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    runs = planned_runs(recipe, scale, models[scale], write_data(recipe, data))
    for run in runs:
        if run.seed != 0 or only not in (None, run.name) or "10" in run.name:
            continue
        result = measure_run(run.values, run.method, tmp_path / "run")
        assert result["metric"] in result["metrics"]
        if run.method == "federated":
            assert result["num_rounds"] >= 1 and result["bytes_up"] > 0
