"""Benchmark reports: means, spreads, claims and notes are computed from the records of runs."""

from __future__ import annotations

import math
import re

import pytest

from hf_federated.experiments.benchmark.comparison import main_metric
from hf_federated.experiments.benchmark.grid import BenchmarkSection
from hf_federated.experiments.benchmark.reports.report import benchmark_report, comparability_note, curve_panel
from hf_federated.experiments.errors import CommandError


SECTION = BenchmarkSection(
    {"FedAvg": {}, "FedOpt": {}, "central": {"method": "centralized"}, "never": {}},
    paper={"FedAvg": 0.5142, "FedOpt": 0.5349},
    paper_setting="DistilBERT, 22 rounds",
    claims=["FedOpt > FedAvg", "FedAvg > central", "never > FedAvg"],
)
FEDAVG, FEDOPT = (0.50, 0.54, 0.58), (0.55, 0.56, 0.66)


def record(run, seed, value, method="federated", **more):
    return {
        "run": run,
        "seed": seed,
        "method": method,
        "metric": "accuracy",
        "metrics": {"accuracy": value, "loss": None if value is None else 1 - value},
        "history": [],
        "scale": "small",
        "num_rounds": 22,
        "num_epochs": 2.25,
        "bytes_up": 3_000_000,
        "bytes_down": 1_234_567_890,
        "seconds": 60.0,
        **more,
    }


def records():
    result = [record("FedAvg", seed, value) for seed, value in enumerate(FEDAVG)]
    result += [record("FedOpt", seed, value, seconds=30.0 * seed) for seed, value in enumerate(FEDOPT)]
    return [*result, record("central", 1, 0.7, "centralized", num_rounds=None, bytes_up=None, bytes_down=None)]


