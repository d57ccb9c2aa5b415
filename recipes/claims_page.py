"""Write the page of the claims of the five papers, from claims.yaml and the records of the recipes.

    python recipes/claims_page.py

The script reads `runs.jsonl` in `recipes/*/results`, without data and models, and writes `docs/papers/claims.md`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from hf_federated.data.markdown_table import markdown_table
from hf_federated.experiments.benchmark.comparison import has_only_fallbacks, is_lower_better, main_metric
from hf_federated.experiments.benchmark.paired_statistics import CONFIDENCE, PairedDifferences
from hf_federated.experiments.benchmark.recipe_grid import read_grid
from hf_federated.experiments.benchmark.reports.claims_table import interval_text, published_difference
from hf_federated.experiments.benchmark.reports.verdicts import ClaimResult, evaluate_claims, number
from hf_federated.experiments.benchmark.run_log import find_finished, read_records
from hf_federated.experiments.recipe.recipe import partitioner_has_seed
from hf_federated.experiments.recipe.yaml_file import read_values


RECIPES = Path(__file__).parent
PAGE = RECIPES.parent / "docs" / "papers" / "claims.md"
LINK = "https://github.com/hf-federated/hf-federated/tree/main/recipes"
DECIDED, UNDECIDED, MISSING = "decided", "cannot be told", "not measured"
LATER = "†"
FURTHER = ("later", "contrast")  # comparisons that were written after the run
HEADER = ["claim", "comparison", "published", "measured", "95 % interval", "visible from", "seeds", "verdict"]
TEXT_COLUMNS = {0, 1, 7}
HEAD = """# Claims of the five papers

This page is written by `python recipes/claims_page.py` from the records of the recipes. It lists {total} claims:
{counts}.

A comparison names two runs of a recipe. A difference is positive if the first run is better. It is the mean over
seeds, with Student's 95 % interval. *Visible from* is the smallest true difference that these seeds show with a
probability of about 80 %. *Published* is the difference in the paper. All models and data are smaller than in the
papers, and the scores are not comparable. A verdict is about the setting of the recipe only.

| verdict | the 95 % interval |
|---|---|
| holds, does not hold | lies on one side of 0, also after Holm's correction for all claims of the recipe |
| equal, not equal within m | lies inside, or outside, the margin |
| cannot be told | contains 0 or the margin, or its p-value is not below 0.05 after the correction |

