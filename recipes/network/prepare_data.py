"""Write the files of a server and two clients, from the reviews of the quickstart.

    python recipes/quickstart/prepare_data.py --output-dir outputs/quickstart-inputs
    python recipes/network/prepare_data.py --output-dir outputs/network-inputs

`north/train.parquet` and `south/train.parquet` are the examples of the clients, and `test.parquet` is that of the
server. No movie occurs in two files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from datasets import load_dataset


SIZES = {"north": 800, "south": 400, "test": 400}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the files of a server and two clients.")
    parser.add_argument("--reviews", type=Path, default=Path("outputs/quickstart-inputs/reviews"))
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/network-inputs"))
    options = parser.parse_args()
    reviews = load_dataset("parquet", data_files=str(options.reviews / "train.parquet"), split="train")
    movies = sorted(reviews.unique("movie"))
    for number, (party, size) in enumerate(SIZES.items()):
        own = set(movies[number :: len(SIZES)])
        rows = reviews.filter(lambda movie, own=own: movie in own, input_columns="movie").shuffle(seed=0)
        folder = options.output_dir if party == "test" else options.output_dir / party
        folder.mkdir(parents=True, exist_ok=True)
        rows = rows.select(range(min(size, len(rows)))).remove_columns("movie")
        rows.to_parquet(folder / ("test.parquet" if party == "test" else "train.parquet"))
        print(f"{party}: {len(rows)} reviews")


if __name__ == "__main__":
    main()
