"""`hf-federated check --fix`: which files are read and written."""

from __future__ import annotations

import pytest
from planted_faults import write_csv

from hf_federated.cli.main import main


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(capsys, *arguments: str) -> tuple[int, str]:
    code = main(["check", *arguments])
    return code, capsys.readouterr().out


def test_test_rows_of_a_file_with_the_name_of_a_training_file_are_written_to_test(folder, capsys):
    write_csv(folder / "tt" / "north.csv", [["it leaks", "bad"], ["it works", "good"]])
    (folder / "tt" / "north.tsv").write_text("text\tlabel\nit drips\tbad\n")
    check(capsys, "tt/north.csv", "--test", "tt/north.tsv", "--fix", "out")
    assert (folder / "out" / "north.csv").read_text().count("\n") == 3
    assert "it drips" in (folder / "out" / "test" / "north.csv").read_text()
