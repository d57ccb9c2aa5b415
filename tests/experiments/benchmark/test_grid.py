"""Planning a benchmark grid: order of runs, merged changes, seeds, digests and validation."""

from __future__ import annotations

import copy
import datetime
import hashlib
import json
from pathlib import Path

import pytest

from hf_federated.experiments.benchmark.grid import BenchmarkSection, plan_runs, read_section
from hf_federated.experiments.benchmark.identity import TEST_FIELDS
from hf_federated.experiments.errors import CommandError
from hf_federated.experiments.recipe.yaml_file import read_values


RECIPE = {
    "model": {"name_or_path": "m", "lora": None},
    "training": {"learning_rate": 0.1, "seed": 9, "output_dir": "here"},
    "federation": {"aggregation": "fedavg", "aggregation_kwargs": {"server_lr": 1.0}, "num_rounds": 3},
    "partition": {"name": "label-dirichlet", "alpha": 0.5, "seed": 5},
    "compare": ["local"],
}


def plan_grid(runs, values=RECIPE, seeds=(0,), **kwargs):
    return plan_runs(values, BenchmarkSection(runs, seeds=list(seeds)), **kwargs)


def plan_single(changes, values=RECIPE, **kwargs):
    (run,) = plan_grid({"run": changes}, values, **kwargs)
    return run


def test_all_runs_of_a_seed_come_before_the_next_seed():
    runs = plan_grid({"b": {}, "a": {"method": "local"}}, seeds=[4, 1])
    assert [run.key for run in runs] == [("b", 4), ("a", 4), ("b", 1), ("a", 1)]
    assert [run.method for run in runs] == ["federated", "local", "federated", "local"]
    assert [run.values["training"]["seed"] for run in runs] == [4, 4, 1, 1]
    assert all("method" not in run.values for run in runs)


def test_changes_merge_mappings_and_replace_other_values():
    changes = {
        "federation": {"aggregation": "fedopt", "aggregation_kwargs": {"server_momentum": 0.9}},
        "compare": ["centralized"],
        "model": {"lora": {"r": 4}},
        "plots": True,
        "new.section.field": 1,
    }
    values = plan_single(changes).values
    assert values["federation"] == {
        "aggregation": "fedopt",
        "aggregation_kwargs": {"server_lr": 1.0, "server_momentum": 0.9},
        "num_rounds": 3,
    }
    assert values["compare"] == ["centralized"]
    assert values["model"] == {"name_or_path": "m", "lora": {"r": 4}}
    assert values["plots"] is True and values["new"] == {"section": {"field": 1}}
    assert plan_single({"federation": {"aggregation_kwargs": None}}).values["federation"]["aggregation_kwargs"] is None


def test_dotted_and_nested_changes_plan_the_same_run():
    dotted = plan_single({"federation.aggregation": "fedopt", "federation.num_rounds": 5})
    nested = plan_single({"federation": {"aggregation": "fedopt", "num_rounds": 5}})
    assert dotted.values == nested.values and dotted.digest == nested.digest


def test_dots_in_nested_keys_are_kept():
    values = plan_single({"model.lora": {"rank_pattern": {"layer.0": 2}}}).values
    assert values["model"]["lora"] == {"rank_pattern": {"layer.0": 2}}


def test_planned_runs_are_independent_copies_of_the_recipe():
    before = copy.deepcopy(RECIPE)
    runs = {"a": {"model.lora": {"r": 1}}, "b": {}}
    first, *remaining = plan_grid(runs, seeds=[0, 1])
    untouched = copy.deepcopy([run.values for run in remaining])
    first.values["model"]["lora"]["r"] = 7
    first.values["federation"]["aggregation_kwargs"].clear()
    first.values["compare"].append("x")
    assert [run.values for run in remaining] == untouched
    assert before == RECIPE and runs["a"] == {"model.lora": {"r": 1}}


def test_partition_seed_is_the_seed_of_the_run_unless_changed():
    assert plan_single({}, seeds=[3]).values["partition"]["seed"] == 3
    assert plan_single({"partition.seed": 8}, seeds=[3]).values["partition"]["seed"] == 8
    assert plan_single({}, seeds=[3], partition_has_seed=False).values["partition"]["seed"] == 5
    assert "partition" not in plan_single({}, {"model": {}}, seeds=[3]).values
    natural = {"partition": {"name": "natural"}}
    runs = plan_grid({"a": {}, "b": natural}, seeds=[3], partition_has_seed=lambda values: values["name"] != "natural")
    assert runs[0].values["partition"]["seed"] == 3 and "seed" not in runs[1].values["partition"]


def test_data_seed_is_the_seed_of_the_run_unless_changed():
    assert plan_single({}, {"data": {"path": "p"}}, seeds=[3]).values["data"]["seed"] == 3
    assert plan_single({"data.seed": 8}, {"data": {"path": "p"}}, seeds=[3]).values["data"]["seed"] == 8


