"""A few invented examples of each SuperGLUE task, in the layouts of the benchmark's files and of the Hub."""

from __future__ import annotations

from typing import Any

from datasets import ClassLabel, Dataset, concatenate_datasets

from hf_federated.tasks import superglue_rows
from hf_federated.tasks.superglue import LABELS


PASSAGE = 'Mira\'s well-known bakery – the "Oven" – opened in Lund (Sweden), in 1999. It closed.'
STORY = "Ada Lund met Bo Ek in Malmo.\n@highlight\nBo Ek's dog ran off\n@highlight\nAda Lund found it"


def spans(text: str, *names: str) -> list[dict[str, int]]:
    """Character spans of names in a text, with an inclusive end."""
    return [{"start": text.index(name), "end": text.index(name) + len(name) - 1} for name in names]


def answer(name: str) -> dict[str, Any]:
    return {**spans(STORY, name)[0], "text": name}


# Rows in the layout of the benchmark's files.
FILES: dict[str, list[dict[str, Any]]] = {
    "boolq": [
        {"question": "is lund's bakery still open", "passage": PASSAGE, "label": False},
        {"question": "did the bakery close", "passage": PASSAGE, "label": True},
    ],
    "cb": [
        {"premise": "It's cold. So cold!", "hypothesis": "it is cold", "label": "entailment"},
        {"premise": "It's cold.", "hypothesis": "it is warm", "label": "contradiction"},
        {"premise": "Is it cold?", "hypothesis": "it is cold", "label": "neutral"},
    ],
    "copa": [
        {
            "premise": "The cup broke.",
            "choice1": "It fell.",
            "choice2": "It's red.",
            "question": "cause",
            "label": 0,
        },
        {
            "premise": "It rained.",
            "choice1": "He sang.",
            "choice2": "He got wet!",
            "question": "effect",
            "label": 1,
        },
    ],
    "multirc": [
        {
            "idx": 7,
            "passage": {
                "text": PASSAGE,
                "questions": [
                    {
                        "question": "Where's the well-known bakery?",
                        "idx": 3,
                        "answers": [
                            {"text": "Lund, Sweden", "idx": 0, "label": 1},
                            {"text": "Oslo", "idx": 1, "label": 0},
                            {"text": "", "idx": 2, "label": 0},
                        ],
                    },
                    {
                        "question": "Name the year it opened.",
                        "idx": 4,
                        "answers": [{"text": "1999", "idx": 3, "label": 1}, {"text": "2001", "idx": 4, "label": 0}],
                    },
                ],
            },
        }
    ],
    "record": [
        {
            "idx": 5,
            "passage": {"text": STORY, "entities": spans(STORY, "Bo Ek", "Ada Lund", "Malmo", "Bo Ek")},
            "qas": [
                {"query": "The dog of @placeholder's ran off.", "idx": 8, "answers": [answer("Bo Ek")]},
                {"query": "It was found by @placeholder", "idx": 9, "answers": [answer("Ada Lund")]},
            ],
        }
    ],
    "rte": [
        {"premise": "Snow fell in Rome.", "hypothesis": "It snowed.", "label": "entailment"},
        {"premise": "Snow fell in Rome.", "hypothesis": "Rome is well-off.", "label": "not_entailment"},
    ],
    "wic": [
        {"word": "bank", "sentence1": "At the bank?", "sentence2": "The river's bank.", "label": False},
        {"word": "run", "sentence1": "They run.", "sentence2": "I run home!", "label": True},
    ],
    "wsc": [
        {
            "text": "Ann's boss saw Eve , and she, being shy, left.",
            "target": {"span1_text": "Ann", "span1_index": 0, "span2_text": "she", "span2_index": 6},
            "label": False,
        },
        {
            "text": "Ann's boss saw Eve , and she, being shy, left.",
            "target": {"span1_text": "Eve", "span1_index": 3, "span2_text": "she", "span2_index": 6},
            "label": True,
        },
    ],
}


def files(task: str) -> Dataset:
    """The rows of a task in the layout of the benchmark's files."""
    return Dataset.from_list(FILES[task])


def hub(task: str) -> Dataset:
    """The same rows in the Hub layout: flat, with numbered labels."""
    rows = [row for raw in FILES[task] for row in FLATTEN.get(task, lambda row: [row])(raw)]
    if task == "record":
        return Dataset.from_list(rows)
    names = NAMES.get(task, ["False", "True"])
    for row in rows:
        row["label"] = names.index(row["label"]) if isinstance(row["label"], str) else int(row["label"])
    return Dataset.from_list(rows).cast_column("label", ClassLabel(names=names))


def benchmark() -> Dataset:
    """The rows of all tasks in model format. `mark_span1` avoids equal sources with different labels."""
    return concatenate_datasets([superglue_rows(task, files(task), mark_span1=True) for task in LABELS])


NAMES = {
    "cb": ["entailment", "contradiction", "neutral"],
    "rte": ["entailment", "not_entailment"],
    "copa": ["choice1", "choice2"],
}


def _flat_multirc(raw: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "paragraph": raw["passage"]["text"],
            "question": question["question"],
            "answer": given["text"],
            "idx": {"paragraph": raw["idx"], "question": question["idx"], "answer": given["idx"]},
            "label": given["label"],
        }
        for question in raw["passage"]["questions"]
        for given in question["answers"]
    ]


def _flat_record(raw: dict[str, Any]) -> list[dict[str, Any]]:
    text = raw["passage"]["text"]
    names = [text[span["start"] : span["end"] + 1] for span in raw["passage"]["entities"]]
    return [
        {
            "passage": text,
            "query": query["query"],
            "entities": list(dict.fromkeys(names)),
            "answers": [given["text"] for given in query["answers"]],
            "idx": {"passage": raw["idx"], "query": query["idx"]},
        }
        for query in raw["qas"]
    ]


FLATTEN = {
    "multirc": _flat_multirc,
    "record": _flat_record,
    "wsc": lambda raw: [{"text": raw["text"], **raw["target"], "label": raw["label"]}],
    **dict.fromkeys(("boolq", "cb", "copa", "rte", "wic"), lambda raw: [dict(raw)]),
}
