"""Lays out reviews of several domains, one file a domain and split, as one file a split with a column `domain`.

    python recipes/adafd/prepare_data.py --source DIR --output-dir outputs/adafd-inputs

DIR holds `<domain>_<split>.jsonl` (or `.jsonl.gz`), each row with `text` and `label`: 0 neutral (three stars), 1
positive, 2 negative. The reviews that the paper took are in its repository, github.com/jiahaoxiao1228/AdaFD.

    ... --train-rows automotive=1970 baby=3640 health=2030 sport=4000   # sizes in proportion to the paper's
    ... --test-alpha 0.8   # and a split `shifted`: test rows with label shares drawn anew, for the paper's Table II
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
# What the card begins with that says which file is which split.
CARD = "---\nconfigs:\n- config_name: default\n  data_files:"


Row = dict[str, Any]


def read(path: Path) -> Iterator[Row]:
    """The rows of a file, with the domain from its name."""
    domain = path.name.partition(".")[0].rpartition("_")[0]
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            row = json.loads(line)
            if row.get("label") not in range(len(LABELS)):
                raise SystemExit(f"{path}, line {number}: the label is {row.get('label')!r}; expected 0, 1 or 2.")
            yield {"text": row["text"], "label": LABELS[row["label"]], "domain": domain}


def cap(rows: list[Row], sizes: dict[str, int], generator: np.random.Generator) -> list[Row]:
    """At most so many rows of each domain named, in the order they had."""
    kept: list[Row] = []
    for domain in dict.fromkeys(row["domain"] for row in rows):
        own = [row for row in rows if row["domain"] == domain]
        size = min(sizes.get(domain, len(own)), len(own))
        kept += [own[number] for number in np.sort(generator.choice(len(own), size, replace=False))]
    return kept


def shift_labels(rows: list[Row], alpha: float, generator: np.random.Generator) -> list[Row]:
    """
    As many rows of each domain as there are for label shares that are drawn from a symmetric Dirichlet distribution
    over the labels that it has.

    Args:
        rows (`list[dict]`): With `label` and `domain`.
        alpha (`float`): Concentration of the distribution over the labels.
        generator (`np.random.Generator`): What draws shares and rows.
    """
    kept: list[Row] = []
    for domain in dict.fromkeys(row["domain"] for row in rows):
        own_rows = [row for row in rows if row["domain"] == domain]
        of_label = {label: [row for row in own_rows if row["label"] == label] for label in LABELS}
        of_label = {label: own for label, own in of_label.items() if own}
        shares = dict(zip(of_label, generator.dirichlet([alpha] * len(of_label)), strict=True))
        # The label that runs out first says how many rows there can be.
        total = min(len(own) / shares[label] for label, own in of_label.items() if shares[label] > 0)
        for label, own in of_label.items():
            size = min(int(total * shares[label] + 1e-9), len(own))
            kept += [own[number] for number in np.sort(generator.choice(len(own), size, replace=False))]
    return kept


def domain_size(text: str) -> tuple[str, int]:
    domain, _, number = text.partition("=")
    if not domain or not number.isdecimal() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form domain=rows")
    return domain, int(number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="folder with <domain>_<split>.jsonl files")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write to")
    parser.add_argument(
        "--train-rows", type=domain_size, nargs="+", default=[], metavar="DOMAIN=ROWS", help="at most so many of each"
    )
    parser.add_argument(
        "--test-alpha",
        type=float,
        metavar="A",
        help="lay out test rows whose label shares are drawn from a Dirichlet of this α too, as the split shifted",
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    arguments = parser.parse_args()
    if arguments.test_alpha is not None and not 0 < arguments.test_alpha < float("inf"):
        parser.error(f"--test-alpha {arguments.test_alpha} must be more than 0, and finite.")
    files = []
    card_path = arguments.output_dir / "README.md"
    if card_path.exists() and not card_path.read_text(encoding="utf-8").startswith(CARD):
        raise SystemExit(f"{card_path} is not of this script; give --output-dir a folder of its own.")
    for split, rows in laid_out(arguments).items():
        target = arguments.output_dir / f"{split}.jsonl"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        counts = Counter(row["domain"] for row in rows)
        print(f"{target}: {len(rows)} rows, {', '.join(f'{domain} {count}' for domain, count in counts.items())}")
        files.append(f"  - {{split: {split}, path: {split}.jsonl}}")
    # `datasets` would find train, validation and test by their names, and no others.
    card_path.write_text("\n".join([CARD, *files, "---", ""]), encoding="utf-8")


def laid_out(arguments: argparse.Namespace) -> dict[str, list[Row]]:
    """The rows of each split that is written."""
    splits: dict[str, list[Row]] = {}
    for split in SPLITS:
        paths = sorted([*arguments.source.glob(f"*_{split}.jsonl"), *arguments.source.glob(f"*_{split}.jsonl.gz")])
        if not paths:
            raise SystemExit(f"{arguments.source} has no file <domain>_{split}.jsonl or .jsonl.gz.")
        rows = [row for path in paths for row in read(path)]
        if split == "train":
            sizes = dict(arguments.train_rows)
            if unknown := sizes.keys() - {row["domain"] for row in rows}:
                raise SystemExit(f"--train-rows names {', '.join(sorted(unknown))}, which {arguments.source} has not.")
            rows = cap(rows, sizes, np.random.default_rng(arguments.seed))
        # `datasets` takes "validation" for what is called dev here.
        splits["validation" if split == "dev" else split] = rows
    if arguments.test_alpha is not None:
        splits["shifted"] = shift_labels(splits["test"], arguments.test_alpha, np.random.default_rng(arguments.seed))
    return splits


if __name__ == "__main__":
    main()