def test_order_of_dotted_changes_does_not_matter():
    base = {"partition": {"name": "iid", "num_clients": 4}}
    expected = {"name": "label-dirichlet", "num_clients": 8, "alpha": 0.01, "seed": 0}
    changes = {"partition.alpha": 0.01, "partition.name": "label-dirichlet", "partition.num_clients": 8}
    assert plan_single(changes, base).values["partition"] == expected
    assert plan_single(dict(reversed(changes.items())), base).values["partition"] == expected


def digest_of_version_0_1(run, **changes) -> str:
    """The digest of version 0.1, over the method and all values but `benchmark` and `training.output_dir`."""
    values = {name: value for name, value in {**run.values, **changes}.items() if name != "benchmark"}
    values["training"] = {name: value for name, value in values["training"].items() if name != "output_dir"}
    text = json.dumps({"method": run.method, "recipe": values}, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    "data", [{"test_split": "test"}, {"test_clients": 15}, {"test_clients": 0.1}, {"test_split": "test", "seed": 3}]
)
def test_records_of_recipes_that_name_their_test_examples_are_recognized(data):
    run = plan_single({}, {**RECIPE, "data": {"path": "d", **data}})
    assert run.full_digest == digest_of_version_0_1(run)


def test_records_of_the_former_default_belong_to_recipes_that_name_it():
    """Before, a recipe without test examples held out 20 % of the clients."""
    unnamed = plan_single({}, {**RECIPE, "data": {"path": "d"}})
    former = digest_of_version_0_1(unnamed)
    assert plan_single({}, {**RECIPE, "data": {"path": "d", "test_clients": 0.2}}).full_digest == former
    assert unnamed.full_digest != former
    assert plan_single({}, {**RECIPE, "data": {"path": "d", "test_clients": None}}).full_digest != former


def test_every_shipped_benchmark_names_its_test_examples():
    """The digests of the recorded results therefore do not depend on the default."""
    paths = [path for path in Path(__file__).parents[3].glob("recipes/*/*.yaml") if "\nmodel:" in path.read_text()]
    assert len(paths) > 20
    for path in paths:
        assert any(read_values(path)["data"].get(name) is not None for name in TEST_FIELDS), path.name


