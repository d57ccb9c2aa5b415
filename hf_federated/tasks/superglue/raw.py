"""Read raw SuperGLUE rows, in the layout of the benchmark's JSON lines or of `super_glue` on the Hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..columns import is_blank


HIGHLIGHT = re.compile(r"\s*@highlight\s*")  # separates a news text and its summary points in ReCoRD
PLACEHOLDER = "@placeholder"  # marks the missing entity in a ReCoRD query


class MultiRCAnswer(NamedTuple):
    """
    A correct or wrong answer to a MultiRC question.

    Args:
        paragraph (`str`): The paragraph.
        question (`str`): The question about the paragraph.
        text (`str`): The answer. A few answers of the benchmark are empty and count like all other answers.
        label (`Any`): The label in the raw row.
        question_id (`str`): An identifier of the question.
    """

    paragraph: str
    question: str
    text: str
    label: Any
    question_id: str


class RecordQuery(NamedTuple):
    """
    A sentence with a placeholder for an entity.

    Args:
        context (`str`): The news text, with `@highlight`.
        text (`str`): The query, with `@placeholder`.
        entities (`tuple[str, ...]`): The distinct entities of the news text.
        answers (`tuple[str, ...]`): The correct entities.
        question_id (`str`): An identifier of the query.
    """

    context: str
    text: str
    entities: tuple[str, ...]
    answers: tuple[str, ...]
    question_id: str


def multirc_answers(row: Mapping[str, Any], where: str) -> Iterator[MultiRCAnswer]:
    """
    Yield the answers of a raw MultiRC row: all answers of a paragraph, or a single answer in the Hub layout.

    Args:
        row (`Mapping[str, Any]`): The raw row.
        where (`str`): The name of the row in error messages.
    """
    if "passage" not in row:  # the Hub layout, with one row per answer
        paragraph, question_text = read_text(row, "paragraph", where), read_text(row, "question", where)
        index, answer = read_value(row, "idx", where), read_text(row, "answer", where, allow_empty=True)
        question_id = f"{index['paragraph']}-{index['question']}"
        yield MultiRCAnswer(paragraph, question_text, answer, read_value(row, "label", where), question_id)
        return
    passage = read_value(row, "passage", where)
    paragraph = read_text(passage, "text", where)
    for question in passage["questions"]:
        question_text, number = read_text(question, "question", where), read_value(question, "idx", where)
        for answer in question["answers"]:
            text = read_text(answer, "text", where, allow_empty=True)
            # Answers in the test split have no label, because the test labels are not public.
            yield MultiRCAnswer(paragraph, question_text, text, answer.get("label"), f"{row.get('idx')}-{number}")


def record_queries(row: Mapping[str, Any], where: str) -> Iterator[RecordQuery]:
    """
    Yield the queries of a raw ReCoRD row: all queries of a news text, or a single query in the Hub layout.

    Args:
        row (`Mapping[str, Any]`): The raw row.
        where (`str`): The name of the row in error messages.
    """
    nested = "qas" in row
    holder = read_value(row, "passage", where) if nested else row
    text = read_text(holder, "text" if nested else "passage", where)
    entities = _entities(read_value(holder, "entities", where), text, where)
    number = read_value(row, "idx", where)
    for query in row["qas"] if nested else [row]:
        if PLACEHOLDER not in read_text(query, "query", where):
            raise ValueError(
                f"{where} has a query without '{PLACEHOLDER}': {query['query']!r}. Correct the query, or drop the row."
            )
        question_id = f"{number}-{query['idx']}" if nested else f"{number['passage']}-{number['query']}"
        found = [answer["text"] if nested else answer for answer in query.get("answers") or []]
        answers = tuple(dict.fromkeys(found))
        if unknown := [answer for answer in answers if answer not in entities]:
            raise ValueError(
                f"{where} has the answer {unknown[0]!r}, which is not one of the entities of its text:"
                f" {', '.join(map(repr, entities))}. Correct the answer, or drop the row."
            )
        yield RecordQuery(text, query["query"], entities, answers, question_id)


def read_value(row: Mapping[str, Any], column: str, where: str) -> Any:
    """
    Return a value of a raw row.

    Args:
        row (`Mapping[str, Any]`): The row, or an object in the row.
        column (`str`): The name of the value.
        where (`str`): The name of the row in error messages.

    Raises:
        ValueError: If the row has no value with this name.
    """
    if column not in row:
        raise ValueError(
            f"{where} has no {column!r}; it has {', '.join(map(repr, row))}. Use the layout of the benchmark's files"
            " or of `super_glue` on the Hub."
        )
    return row[column]


def read_text(row: Mapping[str, Any], column: str, where: str, allow_empty: bool = False) -> str:
    """
    Return a text of a raw row.

    Args:
        row (`Mapping[str, Any]`): The row, or an object in the row.
        column (`str`): The name of the text.
        where (`str`): The name of the row in error messages.
        allow_empty (`bool`, *optional*, defaults to `False`): Whether the text may be empty or contain only
            whitespace.

    Raises:
        ValueError: If the row has no value with this name, or if the value is not a string, is empty or contains only
            whitespace.
    """
    text = read_value(row, column, where)
    if not isinstance(text, str) or (is_blank(text) and not allow_empty):
        raise ValueError(f"{where} has {text!r} instead of a text in {column!r}. Correct the text, or drop the row.")
    return text


def _entities(given: Sequence[Any], text: str, where: str) -> tuple[str, ...]:
    """Return the distinct entities of a text. Entities are texts, or character spans with an inclusive end."""
    entities = []
    for entity in given:
        name = entity if isinstance(entity, str) else text[entity["start"] : entity["end"] + 1]
        if is_blank(name) or name not in text:
            raise ValueError(
                f"{where} has the entity {entity!r}, which is not in its text of {len(text)} characters. Correct the"
                " entity, or drop the row."
            )
        entities.append(name)
    return tuple(dict.fromkeys(entities))
