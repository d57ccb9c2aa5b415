"""The commands `hf-federated partition` and `hf-federated inspect`."""

from __future__ import annotations

import json
import re

import pytest
from datasets import ClassLabel, Dataset, DatasetDict
from hub_server import HubClient, HubServer

from hf_federated import FederatedDatasetDict, LabelDirichletPartitioner
from hf_federated.cli.main import main
from hf_federated.data.partitioners import PARTITIONERS


def rows(num_rows: int) -> Dataset:
    return Dataset.from_dict(
        {
            "text": [f"text {number} of {number % 7}" for number in range(num_rows)],
            "label": [number % 3 for number in range(num_rows)],
            "site": [f"site {number % 4}" for number in range(num_rows)],
        }
    ).cast_column("label", ClassLabel(names=["bad", "fair", "good"]))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows(120).to_parquet(tmp_path / "reviews" / "train.parquet")
    rows(40).to_parquet(tmp_path / "reviews" / "test.parquet")
    return tmp_path


def test_all_splits_of_a_folder_are_partitioned_in_the_same_way(folder, capsys):
    command = "partition reviews --partitioner label-dirichlet --alpha 0.5 --num-clients 6 --seed 3 --output clients"
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    assert "| clients " in printed and "effective α" in printed and "test: 40 examples of 6 clients" in printed
    written = FederatedDatasetDict.load_from_disk("clients")
    splits = DatasetDict(train=rows(120), test=rows(40))
    expected = FederatedDatasetDict.from_dataset(splits, LabelDirichletPartitioner(num_clients=6, alpha=0.5, seed=3))
    assert list(written) == ["train", "test"]
    for split in expected:
        for client_id, client in expected[split].items():
            assert written[split][client_id][:] == client[:]
    assert written["train"].partitioning["alpha"] == 0.5


def test_inspect_prints_statistics_and_writes_plots(folder, capsys):
    assert main("partition reviews --partitioner natural --column site --output clients".split()) == 0
    capsys.readouterr()
    assert main("inspect clients --text-column text --output plots".split()) == 0
    printed = capsys.readouterr().out
    assert "partitioner: NaturalPartitioner, column: site" in printed
    assert "| site 3 |" in printed and "mean vocabulary overlap" in printed
    plots = sorted(path.name for path in (folder / "plots").iterdir())
    assert plots == ["divergence.png", "labels.png", "sizes.png", "texts.png"]
    assert all((folder / "plots" / name).read_bytes().startswith(b"\x89PNG") for name in plots)
    assert main("inspect clients --split test".split()) == 0
    assert re.search(r"\| site 3 +\| +10 \|", capsys.readouterr().out)


@pytest.mark.parametrize("suffix", ["csv", "json", "jsonl", "parquet"])
def test_single_file_is_partitioned(folder, suffix, capsys):
    dataset = rows(30)
    {"csv": dataset.to_csv, "parquet": dataset.to_parquet}.get(suffix, dataset.to_json)(f"rows.{suffix}")
    assert main(f"partition rows.{suffix} --partitioner iid --num-clients 5 --output clients".split()) == 0
    written = FederatedDatasetDict.load_from_disk("clients")
    assert sorted(written["train"].to_dataset()["text"][:]) == sorted(dataset["text"][:])


def test_file_name_with_glob_characters_is_read_literally(folder, capsys):
    rows(30).to_csv("[a] b.CSV")
    assert main(["partition", "[a] b.CSV", *"--partitioner iid --num-clients 5 --output clients".split()]) == 0
    assert len(FederatedDatasetDict.load_from_disk("clients")["train"].to_dataset()) == 30


def test_row_indices_and_label_counts_are_written_on_request(folder, capsys):
    command = "partition reviews --split train --partitioner iid --num-clients 4 --output clients --index-only"
    assert main([*command.split(), "--publish-label-counts", "label"]) == 0
    stored = json.loads((folder / "clients" / "partition.json").read_text())
    assert stored["label_names"] == ["bad", "fair", "good"]
    assert all(sum(client["splits"]["train"]["label_counts"]) == 30 for client in stored["clients"])
    assert not (folder / "clients" / "data").exists()
    assert "load_from_disk('clients', source=rows)" in capsys.readouterr().out  # `inspect` cannot read the folder
    assert main(["inspect", "clients"]) == 2
    assert "Pass these rows with source=dataset of load_from_disk" in capsys.readouterr().err


