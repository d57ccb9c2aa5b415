"""Convert MRQA (Fisch et al., 2019) to the data of FedNLP: six question answering datasets, each a client.

    python recipes/fednlp/convert_mrqa.py --output-dir outputs/mrqa

The script reads `mrqa-workshop/mrqa` from the Hub, or from a folder (`--data`). It writes `train.parquet` and
`test.parquet` with the columns of `hf_federated.tasks.QuestionAnswering` and `subset`, the dataset of an example. Test
examples come from the validation split, because the Hub's test split has other datasets. Each of the six datasets has
its own license terms.

Examples are drawn with a seed. Their number for each dataset is that of Lin et al., FedNLP (2022), section 3.1; the
paper does not publish which examples it uses. It prints no numbers for HotpotQA: the numbers here are the rest of
Table 1's 53.9 k and 3 k examples. The script leaves out accepted answers that do not occur in the context, because a
model cannot be trained on them. Unlike in the shared task, these answers are not scored either.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, load_dataset

from hf_federated.tasks.metrics.answers import normalize_answer


# Number of training and test examples, by the prefix of the subset's name.
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
    Convert an example of MRQA to the format of SQuAD, with its subset.

    The answers use the wording of the context, which may differ from the given text in case, spaces, punctuation and
    articles.

    Args:
        row (`Mapping[str, Any]`): Example with `detected_answers` in the Hub's format: a list of texts and, for each
            text, the first and last characters of all its spans (`char_spans`, with an inclusive `end`).

    Returns:
        `dict[str, Any]` or `None`: The converted example, or `None` if no answer occurs at one of its spans.
    """
    detected, context = row["detected_answers"], row["context"]
    answers: dict[tuple[int, str], None] = {}  # without duplicates: annotators often agree
    for text, spans in zip(detected["text"], detected["char_spans"], strict=True):
        for first, last in zip(spans["start"], spans["end"], strict=True):
            wording = context[first : last + 1]
            if wording.strip() and _is_same_answer(wording, text):
                answers[first + len(wording) - len(wording.lstrip()), wording.strip()] = None
    if not answers:
        return None
    return {
        "id": row["qid"],
        "question": row["question"],
        "context": context,
        "answers": {"text": [text for _, text in answers], "answer_start": [first for first, _ in answers]},
        "subset": row["subset"],
    }


def _is_same_answer(wording: str, text: str) -> bool:
    normalized = normalize_answer(text)
    return wording == text or (normalized != "" and normalize_answer(wording) == normalized)


def draw_rows(rows: Dataset, num_rows: Mapping[str, int], seed: int = 0) -> tuple[Dataset, dict[str, int]]:
    """
    Draw converted examples of each subset.

    Args:
        rows (`datasets.Dataset`): Examples of MRQA.
        num_rows (`Mapping[str, int]`): Number of examples to draw, by the prefix of the subset's name.
        seed (`int`, *optional*, defaults to `0`): Seed of the draw.

    Returns:
        `tuple[datasets.Dataset, dict[str, int]]`: The drawn examples, and the number of examples of each subset that
        the draw skipped because they cannot be converted or repeat an id.

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
            raise ValueError(f"There are no examples of {name}. The subsets are {sorted(set(subsets.tolist()))}.")
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
    parser = argparse.ArgumentParser(description="Convert MRQA to the data of FedNLP.")
    parser.add_argument("--data", default="mrqa-workshop/mrqa", help="dataset on the Hub, or a folder")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/mrqa"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    for position, (source, target) in enumerate((("train", "train"), ("validation", "test"))):
        rows = load_dataset(options.data, split=source).select_columns(COLUMNS)
        drawn, dropped = draw_rows(rows, {name: sizes[position] for name, sizes in NUM_ROWS.items()}, options.seed)
        drawn.to_parquet(options.output_dir / f"{target}.parquet")
        sizes = drawn.to_pandas()["subset"].value_counts().to_dict()
        print(f"{target}: {len(drawn)} examples {sizes}, skipped {dropped}")


if __name__ == "__main__":
    main()
