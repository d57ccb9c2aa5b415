"""PNG plots of how the clients of a partition differ. The plots need matplotlib (extra `plots`).

- `partition_plots`: [`~hf_federated.data.plot_partition`] and [`~hf_federated.data.plot_label_shares`] for labels,
  [`~hf_federated.data.plot_divergence`] for differences between clients.
- `size_plots`: [`~hf_federated.data.plot_sizes`] for the number of examples of each client.
- `text_plots`: [`~hf_federated.data.plot_text_map`] for the words of clients.
- `matplotlib_helpers`: colors, figures and names that all plots share.
"""

from .partition_plots import plot_partition


__all__ = ["plot_partition"]
