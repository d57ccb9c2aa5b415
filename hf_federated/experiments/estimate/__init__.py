"""Estimate the memory, the bytes and the time of a recipe before it runs."""
