"""The mark `sampled(n)`: `n` cases of a test are in the usual suite, and the others are slow."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a test with `sampled(n)` as slow, except for `n` cases at equal distances."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in cases.values():
        mark = group[0].get_closest_marker("sampled")
        assert mark is not None
        (count,) = mark.args
        usual = {index * len(group) // count for index in range(count)}
        for index, item in enumerate(group):
            if index not in usual:
                item.add_marker("slow")
