"""Write the eight tasks of SuperGLUE as one dataset with a column `task`.

    python recipes/feddrs/prepare_data.py --data-dir DIR --output-dir outputs/feddrs-inputs --max-train-rows 9000

The script writes `train.parquet` and `validation.parquet` for the recipe tasks `superglue-classification` and
`superglue-seq2seq`. DIR contains a folder `superglue_<task>` or `<task>` for each task (for RTE also `glue_rte`, which
has the same examples). Each folder contains `train.jsonl` and one of `val.jsonl`, `validation.jsonl` and `dev.jsonl`,
optionally with `.gz`, as from super.gluebenchmark.com. `--hub-id` takes a dataset on the Hub with one configuration
for each task instead.

A cap applies to each task, or to the task that it names (`--max-train-rows 9000 record=2000`). It counts examples as a
model sees them: each candidate of ReCoRD and each answer of MultiRC is one example. It keeps questions whole, because
metrics are computed over questions.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from datasets import Dataset, concatenate_datasets, load_dataset

from hf_federated.tasks import superglue_rows
from hf_federated.tasks.superglue import LABELS


SPLITS = {"train": ("train",), "validation": ("val", "validation", "dev")}


def read_folder(folder: Path, task: str, split: str) -> Dataset:
    """Load the raw examples of a task from files."""
    folders = [folder / f"superglue_{task}", folder / task] + ([folder / "glue_rte"] if task == "rte" else [])
    paths = [path / f"{name}.jsonl{end}" for path in folders for name in SPLITS[split] for end in ("", ".gz")]
    existing = next((path for path in paths if path.is_file()), None)
    if existing is None:
        raise SystemExit(f"{folder} has no file {' or '.join(str(path.relative_to(folder)) for path in paths)}.")
    return load_dataset("json", data_files=str(existing), split="train")


def cap_of(caps: Sequence[str], task: str) -> int | None:
    """Return the cap of a task from a list of caps: a number for all tasks, or `task=number` for one task."""
    chosen = None
    for cap in sorted(caps, key=lambda cap: "=" in cap):  # caps of one task last
        name, _, number = cap.rpartition("=")
        if name not in ("", *LABELS) or not number.isdecimal() or int(number) < 1:
            raise SystemExit(
                f"{cap!r} is not a cap. Set a number of at least 1, or a number for one task: record=9000."
            )
        chosen = int(number) if name in ("", task) else chosen
    return chosen


def take_questions(rows: Dataset, max_rows: int | None, seed: int) -> Dataset:
    """Draw whole questions until the next question would exceed the cap, and keep the order of the examples."""
    if max_rows is None or len(rows) <= max_rows:
        return rows
    _, question_of = np.unique(rows["question"], return_inverse=True)
    sizes = np.bincount(question_of)
    order = np.random.default_rng(seed).permutation(len(sizes))
    taken = order[np.cumsum(sizes[order]) <= max_rows]
    if not len(taken):
        raise SystemExit(f"The cap of {max_rows} examples is smaller than the first drawn question. Increase the cap.")
    return rows.select(np.flatnonzero(np.isin(question_of, taken)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data-dir", type=Path, help="folder with one folder for each task")
    source.add_argument("--hub-id", help="dataset on the Hub with a configuration for each task")
    parser.add_argument("--revision", help="branch, tag or commit of the Hub dataset")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write to")
    parser.add_argument("--tasks", nargs="+", choices=LABELS, default=list(LABELS), help="tasks (default: all)")
    parser.add_argument("--max-train-rows", nargs="+", default=[], metavar="CAP", help="caps of training examples")
    parser.add_argument(
        "--max-validation-rows", nargs="+", default=[], metavar="CAP", help="caps of validation examples"
    )
    parser.add_argument("--mark-span1", action="store_true", help="mark the noun that a WSC example asks about")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws of caps (default: 0)")
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    for split, caps in (("train", arguments.max_train_rows), ("validation", arguments.max_validation_rows)):
        parts = []
        for task in arguments.tasks:
            max_rows = cap_of(caps, task)
            if arguments.hub_id is None:
                raw = read_folder(arguments.data_dir, task, split)
            else:
                raw = load_dataset(arguments.hub_id, task, split=split, revision=arguments.revision)
            try:
                rows = superglue_rows(task, raw, mark_span1=arguments.mark_span1)
            except ValueError as error:
                raise SystemExit(f"{split}: {error}") from None
            parts.append(take_questions(rows, max_rows, arguments.seed))
            print(f"{split:<10} {task:<8} {len(raw):>6} raw, {len(rows):>7} examples, {len(parts[-1]):>7} taken")
        target = arguments.output_dir / f"{split}.parquet"
        concatenate_datasets(parts).to_parquet(target)
        print(f"{target}: {sum(map(len, parts))} examples of {len(parts)} tasks")


if __name__ == "__main__":
    main()
