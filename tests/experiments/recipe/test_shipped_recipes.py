"""All recipes in this repository are valid at every scale and for every run, and run on tiny models."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import yaml

from hf_federated.experiments.benchmark.grid import plan_runs, read_section
from hf_federated.experiments.benchmark.measured_run import measure_run
from hf_federated.experiments.benchmark.selection import selected_section, trial_section
from hf_federated.experiments.recipe.recipe import load_recipe, parse_recipe, partitioner_has_seed
from hf_federated.experiments.recipe.yaml_file import read_values
from hf_federated.experiments.train_recipe import train_recipe


FOLDER = Path(__file__).parents[3] / "recipes"
COMMANDS = {"train": [], "benchmark": []}
for path in sorted(FOLDER.glob("**/*.yaml")):
    for command, paths in COMMANDS.items():
        if path.read_text(encoding="utf-8").startswith(f"# hf-federated {command}"):
            paths.append(path)
# These recipes differ from another recipe in their data, and this scale from another scale in the model.
SIMILAR = ("wic", "multirc", "xsum", "sst2_small_model", "compressed_wire", "figures6_to_8_same_steps", "llama2")
SCALES = [
    pytest.param(path, scale, marks=pytest.mark.slow if scale in SIMILAR else ())
    for path in COMMANDS["benchmark"]
    for scale in ("default", *yaml.safe_load(path.read_text(encoding="utf-8")).get("scales", {}))
]


@functools.cache
def name_has_seed(name):
    return partitioner_has_seed({"name": name})


def has_seed(partition):
    """`partitioner_has_seed`, which reads the source of all partitioners in each call."""
    return name_has_seed(partition.get("name"))


def planned_runs(values):
    """The runs of a recipe. With a selection, its trials and the runs with the settings of the recipe."""
    section = read_section(values)
    if section.select is None:
        return plan_runs(values, section, has_seed)
    sections = (selected_section(section, {}), trial_section(section))
    return [run for each in sections for run in plan_runs(values, each, has_seed)]


def tiny_split_overrides(values, llama_dir, cloze_dir, phrases_dir, texts_dir):
    """Overrides that replace the models and data of a recipe for a split model by tiny ones."""
    inputs = [f"model.name_or_path={llama_dir}"]
    if values["task"]["name"] == "summarization":
        inputs += [f"data.path={texts_dir}", "data.test_split=test", "data.max_train_rows=null"]
        inputs += ["data.max_test_rows=null", "data.name=null", "data.revision=null", "task.max_target_length=4"]
        inputs += ["task.source_column=source", "task.target_column=targets"]
    elif values["task"]["name"] == "cloze-classification":
        inputs += [f"data.path={phrases_dir}", "training.eval_strategy=epoch"]
    else:
        inputs += [f"data.path={cloze_dir}", "task.max_length=200"]
    return [*inputs, "training.num_train_epochs=1", "training.use_cpu=true", "split.average_every=1"]


def tiny_overrides(values, model_dir, texts_dir, superglue_dir):
    """Overrides that replace the models, data and sizes of a recipe by tiny ones."""
    has_tasks = values["partition"].get("label_column") == "task"
    is_superglue = has_tasks or values["task"]["name"].startswith("superglue")
    settings = [
        f"data.path={superglue_dir if is_superglue else texts_dir}",
        "federation.num_rounds=1",
        "federation.clients_per_round=2",
    ]
    settings += [f"model.name_or_path={model_dir}", "training.eval_steps=1", "training.use_cpu=true"]
    settings += ["local_clients=1", "data.max_train_rows=null", "data.max_test_rows=null"]
    if values["task"]["name"].endswith("seq2seq"):  # build the encoder-decoder from two tiny encoders
        settings.append(f"model.decoder_name_or_path={model_dir}")
    if values["data"].get("name"):
        settings.append("data.name=null")
    if str(values["model"].get("freeze")).startswith("embeddings+"):
        settings.append("model.freeze=embeddings+2")  # of three layers
    if values["data"].get("test_clients"):
        settings += ["data.test_clients=1", "data.max_clients=5"]
    if values["task"]["name"] == "question-answering":
        settings += ["task.max_length=12", "task.stride=2"]
    if "num_clients" in values["partition"]:
        settings.append(f"partition.num_clients={3 if is_superglue else 6}")
    if values["partition"]["name"] == "feature-cluster":
        settings += [f"partition.embedder={model_dir}", "partition.num_clusters=3"]
    if values["data"].get("test_split"):
        settings.append(f"data.test_split={'validation' if is_superglue else 'test'}")
    if values["data"].get("validation_split"):
        settings += ["data.validation_split=null", "data.validation_examples=0.2"]
    if has_tasks and values["task"]["name"] == "text-classification":
        settings += ["task.text_column=source", "task.label_column=target"]
    texts = {"sentence": "text", ("question", "sentence"): "[question, context]"}
    given = values["task"].get("text_column")
    if (named := tuple(given) if isinstance(given, list) else given) in texts:
        settings.append(f"task.text_column={texts[named]}")
    if (values.get("public") or {}).get("path"):
        settings += [f"public.path={texts_dir}", f"public.server_path={texts_dir}"]
    if values.get("client_models"):
        settings.append(f"client_models=[{{name_or_path: {model_dir}}}]")
    if "min_size" in values["partition"]:
        settings.append("partition.min_size=2")
    return settings


@pytest.mark.parametrize("path", COMMANDS["train"], ids=lambda path: path.stem)
def test_train_recipes_run_one_round_on_a_tiny_model(path, model_dir, texts_dir, superglue_dir, tmp_path):
    recipe = load_recipe(path, tiny_overrides(read_values(path), model_dir, texts_dir, superglue_dir))
    results = train_recipe(recipe, output_dir=str(tmp_path))
    assert results["federated"]["bytes_up"] > 0
    assert path.read_text().startswith(f"# hf-federated train recipes/{path.parent.name}/{path.name}")


@pytest.mark.parametrize(("path", "scale"), SCALES, ids=lambda item: getattr(item, "stem", item))
def test_benchmark_runs_are_valid_at_every_scale(path, scale):
    values = read_values(path, [f"scale={scale}"])
    runs = planned_runs(values)
    assert len({run.full_digest for run in runs}) == len(runs) >= 4
    for run in runs:
        if run.seed == runs[0].seed:  # runs with other seeds differ only in their seed
            parse_recipe(run.values)
    assert path.read_text().startswith(f"# hf-federated benchmark recipes/{path.parent.name}/{path.name}")


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow if path.stem in SIMILAR else ()) for path in COMMANDS["benchmark"]],
    ids=lambda path: path.stem,
)
@pytest.mark.sampled(18)
def test_benchmark_recipes_run_one_round_on_a_tiny_model(
    path, model_dir, texts_dir, superglue_dir, llama_dir, cloze_dir, phrases_dir, tmp_path
):
    values = read_values(path)
    if "split" in values:
        settings = tiny_split_overrides(values, llama_dir, cloze_dir, phrases_dir, texts_dir)
    else:
        settings = tiny_overrides(values, model_dir, texts_dir, superglue_dir)
    if path.parent.name == "lora" and "head" not in values["model"]:  # a causal model
        settings += [f"model.name_or_path={llama_dir}", "partition.column=speaker"]
    values = read_values(path, settings)
    runs = planned_runs(values)
    run = next((run for run in runs if run.method == "federated"), runs[0])
    result = measure_run(run.values, run.method, tmp_path)
    if run.method == "federated":
        assert result["metric"] in result["history"][0] and result["bytes_up"] > 0
    assert result["metric"] in result["metrics"]


def test_history_contains_client_weights_of_adafd(model_dir, texts_dir, superglue_dir, tmp_path):
    path = FOLDER / "adafd" / "table1_homogeneous.yaml"
    values = read_values(path, tiny_overrides(read_values(path), model_dir, texts_dir, superglue_dir))
    run = next(run for run in planned_runs(values) if run.name == "AdaFD ENWC")
    result = measure_run(run.values, run.method, tmp_path)
    weights = {name: value for name, value in result["history"][0].items() if name.startswith("weight/")}
    assert len(weights) == 2 and sum(weights.values()) == pytest.approx(1)  # two clients per round
    assert result["history"][0].keys() >= {"server_distillation_loss", "client_distillation_loss"}


def test_history_contains_feedback_ratio_of_fedid(model_dir, texts_dir, superglue_dir, tmp_path):
    path = FOLDER / "fedid" / "table2_heterogeneous.yaml"
    values = read_values(
        path,
        [*tiny_overrides(read_values(path), model_dir, texts_dir, superglue_dir), "task.metric=matthews_correlation"],
    )
    run = next(run for run in planned_runs(values) if run.name == "FedID")
    result = measure_run(run.values, run.method, tmp_path)
    assert result["history"][0]["feedback_ratio"] > 0
    assert result["metric"] == "matthews_correlation" and -1 <= result["history"][0]["matthews_correlation"] <= 1


@pytest.mark.parametrize(
    ("name", "run_name"),
    [
        ("table1_encoder", "MutualKD"),
        pytest.param("table1_encoder", "FedAUX", marks=pytest.mark.slow),
        ("table1_encoder", "FedDRS (mixed)"),
        ("table1_encoder_decoder", "FedDRS (post only)"),
    ],
)
def test_methods_in_the_feddrs_tables_train_on_all_tasks(name, run_name, model_dir, superglue_dir, tmp_path):
    path = FOLDER / "feddrs" / f"{name}.yaml"
    settings = tiny_overrides(read_values(path), model_dir, None, superglue_dir)
    settings.append(f"benchmark.runs.MutualKD.client_models=[{{name_or_path: {model_dir}}}]")
    values = read_values(path, settings if name == "table1_encoder" else settings[:-1])
    run = next(run for run in planned_runs(values) if run.name == run_name)
    for size, value in (("num_samples", 3), ("sample_length", 4), ("num_steps", 2)):
        if size in run.values["federation"].get("distillation_kwargs", {}):
            run.values["federation"]["distillation_kwargs"][size] = value
    result = measure_run(run.values, run.method, tmp_path)
    assert 0 <= result["metrics"]["superglue_score"] <= 1
