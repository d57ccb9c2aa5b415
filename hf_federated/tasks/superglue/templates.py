"""Convert raw SuperGLUE rows to texts with label names, with the templates of FedDRS, appendix A.2.

Sources: Wang et al., "SuperGLUE: A Stickier Benchmark for General-Purpose Language Understanding Systems" (2019), for
the eight tasks and their files; "Text-Free Federated Transformers Knowledge Distillation Without GAN" (FedDRS),
appendix A.2, for the templates.

Labels are converted by name. The label numbers in the appendix are not used, because they contradict the benchmark.
For example, the appendix prints 0 for the BoolQ answer Yes, which has the number 1 in the benchmark. The appendix
shows one label name per task. The other names follow the same style: `Match`, `Same`, `Choice_two`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from datasets import ClassLabel, Dataset, Features, List, Value

from .raw import HIGHLIGHT, multirc_answers, read_text, read_value, record_queries


# The raw labels of each task, in the order of their numbers on the Hub, and the label names that models learn.
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

# Tasks whose template consists of the task name and these columns, in this order.
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
    A converted row.

    Args:
        source (`str`): The text from the template.
        label (`Any`): The label in the raw row.
        question (`str`): An identifier of the question within the raw row. Empty if the row has one question.
        answer (`str`): The candidate of this row, if a question has several candidates.
        answers (`tuple[str, ...]`): The correct answers of a ReCoRD query.
    """

    source: str
    label: Any
    question: str = ""
    answer: str = ""
    answers: tuple[str, ...] = ()


