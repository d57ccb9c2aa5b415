"""SuperGLUE's raw rows as cloze questions with candidates for the blank: the templates of FL-GLM, table 5.

Sources: "Safely Learning with Private Data: A Federated Learning Framework for Large Language Model" (FL-GLM), section
4.1.1 and table 5, which takes them from GLM (Du et al., 2022), section 3.1. What the table does not say is done as in
GLM: COPA asks for an effect with "so" and for a cause with "because"; a text before punctuation of the template loses
its own; a choice of COPA begins in lower case, within its sentence; WSC's pronoun stands between asterisks in the
sentence too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from datasets import ClassLabel, Dataset, Features, List, Value
from transformers.utils import logging

from ..base import is_blank
from .raw import HIGHLIGHT, PLACEHOLDER, multirc_answers, read_text, read_value, record_queries
from .templates import LABELS, clean, find_span, read_label


logger = logging.get_logger(__name__)

MASK = "[M]"  # the blank, as the paper writes it
NO_ANSWER = -1  # the label of a row of which no candidate is known to be right

# The words that answer, in the order of `LABELS`. Candidates of the other tasks come from their rows.
WORDS: dict[str, tuple[str, ...]] = {
    "boolq": ("no", "yes"),
    "cb": ("yes", "no", "maybe"),
    "multirc": ("no", "yes"),
    "rte": ("yes", "no"),
    "wic": ("no", "yes"),
}

FEATURES = Features(
    {
        "id": Value("string"),
        "task": Value("string"),
        "source": Value("string"),
        "mask_start": Value("int32"),
        "passage_start": Value("int32"),
        "passage_end": Value("int32"),
        "candidates": List(Value("string")),
        "label": Value("int32"),
        "target": Value("string"),
        "question": Value("string"),
        "answers": List(Value("string")),
    }
)


class _Passage(str):
    """The part of a template that may be cut."""


class _Blank(str):
    """The part of a template that is asked for."""


_BLANK = _Blank(MASK)


class Cloze(NamedTuple):
    """
    A row for the model.

    Args:
        parts (`list[str]`): The filled template, the blank among them.
        label (`Any`): As it stands in the raw row.
        candidates (`Sequence[str]`): What may fill the blank; the task's words by default.
        question (`str`): What tells the questions of a raw row apart; one question by default.
        answers (`tuple[str, ...]`): The right answers of a ReCoRD query.
    """

    parts: list[str]
    label: Any
    candidates: Sequence[str] = ()
    question: str = ""
    answers: tuple[str, ...] = ()


def superglue_cloze_rows(task: str, rows: Dataset, answered_only: bool = False) -> Dataset:
    """
    Raw rows of a SuperGLUE task as cloze questions, which all tasks share and [`SuperGlueCloze`] reads.

    Both layouts are taken: the benchmark's own JSON lines and that of `super_glue` on the Hub. With ``[M]`` for the
    blank they are (FL-GLM, table 5):

    - ReCoRD: `passage query`, the blank at the query's `@placeholder`; candidates are the passage's entities;
    - COPA: `"choice1" or "choice2"? premise, so [M].` (`premise because [M].` where a cause is asked for); candidates
      are the choices;
    - WSC: `sentence The pronoun '*p*' refers to [M].`; candidates are nouns;
    - RTE: `"hypothesis"? [M] "premise"`; yes, no;
    - BoolQ: `passage. Question: question? Answer: [M].`; yes, no;
    - WiC: `"sentence1" / "sentence2" Similar sense of word? [M].`; yes, no;
    - CB: `"hypothesis"? [M], "premise"`; yes, no, maybe;
    - MultiRC, a row for each answer: `passage. Question: question? Is it answer? [M].`; yes, no.

    WSC says of one noun (`span1_text`) whether the pronoun refers to it. It does if it is the likeliest candidate; the
    others are the nouns that other rows ask about for the same text, and those of a column `candidates`, if raw rows
    have one. Where a noun is found wrong, the right one is not known, so such a row can be evaluated but teaches
    nothing (GLM trains on the others as well).

    Args:
        task (`str`): `"boolq"`, `"cb"`, `"copa"`, `"multirc"`, `"record"`, `"rte"`, `"wic"` or `"wsc"`.
        rows (`datasets.Dataset`): Raw rows with labels.
        answered_only (`bool`, *optional*, defaults to `False`): Leave out rows without a right candidate (WSC, and
            queries of ReCoRD without answers), as training needs it.

    Returns:
        `datasets.Dataset`: With the columns `id` (unique), `task`, `source` (the filled template), `mask_start` (where
        its `[M]` begins), `passage_start` and `passage_end` (what of it may be cut; equal where nothing may),
        `candidates`, `label` (the number of the right candidate; −1 where none is known), `target` (the label's name,
        as in [`superglue_rows`]), `question` (the same for all rows of a question, and for no others of this data set)
        and `answers` (the right answers of a ReCoRD query).

    Raises:
        ValueError: If the task is unknown, a column is missing, or a row lacks a text or a label, has an unknown
            label, or an answer or a span that is not in its text. The message names the row.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated.tasks import superglue_cloze_rows

    >>> raw = Dataset.from_dict({"premise": ["It's cold."], "hypothesis": ["It is warm."], "label": ["contradiction"]})
    >>> row = superglue_cloze_rows("cb", raw)[0]
    >>> row["source"], row["candidates"], row["label"]
    ('"It is warm"? [M], "It\\'s cold."', ['yes', 'no', 'maybe'], 1)

    ```
    """
    if task not in LABELS:
        raise ValueError(f"{task!r} is no task of SuperGLUE; its tasks are {', '.join(map(repr, LABELS))}.")
    feature = rows.features.get("label")
    names = feature.names if isinstance(feature, ClassLabel) else list(LABELS[task])
    nouns = _nouns_by_text(rows) if task == "wsc" else {}

    def convert(batch: Mapping[str, Sequence[Any]], indices: list[int]) -> dict[str, list[Any]]:
        converted: dict[str, list[Any]] = {name: [] for name in FEATURES}
        for position, index in enumerate(indices):
            row = {name: values[position] for name, values in batch.items()}
            where = f"Row {index} of {task!r}"
            for number, cloze in enumerate(clozes(task, row, where, nouns)):
                target = read_label(task, cloze.label, names, where)
                answer = _right_candidate(task, target, cloze)
                if answered_only and answer == NO_ANSWER:
                    continue
                values = {
                    **_join(cloze.parts),
                    "id": f"{task}-{index}-{number}",
                    "task": task,
                    "candidates": list(cloze.candidates or WORDS[task]),
                    "label": answer,
                    "target": target,
                    "question": f"{task}-{cloze.question or index}",
                    "answers": list(cloze.answers),
                }
                for name, value in values.items():
                    converted[name].append(value)
        return converted

    # Passages repeat for each of their answers, so few raw rows are many megabytes.
    columns = list(rows.column_names)
    kwargs: dict[str, Any] = {"batch_size": 100, "remove_columns": columns, "features": FEATURES}
    converted = rows.map(convert, batched=True, with_indices=True, **kwargs)
    if alone := sum(len(candidates) == 1 for candidates in converted["candidates"]):
        logger.warning(
            f"{alone} of {len(converted)} rows of {task!r} have one candidate only, which is always the likeliest."
            " Give the raw rows a column 'candidates' with other nouns of their texts."
        )
    return converted


def clozes(task: str, row: Mapping[str, Any], where: str, nouns: Mapping[str, Sequence[str]]) -> Iterator[Cloze]:
    """
    What a raw row becomes.

    Args:
        task (`str`): A key of `LABELS`.
        row (`Mapping[str, Any]`): The raw row.
        where (`str`): How errors name it.
        nouns (`Mapping[str, Sequence[str]]`): Of WSC, the nouns that are asked about for a text.
    """
    if task == "multirc":
        yield from _multirc(row, where)
    elif task == "record":
        yield from _record(row, where)
    elif task == "wsc":
        yield _wsc(row, where, nouns)
    elif task == "copa":
        yield _copa(row, where)
    else:
        yield Cloze(_yes_or_no(task, row, where), read_value(row, "label", where))


def _yes_or_no(task: str, row: Mapping[str, Any], where: str) -> list[str]:
    def text(column: str) -> str:
        return read_text(row, column, where).strip()

    if task == "boolq":
        passage, question = _unended(text("passage")), _unended(text("question"))
        return [_Passage(passage), ". Question: ", question, "? Answer: ", _BLANK, "."]
    if task == "wic":
        return [
            '"',
            text("sentence1"),
            '" / "',
            text("sentence2"),
            f'" Similar sense of {text("word")}? ',
            _BLANK,
            ".",
        ]
    between = " " if task == "rte" else ", "
    return ['"', _unended(text("hypothesis")), '"? ', _BLANK, between, '"', _Passage(text("premise")), '"']


def _copa(row: Mapping[str, Any], where: str) -> Cloze:
    choices = []
    for column in ("choice1", "choice2"):
        choice = _unended(read_text(row, column, where))
        if not choice:
            raise ValueError(f"{where} has nothing but punctuation in {column!r}.")
        choices.append(_lower_first(choice))
    joints = {"effect": ", so ", "cause": " because "}
    asked = read_text(row, "question", where)
    if asked not in joints:
        raise ValueError(f"{where} asks for {asked!r}; allowed are {', '.join(map(repr, joints))}.")
    premise = _unended(read_text(row, "premise", where))
    parts = ['"', choices[0], '" or "', choices[1], '"? ', premise, joints[asked], _BLANK, "."]
    return Cloze(parts, read_value(row, "label", where), choices)


def _multirc(row: Mapping[str, Any], where: str) -> Iterator[Cloze]:
    for answer in multirc_answers(row, where):
        asked = f". Question: {_unended(answer.question)}? Is it {_unended(answer.text)}? "
        parts = [_Passage(_unended(answer.paragraph)), asked, _BLANK, "."]
        yield Cloze(parts, answer.label, question=answer.place)


def _record(row: Mapping[str, Any], where: str) -> Iterator[Cloze]:
    for query in record_queries(row, where):
        passage = HIGHLIGHT.sub("\n- ", query.passage).strip()
        before, _, after = query.text.strip().partition(PLACEHOLDER)
        parts = [_Passage(passage), "\n", before, _BLANK, after]
        # ReCoRD's label is of a candidate; its rows here have all of them, and a right one.
        yield Cloze(parts, True, query.entities, query.place, query.answers)


def _wsc(row: Mapping[str, Any], where: str, nouns: Mapping[str, Sequence[str]]) -> Cloze:
    words = read_text(row, "text", where).split()
    first, number = find_span(row, "span2", [clean(word) for word in words], where)
    spans = row["target"] if "target" in row else row  # in the benchmark's own files they are an object
    pronoun = read_text(spans, "span2_text", where).strip()
    last = words[first + number - 1]
    ending = last.rfind(pronoun.split()[-1]) + len(pronoun.split()[-1]) if pronoun.split()[-1] in last else len(last)
    words[first + number - 1] = f"{last[:ending]}*{last[ending:]}"
    words[first] = re.sub(r"\w", r"*\g<0>", words[first], count=1)
    noun = read_text(spans, "span1_text", where).strip()
    candidates = {clean(noun).lower(): noun}
    for rival in [*_own_candidates(row), *nouns[_text_key(row["text"])]]:
        candidates.setdefault(clean(rival).lower(), rival)
    parts = [" ".join(words), f" The pronoun '*{pronoun}*' refers to ", _BLANK, "."]
    return Cloze(parts, read_value(row, "label", where), list(candidates.values()))


def _nouns_by_text(rows: Dataset) -> dict[str, list[str]]:
    """The nouns that rows of a WSC text ask about."""
    nouns = defaultdict(list)
    for row in rows.select_columns([name for name in ("text", "target", "span1_text") if name in rows.column_names]):
        spans = row.get("target") or row
        if not is_blank(row.get("text")) and not is_blank(spans.get("span1_text")):  # else the row is refused by name
            nouns[_text_key(row["text"])].append(spans["span1_text"].strip())
    return dict(nouns)


def _text_key(text: str) -> str:
    return clean(text).lower()


def _own_candidates(row: Mapping[str, Any]) -> list[str]:
    """Nouns that a raw row brings, as texts or, in GLM's files, as objects with a text."""
    given = [noun if isinstance(noun, str) else noun["text"] for noun in row.get("candidates") or []]
    return [noun.strip() for noun in given if not is_blank(noun)]


def _right_candidate(task: str, target: str, cloze: Cloze) -> int:
    """Its number; −1 where none is known."""
    if task == "record":
        return list(cloze.candidates).index(cloze.answers[0]) if cloze.answers else NO_ANSWER
    if task == "wsc":  # the first is the noun that the label is of
        return 0 if target == LABELS[task]["True"] else NO_ANSWER
    return list(LABELS[task].values()).index(target)


def _join(parts: Sequence[str]) -> dict[str, Any]:
    """A filled template as one text, with the places of the blank and of the passage."""
    places = {"mask_start": 0, "passage_start": 0, "passage_end": 0}
    text = ""
    for part in parts:
        if isinstance(part, _Blank):
            places["mask_start"] = len(text)
        elif isinstance(part, _Passage):
            places |= {"passage_start": len(text), "passage_end": len(text) + len(part)}
        text += part
    return {"source": text, **places}


def _unended(text: str) -> str:
    """A text without the punctuation at its end, for which the template has its own."""
    return text.strip().rstrip(".?!,;: ")


def _lower_first(text: str) -> str:
    """A sentence as it goes on within another one."""
    return text if re.match(r"I\b", text) else text[:1].lower() + text[1:]