def test_digest_depends_only_on_values_that_determine_the_result():
    base = plan_single({})
    assert len(base.digest) == 64 and int(base.digest, 16) >= 0
    reordered = dict(reversed([*RECIPE.items(), ("benchmark", {"title": "new"})]))
    reordered["training"] = {"seed": 1, "output_dir": "there", "learning_rate": 0.1}
    assert plan_single({}, reordered).digest == base.digest
    variants = [
        plan_single({"method": "centralized"}),
        plan_single({"training.learning_rate": 0.2}),
        plan_single({}, seeds=[1]),
        plan_single({"plots": True}),
    ]
    assert len({run.digest for run in [base, *variants]}) == 5
    assert plan_single({"data.version": datetime.date(2024, 1, 2)}).digest != base.digest


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, r"benchmark.runs is missing"),
        ({"runs": {}}, r"benchmark.runs is empty. Add at least one run"),
        ({"runs": ["a"]}, r"benchmark.runs is \['a'\] \(list\); it must be mapping"),
        ({"runs": {"a/b": {}}}, r"benchmark.runs: 'a/b' is not a valid folder name"),
        ({"runs": {"a\\b": {}}}, r"is not a valid folder name"),
        ({"runs": {"a\nb": {}}}, r"is not a valid folder name"),
        ({"runs": {"..": {}}}, r"benchmark.runs: '\.\.' is not a valid name"),
        ({"runs": {"": {}}}, r"benchmark.runs: '' is not a valid name"),
        ({"runs": {" a": {}}}, r"benchmark.runs: ' a' is not a valid name"),
        ({"runs": {1: {}}}, r"benchmark.runs: 1 is not a valid name"),
        ({"runs": {"FedAvg": {}, "fedavg": {}}}, r"'FedAvg' and 'fedavg' differ only in case"),
        ({"runs": {"a": "fedopt"}}, r"benchmark.runs: 'a' is 'fedopt'; it must be a mapping"),
        (
            {"runs": {"a": {"method": "alone"}}},
            r"'a' has the method 'alone'; it must be one of federated, centralized",
        ),
        ({"runs": {"a": {"training..seed": 1}}}, r"'a' changes 'training..seed'; a key must be"),
        ({"runs": {"a": {1: 1}}}, r"'a' changes 1; a key must be"),
        ({"runs": {"a": {"x.y": 1, "x": {"y": 2}}}}, r"'a' changes x.y twice"),
        ({"runs": {"a": {"benchmark.title": "b"}}}, r"'a' changes the section benchmark"),
        ({"runs": {"a": {"training.seed": 1}}}, r"'a' sets training.seed, which the benchmark sets"),
        ({"runs": {"a": {"training": {"output_dir": "d"}}}}, r"'a' sets training.output_dir"),
        ({"runs": {"a": {}}, "seeds": []}, r"benchmark.seeds is empty. List at least one integer"),
        ({"runs": {"a": {}}, "seeds": 3}, r"benchmark.seeds is 3 \(int\); it must be list of int"),
        ({"runs": {"a": {}}, "seeds": [0, True]}, r"benchmark.seeds is \[0, True\] \(list\); it must be list of int"),
        ({"runs": {"a": {}}, "seeds": [0.5]}, r"benchmark.seeds is \[0.5\] \(list\); it must be list of int"),
        ({"runs": {"a": {}}, "seeds": [-1]}, r"benchmark.seeds: -1 is invalid; a seed must"),
        ({"runs": {"a": {}}, "seeds": [1, 0, 1]}, r"benchmark.seeds: 1 is listed twice"),
        (
            {"runs": {"a": {}}, "title": "two\nlines"},
            r"benchmark.title: 'two\\nlines' is invalid; it must be one line",
        ),
        ({"runs": {"a": {}}, "metric": 3}, r"benchmark.metric is 3 \(int\); it must be str or null"),
        (
            {"runs": {"a": {}}, "lower_is_better": "no"},
            r"benchmark.lower_is_better is 'no' \(str\); it must be true \| false or null",
        ),
        ({"runs": {"a": {}}, "paper": [1]}, r"benchmark.paper is \[1\] \(list\); it must be mapping"),
        ({"runs": {"a": {}}, "paper": {"b": 1}}, r"benchmark.paper: 'b' is not a run. The runs are a\."),
        ({"runs": {"a": {}}, "paper": {"a": "0.5"}}, r"benchmark.paper: 'a' is '0.5'; it must be a finite"),
        ({"runs": {"a": {}}, "paper": {"a": float("nan")}}, r"benchmark.paper: 'a' is nan; it must be a finite"),
        ({"runs": {"a": {}}, "claims": "a > b"}, r"benchmark.claims is 'a > b' \(str\); it must be list of str"),
        (
            {"runs": {"a": {}}, "claims": ["a > c"]},
            r"benchmark.claims: 'a > c' is invalid: 'c' on the right is not a run",
        ),
        (
            {"runs": {"a": {}}, "claims": ["a beats b"]},
            r"benchmark.claims: 'a beats b' is invalid: it must be of the form",
        ),
        (
            {"runs": {"a": {}}, "claims": ["a > a"]},
            r"benchmark.claims: 'a > a' is invalid: it compares 'a' with itself",
        ),
        ({"runs": {"a": {}}, "margin": 0}, r"benchmark.margin is 0; it must be a positive number"),
        ({"runs": {"a": {}, "b": {}}, "claims": ["a = b"]}, r"a claim of equality needs a margin"),
        (
            {"runs": {"a": {}, "b": {}}, "claims": ["a > b"], "former_claims": ["a > b"]},
            r"benchmark.former_claims: 'a > b' is listed twice",
        ),
        ({"runs": {"a": {}}, "claims": [3]}, r"benchmark.claims is \[3\] \(list\); it must be list of str"),
        (
            {"runs": {"a": {}}, "claim": []},
            r"benchmark.claim is not a field of the section benchmark; did you mean claims\? Allowed: runs, title",
        ),
    ],
)
def test_invalid_section_is_rejected_with_a_one_line_message(section, message):
    with pytest.raises(CommandError, match=message) as error:
        read_section({"benchmark": section})
    assert str(error.value).startswith("benchmark.") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"federation": {"federation_seed": 3}},
            "federation.federation_seed is set, so it would be the same under all seeds",
        ),
        ({"training": {"data_seed": 0}}, "training.data_seed is set, so it would be the same under all seeds"),
        ({"training": 3}, "training is 3; it must be a mapping"),
        ({"card": {1: "a", "b": "c"}}, "keys of the recipe must be strings"),
    ],
)
def test_recipe_with_fixed_seeds_or_invalid_sections_is_rejected(values, message):
    with pytest.raises(CommandError, match=message):
        plan_grid({"a": {}}, values)


def test_recipe_without_benchmark_section_is_rejected():
    with pytest.raises(CommandError, match="benchmark: the recipe has no such section"):
        read_section(RECIPE)


def test_section_parses_claims_and_sets_defaults():
    section = read_section(
        {"benchmark": {"runs": {"FedOpt": None, "local only": {}}, "claims": ["FedOpt>local only"]}}
    )
    assert [(claim.first, claim.second) for claim in section.parsed_claims()] == [("FedOpt", "local only")]
    assert section.seeds == [0, 1, 2] and section.title is None and not section.lower_is_better
