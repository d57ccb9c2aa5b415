"""The claims of a benchmark: what two runs are expected to differ in, written as one line of text.

| claim | meaning |
|---|---|
| `A > B` | run A is better than run B |
| `A > B by 0.01` | run A is better than run B by more than 0.01 |
| `A = B within 0.01` | the runs differ by less than 0.01 |

A claim of equality without `within` has the margin `benchmark.margin`. Qualifiers follow in any order:

| qualifier | the runs are compared |
|---|---|
| `in loss` | in another metric |
| `in bytes_up` | in the bytes that all clients send (`bytes_down`: receive; `bytes`: both). Fewer are better |
| `in variation` | in the standard deviation of the changes from one evaluation to the next. Smoother is better |
| `on shifted` | on a split of `data.further_test_splits` |
| `for client baby` | on the test examples of one client |
| `after 3 rounds` | at the evaluation after a round, or after an optimizer step of split models (`after 20 steps`) |

`>` always means "is better than", so `A > B in loss` claims that A has the lower loss. The names of runs are known, so
they may contain spaces, `=` and words such as `after`. Names in double quotes decide between two readings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


FORMS = (
    "'A > B', 'A > B by 0.01' or 'A = B within 0.01' with two run names, and optionally 'in METRIC', 'on SPLIT',"
    " 'for client ID' or 'after N rounds'"
)
BYTES = {"bytes_up": ("bytes_up",), "bytes_down": ("bytes_down",), "bytes": ("bytes_up", "bytes_down")}
VARIATION = "variation"
# Quantities of a run that are no metrics, and of which less is better.
COSTS = (*BYTES, VARIATION)
_KEYWORDS = "by|within|in|on|for client|after"
_QUALIFIER = re.compile(rf'({_KEYWORDS})\s+("[^"]*"|.+?)(?=\s+(?:{_KEYWORDS})\s|$)')
_STEP = re.compile(r"round (\d+)|(\d+) (?:rounds?|(?:optimizer )?steps?)")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """
    A claim about two runs, as [`parse_claim`] reads it.

    Args:
        text (`str`): The claim on one line, with its margin.
        first (`str`): The run on the left, which a claim of order expects to be better.
        second (`str`): The run on the right.
        is_equality (`bool`, *optional*, defaults to `False`): Whether the runs are claimed to be equal.
        margin (`float`, *optional*, defaults to 0.0): The difference that is exceeded, or not exceeded if the claim is
            one of equality.
        metric (`str`, *optional*): A metric, or one of `"bytes_up"`, `"bytes_down"`, `"bytes"` and `"variation"`.
            Defaults to the metric of the benchmark.
        split (`str`, *optional*): An additional test split.
        client (`str`, *optional*): A client.
        step (`int`, *optional*): A round, or an optimizer step of split models.
    """

    text: str = field(compare=False)
    first: str
    second: str
    is_equality: bool = False
    margin: float = 0.0
    metric: str | None = None
    split: str | None = None
    client: str | None = None
    step: int | None = None

    @property
    def is_about_results(self) -> bool:
        """Whether the claim compares the metric of the benchmark on the test examples at the end of the runs."""
        return self.metric is None and self.split is None and self.client is None and self.step is None


def parse_claim(text: str, runs: Iterable[str], margin: float | None = None) -> Claim:
    """
    Read a claim.

    Args:
        text (`str`): The claim.
        runs (`Iterable[str]`): The names of the runs.
        margin (`float`, *optional*): The margin of a claim of equality in the metric of the benchmark that does not
            name one.

    Raises:
        ValueError: If the claim has none of the forms, names no run, or has several readings.

    Example:

    ```python
    >>> from hf_federated.experiments.benchmark.claims import parse_claim

    >>> claim = parse_claim("FedOpt > FedAvg after 3 rounds", ["FedAvg", "FedOpt"])
    >>> claim.first, claim.second, claim.step
    ('FedOpt', 'FedAvg', 3)
    >>> claim = parse_claim("α = 5 = α = 1 within 0.01 in loss", ["α = 1", "α = 5"])
    >>> claim.first, claim.second, claim.margin, claim.metric
    ('α = 5', 'α = 1', 0.01, 'loss')

    ```
    """
    line = " ".join(text.split())
    names = sorted(runs, key=len, reverse=True)  # the longest first, for the most specific mistake
    readings: dict[Claim, str] = {}
    mistakes: list[str] = []
    for first, operator, right in _split_at_operator(line, names):
        for second in names:
            rest = _without_prefix(right, second)
            if rest is None or rest[:1].strip():
                continue
            try:
                claim = _read_qualifiers(line, first, second, operator == "=", rest.strip(), margin)
            except ValueError as error:
                mistakes.append(str(error))
            else:
                readings[claim] = f'"{first}" {operator} "{second}"{rest}'
    if len(readings) > 1:
        raise ValueError(
            f"{text!r} has several readings: {'; '.join(readings.values())}. Put the run names in double quotes, as in"
            " one of the readings."
        )
    if not readings:
        raise ValueError(f"{text!r} is invalid: {mistakes[0] if mistakes else _unknown_run(line, names)}")
    return next(iter(readings))


def _split_at_operator(line: str, names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the first run, the operator and the rest of the line for each name that the line starts with."""
    for name in names:
        rest = (_without_prefix(line, name) or "").lstrip()
        if rest[:1] in (">", "="):
            yield name, rest[0], rest[1:].lstrip()


