"""Hides the lines with which `Trainer` announces a training, while clients train.

A client's training is one `Trainer.train()`, which announces itself with ten lines at INFO. In a federation the lines
repeat for each client in each round.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .._compat import BANNER_PREFIXES, TRAINER_LOGGER


_logger = logging.getLogger(TRAINER_LOGGER)
# Each thread has its own value, so that other trainings in the same process announce themselves.
_is_hidden: ContextVar[bool] = ContextVar("hides_trainer_banner", default=False)


def _is_shown(record: logging.LogRecord) -> bool:
    if record.levelno != logging.INFO or not _is_hidden.get():
        return True
    return not (isinstance(record.msg, str) and record.msg.startswith(BANNER_PREFIXES))


@contextmanager
def trainer_banner(shown: bool) -> Iterator[None]:
    """
    Show or hide the banner of `Trainer` inside the context, in this thread. All other records are shown.

    Args:
        shown (`bool`): Whether the banner is shown.
    """
    # A filter that is already added is not added again.
    _logger.addFilter(_is_shown)
    token = _is_hidden.set(not shown)
    try:
        yield
    finally:
        _is_hidden.reset(token)
