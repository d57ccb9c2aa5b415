"""A log with one JSON object per line, for programs that watch a server or a client.

Every record of the loggers of this library and of transformers becomes one line on standard error. A record of an
event has its facts as further fields:

| event | fields |
|---|---|
| `joined` | `client`, `num_examples` |
| `left`, `lost`, `expelled`, `refused` | `client` |
| `request` | `client`, `round`, `bytes` |
| `reply` | `client`, `round`, `bytes`, `seconds` |
| `absent` | `client`, `round` |
| `late_reply` | `client` |
| `waiting` | `client` |
| `round_begin`, `round_end` | `round`, `num_rounds` |
| `metrics` | `round`, `metrics` |
| `checkpoint` | `round` |
| `run_begin`, `run_end` | `num_rounds` |
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any

from datasets import disable_progress_bars as disable_dataset_bars
from transformers import PrinterCallback, ProgressCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils.logging import disable_progress_bar as disable_model_bars

from hf_federated.experiments.strict_json import to_strict_json
from hf_federated.server import FederatedCallback


logger = logging.getLogger(__name__)

# Loggers whose records are written.
LOGGERS = ("hf_federated", "transformers")
# Attributes of every record. Other attributes are the fields of an event.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: `time` (UTC), `level`, `logger`, `message` and the fields of an event."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        fields = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(to_strict_json(line), default=str)


class EventLogCallback(FederatedCallback):
    """Logs the events of a run: rounds, metrics and checkpoints."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log the begin of the run."""
        _log("run_begin", num_rounds=state.max_steps, round=state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log the begin of a round."""
        _log("round_begin", round=state.global_step + 1, num_rounds=state.max_steps)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log the end of a round."""
        _log("round_end", round=state.global_step, num_rounds=state.max_steps)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Log metrics."""
        _log("metrics", round=state.global_step, metrics=logs or {})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log a checkpoint."""
        _log("checkpoint", round=state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log the end of the run."""
        _log("run_end", round=state.global_step, num_rounds=state.max_steps)


def log_as_json() -> None:
    """Write the log of this process as JSON lines to standard error, without progress bars."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in LOGGERS:
        library = logging.getLogger(name)
        library.handlers = [handler]
        library.propagate = False
    logging.getLogger("hf_federated").setLevel(logging.INFO)
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").handlers = [handler]
    disable_dataset_bars()
    disable_model_bars()


def log_events(trainer: Any) -> None:
    """
    Log the events of a run, in place of the callbacks that print.

    Args:
        trainer ([`FederatedTrainer`]): The trainer.
    """
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(EventLogCallback())


def _log(event: str, **fields: Any) -> None:
    logger.info(event.replace("_", " "), extra={"event": event, **fields})
