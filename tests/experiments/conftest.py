"""Fixtures for recipes: datasets and tiny models on disk, and recipes that name them."""

from __future__ import annotations

from recipe_data_fixtures import recipe_path, reviews_dir, texts_dir
from recipe_model_fixtures import cloze_dir, llama_dir, model_dir, phrases_dir, superglue_dir


__all__ = [
    "cloze_dir",
    "llama_dir",
    "model_dir",
    "phrases_dir",
    "recipe_path",
    "reviews_dir",
    "superglue_dir",
    "texts_dir",
]
