"""`hf-federated init` writes a recipe that every check accepts, for each task and each place of the clients."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from hf_federated import FederatedDatasetDict
from hf_federated.cli.init import guess_place
from hf_federated.cli.main import main
from hf_federated.experiments.data.raw import load_raw_data
from hf_federated.experiments.recipe.fields import check_names
from hf_federated.experiments.recipe.recipe import load_recipe, parse_recipe
from hf_federated.experiments.recipe.starter import METHODS, MODELS, PLACES, StarterAnswers, guess_task, starter_recipe
from hf_federated.experiments.recipe.yaml_file import parse_yaml
from hf_federated.tasks import TASKS


ROWS = [("the pump leaks", "defect"), ("works", "fine"), ("the screen is black", "defect"), ("arrived", "fine")] * 10


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: str, header: str = "review;category;hospital") -> None:
    Path(path).parent.mkdir(exist_ok=True)
    rows = [f"{text};{label};{'a' if number % 3 else 'b'}" for number, (text, label) in enumerate(ROWS)]
    Path(path).write_text("\n".join([header, *rows]), encoding="cp1252")


@pytest.mark.parametrize("task", TASKS)
def test_recipe_for_each_task_and_place_passes_all_checks(task):
    for place in PLACES:
        text = starter_recipe(StarterAnswers("data.csv", task, MODELS[task], "fedavg", place))
        values = parse_yaml(text, "recipe.yaml")
        check_names(values)
        recipe = parse_recipe(values)
        assert recipe.task.name == task, place
        assert (recipe.partition is not None) == (place in ("column", "simulated")), place
        assert recipe.network.clients == (["north", "south"] if place == "machines" else []), place
        assert recipe.data.path == {"files": "clients", "machines": "examples"}.get(place, "data.csv")


@pytest.mark.parametrize("method", METHODS)
def test_recipe_for_each_method_passes_all_checks(method):
    for place in PLACES:
        text = starter_recipe(StarterAnswers("data.csv", "text-classification", "m/m", method, place))
        recipe = parse_recipe(parse_yaml(text, "recipe.yaml"))
        assert (recipe.public is not None) == METHODS[method].needs_public, place
        assert (recipe.model.lora is not None) == (method == "lora")
        named = {recipe.federation.get("aggregation"), recipe.federation.get("distillation")}
        assert ("fedavg" if method == "lora" else method) in named


@pytest.mark.parametrize(
    "value", ["yes", "no", "1", "a: b", "été", "path with blanks/x.csv", "#1", "it's", 'say "hi"', "null", "1e3", "-"]
)
def test_values_are_read_back_as_written(value):
    answers = StarterAnswers(value, "text-classification", value, "fedavg", "column", client_column=value)
    values = parse_yaml(starter_recipe(answers), "recipe.yaml")
    assert (values["data"]["path"], values["model"]["name_or_path"], values["partition"]["column"]) == (value,) * 3


@pytest.mark.parametrize(
    ("columns", "task"),
    [
        (["text", "label"], "text-classification"),
        (["Review", "Category", "date"], "text-classification"),
        (["tokens", "ner_tags"], "sequence-tagging"),
        (["id", "question", "context", "answers"], "question-answering"),
        (["article", "highlights", "id"], "seq2seq"),
        (["text"], "language-modeling"),
        ([], "text-classification"),
    ],
)
def test_task_is_found_from_the_columns(columns, task):
    assert guess_task(columns) == task


def printed_commands(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("  hf-federated")]


def test_file_with_a_column_of_sites_becomes_a_recipe_of_these_sites(capsys):
    write("reviews.csv")
    assert main("init --data reviews.csv".split()) == 0
    assert printed_commands(capsys) == [["train", "recipe.yaml"]]
    raw = load_raw_data(load_recipe("recipe.yaml"))
    assert set(raw.train) == {"a", "b"}
    assert list(raw.task.label_names) == ["defect", "fine"]


def test_folder_of_files_becomes_a_partition_and_a_recipe(capsys):
    write("sites/north.csv")
    write("sites/south.csv")
    assert main("init first.yaml --data sites --method scaffold".split()) == 0
    commands = printed_commands(capsys)
    assert [command[0] for command in commands] == ["partition", "train"]
    assert main(commands[0]) == 0
    raw = load_raw_data(load_recipe(commands[1][1]))
    assert set(raw.train) == {"north", "south"}
    assert main("init second.yaml --data clients".split()) == 0
    assert set(load_raw_data(load_recipe("second.yaml")).train) == {"north", "south"}


def test_dots_in_names_of_sites_and_shards_of_a_split_are_told_apart(capsys):
    for folder, names, place in (
        ("sites", ("st. mary.csv", "st. john.csv"), "files"),
        ("shards", ("train-00000-of-00002.csv", "train-00001-of-00002.csv"), "simulated"),
    ):
        Path(folder).mkdir()
        for name in names:
            write(f"{folder}/{name}", "text;label")
        assert guess_place(Path(folder), ["text", "label"]) == place


def test_folder_of_splits_is_divided_at_random(capsys):
    for split in ("train", "test"):
        write(f"data/{split}.csv", "review;category;shift")
    assert main("init --data data --num-clients 3".split()) == 0
    assert printed_commands(capsys) == [["train", "recipe.yaml"]]
    raw = load_raw_data(load_recipe("recipe.yaml"))
    assert (len(raw.train), raw.test_source) == (3, " of the split 'test', found in data")


def test_recipe_for_other_machines_lists_the_labels(capsys):
    write("reviews.csv")
    line = "init --data reviews.csv --clients machines --client-names east west"
    assert main(line.split()) == 0
    commands = printed_commands(capsys)
    assert [command[0] for command in commands] == ["certificates", "serve", "join", "join"]
    assert all("east" in commands[number] for number in (0, 2)) and "west" in commands[3]
    recipe = load_recipe("recipe.yaml")
    assert recipe.task.given["label_names"] == ["defect", "fine"]
    assert recipe.network.clients == ["east", "west"]


def test_labels_of_all_files_are_listed_and_integers_are_ids(capsys):
    Path("sites").mkdir()
    for site, labels in {"north": (0, 10), "south": range(12)}.items():
        rows = "".join(f"text {label},{label}\n" for label in labels)
        Path("sites", f"{site}.csv").write_text("text,label\n" + rows)
    assert main(["init", "recipe.yaml", "--data", "sites", "--clients", "machines"]) == 0
    assert load_recipe("recipe.yaml").task.given["label_names"] == [str(number) for number in range(12)]


def test_line_break_in_a_column_name_adds_no_field_to_the_recipe(capsys):
    Path("rows.csv").write_text('label,"x\ncompare: [centralized, local]\nplots:"\na,b\n')
    assert main(["init", "recipe.yaml", "--data", "rows.csv", "--task", "text-classification"]) == 0
    assert "compare" not in parse_yaml(Path("recipe.yaml").read_text(), "recipe.yaml")


def test_options_for_csv_files_are_part_of_the_recipe_and_the_commands(capsys):
    for site in ("north", "south"):
        Path("sites").mkdir(exist_ok=True)
        Path("sites", f"{site}.csv").write_text("text;label\nнасос течёт;01\n", encoding="cp1251")
    line = "init --data sites --csv-encoding cp1251 --csv-text-columns label"
    assert main(line.split()) == 0
    assert main(printed_commands(capsys)[0]) == 0
    clients = FederatedDatasetDict.load_from_disk("clients")["train"]
    assert clients["north"][:] == {"text": ["насос течёт"], "label": ["01"]}
    assert main([*line.split(), "--clients", "machines", "--overwrite"]) == 0
    assert load_recipe("recipe.yaml").data.csv == {"encoding": "cp1251", "text_columns": ["label"]}
    assert load_recipe("recipe.yaml").task.given["label_names"] == ["01"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_questions_are_asked_in_a_terminal(monkeypatch, capsys):
    write("reviews.csv")
    answers = ["reviews.csv", "", "you/model", "fedprocks", "fedprox", "simulated"]
    monkeypatch.setattr("sys.stdin", Terminal("\n".join(answers) + "\n"))
    assert main(["init"]) == 0
    printed = capsys.readouterr().out
    assert "'fedprocks' is not a choice" in printed and "clients with different labels" in printed
    recipe = load_recipe("recipe.yaml")
    assert (recipe.model.name_or_path, recipe.federation["aggregation"]) == ("you/model", "fedprox")
    assert recipe.partition is not None and recipe.partition.name == "label-dirichlet"
    assert recipe.task.given["text_column"] == "review"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("init", ["--data is missing", "--data examples.csv"]),
        ("init --data nosuch.csv", ["nosuch.csv does not exist"]),
        ("init --data broken.csv", ["broken.csv, line 2", "never closed"]),
        ("init old.yaml --data broken.csv", ["old.yaml exists", "--overwrite"]),
        ("init nosuch/a.yaml --data fine.csv", ["nosuch/a.yaml cannot be written"]),
        ("init --data fine.csv --num-clients 0", ["--num-clients is 0", "at least 1"]),
        ("init --data fine.csv --clients column --client-column bank", ["'bank'", "text, label"]),
    ],
)
def test_mistake_is_an_error_of_one_line(folder, line, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    Path("broken.csv").write_text('text,label\n"a,b\n')
    Path("fine.csv").write_text("text,label\na,b\n")
    Path("old.yaml").write_text("")
    assert main(line.split()) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and all(word in printed for word in words)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_written_recipe_trains(method, model_dir):
    write("reviews.csv")
    line = f"init --data reviews.csv --clients column --model {model_dir} --method {method}"
    assert main(line.split()) == 0
    changes = ["federation.num_rounds=1", "training.use_cpu=true", "training.save_strategy=no", "task.max_length=8"]
    assert main(["train", "recipe.yaml", *(word for change in changes for word in ("--set", change))]) == 0
    assert Path("outputs/first-run/config.json").exists() or Path("outputs/first-run/adapter_config.json").exists()
