"""`ConformanceReport` and `ConformanceError`: the outcomes of the checks of a method."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Outcome:
    """
    The outcome of a check.

    Args:
        check (`str`): Name of the check.
        problem (`str`, *optional*): What the check found. Empty if the method passes.
        remedy (`str`, *optional*): What to change in the method.
        skipped (`str`, *optional*): Why the check did not run. Empty if it ran.
        log (`str`, *optional*): Output of the run that failed.
    """

    check: str
    problem: str = ""
    remedy: str = ""
    skipped: str = ""
    log: str = field(default="", repr=False)

    def __str__(self) -> str:
        if self.skipped:
            text = f"skipped: {self.skipped}"
        else:
            text = f"FAILED: {self.problem} {self.remedy}".rstrip() if self.problem else "ok"
        return f"{self.check:<24} {text}"


@dataclass(frozen=True)
class ConformanceReport:
    """
    The outcomes of all checks of a method.

    Args:
        method (`str`): The method.
        outcomes (`tuple[Outcome, ...]`): The outcomes, in the order of the checks.

    Example:

    ```python
    >>> from hf_federated.testing import ConformanceReport
    >>> from hf_federated.testing.report import Outcome

    >>> print(ConformanceReport("MyAverage()", (Outcome("settings"), Outcome("trains", "no client trained."))))
    MyAverage()
    settings                 ok
    trains                   FAILED: no client trained.
    ```
    """

    method: str
    outcomes: tuple[Outcome, ...]

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """The checks that failed. A fault often fails several checks; the first one describes it best."""
        return tuple(outcome for outcome in self.outcomes if outcome.problem)

    def __str__(self) -> str:
        return "\n".join([self.method, *map(str, self.outcomes)])


class ConformanceError(AssertionError):
    """
    A method failed a check of [`check_method`].

    Args:
        report ([`ConformanceReport`]): The report. At least one check failed.

    Attributes:
        check (`str`): Name of the first check that failed.
        report ([`ConformanceReport`]): The report.

    Example:

    ```python
    >>> from hf_federated.testing import ConformanceError, ConformanceReport
    >>> from hf_federated.testing.report import Outcome

    >>> ConformanceError(ConformanceReport("MyAverage()", (Outcome("trains", "no client trained."),))).check
    'trains'
    ```
    """

    def __init__(self, report: ConformanceReport) -> None:
        first = report.failures[0]
        others = [outcome.check for outcome in report.failures[1:]]
        text = f"{report.method} fails the check {first.check!r}: {first.problem} {first.remedy}".rstrip()
        if others:
            text += f" Also failed, maybe for the same reason: {', '.join(others)}."
        super().__init__(f"{text}\n{first.log}" if first.log else text)
        self.check = first.check
        self.report = report
