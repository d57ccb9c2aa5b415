"""Plots of a partition. Needs matplotlib (extra `plots`)."""
