"""Names of files in the output folder of a run, for readers that import no trainer and no engine."""

from __future__ import annotations


# Held while a process trains in the folder. `Trainer` does not push files whose name starts with `_`. The file names a
# host.
LOCK_FILE = "_hf_federated.lock"
# The folder of a server, the status that it writes, and the clients that the operator has expelled.
NETWORK_FOLDER = "network"
STATUS_NAME = "status.json"
EXPELLED_NAME = "expelled.json"
# The configuration and the ledger that `save_model` writes.
CONFIG_NAME = "federated_config.json"
LEDGER_NAME = "federated_ledger.json"
# The recipe of `hf-federated train`, which contains local paths, and its results.
RECIPE_NAME = "_run.json"
RESULTS_NAME = "results.json"
