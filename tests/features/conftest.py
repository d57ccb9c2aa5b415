"""Fixtures for cached features: a tiny model with a tokenizer."""

from __future__ import annotations

import pytest
from recipe_model_fixtures import model_dir


__all__ = ["model_dir"]


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path_factory):
    """An empty folder for the features of each test."""
    monkeypatch.setenv("HF_FEDERATED_CACHE", str(tmp_path_factory.mktemp("cache")))
