"""Recipes with `model.head`: the encoder runs once, and clients train heads on its features."""

from __future__ import annotations

import json

import datasets
import pytest
from transformers import AutoModel, AutoModelForSequenceClassification, BertModel

from hf_federated.experiments.benchmark.measured_run import measure_run
from hf_federated.experiments.estimate.recipe_estimate import estimate_recipe
from hf_federated.experiments.execution import build_run
from hf_federated.experiments.network.run import build_client
from hf_federated.experiments.recipe.recipe import RecipeError, load_recipe
from hf_federated.experiments.recipe.yaml_file import read_values
from hf_federated.experiments.train_recipe import train_recipe
from hf_federated.features import TfidfEncoder


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_FEDERATED_CACHE", str(tmp_path / "cache"))


HEADS = {
    "logistic": ["model.head=logistic"],
    "mlp": ["model.head=mlp", "model.head_hidden=8", "model.pooling=cls"],
    "blocks": ["model.head=blocks", "model.freeze=embeddings+2"],
}


@pytest.mark.parametrize("settings", HEADS.values(), ids=HEADS)
def test_recipe_trains_a_head_with_both_baselines(recipe_path, settings, tmp_path):
    recipe = load_recipe(recipe_path, [*settings, "compare=[centralized,local]", "local_clients=1"])
    results = train_recipe(recipe, output_dir=str(tmp_path / "out"), echo=lambda line: None)
    scores = [item["metrics"]["accuracy"] for item in (results["federated"], *results["baselines"].values())]
    assert len(scores) == 3 and all(0 <= score <= 1 for score in scores)
    assert '"local_loops": {"lean": 2}' in (tmp_path / "out" / "_rounds.jsonl").read_text()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.id2label == {0: "fresh", 1: "rotten"}
    encoder = json.loads((tmp_path / "out" / "feature_encoder.json").read_text())
    assert encoder["name_or_path"] == recipe.model.name_or_path and len(encoder["digest"]) == 32


def test_second_run_with_another_seed_encodes_no_text_again(recipe_path, monkeypatch, tmp_path):
    datasets.disable_caching()  # `datasets` also keeps encoded datasets, but only for the same rows in the same order
    counts, calls, forward = [], [], BertModel.forward
    monkeypatch.setattr(BertModel, "forward", lambda self, **inputs: calls.append(1) or forward(self, **inputs))
    for number in range(2):
        settings = ["model.head=logistic", "data.test_clients=4", f"data.seed={number}", f"training.seed={number}"]
        train_recipe(load_recipe(recipe_path, settings), str(tmp_path / f"{number}"), echo=lambda line: None)
        counts.append(len(calls))
    datasets.enable_caching()
    assert counts[0] == counts[1] > 0


def test_second_run_loads_no_weights(recipe_path, monkeypatch, tmp_path):
    recipe = load_recipe(recipe_path, ["model.head=mlp"])
    build_run(recipe, str(tmp_path / "first"))
    monkeypatch.setattr(AutoModel, "from_pretrained", lambda *args, **kwargs: pytest.fail("the model was loaded"))
    build_run(recipe, str(tmp_path / "second"))


def test_clients_of_different_heads_and_models_distill(recipe_path, model_dir, tmp_path):
    """A logistic regression, a network on other features, blocks and a whole model learn from one another."""
    models = [
        {"head": "logistic"},
        {"head": "mlp", "head_hidden": 4, "pooling": "cls", "training": {"learning_rate": 0.02}},
        {"head": "blocks", "freeze": "embeddings+1"},
        {},
    ]
    entries = json.dumps([{"name_or_path": str(model_dir), **entry} for entry in models])
    settings = [
        f"client_models={entries}",
        "model.head=mlp",
        "public={share: 0.3}",
        "federation.clients_per_round=4",
    ]
    settings += ["partition={name: label-dirichlet, num_clients: 4, alpha: 5.0}", "federation.distillation=dsfl"]
    values = read_values(recipe_path, [*settings, "data.test_clients=null", "data.test_examples=0.1"])
    result = measure_run(values, "federated", tmp_path / "run")
    assert result["num_failed"] == 0 and result["num_clients"] == 4


