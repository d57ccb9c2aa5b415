"""Recipes and `partition` on files with missing texts and labels, and the findings that they print."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import yaml
from datasets import Dataset
from planted_faults import SITES, clean_rows, with_cells, write_csv, write_sites

from hf_federated import FederatedDataset, LabelDirichletPartitioner
from hf_federated.cli.main import main
from hf_federated.experiments.data.checked_clients import recipe_lines
from hf_federated.experiments.data.raw import load_raw_data
from hf_federated.experiments.network.run import build_client
from hf_federated.experiments.recipe.recipe import load_recipe
from hf_federated.experiments.recipe.schema import RecipeError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def recipe(model_dir):
    """Write a recipe with these sections, and return its path."""

    def write(**sections) -> str:
        values = {"model": {"name_or_path": str(model_dir)}, "training": {"use_cpu": True}, **sections}
        with open("recipe.yaml", "w") as file:
            yaml.safe_dump(values, file)
        return "recipe.yaml"

    return write


INCOMPLETE = {"west": with_cells("west", text_5="", label_9=""), "north": with_cells("north", text_31=" ")}


def write_all(folder, name="all.csv", **changed) -> None:
    """One file with the rows of all sites and a column of sites. The rows of `west` start on line 92."""
    sites = {site: clean_rows(site) for site in SITES} | changed
    write_csv(folder / name, [[site, *row] for site, rows in sites.items() for row in rows], ("site", "text", "label"))


def test_error_of_train_names_site_file_line_and_field(folder, recipe, capsys):
    write_sites(folder / "sites", **INCOMPLETE)
    assert main("partition sites --client-per-file --output clients".split()) == 0
    capsys.readouterr()
    assert main(["train", recipe(data={"path": "clients"})]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    for words in (
        "clients/data/north/train-00000-of-00001.parquet, row 30 (site 'north'): The column 'text' has no text",
        "clients/data/west/train-00000-of-00001.parquet, row 4 (site 'west'): The column 'text' has no text",
        "clients/data/west/train-00000-of-00001.parquet, row 8 (site 'west'): The column 'label' has no label",
        "data.drop_incomplete: true",
    ):
        assert words in error
    assert "None" not in error


@pytest.mark.parametrize(
    "partition",
    [
        {"name": "natural", "column": "site"},
        {"name": "label-dirichlet", "num_clients": 3},
        {"name": "iid", "num_clients": 3},
    ],
)
def test_error_for_a_file_has_the_line_of_the_file_for_each_partitioner(partition, folder, recipe, capsys):
    rows = with_cells("west", label_9="")
    rows[0][0] = "a text\nof two lines"
    write_all(folder, west=rows)
    assert main(["train", recipe(data={"path": "all.csv"}, partition=partition)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    of_site = " (site 'west')" if partition["name"] == "natural" else ""
    assert f"all.csv, line 100{of_site}: The column 'label' has no label" in error


def test_error_for_a_row_without_a_client(folder, recipe, capsys):
    write_all(folder, south=clean_rows("south"))
    lines = (folder / "all.csv").read_text().splitlines(keepends=True)
    lines[7] = lines[7].partition(",")[1] + lines[7].partition(",")[2]
    (folder / "all.csv").write_text("".join(lines))
    section = {"name": "natural", "column": "site"}
    assert main(["train", recipe(data={"path": "all.csv"}, partition=section)]) == 2
    assert "all.csv, line 8: The column 'site' has no site" in capsys.readouterr().err
    raw = load_raw_data(load_recipe(recipe(data={"path": "all.csv", "drop_incomplete": True}, partition=section)))
    assert raw.incomplete == {"no client": 1}


def test_drop_incomplete_keeps_the_complete_rows_and_counts_the_others_by_site(folder, recipe):
    write_sites(folder / "sites", **INCOMPLETE, East=[["", ""]])
    assert main("partition sites --client-per-file --output clients".split()) == 0
    raw = load_raw_data(load_recipe(recipe(data={"path": "clients", "drop_incomplete": True, "test_examples": 0.2})))
    assert raw.incomplete == {"East": 1, "north": 1, "west": 2}
    kept = [row for site in SITES for row in clean_rows(site)]
    dropped = {clean_rows(site)[line - 2][0] for site, line in (("west", 5), ("west", 9), ("north", 31))}
    texts = sorted([*raw.train.to_dataset()["text"], *raw.test["text"]])
    assert texts == sorted(text for text, _ in kept if text not in dropped)
    assert raw.task.label_names == ("defect", "fine")


def test_drop_incomplete_of_a_file_equals_the_partition_of_the_complete_file(folder, recipe):
    rows = with_cells("west", text_5="", label_9="")
    write_all(folder, west=rows)
    write_all(folder, "complete.csv", west=[row for row in rows if all(row)])
    section = {"name": "label-dirichlet", "num_clients": 3, "alpha": 0.5}
    raw, expected = (
        load_raw_data(load_recipe(recipe(data={"path": path, "drop_incomplete": drop}, partition=section)))
        for path, drop in (("all.csv", True), ("complete.csv", False))
    )
    assert raw.incomplete == {"train": 2} and expected.incomplete == {}
    assert {client: rows["text"][:] for client, rows in raw.train.items()} == {
        client: rows["text"][:] for client, rows in expected.train.items()
    }


def test_drop_incomplete_of_all_rows_is_an_error(folder, recipe):
    write_csv(folder / "all.csv", [["", "fine"]] * 3)
    section = {"name": "iid", "num_clients": 2}
    with pytest.raises(RecipeError, match="no example of the split 'train' of all.csv remains"):
        load_raw_data(load_recipe(recipe(data={"path": "all.csv", "drop_incomplete": True}, partition=section)))


def test_partition_prints_the_findings_with_file_and_line(folder, capsys):
    write_sites(folder / "sites", **INCOMPLETE)
    assert main("partition sites --client-per-file --output clients".split()) == 0
    out = capsys.readouterr().out
    assert "error: missing text: sites/north.csv, line 31: The column 'text' has no text. (and 1 more)" in out
    assert "error: missing label: sites/west.csv, line 9: " in out
    assert "To see all findings, run: hf-federated check sites" in out


def test_partition_of_clean_files_prints_no_findings(folder, capsys):
    write_all(folder)
    assert main("partition all.csv --partitioner natural --column site --output clients".split()) == 0
    assert (
        main("partition all.csv --partitioner label-dirichlet --alpha 0.01 --num-clients 6 --output skewed".split())
        == 0
    )
    out = capsys.readouterr().out
    assert "error" not in out and "warning" not in out and "findings" not in out


def test_partition_of_a_folder_with_subfolders_checks_the_loaded_rows(folder, capsys):
    for split in ("train", "test"):
        write_csv(folder / "data" / split / "rows.csv", with_cells(split, text_4=""))
    assert main("partition data --partitioner iid --num-clients 2 --output clients".split()) == 0
    assert "error: missing text: site '" in capsys.readouterr().out


def tagged(num_rows: int = 120) -> dict[str, list]:
    """Sentences of which a third has an entity."""
    return {
        "tokens": [["film", f"plot{number}"] for number in range(num_rows)],
        "ner_tags": [["O", "B-LOC" if number % 3 == 0 else "O"] for number in range(num_rows)],
    }


def test_clients_without_entities_are_reported_by_partition_and_before_training(
    folder, recipe, capsys, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("hf_federated"), "propagate", True)
    Dataset.from_dict(tagged()).to_json("tagged.jsonl")
    line = "partition tagged.jsonl --partitioner label-dirichlet --label-column ner_tags --alpha 0.01 --num-clients 6"
    assert main([*line.split(), "--output", "skewed"]) == 0
    (text,) = [text for text in caplog.messages if "no example with an entity" in text]
    assert "of 6 clients" in text and "balance_entities=True" in text
    caplog.clear()
    sections = {"data": {"path": "skewed"}, "task": {"name": "sequence-tagging"}}
    loaded = load_recipe(recipe(**sections))
    (warning,) = [text for text in recipe_lines(loaded, load_raw_data(loaded)) if "no entities" in text]
    assert warning.startswith("warning: no entities: site '")

    assert main([*line.split(), "--balance-entities", "--output", "balanced"]) == 0
    assert "no entities" not in capsys.readouterr().out and not caplog.messages
    loaded = load_recipe(recipe(**{**sections, "data": {"path": "balanced"}}))
    assert recipe_lines(loaded, load_raw_data(loaded)) == []


def test_findings_before_training_are_those_of_the_clients_that_train(folder, recipe):
    """A partition of shared rows gives the same findings as separate datasets, with the rows of each client."""
    rows = [row for site in SITES for row in clean_rows(site)]
    rows[40][0] = rows[3][0]
    dataset = Dataset.from_dict({"text": [text for text, _ in rows], "label": [label for _, label in rows]})
    clients = FederatedDataset.from_dataset(dataset, LabelDirichletPartitioner(3, alpha=100.0, seed=1))
    from hf_federated.data import check_datasets

    shared = check_datasets(clients)
    separate = check_datasets({client: Dataset.from_dict(rows[:]) for client, rows in clients.items()})
    assert [(item.kind, item.count) for item in shared] == [(item.kind, item.count) for item in separate]
    (finding,) = shared
    assert clients[finding.site]["text"][finding.lines[0] - 1] == rows[3][0]
    assert np.sum([len(rows) for rows in clients.values()]) == 120


def test_clean_recipe_prints_nothing(folder, recipe):
    write_all(folder)
    loaded = load_recipe(recipe(data={"path": "all.csv"}, partition={"name": "natural", "column": "site"}))
    assert recipe_lines(loaded, load_raw_data(loaded)) == []


def test_error_of_a_client_on_another_machine_has_the_line_of_its_file(folder, recipe):
    write_csv(folder / "north.csv", with_cells("north", label_6=""))
    loaded = load_recipe(
        recipe(data={"path": "elsewhere"}, network={"clients": ["north"]}, task={"label_names": ["defect", "fine"]})
    )
    with pytest.raises(RecipeError, match="north.csv, line 6: The column 'label' has no label"):
        build_client(loaded, "north", examples="north.csv")
