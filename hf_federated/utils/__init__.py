"""Random generators, garbage collection, weighted means, and file names for client ids."""
