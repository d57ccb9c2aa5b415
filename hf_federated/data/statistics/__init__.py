"""How unlike clients are: counts of labels, words, and one summary of both."""
