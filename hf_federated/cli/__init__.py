"""The command line: `hf-federated train RECIPE.yaml`."""
