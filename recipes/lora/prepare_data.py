"""Write the questions and reviews of SubjQA (Bjerva et al., 2020) as texts of six domains.

    python recipes/lora/prepare_data.py --data FOLDER --output-dir outputs/lora-inputs

FOLDER has the files `<domain>_dev.jsonl.gz` and `<domain>_test.jsonl.gz` of the six domains with the columns `domain`,
`question` and `context`, one row for each question and review, as in https://github.com/megagonlabs/SubjQA. The script
writes `train.jsonl` from the development files and `test.jsonl` from the test files, with the columns `text` and
`domain`. The reviews have the terms of the sites from which they come: research use.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from datasets import Dataset, concatenate_datasets, load_dataset


DOMAINS = ("books", "electronics", "grocery", "movies", "restaurants", "tripadvisor")


def read(folder: Path, split: str, num_rows: int | None) -> Dataset:
    """
    Read the texts of all domains.

    Args:
        folder (`pathlib.Path`): Folder with the files.
        split (`str`): `"dev"` or `"test"`.
        num_rows (`int`, *optional*): Number of texts of each domain. Defaults to all.
    """
    parts = []
    for domain in DOMAINS:
        file = folder / f"{domain}_{split}.jsonl.gz"
        if not file.exists():
            raise SystemExit(f"{file} does not exist. The docstring of this script describes the files.")
        rows = load_dataset("json", data_files=str(file), split="train")
        rows = rows.select(range(min(num_rows or len(rows), len(rows))))
        texts = [f"{question} {context}" for question, context in zip(rows["question"], rows["context"], strict=True)]
        parts.append(Dataset.from_dict({"text": texts, "domain": [domain] * len(texts)}))
    return concatenate_datasets(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the files of SubjQA")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write to")
    parser.add_argument("--test-rows", type=int, default=4, help="number of test texts of each domain")
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    read(args.data, "dev", None).to_json(args.output_dir / "train.jsonl")
    read(args.data, "test", args.test_rows).to_json(args.output_dir / "test.jsonl")


if __name__ == "__main__":
    main()
