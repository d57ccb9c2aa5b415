"""Random generators, garbage collection, weighted means, client ids as file names."""
