"""Base class of the metrics, which writes no files by default, and helpers that several metrics share.

`evaluate.load` downloads the script of a metric from the Hub. The metrics of this package are classes. They are
created directly, work offline, and combine with `evaluate.combine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import evaluate
from datasets import Features, List, Value


# A text for each example, with one reference text or several.
TEXT_FEATURES = [
    Features({"predictions": Value("string"), "references": List(Value("string"))}),
    Features({"predictions": Value("string"), "references": Value("string")}),
]


class LocalMetric(evaluate.Metric):
    """
    An `evaluate.Metric` that keeps its inputs in memory and writes no files by default.

    Args:
        config_name (`str`, *optional*): As in `evaluate.Metric`.
        keep_in_memory (`bool`, *optional*):
            Whether to keep the inputs in memory until `compute`. Defaults to `True`, unless `cache_dir` is set or
            `num_process` is larger than 1.
        cache_dir (`str`, *optional*): Directory for inputs on disk. The metric writes only to this directory.
        kwargs (*optional*): Further arguments of `evaluate.Metric`, such as `num_process` and `experiment_id`.

    Raises:
        ValueError: From `compute`, if there are no inputs.

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

    # What the metric computes, its inputs in words, their types, and the type of array that `_compute` receives.
    summary: ClassVar[str]
    inputs: ClassVar[str]
    features_of_inputs: ClassVar[Features | list[Features]]
    array_format: ClassVar[str | None] = None

    def __init__(
        self,
        config_name: str | None = None,
        keep_in_memory: bool | None = None,
        cache_dir: str | None = None,
        **kwargs: Any,
    ) -> None:
        if keep_in_memory is None:
            keep_in_memory = cache_dir is None and kwargs.get("num_process", 1) == 1
        self.keep_in_memory = keep_in_memory  # `_build_data_dir` reads it before the parent class sets it
        super().__init__(config_name, keep_in_memory=keep_in_memory, cache_dir=cache_dir, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.summary,
            citation="",
            inputs_description=self.inputs,
            features=self.features_of_inputs,
            format=self.array_format,
        )

    def _build_data_dir(self) -> str:
        """Skip the directory that the parent class creates in the user's cache even if it writes no file."""
        return "" if self.keep_in_memory else super()._build_data_dir()

    def _infer_feature_from_batch(self, batch: dict[str, Any]) -> Features:
        """Handle empty batches: with several input formats, the parent class reads the first row without a check."""
        if isinstance(self.features, list) and not any(len(column) for column in batch.values() if column is not None):
            return self.features[0]
        return super()._infer_feature_from_batch(batch)

    def _finalize(self) -> None:
        if self.keep_in_memory and self.writer is None:
            raise self._no_inputs_error()
        super()._finalize()
        if self.process_id == 0 and len(self.data) == 0:
            raise self._no_inputs_error()

    def _no_inputs_error(self) -> ValueError:
        return ValueError(
            f"{type(self).__name__} has no inputs to compute from. Pass {', '.join(self._feature_names())} to"
            " `add_batch` or `compute`."
        )


class LabelMetric(LocalMetric):
    """Base class of the metrics whose inputs are a label ID for each example."""

    inputs = "predictions and references: one label ID per example."
    features_of_inputs = Features({"predictions": Value("int64"), "references": Value("int64")})
    array_format = "numpy"


def reference_texts(references: str | Sequence[str], row: int) -> Sequence[str]:
    """
    Return the reference texts of an example as a list.

    Args:
        references (`str` or `Sequence[str]`): The reference text, or several reference texts.
        row (`int`): Number of the example, for the error message.

    Raises:
        ValueError: If the list is empty.
    """
    texts = [references] if isinstance(references, str) else references
    if not texts:
        raise ValueError(f"Row {row} has no reference text. Add a reference, or drop the row.")
    return texts
