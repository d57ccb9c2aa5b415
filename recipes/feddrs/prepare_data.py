"""Lays out the eight tasks of SuperGLUE as one data set, which the tasks `superglue-classification` and
`superglue-seq2seq` of a recipe read: `train.parquet` and `validation.parquet`, with a column `task`.

    python recipes/feddrs/prepare_data.py --data-dir DIR --output-dir outputs/feddrs-inputs --max-train-rows 9000

DIR holds a folder `superglue_<task>` or `<task>` for each task (RTE may be `glue_rte`, whose rows are the same), in
each `train.jsonl` and `val.jsonl`, `validation.jsonl` or `dev.jsonl`, perhaps with `.gz`, as super.gluebenchmark.com
gives them. `--hub-id` takes a data set of the Hub that has the tasks as configurations instead.

A cap holds for each task, or for the one it names (`--max-train-rows 9000 record=2000`). It counts rows as a model
sees them, candidates of ReCoRD and answers of MultiRC one by one, and takes questions as a whole, since metrics are
over questions.
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
    """The raw rows of a task from files."""
    places = [folder / f"superglue_{task}", folder / task] + ([folder / "glue_rte"] if task == "rte" else [])
    paths = [place / f"{name}.jsonl{end}" for place in places for name in SPLITS[split] for end in ("", ".gz")]
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        raise SystemExit(f"{folder} has no file {' or '.join(str(path.relative_to(folder)) for path in paths)}.")
    return load_dataset("json", data_files=str(found), split="train")


def cap_of(caps: Sequence[str], task: str) -> int | None:
    """The cap of a task, out of what was written: a number for all tasks, and `task=number` for one."""
    chosen = None
    for cap in sorted(caps, key=lambda cap: "=" in cap):  # those of one task last
        name, _, number = cap.rpartition("=")
        if name not in ("", *LABELS) or not number.isdecimal() or int(number) < 1:
            raise SystemExit(f"{cap!r} is no cap; write a number from 1, or one for a task: record=9000.")
        chosen = int(number) if name in ("", task) else chosen
    return chosen


def take_questions(rows: Dataset, most: int | None, seed: int) -> Dataset:
    """Whole questions, drawn until the next would be beyond the cap, in the order that they had."""
    if most is None or len(rows) <= most:
        return rows
    _, question_of = np.unique(rows["question"], return_inverse=True)
    sizes = np.bincount(question_of)
    order = np.random.default_rng(seed).permutation(len(sizes))
    taken = order[np.cumsum(sizes[order]) <= most]
    if not len(taken):
        raise SystemExit(f"A cap of {most} rows is less than the first question that was drawn has; raise it.")
    return rows.select(np.flatnonzero(np.isin(question_of, taken)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data-dir", type=Path, help="folder with a folder for each task")
    source.add_argument("--hub-id", help="data set of the Hub with a configuration for each task")
    parser.add_argument("--revision", help="branch, tag or commit of the data set of the Hub")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write to")
    parser.add_argument("--tasks", nargs="+", choices=LABELS, default=list(LABELS), help="tasks (default: all)")
    parser.add_argument("--max-train-rows", nargs="+", default=[], metavar="CAP", help="as the text above says")
    parser.add_argument("--max-validation-rows", nargs="+", default=[], metavar="CAP", help="the same")
    parser.add_argument("--mark-span1", action="store_true", help="mark the noun that a WSC row asks about")
    parser.add_argument("--seed", type=int, default=0, help="seed of what a cap draws (default: 0)")
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    for split, caps in (("train", arguments.max_train_rows), ("validation", arguments.max_validation_rows)):
        parts = []
        for task in arguments.tasks:
            most = cap_of(caps, task)
            if arguments.hub_id is None:
                raw = read_folder(arguments.data_dir, task, split)
            else:
                raw = load_dataset(arguments.hub_id, task, split=split, revision=arguments.revision)
            try:
                rows = superglue_rows(task, raw, mark_span1=arguments.mark_span1)
            except ValueError as error:
                raise SystemExit(f"{split}: {error}") from None
            parts.append(take_questions(rows, most, arguments.seed))
            print(f"{split:<10} {task:<8} {len(raw):>6} raw, {len(rows):>7} rows, {len(parts[-1]):>7} taken")
        target = arguments.output_dir / f"{split}.parquet"
        concatenate_datasets(parts).to_parquet(target)
        print(f"{target}: {sum(map(len, parts))} rows of {len(parts)} tasks")


if __name__ == "__main__":
    main()
