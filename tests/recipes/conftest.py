"""The inputs that recipes name, on disk."""

from __future__ import annotations

from recipe_inputs import model_dir, superglue_dir


__all__ = ["model_dir", "superglue_dir"]
