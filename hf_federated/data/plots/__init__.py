"""Plots of a partition. Needs matplotlib (extra `plots`)."""

from .partition_plots import plot_partition


__all__ = ["plot_partition"]
