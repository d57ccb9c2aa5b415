"""Predictions for single examples: their file, equal rows, several models, and files that are damaged."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
from datasets import Dataset

from hf_federated.data.source import row_hashes
from hf_federated.experiments.predictions import ExamplePredictions, read_predictions, write_predictions
from hf_federated.tasks.label_logits import LabelLogits


ROWS = Dataset.from_dict({"text": ["fine", "dull", "fine"], "label": [1, 0, 1]})


def predictions(*logits):
    labels = np.array(ROWS["label"])
    return ExamplePredictions.from_models(ROWS, [LabelLogits(np.array(values), labels) for values in logits])


def test_predictions_are_read_as_they_were_written(tmp_path):
    test = predictions(np.log([[1.0, 3.0], [1.0, 1.0], [3.0, 1.0]]))
    written = {"": test, "shifted": predictions(np.zeros((3, 2))), "train[:10%]/a": test}
    write_predictions(tmp_path / "new" / "predictions.npz", written)
    for read in (read_predictions(tmp_path / "new"), read_predictions(tmp_path / "new" / "predictions.npz")):
        assert list(read) == list(written)
        for split, values in written.items():
            for name in ("rows", "correct", "log_probability"):
                np.testing.assert_array_equal(getattr(read[split], name), getattr(values, name))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["predictions.npz"]


def test_equal_rows_have_separate_predictions():
    by_row = predictions(np.log([[1.0, 3.0], [1.0, 1.0], [3.0, 1.0]])).by_row()
    fine, dull = (f"{hashed:016x}" for hashed in row_hashes(ROWS)[:2].tolist())
    assert list(by_row) == [f"{fine}-0", f"{dull}-0", f"{fine}-1"]
    assert [correct for correct, _ in by_row.values()] == [1, 1, 0]
    shares = [math.exp(log_probability) for _, log_probability in by_row.values()]
    assert shares == pytest.approx([3 / 4, 1 / 2, 1 / 4], rel=1e-6)


def test_several_models_are_averaged():
    mean = predictions(np.log([[1.0, 3.0]] * 3), np.log([[1.0, 1.0]] * 3))
    # The first model predicts label 1, the second model label 0.
    assert mean.correct.tolist() == [0.5, 0.5, 0.5]
    expected = [(math.log(3 / 4) + math.log(1 / 2)) / 2, (math.log(1 / 4) + math.log(1 / 2)) / 2]
    assert mean.log_probability.tolist() == pytest.approx([expected[0], expected[1], expected[0]], rel=1e-6)


def test_logits_that_are_not_finite_have_no_log_probability(tmp_path):
    values = predictions([[0.0, np.nan], [1.0, 0.0], [0.0, 1.0]])
    write_predictions(tmp_path / "predictions.npz", {"": values})
    read = read_predictions(tmp_path)[""].log_probability
    assert np.isnan(read).tolist() == [True, False, False]


def test_a_folder_without_predictions_gives_none(tmp_path):
    assert read_predictions(tmp_path) == {} == read_predictions(tmp_path / "missing")


def test_damaged_files_are_refused_by_name(tmp_path):
    path = tmp_path / "predictions.npz"
    write_predictions(path, {"": predictions(np.zeros((3, 2)))})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"predictions\.npz is not a file of predictions.*Delete the file"):
        read_predictions(tmp_path)
    one = np.ones(1, dtype=np.float32)
    for arrays in (
        {"rows": np.array([7], dtype=np.uint64), "correct": one},
        {"rows": np.array([7], dtype=np.uint64), "correct": one, "log_probability": np.ones(2, dtype=np.float32)},
        {"rows": np.array([7.0]), "correct": one, "log_probability": one},
    ):
        np.savez(path, **arrays)
        with pytest.raises(ValueError, match="is not a file of predictions"):
            read_predictions(tmp_path)


class MakesFolder:
    """A pickled object that runs code when it is loaded."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_a_pickled_object_is_not_loaded(tmp_path):
    one, made = np.ones(1, dtype=np.float32), tmp_path / "made"
    arrays = {"rows": np.array([MakesFolder(str(made))]), "correct": one, "log_probability": one}
    np.savez(tmp_path / "predictions.npz", **arrays)
    with pytest.raises(ValueError, match="is not a file of predictions"):
        read_predictions(tmp_path)
    assert not made.exists()


def test_872_rows_take_less_than_12_kilobytes(tmp_path):
    """24 runs with the development set of SST-2 are below 300 kB."""
    rows = Dataset.from_dict({"text": [f"sentence {number}" for number in range(872)], "label": [0, 1] * 436})
    logits = np.random.default_rng(0).normal(size=(872, 2))
    values = ExamplePredictions.from_models(rows, [LabelLogits(logits, np.array(rows["label"]))])
    write_predictions(tmp_path / "predictions.npz", {"": values})
    assert (tmp_path / "predictions.npz").stat().st_size < 12_000