def cells(report: str, first: str) -> list[str]:
    """The cells of the table row whose first cell is `first`."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in report.splitlines()]
    (row,) = [row for row in rows if row[0] == first]
    return row


def mean(values) -> float:
    return sum(values) / len(values)


def sample_deviation(values) -> float:
    return math.sqrt(sum((value - mean(values)) ** 2 for value in values) / (len(values) - 1))


def test_results_table_shows_mean_spread_and_cost_of_each_run():
    report = benchmark_report(records(), SECTION, "text.yaml")
    expected = f"{mean(FEDAVG):.4f} ± {sample_deviation(FEDAVG):.4f} (3)"
    assert expected == "0.5400 ± 0.0400 (3)"
    loss = f"0.4600 ± {sample_deviation(FEDAVG):.4f}"
    assert cells(report, "FedAvg") == ["FedAvg", expected, loss, "0.5142", "2.25", "3.00", "1230", "22", "60"]
    expected = f"{mean(FEDOPT):.4f} ± {sample_deviation(FEDOPT):.4f} (3)"
    assert cells(report, "FedOpt")[1] == expected and cells(report, "FedOpt")[-1] == "30"
    assert cells(report, "central") == [
        *("central", "0.7000 (1 of 3)", "0.3000", "-", "2.25", "-", "-", "-", "60"),
    ]
    assert cells(report, "never") == ["never", *"--------"]


def test_run_whose_language_model_never_answered_is_left_out():
    rounds = [{"round": number, "llm_fell_back": 1.0} for number in (1, 2)]
    some = [*rounds[:1], {"round": 2, "llm_fell_back": 0.0}]
    finished = [*records(), *(record("never", seed, 0.9, history=rounds) for seed in range(3))]
    report = benchmark_report(finished, SECTION, "text.yaml")
    assert cells(report, "never") == ["never", *"--------"]
    assert "no weights in any round: never, seed 0; never, seed 1; never, seed 2." in report
    scored = [{"round": 1, "accuracy": 0.5, **entry} for entry in ({}, {"llm_fell_back": 1.0})]
    panel = curve_panel(
        [record(run, 0, 0.5, history=[entry]) for run, entry in zip(("FedAvg", "never"), scored, strict=True)],
        SECTION,
        "",
    )
    assert panel is not None and list(panel.curves) == ["FedAvg"]
    finished[-1] = record("never", 2, 0.9, history=some)
    report = benchmark_report(finished, SECTION, "text.yaml")
    assert cells(report, "never")[1] == "0.9000 (1 of 3)" and "never, seed 0; never, seed 1." in report


def test_table_columns_are_aligned():
    blocks = benchmark_report(records(), SECTION, "text.yaml").split("\n\n")
    tables = [block.splitlines() for block in blocks if block.startswith("|")]
    assert [len(table) for table in tables] == [2 + 4, 2 + 3]
    for table in tables:
        assert len({tuple(match.start() for match in re.finditer(r"\|", line)) for line in table}) == 1


def test_claims_table_shows_paired_difference_and_verdict():
    report = benchmark_report(records(), SECTION, "text.yaml")
    # The differences are 0.05, 0.02 and 0.08. Their mean is 0.05, and their deviation is 0.03.
    error, half = 0.03 / math.sqrt(3), 4.30265 * 0.03 / math.sqrt(3)
    interval = f"{0.05 - half:+.4f} to {0.05 + half:+.4f}"
    visible = f"{(4.30265 + 1.06066) * error:.4f}"
    assert cells(report, "FedOpt > FedAvg")[1:5] == ["+0.0207", "+0.0500", f"{error:.4f}", interval]
    assert cells(report, "FedOpt > FedAvg")[6:8] == ["3 of 3", visible]
    assert cells(report, "FedOpt > FedAvg")[-1] == f"cannot be told, differences below {visible} are not visible"
    assert cells(report, "FedAvg > central")[2:5] == [f"{0.54 - 0.7:+.4f}", "-", "-"]
    assert cells(report, "FedAvg > central")[-1] == "cannot be told so far: one seed has no spread"
    assert cells(report, "never > FedAvg")[1:5] == ["-"] * 4
    assert cells(report, "never > FedAvg")[-1] == "not measured: no finished runs of never under seed 0"
    assert "adjusted with Holm's correction for the 1 tested claim of this recipe." in " ".join(report.split())


def test_lower_is_better_flips_the_comparison():
    section = BenchmarkSection(
        {"a": {}, "b": {}}, lower_is_better=True, paper={"a": 3.0, "b": 5.5}, claims=["a > b"], seeds=[0, 1]
    )
    runs = [record("a", seed, 12.25 + seed) for seed in (0, 1)] + [record("b", seed, 30.5) for seed in (0, 1)]
    report = benchmark_report(runs, section, "x.yaml")
    assert cells(report, "a > b")[1:3] == ["+2.5000", "+17.75"] and "lower is better" in report


def test_run_without_a_finite_value_is_listed_and_prevents_a_verdict():
    run_records = records()
    run_records[4] = record("FedOpt", 1, None)
    report = benchmark_report(run_records, SECTION, "text.yaml")
    assert cells(report, "FedOpt")[1] == f"{mean([0.55, 0.66]):.4f} ± {sample_deviation([0.55, 0.66]):.4f} (2 of 3)"
    assert "Runs without a finite accuracy, which are excluded from the means: FedOpt, seed 1." in report
    assert cells(report, "FedOpt > FedAvg")[-1] == "cannot be told: no finite accuracy under 1 seed"


def test_former_claims_keep_their_rows():
    section = BenchmarkSection(
        SECTION.runs, claims=["FedOpt > FedAvg by 0.01"], former_claims=["FedOpt > FedAvg", "central > FedAvg"]
    )
    report = benchmark_report(records(), section, "text.yaml")
    assert cells(report, "FedOpt > FedAvg (former)")[2] == "+0.0500"
    assert cells(report, "FedOpt > FedAvg by 0.01")[2] == "+0.0500"
    assert "for the 2 tested claims of this recipe, including 2 former claims" in " ".join(report.split())


def test_metric_of_the_section_is_read_from_the_same_records():
    section = BenchmarkSection({"FedAvg": {}}, metric="loss", lower_is_better=True)
    report = benchmark_report(records()[:3], section, "text.yaml")
    assert cells(report, "FedAvg")[1] == f"{1 - mean(FEDAVG):.4f} ± {sample_deviation(FEDAVG):.4f} (3)"
    section.metric = "f1"
    with pytest.raises(
        CommandError, match="benchmark.metric: 'FedAvg' has no metric 'f1'. Its metrics are accuracy, loss"
    ):
        main_metric(records(), section)
    with pytest.raises(CommandError, match=r"several main metrics \(accuracy, f1\). Set one"):
        main_metric([*records(), record("FedAvg", 1, 0.5, metric="f1")], SECTION)


def test_further_metrics_are_columns_of_the_table():
    section = BenchmarkSection(SECTION.runs, metric="loss", lower_is_better=True, further_metrics=["accuracy"])
    report = benchmark_report(records(), section, "text.yaml")
    assert cells(report, "run")[:4] == ["run", "loss", "accuracy", "paper"]
    assert cells(report, "FedAvg")[1:3] == ["0.4600 ± 0.0400 (3)", "0.5400 ± 0.0400"]
    assert cells(report, "never")[1:3] == ["-", "-"]
    missing = BenchmarkSection(SECTION.runs, further_metrics=["f1"])
    with pytest.raises(CommandError, match=r"benchmark.further_metrics: 'FedAvg' has no metric 'f1'"):
        benchmark_report(records(), missing, "text.yaml")


def test_only_results_at_the_scale_of_the_paper_are_comparable():
    small = comparability_note(records())
    assert (
        small.startswith("The results are not comparable with the results of the paper") and "(scale small)" in small
    )
    paper = [record("FedAvg", 0, 0.5, scale="paper")]
    assert comparability_note(paper).startswith(
        "Model, data and sizes are those of the paper, except for changes by --set."
    )
    assert "(scales paper, small)" in comparability_note([*paper, *records()])
    assert "differ. Only" in comparability_note([record("FedAvg", 0, 0.5, scale=None)])
    assert "not comparable" not in comparability_note(paper)


def test_report_without_published_results_does_not_mention_a_paper():
    report = benchmark_report(records()[:3], BenchmarkSection({"FedAvg": {}}), "text.yaml")
    assert report.startswith("# text.yaml\n") and "the paper" not in report and "published" not in report


def test_different_package_versions_are_reported():
    run_records = records()
    for number, item in enumerate(run_records):
        item["versions"] = {"torch": "2.6.0" if number else "2.7.0", "transformers": "5.0"}
    report = benchmark_report(run_records, SECTION, "text.yaml")
    assert "The runs used different versions of torch: 2.6.0, 2.7.0." in report
    assert "versions of transformers" not in report


def test_different_test_examples_are_reported_and_missing_hashes_are_ignored():
    known = {"test_rows": "a", "further_rows": {"shifted": "b"}}
    note = "Under seed 0 the runs were tested on different examples"
    for fields, is_reported in (
        (known, False),
        ({"test_rows": "a"}, False),
        ({"test_rows": "a", "further_rows": {"shifted": "c"}}, True),
        ({"test_rows": "c", "further_rows": {"shifted": "b"}}, True),
    ):
        run_records = [record("FedAvg", 0, 0.5, **known), record("FedOpt", 0, 0.5, **fields)]
        assert (note in benchmark_report(run_records, SECTION, "text.yaml")) == is_reported


def test_panel_contains_curves_of_federations_and_values_of_baselines():
    run_records = records()
    assert curve_panel(run_records, SECTION, "text.yaml") is None
    run_records[0]["history"] = [
        {"round": 2, "accuracy": 0.3},
        {"round": 4, "accuracy": None},
        {"round": 6, "loss": 1.0},
    ]
    run_records[-1]["history"] = [{"round": 1, "accuracy": 0.3}]
    panel = curve_panel(run_records, SECTION, "text.yaml")
    assert panel is not None and (panel.title, panel.metric) == ("text.yaml", "accuracy")
    assert panel.curves == {"FedAvg": [{2: 0.3}]} and panel.references == {"central": [0.7]}
    assert panel.step_name == "round"


def test_steps_of_split_models_are_optimizer_steps():
    run_records = [{**item, "step_name": "optimizer step"} for item in records()]
    run_records[0]["history"] = [{"round": 26, "accuracy": 0.3}]
    panel = curve_panel(run_records, SECTION, "text.yaml")
    assert panel is not None and panel.step_name == "optimizer step"
    assert "| optimizer steps |" in " ".join(benchmark_report(run_records, SECTION, "text.yaml").split())
    run_records[0]["step_name"] = None  # a federation, or an old record without a unit
    assert "rounds or optimizer steps" in benchmark_report(run_records, SECTION, "text.yaml")


@pytest.mark.parametrize(
    ("clients", "header"),
    [
        (["baby", "sport"], "| run | baby | sport |"),
        (["0", "1"], "| run | lowest | median | highest |"),
        ([f"site {number}" for number in range(13)], "| run | lowest | median | highest |"),
    ],
    ids=["named", "numbers", "many"],
)
def test_clients_have_columns_only_if_they_are_few_and_named(clients, header):
    section = BenchmarkSection({"FedAvg": {}}, seeds=[0, 1])
    run_records = []
    for seed in (0, 1):
        by_client = {name: {"accuracy": 0.1 * seed + 0.01 * number} for number, name in enumerate(clients)}
        run_records.append(record("FedAvg", seed, 0.5, clients=by_client))
    lines = (
        benchmark_report(run_records, section, "grid.yaml")
        .split("On the test examples of each client")[1]
        .splitlines()
    )
    lines = [" ".join(line.split()) for line in lines]
    row = lines[lines.index(header) + 2]
    values = [float(cell.split()[0]) for cell in row.split("|")[2:-1]]
    assert values[0] == pytest.approx(0.05, abs=1e-4)
    assert values[-1] == pytest.approx(0.05 + 0.01 * (len(clients) - 1), abs=1e-4)
