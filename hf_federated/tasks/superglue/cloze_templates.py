"""Convert raw SuperGLUE rows to cloze questions with candidates for the blank, with the templates of FL-GLM, table 5.

Sources: "Safely Learning with Private Data: A Federated Learning Framework for Large Language Model" (FL-GLM), section
4.1.1 and table 5, which takes the templates from GLM (Du et al., 2022), section 3.1. Details that the table does not
define follow GLM:

- COPA asks for an effect with "so" and for a cause with "because". Choices begin in lower case within the sentence;
- a text before punctuation of the template loses its final punctuation;
- the pronoun of WSC is between asterisks in the sentence as well.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from datasets import Dataset, Features, List, Value
from transformers.utils import logging

from ..candidates import NO_ANSWER
from ..columns import is_blank
from .raw import HIGHLIGHT, PLACEHOLDER, multirc_answers, read_text, read_value, record_queries
from .templates import LABELS, clean, convert_rows, find_span, raw_label_names, read_label


logger = logging.get_logger(__name__)

MASK = "[M]"  # the blank, written as in the paper

# The candidate words of each task, in the order of `LABELS`. The rows of the other tasks contain their candidates.
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
    """The part of a template that can be truncated."""


class _Blank(str):
    """The part of a template that the model fills."""


_BLANK = _Blank(MASK)


class Cloze(NamedTuple):
    """
    A cloze question.

    Args:
        parts (`list[str]`): The parts of the filled template, including the blank.
        label (`Any`): The label in the raw row.
        candidates (`Sequence[str]`): The candidates for the blank. Defaults to the words of the task.
        question (`str`): An identifier of the question within the raw row. Empty if the row has one question.
        answers (`tuple[str, ...]`): The correct answers of a ReCoRD query.
    """

    parts: list[str]
    label: Any
    candidates: Sequence[str] = ()
    question: str = ""
    answers: tuple[str, ...] = ()


def superglue_cloze_rows(task: str, rows: Dataset, answered_only: bool = False) -> Dataset:
    """
    Convert raw rows of a SuperGLUE task to cloze questions in the common format of all tasks.

    [`SuperGlueCloze`] reads this format. Both layouts are supported: the benchmark's JSON lines, and `super_glue` on
    the Hub. The templates, with ``[M]`` for the blank, are (FL-GLM, table 5):

    - ReCoRD: `passage query`, with the blank at the query's `@placeholder`. The candidates are the entities of the
      text;
    - COPA: `"choice1" or "choice2"? premise, so [M].` (`premise because [M].` if the question is for a cause). The
      candidates are the choices;
    - WSC: `sentence The pronoun '*p*' refers to [M].` The candidates are nouns;
    - RTE: `"hypothesis"? [M] "premise"`. The candidates are yes and no;
    - BoolQ: `passage. Question: question? Answer: [M].` The candidates are yes and no;
    - WiC: `"sentence1" / "sentence2" Similar sense of word? [M].` The candidates are yes and no;
    - CB: `"hypothesis"? [M], "premise"`. The candidates are yes, no and maybe;
    - MultiRC, with one row per answer: `passage. Question: question? Is it answer? [M].` The candidates are yes and
      no.

    The label of a WSC row states whether the pronoun refers to a certain noun (`span1_text`). The prediction is true
    if this noun is the most likely candidate. The other candidates are the nouns of other rows with the same text, and
    the nouns in the optional raw column `candidates`. If the label is false, the correct noun is unknown. Such rows
    can be used for evaluation, but not for training (GLM trains on them as well).

    Args:
        task (`str`): `"boolq"`, `"cb"`, `"copa"`, `"multirc"`, `"record"`, `"rte"`, `"wic"` or `"wsc"`.
        rows (`datasets.Dataset`): Raw rows with labels.
        answered_only (`bool`, *optional*, defaults to `False`): Whether to remove rows without a correct candidate
            (WSC, and ReCoRD queries without answers). Training requires it.

    Returns:
        `datasets.Dataset`: A dataset with the columns `id` (unique), `task`, `source` (the filled template),
            `mask_start` (the position of `[M]`), `passage_start` and `passage_end` (the part that can be truncated;
            both are equal if there is none), `candidates`, `label` (the number of the correct candidate, or −1 if it
            is unknown), `target` (the label name, as in [`superglue_rows`]), `question` (an identifier of the
            question, unique within the dataset and equal for all rows of the question) and `answers` (the correct
            answers of a ReCoRD query). Positions are in characters.

    Raises:
        ValueError: If the task is unknown or a column is missing. Also raised if a row lacks a text or a label, has an
            unknown label, or has an answer or a span that is not in its text. The message names the row.

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
    names = raw_label_names(task, rows)
    nouns = _nouns_by_text(rows) if task == "wsc" else {}

    def convert(row: Mapping[str, Any], index: int, where: str) -> Iterator[dict[str, Any]]:
        for number, cloze in enumerate(build_clozes(task, row, where, nouns)):
            target = read_label(task, cloze.label, names, where)
            answer = _correct_candidate(task, target, cloze)
            if answered_only and answer == NO_ANSWER:
                continue
            yield {
                **_join(cloze.parts),
                "id": f"{task}-{index}-{number}",
                "task": task,
                "candidates": list(cloze.candidates or WORDS[task]),
                "label": answer,
                "target": target,
                "question": f"{task}-{cloze.question or index}",
                "answers": list(cloze.answers),
            }

    converted = convert_rows(task, rows, FEATURES, convert)
    if num_single := sum(len(candidates) == 1 for candidates in converted["candidates"]):
        logger.warning(
            f"{num_single} of {len(converted)} rows of {task!r} have only one candidate, so this candidate is always"
            " the prediction. Add a column 'candidates' with other nouns of the texts to the raw rows."
        )
    return converted


