"""A federated dataset on disk: parquet files, `partition.json` and a dataset card."""
