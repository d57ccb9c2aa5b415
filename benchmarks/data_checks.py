"""Measure `hf-federated check` on files with a million rows.

    python benchmarks/data_checks.py
    python benchmarks/data_checks.py --rows 100000 --output data_checks.json

Each case writes files and runs the command in a new process. The CPU time is that of the whole process, with the
import of the libraries (`resource.getrusage`), and the memory is its peak (`VmHWM`). `clean` has ten CSV files
without faults, `faults` has missing texts, duplicates and misspelled labels in each file, `ids` has a different label
in each row, and every text occurs twice, and `parquet` has the rows of `faults` as Parquet files. The numbers of
missing texts and duplicates that the command prints are compared with the numbers that were written.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from engine import print_table


NUM_SITES = 10
WORDS = 14
# Runs the command and prints what it used as the last line.
CODE = """
import json, resource, sys
from pathlib import Path
from hf_federated.cli.main import main
code = main(["check", sys.argv[1]])
usage = resource.getrusage(resource.RUSAGE_SELF)
status = Path("/proc/self/status").read_text()
peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
cpu = usage.ru_utime + usage.ru_stime
print(json.dumps({"code": code, "cpu": cpu, "peak": peak, "torch": "torch" in sys.modules}))
"""


def build_rows(num_rows: int, case: str) -> tuple[pa.Table, dict[str, int]]:
    """Create the rows, and count their faults by the name of the finding."""
    generator = np.random.default_rng(0)
    vocabulary = np.array([f"word{number}" for number in range(3000)])
    texts = [" ".join(row) for row in vocabulary[generator.integers(0, 3000, (num_rows, WORDS))]]
    labels = np.array(["defect", "fine", "other"])[generator.integers(0, 3, num_rows)].tolist()
    if case == "ids":
        half = num_rows // 2
        return pa.table({"text": texts[:half] * 2, "label": [f"id {number}" for number in range(2 * half)]}), {
            "duplicate between sites": half
        }
    if case == "clean":
        return pa.table({"text": texts, "label": labels}), {}
    faulty = generator.permutation(num_rows)
    missing, repeated = faulty[: num_rows // 1000], faulty[num_rows // 1000 : num_rows // 100]
    for row in missing.tolist():
        texts[row] = ""
    for row, original in zip(repeated.tolist(), faulty[-len(repeated) :].tolist(), strict=True):
        texts[row] = texts[original]
    for row in faulty[len(faulty) // 2 :][: num_rows // 1000].tolist():
        labels[row] = labels[row].upper()
    return pa.table({"text": texts, "label": labels}), {"missing text": len(missing), "duplicates": len(repeated)}


def write(table: pa.Table, folder: Path, is_parquet: bool) -> None:
    """Write one file for each site."""
    size = len(table) // NUM_SITES
    for site in range(NUM_SITES):
        part = table.slice(site * size, size)
        if is_parquet:
            pq.write_table(part, folder / f"site {site}.parquet")
        else:
            pyarrow.csv.write_csv(part, folder / f"site {site}.csv")


def found(output: str) -> dict[str, int]:
    """The number of rows of each finding in the printed table."""
    rows = re.findall(r"^\| (?:error|warning|note) +\| ([a-z ]+?) +\| +(\d+) \|", output, re.MULTILINE)
    counts: dict[str, int] = {}
    for kind, number in rows:
        counts[kind] = counts.get(kind, 0) + int(number)
    return counts


def measure(case: str, num_rows: int) -> dict[str, Any]:
    """Write the files of a case, check them in a new process, and compare the findings with the faults."""
    table, faults = build_rows(num_rows, "faults" if case == "parquet" else case)
    with tempfile.TemporaryDirectory() as name:
        write(table, Path(name), case == "parquet")
        result = subprocess.run([sys.executable, "-c", CODE, name], capture_output=True, text=True, check=True)
    *printed, last = result.stdout.strip().splitlines()
    counts, used = found("\n".join(printed)), json.loads(last)
    counts["duplicates"] = sum(number for kind, number in counts.items() if kind.startswith("duplicate"))
    wrong = {kind: (number, counts.get(kind, 0)) for kind, number in faults.items() if counts.get(kind, 0) != number}
    if wrong or (not faults and used["code"]):
        raise RuntimeError(f"{case}: the command found other numbers of faults (expected, found): {wrong}\n{printed}")
    return {
        "case": case,
        "rows": num_rows,
        "cpu_seconds": used["cpu"],
        "peak_mb": used["peak"],
        "torch": used["torch"],
    }


def main() -> None:
    """Measure each case and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--cases", nargs="+", default=["clean", "faults", "ids", "parquet"])
    parser.add_argument("--output", help="JSON file of the results")
    arguments = parser.parse_args()
    results = [measure(case, arguments.rows) for case in arguments.cases]
    print_table(
        "hf-federated check",
        ["files", "rows", "CPU seconds", "peak memory (MB)", "imports torch"],
        [
            [
                item["case"],
                f"{item['rows']:,}",
                f"{item['cpu_seconds']:.1f}",
                f"{item['peak_mb']:.0f}",
                str(item["torch"]),
            ]
            for item in results
        ],
    )
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
