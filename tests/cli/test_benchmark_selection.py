"""`benchmark.sweep` and `benchmark.select`: the settings of a run are chosen on validation examples.

The score of a run is a function of its learning rate. Its best rate differs between validation and test examples.
"""

from __future__ import annotations

import shutil

import pytest
import yaml
from datasets import load_dataset

from hf_federated.cli.main import main
from hf_federated.experiments.benchmark.benchmark import BenchmarkOptions, run_benchmark
from hf_federated.experiments.benchmark.run_log import read_records
from hf_federated.experiments.errors import CommandError


RATES = [0.1, 0.2, 0.4, 0.8]
BEST = {"validation": {"fedavg": 0.2, "fedopt": 0.4}, "test": {"fedavg": 0.1, "fedopt": 0.1}}
RECIPE = {
    "data": {"path": "texts", "test_split": "test", "validation_examples": 0.1},
    "training": {"num_train_epochs": 1},
    "federation": {"num_rounds": 5},
    "benchmark": {
        "seeds": [5, 6],
        "runs": {
            "FedAvg": {"federation.aggregation": "fedavg"},
            "FedOpt": {"federation": {"aggregation": "fedopt"}},
            "local": {"method": "local", "sweep": {}},
        },
        "sweep": {"training.learning_rate": RATES},
        "select": {"metric": "accuracy", "seeds": [0, 1]},
        "claims": ["FedOpt > FedAvg"],
    },
}


def execute(run, folder):
    rate, examples = run.values["training"].get("learning_rate"), run.values["data"].get("evaluate_on", "test")
    best = 0.1 if rate is None else BEST[examples][run.values["federation"]["aggregation"]]
    score = 1 - abs((rate or best) - best) + 0.01 * run.seed
    return {"metric": "accuracy", "metrics": {"accuracy": score, "error": 1 - score, "loss": -score}}


class Benchmark:
    """Executes the benchmark of a recipe with changes of its sections, and collects runs and lines."""

    def __init__(self, folder):
        self.folder = folder
        self.executed: list[str] = []
        self.lines: list[str] = []

    def __call__(self, changes=None, execute=execute, **options) -> int:
        recipe = {**RECIPE, "benchmark": {**RECIPE["benchmark"], **(changes or {}).get("benchmark", {})}}
        recipe["data"] = (changes or {}).get("data", RECIPE["data"])
        self.executed, self.lines = [], []

        def recorded(run, folder):
            self.executed.append(f"{run} on {run.values['data'].get('evaluate_on', 'test')}")
            return execute(run, folder)

        given = BenchmarkOptions(recipes=["rates.yaml"], output_dir=str(self.folder), **options)
        return run_benchmark(given, lambda *_: recipe, lambda values: None, recorded, echo=self.lines.append)

    @property
    def report(self) -> str:
        return (self.folder / "rates" / "report.md").read_text(encoding="utf-8")


@pytest.fixture
def benchmark(tmp_path) -> Benchmark:
    return Benchmark(tmp_path)


TRIALS = [
    f"{run}, learning_rate={rate}, seed {seed} on validation"
    for seed in (0, 1)
    for run in ("FedAvg", "FedOpt")
    for rate in RATES
]
FINAL = [f"{run}, seed {seed} on test" for seed in (5, 6) for run in ("FedAvg", "FedOpt", "local")]


def test_each_run_has_the_setting_that_is_best_on_validation_examples(benchmark):
    assert benchmark() == 0
    assert benchmark.executed == TRIALS + FINAL
    records = read_records(benchmark.folder / "rates")
    # With the chosen rates, FedAvg is 0.1 from its best rate on test examples, and FedOpt is 0.3.
    assert [record["value"] for record in records] == pytest.approx([0.95, 0.75, 1.05, 0.96, 0.76, 1.06])
    assert len(read_records(benchmark.folder / "rates" / "trials")) == len(TRIALS)
    lines = benchmark.report.splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.endswith("| yes    |")] == [
        "FedAvg, learning_rate=0.2",
        "FedOpt, learning_rate=0.4",
    ]
    assert "chosen from 4 trials by accuracy on validation examples, under 2 seeds (0, 1)" in benchmark.report
    assert benchmark() == 0 and not benchmark.executed


