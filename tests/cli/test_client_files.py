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


def test_client_is_named_as_its_file(sites):
    for path in sites.iterdir():
        path.unlink()
    for name in ("İzmir.csv", "Köln.CSV", "日本.csv.gz", "._north.csv"):
        write = gzip.compress if name.endswith("gz") else bytes
        (sites / name).write_bytes(write(b"text,label\nhello,good\n"))
    assert main("partition sites --client-per-file --output clients".split()) == 0
    assert set(FederatedDatasetDict.load_from_disk("clients")["train"]) == {"İzmir", "Köln", "日本"}


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ({"a": ["1", "0"], "b": ["", "1"]}, "int64"),
        ({"a": ["1", "0"], "b": ["", ""]}, "int64"),
        ({"a": ["1", "0"], "b": ["0.5", ""]}, "float64"),
        ({"a": ["", ""], "b": ["good", ""]}, "string"),
        ({"a": ["", ""], "b": ["", ""]}, "float64"),
    ],
)
def test_missing_values_in_one_file_do_not_change_the_type_of_a_column(sites, values, dtype):
    for path in sites.iterdir():
        path.unlink()
    for site, column in values.items():
        (sites / f"{site}.csv").write_text("\n".join(["text,score", *(f"film,{value}" for value in column)]) + "\n")
    assert main("partition sites --client-per-file --output clients".split()) == 0
    clients = FederatedDatasetDict.load_from_disk("clients")["train"]
    assert clients.features["score"].dtype.removeprefix("large_") == dtype  # pandas 3 reads large strings
    for site, column in values.items():
        found = clients[site]["score"][:]
        assert [value is None for value in found] == [value == "" for value in column]
        assert [str(value) for value in found if value is not None] == [
            str(float(value)) if dtype == "float64" else value for value in column if value
        ]


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
            lambda folder: (folder / "partition.json").write_text('{"splits": ["train"]}'),
            "partition sites --client-per-file",
            ["sites is already partitioned"],
        ),
        (
            lambda folder: (folder / "Test.csv").write_text("text,label\na,good\n"),
            "partition sites --client-per-file",
            ["Test.csv would become the client Test", "data.test_path"],
        ),
        (
            lambda folder: (folder / "west.csv").write_text(""),
            "partition sites --client-per-file",
            ["west.csv is empty"],
        ),
        (
            lambda folder: (folder / "west.csv").write_text("text,label\n007,good\n"),
            "partition sites --client-per-file",
            ["'text'", "west", "int64"],
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


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        (
            "great",
            "{}: Client 'north': Row 1 has the label 'great' in the column 'label'; allowed are 'bad', 'good', or 0",
        ),
        ("", "data: {}, line 3: The column 'label' has no label. Complete the rows, or drop them with"),
    ],
)
def test_unknown_label_in_the_file_of_a_client_is_one_line(label, problem, model_dir, tmp_path, capsys):
    examples = tmp_path / "north.csv"
    examples.write_text(f"text,label\na film,good\na plot,{label}\na warm film,bad\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{name_or_path: {model_dir}}}\ndata: {{path: clients}}\n"
        "task: {name: text-classification, label_names: [bad, good]}\n"
        f"training: {{output_dir: {tmp_path / 'run'}, use_cpu: true}}\n"
        "federation: {num_rounds: 1}\nnetwork: {clients: [north], address: '127.0.0.1:1'}\n"
    )
    assert main(["join", str(recipe), "--insecure", "--client", "north", "--examples", str(examples)]) == 2
    printed = capsys.readouterr().err
    assert printed.strip().splitlines()[-1].startswith(f"hf-federated: error: {problem.format(examples)}")
    assert "Traceback" not in printed
