"""
Hide messages of other libraries that repeat for each recipe and require no action.

These are the report that a classification head is new, the progress bars of files that are read or written at once,
and the warning that memory is not pinned for a GPU where there is none. All other messages are shown.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as transformers_logging


# A progress bar appears after this number of seconds.
BAR_DELAY = 2.0
PIN_MEMORY = "'pin_memory' argument is set as true but"
LOAD_REPORT = " LOAD REPORT"
# The rows of a report: the weights of a new head, and the weights of a pretraining head that a task does not use.
_ROW = re.compile(r"^(\S+)\s+\| (?:\x1b\[[0-9;]*m)*([A-Z]+)", re.MULTILINE)
_NEW_HEAD = re.compile(r"(classifier|score|qa_outputs|pre_classifier)\.")
_UNUSED_HEAD = re.compile(r"(cls|lm_head|vocab_\w+|predictions|discriminator_predictions)\.|(\w+\.)?pooler\.")


@contextmanager
def without_idle_messages() -> Iterator[None]:
    """Hide the messages inside the context, in all threads."""
    handlers = logging.getLogger("transformers").handlers
    previous = transformers_logging.set_tqdm_hook(_delayed_bar)
    for handler in handlers:
        handler.addFilter(is_informative)
    # A filter at the end of the list would be behind the filters of the user.
    warnings.filterwarnings("ignore", re.escape(PIN_MEMORY), UserWarning)
    added = warnings.filters[0]
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)
        for handler in handlers:
            handler.removeFilter(is_informative)
        if added in warnings.filters:
            warnings.filters.remove(added)  # type: ignore[attr-defined]  # declared as a sequence


def is_informative(record: logging.LogRecord) -> bool:
    """
    Whether a record of transformers is shown.

    A load report is hidden if it lists only a new head of a task, and unused weights of a head for pretraining.

    Args:
        record (`logging.LogRecord`): The record.
    """
    text = record.getMessage()
    if LOAD_REPORT not in text:
        return True
    patterns = {"MISSING": _NEW_HEAD, "UNEXPECTED": _UNUSED_HEAD}
    rows = [(key, status) for key, status in _ROW.findall(text) if key != "Key"]
    return not rows or not all(status in patterns and patterns[status].match(key) for key, status in rows)


def _delayed_bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Build a progress bar that appears only if the work takes longer than `BAR_DELAY`."""
    return factory(*args, **{"delay": BAR_DELAY, **kwargs})
