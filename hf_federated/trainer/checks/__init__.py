"""Checks of combinations of arguments when a trainer is built. Each config class checks its own fields."""
