"""Distillation recipes: examples that are set aside, and models that are assigned to clients."""

from __future__ import annotations

import pytest

from hf_federated import MHAT
from hf_federated.experiments.data.raw import load_raw_data
from hf_federated.experiments.execution import build_run, run_federated
from hf_federated.experiments.model_loading import load_tokenizer
from hf_federated.experiments.recipe.recipe import load_recipe
from hf_federated.experiments.recipe.schema import RecipeError


SET_ASIDE = ["public={share: 0.25, server_share: 0.1}", "data.path={texts}", "data.test_split=test"]
SET_ASIDE += ["data.test_clients=null", "partition={name: iid, num_clients: 3}", "federation.clients_per_round=3"]


@pytest.fixture
def recipe(recipe_path, texts_dir):
    """A function that loads a recipe with public and server examples, and with additional settings."""
    return lambda *settings: load_recipe(
        recipe_path, [text.replace("{texts}", str(texts_dir)) for text in (*SET_ASIDE, *settings)]
    )


def test_examples_are_split_into_public_server_and_client_examples(recipe):
    raw = load_raw_data(recipe("federation.distillation=dsfl"))
    assert (len(raw.public), len(raw.server), len(raw.train.to_dataset())) == (15, 6, 39)
    parts = [set(rows["id"]) for rows in (raw.public, raw.server, raw.train.to_dataset())]
    assert len(set.union(*parts)) == sum(map(len, parts)) == 60
    assert "label" not in raw.public.column_names and "label" in raw.server.column_names


def test_limits_for_public_and_server_examples_do_not_change_clients(recipe):
    whole = load_raw_data(recipe("federation.distillation=dsfl"))
    fewer = load_raw_data(recipe("public={share: 0.25, server_share: 0.1, max_rows: 4, max_server_rows: 2}"))
    assert (len(fewer.public), len(fewer.server)) == (4, 2)
    assert set(fewer.public["id"]) < set(whole.public["id"])
    assert fewer.train.to_dataset()["id"] == whole.train.to_dataset()["id"]


def test_public_and_server_examples_are_read_from_files(recipe, texts_dir):
    test, shifted = (texts_dir / f"{split}.parquet" for split in ("test", "shifted"))
    section = f"public={{path: {test}, server_path: {shifted}, max_rows: 5}}"
    raw = load_raw_data(recipe("federation.distillation=dsfl", section))
    assert len(raw.public) == 5 and all(name.startswith("test-") for name in raw.public["id"])
    assert "label" not in raw.public.column_names
    assert [name.partition("-")[0] for name in raw.server["id"]] == ["shifted"] * 12
    assert raw.server.features["label"] == raw.train.features["label"]
    # No training example is set aside.
    assert len(raw.train.to_dataset()) == 60


def test_runs_with_and_without_distillation_have_the_same_private_examples(recipe):
    distilled, undistilled = (build_run(recipe(f"federation.distillation={name}")) for name in ("mhat", "null"))
    assert distilled.data.raw.train.to_dataset()["id"] == undistilled.data.raw.train.to_dataset()["id"]
    assert undistilled.trainer.distillation is None


def test_distillation_named_by_a_reference_gets_the_public_examples(recipe):
    name = "hf_federated.distillation.mhat:MHAT"
    run = build_run(recipe(f"federation.distillation={name}", "federation.distillation_kwargs={server_epochs: 2}"))
    assert type(run.trainer.distillation) is MHAT and run.trainer.distillation.server_epochs == 2
    assert len(run.trainer.public_dataset) == 15
    # FedDRS uses no public examples, whether it is named or referenced.
    run = build_run(recipe("federation.distillation=hf_federated.distillation.feddrs:FedDRS"))
    assert run.trainer.public_dataset is None


def test_aggregation_that_trains_on_the_server_gets_its_examples(recipe):
    run = build_run(recipe("federation.aggregation=fltrust"))
    assert len(run.trainer.server_dataset) == 6 and run.trainer.public_dataset is None
    assert run_federated(run)["bytes_up"] > 0


def test_client_models_are_assigned_in_turn_with_their_training_arguments(recipe, model_dir):
    models = f"[{{name_or_path: {model_dir}, kwargs: {{num_hidden_layers: 1}}}}, "
    models += f"{{name_or_path: {model_dir}, training: {{learning_rate: 0.5}}}}]"
    run = build_run(recipe("federation.distillation=adafd", f"client_models={models}"))
    assert run_federated(run)["bytes_up"] > 0
    opened = [run.trainer.engine.worker.models.open(client_id) for client_id in run.trainer.clients]
    assert [model.trainer.model.config.num_hidden_layers for model in opened] == [1, 3, 1]
    assert [model.args.learning_rate for model in opened] == [0.01, 0.5, 0.01]
    assert {model.trainer.model.config.id2label[0] for model in opened} == {run.trainer.model.config.id2label[0]}
    assert load_tokenizer(run.recipe.model).vocab == opened[0].trainer.processing_class.vocab


def test_sequence_tagging_distills_from_raw_examples(recipe):
    run = build_run(recipe("federation.distillation=dsfl", "task=null", "task.name=sequence-tagging"))
    assert "tokens" in run.data.raw.public.column_names
    assert {"ner_tags", "labels"}.isdisjoint(run.data.raw.public.column_names)
    assert run_federated(run)["bytes_up"] > 0
    logged = [entry for entry in run.trainer.state.log_history if "federated/public_positions" in entry]
    assert logged[0]["federated/public_positions"] == sum(map(len, run.data.raw.public["tokens"]))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("public={share: 1.5}", "public_share=1.5, but it must be at least 0 and below 1"),
        ("public={server_share: 0.1}", "public: share and path are both missing"),
        ("public={share: 0.2, path: texts}", "public: share and path are both set"),
        ("public={path: texts, server_share: 0.1}", "server_share and stratify_by_column need share"),
        ("public={share: 0.2, server_path: texts}", "server_path is set without path"),
        ("public={path: no-such-file.csv}", "public.path: .*no-such-file.csv"),
        ("network={clients: [a, a]}", "each client must be listed once"),
        ("network={clients: [a], num_to_start: 2}", "num_to_start is 2; it must be at most 1"),
        ("network={rejoin_timeout: 0}", "network.rejoin_timeout is 0; it must be more than 0"),
        ("public={share: 0.2, rows: 3}", "public.rows is not a field"),
        ("public={share: 0.2, max_rows: 0}", "public.max_rows is 0"),
        ("client_models=[{path: x}]", r"client_models\[0\].path is not a field"),
        ("client_models=[{name_or_path: x, training: {lr: 1}}]", r"client_models\[0\].training.lr is not a field"),
        ("client_models=bert", "client_models is 'bert'"),
    ],
)
def test_invalid_distillation_recipe_is_rejected(recipe, setting, message):
    with pytest.raises(RecipeError, match=message):
        load_raw_data(recipe(setting))


def test_public_section_without_partition_is_rejected(recipe_path):
    with pytest.raises(RecipeError, match="public.share is set without partition"):
        load_recipe(recipe_path, ["public={share: 0.2}", "partition=null"])


def test_method_that_needs_server_examples_is_rejected_without_them(recipe):
    with pytest.raises(RecipeError, match="server_dataset"):
        build_run(recipe("federation.distillation=fedid", "public={share: 0.2}"))
