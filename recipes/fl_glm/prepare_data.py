"""Lays out tasks of SuperGLUE as cloze questions, which the task `superglue-cloze` of a recipe reads: a folder for
each task with `train.parquet` and `validation.parquet`.

    python recipes/fl_glm/prepare_data.py --data-dir DIR --output-dir outputs/fl_glm-inputs --tasks copa cb

DIR holds a folder `superglue_<task>` or `<task>` for each task (RTE may be `glue_rte`, whose rows are the same), in
each `train.jsonl` and `val.jsonl`, `validation.jsonl` or `dev.jsonl`, perhaps with `.gz`. `--hub-id` takes a data set
of the Hub that has the tasks as configurations instead.

Rows say who has them in the two partitions of FL-GLM's figure 5, of COPA with two clients: `iid_owner`
(97 rows of the first label and 102 of the second; 98 and 103) and `skewed_owner` (195 and 5; none and 200). Of other
tasks the shares are the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from datasets import Dataset, load_dataset

from hf_federated.tasks import superglue_cloze_rows
from hf_federated.tasks.superglue import LABELS


SPLITS = {"train": ("train",), "validation": ("val", "validation", "dev")}
# Of the rows of COPA with its first label, and of those with its second, how many the first client has.
OWNED = {"iid_owner": (97 / 195, 102 / 205), "skewed_owner": (1.0, 5 / 205)}


def read_folder(folder: Path, task: str, split: str) -> Dataset:
    """The raw rows of a task from files."""
    places = [folder / f"superglue_{task}", folder / task] + ([folder / "glue_rte"] if task == "rte" else [])
    paths = [place / f"{name}.jsonl{end}" for place in places for name in SPLITS[split] for end in ("", ".gz")]
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        raise SystemExit(f"{folder} has no file {' or '.join(str(path.relative_to(folder)) for path in paths)}.")
    return load_dataset("json", data_files=str(found), split="train")


def with_owners(rows: Dataset, seed: int) -> Dataset:
    """Rows with a column for each partition between two clients."""
    labels = np.array(rows["label"])
    for column, shares in OWNED.items():
        owners = np.full(len(rows), "second", dtype=object)
        # The second label of a task of three is as its first.
        for label in np.unique(labels):
            of_label = np.random.default_rng([seed, label + 1]).permutation(np.flatnonzero(labels == label))
            owners[of_label[: round(shares[min(label, 1)] * len(of_label))]] = "first"
        rows = rows.add_column(column, owners.tolist())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data-dir", type=Path, help="folder with a folder for each task")
    source.add_argument("--hub-id", help="data set of the Hub with a configuration for each task")
    parser.add_argument("--revision", help="branch, tag or commit of the data set of the Hub")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write to")
    parser.add_argument("--tasks", nargs="+", choices=LABELS, default=["copa"], help="tasks (default: copa)")
    parser.add_argument("--max-train-rows", type=int, help="draw so many rows for training")
    parser.add_argument("--seed", type=int, default=0, help="seed of all that is drawn (default: 0)")
    arguments = parser.parse_args()
    for task in arguments.tasks:
        for split in SPLITS:
            if arguments.hub_id is None:
                raw = read_folder(arguments.data_dir, task, split)
            else:
                raw = load_dataset(arguments.hub_id, task, split=split, revision=arguments.revision)
            try:
                rows = superglue_cloze_rows(task, raw, answered_only=split == "train")
            except ValueError as error:
                raise SystemExit(f"{task}, {split}: {error}") from None
            most = arguments.max_train_rows
            if split == "train" and most is not None and most < len(rows):
                drawn = np.random.default_rng(arguments.seed).permutation(len(rows))[:most]
                rows = rows.select(np.sort(drawn))
            rows = with_owners(rows, arguments.seed)
            target = arguments.output_dir / task / f"{split}.parquet"
            target.parent.mkdir(parents=True, exist_ok=True)
            rows.to_parquet(target)
            print(f"{target}: {len(rows)} rows of {len(raw)}")


if __name__ == "__main__":
    main()
