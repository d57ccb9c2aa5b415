"""From a CSV file with string labels to a trained federation: `partition`, `inspect` and `train`."""

from __future__ import annotations

import csv
import json

import pytest
import yaml
from hub_server import HubClient, HubServer
from transformers import AutoModelForSequenceClassification

from hf_federated.cli.main import main


SITES = ("east", "north", "south", "west")


@pytest.fixture
def news(tmp_path, monkeypatch):
    """40 rows of four sites, ten of each site, with three string labels."""
    monkeypatch.chdir(tmp_path)
    with open("news.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label", "site"])
        for number in range(40):
            writer.writerow([f"a film {number}", ["sport", "world", "arts"][number % 3], SITES[number % 4]])
    return tmp_path


@pytest.fixture
def recipe_for(news, recipe_path):
    """Write the recipe for a dataset, and return its path."""

    def write(path: str, partition: dict | None = None) -> str:
        values = yaml.safe_load(recipe_path.read_text())
        values |= {"data": {"path": path}, "partition": partition}
        recipe_path.write_text(yaml.safe_dump(values))
        return str(recipe_path)

    return write


def results(folder) -> dict:
    return json.loads((folder / "run" / "results.json").read_text())


def test_string_labels_train_from_the_file_and_from_the_partitioned_folder(news, recipe_for, capsys):
    assert main("partition news.csv --partitioner natural --column site --output clients".split()) == 0
    assert main(["inspect", "clients"]) == 0
    printed = capsys.readouterr().out
    assert "| site" not in printed and all(f"| {site} " in printed for site in SITES)
    assert "arts" in printed and "world" in printed

    assert main(["train", recipe_for("clients")]) == 0
    stored = results(news)
    model = AutoModelForSequenceClassification.from_pretrained(news / "run")
    assert model.config.id2label == {0: "arts", 1: "sport", 2: "world"}
    assert "Training: 4 clients with 36 examples." in capsys.readouterr().out

    # The examples of the clients are in a different order in the file, but these are the same examples.
    recipe = recipe_for("news.csv", {"name": "natural", "column": "site"})
    assert main(["train", recipe, "--overwrite"]) == 0
    loaded = results(news)
    for name in ("num_train_clients", "num_train_rows", "num_test_rows", "test_source"):
        assert stored[name] == loaded[name]
    assert stored["federated"]["metrics"].keys() == loaded["federated"]["metrics"].keys()


def test_published_label_counts_have_the_string_labels(news, capsys):
    command = "partition news.csv --partitioner label-dirichlet --num-clients 3 --output clients"
    assert main([*command.split(), "--publish-label-counts", "label"]) == 0
    stored = json.loads((news / "clients" / "partition.json").read_text())
    assert stored["label_names"] == ["arts", "sport", "world"]


def partition_and_train(file: str, recipe: str, folder: str):
    import contextlib
    import io

    from datasets import DatasetDict, load_dataset

    from hf_federated.cli.main import main
    from hf_federated.experiments.data.raw import load_raw_data
    from hf_federated.experiments.recipe.recipe import load_recipe

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        codes = [
            main(f"partition {file} --partitioner natural --column site --push-to-hub anna/clients".split()),
            main("inspect anna/clients".split()),
            main(["train", recipe, "--output-dir", folder, "--set", "data.max_train_rows=20"]),
        ]
    rows = load_dataset("csv", data_files=file, split="train")
    DatasetDict(train=rows, validation=rows.select(range(8))).push_to_hub("anna/news")
    partition = "partition={name: natural, column: site}"
    # The second dataset is only a test set, on the Hub.
    settings = [["data={path: anna/news}", partition], ["data={path: anna/clients, test_path: anna/news}"]]
    settings[1].append("data.test_split=validation")
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        codes += [
            main("inspect anna/news".split()),
            main(["train", recipe, "--output-dir", "other", "--set", "data.path=anna/news"]),
        ]
        codes += [main("inspect anna/nothing".split())]
    loaded = [load_raw_data(load_recipe(recipe, changes)) for changes in settings]
    return {
        "codes": codes,
        "printed": printed.getvalue(),
        "errors": [line for line in errors.getvalue().splitlines() if line.startswith("hf-federated: error: ")],
        "sizes": [[sum(raw.train.num_rows.values()), len(raw.test)] for raw in loaded],
        "sources": [raw.test_source for raw in loaded],
        "labels": [list(raw.task.label_names) for raw in loaded],
    }


