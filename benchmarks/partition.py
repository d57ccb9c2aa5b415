"""Measure the partitioning of a million rows into a thousand clients, and compare it with `flwr_datasets`.

    python benchmarks/partition.py
    python benchmarks/partition.py --rows 100000 --output partition.json

A row has a text, one of 20 labels with unequal shares, one of five domains and one of 1000 speakers. All partitioners
are measured in one process. The time is the best of `--repeats`. The memory is the peak of anonymous memory during the
partitioning minus the anonymous memory before it. The time of `flwr_datasets` is that of one first `load_partition`,
which does the whole work; its scheme is that of `PerClassDirichletPartitioner`. The comparison is left out if
`flwr_datasets` is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from engine import print_table
from measure import AnonymousPeak, status_mb

from hf_federated.data import (
    FederatedDataset,
    IidPartitioner,
    LabelDirichletPartitioner,
    MultiDomainPartitioner,
    NaturalPartitioner,
    NestedPartitioner,
    Partitioner,
    PerClassDirichletPartitioner,
    QuantityDirichletPartitioner,
)


def build_rows(num_rows: int) -> Dataset:
    """Create the rows in one Arrow table in memory."""
    generator = np.random.default_rng(0)
    speakers = pa.array([f"speaker-{number:04d}" for number in range(1000)])
    texts = pa.array([f"the text of row number {number}" for number in range(num_rows)])
    table = pa.table(
        {
            "text": texts,
            "label": generator.choice(20, num_rows, p=np.arange(1, 21) / 210),
            "domain": generator.integers(0, 5, num_rows),
            "speaker": speakers.take(pa.array(generator.integers(0, 1000, num_rows))),
        }
    )
    return Dataset(table, fingerprint=f"rows-{num_rows}")


def partitioners(num_clients: int) -> dict[str, Partitioner]:
    """Create every partitioner that needs no embeddings."""
    fifth = num_clients // 5
    return {
        "Iid": IidPartitioner(num_clients),
        "LabelDirichlet, α = 0.5": LabelDirichletPartitioner(num_clients, alpha=0.5),
        "LabelDirichlet, α = 0.5, β = 5": LabelDirichletPartitioner(num_clients, alpha=0.5, quantity_beta=5.0),
        "PerClassDirichlet, α = 0.5": PerClassDirichletPartitioner(num_clients, alpha=0.5),
        "QuantityDirichlet": QuantityDirichletPartitioner(num_clients),
        "Natural": NaturalPartitioner("speaker"),
        "MultiDomain": MultiDomainPartitioner("domain", clients_per_domain=fifth, alpha=10.0),
        "Natural x LabelDirichlet": NestedPartitioner(
            NaturalPartitioner("domain"), LabelDirichletPartitioner(fifth, alpha=0.5)
        ),
    }


def measure(make: Callable[[], FederatedDataset], repeats: int) -> dict[str, Any]:
    """Measure the best time of `repeats` runs, the memory of one further run, and the time to open a client."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        clients = make()
        seconds.append(time.perf_counter() - begin)
    del clients
    before = status_mb("RssAnon")
    with AnonymousPeak() as peak:
        clients = make()
        after = status_mb("RssAnon")
    opening = []
    for client_id in clients.client_ids[:100]:
        begin = time.perf_counter()
        clients[client_id]
        opening.append(time.perf_counter() - begin)
    return {
        "seconds": min(seconds),
        "anonymous_mb": max(peak.peak_mb, after) - before,
        "open_seconds": float(np.median(opening)),
        "clients": len(clients),
    }


def measure_flower(rows: Dataset, num_clients: int) -> float:
    """Measure the seconds until Flower's partitioner returns its first client."""
    from flwr_datasets.partitioner import DirichletPartitioner

    partitioner = DirichletPartitioner(
        num_partitions=num_clients, partition_by="label", alpha=0.5, min_partition_size=1, self_balancing=False, seed=0
    )
    partitioner.dataset = rows
    begin = time.perf_counter()
    partitioner.load_partition(0)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="number of rows (default: 1000000)")
    parser.add_argument("--clients", type=int, default=1000, help="number of clients, a multiple of 5 (default: 1000)")
    parser.add_argument("--repeats", type=int, default=3, help="runs; the best one counts (default: 3)")
    parser.add_argument("--output", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    rows = build_rows(options.rows)
    results: dict[str, Any] = {}
    for name, partitioner in partitioners(options.clients).items():
        results[name] = measure(lambda p=partitioner: FederatedDataset.from_dataset(rows, p), options.repeats)
    print_table(
        f"{options.rows} rows into {options.clients} clients (best of {options.repeats})",
        ["partitioner", "clients", "seconds", "anonymous MB", "ms to open a client"],
        [
            [
                name,
                entry["clients"],
                f"{entry['seconds']:.3f}",
                f"{entry['anonymous_mb']:.0f}",
                f"{1e3 * entry['open_seconds']:.2f}",
            ]
            for name, entry in results.items()
        ],
    )
    if importlib.util.find_spec("flwr_datasets") is None:
        print("flwr_datasets is not installed. The comparison is left out.")
    else:
        seconds = measure_flower(rows, options.clients)
        ratios = {name: seconds / results[name]["seconds"] for name in results if name.endswith("Dirichlet, α = 0.5")}
        results["flwr_datasets DirichletPartitioner"] = {"seconds": seconds, "times_slower_than": ratios}
        print(f"\nflwr_datasets DirichletPartitioner: {seconds:.2f} s")
        for name, ratio in ratios.items():
            print(f"  {ratio:.0f} times the time of {name}")
    if options.output:
        options.output.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
