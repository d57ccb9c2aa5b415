"""A grid is planned seed by seed, each run from a copy of the recipe with its own changes."""

from __future__ import annotations

import copy
import datetime

import pytest

from hf_federated.experiments.errors import CommandError
from hf_federated.experiments.grid import BenchmarkSection, plan_runs, read_section


RECIPE = {
    "model": {"name_or_path": "m", "lora": None},
    "training": {"learning_rate": 0.1, "seed": 9, "output_dir": "here"},
    "federation": {"aggregation": "fedavg", "aggregation_kwargs": {"server_lr": 1.0}, "num_rounds": 3},
    "partition": {"name": "label-dirichlet", "alpha": 0.5, "seed": 5},
    "compare": ["local"],
}


def planned(runs, values=RECIPE, seeds=(0,), **kwargs):
    return plan_runs(values, BenchmarkSection(runs, seeds=list(seeds)), **kwargs)


def only(changes, values=RECIPE, **kwargs):
    (run,) = planned({"run": changes}, values, **kwargs)
    return run


def test_whole_seeds_come_first():
    runs = planned({"b": {}, "a": {"method": "local"}}, seeds=[4, 1])
    assert [run.key for run in runs] == [("b", 4), ("a", 4), ("b", 1), ("a", 1)]
    assert [run.method for run in runs] == ["federated", "local", "federated", "local"]
    assert [run.values["training"]["seed"] for run in runs] == [4, 4, 1, 1]
    assert all("method" not in run.values for run in runs)


def test_mappings_are_merged_and_all_else_is_replaced():
    changes = {
        "federation": {"aggregation": "fedopt", "aggregation_kwargs": {"server_momentum": 0.9}},
        "compare": ["centralized"],
        "model": {"lora": {"r": 4}},
        "plots": True,
        "new.section.field": 1,
    }
    values = only(changes).values
    assert values["federation"] == {
        "aggregation": "fedopt",
        "aggregation_kwargs": {"server_lr": 1.0, "server_momentum": 0.9},
        "num_rounds": 3,
    }
    assert values["compare"] == ["centralized"]
    assert values["model"] == {"name_or_path": "m", "lora": {"r": 4}}
    assert values["plots"] is True and values["new"] == {"section": {"field": 1}}
    assert only({"federation": {"aggregation_kwargs": None}}).values["federation"]["aggregation_kwargs"] is None


def test_dotted_and_nested_changes_are_the_same_run():
    dotted = only({"federation.aggregation": "fedopt", "federation.num_rounds": 5})
    nested = only({"federation": {"aggregation": "fedopt", "num_rounds": 5}})
    assert dotted.values == nested.values and dotted.digest == nested.digest


def test_a_dot_below_the_top_belongs_to_the_key():
    values = only({"model.lora": {"rank_pattern": {"layer.0": 2}}}).values
    assert values["model"]["lora"] == {"rank_pattern": {"layer.0": 2}}


def test_runs_share_nothing_with_each_other_or_the_recipe():
    before = copy.deepcopy(RECIPE)
    runs = {"a": {"model.lora": {"r": 1}}, "b": {}}
    first, *others = planned(runs, seeds=[0, 1])
    untouched = copy.deepcopy([run.values for run in others])
    first.values["model"]["lora"]["r"] = 7
    first.values["federation"]["aggregation_kwargs"].clear()
    first.values["compare"].append("x")
    assert [run.values for run in others] == untouched
    assert before == RECIPE and runs["a"] == {"model.lora": {"r": 1}}


def test_the_partition_has_the_seed_of_its_run():
    assert only({}, seeds=[3]).values["partition"]["seed"] == 3
    assert only({"partition.seed": 8}, seeds=[3]).values["partition"]["seed"] == 8
    assert only({}, seeds=[3], partition_has_seed=False).values["partition"]["seed"] == 5
    assert "partition" not in only({}, {"model": {}}, seeds=[3]).values
    natural = {"partition": {"name": "natural"}}
    runs = planned({"a": {}, "b": natural}, seeds=[3], partition_has_seed=lambda values: values["name"] != "natural")
    assert runs[0].values["partition"]["seed"] == 3 and "seed" not in runs[1].values["partition"]


def test_rows_are_drawn_with_the_seed_of_the_run():
    assert only({}, {"data": {"path": "p"}}, seeds=[3]).values["data"]["seed"] == 3
    assert only({"data.seed": 8}, {"data": {"path": "p"}}, seeds=[3]).values["data"]["seed"] == 8


def test_the_order_of_dotted_changes_does_not_matter():
    base = {"partition": {"name": "iid", "num_clients": 4}}
    expected = {"name": "label-dirichlet", "num_clients": 8, "alpha": 0.01, "seed": 0}
    changes = {"partition.alpha": 0.01, "partition.name": "label-dirichlet", "partition.num_clients": 8}
    assert only(changes, base).values["partition"] == expected
    assert only(dict(reversed(changes.items())), base).values["partition"] == expected


