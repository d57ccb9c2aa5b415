"""`LoopArgumentsMixin`: a trainer whose loop has arguments of its own, which are not the user's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from transformers import TrainingArguments


if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class LoopArgumentsMixin(_Base):
    """A trainer that keeps the user's arguments while `args` are those of its loop, over rounds or over parties."""

    args: TrainingArguments
    _user_args: TrainingArguments

    @property
    def run_args(self) -> TrainingArguments:
        """The user's arguments, also while it trains and `args` are those of the loop."""
        return self._user_args

    @contextmanager
    def _arguments(self, args: TrainingArguments) -> Iterator[None]:
        """Other arguments for a while."""
        before, self.args = self.args, args
        try:
            yield
        finally:
            self.args = before
