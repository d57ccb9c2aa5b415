"""`hf-federated check --fix`: which files are read and written."""

from __future__ import annotations

import csv
import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from planted_faults import check, write_csv

from hf_federated.cli.main import main


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read_csv(path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_test_rows_of_a_file_with_the_name_of_a_training_file_are_written_to_test(folder, capsys):
    write_csv(folder / "tt" / "north.csv", [["it leaks", "bad"], ["it works", "good"]])
    (folder / "tt" / "north.tsv").write_text("text\tlabel\nit drips\tbad\n")
    check(capsys, "tt/north.csv", "--test", "tt/north.tsv", "--fix", "out")
    assert (folder / "out" / "north.csv").read_text().count("\n") == 3
    assert "it drips" in (folder / "out" / "test" / "north.csv").read_text()


def test_workbooks_and_hidden_files_of_a_site_are_not_read(folder, capsys):
    write_csv(folder / "sites" / "north.csv", [["it leaks", "bad"], ["it works", "good"]])
    (folder / "sites" / "north.xlsx").write_bytes(b"exported")
    (folder / "sites" / "~$south.xlsx").write_bytes(b"open in Excel")
    code, out = check(capsys, "sites")
    assert code == 0 and out.startswith("2 rows") and "xlsx" not in out


def test_second_file_of_a_site_is_an_error_for_check_as_for_partition(folder, capsys):
    write_csv(folder / "sites" / "a.csv", [["it leaks", "bad"], ["it works", "good"]])
    (folder / "sites" / "a.csv.gz").write_bytes(gzip.compress(b"text,label\nit drips,bad\n"))
    code, out = check(capsys, "sites", "--fix", "out")
    message = "sites/a.csv and sites/a.csv.gz name the same client a. Rename a file."
    assert code == 1 and out.startswith("2 rows") and message in out
    assert "sites/a.csv.gz cannot be read and is left out" in (folder / "out" / "CHANGES.md").read_text()
    assert main("partition sites --client-per-file --output clients".split()) == 2
    assert message in capsys.readouterr().err


def test_files_of_one_site_are_united_in_the_order_of_the_first_columns_and_listed(folder, capsys):
    write_csv(folder / "sites" / "North.csv", [["it leaks", "bad"], ["it works", "good"]])
    (folder / "sites" / "north.tsv").write_text("label\ttext\nbad\tit drips\n")
    (folder / "sites" / "south.tsv").write_text("text\tlabel\nit runs\tgood\n")
    check(capsys, "sites", "--fix", "out")
    assert "it drips,bad" in (folder / "out" / "North.csv").read_text().replace('"', "")
    changes = (folder / "out" / "CHANGES.md").read_text()
    assert "- sites/North.csv and sites/north.tsv: written together as North.csv\n" in changes
    assert "- sites/south.tsv: written as south.csv\n" in changes


def test_fix_that_fails_leaves_no_folder(folder, capsys):
    write_csv(folder / "sites" / "North.csv", [["it leaks", "bad"], ["it works", "good"]])
    (folder / "sites" / "north.tsv").write_text("text\tother\nit drips\tbad\n")
    assert main("check sites --text-column text --label-column label --fix out".split()) == 2
    assert "Write them with the same columns." in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["sites"]


def test_damaged_files_are_findings_and_are_left_out(folder, capsys):
    write_csv(folder / "sites" / "north.csv", [["it leaks", "bad"], ["it works", "good"], ["", "bad"]])
    (folder / "sites" / "a.csv").write_text("text,label\nit drips,bad\nit,is,long\n")
    table = pa.table({"text": [f"text {number}" for number in range(500)], "label": ["good"] * 500})
    pq.write_table(table, folder / "sites" / "b.parquet", use_dictionary=False)
    data = (folder / "sites" / "b.parquet").read_bytes()
    (folder / "sites" / "b.parquet").write_bytes(data[:4] + b"\xff" * 400 + data[404:])
    line = "sites --output page.html --fix out --drop-duplicates".split()
    code, out = check(capsys, *line)
    assert code == 1 and "error: unreadable file\n  sites/a.csv, line 3: the row has 3 values" in out
    assert "sites/b.parquet is damaged: " in out and "sites/north.csv, line 4: The column 'text' has no text." in out
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["CHANGES.md", "north.csv"]
    changes = (folder / "out" / "CHANGES.md").read_text()
    assert all(f"sites/{name} cannot be read and is left out." in changes for name in ("a.csv", "b.parquet"))
    assert (folder / "page.html").is_file()


def test_given_csv_options_are_merged_over_those_of_the_recipe(folder, capsys):
    (folder / "a.csv").write_text("text#label#plz\nit leaks#bad#007\nit works#good#008\n")
    (folder / "recipe.yaml").write_text("model: {name_or_path: m}\ndata: {path: a.csv, csv: {separator: '#'}}\n")
    code, out = check(capsys, "recipe.yaml", "--csv-text-columns", "plz")
    assert code == 0 and out.startswith("2 rows (texts in text; labels in label)")


def test_fix_corrects_the_labels_of_a_categorical_column(folder, capsys):
    labels = ["x"] * 20 + ["y"] * 20 + ["X"]
    table = pa.table({"text": list(map(str, range(41))), "label": pa.array(labels).dictionary_encode()})
    (folder / "sites").mkdir()
    pq.write_table(table, folder / "sites" / "north.parquet")
    assert "Write the label as 'x' (--fix DIR)." in check(capsys, "sites", "--fix", "out")[1]
    written = pq.read_table(folder / "out" / "north.parquet").column("label").to_pylist()
    assert written == ["x"] * 20 + ["y"] * 20 + ["x"]


def test_labels_that_look_alike_and_are_frequent_are_reported_and_kept(folder, capsys):
    labels = ["US"] * 3 + ["us"] * 5 + ["fine"] * 20 + ["Fine"] + [" US"]
    rows = [[f"text {number}", label] for number, label in enumerate(labels)]
    write_csv(folder / "sites" / "north.csv", rows)
    out = check(capsys, "sites", "--fix", "out")[1]
    assert "The label 'US' (3 rows) differs from the label 'us' in case only." in out and "If they have one" in out
    assert [row[1] for row in read_csv(folder / "out" / "north.csv")[1:]] == labels[:28] + ["fine", "US"]


def test_wrong_given_separator_is_an_error(folder, capsys):
    (folder / "sites").mkdir()
    (folder / "sites" / "north.csv").write_text("text;label\nit leaks;bad\nit works;good\n")
    message = "with the given separator ',' the file has the only column 'text;label'. Its separator is probably ';'"
    code, out = check(capsys, "sites", "--csv-separator", ",")
    assert code == 1 and f"error: unreadable file\n  sites/north.csv: {message}" in out
    assert main("partition sites --client-per-file --output clients --csv-separator ,".split()) == 2
    assert message in capsys.readouterr().err


def test_report_and_page_show_how_files_were_read(folder, capsys):
    (folder / "sites").mkdir()
    for site in ("north", "south"):
        text = f"text;label;plz\nschön in {site};good;007\nzu heiß in {site};bad;008\n"
        (folder / "sites" / f"{site}.csv").write_bytes(text.encode("cp1252"))
    rows = [["it leaks", "bad", "1"], ["it works", "good", "2"]]
    write_csv(folder / "sites" / "west.csv", rows, ("text", "label", "plz"))
    out = check(capsys, "sites", "--output", "page.html")[1]
    note = "sites/north.csv, sites/south.csv: Read with separator ';', encoding cp1252."
    assert f"How files were read:\n  {note}\n" in out and out.count("'plz'") == 1
    assert "How files were read" in (folder / "page.html").read_text()
