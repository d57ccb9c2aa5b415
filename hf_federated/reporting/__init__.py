"""
Runs and benchmarks, shown while they last and afterwards.

PNG plots, which need matplotlib (extra `plots`):

- `run_plots`: [`~hf_federated.reporting.run_plots.plot_learning_curve`] plots a metric and the training loss of a run.
- `anomaly_plots`: [`~hf_federated.reporting.anomaly_plots.plot_anomalies`] plots the norms and cosines of updates.
- `learning_curves`: [`~hf_federated.reporting.learning_curves.plot_learning_curves`] compares the runs of benchmarks,
  averaged over seeds.

Pages, tables and SVG pictures, which import neither torch nor transformers:

- `run_log`, `run_view`: the files of a run that lasts, and what a reader sees in them.
- `run_page`, `run_tables`: the page of a run, and the words and tables that a terminal also shows.
- `saved_run`, `comparison`: the settings and results of a run, and the comparison of several runs.
- `html_page`, `svg_file`: the pieces of a page, and a file with line charts.
"""