def superglue_rows(task: str, rows: Dataset, mark_span1: bool = False) -> Dataset:
    """
    Convert raw rows of a SuperGLUE task to the common format of all tasks.

    [`SuperGlueClassification`] and [`SuperGlueSeq2Seq`] read this format.

    Both layouts are supported: the benchmark's JSON lines, and `super_glue` on the Hub. Punctuation is removed, as in
    the paper's examples, except for the `?` of a MultiRC question and the `@placeholder` of a ReCoRD query. Tasks with
    several answers or candidates are converted as follows:

    - COPA: one row with both choices. The label names one of the choices;
    - MultiRC: one row per answer of a question, with the label True or False;
    - ReCoRD: one row per distinct entity of the text, with the entity as the answer to the query and the label Correct
      or Wrong;
    - WSC: one row with the pronoun between asterisks, and the label Same or Difference. The paper's template does not
      contain the noun in question (`span1_text`). Rows with the same text and pronoun but different nouns therefore
      have the same source and different labels. `mark_span1` also puts the noun between asterisks.

    Args:
        task (`str`): `"boolq"`, `"cb"`, `"copa"`, `"multirc"`, `"record"`, `"rte"`, `"wic"` or `"wsc"`.
        rows (`datasets.Dataset`): Raw rows with labels.
        mark_span1 (`bool`, *optional*, defaults to `False`): Whether to mark the noun in question in WSC rows.

    Returns:
        `datasets.Dataset`: A dataset with the columns `task`, `source` (the text), `target` (the label name),
            `question` (an identifier of the question, unique within the dataset and equal for all rows of the
            question), `answer` (the candidate, or an empty string) and `answers` (the correct answers of a ReCoRD
            query).

    Raises:
        ValueError: If the task is unknown or a column is missing. Also raised if a row lacks a text or a label, has an
            unknown label, or has an answer or a span that is not in its text. The message names the row.

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
    names = raw_label_names(task, rows)

    def convert(row: Mapping[str, Any], index: int, where: str) -> Iterator[dict[str, Any]]:
        for example in examples(task, row, where, mark_span1):
            yield {
                "task": task,
                "source": example.source,
                "target": read_label(task, example.label, names, where),
                "question": f"{task}-{example.question or index}",
                "answer": example.answer,
                "answers": list(example.answers),
            }

    return convert_rows(task, rows, FEATURES, convert)


def convert_rows(
    task: str, rows: Dataset, features: Features, convert: Callable[..., Iterator[dict[str, Any]]]
) -> Dataset:
    """
    Convert raw rows of a SuperGLUE task.

    Args:
        task (`str`): The task.
        rows (`datasets.Dataset`): Raw rows.
        features (`Features`): The columns of the converted rows.
        convert (`Callable`): Yields the converted rows of a raw row, given the raw row, its number, and its name in
            error messages.
    """

    def convert_batch(batch: Mapping[str, Sequence[Any]], indices: list[int]) -> dict[str, list[Any]]:
        converted: dict[str, list[Any]] = {name: [] for name in features}
        for position, index in enumerate(indices):
            row = {name: values[position] for name, values in batch.items()}
            for values in convert(row, index, f"Row {index} of {task!r}"):
                for name, value in values.items():
                    converted[name].append(value)
        return converted

    # Small batches limit memory: a raw row is repeated for each of its answers.
    return rows.map(
        convert_batch,
        batched=True,
        batch_size=100,
        with_indices=True,
        remove_columns=rows.column_names,
        features=features,
    )


def examples(task: str, row: Mapping[str, Any], where: str, mark_span1: bool = False) -> Iterator[Example]:
    """
    Yield the converted rows of a raw row.

    Args:
        task (`str`): A key of `LABELS`.
        row (`Mapping[str, Any]`): The raw row.
        where (`str`): The name of the row in error messages.
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
    Remove punctuation and symbols from a text, and replace whitespace with single spaces.

    Args:
        text (`str`): The text.
        keep (`str`, *optional*): Characters to keep.

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
    Fill a template: the task name, followed by each field name with its text.

    Each field except the last one ends with a full stop, unless its text ends with a question mark.

    Args:
        task (`str`): The task name.
        fields (`Mapping[str, str]`): Cleaned texts by field name, in order.
    """
    parts = [f"{name}: {text}" for name, text in fields.items()]
    ended = [part if part.endswith("?") else f"{part}." for part in parts[:-1]]
    return " ".join([task, *ended, parts[-1]])


def check_task(task: str, where: str) -> None:
    """
    Check that the task of a row is a SuperGLUE task.

    Args:
        task (`str`): The task of the row.
        where (`str`): The name of the row in error messages.

    Raises:
        ValueError: If the task is unknown.
    """
    if task not in LABELS:
        raise ValueError(f"{where} has the task {task!r}; allowed are {', '.join(map(repr, LABELS))}.")


def raw_label_names(task: str, rows: Dataset) -> list[str]:
    """
    Return the names of the raw labels of a task, in the order of their numbers.

    Args:
        task (`str`): The task.
        rows (`datasets.Dataset`): Raw rows. If the labels are a `ClassLabel`, its names are returned.

    Raises:
        ValueError: If the task is unknown.
    """
    if task not in LABELS:
        raise ValueError(f"{task!r} is not a SuperGLUE task; the tasks are {', '.join(map(repr, LABELS))}.")
    feature = rows.features.get("label")
    return feature.names if isinstance(feature, ClassLabel) else list(LABELS[task])


def read_label(task: str, value: Any, names: Sequence[str], where: str) -> str:
    """
    Convert a raw label to the label name that a model learns.

    Args:
        task (`str`): A key of `LABELS`.
        value (`Any`): A name, a boolean or a number.
        names (`Sequence[str]`): The label names in the order of their numbers.
        where (`str`): The name of the row in error messages.
    """
    allowed = LABELS[task]
    if value is None or value == -1:  # -1 is a missing label on the Hub
        raise ValueError(
            f"{where} has no label. Remove rows without a label; the labels of the test splits are not public."
        )
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


# ---- Tasks with several answers or spans per row


def _multirc(row: Mapping[str, Any], where: str) -> Iterator[Example]:
    for answer in multirc_answers(row, where):
        fields = {
            "question": clean(answer.question, keep="?"),
            "answer": clean(answer.text),
            "paragraph": clean(answer.paragraph),
        }
        yield Example(fill("multirc", fields), answer.label, answer.question_id, answer.text)


def _record(row: Mapping[str, Any], where: str) -> Iterator[Example]:
    for query in record_queries(row, where):
        text, passage = clean(query.text, keep="@"), clean(HIGHLIGHT.sub(" ", query.context))
        for entity in query.entities:
            source = fill("record", {"answer": clean(entity), "query": text, "passage": passage})
            label = entity in query.answers if query.answers else None
            yield Example(source, label, query.question_id, entity, query.answers)


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
    Find a span of a WSC row in its text.

    Args:
        row (`Mapping[str, Any]`): The raw row.
        span (`str`): `"span1"`, the noun, or `"span2"`, the pronoun.
        words (`Sequence[str]`): The words of the text, each one [`clean`]ed.
        where (`str`): The name of the row in error messages.

    Returns:
        `tuple[int, int]`: The position of the first word and the number of words.

    Raises:
        ValueError: If the span is not in the text.
    """
    spans = row["target"] if "target" in row else row  # the benchmark's files store the spans in an object
    wanted = clean(read_text(spans, f"{span}_text", where)).split()
    first = _find(words, wanted, read_value(spans, f"{span}_index", where))
    if first is None:
        raise ValueError(
            f"{where} has {span}_text {spans[f'{span}_text']!r}, which is not in its text: {row['text']!r}. Correct"
            " the span, or drop the row."
        )
    return first, len(wanted)


def _find(words: Sequence[str], wanted: Sequence[str], expected: int) -> int | None:
    """
    Find consecutive words in a text, and return the position of the first word closest to the expected position.

    A word of the text matches if it begins with the wanted word, for example in the genitive. Asterisks around words
    are ignored. The closest match is used because a few indices of the benchmark are slightly wrong.
    """
    if not wanted:
        return None
    plain = [word.replace("*", "").strip() for word in words]
    windows = {first: plain[first : first + len(wanted)] for first in range(len(plain) - len(wanted) + 1)}
    starts = [first for first, window in windows.items() if all(map(str.startswith, window, wanted))]
    return min(
        starts,
        key=lambda start: (start != expected, windows[start] != list(wanted), abs(start - expected)),
        default=None,
    )
