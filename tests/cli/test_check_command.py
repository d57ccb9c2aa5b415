"""`hf-federated check`: findings with file and line, the exit code, the page, and the clean files."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from planted_faults import SITES, check, clean_rows, with_cells, write_csv, write_sites

from hf_federated import FederatedDataset, FederatedDatasetDict
from hf_federated.cli.main import main


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Each kind of fault, as changes of the files of sites, with the first words of the line that reports it.
FAULTS = {
    "missing text": ({"west": with_cells("west", text_5="", text_9=" ")}, "sites/west.csv, lines 5, 9: "),
    "missing label": ({"east": with_cells("east", label_31="NA")}, "sites/east.csv, line 31: "),
    "duplicate": ({"south": with_cells("south", text_20="the pump 0 of south leaks")}, "sites/south.csv, line 20: "),
    "duplicate between sites": (
        {"west": with_cells("west", text_6="the pump 3 of east leaks ")},
        "sites/west.csv, line 6: Repeated texts in 1 of 30 rows; the first is that of line 5 of site 'east'",
    ),
    "look-alike site": (
        {"North ": clean_rows("n", 12)},
        "sites/North .csv, line 2 (the first of 12): The site 'North ' (12 rows)",
    ),
    "look-alike label": ({"east": with_cells("east", label_7="Fine")}, "sites/east.csv, line 7: The label 'Fine'"),
    "label of one site": ({"east": with_cells("east", label_8="lost")}, "sites/east.csv, line 8: Only the site"),
    "many labels": (
        {site: [[text, text[9:]] for text, _ in clean_rows(site)] for site in SITES},
        "sites/east.csv, line 2 (the first of 120): The column 'label' has 120 different labels in 120 rows.",
    ),
    "constant label": (
        {site: [[text, "fine"] for text, _ in clean_rows(site)] for site in SITES},
        "sites/east.csv, line 2 (the first of 30): All rows of all sites",
    ),
    "different type": (
        {"south": [[text, str(number % 2)] for number, (text, _) in enumerate(clean_rows("south"))]},
        "sites/south.csv: The column 'label' has integer values, and text values at most sites.",
    ),
    "empty site": ({"west": []}, "sites/west.csv: There are no rows."),
    "numbers as text": (
        {site: [[str(number * 1.5), label] for number, (_, label) in enumerate(clean_rows(site))] for site in SITES},
        "sites/east.csv, line 2 (the first of 30): Texts in 'text' are numbers: 30 of 30.",
    ),
}


# The other faults are warnings, and duplicates in few rows are notes.
ERRORS = {"missing text", "missing label", "many labels", "constant label", "different type", "empty site"}
NOTES = {"duplicate", "duplicate between sites"}


@pytest.mark.parametrize("kind", FAULTS)
def test_planted_fault_is_found_in_its_file_at_its_line(kind, folder, capsys):
    changed, place = FAULTS[kind]
    write_sites(folder / "sites", **changed)
    code, out = check(capsys, "sites")
    (group,) = [part for part in out.split("\n\n") if part.partition("\n")[0].endswith(f": {kind}")]
    severity, first = group.split(":")[0], group.splitlines()[1].strip()
    assert first.startswith(place)
    assert severity == ("error" if kind in ERRORS else "note" if kind in NOTES else "warning")
    assert code == (kind in ERRORS)


def test_clean_files_have_no_findings(folder, capsys):
    write_sites(folder / "sites")
    test = write_csv(folder / "test.csv", clean_rows("test"))
    code, out = check(capsys, "sites", "--test", str(test))
    assert code == 0
    assert out.startswith("120 rows of 4 sites and 30 test rows (texts in text; labels in label): no findings.\n")
    assert "no model is named (--model)" in out


def test_lines_are_those_of_the_file_with_line_breaks_in_texts(folder, capsys):
    rows = with_cells("west", text_3="a text\nof three\nlines", label_9="")
    write_sites(folder / "sites", west=rows)
    assert "sites/west.csv, line 11: The column 'label' has no label." in check(capsys, "sites")[1]


def test_test_rows_that_are_training_rows(folder, capsys):
    write_sites(folder / "sites")
    rows = clean_rows("test")
    rows[3][0] = "the pump 4 of north leaks"
    write_csv(folder / "held" / "test.csv", rows)
    for line in (["sites", "--test", "held/test.csv"], ["sites", "--test", "held"]):
        code, out = check(capsys, *line)
        assert "warning: duplicate in training and test\n  held/test.csv, line 5: " in out
        assert "line 6 of site 'north' (sites/north.csv)" in out and code == 0


def test_file_with_a_column_of_sites(folder, capsys):
    rows = [[site, *row] for site in SITES for row in clean_rows(site)]
    rows[40][0], rows[41][0], rows[50][2] = "South", "", ""
    write_csv(folder / "all.csv", rows, ("site", "text", "label"))
    code, out = check(capsys, "all.csv", "--site-column", "site")
    assert "all.csv, line 42: The site 'South' (1 row) differs from the site 'south' in case only." in out
    assert "all.csv, line 43: The column 'site' has no site." in out
    assert "all.csv, line 52: The column 'label' has no label." in out
    assert code == 1


def test_files_named_train_and_test_are_splits(folder, capsys):
    write_csv(folder / "data" / "train.csv", clean_rows("north"))
    write_csv(folder / "data" / "test.csv", clean_rows("south", 5))
    assert check(capsys, "data")[1].startswith("30 rows and 5 test rows (texts in text; labels in label): no findings")


def test_json_parquet_and_unreadable_files(folder, capsys):
    rows = [{"text": text, "label": label} for text, label in clean_rows("a")]
    (folder / "mixed").mkdir()
    (folder / "mixed" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    features = Features({"text": Value("string"), "label": ClassLabel(names=["defect", "fine"])})
    labels = {"text": [f"text {n}" for n in range(30)], "label": [0, 1, -1] + [0, 1, 0] * 9}
    Dataset.from_dict(labels, features).to_parquet(folder / "mixed" / "b.parquet")
    (folder / "mixed" / "c.csv").write_text('text,label\nfine,"open\n')
    code, out = check(capsys, "mixed")
    assert "error: unreadable file\n  mixed/c.csv, line 2: a quote" in out
    assert "mixed/b.parquet, row 3: The column 'label' has no label." in out
    assert code == 1


def test_saved_federated_dataset(folder, capsys):
    names = ["O", "B-LOC"]
    features = Features({"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=names))})
    sites = {}
    for site in SITES:
        tags = [[0, number % 2 if site != "east" else 0] for number in range(30)]
        rows = {"tokens": [["in", f"{site}{number}"] for number in range(30)], "ner_tags": tags}
        sites[site] = Dataset.from_dict(rows, features)
    FederatedDatasetDict({"train": FederatedDataset.from_dict(sites)}).save_to_disk("clients")
    code, out = check(capsys, "clients")
    assert (
        "data/east/train-00000-of-00001.parquet, row 1 (the first of 60): No example of the site 'east' has an entity"
        in out
    )
    assert code == 0


def test_recipe_names_the_data_and_the_columns(folder, capsys):
    rows = [[site, *row] for site in SITES for row in clean_rows(site)]
    rows[7][1] = ""
    write_csv(folder / "all.csv", rows, ("place", "body", "verdict"))
    write_csv(folder / "test.csv", [["south", *rows[9][1:]]], ("place", "body", "verdict"))
    (folder / "recipe.yaml").write_text(
        "model: {name_or_path: missing/model}\ndata: {path: all.csv, test_path: test.csv}\n"
        "task: {text_column: body, label_column: verdict}\npartition: {name: natural, column: place}\n"
    )
    code, out = check(capsys, "recipe.yaml")
    assert "(texts in body; labels in verdict; sites in place)" in out
    assert "all.csv, line 9: The column 'body' has no text." in out
    assert "test.csv, line 2: Repeated texts in 1 of 1 rows; the first is that of line 11 of site 'north'" in out
    assert code == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sits", "did you mean sites?"),
        ("sites --text-column body", "There is no column 'body'. The columns are: text, label."),
        ("sites --test nothing.csv", "--test: the file or folder nothing.csv does not exist"),
        ("sites --drop-duplicates", "--drop-duplicates is only allowed with --fix DIR."),
        ("sites --max-length 9", "--max-length is only allowed with --model PATH."),
        ("sites --fix sites", "--fix sites: the folder is not empty. Name a new folder"),
        ("empty", "empty has no data files."),
    ],
)
def test_mistakes_at_the_command_line(line, message, folder, capsys):
    write_sites(folder / "sites")
    (folder / "empty").mkdir()
    assert main(["check", *line.split()]) == 2
    assert message in capsys.readouterr().err


def read_csv(path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_fix_writes_clean_files_and_lists_the_changes(folder, capsys):
    changed = {
        "west": with_cells("west", text_5="", label_9=" ", label_10="Fine", text_12="the pump 0 of north leaks"),
        "east": [["007", "fine"], ["a text, with\na line break", " defect"], *clean_rows("east")],
    }
    write_sites(folder / "sites", **changed)
    code, out = check(capsys, "sites", "--fix", "clean", "--drop-duplicates")
    assert code == 1
    assert "Wrote 119 rows in 4 files to clean." in out and "Dropped 2 rows without a text, label or site." in out
    expected = [row for number, row in enumerate(clean_rows("west")) if number + 2 not in (5, 9, 12)]
    expected[8 - 2][1] = "fine"  # line 10, after two dropped rows
    assert read_csv(folder / "clean" / "west.csv") == [["text", "label"], *expected]
    east = read_csv(folder / "clean" / "east.csv")
    assert east[1:3] == [["007", "fine"], ["a text, with\na line break", "defect"]]
    changes = (folder / "clean" / "CHANGES.md").read_text()
    for line in (
        "sites/west.csv, line 5: dropped, without a text, label or site",
        "sites/west.csv, line 9: dropped, without a text, label or site",
        "sites/west.csv, line 12: dropped, with a repeated text",
        "sites/west.csv: the label 'Fine' is written as 'fine' in 1 row",
        "sites/east.csv: the label ' defect' is written as 'defect' in 1 row",
    ):
        assert f"- {line}\n" in changes
    assert changes.count("\n- ") == 5
    assert check(capsys, "clean")[0] == 0
    assert main("partition clean --client-per-file --output clients".split()) == 0


def test_fix_keeps_a_complete_row_that_repeats_an_incomplete_one_and_the_text_of_numbers(folder, capsys):
    rows = [[text, label, f"00{number % 7}", "1,5"] for number, (text, label) in enumerate(clean_rows("a"))]
    rows[2][1] = ""
    rows[9][0] = rows[2][0]
    write_csv(folder / "a.csv", rows, ("text", "label", "code", "weight"))
    check(capsys, "a.csv", "--fix", "clean", "--drop-duplicates")
    assert read_csv(folder / "clean" / "a.csv")[1:] == rows[:2] + rows[3:]


def test_fix_corrects_the_names_of_sites_in_a_column_and_in_file_names(folder, capsys):
    rows = [[site, *row] for site in SITES for row in clean_rows(site)]
    rows[0][0], rows[40][0] = " north", "South"
    write_csv(folder / "all.csv", rows, ("site", "text", "label"))
    check(capsys, "all.csv", "--site-column", "site", "--fix", "clean")
    assert {row[0] for row in read_csv(folder / "clean" / "all.csv")[1:]} == set(SITES)
    write_sites(folder / "sites", North=[["another text", "fine"]])
    check(capsys, "sites", "--fix", "joined")
    assert sorted(path.name for path in (folder / "joined").glob("*.csv")) == [f"{site}.csv" for site in sorted(SITES)]
    assert ["another text", "fine"] in read_csv(folder / "joined" / "north.csv")


def test_fix_of_json_and_parquet_keeps_types_and_drops_rows(folder, capsys):
    (folder / "data").mkdir()
    rows = [{"text": text, "label": label, "stars": n} for n, (text, label) in enumerate(clean_rows("a"))]
    rows[4]["label"] = None
    (folder / "data" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    features = Features(
        {"text": Value("string"), "label": ClassLabel(names=["defect", "fine"]), "stars": Value("int64")}
    )
    labels = {"text": [f"text {n}" for n in range(30)], "label": [0, 1, -1] + [0, 1, 0] * 9, "stars": [1] * 30}
    Dataset.from_dict(labels, features).to_parquet(folder / "data" / "b.parquet")
    check(capsys, "data", "--fix", "clean")
    written = [json.loads(line) for line in (folder / "clean" / "a.jsonl").read_text().splitlines()]
    assert written == rows[:4] + rows[5:]
    kept = Dataset.from_parquet(str(folder / "clean" / "b.parquet"))
    assert kept.features == features and len(kept) == 29


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names, self.texts = [], []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}

    def handle_data(self, data):
        self.texts.append(data.strip())


def test_page_has_the_findings_and_pictures_and_loads_nothing(folder, capsys):
    write_sites(folder / "sites", west=with_cells("west", text_5="", label_7="<b>"))
    code, out = check(capsys, "sites", "--output", "pages/check.html")
    assert out.endswith("Wrote pages/check.html.\n") and code == 1
    text = (folder / "pages" / "check.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.names.count("svg") >= 2 and "script" not in tags.names and "b" in tags.names
    assert "<b>" not in text.replace("<b>120", "").replace("<b>4", "").replace("<b>1", "").replace("<b>0", "")
    assert "sites/west.csv, line 5" in tags.texts and "Training rows of each site" in tags.texts
    assert "prefers-color-scheme:dark" in text and text.count("<rect") >= 4 + 2 * 4 + 1


def test_check_imports_no_torch(folder):
    write_sites(folder / "sites", west=with_cells("west", text_5=""))
    code = (
        "import sys; from hf_federated.cli.main import main; main(['check', 'sites', '--output', 'a.html', '--fix',"
        " 'b']); print('LOADED', *sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    loaded = set(out.partition("LOADED")[2].split())
    assert "hf_federated.data.checks.doctor" in loaded and "torch" not in loaded
