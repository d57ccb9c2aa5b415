"""The section `audit` of a recipe: variants, simulated clients, the card and the command."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import yaml
from recipe_model_fixtures import WORDS

from hf_federated.audits import PayloadAudit
from hf_federated.cards.payload_leakage import payload_report
from hf_federated.cli.main import main
from hf_federated.experiments.audit.recipe_audit import _halves, _Variant, audit_recipe
from hf_federated.experiments.recipe.recipe import parse_recipe
from hf_federated.experiments.recipe.schema import RecipeError
from hf_federated.experiments.train_recipe import train_recipe


SMALL = {"num_models": 4, "num_examples": 12, "num_canaries": 2, "num_references": 3}
PUBLIC = {"public": {"share": 0.2, "server_share": 0.1}, "federation": {"distillation": "fedid"}}


@pytest.fixture
def values(model_dir, texts_dir, tmp_path):
    """The values of a recipe with a small audit."""
    return {
        "model": {"name_or_path": str(model_dir)},
        "data": {"path": str(texts_dir), "test_split": "test"},
        "task": {"name": "text-classification", "max_length": 12},
        "partition": {"name": "iid", "num_clients": 3},
        "training": {
            "output_dir": str(tmp_path / "out"),
            "learning_rate": 1e-2,
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
        },
        "federation": {"num_rounds": 1},
        "audit": dict(SMALL),
    }


def recipe_with(values, **audit):
    return parse_recipe({**values, "audit": {**values["audit"], **audit}})


def test_variants_change_the_recipe_and_the_postprocessors(values):
    variants = {"full": None, "frozen": {"federation": {"freeze": "embeddings"}, "clip": 0.5, "noise": 1}}
    recipe = recipe_with(values, variants=variants)
    frozen = recipe.variants["frozen"]
    assert frozen.recipe.federation == {"num_rounds": 1, "freeze": "embeddings"}
    assert (frozen.clip, frozen.noise, recipe.variants["full"].clip) == (0.5, 1, None)
    assert list(recipe_with(values).variants) == ["as configured"]
    names = [type(step).__name__ for step in _Variant(frozen, recipe.audit, "frozen")._postprocessors]
    assert names == ["ClipUpdate", "GaussianNoise"]


@pytest.mark.parametrize(
    ("audit", "message"),
    [
        ({"attacks": ["guess"]}, "audit.attacks has unknown values: guess. Choose from token_set, dager,"),
        ({"num_models": 3}, "audit.num_models is 3; it must be at least 4"),
        ({"num_canaries": -1}, "audit.num_canaries is -1; it must be at least 0"),
        ({"num_models": "many"}, "audit.num_models"),
        ({"variants": {"a": {"clip": -1}}}, "audit.variants.a.clip is -1; it must be a positive number"),
        ({"variants": {"a": {"num_summed": 0}}}, "audit.variants.a.num_summed is 0; it must be a positive number"),
        (
            {"variants": {"a": {"num_summed": 2.5}}},
            "audit.variants.a.num_summed is 2.5; it must be a number of clients",
        ),
        ({"variants": {"a": 3}}, "audit.variants.a is 3; it must be a mapping of changes"),
        ({"variants": {"a": {"federation": {"freez": 1}}}}, "audit.variants.a: federation.freez"),
    ],
)
def test_invalid_section_is_refused_with_the_name_of_the_field(values, audit, message):
    with pytest.raises(RecipeError) as error:
        recipe_with(values, **audit)
    assert message in str(error.value)


def test_unsupported_settings_are_refused_by_name(values):
    values["task"] = {"name": "sequence-tagging"}
    with pytest.raises(RecipeError, match="as configured: the audit does not support the task sequence-tagging"):
        audit_recipe(parse_recipe(values))
    values["split"] = {}
    del values["federation"]
    values["task"] = {"name": "language-modeling"}
    with pytest.raises(RecipeError, match="split and audit are both set"):
        parse_recipe(values)


def test_each_example_belongs_to_half_of_the_models():
    halves = _halves(6, 10, np.random.default_rng(0))
    assert halves.shape == (6, 10) and (halves.sum(0) == 3).all()
    assert _halves(6, 0, np.random.default_rng(0)).shape == (6, 0)


def test_simulated_client_trains_on_its_half_and_the_canaries(values):
    recipe = recipe_with(values)
    variant = _Variant(recipe.variants["as configured"], recipe.audit, "as configured")
    evidence = variant.evidence({"lira", "canary"})
    assert evidence.shadows.losses.shape == evidence.shadows.members.shape == (4, 12)
    assert evidence.shadows.canaries.shape == (4, 2) and evidence.shadows.references.shape == (4, 3)
    num_examples = int(evidence.shadows.members[0].sum() + evidence.shadows.canary_members[0].sum())
    assert len(evidence.payload.token_ids) == num_examples


def audited(values, name="as configured", **audit):
    recipe = recipe_with(values, **audit)
    return _Variant(recipe.variants[name], recipe.audit, name)


@pytest.fixture
def secure_values(values, tmp_path):
    """A recipe with secure aggregation, whose clients have 60 different texts."""
    words = [word for word in WORDS if not word.startswith("##")]
    texts = [f"{words[number // 9]} {words[number % 9]},{number % 3}" for number in range(72)]
    for name, rows in (("train", texts[:60]), ("test", texts[60:])):
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *rows]))
    values["data"] = {"path": str(tmp_path / "train.csv"), "test_path": str(tmp_path / "test.csv")}
    values["federation"] |= {"secure_aggregation": "secagg", "secure_aggregation_kwargs": {"max_weight": 20}}
    return values


def test_audit_of_secure_aggregation_attacks_the_sum_of_a_round(secure_values):
    variant = audited(secure_values)
    assert variant.num_summed == 3
    payload = variant.evidence({"token_set"}).payload
    assert len(payload.token_ids) == 12 and len(payload.other_token_ids) == 24
    own, others, attackers = (
        {tuple(ids) for ids in part}
        for part in (payload.token_ids, payload.other_token_ids, variant.public["input_ids"])
    )
    assert len(own | others | attackers) == len(own) + len(others) + len(attackers)


def test_other_clients_of_a_sum_have_new_examples_in_each_federation(secure_values):
    variant = audited(secure_values)
    first, second = (variant.draw_others(6, draw) for draw in (0, 1))
    assert list(first) == ["other 1", "other 2"]
    assert first["other 1"]["input_ids"] != second["other 1"]["input_ids"]
    assert first["other 1"]["input_ids"] == variant.draw_others(6, 0)["other 1"]["input_ids"]


@pytest.mark.parametrize(
    ("changes", "num_summed", "message"),
    [
        ({}, 2, "num_summed=2, but with secure_aggregation='secagg' the server receives sums of at least 3 clients"),
        ({}, 8, "a sum of 8 clients needs 84 examples of other clients, but 24 are left"),
        (
            {"federation": {"secure_aggregation": None, "secure_aggregation_kwargs": {}, "distillation": "fedid"}},
            2,
            "num_summed=2 is set, but with distillation='fedid' the server receives the predictions of each client",
        ),
    ],
)
def test_sum_that_no_server_receives_is_refused_by_name(secure_values, changes, num_summed, message):
    if changes:
        changes = {**changes, "public": PUBLIC["public"]}
    variants = {"a": {**changes, "num_summed": num_summed}}
    with pytest.raises(RecipeError) as error:
        audited(secure_values, "a", variants=variants).evidence({"token_set"})
    assert message in str(error.value)


def test_report_of_a_sum_has_the_scores_of_all_clients(secure_values):
    audit = audit_recipe(recipe_with(secure_values, attacks=["token_set"]), lambda line: None)
    assert audit.settings["num_summed"] == {"as configured": 3}
    metrics = audit.find("as configured", "token_set").metrics
    assert metrics["recall"] == metrics["union_recall"] == metrics["union_precision"] == 1.0
    report = payload_report(audit)
    assert "| All clients, tokens: precision |" in report
    assert "- as configured: the payload is the weighted mean of the updates of 3 clients." in report


@pytest.mark.slow
def test_audit_is_reproducible(values):
    recipe = recipe_with(values, variants={"noise": {"noise": 0.01}})
    first, second = (
        _Variant(recipe.variants["noise"], recipe.audit, "noise").evidence({"lira"}).shadows for _ in range(2)
    )
    assert torch.equal(first.losses, second.losses) and torch.equal(first.members, second.members)


@pytest.mark.slow
def test_predictions_are_audited_by_the_model_that_the_server_distils(values):
    audit = audit_recipe(recipe_with(values, variants={"FedID": PUBLIC}), lambda line: None)
    assert audit.find("FedID", "dager_step").note == "The payload has no parameters."
    token_set = audit.find("FedID", "token_set")
    assert token_set.note and token_set.metrics["recall"] == token_set.metrics["chance"]
    assert 0 <= audit.find("FedID", "lira").metrics["auc"] <= 1


@pytest.mark.slow
def test_causal_language_model_is_audited(values, llama_dir):
    values["model"] = {"name_or_path": str(llama_dir)}
    values["task"] = {"name": "language-modeling", "max_length": 24}
    audit = audit_recipe(recipe_with(values), lambda line: None)
    results = {result.attack: result.metrics for result in audit.results["as configured"]}
    assert list(results) == ["token_set", "dager_step", "dager_run", "loss_threshold", "lira", "canary"]
    assert results["token_set"]["recall"] > 0.9 and 0 <= results["canary"]["exposure"] <= 2


def test_training_adds_the_audit_to_the_card(values, tmp_path):
    printed = []
    train_recipe(recipe_with(values, attacks=["token_set"]), echo=printed.append)
    card = (tmp_path / "out" / "README.md").read_text()
    audit = PayloadAudit.load(tmp_path / "out" / "audit.json")
    recall = 100 * audit.find("as configured", "token_set").metrics["recall"]
    assert "## What a client's payload reveals" in card and f"| {recall:.1f} |" in card
    assert "Not tried: gradient inversion by optimization (LAMP" in card
    assert card.index("## What a client's payload reveals") < card.index("## Versions")
    assert any(line.startswith("Audited as configured: token_set") for line in printed)


def test_command_writes_results_and_report(values, tmp_path, capsys):
    del values["audit"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    settings = [word for name, value in SMALL.items() for word in ("--set", f"audit.{name}={value}")]
    command = ["audit", str(tmp_path / "recipe.yaml"), "--output", str(tmp_path / "audit")]
    assert main([*command, *settings, "--set", "audit.attacks=[token_set]"]) == 0
    assert "| as configured | 100.0 | 100.0 |" in capsys.readouterr().out
    report = (tmp_path / "audit" / "report.md").read_text()
    assert str(tmp_path) not in report and "| `num_models` | 4 |" in report
    saved = json.loads((tmp_path / "audit" / "audit.json").read_text())
    assert saved["settings"]["attacks"] == ["token_set"]
    (tmp_path / "audit" / "audit.json").write_text("[]")
    with pytest.raises(ValueError, match="does not contain the results of an audit of payloads"):
        PayloadAudit.load(tmp_path / "audit" / "audit.json")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model", "--output", "out"], "model is not a recipe (.yaml), so DATA is missing"),
        (["recipe.yaml", "rows", "--output", "out"], "a recipe names its data. Remove rows"),
        (["model", "rows", "--output", "out", "--set", "a=1"], "--set changes fields of a recipe"),
        (["recipe.yaml", "--output", "out"], "cannot read the recipe 'recipe.yaml'"),
    ],
)
def test_command_refuses_arguments_that_do_not_fit(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(["audit", *words]) == 2
    assert message in capsys.readouterr().err