Claims of a recipe were written before its run. Comparisons with {later} were written after the run. Their p-values
are corrected for all comparisons of the recipe on this page, and their margins were chosen with the results in view. A
claim counts as decided if one of its comparisons is decided. A comparison of differences, such as `A − B > C − D`, is
a sum over runs for each seed. Its p-value is multiplied by the number of comparisons of the recipe. Questions of the
recipes, which no paper answers, are listed and not counted.
"""


@functools.cache
def results_of(folder: str, recipe: str, later: tuple[str, ...]) -> tuple[list[ClaimResult], Any, list[Any]]:
    """
    Evaluate the claims of a recipe and further comparisons over its records.

    Args:
        folder (`str`): The folder of the recipe.
        recipe (`str`): The name of the recipe.
        later (`tuple[str]`): Comparisons that the recipe does not contain.

    Returns:
        `tuple[list[ClaimResult], BenchmarkSection, list[dict]]`: The results, the section and the records.
    """
    path = RECIPES / folder / f"{recipe}.yaml"
    results = RECIPES / folder / "results" / recipe
    grid = read_grid(str(path), read_values(path), None, results, partitioner_has_seed)
    grid = grid.with_chosen(read_records(grid.trials.folder) if grid.trials else [])
    finished = find_finished(read_records(results), grid.runs).records.values()
    records = [record for record in finished if not has_only_fallbacks(record)]
    section = dataclasses.replace(grid.section, claims=[*grid.section.claims, *later])
    return evaluate_claims(records, section), section, records


def compare(paper: dict[str, Any], recipe: str, text: str, is_later: bool) -> ClaimResult | None:
    """
    Evaluate one comparison. `None` if the recipe has no records.

    Args:
        paper (`dict`): The entry of the paper in claims.yaml.
        recipe (`str`): The name of the recipe.
        text (`str`): The comparison.
        is_later (`bool`): Whether the comparison was written after the run.

    Raises:
        ValueError: If the recipe does not contain a claim that is not a later comparison, or contains a later one.
    """
    folder = paper["folder"]
    if not (RECIPES / folder / "results" / recipe / "runs.jsonl").exists():
        return None
    own, section, _ = results_of(folder, recipe, ())
    if (text in section.claims) == is_later:
        raise ValueError(f"{folder}/{recipe}: {text!r} is {'' if is_later else 'not '}a claim of the recipe.")
    if is_later:
        pairs = (pair for claim in paper["claims"] for pair in claim.get("later", ()))
        texts = dict.fromkeys(other for name, other in pairs if name == recipe)
        found = results_of(folder, recipe, tuple(texts))[0]
        return found[len(section.claims) + list(texts).index(text)]
    return own[section.claims.index(text)]


def contrast_row(paper: dict[str, Any], recipe: str, text: str, factors: dict[str, float]) -> list[str]:
    """
    The cells of a comparison of differences, which was written after the run.

    Args:
        paper (`dict`): The entry of the paper in claims.yaml.
        recipe (`str`): The name of the recipe.
        text (`str`): The comparison, as a formula.
        factors (`dict[str, float]`): The factor of each run in the sum that the comparison claims to be positive.
    """
    results, section, records = results_of(paper["folder"], recipe, ())
    sign = -1 if is_lower_better(records, section) else 1
    metric = main_metric(records, section)
    value_of = {(record["run"], record["seed"]): record["metrics"].get(metric) for record in records}
    # A value that is not finite is stored as null.
    seeds = [seed for seed in section.seeds if all(value_of.get((run, seed)) is not None for run in factors)]
    sums = [sign * sum(factor * value_of[run, seed] for run, factor in factors.items()) for seed in seeds]
    differences = PairedDifferences(tuple(sums))
    further = sum(pair[0] == recipe for claim in paper["claims"] for kind in FURTHER for pair in claim.get(kind, ()))
    p, interval = differences.p_value(), differences.interval
    is_decided = p is not None and p * (len(results) + further) < 1 - CONFIDENCE
    verdict = "holds" if differences.mean > 0 else "does not hold"
    return [
        f"[{recipe}][{paper['folder']}/{recipe}]: {text} {LATER}",
        "-",
        number(differences.mean, signed=True),
        interval_text(interval),
        number(differences.visible),
        str(len(seeds)),
        verdict if is_decided else UNDECIDED,
    ]


def state_of(verdict: str) -> str:
    """The kind of a verdict: decided, cannot be told or not measured."""
    kinds = [kind for kind in (UNDECIDED, MISSING) if verdict.startswith(kind)]
    return kinds[0] if kinds else DECIDED


def row_of(paper: dict[str, Any], recipe: str, text: str, result: ClaimResult, is_later: bool) -> list[str]:
    """The cells of a comparison, without the claim of the paper."""
    _, section, records = results_of(paper["folder"], recipe, ())
    differences = result.differences
    verdict = result.verdict.partition(", differences")[0]
    return [
        f"[{recipe}][{paper['folder']}/{recipe}]: {text}{f' {LATER}' if is_later else ''}",
        published_difference(result, records, section),
        number(differences.mean, signed=True) if differences else "-",
        interval_text(differences.interval if differences else None),
        number(differences.visible) if differences else "-",
        str(result.num_compared),
        verdict,
    ]


def paper_table(paper: dict[str, Any]) -> tuple[str, Counter[str]]:
    """
    The table of a paper, and the number of its claims by state.

    Args:
        paper (`dict`): The entry of the paper in claims.yaml.
    """
    rows, counts = [], Counter[str]()
    for claim in paper["claims"]:
        title = f"{claim['item']}: {claim['claim']}"
        cells, states = [], []
        for kind in ("recipe", "later"):
            for recipe, text in claim.get(kind, ()):
                result = compare(paper, recipe, text, kind == "later")
                if result is None:
                    cells.append([f"{recipe}: {text}", *["-"] * 5, f"{MISSING}: the recipe was not run"])
                else:
                    cells.append(row_of(paper, recipe, text, result, kind == "later"))
                states.append(state_of(cells[-1][-1]))
        for recipe, text, factors in claim.get("contrast", ()):
            cells.append(contrast_row(paper, recipe, text, factors))
            states.append(state_of(cells[-1][-1]))
        if "missing" in claim:
            cells.append(["-", *["-"] * 5, f"{MISSING}: {claim['missing']}"])
            states.append(MISSING)
        if claim.get("is_counted", True):
            counts[next(state for state in (DECIDED, UNDECIDED, MISSING) if state in states)] += 1
        rows += [[title if not number_ else "", *row] for number_, row in enumerate(cells)]
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    return markdown_table(HEADER, escaped, TEXT_COLUMNS), counts


def page() -> str:
    """The page as Markdown."""
    papers = yaml.safe_load((RECIPES / "claims.yaml").read_text(encoding="utf-8"))
    tables = {paper["paper"]: paper_table(paper) for paper in papers}
    total: Counter[str] = sum((counts for _, counts in tables.values()), Counter())
    counts = f"{total[DECIDED]} are decided, {total[UNDECIDED]} are undecided, and {total[MISSING]} are not measured"
    overview = markdown_table(
        ["paper", "claims", DECIDED, "undecided", MISSING],
        [
            [name, str(sum(each.values())), *(str(each[state]) for state in (DECIDED, UNDECIDED, MISSING))]
            for name, (_, each) in tables.items()
        ],
        {0},
    )
    head = HEAD.format(total=sum(total.values()), counts=counts, later=LATER)
    sections = [f"\n## {name}\n\n{table}" for name, (table, _) in tables.items()]
    logs = sorted(RECIPES.glob("*/results/*/runs.jsonl"))
    links = [
        f"[{path.parents[2].name}/{path.parent.name}]: {LINK}/{path.parent.relative_to(RECIPES).as_posix()}/report.md"
        for path in logs
    ]
    return "\n".join([head, overview, *sections, "", *links]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.relative_to(RECIPES.parent)} is written.")