def test_lora_trains_on_the_blocks(recipe_path, tmp_path):
    settings = [*HEADS["blocks"], "model.lora={r: 2, target_modules: [query, value]}"]
    results = train_recipe(load_recipe(recipe_path, settings), str(tmp_path / "out"), echo=lambda line: None)
    assert results["federated"]["bytes_up"] > 0 and (tmp_path / "out" / "adapter_model.safetensors").exists()


TFIDF = ["model.name_or_path=tfidf-svd", "model.head=logistic", "model.kwargs={num_components: 2}"]


def test_recipe_without_a_model_trains_on_tfidf_features(recipe_path, tmp_path):
    run = build_run(load_recipe(recipe_path, TFIDF), str(tmp_path / "out"))
    expected = TfidfEncoder(num_components=2).fit(run.data.raw.train.to_dataset()["text"][:])
    assert run.trainer.processing_class.digest == expected.digest


def test_tfidf_is_fitted_on_the_public_examples_and_shared_by_clients(recipe_path, tmp_path):
    entries = "client_models=[{name_or_path: tfidf-svd, head: mlp, kwargs: {num_components: 2}}]"
    settings = [*TFIDF, entries, "public={share: 0.5}", "federation.distillation=fedmd"]
    run = build_run(load_recipe(recipe_path, settings), str(tmp_path / "out"))
    expected = TfidfEncoder(num_components=2).fit(run.data.raw.public["text"][:])
    assert run.trainer.processing_class.digest == expected.digest
    run.trainer.train()


def test_tfidf_of_parties_on_different_machines_needs_public_examples(recipe_path, tmp_path):
    with pytest.raises(RecipeError, match="must fit on the same texts. Set public.path"):
        build_client(load_recipe(recipe_path, TFIDF), "movie 01", str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.head=linear"], "model.head is 'linear'"),
        (["model.head_hidden=3"], "model.head_hidden is set without head. Remove it, or set model.head to mlp"),
        (["model.head=logistic", "model.head_hidden=3"], "model.head_hidden is set with head: logistic"),
        (["model.head=mlp", "model.head_hidden=0"], "model.head_hidden is 0; it must be at least 1"),
        (["model.head=blocks"], "model.head is blocks without model.freeze"),
        (["model.head=mlp", "model.freeze=embeddings"], "model.freeze is set with head: mlp"),
        (["model.head=logistic", "model.lora={r: 2}"], "model.lora is set with head: logistic"),
        (["model.head=logistic", "federation.freeze=embeddings"], "federation.freeze is set with model.head"),
        (["model.head=logistic", "task.name=seq2seq"], "Cached features need text-classification"),
        (["model.name_or_path=tfidf-svd"], "model.name_or_path is tfidf-svd. Set model.head to logistic or mlp"),
        (["client_models=[{name_or_path: bert, head: blocks}]"], "client_models[0].head is blocks without"),
    ],
)
def test_invalid_combinations_are_refused(recipe_path, settings, message):
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe_path, settings)
    assert message in str(error.value)


@pytest.mark.parametrize("freeze", ["2", "embeddings+9", "all"])
def test_invalid_frozen_parts_are_refused(recipe_path, freeze):
    recipe = load_recipe(recipe_path, ["model.head=blocks", f"model.freeze={freeze!r}"])
    with pytest.raises(RecipeError, match="`freeze` is"):
        build_run(recipe)


def test_estimate_names_what_it_does_not_support(recipe_path):
    with pytest.raises(RecipeError, match="model.head is mlp, but the estimate does not support cached features"):
        estimate_recipe(load_recipe(recipe_path, ["model.head=mlp"]))
