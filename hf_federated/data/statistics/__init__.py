"""Statistics that describe how the clients of a [`~hf_federated.FederatedDataset`] differ.

- `partition_statistics`: [`~hf_federated.data.describe_partition`] summarizes a partition in one object, with a
  dictionary for JSON and tables in Markdown.
- `label_statistics`: label counts per client, and Jensen-Shannon divergence.
- `dirichlet_concentration`: the effective Dirichlet concentration.
- `text_statistics`: vocabulary overlap of clients, and a 2-D map of TF-IDF features.
"""
