"""Recipes as data: their YAML file, their sections and fields, and the validation of both."""