def test_seeds_and_only_change_no_finished_trial(benchmark):
    benchmark(only=["FedAvg"], seeds=[5])
    assert benchmark.executed == [*(each for each in TRIALS if each.startswith("FedAvg")), "FedAvg, seed 5 on test"]
    benchmark(seeds=[5])
    fedopt = [each for each in TRIALS if each.startswith("FedOpt")]
    assert benchmark.executed == [*fedopt, "FedOpt, seed 5 on test", "local, seed 5 on test"]


@pytest.mark.parametrize(
    "section",
    [
        {"select": {"metric": "loss"}},
        {"metric": "loss", "select": {}},
        {"metric": "error", "lower_is_better": True, "select": {}},
        {"metric": "accuracy", "lower_is_better": False, "select": {"metric": "loss"}},
    ],
)
def test_lower_metric_is_chosen_if_lower_is_better(benchmark, section):
    benchmark({"benchmark": section})
    assert "FedAvg, learning_rate=0.2 " in benchmark.report
    assert [line.count("yes") for line in benchmark.report.splitlines() if "learning_rate=" in line] == [
        *(0, 1, 0, 0),
        *(0, 0, 1, 0),
    ]


@pytest.mark.parametrize(
    ("rates", "edge"),
    [
        (RATES, None),
        ([0.2, 0.4, 0.8], "FedAvg (learning_rate)"),
        ([0.4, 0.1, 0.2], "FedOpt (learning_rate)"),
        ([0.2, 0.4], "FedAvg (learning_rate), FedOpt (learning_rate)"),
        ([0.4], None),
    ],
)
def test_report_names_chosen_values_at_the_edge_of_the_trials(benchmark, rates, edge):
    benchmark({"benchmark": {"sweep": {"training.learning_rate": rates}}})
    sentences = [line for line in benchmark.report.splitlines() if line.startswith("The chosen value is the smallest")]
    assert [line.partition(" for ")[2].partition(". ")[0] for line in sentences] == ([] if edge is None else [edge])


def test_values_without_order_have_no_edge(benchmark):
    benchmark({"benchmark": {"sweep": {"training.optim": ["adamw_torch", "sgd"], "training.bf16": [True, False]}}})
    assert "### Selection" in benchmark.report and "The chosen value is the smallest" not in benchmark.report


def test_negative_scores_keep_their_sign(benchmark):
    benchmark({"benchmark": {"select": {"metric": "loss", "seeds": [0]}}})
    assert "| FedAvg, learning_rate=0.2 |         -1.0000 | yes    |" in benchmark.report


def test_trial_that_diverges_is_worse_than_any_other_trial(benchmark):
    def diverging(run, folder):
        if run.values["training"].get("learning_rate") == 0.2:
            raise FloatingPointError("the loss is nan")
        return execute(run, folder)

    assert benchmark(execute=diverging) == 0
    assert " diverged |" in benchmark.report and "FedAvg, learning_rate=0.1 " in benchmark.report
    chosen = [line for line in benchmark.report.splitlines() if line.endswith("| yes    |")]
    assert chosen[0].startswith("| FedAvg, learning_rate=0.1 ")
    assert benchmark(execute=diverging) == 0 and not benchmark.executed


def test_runs_wait_for_trials_that_failed(benchmark):
    def failing(run, folder):
        if run.values["training"].get("learning_rate") == 0.2 and run.name.startswith("FedAvg"):
            raise ValueError("out of memory")
        return execute(run, folder)

    assert benchmark(execute=failing) == 1
    assert not any(each.startswith("FedAvg") and each.endswith("test") for each in benchmark.executed)
    assert any(each.startswith("FedOpt") and each.endswith("test") for each in benchmark.executed)
    assert benchmark() == 0
    assert benchmark.executed == [*(f"FedAvg, learning_rate=0.2, seed {seed} on validation" for seed in (0, 1))] + [
        f"FedAvg, seed {seed} on test" for seed in (5, 6)
    ]


def test_report_and_dry_run_execute_nothing(benchmark):
    assert benchmark(report=True) == 0 and benchmark(dry_run=True) == 0 and not benchmark.executed
    assert sum("pending" in line for line in benchmark.lines) == len(TRIALS) + 2  # the local runs have no trials
    benchmark()
    written = benchmark.report
    assert benchmark(report=True) == 0 and not benchmark.executed and benchmark.report == written


