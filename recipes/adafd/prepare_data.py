"""Convert reviews of several domains to one JSON Lines file for each split, with a column `domain`.

    python recipes/adafd/prepare_data.py --source DIR --output-dir outputs/adafd-inputs

DIR contains one file `<domain>_<split>.jsonl` (or `.jsonl.gz`) for each domain and split. Each example has `text` and
`label`: 0 is neutral (three stars), 1 is positive, 2 is negative. The paper's reviews are in its repository,
github.com/jiahaoxiao1228/AdaFD.

    ... --train-rows automotive=1970 baby=3640 health=2030 sport=4000   # sizes in proportion to the paper's
    ... --test-alpha 0.8   # adds the split `shifted`: test examples with new label shares, for the paper's Table II
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


SPLITS = ("train", "dev", "test")
LABELS = ("neutral", "positive", "negative")
# Start of the dataset card, which maps each split to its file.
CARD = "---\nconfigs:\n- config_name: default\n  data_files:"


Row = dict[str, Any]


def read(path: Path) -> Iterator[Row]:
    """Read the examples of a file and add the domain from the file name."""
    domain = path.name.partition(".")[0].rpartition("_")[0]
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            row = json.loads(line)
            if row.get("label") not in range(len(LABELS)):
                raise SystemExit(f"{path}, line {number}: the label is {row.get('label')!r}. It must be 0, 1 or 2.")
            yield {"text": row["text"], "label": LABELS[row["label"]], "domain": domain}


def cap(rows: list[Row], sizes: dict[str, int], generator: np.random.Generator) -> list[Row]:
    """Draw at most `sizes[domain]` examples of each domain in `sizes` and keep their order."""
    kept: list[Row] = []
    for domain in dict.fromkeys(row["domain"] for row in rows):
        domain_rows = [row for row in rows if row["domain"] == domain]
        size = min(sizes.get(domain, len(domain_rows)), len(domain_rows))
        kept += [domain_rows[number] for number in np.sort(generator.choice(len(domain_rows), size, replace=False))]
    return kept


def shift_labels(rows: list[Row], alpha: float, generator: np.random.Generator) -> list[Row]:
    """
    Draw examples of each domain with new label shares.

    The shares come from a symmetric Dirichlet distribution over the labels of the domain. Each domain keeps as many
    examples as the shares allow.

    Args:
        rows (`list[dict]`): Examples with `label` and `domain`.
        alpha (`float`): Concentration of the Dirichlet distribution.
        generator (`np.random.Generator`): Generator that draws the shares and the examples.
    """
    kept: list[Row] = []
    for domain in dict.fromkeys(row["domain"] for row in rows):
        domain_rows = [row for row in rows if row["domain"] == domain]
        by_label = {label: [row for row in domain_rows if row["label"] == label] for label in LABELS}
        by_label = {label: label_rows for label, label_rows in by_label.items() if label_rows}
        shares = dict(zip(by_label, generator.dirichlet([alpha] * len(by_label)), strict=True))
        # The label that runs out first limits the number of examples.
        total = min(len(label_rows) / shares[label] for label, label_rows in by_label.items() if shares[label] > 0)
        for label, label_rows in by_label.items():
            size = min(int(total * shares[label] + 1e-9), len(label_rows))
            kept += [label_rows[number] for number in np.sort(generator.choice(len(label_rows), size, replace=False))]
    return kept


def domain_size(text: str) -> tuple[str, int]:
    domain, _, number = text.partition("=")
    if not domain or not number.isdecimal() or int(number) == 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form domain=rows, where rows is an integer of at least 1"
        )
    return domain, int(number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="folder with <domain>_<split>.jsonl files")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write to")
    parser.add_argument(
        "--train-rows", type=domain_size, nargs="+", default=[], metavar="DOMAIN=ROWS", help="maximum of each domain"
    )
    parser.add_argument(
        "--test-alpha",
        type=float,
        metavar="A",
        help="also write the split shifted: test examples whose label shares come from a Dirichlet of this α",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all draws (default: 0)")
    arguments = parser.parse_args()
    if arguments.test_alpha is not None and not 0 < arguments.test_alpha < float("inf"):
        parser.error(f"--test-alpha is {arguments.test_alpha}. It must be greater than 0 and finite.")
    files = []
    card_path = arguments.output_dir / "README.md"
    if card_path.exists() and not card_path.read_text(encoding="utf-8").startswith(CARD):
        raise SystemExit(f"{card_path} was not written by this script. Set --output-dir to another folder.")
    for split, rows in build_splits(arguments).items():
        target = arguments.output_dir / f"{split}.jsonl"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        counts = Counter(row["domain"] for row in rows)
        print(f"{target}: {len(rows)} rows, {', '.join(f'{domain} {count}' for domain, count in counts.items())}")
        files.append(f"  - {{split: {split}, path: {split}.jsonl}}")
    # Without the card, `datasets` finds only the splits train, validation and test by their file names.
    card_path.write_text("\n".join([CARD, *files, "---", ""]), encoding="utf-8")


def build_splits(arguments: argparse.Namespace) -> dict[str, list[Row]]:
    """Build the examples of each split to write."""
    splits: dict[str, list[Row]] = {}
    for split in SPLITS:
        paths = sorted([*arguments.source.glob(f"*_{split}.jsonl"), *arguments.source.glob(f"*_{split}.jsonl.gz")])
        if not paths:
            raise SystemExit(f"{arguments.source} has no file <domain>_{split}.jsonl or <domain>_{split}.jsonl.gz.")
        rows = [row for path in paths for row in read(path)]
        if split == "train":
            sizes = dict(arguments.train_rows)
            if unknown := sizes.keys() - {row["domain"] for row in rows}:
                raise SystemExit(
                    f"--train-rows names {', '.join(sorted(unknown))}, but {arguments.source} has no such domain."
                )
            rows = cap(rows, sizes, np.random.default_rng(arguments.seed))
        # `datasets` uses the name "validation" for the dev split.
        splits["validation" if split == "dev" else split] = rows
    if arguments.test_alpha is not None:
        splits["shifted"] = shift_labels(splits["test"], arguments.test_alpha, np.random.default_rng(arguments.seed))
    return splits


if __name__ == "__main__":
    main()