def build_clozes(task: str, row: Mapping[str, Any], where: str, nouns: Mapping[str, Sequence[str]]) -> Iterator[Cloze]:
    """
    Yield the cloze questions of a raw row.

    Args:
        task (`str`): A key of `LABELS`.
        row (`Mapping[str, Any]`): The raw row.
        where (`str`): The name of the row in error messages.
        nouns (`Mapping[str, Sequence[str]]`): For WSC, the nouns in question by text.
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
        passage, question = _strip_end(text("passage")), _strip_end(text("question"))
        return [_Passage(passage), ". Question: ", question, "? Answer: ", _BLANK, "."]
    if task == "wic":
        sentences = f'"{text("sentence1")}" / "{text("sentence2")}"'
        return [f"{sentences} Similar sense of {text('word')}? ", _BLANK, "."]
    between = " " if task == "rte" else ", "
    return ['"', _strip_end(text("hypothesis")), '"? ', _BLANK, between, '"', _Passage(text("premise")), '"']


def _copa(row: Mapping[str, Any], where: str) -> Cloze:
    choices = []
    for column in ("choice1", "choice2"):
        choice = _strip_end(read_text(row, column, where))
        if not choice:
            raise ValueError(f"{where} has nothing but punctuation in {column!r}. Correct the text, or drop the row.")
        choices.append(_lower_first(choice))
    connectives = {"effect": ", so ", "cause": " because "}
    question = read_text(row, "question", where)
    if question not in connectives:
        raise ValueError(f"{where} has the question {question!r}; allowed are {', '.join(map(repr, connectives))}.")
    premise = _strip_end(read_text(row, "premise", where))
    parts = ['"', choices[0], '" or "', choices[1], '"? ', premise, connectives[question], _BLANK, "."]
    return Cloze(parts, read_value(row, "label", where), choices)


def _multirc(row: Mapping[str, Any], where: str) -> Iterator[Cloze]:
    for answer in multirc_answers(row, where):
        question = f". Question: {_strip_end(answer.question)}? Is it {_strip_end(answer.text)}? "
        parts = [_Passage(_strip_end(answer.paragraph)), question, _BLANK, "."]
        yield Cloze(parts, answer.label, question=answer.question_id)


def _record(row: Mapping[str, Any], where: str) -> Iterator[Cloze]:
    for query in record_queries(row, where):
        passage = HIGHLIGHT.sub("\n- ", query.context).strip()
        before, _, after = query.text.strip().partition(PLACEHOLDER)
        parts = [_Passage(passage), "\n", before, _BLANK, after]
        # ReCoRD labels refer to a single candidate. Here a row has all candidates, so its label is always true.
        yield Cloze(parts, True, query.entities, query.question_id, query.answers)


def _wsc(row: Mapping[str, Any], where: str, nouns: Mapping[str, Sequence[str]]) -> Cloze:
    words = read_text(row, "text", where).split()
    first, number = find_span(row, "span2", [clean(word) for word in words], where)
    spans = row["target"] if "target" in row else row  # the benchmark's files store the spans in an object
    pronoun = read_text(spans, "span2_text", where).strip()
    last = words[first + number - 1]
    ending = last.rfind(pronoun.split()[-1]) + len(pronoun.split()[-1]) if pronoun.split()[-1] in last else len(last)
    words[first + number - 1] = f"{last[:ending]}*{last[ending:]}"
    words[first] = re.sub(r"\w", r"*\g<0>", words[first], count=1)
    noun = read_text(spans, "span1_text", where).strip()
    candidates = {clean(noun).lower(): noun}
    for candidate in [*_extra_candidates(row), *nouns[_text_key(row["text"])]]:
        candidates.setdefault(clean(candidate).lower(), candidate)
    parts = [" ".join(words), f" The pronoun '*{pronoun}*' refers to ", _BLANK, "."]
    return Cloze(parts, read_value(row, "label", where), list(candidates.values()))


def _nouns_by_text(rows: Dataset) -> dict[str, list[str]]:
    """Collect the nouns in question of all WSC rows by text."""
    nouns = defaultdict(list)
    for row in rows.select_columns([name for name in ("text", "target", "span1_text") if name in rows.column_names]):
        spans = row.get("target") or row
        # Blank values are skipped here. Converting the row raises an error that names the row.
        if not is_blank(row.get("text")) and not is_blank(spans.get("span1_text")):
            nouns[_text_key(row["text"])].append(spans["span1_text"].strip())
    return dict(nouns)


def _text_key(text: str) -> str:
    return clean(text).lower()


def _extra_candidates(row: Mapping[str, Any]) -> list[str]:
    """Return the nouns in the column `candidates`, which holds texts or, in GLM's files, objects with a text."""
    given = [noun if isinstance(noun, str) else noun["text"] for noun in row.get("candidates") or []]
    return [noun.strip() for noun in given if not is_blank(noun)]


