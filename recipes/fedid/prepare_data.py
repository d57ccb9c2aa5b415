"""Write private, labeled and public examples of SST-2, and public texts of other data, for `heads_table3.yaml`.

    python recipes/fedid/prepare_data.py --public stanfordnlp/imdb --output-dir outputs/fedid-inputs

--data and --public are Hub ids, or folders with a file for each split. The output folder contains:

    data/                the private examples (split train) and the test examples (split validation)
    server.jsonl         the labeled examples of the server
    public_same.jsonl    public texts of SST-2
    public_other.jsonl   public texts of the other data
"""

from __future__ import annotations

import argparse
from pathlib import Path

from datasets import Dataset, load_dataset


# The columns of SST-2.
TEXT = "sentence"
LABEL = "label"


def main() -> None:
    """Read the data and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="stanfordnlp/sst2", help="SST-2 (default: %(default)s)")
    parser.add_argument("--public", required=True, help="data with the other public texts, in the split train")
    parser.add_argument("--public-column", default="text", help="its column of texts (default: %(default)s)")
    parser.add_argument("--public-rows", type=int, default=6000, help="public texts of each kind (%(default)s)")
    parser.add_argument("--server-rows", type=int, default=2000, help="labeled examples of the server (%(default)s)")
    parser.add_argument("--output-dir", type=Path, required=True)
    args = parser.parse_args()

    data = load_dataset(args.data)
    train = data["train"].select_columns([TEXT, LABEL]).shuffle(seed=0)
    first_private = args.public_rows + args.server_rows
    if len(train) <= first_private:
        raise SystemExit(f"{args.data} has {len(train)} training examples. {first_private} of them are not private.")
    other = load_dataset(args.public)["train"].shuffle(seed=0)
    if len(other) < args.public_rows:
        raise SystemExit(f"{args.public} has {len(other)} texts. Set --public-rows to at most this number.")
    other = other.select_columns([args.public_column]).rename_column(args.public_column, TEXT)

    write(train.select(range(args.public_rows)).remove_columns(LABEL), args.output_dir / "public_same.jsonl")
    write(train.select(range(args.public_rows, first_private)), args.output_dir / "server.jsonl")
    write(train.select(range(first_private, len(train))), args.output_dir / "data" / "train.jsonl")
    write(data["validation"].select_columns([TEXT, LABEL]), args.output_dir / "data" / "validation.jsonl")
    write(other.select(range(args.public_rows)), args.output_dir / "public_other.jsonl")


def write(rows: Dataset, path: Path) -> None:
    """Write examples to a JSON Lines file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows.to_json(path, force_ascii=False)
    print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