@pytest.mark.slow
def test_string_labels_and_test_splits_are_read_from_repositories(news, recipe_for):
    recipe = recipe_for("anna/clients")
    with HubServer() as hub:
        hub.add_user("anna", token="hf_anna")
        with HubClient(hub, news / "home") as process:
            answer = process.run(
                partition_and_train,
                token="hf_anna",
                file=str(news / "news.csv"),
                recipe=recipe,
                folder=str(news / "run"),
            )
    assert answer["codes"] == [0, 0, 0, 2, 2, 2]
    assert "anna/news is not a federated dataset" in answer["errors"][0]
    assert "Run `hf-federated partition anna/news --partitioner NAME --output DIR` first" in answer["errors"][0]
    assert "partition is missing, and anna/news is not a federated dataset" in answer["errors"][1]
    assert "there is no file or folder anna/nothing. It was not loaded from the Hub either" in answer["errors"][2]
    # 5 examples of each site, of which one is for testing.
    assert "Training: 4 clients with 16 examples." in answer["printed"]
    assert "Test: 4 examples, 10 % of the examples of each client (data.test_examples)." in answer["printed"]
    model = AutoModelForSequenceClassification.from_pretrained(news / "run")
    assert model.config.id2label == {0: "arts", 1: "sport", 2: "world"}
    assert answer["sizes"] == [[40, 8], [40, 8]] and answer["labels"] == [["arts", "sport", "world"]] * 2
    assert answer["sources"] == [
        " of the split 'validation', found in anna/news",
        " of the split 'validation' of anna/news",
    ]


def test_output_that_contains_a_federated_dataset_is_replaced_only_on_request(news, capsys):
    command = "partition news.csv --partitioner iid --num-clients 2 --output clients".split()
    assert main(command) == 0
    before = (news / "clients" / "partition.json").read_text()
    assert main(["partition", "none.csv", *command[2:]]) == 2  # refused before the data is read
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "--output clients: the folder contains a federated dataset" in error and "--overwrite" in error
    command[5] = "3"
    assert main(command) == 2 and (news / "clients" / "partition.json").read_text() == before
    assert main([*command, "--overwrite"]) == 0
    assert len(json.loads((news / "clients" / "partition.json").read_text())["clients"]) == 3
    assert main([*command[:-2], "--push-to-hub", "anna/clients", "--overwrite"]) == 2
    assert "--overwrite is only allowed with --output" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["news.csv", "my news"])
def test_inspect_says_how_to_partition_data_that_has_no_clients(news, name, capsys):
    (news / "my news").mkdir()
    (news / "my news" / "train.csv").write_text((news / "news.csv").read_text())
    assert main(["inspect", name]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    quoted = f"'{name}'" if " " in name else name
    assert f"{name} is not a federated dataset" in error
    assert f"Run `hf-federated partition {quoted} --partitioner NAME --output DIR` first" in error
    assert ("--client-per-file" in error) == (name == "my news")


@pytest.mark.parametrize(
    ("setting", "field", "name", "hint"),
    [
        ("model.name_or_path=outputs/minlm", "model.name_or_path", "outputs/minlm", "outputs/minilm"),
        ("data={path: outputs/new}", "data.path", "outputs/new", "outputs/news"),
        ("data={path: news.csv, test_path: outputs/new}", "data.test_path", "outputs/new", "outputs/news"),
        ("client_models=[{name_or_path: outputs/minlm}]", "client_models[0].name_or_path", "outputs/minlm", "minilm"),
    ],
)
def test_misspelt_folder_is_named_and_corrected(recipe_for, news, setting, field, name, hint, capsys):
    for folder in ("minilm", "news"):
        (news / "outputs" / folder).mkdir(parents=True)
    recipe = recipe_for("news.csv", {"name": "natural", "column": "site"})
    assert main(["train", recipe, "--set", setting]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"{field}: there is no file or folder {name}" in error and f"did you mean {hint}" in error.replace(
        "outputs/minilm", hint
    )


@pytest.mark.parametrize("command", ["inspect", "partition --partitioner iid --num-clients 2 --output o"])
def test_misspelt_folder_of_partition_and_inspect_is_named(news, command, capsys):
    (news / "outputs" / "clients").mkdir(parents=True)
    name, *options = command.split()
    assert main([name, "outputs/clinets", *options]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "there is no file or folder outputs/clinets (did you mean outputs/clients?)" in error
