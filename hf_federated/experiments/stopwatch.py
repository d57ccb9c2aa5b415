"""`Stopwatch`: the seconds of a training, including the training before an interruption."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState


class Stopwatch(TrainerCallback, ExportableState):
    """
    Measures the seconds of a training. Each checkpoint contains the seconds until its step.

    A training that resumes from a checkpoint continues with the seconds of the checkpoint. The time of steps after the
    checkpoint, which the resumed training repeats, and the time between the two trainings are not counted.

    Args:
        seconds (`float`, *optional*, defaults to `0.0`): Seconds before this training. `None` if unknown.

    Example:

    ```python
    >>> from hf_federated.experiments.stopwatch import Stopwatch

    >>> watch = Stopwatch(seconds=60.0)
    >>> watch.seconds > 60
    True
    ```
    """

    def __init__(self, seconds: float | None = 0.0) -> None:
        self._before = seconds
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float | None:
        """Seconds of the training until now. `None` if the training resumed from a checkpoint without a stopwatch."""
        return None if self._before is None else self._before + time.perf_counter() - self._start

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, in the format of `transformers.trainer_callback.ExportableState`."""
        return {"args": {"seconds": self.seconds}, "attributes": {}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        name = type(self).__name__
        if state.global_step > 0:  # The training resumed, and `state` was read from the checkpoint.
            saved = state.stateful_callbacks.get(name, {})
            self._before = saved.get("args", {}).get("seconds")
        # The trainer updates the entry at each checkpoint, and expects that the entry exists.
        state.stateful_callbacks[name] = self.state()
