"""`hf-federated train` from a recipe to a model, on a tiny model and 40 clients."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import ModelCard
from peft import AutoPeftModelForSequenceClassification
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, TrainingArguments

from hf_federated import FederatedConfig
from hf_federated.cli.baselines import Baselines, passes_over_a_client
from hf_federated.cli.inputs import load_clients, load_model, load_tokenizer, pooled_by_length
from hf_federated.cli.main import main
from hf_federated.cli.recipe import load_recipe
from hf_federated.cli.train import closing_table, train


RECIPES = sorted(
    path
    for path in Path(__file__).parents[2].glob("recipes/**/*.yaml")
    if path.read_text(encoding="utf-8").startswith("# hf-federated train")
)


def set_all(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def test_one_round_leaves_model_card_plots_results_and_table(recipe_path, tmp_path, capsys):
    out = tmp_path / "elsewhere"
    code = main(
        ["train", str(recipe_path), "--output-dir", str(out)]
        + set_all("compare=[centralized, local]", "local_clients=2", "plots=true")
    )
    printed = capsys.readouterr().out
    assert code == 0
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert model.config.id2label == {0: "fresh", 1: "rotten"}
    ModelCard.load(out / "README.md")
    for name in ("learning_curve.png", "partition.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    results = json.loads((out / "results.json").read_text())
    assert (results["num_train_clients"], results["num_test_clients"], results["num_test_rows"]) == (36, 4, 16)
    assert results["baselines"]["local"]["num_clients"] == 2
    # One round of one epoch with 2 of 36 clients.
    assert results["baselines"]["local"]["num_epochs"] == 1
    assert results["baselines"]["centralized"]["num_epochs"] == pytest.approx(2 / 36)
    payload = sum(tensor.nbytes for tensor in load_file(out / "model.safetensors").values())
    for direction in ("bytes_up", "bytes_down"):
        assert results["federated"][direction] == pytest.approx(2 * payload, rel=0.5)
    table = printed[printed.index("Accuracy on the same 16 rows of 4 held-out clients") :]
    for start in ("centralized ", "local-only (mean of 2)", "federated ", "federated minus local-only: "):
        assert any(line.startswith(start) for line in table.splitlines())
    assert "\n".join(closing_table(results)) in table


def test_a_federation_learns_the_word_that_gives_the_label_away(recipe_path):
    """Every client holds 4 rows; 12 rounds of 10 clients find the word."""
    recipe = load_recipe(
        recipe_path,
        ["federation.num_rounds=12", "federation.clients_per_round=10", "training.seed=1", "training.eval_steps=12"],
    )
    assert train(recipe)["federated"]["accuracy"] > 0.9


def test_a_lora_recipe_leaves_an_adapter(recipe_path, tmp_path):
    recipe = load_recipe(recipe_path, ["model.lora={r: 2, target_modules: [query, value]}"])
    results = train(recipe)
    model = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "run", num_labels=2)
    sent = [value for name, value in model.named_parameters() if "lora_" in name or "modules_to_save" in name]
    # Two clients; the adapter alone, and the header of a message, which on a tiny model weighs as much.
    assert results["federated"]["bytes_up"] < 2 * (sum(value.nbytes for value in sent) + 8192)


def test_results_over_held_out_clients_are_given_on_request(recipe_path):
    results = train(load_recipe(recipe_path, ["federation.evaluate_clients=true"]))
    over_clients = results["federated"]["over_clients"]
    # Four clients of four rows each: the mean over clients is the mean over rows.
    assert over_clients["federated/eval_accuracy_mean"] == pytest.approx(results["federated"]["accuracy"])
    assert over_clients["federated/eval_accuracy_worst"] <= over_clients["federated/eval_accuracy_best"]


def test_test_rows_are_of_clients_that_do_not_train(recipe_path):
    recipe = load_recipe(recipe_path, ["data.max_clients=10"])
    clients = load_clients(recipe.data, load_tokenizer(recipe.model))
    assert (len(clients.train), len(clients.test)) == (10, 4)
    assert not set(clients.train) & set(clients.test)
    assert set(clients.train.column_names) >= {"input_ids", "attention_mask", "labels"}
    lengths = [len(ids) for ids in pooled_by_length(clients.test)["input_ids"]]
    assert lengths == sorted(lengths) and len(lengths) == sum(clients.test.num_rows.values())


def test_max_clients_changes_no_test_client_and_the_seed_does(recipe_path):
    def test_ids(*overrides):
        recipe = load_recipe(recipe_path, overrides)
        return list(load_clients(recipe.data, load_tokenizer(recipe.model)).test)

    assert test_ids() == test_ids("data.max_clients=10")
    assert test_ids() != test_ids("data.seed=1")


def test_pairs_of_texts_files_and_even_shares(recipe_path, tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [{"one": "a film", "two": "not a plot", "label": number % 3} for number in range(12)]
    path.write_text("\n".join(map(json.dumps, rows)))
    overrides = [f"data.path={path}", "data.client_column=null", "data.num_clients=4", "data.test_clients=0.25"]
    recipe = load_recipe(recipe_path, [*overrides, "data.text_column=[one, two]"])
    clients = load_clients(recipe.data, load_tokenizer(recipe.model))
    assert list(clients.train.num_rows.values()) == [3, 3, 3] and len(clients.test) == 1
    assert clients.label_names == ["0", "1", "2"]
    first = clients.train[next(iter(clients.train))][0]
    assert len(first["input_ids"]) == len("[CLS] a film [SEP] not a plot [SEP]".split())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["data.path=./no/such/folder"], ["data.path", "./no/such/folder"]),
        (["data.path=nobody/nothing"], ["data.path", "nobody/nothing"]),
        (["data.train_split=validation"], ["data.path", "validation"]),
        (["data.text_column=txt"], ["data.text_column", "'txt'", "text, label, movie"]),
        (["data.label_column=stars"], ["data.label_column", "'stars'", "text, label, movie"]),
        (["data.client_column=actor"], ["data", "'actor'", "movie"]),
        (["data.min_rows_per_client=5"], ["data", "5"]),
        (["data.test_clients=40"], ["data.test_clients", "40 of 40"]),
        (["model.name_or_path=./no/model"], ["model.name_or_path", "./no/model"]),
        (["model.lora={rank: 2}"], ["model.lora", "rank"]),
        (["training.load_best_model_at_end=true"], ["training", "load_best_model_at_end"]),
        (["federation.aggregation=fedsum"], ["federation", "fedsum", "fedavg"]),
        (["federation.clients_per_round=100"], ["federation", "100"]),
        (["federation.freeze=9"], ["federation", "9"]),
        (["training.max_steps=5"], ["max_steps"]),
    ],
)
def test_a_bad_recipe_exits_with_2_and_one_line(recipe_path, capsys, settings, words):
    assert main(["train", str(recipe_path), *set_all(*settings)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("hf-federated: error: ")
    for word in words:
        assert word in error


def test_a_missing_recipe_exits_with_2_and_one_line(tmp_path, capsys):
    path = tmp_path / "none.yaml"
    assert main(["train", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"hf-federated: error: cannot read the recipe '{path}': No such file or directory.\n"
    )


def test_several_processes_are_refused(recipe_path, capsys, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    assert main(["train", str(recipe_path)]) == 2
    assert "runs in one process" in capsys.readouterr().err


def test_budgets_of_the_baselines():
    args = TrainingArguments(output_dir="unused", per_device_train_batch_size=4, use_cpu=True)
    assert passes_over_a_client(FederatedConfig(num_rounds=6, local_epochs=2), args, rows_a_client=10) == 12
    # 6 rounds × 5 steps × 4 rows, over 10 rows.
    assert passes_over_a_client(FederatedConfig(num_rounds=6, local_steps=5), args, rows_a_client=10) == 12


def test_baselines_start_from_the_model_and_leave_it_alone(recipe_path, tmp_path):
    recipe = load_recipe(recipe_path)
    tokenizer = load_tokenizer(recipe.model)
    clients = load_clients(recipe.data, tokenizer)
    model = load_model(recipe.model, clients.label_names, seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", learning_rate=0.01)
    federation = FederatedConfig(num_rounds=1, freeze="embeddings+1")
    rows = pooled_by_length(clients.test)
    baselines = Baselines(model, args, federation, clients.train, rows, processing_class=tokenizer)
    told = {}
    result = baselines.local(3, on_client=lambda client_id, metrics: told.update({client_id: metrics["loss"]}))
    assert len(told) == 3
    assert result.metrics["loss"] == pytest.approx(np.mean(list(told.values())))
    assert result.spread["loss"] == pytest.approx(np.std(list(told.values())))
    assert baselines.local(3).metrics == result.metrics  # nothing is left behind by the clients before
    for name, value in model.state_dict().items():
        assert value.equal(before[name])
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_runs_one_round_on_a_tiny_model(path, model_dir, reviews_dir, tmp_path):
    """Names, types and combinations of a shipped recipe hold; the size of the model and of the data is not its own."""
    recipe = load_recipe(
        path,
        [
            f"model.name_or_path={model_dir}",
            f"data.path={reviews_dir}",
            "data.min_rows_per_client=2",
            "data.test_clients=4",
            "federation.num_rounds=1",
            "federation.clients_per_round=2",
            "training.eval_steps=1",
            "training.use_cpu=true",
            "local_clients=1",
        ],
    )
    results = train(recipe, output_dir=str(tmp_path))
    assert results["federated"]["bytes_up"] > 0
    assert path.read_text().startswith("# hf-federated train recipes/")
