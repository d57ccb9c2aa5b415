"""The predictions of a run for single test examples, in a compressed file in the folder of the run.

For tasks with one label per example, a benchmark stores whether the prediction for each test example is correct, and
the log-probability of its label. The hash of the raw row identifies an example, so two runs can be paired by example.
NumPy reads the file without pickle.
"""

from __future__ import annotations

import io
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset

from hf_federated.data.source import row_hashes
from hf_federated.experiments.calibration import log_probabilities
from hf_federated.tasks.label_logits import LabelLogits
from hf_federated.utils.storage import write_private


PREDICTIONS_NAME = "predictions.npz"
# Permissions of the file, which is published with the records of a benchmark.
PUBLIC = 0o644
# The key of the test examples. The examples of `data.further_test_splits` have the name of their split as the key.
MAIN_TEST = ""
_ARRAYS = {"rows": np.uint64, "correct": np.float32, "log_probability": np.float32}
_FURTHER = "further/"


@dataclass(frozen=True)
class ExamplePredictions:
    """
    The predictions of a run for test examples.

    Args:
        rows (`np.ndarray` of shape `(examples,)`, `uint64`):
            The hash of each raw row, as in [`~hf_federated.data.source.row_hashes`].
        correct (`np.ndarray` of shape `(examples,)`, `float32`):
            1 if the prediction is correct, otherwise 0. For a baseline with several models, the share of the models
            whose prediction is correct.
        log_probability (`np.ndarray` of shape `(examples,)`, `float32`):
            The log-probability of the label, in nats. For several models, the mean. NaN if a logit is not finite.

    Raises:
        ValueError: If the arrays have different lengths or other types.

    Example:

    ```python
    >>> import numpy as np
    >>> from datasets import Dataset
    >>> from hf_federated.experiments.predictions import ExamplePredictions
    >>> from hf_federated.tasks.label_logits import LabelLogits

    >>> rows = Dataset.from_dict({"text": ["fine", "dull"], "label": [1, 1]})
    >>> logits = LabelLogits(np.log([[1, 3], [1, 1]]), np.array([1, 1]))
    >>> predictions = ExamplePredictions.from_models(rows, [logits])
    >>> predictions.correct.tolist(), np.exp(predictions.log_probability).round(2).tolist()
    ([1.0, 0.0], [0.75, 0.5])

    ```
    """

    rows: np.ndarray
    correct: np.ndarray
    log_probability: np.ndarray

    def __post_init__(self) -> None:
        for name, dtype in _ARRAYS.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.shape != (len(self.rows),):
                raise ValueError(
                    f"`{name}` has the type {array.dtype} and the shape {array.shape}; it must have the type"
                    f" {np.dtype(dtype)} and the shape ({len(self.rows)},)."
                )

    @classmethod
    def from_models(cls, rows: Dataset, scores: Sequence[LabelLogits]) -> ExamplePredictions:
        """
        Average the predictions of one or several models for the same examples.

        Args:
            rows (`datasets.Dataset`): The raw test rows, in the order of the logits.
            scores (`Sequence[LabelLogits]`): The logits of each model.
        """
        correct = np.mean([score.correct for score in scores], axis=0)
        log_probability = np.mean([log_probabilities(score.logits, score.labels) for score in scores], axis=0)
        return cls(row_hashes(rows), correct.astype(np.float32), log_probability.astype(np.float32))

    def by_row(self) -> dict[str, tuple[float, float]]:
        """
        Correctness and log-probability by row.

        Returns:
            `dict[str, tuple[float, float]]`: The key is the hash of the row and its number among equal rows, so equal
            rows have different keys.
        """
        seen: Counter[int] = Counter()
        result = {}
        for row, correct, log_probability in zip(
            self.rows.tolist(), self.correct.tolist(), self.log_probability.tolist(), strict=True
        ):
            result[f"{row:016x}-{seen[row]}"] = (correct, log_probability)
            seen[row] += 1
        return result


def write_predictions(path: Path, predictions: Mapping[str, ExamplePredictions]) -> None:
    """
    Write the predictions of a run at once, so that a reader never sees a part of the file.

    Args:
        path (`pathlib.Path`): The file. Its folder is created.
        predictions (`Mapping[str, ExamplePredictions]`): The predictions by test split, `""` for the test examples.
    """
    arrays = {
        f"{_FURTHER}{split}/{name}" if split else name: getattr(values, name)
        for split, values in predictions.items()
        for name in _ARRAYS
    }
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, content.getvalue(), PUBLIC)


def read_predictions(path: Path) -> dict[str, ExamplePredictions]:
    """
    Read the predictions of a run.

    Args:
        path (`pathlib.Path`): The file, or the folder that contains `predictions.npz`.

    Returns:
        `dict[str, ExamplePredictions]`: The predictions by test split, `""` for the test examples. Empty if the file
        does not exist.

    Raises:
        ValueError: If the file is not a file of predictions.

    Example:

    ```python
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from hf_federated.experiments.predictions import ExamplePredictions, read_predictions, write_predictions

    >>> one = np.ones(1, dtype=np.float32)
    >>> path = Path(tempfile.mkdtemp()) / "predictions.npz"
    >>> write_predictions(path, {"": ExamplePredictions(np.array([7], dtype=np.uint64), one, -one)})
    >>> read_predictions(path.parent)[""].by_row()
    {'0000000000000007-0': (1.0, -1.0)}

    ```
    """
    if path.is_dir():
        path = path / PREDICTIONS_NAME
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {split: _read_split(archive, split) for split in _splits(archive)}
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} is not a file of predictions: {error} Delete the file, and repeat its run to write it again."
        ) from error


def _splits(names: Iterable[str]) -> list[str]:
    """The splits of an archive, in the order of writing."""
    splits = (name.removeprefix(_FURTHER).rpartition("/")[0] if name.startswith(_FURTHER) else "" for name in names)
    return list(dict.fromkeys(splits))


def _read_split(archive: Mapping[str, np.ndarray], split: str) -> ExamplePredictions:
    return ExamplePredictions(*(archive[f"{_FURTHER}{split}/{name}" if split else name] for name in _ARRAYS))
