"""Learning curves of runs and benchmarks as PNG plots. The plots need matplotlib (extra `plots`).

- `run_plots`: [`~hf_federated.reporting.run_plots.plot_learning_curve`] plots a metric and the training loss of a run.
- `anomaly_plots`: [`~hf_federated.reporting.anomaly_plots.plot_anomalies`] plots the norms and cosines of updates.
- `learning_curves`: [`~hf_federated.reporting.learning_curves.plot_learning_curves`] compares the runs of benchmarks,
  averaged over seeds.
"""
