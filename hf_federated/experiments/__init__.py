"""Recipes read from YAML, benchmark grids, their runs, run logs and reports."""
