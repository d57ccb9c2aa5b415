"""Measure SecAgg and SecAgg+ over the number of clients: partners of a client, and CPU time of a client.

    python benchmarks/secure_aggregation_scale.py --figure docs/assets/secure_aggregation_scale.png

`README.md` in this folder describes the numbers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import torch
from transformers.utils import logging


matplotlib.use("Agg")
import matplotlib.pyplot as plt
from secure_aggregation import costs


def draw(entries: list[dict[str, Any]], path: Path) -> None:
    """Draw the partners of a client, and the CPU milliseconds of client and server for a client, over the clients."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for protocol in sorted({entry["protocol"] for entry in entries}):
        found = sorted(
            (entry for entry in entries if entry["protocol"] == protocol), key=lambda entry: entry["clients"]
        )
        clients = [entry["clients"] for entry in found]
        axes[0].plot(clients, [entry["partners"] for entry in found], "o-", label=protocol)
        axes[1].plot(clients, [1000 * entry["extra_seconds"] for entry in found], "o-", label=protocol)
    titles = ("partners of a client", "CPU ms of a client above a plain round")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="clients", xscale="log", ylim=(0, None))
        axis.set_xticks(sorted({entry["clients"] for entry in entries}), minor=False)
        axis.get_xaxis().set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[30, 64, 100, 300, 1000])
    parser.add_argument("--max-secagg-clients", type=int, default=300, help="most clients of SecAgg, whose cost grows")
    parser.add_argument("--values", type=int, default=300_000)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--output", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    entries = []
    for num_clients in options.clients:
        plain = costs(None, {}, num_clients, 0, options.values, 1)["round_seconds"]
        for protocol in ("secagg", "secagg+"):
            if protocol == "secagg" and num_clients > options.max_secagg_clients:
                continue
            entry = costs(protocol, {}, num_clients, 0, options.values, 1)
            entry["extra_seconds"] = (entry["round_seconds"] - plain) / num_clients
            entries.append(entry)
            print(json.dumps(entry), flush=True)
    if options.output:
        options.output.write_text(json.dumps(entries, indent=2) + "\n")
    if options.figure:
        draw(entries, options.figure)


if __name__ == "__main__":
    main()
