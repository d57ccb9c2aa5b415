"""The command line interface, `hf-federated`."""
