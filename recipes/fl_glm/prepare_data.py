"""Lays out the data of FL-GLM's recipes: a folder for each task with `train.parquet` and `validation.parquet`.

    python recipes/fl_glm/prepare_data.py --data-dir DIR --output-dir outputs/fl_glm-inputs --tasks copa cb scitldr
    python recipes/fl_glm/prepare_data.py --hub-id aps/super_glue --output-dir outputs/fl_glm-inputs --tasks copa cb
    python recipes/fl_glm/prepare_data.py --hub-id allenai/scitldr --revision refs/convert/parquet \\
        --output-dir outputs/fl_glm-inputs --tasks scitldr

Tasks of SuperGLUE become cloze questions, which the task `superglue-cloze` of a recipe reads. DIR holds a folder
`superglue_<task>` or `<task>` for each (RTE may be `glue_rte`, whose rows are the same), in each `train.jsonl` and
`val.jsonl`, `validation.jsonl` or `dev.jsonl`, perhaps with `.gz`. Their rows say who has them in the two partitions
of FL-GLM's figure 5, of COPA with two clients: `iid_owner` (97 rows of the first label and 102 of the second; 98 and
103) and `skewed_owner` (195 and 5; none and 200). Of other tasks the shares are the same.

`scitldr` are abstracts (`source`) and their one-sentence summaries (`targets`, a list for each), which the task
`summarization` reads: SciTLDR (Cachola et al., 2020) in its version of abstracts, folder `scitldr` or `SciTLDR-A`.
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
# Of the rows of COPA with its first label, and of those with its second, how many the first client has.
OWNED = {"iid_owner": (97 / 195, 102 / 205), "skewed_owner": (1.0, 5 / 205)}


SCITLDR = "scitldr"
# Other names of a task's folder, and the configuration on the Hub that is not called as the task.
ALSO_IN = {"rte": "glue_rte", SCITLDR: "SciTLDR-A"}
CONFIGURATIONS = {SCITLDR: "Abstract"}


def read_folder(folder: Path, task: str, split: str) -> Dataset:
    """The raw rows of a task from files."""
    places = [folder / name for name in (f"superglue_{task}", task, ALSO_IN.get(task)) if name is not None]
    paths = [place / f"{name}.jsonl{end}" for place in places for name in SPLITS[split] for end in ("", ".gz")]
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        raise SystemExit(f"{folder} has no file {' or '.join(str(path.relative_to(folder)) for path in paths)}.")
    return load_dataset("json", data_files=str(found), split="train")


def scitldr_rows(raw: Dataset) -> Dataset:
    """Abstracts whose sentences are joined, with all their summaries; rows without one or the other are left out."""
    targets = "targets" if "targets" in raw.column_names else "target"
    missing = {"source", targets} - set(raw.column_names)
    if missing:
        raise ValueError(f"the rows have no column {sorted(missing)}, but {raw.column_names}.")
    rows: dict[str, list[Any]] = {"source": [], "targets": []}
    for source, summaries in zip(raw["source"], raw[targets], strict=True):
        text = " ".join(part.strip() for part in ([source] if isinstance(source, str) else source or []))
        kept = [one.strip() for one in ([summaries] if isinstance(summaries, str) else summaries or []) if one.strip()]
        if text and kept:
            rows["source"].append(text)
            rows["targets"].append(kept)
    return Dataset.from_dict(rows)


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
    parser.add_argument(
        "--tasks", nargs="+", choices=[*LABELS, SCITLDR], default=["copa"], help="tasks (default: copa)"
    )
    parser.add_argument("--max-train-rows", type=int, help="draw so many rows for training")
    parser.add_argument("--seed", type=int, default=0, help="seed of all that is drawn (default: 0)")
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
            most = arguments.max_train_rows
            if split == "train" and most is not None and most < len(rows):
                drawn = np.random.default_rng(arguments.seed).permutation(len(rows))[:most]
                rows = rows.select(np.sort(drawn))
            if task != SCITLDR:
                rows = with_owners(rows, arguments.seed)
            target = arguments.output_dir / task / f"{split}.parquet"
            target.parent.mkdir(parents=True, exist_ok=True)
            rows.to_parquet(target)
            print(f"{target}: {len(rows)} rows of {len(raw)}")


if __name__ == "__main__":
    main()
