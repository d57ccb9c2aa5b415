"""The parts of SuperGLUE's raw rows, in the layout of the benchmark's JSON lines or of `super_glue` on the Hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..base import is_blank


HIGHLIGHT = re.compile(r"\s*@highlight\s*")  # ReCoRD's mark between a news text and its summary
PLACEHOLDER = "@placeholder"  # and that of the entity which a query leaves out


class MultiRCAnswer(NamedTuple):
    """
    An answer that is right or wrong.

    Args:
        paragraph (`str`): The text.
        question (`str`): What is asked of it.
        text (`str`): The answer. A few of the benchmark's are empty, and count as the others do.
        label (`Any`): As it stands in the raw row.
        place (`str`): What tells the question from others.
    """

    paragraph: str
    question: str
    text: str
    label: Any
    place: str


class RecordQuery(NamedTuple):
    """
    A sentence with a gap for an entity.

    Args:
        passage (`str`): The text, with `@highlight` in it.
        text (`str`): The query, with `@placeholder` in it.
        entities (`tuple[str, ...]`): The different entities of the passage.
        answers (`tuple[str, ...]`): Those that are right.
        place (`str`): What tells the query from others.
    """

    passage: str
    text: str
    entities: tuple[str, ...]
    answers: tuple[str, ...]
    place: str


def multirc_answers(row: Mapping[str, Any], where: str) -> Iterator[MultiRCAnswer]:
    """
    The answers of a raw MultiRC row: all of a passage, or one on the Hub.

    Args:
        row (`Mapping[str, Any]`): The raw row.
        where (`str`): How errors name it.
    """
    if "passage" not in row:  # the Hub's layout, a row an answer
        paragraph, asked = read_text(row, "paragraph", where), read_text(row, "question", where)
        place, answer = read_value(row, "idx", where), _answer_text(row, "answer", where)
        number = f"{place['paragraph']}-{place['question']}"
        yield MultiRCAnswer(paragraph, asked, answer, read_value(row, "label", where), number)
        return
    passage = read_value(row, "passage", where)
    paragraph = read_text(passage, "text", where)
    for question in passage["questions"]:
        asked, number = read_text(question, "question", where), read_value(question, "idx", where)
        for answer in question["answers"]:
            text = _answer_text(answer, "text", where)
            # Answers of the unpublished test labels have none.
            yield MultiRCAnswer(paragraph, asked, text, answer.get("label"), f"{row.get('idx')}-{number}")


def record_queries(row: Mapping[str, Any], where: str) -> Iterator[RecordQuery]:
    """
    The queries of a raw ReCoRD row: all of a passage, or one on the Hub.

    Args:
        row (`Mapping[str, Any]`): The raw row.
        where (`str`): How errors name it.
    """
    nested = "qas" in row
    holder = read_value(row, "passage", where) if nested else row
    text = read_text(holder, "text" if nested else "passage", where)
    entities = _entities(read_value(holder, "entities", where), text, where)
    number = read_value(row, "idx", where)
    for query in row["qas"] if nested else [row]:
        if PLACEHOLDER not in read_text(query, "query", where):
            raise ValueError(
                f"{where} has a query without '{PLACEHOLDER}': {query['query']!r}. Correct it, or drop it."
            )
        place = f"{number}-{query['idx']}" if nested else f"{number['passage']}-{number['query']}"
        found = [answer["text"] if nested else answer for answer in query.get("answers") or []]
        answers = tuple(dict.fromkeys(found))
        if unknown := [answer for answer in answers if answer not in entities]:
            raise ValueError(
                f"{where} has the answer {unknown[0]!r}, which is none of the passage's entities:"
                f" {', '.join(map(repr, entities))}."
            )
        yield RecordQuery(text, query["query"], entities, answers, place)


def read_value(row: Mapping[str, Any], column: str, where: str) -> Any:
    """
    A value of a raw row.

    Args:
        row (`Mapping[str, Any]`): The row, or an object in it.
        column (`str`): Its name.
        where (`str`): How errors name the row.

    Raises:
        ValueError: If there is none of that name.
    """
    if column not in row:
        raise ValueError(f"{where} has no {column!r}; it has {', '.join(map(repr, row))}.")
    return row[column]


def read_text(row: Mapping[str, Any], column: str, where: str) -> str:
    """
    A text of a raw row.

    Args:
        row (`Mapping[str, Any]`): The row, or an object in it.
        column (`str`): Its name.
        where (`str`): How errors name the row.

    Raises:
        ValueError: If there is none of that name, or it is missing, empty, or nothing but space.
    """
    text = read_value(row, column, where)
    if is_blank(text):
        raise ValueError(f"{where} has {text!r} instead of a text in {column!r}. Correct it, or drop the row.")
    return text


def _answer_text(row: Mapping[str, Any], column: str, where: str) -> str:
    answer = read_value(row, column, where)
    if not isinstance(answer, str):
        raise ValueError(f"{where} has the answer {answer!r} instead of a text. Correct it, or drop the row.")
    return answer


def _entities(given: Sequence[Any], text: str, where: str) -> tuple[str, ...]:
    """The different entities of a passage: from spans of characters, of which the last counts too, or as texts."""
    entities = []
    for entity in given:
        name = entity if isinstance(entity, str) else text[entity["start"] : entity["end"] + 1]
        if is_blank(name) or name not in text:
            raise ValueError(
                f"{where} has the entity {entity!r}, which is not in its passage of {len(text)} characters."
            )
        entities.append(name)
    return tuple(dict.fromkeys(entities))
