"""The report of a benchmark: tables of results and claims, and its files."""