def _correct_candidate(task: str, target: str, cloze: Cloze) -> int:
    """Return the number of the correct candidate, or −1 if it is unknown."""
    if task == "record":
        return list(cloze.candidates).index(cloze.answers[0]) if cloze.answers else NO_ANSWER
    if task == "wsc":  # the label refers to the first candidate
        return 0 if target == LABELS[task]["True"] else NO_ANSWER
    return list(LABELS[task].values()).index(target)


def _join(parts: Sequence[str]) -> dict[str, Any]:
    """Join the parts of a filled template, and locate the blank and the part that can be truncated."""
    positions = {"mask_start": 0, "passage_start": 0, "passage_end": 0}
    text = ""
    for part in parts:
        if isinstance(part, _Blank):
            positions["mask_start"] = len(text)
        elif isinstance(part, _Passage):
            positions |= {"passage_start": len(text), "passage_end": len(text) + len(part)}
        text += part
    return {"source": text, **positions}


def _strip_end(text: str) -> str:
    """Remove the punctuation at the end of a text, because the template adds its own punctuation."""
    return text.strip().rstrip(".?!,;: ")


def _lower_first(text: str) -> str:
    """Convert the first letter to lower case for use within a sentence, except for the word I."""
    return text if re.match(r"I\b", text) else text[:1].lower() + text[1:]