def test_each_combination_is_a_run_without_a_selection(benchmark):
    claim = "FedAvg, learning_rate=0.1 > FedAvg, learning_rate=0.8"
    runs = {"FedAvg": {"federation.aggregation": "fedavg"}}
    benchmark({"benchmark": {"select": None, "runs": runs, "claims": [claim]}})
    assert benchmark.executed == [
        f"FedAvg, learning_rate={rate}, seed {seed} on test" for seed in (5, 6) for rate in RATES
    ]
    assert claim in benchmark.report


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data": {"path": "texts", "test_split": "test"}},
            "needs validation examples, but the run 'FedAvg' has none",
        ),
        ({"data": {"path": "texts", "validation_examples": 0.1}}, "needs data.test_split or data.test_path"),
        (
            {"data": {**RECIPE["data"], "evaluate_on": "test"}},
            "evaluate_on is set in the run 'FedAvg' together with benchmark.select",
        ),
        ({"benchmark": {"sweep": {}}}, "select is set without a sweep"),
        ({"benchmark": {"sweep": {"partition.alpha": [1, 5]}}}, "varies partition.alpha, which changes the examples"),
        ({"benchmark": {"sweep": {"training.learning_rate": 0.1}}}, "is 0.1; it must be a list of values"),
        ({"benchmark": {"sweep": {"training.learning_rate": [0.1, 0.1]}}}, "has the value 0.1 twice"),
        ({"benchmark": {"sweep": {"training.optim": ["a/b"]}}}, "has the value 'a/b'; it must be"),
        ({"benchmark": {"sweep": {"training.learning_rate": [None]}}}, "has the value None; it must be"),
        ({"benchmark": {"sweep": {"federation.aggregation": ["fedprox"]}}}, "federation.aggregation is also among"),
        ({"benchmark": {"select": {"seeds": []}}}, "benchmark.select.seeds is empty"),
        ({"benchmark": {"select": {"metrics": "loss"}}}, "metrics"),
        ({"benchmark": {"runs": {"a": 3}, "claims": []}}, "'a' is 3; it must be a mapping"),
        ({"benchmark": {"runs": {"a": {"data.validation_examples": None}}, "claims": []}}, "the run 'a' has none"),
        ({"benchmark": {"runs": {"a": {"data.test_split": None}}, "claims": []}}, "the run 'a' has neither"),
        (
            {"benchmark": {"runs": {"a": {"training.load_best_model_at_end": True}}, "claims": []}},
            "choose a checkpoint by its score on the test examples",
        ),
        (
            {"benchmark": {"sweep": {"training.learning_rate": [0.1, "0.1"]}}},
            "make two runs named 'FedAvg, learning_rate=0.1'",
        ),
        (
            {"benchmark": {"runs": {"a": {}, "b": {"sweep": {"training.learning_rate": [1]}}}, "claims": []}},
            "different numbers of trials: a 4, b 1",
        ),
    ],
)
def test_mistakes_are_rejected(benchmark, changes, message):
    with pytest.raises(CommandError) as error:
        benchmark(changes)
    assert message in str(error.value) and not benchmark.executed


def test_selection_does_not_read_test_examples(recipe_path, texts_dir, tmp_path, capsys):
    """The trials and the choice are the same if the test split has other labels."""
    poisoned = tmp_path / "poisoned"
    shutil.copytree(texts_dir, poisoned)
    test = load_dataset("parquet", data_files=str(texts_dir / "test.parquet"), split="train")
    test.map(lambda example: {"label": 2}).to_parquet(poisoned / "test.parquet")
    recipe = yaml.safe_load(recipe_path.read_text(encoding="utf-8"))
    recipe["partition"] = {"name": "iid", "num_clients": 3}
    recipe["benchmark"] = {
        "seeds": [3],
        "runs": {"FedAvg": {}},
        "sweep": {"training.learning_rate": [1e-5, 1e-2]},
        "select": {"metric": "accuracy"},
    }
    trials, tables, results = [], [], []
    for path in (texts_dir, poisoned):
        recipe["data"] = {"path": str(path), "test_split": "test", "validation_examples": 0.2}
        file = tmp_path / "recipes" / path.name / "rates.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        assert main(["benchmark", str(file), "--output-dir", str(file.parent / "out")]) == 0, capsys.readouterr().err
        folder = file.parent / "out" / "rates"
        trials.append([(record["run"], record["metrics"]["loss"]) for record in read_records(folder / "trials")])
        tables.append((folder / "report.md").read_text(encoding="utf-8").split("### Selection")[1])
        results.append(read_records(folder)[0]["metrics"])
    assert len(trials[0]) == 2 and trials[0] == trials[1] and tables[0] == tables[1]
    assert results[0] != results[1]
