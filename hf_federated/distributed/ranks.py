"""The ranks of a launch in error messages, and the check that all processes are at one point of the program."""

from __future__ import annotations

from collections.abc import Sequence


class OutOfStepError(RuntimeError):
    """The processes of the launch called a collective operation at different points of the program.

    The message lists the point of each process.
    """


def check_same_point(labels: Sequence[str]) -> None:
    """
    Check that all processes are at the same point of the program.

    Args:
        labels (`Sequence[str]`): The point of each process, in the order of the ranks.

    Raises:
        OutOfStepError: If the points differ.
    """
    ranks_by_label = group_ranks_by_value(labels)
    if len(ranks_by_label) > 1:
        raise OutOfStepError(
            "The processes of this launch are at different points of the program: "
            + "; ".join(f"{format_ranks(ranks)} at {label!r}" for label, ranks in ranks_by_label.items())
            + ". Build, train, evaluate and save in every process: put none of these calls under `if "
            "trainer.is_world_process_zero()`, and catch the same errors in every process."
        )


def group_ranks_by_value(values: Sequence[str]) -> dict[str, list[int]]:
    """Map each value to the ranks of the processes that passed it. `values` is in the order of the ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def format_ranks(ranks: Sequence[int]) -> str:
    """Return the text for ranks in an error message."""
    return f"process {ranks[0]}" if len(ranks) == 1 else f"processes {', '.join(map(str, ranks))}"
