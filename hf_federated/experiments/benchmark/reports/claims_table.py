"""The table of claims in the report of a benchmark, with the explanation of its columns."""

from __future__ import annotations

from collections.abc import Sequence

from hf_federated.data.markdown_table import markdown_table
from hf_federated.experiments.benchmark.comparison import Record, is_lower_better
from hf_federated.experiments.benchmark.grid import BenchmarkSection
from hf_federated.experiments.benchmark.paired_statistics import PairedDifferences
from hf_federated.experiments.benchmark.reports.verdicts import ClaimResult, ReadExamples, evaluate_claims, number
from hf_federated.experiments.text import plural


def claims_report(
    records: Sequence[Record], section: BenchmarkSection, read_examples: ReadExamples | None = None
) -> list[str]:
    """
    The table of claims and the explanation of its columns, as paragraphs of Markdown. Empty without claims.

    Args:
        records (`Sequence[Mapping]`): The records of finished runs.
        section ([`BenchmarkSection`]): The section `benchmark`.
        read_examples (`Callable`, *optional*): As in
            [`~hf_federated.experiments.benchmark.reports.verdicts.evaluate_claims`].
    """
    results = evaluate_claims(records, section, read_examples)
    if not results:
        return []
    with_examples = any(result.example_interval for result in results)
    header = ["claim", "published difference", "measured difference", "standard error", "95 % interval"]
    header += ["over test examples"] if with_examples else []
    header += ["adjusted p", "seeds in agreement", "visible from", "difference in loss", "verdict"]
    rows = [_row(result, records, section, with_examples) for result in results]
    rows = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    text_columns = {0, header.index("seeds in agreement"), header.index("verdict")}
    return [markdown_table(header, rows, text_columns), _explanation(results, with_examples)]


def _row(result: ClaimResult, records: Sequence[Record], section: BenchmarkSection, with_examples: bool) -> list[str]:
    differences = result.differences
    missing = result.num_seeds - result.num_compared
    cells = [
        result.claim.text + (" (former)" if result.is_former else ""),
        published_difference(result, records, section),
        number(differences.mean, signed=True) if differences else "-",
        number(differences.standard_error) if differences else "-",
        interval_text(differences.interval if differences else None),
    ]
    cells += [interval_text(result.example_interval)] if with_examples else []
    return [
        *cells,
        "-" if result.adjusted_p is None else "< 0.001" if result.adjusted_p < 0.001 else f"{result.adjusted_p:.3f}",
        f"{result.num_agreeing} of {result.num_compared}" + (f", {missing} missing" if missing else ""),
        number(differences.visible) if differences else "-",
        _loss(result.loss),
        result.verdict,
    ]


def published_difference(result: ClaimResult, records: Sequence[Record], section: BenchmarkSection) -> str:
    """
    The difference of the published results of a claim, positive if the first run is better, or `-`.

    Args:
        result (`ClaimResult`): The claim.
        records (`Sequence[Mapping]`): The records of finished runs.
        section ([`BenchmarkSection`]): The section `benchmark`.
    """
    claim = result.claim
    if not claim.is_about_results or claim.first not in section.paper or claim.second not in section.paper:
        return "-"
    difference = section.paper[claim.first] - section.paper[claim.second]
    return number(-difference if is_lower_better(records, section) else difference, signed=True)


def interval_text(bounds: tuple[float, float] | None) -> str:
    """Format the bounds of an interval, or `-`."""
    return "-" if bounds is None else f"{number(bounds[0], signed=True)} to {number(bounds[1], signed=True)}"


def _loss(differences: PairedDifferences | None) -> str:
    if differences is None:
        return "-"
    mean = number(differences.mean, signed=True)
    return mean if differences.interval is None else f"{mean} ({interval_text(differences.interval)})"


def _explanation(results: Sequence[ClaimResult], with_examples: bool) -> str:
    num_tested = sum(result.adjusted_p is not None for result in results)
    num_former = sum(result.is_former for result in results)
    former = f", including {plural(num_former, 'former claim')}" if num_former else ""
    sentences = [
        "A difference is the mean of the differences under each seed. It is positive if the first run of a claim is"
        " better: if its score is higher, or its loss or number of bytes is lower.",
        "The 95 % interval is Student's interval over seeds.",
        f"The p-values are two-sided and adjusted with Holm's correction for the {plural(num_tested, 'tested claim')}"
        f" of this recipe{former}.",
        "*Visible from* is the smallest true difference that these seeds show with a probability of about 80 %:"
        " the quantiles of Student's distribution at 97.5 % and 80 %, in standard errors.",
        "A claim holds, or does not hold, if the interval lies on one side of 0, or of the margin, and the adjusted p"
        " is below 0.05. Runs are equal within a margin if the interval lies within it. Any other result cannot be"
        " told. The difference in loss has its own interval, without a verdict.",
    ]
    if with_examples:
        sentences.insert(
            2,
            "The interval over test examples is a paired bootstrap for the trained models. The interval over seeds"
            " does not contain the sampling of test examples that all seeds share.",
        )
    return " ".join(sentences)
