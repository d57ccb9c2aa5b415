"""The source distribution contains all files of the package, and no tests, which cannot run without the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
# Files that setuptools writes.
GENERATED = {"PKG-INFO", "setup.cfg"}
TOP_LEVEL = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"}


@pytest.mark.slow
def test_source_distribution_contains_the_package_and_no_tests(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("hf_federated", "tests", "recipes"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    for name in TOP_LEVEL:
        shutil.copy(ROOT / name, copy / name)
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    result = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, check=True)
    with tarfile.open(tmp_path / result.stdout.split()[-1]) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "hf_federated").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {"hf_federated/py.typed", "hf_federated/cards/model_card_template.md"} <= package
    generated = {name for name in names if ".egg-info/" in name} | GENERATED
    assert names - generated == package | TOP_LEVEL
