"""Garbage collections, of which every `train()` of a client makes one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_gc() -> Iterator[None]:
    """
    Collections inside pass over what exists by now, which is mostly imported modules: a million objects take half a
    second each time, which of a short local training is more than the training.

    Where an application has frozen most of its objects by `gc.freeze()` itself, nothing is done: to unfreeze would
    undo that.

    Example:

    ```python
    >>> import gc
    >>> from hf_federated.utils.gc import frozen_gc
    >>> gc.unfreeze()
    >>> with frozen_gc():
    ...     print(len(gc.get_objects()) < gc.get_freeze_count())
    True
    >>> gc.get_freeze_count()
    0
    ```
    """
    if gc.get_freeze_count() > len(gc.get_objects()):
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
