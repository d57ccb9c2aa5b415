"""Lays out reviews of several domains, one file a domain and split, as one file a split with a column `domain`.

    python recipes/adafd/prepare_data.py --source DIR --output-dir outputs/adafd-inputs

DIR holds `<domain>_<split>.jsonl` (or `.jsonl.gz`), each row with `text` and `label`: 0 neutral (three stars), 1
positive, 2 negative. The reviews that the paper took are in its repository, github.com/jiahaoxiao1228/AdaFD.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path


SPLITS = ("train", "dev", "test")
LABELS = ("neutral", "positive", "negative")


def read(path: Path) -> Iterator[dict[str, object]]:
    """The rows of a file, with the domain from its name."""
    domain = path.name.partition(".")[0].rpartition("_")[0]
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            row = json.loads(line)
            if row.get("label") not in range(len(LABELS)):
                raise SystemExit(f"{path}, line {number}: the label is {row.get('label')!r}; expected 0, 1 or 2.")
            yield {"text": row["text"], "label": LABELS[row["label"]], "domain": domain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="folder with <domain>_<split>.jsonl files")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write to")
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        paths = sorted([*arguments.source.glob(f"*_{split}.jsonl"), *arguments.source.glob(f"*_{split}.jsonl.gz")])
        if not paths:
            raise SystemExit(f"{arguments.source} has no file <domain>_{split}.jsonl or .jsonl.gz.")
        rows = [row for path in paths for row in read(path)]
        # `datasets` takes "validation" for what is called dev here.
        target = arguments.output_dir / f"{'validation' if split == 'dev' else split}.jsonl"
        target.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        print(f"{target}: {len(rows)} rows of {len(paths)} domains")


if __name__ == "__main__":
    main()