def test_output_that_contains_other_files_is_refused_before_the_data_is_read(folder, capsys):
    (folder / "thesis").mkdir()
    (folder / "thesis" / "main.tex").write_text("...")
    assert main("partition nowhere --partitioner iid --num-clients 2 --output thesis --overwrite".split()) == 2
    printed = capsys.readouterr()
    assert "--output thesis" in printed.err and "(main.tex), which would be replaced" in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "partition nowhere/at/all --partitioner iid --num-clients 2 --output o",
            "the file or folder nowhere/at/all does not exist",
        ),
        (
            "partition ./nowhere --partitioner iid --num-clients 2 --output o",
            "the file or folder ./nowhere does not exist",
        ),
        ("partition reviews --partitioner iid --num-clients 2", "either --output DIR or --push-to-hub REPO"),
        ("partition reviews --partitioner iid --num-clients 2 --output o --private", "--private is only allowed with"),
        (
            "partition reviews --partitioner iid --num-clients 0 --output o",
            "num_clients must be an integer of at least 1",
        ),
        ("partition reviews --partitioner iid --num-clients 500 --output o", "500 clients"),
        ("partition reviews --partitioner label-dirichlet --num-clients 2 --alpha 0 --output o", "alpha"),
        ("partition reviews --partitioner natural --column ward --output o", "no column 'ward'"),
        (
            "partition reviews --split dev --partitioner iid --num-clients 2 --output o",
            "no split 'dev'. Its splits are t",
        ),
        ("partition reviews --partitioner iid --num-clients 2 --output reviews", "something else"),
        ("partition notes.md --partitioner iid --num-clients 2 --output o", "is a .md file. Allowed formats are"),
        (
            "partition nowhere.csv --partitioner iid --num-clients 2 --output o",
            "the file or folder nowhere.csv does not exist",
        ),
        (
            "partition reviews --revision main --partitioner iid --num-clients 2 --output o",
            "--revision is only allowed for",
        ),
        (
            "partition reviews/train.parquet --name x --partitioner iid --num-clients 2 --output o",
            "--name is only allowed for datasets with configurations",
        ),
        ("partition mixed --partitioner iid --num-clients 2 --output o", "files of several formats"),
        ("inspect nowhere", "the folder nowhere does not exist"),
        ("inspect reviews", "not a federated dataset"),
    ],
)
def test_invalid_command_is_rejected_with_a_one_line_message(folder, command, message, capsys):
    (folder / "notes.md").write_text("# notes")
    rows(4).to_parquet(folder / "mixed" / "train.parquet")
    rows(4).to_csv(folder / "mixed" / "more.csv")
    assert main(command.split()) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("hf-federated: error: ") and message in error
    assert not (folder / "o").exists()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_help_lists_the_options_of_each_partitioner(capsys):
    for name in PARTITIONERS:
        with pytest.raises(SystemExit) as ended:
            main(["partition", "--partitioner", name, "--help"])
        assert ended.value.code == 0
        assert f"options of {PARTITIONERS[name].__name__}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["partition", "--help"])
    assert "--partitioner NAME --help" in capsys.readouterr().out


def test_option_of_a_different_partitioner_is_rejected(folder, capsys):
    with pytest.raises(SystemExit) as ended:
        main("partition reviews --partitioner iid --num-clients 2 --alpha 1 --output o".split())
    assert ended.value.code == 2 and "--alpha" in capsys.readouterr().err


def push_and_partition(repo_id: str, folder: str):
    import contextlib
    import io

    from datasets import Dataset

    from hf_federated.cli.main import main

    Dataset.from_dict({"text": [f"text {i}" for i in range(24)], "label": [i % 2 for i in range(24)]}).push_to_hub(
        "anna/rows"
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        codes = [
            main(f"partition anna/rows --partitioner iid --num-clients 3 --push-to-hub {repo_id} --private".split()),
            main(f"inspect {repo_id} --output {folder}".split()),
        ]
    return {"codes": codes, "printed": printed.getvalue()}


def test_hub_dataset_is_partitioned_and_pushed_to_a_new_repository(tmp_path):
    with HubServer() as hub:
        hub.add_user("anna", token="hf_anna")
        with HubClient(hub, tmp_path / "home") as process:
            answer = process.run(
                push_and_partition, token="hf_anna", repo_id="anna/clients", folder=str(tmp_path / "plots")
            )
        assert answer["codes"] == [0, 0]
        assert f"{hub.endpoint}/datasets/anna/clients/commit/" in answer["printed"]
        stored = json.loads(hub.files("anna/clients")["partition.json"])
        source = stored["sources"]["train"]
        assert (source["repo_id"], len(source["revision"])) == ("anna/rows", 40)
        assert hub.repository("anna/clients").is_private
    assert (tmp_path / "plots" / "sizes.png").is_file()
