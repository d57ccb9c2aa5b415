"""The raw examples of a recipe: files, splits, labels, and the examples that are held out."""
