"""A federated data set on disk: parquet files, `partition.json` and a card."""
