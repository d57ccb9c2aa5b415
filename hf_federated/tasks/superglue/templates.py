"""SuperGLUE's raw rows as texts with the name of a label: the templates of FedDRS, appendix A.2.

Sources: Wang et al., "SuperGLUE: A Stickier Benchmark for General-Purpose Language Understanding Systems" (2019), for
the eight tasks and their files; "Text-Free Federated Transformers Knowledge Distillation Without GAN" (FedDRS),
appendix A.2, for the templates.

Labels are mapped by their names. The numbers that the appendix prints beside them are not used: they contradict the
benchmark's own (it prints 0 for a BoolQ answer Yes, which is 1 there). The appendix shows one label name of each task;
the others are named here in the same manner, `Match`, `Same`, `Choice_two`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from datasets import ClassLabel, Dataset, Features, List, Value

from .raw import HIGHLIGHT, multirc_answers, read_text, read_value, record_queries


# Of each task the raw labels, in the order of their numbers on the Hub, and the names that models learn.
LABELS: dict[str, dict[str, str]] = {
    "boolq": {"False": "No", "True": "Yes"},
    "cb": {"entailment": "Entailment", "contradiction": "Contradiction", "neutral": "Neutral"},
    "copa": {"choice1": "Choice_one", "choice2": "Choice_two"},
    "multirc": {"False": "False", "True": "True"},
    "record": {"False": "Wrong", "True": "Correct"},
    "rte": {"entailment": "Entailment", "not_entailment": "Not_entailment"},
    "wic": {"False": "Mismatch", "True": "Match"},
    "wsc": {"False": "Difference", "True": "Same"},
}

# Tasks of which a template is the task's name, and these columns in this order.
COLUMNS: dict[str, tuple[str, ...]] = {
    "boolq": ("question", "passage"),
    "cb": ("hypothesis", "premise"),
    "copa": ("choice1", "choice2", "premise", "question"),
    "rte": ("hypothesis", "premise"),
    "wic": ("word", "sentence1", "sentence2"),
}

FEATURES = Features(
    {
        "task": Value("string"),
        "source": Value("string"),
        "target": Value("string"),
        "question": Value("string"),
        "answer": Value("string"),
        "answers": List(Value("string")),
    }
)


class Example(NamedTuple):
    """
    A row for the model.

    Args:
        source (`str`): The filled template.
        label (`Any`): As it stands in the raw row.
        question (`str`): What tells the questions of a raw row apart; one question by default.
        answer (`str`): The candidate that the row asks about, where a question has several.
        answers (`tuple[str, ...]`): The right answers of a ReCoRD query.
    """

    source: str
    label: Any
    question: str = ""
    answer: str = ""
    answers: tuple[str, ...] = ()


def superglue_rows(task: str, rows: Dataset, mark_span1: bool = False) -> Dataset:
    """
    Raw rows of a SuperGLUE task as rows of one kind, which all tasks share and [`SuperGlueClassification`] and
    [`SuperGlueSeq2Seq`] read.

    Both layouts are taken: the benchmark's own JSON lines and that of `super_glue` on the Hub. Punctuation is dropped,
    as in the paper's examples, except for the `?` of a MultiRC question and the `@placeholder` of a ReCoRD query.
    Tasks of one answer to choose become rows like this:

    - COPA: one row, in which both choices stand; the label names one of them;
    - MultiRC: a row for each answer of a question, True or False;
    - ReCoRD: a row for each different entity of the passage, put in as the answer to the query, Correct or Wrong;
    - WSC: one row, with the pronoun between asterisks, Same or Difference. The template of the paper does not say
      which noun (`span1_text`) is asked about, so rows of one text and pronoun that differ in it have the same source
      and different labels; `mark_span1` puts it between asterisks too.

    Args:
        task (`str`): `"boolq"`, `"cb"`, `"copa"`, `"multirc"`, `"record"`, `"rte"`, `"wic"` or `"wsc"`.
        rows (`datasets.Dataset`): Raw rows with labels.
        mark_span1 (`bool`, *optional*, defaults to `False`): Of WSC, mark the noun that is asked about.

    Returns:
        `datasets.Dataset`: With the columns `task`, `source` (the text), `target` (the label's name), `question` (the
        same for all rows of a question, and for no others of this data set), `answer` (the candidate; empty where
        there are none) and `answers` (the right answers of a ReCoRD query).

    Raises:
        ValueError: If the task is unknown, a column is missing, or a row lacks a text or a label, has an unknown
            label, or an answer or a span that is not in its text. The message names the row.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated.tasks import superglue_rows

    >>> raw = Dataset.from_dict({"premise": ["It's cold."], "hypothesis": ["It is warm."], "label": ["contradiction"]})
    >>> row = superglue_rows("cb", raw)[0]
    >>> row["source"], row["target"]
    ('cb hypothesis: It is warm. premise: Its cold', 'Contradiction')

    ```
    """
    if task not in LABELS:
        raise ValueError(f"{task!r} is no task of SuperGLUE; its tasks are {', '.join(map(repr, LABELS))}.")
    feature = rows.features.get("label")
    names = feature.names if isinstance(feature, ClassLabel) else list(LABELS[task])

    def convert(batch: Mapping[str, Sequence[Any]], indices: list[int]) -> dict[str, list[Any]]:
        converted: dict[str, list[Any]] = {name: [] for name in FEATURES}
        for position, index in enumerate(indices):
            row = {name: values[position] for name, values in batch.items()}
            where = f"Row {index} of {task!r}"
            for example in examples(task, row, where, mark_span1):
                converted["task"].append(task)
                converted["source"].append(example.source)
                converted["target"].append(read_label(task, example.label, names, where))
                converted["question"].append(f"{task}-{example.question or index}")
                converted["answer"].append(example.answer)
                converted["answers"].append(list(example.answers))
        return converted

    # Passages repeat for each of their answers, so few raw rows are many megabytes.
    return rows.map(
        convert,
        batched=True,
        batch_size=100,
        with_indices=True,
        remove_columns=rows.column_names,
        features=FEATURES,
    )


def examples(task: str, row: Mapping[str, Any], where: str, mark_span1: bool = False) -> Iterator[Example]:
    """
    What a raw row becomes.

    Args:
        task (`str`): A key of `LABELS`.
        row (`Mapping[str, Any]`): The raw row.
        where (`str`): How errors name it.
        mark_span1 (`bool`, *optional*, defaults to `False`): As in [`superglue_rows`].
    """
    if task == "multirc":
        yield from _multirc(row, where)
    elif task == "record":
        yield from _record(row, where)
    elif task == "wsc":
        yield _wsc(row, where, mark_span1)
    else:
        fields = {column: clean(read_text(row, column, where)) for column in COLUMNS[task]}
        yield Example(fill(task, fields), read_value(row, "label", where))


def clean(text: str, keep: str = "") -> str:
    """
    A text without punctuation and symbols, with single spaces.

    Args:
        text (`str`): The text.
        keep (`str`, *optional*): Characters that stay.

    Example:

    ```python
    >>> from hf_federated.tasks.superglue.templates import clean

    >>> clean("A well-known poet's – or two poets' – house?")
    'A wellknown poets or two poets house'

    ```
    """
    return " ".join(re.sub(rf"[^\w\s{re.escape(keep)}]", "", text).split())


def fill(task: str, fields: Mapping[str, str]) -> str:
    """
    A template: the task's name, and each field behind its own, which end in a full stop or a question mark of theirs.

    Args:
        task (`str`): The task's name.
        fields (`Mapping[str, str]`): Name to cleaned text, in order.
    """
    parts = [f"{name}: {text}" for name, text in fields.items()]
    ended = [part if part.endswith("?") else f"{part}." for part in parts[:-1]]
    return " ".join([task, *ended, parts[-1]])


def read_label(task: str, value: Any, names: Sequence[str], where: str) -> str:
    """
    The name that a model learns for a raw label.

    Args:
        task (`str`): A key of `LABELS`.
        value (`Any`): A name, a truth value, or a number.
        names (`Sequence[str]`): What numbers stand for.
        where (`str`): How errors name the row.
    """
    allowed = LABELS[task]
    if value is None or value == -1:  # what the Hub has for rows without one
        raise ValueError(f"{where} has no label. Leave rows without one out; those of the test splits are not public.")
    name = value
    if isinstance(value, bool):
        name = str(value)
    elif isinstance(value, int) and 0 <= value < len(names):
        name = names[value]
    if not isinstance(name, str) or name not in allowed:
        raise ValueError(
            f"{where} has the label {value!r}; allowed are {', '.join(map(repr, allowed))}, or their numbers 0 to"
            f" {len(allowed) - 1}."
        )
    return allowed[name]


# ---- The tasks of which a row has parts


def _multirc(row: Mapping[str, Any], where: str) -> Iterator[Example]:
    for answer in multirc_answers(row, where):
        fields = {
            "question": clean(answer.question, keep="?"),
            "answer": clean(answer.text),
            "paragraph": clean(answer.paragraph),
        }
        yield Example(fill("multirc", fields), answer.label, answer.place, answer.text)


def _record(row: Mapping[str, Any], where: str) -> Iterator[Example]:
    for query in record_queries(row, where):
        asked, passage = clean(query.text, keep="@"), clean(HIGHLIGHT.sub(" ", query.passage))
        for entity in query.entities:
            source = fill("record", {"answer": clean(entity), "query": asked, "passage": passage})
            label = entity in query.answers if query.answers else None
            yield Example(source, label, query.place, entity, query.answers)


def _wsc(row: Mapping[str, Any], where: str, mark_span1: bool) -> Example:
    words = [clean(word) for word in read_text(row, "text", where).split()]
    for span in ("span1", "span2") if mark_span1 else ("span2",):
        first, number = find_span(row, span, words, where)
        words[first] = f"* {words[first]}"
        words[first + number - 1] += " *"
    source = " ".join(["wsc:", *(word for word in words if word)])
    return Example(source, read_value(row, "label", where))


def find_span(row: Mapping[str, Any], span: str, words: Sequence[str], where: str) -> tuple[int, int]:
    """
    Where a span of a WSC row stands in its text.

    Args:
        row (`Mapping[str, Any]`): The raw row.
        span (`str`): `"span1"`, the noun, or `"span2"`, the pronoun.
        words (`Sequence[str]`): The text's words, each [`clean`]ed.
        where (`str`): How errors name the row.

    Returns:
        `tuple[int, int]`: The number of the first word, and how many they are.

    Raises:
        ValueError: If it is not there.
    """
    spans = row["target"] if "target" in row else row  # in the benchmark's own files they are an object
    wanted = clean(read_text(spans, f"{span}_text", where)).split()
    first = _find(words, wanted, read_value(spans, f"{span}_index", where))
    if first is None:
        raise ValueError(
            f"{where} has {span}_text {spans[f'{span}_text']!r}, which is not in its text: {row['text']!r}."
        )
    return first, len(wanted)


def _find(words: Sequence[str], wanted: Sequence[str], near: int) -> int | None:
    """
    Where words stand in a text. A word of it may have an ending that the wanted one lacks, the `s` of a genitive, and
    a mark around it. A few of the benchmark's indices point beside the words, which are then the nearest ones.
    """
    if not wanted:
        return None
    plain = [word.replace("*", "").strip() for word in words]
    windows = {first: plain[first : first + len(wanted)] for first in range(len(plain) - len(wanted) + 1)}
    places = [first for first, window in windows.items() if all(map(str.startswith, window, wanted))]
    return min(
        places, key=lambda place: (place != near, windows[place] != list(wanted), abs(place - near)), default=None
    )
