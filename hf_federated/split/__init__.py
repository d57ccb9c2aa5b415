"""Split language models: clients hold the first and last blocks, a server the rest."""
