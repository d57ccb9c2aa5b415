"""Curves and plots of runs. Needs matplotlib (extra `plots`)."""
