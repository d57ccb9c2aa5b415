"""Inputs of recipes: data on disk, tiny models and recipes that name them."""

from __future__ import annotations

from recipe_folders import recipe_path, reviews_dir, texts_dir
from recipe_inputs import cloze_dir, llama_dir, model_dir, superglue_dir


__all__ = ["cloze_dir", "llama_dir", "model_dir", "recipe_path", "reviews_dir", "superglue_dir", "texts_dir"]
