"""Recipes as data: what a YAML file names, grids of runs, their records and reports."""
