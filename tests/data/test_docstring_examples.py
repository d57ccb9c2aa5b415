"""Every public class of the data package has an example, and it runs."""

from __future__ import annotations

import doctest

import pytest

import hf_federated.data


@pytest.mark.parametrize("name", hf_federated.data.__all__)
def test_example_runs(name):
    public = getattr(hf_federated.data, name)
    tests = doctest.DocTestFinder(recurse=False).find(public, name, globs={})
    assert sum(len(test.examples) for test in tests) > 0, f"{name} has no example"
    for test in tests:
        report: list[str] = []
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
        assert result.failed == 0, "".join(report)
