"""Which cases of a sampled test are in the usual suite."""

from __future__ import annotations

import pytest
from sampled_cases import pytest_collection_modifyitems


class Case:
    """A collected case of a test, with the methods that the hook calls."""

    def __init__(self, nodeid: str, count: int | None) -> None:
        self.nodeid = nodeid
        self.mark = None if count is None else pytest.mark.sampled(count).mark
        self.is_slow = False

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        assert name == "sampled"
        return self.mark

    def add_marker(self, name: str) -> None:
        assert name == "slow"
        self.is_slow = True


def usual(cases: list[Case]) -> list[int]:
    return [index for index, case in enumerate(cases) if not case.is_slow]


def test_sampled_cases_have_equal_distances_in_each_test():
    first = [Case(f"a.py::test[{index}]", 3) for index in range(9)]
    second = [Case(f"b.py::test[{index}]", 2) for index in range(5)]
    pytest_collection_modifyitems([*first, *second])
    assert (usual(first), usual(second)) == ([0, 3, 6], [0, 2])


@pytest.mark.parametrize(("count", "expected"), [(None, [0, 1, 2]), (1, [0]), (3, [0, 1, 2]), (7, [0, 1, 2])])
def test_cases_without_the_mark_and_small_tests_are_complete(count, expected):
    cases = [Case(f"a.py::test[{index}]", count) for index in range(3)]
    pytest_collection_modifyitems(cases)
    assert usual(cases) == expected
