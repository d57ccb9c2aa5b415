"""Writes MRQA (Fisch et al., 2019) as FedNLP takes it: six data sets of questions, each of them a client.

    python recipes/fednlp/convert_mrqa.py --output-dir outputs/mrqa

reads `mrqa-workshop/mrqa` from the Hub, or from a folder (`--data`), and writes `train.parquet` and `test.parquet`
with the columns of `hf_federated.tasks.QuestionAnswering` and `subset`, the data set that a row comes from. Test rows
are out of the validation split, since the Hub's test split has other data sets. Each of the six has its own terms.

Rows are drawn with a seed, as many a data set as Lin et al., FedNLP (2022), section 3.1, has; which ones they took is
not published. For HotpotQA no numbers are printed: here they are what Table 1's 53.9 k and 3 k rows leave.
Accepted answers that do not stand in the context cannot be trained on; they are not scored either, unlike in the
shared task.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, load_dataset

from hf_federated.tasks.metrics.answers import normalize_answer


# Rows for training and for testing, by the first letters of the subset.
NUM_ROWS = {
    "SQuAD": (8529, 431),
    "NewsQA": (11877, 613),
    "TriviaQA": (4120, 176),
    "SearchQA": (9972, 499),
    "HotpotQA": (9785, 486),
    "NaturalQuestions": (9617, 795),
}
COLUMNS = ["subset", "context", "qid", "question", "detected_answers"]


def convert_row(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """
    A row of MRQA as one of SQuAD, with its subset; `None` if no answer stands where it is said to.

    Answers have the context's wording, which may differ from the one given in case, spaces, punctuation and articles.

    Args:
        row (`Mapping[str, Any]`): With `detected_answers` as the Hub has them: a list of texts and, for each text, the
            first and last characters of all places (`char_spans`, where `end` is the last character, not the next).
    """
    detected, context = row["detected_answers"], row["context"]
    found: dict[tuple[int, str], None] = {}  # annotators often agree
    for text, spans in zip(detected["text"], detected["char_spans"], strict=True):
        for first, last in zip(spans["start"], spans["end"], strict=True):
            wording = context[first : last + 1]
            if wording.strip() and _alike(wording, text):
                found[first + len(wording) - len(wording.lstrip()), wording.strip()] = None
    if not found:
        return None
    return {
        "id": row["qid"],
        "question": row["question"],
        "context": context,
        "answers": {"text": [text for _, text in found], "answer_start": [first for first, _ in found]},
        "subset": row["subset"],
    }


def _alike(wording: str, text: str) -> bool:
    normalized = normalize_answer(text)
    return wording == text or (normalized != "" and normalize_answer(wording) == normalized)


def draw_rows(rows: Dataset, num_rows: Mapping[str, int], seed: int = 0) -> tuple[Dataset, dict[str, int]]:
    """
    Converted rows of each subset, at random, and how many could not be converted or repeat an id on the way.

    Args:
        rows (`datasets.Dataset`): Rows of MRQA.
        num_rows (`Mapping[str, int]`): Rows that are wanted, by the first letters of the subset.
        seed (`int`, *optional*, defaults to `0`): Of the draw.

    Raises:
        ValueError: If a subset is missing.
    """
    generator = np.random.default_rng(seed)
    subsets = np.array(rows["subset"])
    drawn: dict[str, dict[str, Any]] = {}
    dropped = {}
    for name, wanted in num_rows.items():
        positions = np.flatnonzero(np.char.startswith(subsets, name))
        if len(positions) == 0:
            raise ValueError(f"There are no rows of {name}; the subsets are {sorted(set(subsets.tolist()))}.")
        size = len(drawn) + wanted
        dropped[name] = 0
        for row in rows.select(generator.permutation(positions)):
            converted = convert_row(row)
            if converted is None or converted["id"] in drawn:
                dropped[name] += 1
            else:
                drawn[converted["id"]] = converted
            if len(drawn) == size:
                break
    return Dataset.from_list(list(drawn.values())), dropped


def main() -> None:
    parser = argparse.ArgumentParser(description="Write MRQA as FedNLP takes it.")
    parser.add_argument("--data", default="mrqa-workshop/mrqa", help="a data set on the Hub, or a folder")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/mrqa"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    for position, (source, target) in enumerate((("train", "train"), ("validation", "test"))):
        rows = load_dataset(options.data, split=source).select_columns(COLUMNS)
        drawn, dropped = draw_rows(rows, {name: sizes[position] for name, sizes in NUM_ROWS.items()}, options.seed)
        drawn.to_parquet(options.output_dir / f"{target}.parquet")
        sizes = drawn.to_pandas()["subset"].value_counts().to_dict()
        print(f"{target}: {len(drawn)} rows {sizes}; dropped on the way {dropped}")


if __name__ == "__main__":
    main()
