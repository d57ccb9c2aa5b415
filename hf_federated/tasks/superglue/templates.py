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

from ..base import is_blank


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

_HIGHLIGHT = re.compile(r"\s*@highlight\s*")  # ReCoRD's mark between a news text and its summary


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
        fields = {column: clean(_text(row, column, where)) for column in COLUMNS[task]}
        yield Example(fill(task, fields), _value(row, "label", where))


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
    if "passage" not in row:  # the Hub's layout, a row an answer
        paragraph, asked = clean(_text(row, "paragraph", where)), _text(row, "question", where)
        place, answer = _value(row, "idx", where), _value(row, "answer", where)
        source = _multirc_source(asked, answer, paragraph, where)
        yield Example(source, _value(row, "label", where), f"{place['paragraph']}-{place['question']}", answer)
        return
    passage = _value(row, "passage", where)
    paragraph = clean(_text(passage, "text", where))
    for question in passage["questions"]:
        asked, number = _text(question, "question", where), _value(question, "idx", where)
        for answer in question["answers"]:
            text = _value(answer, "text", where)
            yield Example(
                _multirc_source(asked, text, paragraph, where),
                # Answers of the unpublished test labels have none.
                answer.get("label"),
                f"{row.get('idx')}-{number}",
                text,
            )


def _multirc_source(question: str, answer: Any, paragraph: str, where: str) -> str:
    # A few answers of the benchmark are empty, and count as the others do.
    if not isinstance(answer, str):
        raise ValueError(f"{where} has the answer {answer!r} instead of a text. Correct it, or drop the row.")
    fields = {"question": clean(question, keep="?"), "answer": clean(answer), "paragraph": paragraph}
    return fill("multirc", fields)


def _record(row: Mapping[str, Any], where: str) -> Iterator[Example]:
    nested = "qas" in row  # the benchmark's own files; on the Hub a row is a query
    holder = _value(row, "passage", where) if nested else row
    text = _text(holder, "text" if nested else "passage", where)
    entities = _entities(_value(holder, "entities", where), text, where)
    passage, number = clean(_HIGHLIGHT.sub(" ", text)), _value(row, "idx", where)
    queries = row["qas"] if nested else [row]
    for query in queries:
        asked = clean(_text(query, "query", where), keep="@")
        if "@placeholder" not in asked:
            raise ValueError(
                f"{where} has a query without '@placeholder': {query['query']!r}. Correct it, or drop it."
            )
        place = f"{number}-{query['idx']}" if nested else f"{number['passage']}-{number['query']}"
        found = [answer["text"] if nested else answer for answer in query.get("answers") or []]
        answers = tuple(dict.fromkeys(found))
        if unknown := [answer for answer in answers if answer not in entities]:
            raise ValueError(
                f"{where} has the answer {unknown[0]!r}, which is none of the passage's entities:"
                f" {', '.join(map(repr, entities))}."
            )
        for entity in entities:
            source = fill("record", {"answer": clean(entity), "query": asked, "passage": passage})
            yield Example(source, entity in answers if answers else None, place, entity, answers)


def _entities(given: Sequence[Any], text: str, where: str) -> list[str]:
    """The different entities of a passage: from spans of characters, of which the last counts too, or as texts."""
    entities = []
    for entity in given:
        name = entity if isinstance(entity, str) else text[entity["start"] : entity["end"] + 1]
        if is_blank(name) or name not in text:
            raise ValueError(
                f"{where} has the entity {entity!r}, which is not in its passage of {len(text)} characters."
            )
        entities.append(name)
    return list(dict.fromkeys(entities))


def _wsc(row: Mapping[str, Any], where: str, mark_span1: bool) -> Example:
    spans = row["target"] if "target" in row else row  # in the benchmark's own files they are an object
    words = [clean(word) for word in _text(row, "text", where).split()]
    for span in ("span1", "span2") if mark_span1 else ("span2",):
        wanted = clean(_text(spans, f"{span}_text", where)).split()
        first = _find(words, wanted, _value(spans, f"{span}_index", where))
        if first is None:
            raise ValueError(
                f"{where} has {span}_text {spans[f'{span}_text']!r}, which is not in its text: {row['text']!r}."
            )
        words[first] = f"* {words[first]}"
        words[first + len(wanted) - 1] += " *"
    source = " ".join(["wsc:", *(word for word in words if word)])
    return Example(source, _value(row, "label", where))


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


def _value(row: Mapping[str, Any], column: str, where: str) -> Any:
    if column not in row:
        raise ValueError(f"{where} has no {column!r}; it has {', '.join(map(repr, row))}.")
    return row[column]


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    text = _value(row, column, where)
    if is_blank(text):
        raise ValueError(f"{where} has {text!r} instead of a text in {column!r}. Correct it, or drop the row.")
    return text
