"""What the metrics share: no file and no download unless asked for, and errors that say what is missing.

`evaluate.load` fetches a metric's script from the Hub. These are classes of the package: they are built directly, work
offline, and combine with `evaluate.combine`.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import evaluate
from datasets import Features


class LocalMetric(evaluate.Metric):
    """
    An `evaluate.Metric` that keeps its rows in memory and writes nothing.

    Args:
        config_name (`str`, *optional*): As in `evaluate.Metric`.
        keep_in_memory (`bool`, *optional*):
            Whether rows stay in memory until `compute`. By default they do, unless `cache_dir` or several processes
            (`num_process`) ask for files.
        cache_dir (`str`, *optional*): Folder for rows on disk. Nothing is written outside it.
        kwargs (*optional*): Further arguments of `evaluate.Metric`, such as `num_process` and `experiment_id`.

    Raises:
        ValueError: From `compute`, if there are no rows.

    Example:

    ```python
    >>> from hf_federated.tasks.metrics import Accuracy

    >>> accuracy = Accuracy()
    >>> accuracy.add(prediction=1, reference=1)
    >>> accuracy.add_batch(predictions=[0, 2], references=[0, 1])
    >>> round(accuracy.compute()["accuracy"], 3)
    0.667

    ```
    """

    def __init__(
        self,
        config_name: str | None = None,
        keep_in_memory: bool | None = None,
        cache_dir: str | None = None,
        **kwargs: Any,
    ) -> None:
        if keep_in_memory is None:
            keep_in_memory = cache_dir is None and kwargs.get("num_process", 1) == 1
        self.keep_in_memory = keep_in_memory  # read by _build_data_dir, before the parent sets it
        super().__init__(config_name, keep_in_memory=keep_in_memory, cache_dir=cache_dir, **kwargs)

    def _build_data_dir(self) -> str:
        """The parent creates a folder in the user's cache even where no file will lie in it."""
        return "" if self.keep_in_memory else super()._build_data_dir()

    def _infer_feature_from_batch(self, batch: dict[str, Any]) -> Features:
        """The parent looks at a first row, where a metric has several forms of input, whether there is one or not."""
        if isinstance(self.features, list) and not any(len(column) for column in batch.values() if column is not None):
            return self.features[0]
        return super()._infer_feature_from_batch(batch)

    def _finalize(self) -> None:
        if self.keep_in_memory and self.writer is None:
            raise self._no_rows()
        super()._finalize()
        if self.process_id == 0 and len(self.data) == 0:
            raise self._no_rows()

    def _no_rows(self) -> ValueError:
        return ValueError(
            f"{type(self).__name__} has no rows to compute from. Give them to `add_batch` or `compute`:"
            f" {', '.join(self._feature_names())}."
        )


def require_extra(module: str, package: str, user: str) -> None:
    """
    Raises `ImportError`, with the extra that brings it, if a package is not installed.

    Args:
        module (`str`): The name to import.
        package (`str`): The name to install.
        user (`str`): What needs it.

    Example:

    ```python
    >>> from hf_federated.tasks.metrics.base import require_extra

    >>> require_extra("no_such_module", "no-such-package", "SpanF1")
    Traceback (most recent call last):
    ImportError: SpanF1 needs no-such-package. Install it with: pip install hf-federated[metrics]

    ```
    """
    if importlib.util.find_spec(module) is None:
        raise ImportError(f"{user} needs {package}. Install it with: pip install hf-federated[metrics]")
