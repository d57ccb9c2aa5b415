"""Runs are compared by the settings that differ, by their results, bytes and time."""

from __future__ import annotations

import json
import re
import shutil
from xml.etree import ElementTree

import pytest
from federations import build_federation
from run_files import write_run
from tiny import rows

from hf_federated.cli.main import main
from hf_federated.messages.ledger import Ledger
from hf_federated.reporting.comparison import Comparison
from hf_federated.reporting.metric_names import lower_is_better
from hf_federated.reporting.run_log import LOG_NAME, as_number
from hf_federated.reporting.saved_run import read_saved_run


HOSTILE = "a|b<script>*x*\x1b[31m"
FEDAVG = {"aggregation": "fedavg", "aggregation_kwargs": {}, "round_deadline": None}
FEDPROX = {"aggregation": "fedprox", "aggregation_kwargs": {"proximal_weight": 0.1}, "round_deadline": 5.0}


@pytest.fixture
def runs(tmp_path):
    """Two runs that differ in the algorithm and in the number of rounds."""
    write_run(tmp_path / "one", num_rounds=3, federation=FEDAVG, arguments={"learning_rate": 0.1, "seed": 1})
    write_run(tmp_path / "two", num_rounds=5, federation=FEDPROX, arguments={"learning_rate": 0.1, "seed": 1})
    return tmp_path


def compared(*folders, **kwargs) -> dict[str, list[str | None]]:
    comparison = Comparison([read_saved_run(folder) for folder in folders], **kwargs)
    return {
        row.name: [f"{cell}*" if n in row.best else cell for n, cell in enumerate(row.cells)]
        for row in comparison.rows()
    }


def test_table_has_what_differs_and_marks_the_best(runs):
    assert compared(runs / "one", runs / "two") == {
        "state": ["complete", "complete"],
        "aggregation": ["fedavg", "fedprox"],
        "round_deadline": ["none", "5.0"],
        "aggregation_kwargs.proximal_weight": ["-", "0.1"],
        "rounds": ["3 of 3", "5 of 5"],
        "accuracy": ["0.7500", "0.8333*"],
        "evaluation loss": ["0.3333", "0.2000*"],
        "training loss": ["0.6667", "0.4000*"],
        "bytes to clients": ["12.0 kB*", "20.0 kB"],
        "bytes from clients": ["6.0 kB*", "10.0 kB"],
        "time": ["2 min 0 s*", "3 min 20 s"],
        "time a round": ["40.0 s", "40.0 s"],
    }


def test_costs_of_an_unfinished_run_are_not_the_best(tmp_path):
    write_run(tmp_path / "whole", 5)
    write_run(tmp_path / "part", 2, total=5, ended="stopped")
    rows = compared(tmp_path / "whole", tmp_path / "part")
    assert rows["time"] == ["3 min 20 s", "1 min 20 s"] and rows["bytes to clients"] == ["20.0 kB", "8.0 kB"]
    assert rows["accuracy"] == ["0.8333*", "0.6667"]


def test_metric_for_best_model_decides_what_is_best_and_what_is_drawn(tmp_path):
    for number, name in enumerate(("one", "two")):
        write_run(tmp_path / name, num_rounds=3 + number, best_metric="eval_accuracy", greater_is_better=False)
    assert compared(tmp_path / "one", tmp_path / "two")["accuracy"] == ["0.7500*", "0.8000"]
    assert Comparison([read_saved_run(tmp_path / name) for name in ("one", "two")]).metric == "eval_accuracy"


def test_equal_values_are_not_marked(runs):
    shutil.copytree(runs / "one", runs / "copy")
    rows_of_copies = compared(runs / "one", runs / "copy")
    assert not any(cell.endswith("*") for cells in rows_of_copies.values() for cell in cells)
    assert "aggregation" not in rows_of_copies


def test_a_setting_that_a_run_has_not_recorded_is_no_difference(runs):
    write_run(runs / "old", num_rounds=3)
    assert "aggregation" not in compared(runs / "one", runs / "old")


def test_curves_by_round_and_by_bytes(runs):
    comparison = Comparison([read_saved_run(runs / name) for name in ("one", "two")])
    by_round, by_bytes = comparison.charts()
    assert by_round.x_name == "round" and by_bytes.x_name == "kB in both directions"
    assert [curve.name for curve in by_round.curves] == ["one", "two"]
    accuracies = [1 - 1 / (number + 1) for number in (1, 2, 3)]
    assert by_round.curves[0].points == list(zip((1, 2, 3), accuracies, strict=True))
    # Each of four clients receives 1000 and sends 500 bytes a round.
    assert by_bytes.curves[0].points == list(zip((6.0, 12.0, 18.0), accuracies, strict=True))


def test_a_metric_can_be_chosen(runs):
    saved = [read_saved_run(runs / name) for name in ("one", "two")]
    assert Comparison(saved, "loss").metric == "loss"
    with pytest.raises(ValueError, match="no run has logged the metric 'f1'. The logged metrics are: accuracy, loss"):
        Comparison(saved, "f1")


