"""`LiveReport`: a page about a run that is rewritten after each round."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from ..distributed.process_group import process_group
from ..reporting.run_page import PAGE_NAME, RunPage, write_run_page
from ..reporting.run_view import read_run
from .callbacks import FederatedCallback


logger = logging.get_logger(__name__)

# A page is written again only after this multiple of the seconds that it took last time.
_PAUSE = 100


class LiveReport(FederatedCallback):
    """
    Shows a run while it lasts: rounds, losses and metrics, clients, bytes, and the time left.

    The callback rewrites the page `_live_report.html` of the output directory after each round. The page is one file
    that needs no server and no network; a browser reads it again every five seconds. In a notebook, the last
    expression `report` of a cell shows the page. `live_report=True` of [`FederatedConfig`] adds this callback, and
    `hf-federated watch` shows the same values of any run, in a terminal.

    The page costs at most one percent of the time of the run: after a round that is short, it is not rewritten. The
    page of a killed run still shows "running", with the time at which it was written.

    Example:

    ```python
    >>> from hf_federated import LiveReport

    >>> report = LiveReport()  # callbacks=[report] of the trainer
    >>> report.path is None
    True
    ```
    """

    def __init__(self) -> None:
        # The page, from the first round on.
        self.path: Path | None = None
        self._next = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.path = Path(args.output_dir or "") / PAGE_NAME if process_group().is_main else None
        self._next = 0.0
        self.write()

    def on_round_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if time.monotonic() >= self._next:
            self.write()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.write()

    def write(self) -> None:
        """Write the page now. Training continues if the page cannot be written."""
        if self.path is None:
            return
        began = time.monotonic()
        try:
            write_run_page(read_run(self.path.parent), self.path)
        except (OSError, ValueError) as error:
            logger.warning_once(f"The page of the run cannot be written: {error}")
        self._next = time.monotonic() + _PAUSE * (time.monotonic() - began)

    def _repr_html_(self) -> str | None:
        return None if self.path is None else RunPage(self.path.parent)._repr_html_()
