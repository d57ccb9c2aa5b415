"""`hf-federated partition --client-per-file`: each file of a folder is one client."""

from __future__ import annotations

import gzip

import pytest

from hf_federated import FederatedDatasetDict
from hf_federated.cli.main import main


SITES = {"north": 4, "south": 3, "st. mary": 2, "east": 1}


@pytest.fixture
def sites(tmp_path, monkeypatch):
    """A folder with one CSV file of string labels for each site."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "sites"
    folder.mkdir()
    for site, count in SITES.items():
        lines = [f"text {number} of {site},{'good' if number % 2 else 'bad'}" for number in range(count)]
        (folder / f"{site}.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    return folder


def test_each_file_of_a_folder_is_one_client(sites, capsys):
    assert main("partition sites --client-per-file --output clients".split()) == 0
    assert "10 |" in capsys.readouterr().out
    clients = FederatedDatasetDict.load_from_disk("clients")["train"]
    assert clients.num_rows == {site: SITES[site] for site in sorted(SITES)}
    assert clients.column_names == ["text", "label"]
    assert clients["st. mary"]["text"][:] == ["text 0 of st. mary", "text 1 of st. mary"]
    assert clients.partitioning == {"partitioner": "client per file"}


def test_compressed_files_and_other_files_of_the_folder(sites):
    (sites / "west.csv.gz").write_bytes(gzip.compress(b"text,label\nhello,good\n"))
    (sites / "notes.md").write_text("not data")
    (sites / "old").mkdir()
    assert main("partition sites --client-per-file --output clients".split()) == 0
    assert set(FederatedDatasetDict.load_from_disk("clients")["train"]) == {*SITES, "west"}


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (lambda folder: None, "partition sites/north.csv --client-per-file", ["sites/north.csv is not a folder"]),
        (lambda folder: None, "partition sites --client-per-file --name x", ["--name is not allowed"]),
        (
            lambda folder: (folder / "north.json").write_text('{"text": "a", "label": "good"}'),
            "partition sites --client-per-file",
            ["north.csv", "north.json", "same client north"],
        ),
        (
            lambda folder: (folder / "north.csv").write_text("text,lable\na,good\n"),
            "partition sites --client-per-file",
            ["north", "lable"],
        ),
        (
            lambda folder: [path.unlink() for path in folder.iterdir()],
            "partition sites --client-per-file",
            ["has no data files", ".csv"],
        ),
    ],
)
def test_unusable_folder_is_an_error_that_names_the_file(sites, capsys, change, line, words):
    change(sites)
    assert main([*line.split(), "--output", "clients"]) == 2
    printed = capsys.readouterr().err
    for word in words:
        assert word in printed
    assert not (sites.parent / "clients").exists()


def test_partitioner_and_client_per_file_exclude_each_other(sites, capsys):
    with pytest.raises(SystemExit):
        main("partition sites --client-per-file --partitioner iid --num-clients 2 --output clients".split())
    assert "not allowed with argument" in capsys.readouterr().err
