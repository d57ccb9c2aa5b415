"""A report holds the means, spreads and differences of its records, and claims no more than they show."""

from __future__ import annotations

import math
import re

import pytest

from hf_federated.experiments.errors import CommandError
from hf_federated.experiments.grid import BenchmarkSection
from hf_federated.experiments.report import benchmark_report, comparability_note, compare, curve_panel, main_metric


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
        "seconds": 60.0,
        **more,
    }


def records():
    made = [record("FedAvg", seed, value) for seed, value in enumerate(FEDAVG)]
    made += [record("FedOpt", seed, value, seconds=30.0 * seed) for seed, value in enumerate(FEDOPT)]
    return [*made, record("central", 1, 0.7, "centralized", num_rounds=None, bytes_up=None)]


def cells(report: str, first: str) -> list[str]:
    """The row that begins with this cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in report.splitlines()]
    (row,) = [row for row in rows if row[0] == first]
    return row


def mean(values) -> float:
    return sum(values) / len(values)


def sample_deviation(values) -> float:
    return math.sqrt(sum((value - mean(values)) ** 2 for value in values) / (len(values) - 1))


def test_a_row_has_mean_spread_and_cost_of_its_run():
    report = benchmark_report(records(), SECTION, "text.yaml")
    ours = f"{mean(FEDAVG):.4f} ± {sample_deviation(FEDAVG):.4f} (3)"
    assert ours == "0.5400 ± 0.0400 (3)"
    assert cells(report, "FedAvg") == ["FedAvg", ours, "0.5142", "2.25", "3.0", "22", "60"]
    ours = f"{mean(FEDOPT):.4f} ± {sample_deviation(FEDOPT):.4f} (3)"
    assert cells(report, "FedOpt")[1] == ours and cells(report, "FedOpt")[-1] == "30"
    assert cells(report, "central") == ["central", "0.7000 (1 of 3)", "-", "2.25", "-", "-", "60"]
    assert cells(report, "never") == ["never", "-", "-", "-", "-", "-", "-"]


def test_the_tables_are_aligned():
    blocks = benchmark_report(records(), SECTION, "text.yaml").split("\n\n")
    tables = [block.splitlines() for block in blocks if block.startswith("|")]
    assert [len(table) for table in tables] == [2 + 4, 2 + 3]
    for table in tables:
        assert len({tuple(match.start() for match in re.finditer(r"\|", line)) for line in table}) == 1


def test_a_claim_has_the_paired_difference_and_a_verdict():
    report = benchmark_report(records(), SECTION, "text.yaml")
    differences = [first - second for first, second in zip(FEDOPT, FEDAVG, strict=True)]
    ours = f"{mean(differences):+.4f} ± {sample_deviation(differences):.4f}"
    assert cells(report, "FedOpt > FedAvg")[1:] == ["+0.0207", ours, "3 of 3", "holds"]
    assert cells(report, "FedAvg > central")[1:] == [
        "-",
        f"{0.54 - 0.7:+.4f}",
        "0 of 1, 2 missing",
        "does not hold so far",
    ]
    assert cells(report, "never > FedAvg")[1:] == ["-", "-", "0 of 0, 3 missing", "not measured"]
    assert "no test of significance" in " ".join(report.split())
    assert "signific" not in report.replace("no test of significance", "")


def test_pairs_count_and_not_means_alone():
    # The mean is much better, and still one seed of three disagrees.
    assert compare({0: 0.9, 1: 0.9, 2: 0.1}, {0: 0.1, 1: 0.1, 2: 0.2}).verdict == "mixed"
    assert compare({0: 0.5, 1: 0.6}, {0: 0.5, 1: 0.5}).verdict == "mixed"  # equal is not better
    assert compare({0: 0.5}, {0: 0.5}).verdict == "does not hold"
    assert compare({0: 0.5}, {1: 0.1}).verdict == "not measured"
    assert compare({}, {}).verdict == "not measured"


def test_lower_is_better_flips_the_comparison():
    low, high = {0: 1.0, 1: 2.0}, {0: 1.5, 1: 2.25}
    assert compare(low, high, lower_is_better=True).differences == [0.5, 0.25]
    assert compare(low, high, lower_is_better=True).verdict == "holds"
    assert compare(low, high).verdict == "does not hold"
    section = BenchmarkSection(
        {"a": {}, "b": {}}, lower_is_better=True, paper={"a": 3.0, "b": 5.5}, claims=["a > b"], seeds=[0]
    )
    report = benchmark_report([record("a", 0, 12.25), record("b", 0, 30.5)], section, "x.yaml")
    assert cells(report, "a > b") == ["a > b", "+2.5000", "+18.25", "1 of 1", "holds"]
    assert "lower is better" in report


def test_a_run_without_a_finite_value_is_named_and_holds_no_claim():
    made = records()
    made[4] = record("FedOpt", 1, None)
    report = benchmark_report(made, SECTION, "text.yaml")
    assert cells(report, "FedOpt")[1] == f"{mean([0.55, 0.66]):.4f} ± {sample_deviation([0.55, 0.66]):.4f} (2 of 3)"
    assert "Without a finite accuracy, and so in no mean: FedOpt, seed 1." in report
    assert cells(report, "FedOpt > FedAvg")[3:] == ["2 of 3", "mixed"]
    assert compare({0: None}, {0: 0.5}).verdict == "not measured"


def test_another_metric_is_read_from_the_same_records():
    section = BenchmarkSection({"FedAvg": {}}, metric="loss", lower_is_better=True)
    report = benchmark_report(records()[:3], section, "text.yaml")
    assert cells(report, "FedAvg")[1] == f"{1 - mean(FEDAVG):.4f} ± {sample_deviation(FEDAVG):.4f} (3)"
    section.metric = "f1"
    with pytest.raises(CommandError, match="benchmark.metric: 'FedAvg' has no 'f1'; its metrics are accuracy, loss"):
        main_metric(records(), section)
    with pytest.raises(CommandError, match=r"several main metrics \(accuracy, f1\); name one"):
        main_metric([*records(), record("FedAvg", 1, 0.5, metric="f1")], SECTION)


def test_only_the_scale_of_the_paper_is_called_comparable():
    small = comparability_note(records())
    assert small.startswith("The numbers are not comparable with the paper's") and "(scale small)" in small
    paper = [record("FedAvg", 0, 0.5, scale="paper")]
    assert comparability_note(paper).startswith("Model, data and sizes are the paper's, but for what --set changed.")
    assert "(scales paper, small)" in comparability_note([*paper, *records()])
    assert "rows. What" in comparability_note([record("FedAvg", 0, 0.5, scale=None)])
    assert "not comparable" not in comparability_note(paper)


def test_without_published_numbers_nothing_is_said_of_a_paper():
    report = benchmark_report(records()[:3], BenchmarkSection({"FedAvg": {}}), "text.yaml")
    assert report.startswith("# text.yaml\n") and "the paper" not in report and "Published" not in report


def test_different_versions_are_told():
    made = records()
    for number, item in enumerate(made):
        item["versions"] = {"torch": "2.6.0" if number else "2.7.0", "transformers": "5.0"}
    report = benchmark_report(made, SECTION, "text.yaml")
    assert "The runs were made with different versions of torch: 2.6.0, 2.7.0." in report
    assert "versions of transformers" not in report


def test_other_rows_are_told_and_unknown_ones_are_none():
    known = {"test_rows": "a", "further_rows": {"shifted": "b"}}
    told = "Under seed 0 the runs were tested on different rows"
    for other, is_told in (
        (known, False),
        ({"test_rows": "a"}, False),
        ({"test_rows": "a", "further_rows": {"shifted": "c"}}, True),
        ({"test_rows": "c", "further_rows": {"shifted": "b"}}, True),
    ):
        made = [record("FedAvg", 0, 0.5, **known), record("FedOpt", 0, 0.5, **other)]
        assert (told in benchmark_report(made, SECTION, "text.yaml")) == is_told


def test_the_panel_has_the_curves_of_federations_and_the_values_of_baselines():
    made = records()
    assert curve_panel(made, SECTION, "text.yaml") is None
    made[0]["history"] = [{"round": 2, "accuracy": 0.3}, {"round": 4, "accuracy": None}, {"round": 6, "loss": 1.0}]
    made[-1]["history"] = [{"round": 1, "accuracy": 0.3}]
    panel = curve_panel(made, SECTION, "text.yaml")
    assert panel is not None and (panel.title, panel.metric) == ("text.yaml", "accuracy")
    assert panel.curves == {"FedAvg": [{2: 0.3}]} and panel.references == {"central": [0.7]}
    assert panel.step_name == "round"


def test_runs_of_split_models_count_optimizer_steps():
    made = [{**item, "step_name": "optimizer step"} for item in records()]
    made[0]["history"] = [{"round": 26, "accuracy": 0.3}]
    panel = curve_panel(made, SECTION, "text.yaml")
    assert panel is not None and panel.step_name == "optimizer step"
    assert "| optimizer steps |" in " ".join(benchmark_report(made, SECTION, "text.yaml").split())
    made[0]["step_name"] = None  # of a federation, or logged before there was a name
    assert "rounds or optimizer steps" in benchmark_report(made, SECTION, "text.yaml")


@pytest.mark.parametrize(
    ("clients", "header"),
    [
        (["baby", "sport"], "| run | baby | sport |"),
        (["0", "1"], "| run | lowest | median | highest |"),
        ([f"site {number}" for number in range(13)], "| run | lowest | median | highest |"),
    ],
    ids=["named", "numbers", "many"],
)
def test_clients_have_a_column_where_it_is_the_same_client_under_every_seed(clients, header):
    section = BenchmarkSection({"FedAvg": {}}, seeds=[0, 1])
    made = []
    for seed in (0, 1):
        own = {name: {"accuracy": 0.1 * seed + 0.01 * number} for number, name in enumerate(clients)}
        made.append(record("FedAvg", seed, 0.5, clients=own))
    lines = benchmark_report(made, section, "grid.yaml").split("own test rows")[1].splitlines()
    lines = [" ".join(line.split()) for line in lines]
    row = lines[lines.index(header) + 2]
    values = [float(cell.split()[0]) for cell in row.split("|")[2:-1]]
    assert values[0] == pytest.approx(0.05, abs=1e-4)
    assert values[-1] == pytest.approx(0.05 + 0.01 * (len(clients) - 1), abs=1e-4)
