"""The page of the papers' claims is that of the committed records, and lists each claim of each recipe of a paper."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from hf_federated.experiments.recipe.yaml_file import read_values


ROOT = Path(__file__).parents[2]
# Recipes of questions that no paper asks.
OTHER_QUESTIONS = {"fedopt_server_steps", "language_modeling", "compressed_wire"}
PAPERS = yaml.safe_load((ROOT / "recipes" / "claims.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def claims_page():
    spec = importlib.util.spec_from_file_location("claims_page", ROOT / "recipes" / "claims_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "papers" / "claims.md").read_text(encoding="utf-8")


def test_page_is_that_of_the_records(claims_page, page, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert claims_page.page() == page


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper["paper"])
def test_page_lists_each_claim_of_each_recipe(paper):
    listed = {(recipe, text) for claim in paper["claims"] for recipe, text in claim.get("recipe", ())}
    for path in sorted((ROOT / "recipes" / paper["folder"]).glob("*.yaml")):
        if path.stem in OTHER_QUESTIONS:
            continue
        claims = (read_values(path).get("benchmark") or {}).get("claims") or []
        of_paper = {text for text in claims if "local-only" not in text}  # the papers have no run of each client alone
        assert {(path.stem, text) for text in of_paper} <= listed, path.name


def test_a_contrast_of_two_runs_is_their_comparison(claims_page):
    paper = next(each for each in PAPERS if each["paper"] == "FedID")
    factors = {"FedID": 1, "FedKD": -1}
    found = claims_page.contrast_row(paper, "heads_table3", "formula", factors)
    result = claims_page.compare(paper, "heads_table3", "FedID > FedKD", is_later=False)
    expected = claims_page.row_of(paper, "heads_table3", "FedID > FedKD", result, is_later=False)
    assert found[2:] == expected[2:] and found[0].endswith("formula †")
    reverse = claims_page.contrast_row(paper, "heads_table3", "formula", {"FedID": -1, "FedKD": 1})
    assert reverse[-1] == "does not hold"
    # A loss counts with the opposite sign.
    paper = next(each for each in PAPERS if each["paper"] == "FL-GLM")
    row = claims_page.contrast_row(paper, "sst2_small_model", "formula", {"Centralized": 1, "One client": -1})
    assert row[2].startswith("+") and row[-1] == "holds"


def test_no_decided_row_has_an_interval_that_contains_zero_or_the_margin(page):
    decided = 0
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        verdict = cells[-2] if len(cells) > 8 else ""
        if not re.match(r"(holds|does not hold|equal|not equal)", verdict):
            continue
        decided += 1
        low, high = (float(bound) for bound in cells[5].split(" to "))
        margin = float(match[1]) if (match := re.search(r"within ([\d.e+-]+)", verdict)) else 0.0
        if verdict.startswith("equal"):
            assert -margin < low <= high < margin, line
        elif verdict.startswith("not equal"):
            assert low > margin or high < -margin, line
        else:
            assert low > 0 if verdict.startswith("holds") else high < 0, line
    assert decided > 50


def test_comparison_that_is_no_claim_of_its_recipe_is_an_error(claims_page):
    fednlp = PAPERS[0]
    with pytest.raises(ValueError, match="'A > B' is not a claim of the recipe"):
        claims_page.compare(fednlp, "figure5_partitions", "A > B", is_later=False)
    with pytest.raises(ValueError, match="is a claim of the recipe"):
        claims_page.compare(fednlp, "figure5_partitions", "α = 5 > α = 1", is_later=True)