def test_the_digest_is_that_of_what_decides_the_result():
    base = only({})
    assert len(base.digest) == 64 and int(base.digest, 16) >= 0
    reordered = dict(reversed([*RECIPE.items(), ("benchmark", {"title": "new"})]))
    reordered["training"] = {"seed": 1, "output_dir": "there", "learning_rate": 0.1}
    assert only({}, reordered).digest == base.digest
    others = [
        only({"method": "centralized"}),
        only({"training.learning_rate": 0.2}),
        only({}, seeds=[1]),
        only({"plots": True}),
    ]
    assert len({run.digest for run in [base, *others]}) == 5
    assert only({"data.revision": datetime.date(2024, 1, 2)}).digest != base.digest


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, r"benchmark.runs: is missing"),
        ({"runs": {}}, r"benchmark.runs: \{\} is not a mapping of names"),
        ({"runs": ["a"]}, r"benchmark.runs: \['a'\] is not a mapping"),
        ({"runs": {"a/b": {}}}, r"benchmark.runs: 'a/b' cannot name a run, which is a folder too"),
        ({"runs": {"a\\b": {}}}, r"cannot name a run, which is a folder too"),
        ({"runs": {"a\nb": {}}}, r"cannot name a run, which is a folder too"),
        ({"runs": {"..": {}}}, r"benchmark.runs: '\.\.' cannot name a run"),
        ({"runs": {"": {}}}, r"benchmark.runs: '' cannot name a run"),
        ({"runs": {" a": {}}}, r"benchmark.runs: ' a' cannot name a run"),
        ({"runs": {1: {}}}, r"benchmark.runs: 1 cannot name a run"),
        ({"runs": {"FedAvg": {}, "fedavg": {}}}, r"'FedAvg' and 'fedavg' are one folder"),
        ({"runs": {"a": "fedopt"}}, r"benchmark.runs: 'a' is 'fedopt'; it must be a mapping"),
        ({"runs": {"a": {"method": "alone"}}}, r"'a' has the method 'alone'; allowed are federated, centralized"),
        ({"runs": {"a": {"training..seed": 1}}}, r"'a' changes 'training..seed', which is neither"),
        ({"runs": {"a": {1: 1}}}, r"'a' changes 1, which is neither"),
        ({"runs": {"a": {"x.y": 1, "x": {"y": 2}}}}, r"'a' changes x.y twice"),
        ({"runs": {"a": {"benchmark.title": "b"}}}, r"'a' changes the benchmark itself"),
        ({"runs": {"a": {"training.seed": 1}}}, r"'a' sets training.seed, which is the benchmark's"),
        ({"runs": {"a": {"training": {"output_dir": "d"}}}}, r"'a' sets training.output_dir"),
        ({"runs": {"a": {}}, "seeds": []}, r"benchmark.seeds: \[\] is not a list of whole numbers"),
        ({"runs": {"a": {}}, "seeds": 3}, r"benchmark.seeds: 3 is not a list"),
        ({"runs": {"a": {}}, "seeds": [0, True]}, r"benchmark.seeds: True is no seed"),
        ({"runs": {"a": {}}, "seeds": [0.5]}, r"benchmark.seeds: 0.5 is no seed"),
        ({"runs": {"a": {}}, "seeds": [-1]}, r"benchmark.seeds: -1 is no seed"),
        ({"runs": {"a": {}}, "seeds": [1, 0, 1]}, r"benchmark.seeds: 1 stands twice"),
        ({"runs": {"a": {}}, "title": "two\nlines"}, r"benchmark.title: 'two\\nlines' is not one line"),
        ({"runs": {"a": {}}, "metric": 3}, r"benchmark.metric: 3 is not one line"),
        ({"runs": {"a": {}}, "lower_is_better": "no"}, r"benchmark.lower_is_better: 'no' is neither true nor false"),
        ({"runs": {"a": {}}, "paper": [1]}, r"benchmark.paper: \[1\] is not a mapping"),
        ({"runs": {"a": {}}, "paper": {"b": 1}}, r"benchmark.paper: 'b' is not a run. The runs are a\."),
        ({"runs": {"a": {}}, "paper": {"a": "0.5"}}, r"benchmark.paper: the number of 'a' is '0.5'"),
        ({"runs": {"a": {}}, "paper": {"a": float("nan")}}, r"benchmark.paper: the number of 'a' is nan"),
        ({"runs": {"a": {}}, "claims": "a > b"}, r"benchmark.claims: 'a > b' is not a list"),
        ({"runs": {"a": {}}, "claims": ["a > c"]}, r"benchmark.claims: 'c' is not a run"),
        ({"runs": {"a": {}}, "claims": ["a beats b"]}, r"benchmark.claims: 'a beats b' is not of the form"),
        ({"runs": {"a": {}}, "claims": ["a > a"]}, r"benchmark.claims: 'a > a' is not of the form"),
        ({"runs": {"a": {}}, "claims": [3]}, r"benchmark.claims: 3 is not of the form"),
        ({"runs": {"a": {}}, "claim": []}, r"benchmark.claim: is not a field of the section. Allowed: runs, title"),
    ],
)
def test_a_section_that_means_nothing_is_refused_in_one_line(section, message):
    with pytest.raises(CommandError, match=message) as error:
        read_section({"benchmark": section})
    assert str(error.value).startswith("benchmark.") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"federation": {"federation_seed": 3}}, "federation.federation_seed would be the same under all seeds"),
        ({"training": {"data_seed": 0}}, "training.data_seed would be the same under all seeds"),
        ({"training": 3}, "training is 3; it must be a mapping"),
        ({"card": {1: "a", "b": "c"}}, "keys of the recipe, which have to be text"),
    ],
)
def test_a_recipe_that_no_grid_can_be_made_of_is_refused(values, message):
    with pytest.raises(CommandError, match=message):
        planned({"a": {}}, values)


def test_a_recipe_without_the_section_is_refused():
    with pytest.raises(CommandError, match="benchmark: the recipe has no such section"):
        read_section(RECIPE)


def test_a_section_has_the_orderings_of_its_claims():
    section = read_section(
        {"benchmark": {"runs": {"FedOpt": None, "local only": {}}, "claims": ["FedOpt>local only"]}}
    )
    assert section.orderings == [("FedOpt", "local only")]
    assert section.seeds == [0, 1, 2] and section.title is None and not section.lower_is_better