def test_runs_of_scripts_are_compared_from_what_they_leave(tmp_path):
    trainers = {}
    for name, algorithm in (("avg", "fedavg"), ("opt", "fedopt")):
        trainers[name] = build_federation(
            tmp_path / name,
            federation={"aggregation": algorithm},
            trainer={"eval_dataset": rows(4, seed=9)},
            eval_strategy="epoch",
            save_strategy="epoch",
        )
        trainers[name].train()
        trainers[name].save_model()
    table = compared(tmp_path / "avg", tmp_path / "opt")
    losses = [f"{trainer.state.log_history[-2]['eval_loss']:.4f}" for trainer in trainers.values()]
    assert [cell.rstrip("*") for cell in table["evaluation loss"]] == losses
    assert table["aggregation"] == ["fedavg", "fedopt"]
    # Without the log, the last checkpoint and the ledger have the same values.
    by_bytes = read_saved_run(tmp_path / "avg").curve_by_bytes("eval_loss")
    for name in trainers:
        (tmp_path / name / LOG_NAME).unlink()
    again = compared(tmp_path / "avg", tmp_path / "opt")
    assert [again[name] for name in ("evaluation loss", "aggregation")] == [
        table["evaluation loss"],
        table["aggregation"],
    ]
    assert read_saved_run(tmp_path / "avg").curve_by_bytes("eval_loss") == by_bytes
    assert by_bytes[-1][0] == trainers["avg"].ledger.bytes_down + trainers["avg"].ledger.bytes_up


def test_bytes_come_from_the_ledger_where_the_log_has_none(tmp_path):
    ledger = Ledger()
    for number in range(3):
        ledger.record(number, "a", 100, 10)
    history = [{"step": number, "eval_accuracy": 0.1 * number} for number in (1, 2, 3)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history, "max_steps": 3}))
    ledger.save(tmp_path)
    assert [x for x, _ in read_saved_run(tmp_path).curve_by_bytes("eval_accuracy")] == [110, 220, 330]


def test_baselines_of_a_recipe_are_lines_in_the_picture(runs):
    results = {
        "federated": {"metrics": {"accuracy": 0.9}, "seconds": 5},
        "baselines": {"centralized": {"metrics": {"accuracy": 0.95}}},
    }
    (runs / "one" / "results.json").write_text(json.dumps(results))
    comparison = Comparison([read_saved_run(runs / name) for name in ("one", "two")])
    assert comparison.references() == {"centralized": 0.95}
    assert "centralized 0.95" in comparison.to_html() and "centralized 0.95" in comparison.to_svg()
    assert compared(runs / "one", runs / "two")["accuracy"][0] == "0.9000*"  # The final model.


def test_the_page_and_the_markdown_show_hostile_names_as_text(tmp_path):
    for number, name in enumerate((HOSTILE, "plain")):
        write_run(tmp_path / name, federation={**FEDAVG, "aggregation": f"{name}{number}"})
    comparison = Comparison([read_saved_run(tmp_path / name) for name in (HOSTILE, "plain")])
    assert "<script" not in comparison.to_html()
    text = comparison.to_markdown("a.svg")
    assert "<script" not in re.sub(r"\\.", "", text) and "\x1b" not in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {4}
    names = [
        element.text
        for element in ElementTree.fromstring(comparison.to_svg()).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert any("<script>" in name for name in names if name)


def test_command_prints_a_table(runs, capsys):
    assert main(["compare", str(runs / "one"), str(runs / "two")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["one", "two"]
    assert ["accuracy", "0.7500", "0.8333*"] in [line.split() for line in lines]
    assert lines[-1] == "The values with * are best."


def test_command_writes_a_page_or_markdown_with_a_picture(runs, capsys):
    folders = [str(runs / "one"), str(runs / "two")]
    assert main(["compare", *folders, "--output", str(runs / "out.html")]) == 0
    assert '<td class="best">0.8333</td>' in (runs / "out.html").read_text()
    assert main(["compare", *folders, "--output", str(runs / "out.md")]) == 0
    assert "| accuracy | 0.7500 | **0.8333** |" in (runs / "out.md").read_text()
    assert "](out.svg)" in (runs / "out.md").read_text()
    svg = ElementTree.parse(runs / "out.svg").getroot()
    assert sum(1 for _ in svg.iter("{http://www.w3.org/2000/svg}polyline")) == 4


def test_folders_of_one_name_are_named_by_their_paths(runs, capsys):
    shutil.copytree(runs / "two", runs / "other" / "one")
    assert main(["compare", str(runs / "one"), str(runs / "other" / "one")]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["one", "other/one"]


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["one"], "at least two runs, but there are 1"),
        (["one", "one/"], "one is given twice"),
        (["one", "none"], "contains no run"),
        (["one", "two", "--output", "x.pdf"], "must end in .html or .md"),
        (["one", "two", "--output", "no/x.html"], "--output no/x.html"),
        (["one", "two", "--metric", "f1"], "no run has logged the metric 'f1'"),
    ],
)
def test_mistakes_are_one_line(runs, monkeypatch, capsys, arguments, text):
    monkeypatch.chdir(runs)
    assert main(["compare", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "name, content", [("results.json", "[]"), ("results.json", "{"), ("_run.json", '"x"'), (LOG_NAME, "{}\n")]
)
def test_a_damaged_file_is_named(runs, capsys, name, content):
    (runs / "two" / name).write_text(content)
    assert main(["compare", str(runs / "one"), str(runs / "two")]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "is_lower"),
    [("eval_rmse", True), ("perplexity_macro", True), ("hamming_loss_micro", True), ("brier_score", True)]
    + [("eval_accuracy", False), ("f1_macro", False), ("lossless_share", False)],
)
def test_direction_of_a_metric_is_that_of_its_words(name, is_lower):
    assert lower_is_better(name, None, None) is is_lower


def test_integer_beyond_floats_is_no_value():
    assert as_number(10**400) is None and as_number(True) is None and as_number(3) == 3.0
