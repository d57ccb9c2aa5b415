"""Fixtures with the inputs of recipes on disk."""

from __future__ import annotations

from recipe_model_fixtures import llama_dir, model_dir, superglue_dir


__all__ = ["llama_dir", "model_dir", "superglue_dir"]
