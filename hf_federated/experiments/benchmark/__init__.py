"""Benchmark grids of recipes, their runs, the log of runs, and reports."""
