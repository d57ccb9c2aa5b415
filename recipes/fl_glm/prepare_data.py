"""Write the data of the FL-GLM recipes: a folder for each task with `train.parquet` and `validation.parquet`.

    python recipes/fl_glm/prepare_data.py --data-dir DIR --output-dir outputs/fl_glm-inputs --tasks copa cb scitldr
    python recipes/fl_glm/prepare_data.py --hub-id aps/super_glue --output-dir outputs/fl_glm-inputs --tasks copa cb
    python recipes/fl_glm/prepare_data.py --hub-id allenai/scitldr --revision refs/convert/parquet \\
        --output-dir outputs/fl_glm-inputs --tasks scitldr

Tasks of SuperGLUE become cloze questions for the recipe task `superglue-cloze`. DIR contains a folder
`superglue_<task>` or `<task>` for each task (for RTE also `glue_rte`, which has the same examples). Each folder
contains `train.jsonl` and one of `val.jsonl`, `validation.jsonl` and `dev.jsonl`, optionally with `.gz`. Two columns
name the client of each example in the two partitions of COPA in FL-GLM's figure 5. `iid_owner` gives the first client
97 examples of the first label and 102 of the second, and the second client 98 and 103. `skewed_owner` gives the first
client 195 and 5, and the second client none and 200. Other tasks use the same shares.

`scitldr` contains abstracts (`source`) and their one-sentence summaries (`targets`, a list for each abstract) for the
recipe task `summarization`: the abstracts-only version of SciTLDR (Cachola et al., 2020), from the folder `scitldr` or
`SciTLDR-A`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, load_dataset

from hf_federated.tasks import superglue_cloze_rows
from hf_federated.tasks.superglue import LABELS


SPLITS = {"train": ("train",), "validation": ("val", "validation", "dev")}
# Share of the first client in COPA's examples of the first label and of the second label.
FIRST_CLIENT_SHARES = {"iid_owner": (97 / 195, 102 / 205), "skewed_owner": (1.0, 5 / 205)}


SCITLDR = "scitldr"
# Alternative folder names of tasks, and Hub configurations whose name differs from the task.
ALTERNATIVE_FOLDERS = {"rte": "glue_rte", SCITLDR: "SciTLDR-A"}
CONFIGURATIONS = {SCITLDR: "Abstract"}


def read_folder(folder: Path, task: str, split: str) -> Dataset:
    """Load the raw examples of a task from files."""
    folders = [
        folder / name for name in (f"superglue_{task}", task, ALTERNATIVE_FOLDERS.get(task)) if name is not None
    ]
    paths = [path / f"{name}.jsonl{end}" for path in folders for name in SPLITS[split] for end in ("", ".gz")]
    existing = next((path for path in paths if path.is_file()), None)
    if existing is None:
        raise SystemExit(f"{folder} has no file {' or '.join(str(path.relative_to(folder)) for path in paths)}.")
    return load_dataset("json", data_files=str(existing), split="train")


def scitldr_rows(raw: Dataset) -> Dataset:
    """
    Convert raw examples of SciTLDR to abstracts with joined sentences and all their summaries.

    Examples without an abstract or without a summary are left out.

    Args:
        raw (`datasets.Dataset`): Examples with `source` and `targets` or `target`.

    Raises:
        ValueError: If a column is missing.
    """
    targets = "targets" if "targets" in raw.column_names else "target"
    missing = {"source", targets} - set(raw.column_names)
    if missing:
        raise ValueError(f"the dataset has no column {sorted(missing)}. Its columns are {raw.column_names}.")
    rows: dict[str, list[Any]] = {"source": [], "targets": []}
    for source, summaries in zip(raw["source"], raw[targets], strict=True):
        text = " ".join(part.strip() for part in ([source] if isinstance(source, str) else source or []))
        candidates = [summaries] if isinstance(summaries, str) else summaries or []
        kept = [summary.strip() for summary in candidates if summary.strip()]
        if text and kept:
            rows["source"].append(text)
            rows["targets"].append(kept)
    return Dataset.from_dict(rows)


def add_owners(rows: Dataset, seed: int) -> Dataset:
    """Add one column for each partition of the examples between two clients."""
    labels = np.array(rows["label"])
    for column, shares in FIRST_CLIENT_SHARES.items():
        owners = np.full(len(rows), "second", dtype=object)
        # The third label of a task uses the share of the second label.
        for label in np.unique(labels):
            positions = np.random.default_rng([seed, label + 1]).permutation(np.flatnonzero(labels == label))
            owners[positions[: round(shares[min(label, 1)] * len(positions))]] = "first"
        rows = rows.add_column(column, owners.tolist())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data-dir", type=Path, help="folder with one folder for each task")
    source.add_argument("--hub-id", help="dataset on the Hub with a configuration for each task")
    parser.add_argument("--revision", help="branch, tag or commit of the Hub dataset")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write to")
    parser.add_argument(
        "--tasks", nargs="+", choices=[*LABELS, SCITLDR], default=["copa"], help="tasks (default: copa)"
    )
    parser.add_argument("--max-train-rows", type=int, help="maximum number of training examples")
    parser.add_argument("--seed", type=int, default=0, help="seed of all draws (default: 0)")
    arguments = parser.parse_args()
    for task in arguments.tasks:
        for split in SPLITS:
            if arguments.hub_id is None:
                raw = read_folder(arguments.data_dir, task, split)
            else:
                name = CONFIGURATIONS.get(task, task)
                raw = load_dataset(arguments.hub_id, name, split=split, revision=arguments.revision)
            try:
                if task == SCITLDR:
                    rows = scitldr_rows(raw)
                else:
                    rows = superglue_cloze_rows(task, raw, answered_only=split == "train")
            except ValueError as error:
                raise SystemExit(f"{task}, {split}: {error}") from None
            max_rows = arguments.max_train_rows
            if split == "train" and max_rows is not None and max_rows < len(rows):
                drawn = np.random.default_rng(arguments.seed).permutation(len(rows))[:max_rows]
                rows = rows.select(np.sort(drawn))
            if task != SCITLDR:
                rows = add_owners(rows, arguments.seed)
            target = arguments.output_dir / task / f"{split}.parquet"
            target.parent.mkdir(parents=True, exist_ok=True)
            rows.to_parquet(target)
            print(f"{target}: {len(rows)} of {len(raw)} examples")


if __name__ == "__main__":
    main()