def _without_prefix(text: str, name: str) -> str | None:
    """The text after a name, which may be in double quotes, or `None` if the text does not start with the name."""
    plain = " ".join(name.split())
    for prefix in (plain, f'"{plain}"'):
        if text.startswith(prefix):
            return text[len(prefix) :]
    return None


def _unknown_run(line: str, names: list[str]) -> str:
    """Describe why a claim does not consist of two runs."""
    sides = next(((right, "right") for _, _, right in _split_at_operator(line, names)), None)
    if sides is None:
        parts = re.split(r"\s>\s|\s=\s|>|=", line, maxsplit=1)
        if len(parts) < 2 or not all(part.strip() for part in parts):
            return f"it must be of the form {FORMS}."
        sides = parts[0].strip(), "left"
    side, where = sides
    name = re.split(rf"\s+(?:{_KEYWORDS})\s", side, maxsplit=1)[0] if where == "right" else side
    return f"{name!r} on the {where} is not a run. The runs are {', '.join(sorted(names))}."


def _read_qualifiers(
    line: str, first: str, second: str, is_equality: bool, rest: str, default_margin: float | None
) -> Claim:
    """Read the part of a claim after the names of the runs."""
    if first == second:
        raise ValueError(f"it compares {first!r} with itself. Name two runs.")
    found: dict[str, str] = {}
    position = 0
    while position < len(rest):
        match = _QUALIFIER.match(rest, position)
        if match is None:
            raise ValueError(f"{rest[position:]!r} is not a qualifier. It must be of the form {FORMS}.")
        keyword, value = match.groups()
        if keyword in found:
            raise ValueError(f"{keyword!r} is given twice. Split the claim into two claims.")
        found[keyword] = _unquoted(value)
        position = match.end() + 1
    places = [name for name in ("on", "for client", "after", "in") if name in found]
    if found.get("in") not in COSTS:
        places = [name for name in places if name != "in"]
    if len(places) > 1:
        given = " and ".join(f"'{name} {found[name]}'" for name in places)
        raise ValueError(
            f"{given} cannot be combined, because a record holds the rounds of the test examples, and further splits,"
            " clients, bytes and the variation only at the end of a run. Keep one of them."
        )
    metric = found.get("in")
    given_margin = _read_margin(found, is_equality)
    if is_equality and given_margin is None:
        given_margin = default_margin if metric is None else None
        if given_margin is None:
            raise ValueError(
                "a claim of equality needs a margin. Add 'within 0.01', or set benchmark.margin, which applies to"
                " claims without 'in METRIC'."
            )
        line = f"{line} within {given_margin:g}"
    return Claim(
        text=line,
        first=first,
        second=second,
        is_equality=is_equality,
        margin=given_margin or 0.0,
        metric=metric,
        split=found.get("on"),
        client=found.get("for client"),
        step=_read_step(found["after"]) if "after" in found else None,
    )


def _unquoted(value: str) -> str:
    plain = value[1:-1] if value.startswith('"') and value.endswith('"') and len(value) > 1 else value
    if not plain.strip() or '"' in plain:
        raise ValueError(f"{value!r} is not a name. Write one name, in double quotes if it has several words.")
    return plain


def _read_margin(found: dict[str, str], is_equality: bool) -> float | None:
    keyword, other = ("within", "by") if is_equality else ("by", "within")
    if other in found:
        raise ValueError(f"'{other}' does not fit. Write 'A > B by 0.01' or 'A = B within 0.01'.")
    if keyword not in found:
        return None
    try:
        margin = float(found[keyword])
    except ValueError:
        margin = math.nan
    if not 0 < margin < math.inf:
        raise ValueError(f"the margin {found[keyword]!r} must be a positive number, such as 0.01.")
    return margin


def _read_step(value: str) -> int:
    match = _STEP.fullmatch(value)
    if match is None or not (step := int(match[1] or match[2])):
        raise ValueError(f"'after {value}' must be of the form 'after 3 rounds' or 'after 20 steps', from 1 on.")
    return step
