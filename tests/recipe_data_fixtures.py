"""Fixtures for tests that run recipes: datasets on disk, and a recipe that names a dataset and a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from recipe_model_fixtures import WORDS


@pytest.fixture(scope="session")
def reviews_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Parquet file with reviews of 40 movies, 4 per movie."""
    rows = [
        {
            "text": f"a {WORDS[1 + (movie + number) % 2]} film {' '.join(WORDS[: movie % 5])}",
            "label": ["rotten", "fresh"][(movie + number) % 2],
            "movie": f"movie {movie:02}",
        }
        for movie in range(40)
        for number in range(4)
    ]
    folder = tmp_path_factory.mktemp("reviews")
    Dataset.from_list(rows).to_parquet(folder / "train.parquet")
    return folder


@pytest.fixture(scope="session")
def texts_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three splits with columns for all tasks: `train` (60 examples), `test` and `shifted` (12 each), of 6 sites."""
    folder = tmp_path_factory.mktemp("texts")
    for split, num_rows in (("train", 60), ("test", 12), ("shifted", 12)):
        rows = []
        for number in range(num_rows):
            words = [WORDS[(number + step) % len(WORDS)].removeprefix("##") for step in range(4 + number % 3)]
            tags = ["B-PER" if word == "film" else "B-LOC" if word == "plot" else "O" for word in words]
            answer = {"text": words[2], "answer_start": len(" ".join(words[:2])) + 1}
            rows.append(
                {
                    "id": f"{split}-{number}",
                    "text": " ".join(words),
                    "label": (number + (split == "shifted")) % 3,
                    **dict.fromkeys(("site", "movie", "section", "domain", "speaker"), "abcdef"[number % 6]),
                    "tokens": words,
                    "ner_tags": tags,
                    "question": words[0],
                    "context": " ".join(words),
                    "answers": [answer],
                    "source": " ".join(words),
                    "targets": [words[0]],
                }
            )
        Dataset.from_list(rows).to_parquet(folder / f"{split}.parquet")
    # Without this card, `datasets` finds only the splits train and test.
    files = [f"  - {{split: {split}, path: {split}.parquet}}" for split in ("train", "test", "shifted")]
    card = ["---", "configs:", "- config_name: default", "  data_files:", *files, "---", ""]
    (folder / "README.md").write_text("\n".join(card), encoding="utf-8")
    return folder


@pytest.fixture
def recipe_path(model_dir: Path, reviews_dir: Path, tmp_path: Path) -> Path:
    """A recipe with one round and one client per movie. Tests change it with overrides."""
    recipe = {
        "model": {"name_or_path": str(model_dir)},
        "data": {"path": str(reviews_dir), "test_clients": 4},
        "task": {"max_length": 16},
        "partition": {"name": "natural", "column": "movie"},
        "training": {
            "output_dir": str(tmp_path / "run"),
            "use_cpu": True,
            "learning_rate": 0.01,
            "eval_strategy": "steps",
            "save_strategy": "no",
            "logging_steps": 1,
        },
        "federation": {"num_rounds": 1, "clients_per_round": 2},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path
