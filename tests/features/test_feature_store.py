"""Features on disk: computed once, shared by processes, and built again if a file is damaged."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

from hf_federated.features import FeatureStore, cache_folder, row_key


KEYS = [row_key([text]) for text in ("a", "b", "c")]


class Compute:
    """Computes features from the number of a row, and remembers the rows that it was called for."""

    def __init__(self, keys=KEYS):
        self.keys = keys
        self.calls = []

    def __call__(self, rows):
        self.calls.append([KEYS.index(self.keys[row]) for row in rows])
        return [np.full((1, 2), KEYS.index(self.keys[row])) for row in rows]


def values(features):
    return [each.tolist() for each in features]


def test_features_are_computed_once_per_text(tmp_path):
    compute = Compute([KEYS[0], KEYS[1], KEYS[0]])
    first = FeatureStore(tmp_path, 2, "float32").fetch(compute.keys, compute)
    assert values(first) == [[[0.0, 0.0]], [[1.0, 1.0]], [[0.0, 0.0]]] and first[0].dtype == np.float32
    later = Compute(list(reversed(KEYS)))
    assert values(FeatureStore(tmp_path, 2, "float32").fetch(later.keys, later)) == [[[n, n]] for n in (2.0, 1.0, 0.0)]
    assert compute.calls == [[0, 1]] and later.calls == [[2]]


def test_rows_may_have_different_numbers_of_vectors(tmp_path):
    written = [np.arange(6).reshape(3, 2), np.array([[9, 9]])]
    for _ in range(2):
        found = FeatureStore(tmp_path, 2, "float16").fetch(KEYS[:2], lambda rows: [written[row] for row in rows])
        assert values(found) == values(written)


def test_key_separates_the_texts_of_a_pair():
    assert len({row_key(texts) for texts in (["ab"], ["a", "b"], ["", "ab"], ["ab", ""], ["b", "a"])}) == 5
    assert row_key(["\ud800"]) != row_key(["\ud801"])  # half of a surrogate pair, as in damaged files


@pytest.mark.parametrize("kind", ["rows", "values"])
@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "empty", "text"])
def test_damaged_file_is_built_again(tmp_path, kind, damage):
    FeatureStore(tmp_path, 2, "float32").fetch(KEYS, Compute())
    path = next(tmp_path.glob(f"*.{kind}.npy"))
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        changed = {"truncated": content[:-3], "changed": content[:-1] + b"\x7f", "empty": b"", "text": b"features"}
        path.write_bytes(changed[damage])
    again, third = Compute(), Compute()
    assert values(FeatureStore(tmp_path, 2, "float32").fetch(KEYS, again)) == [[[n, n]] for n in (0.0, 1.0, 2.0)]
    FeatureStore(tmp_path, 2, "float32").fetch(KEYS, third)
    assert again.calls == [[0, 1, 2]] and third.calls == []
    assert len(list(tmp_path.iterdir())) == 2  # no lock and no temporary file remains


def test_pickled_file_is_not_read(tmp_path):
    FeatureStore(tmp_path, 2, "float32").fetch(KEYS, Compute())
    for path in tmp_path.glob("*.values.npy"):
        np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    compute = Compute()
    FeatureStore(tmp_path, 2, "float32").fetch(KEYS, compute)
    assert compute.calls == [[0, 1, 2]]


def test_second_writer_waits_and_computes_nothing(tmp_path):
    """Two jobs of a benchmark start with the same rows."""
    started, finish, second = threading.Event(), threading.Event(), Compute()

    def slow(rows):
        started.set()
        assert finish.wait(10)
        return [np.full((1, 2), row) for row in rows]

    threads = [threading.Thread(target=FeatureStore(tmp_path, 2, "float32").fetch, args=(KEYS, slow))]
    threads[0].start()
    assert started.wait(10)
    threads.append(threading.Thread(target=FeatureStore(tmp_path, 2, "float32").fetch, args=(KEYS, second)))
    threads[1].start()
    finish.set()
    for thread in threads:
        thread.join(10)
    assert second.calls == [] and len(list(tmp_path.glob("*.rows.npy"))) == 1


@pytest.mark.slow
def test_killed_writer_leaves_a_store_that_works(tmp_path):
    code = (
        "import os, numpy as np, pathlib; from hf_federated.features import FeatureStore, row_key\n"
        f"store = FeatureStore(pathlib.Path({str(tmp_path)!r}), 2, 'float32')\n"
        "store.fetch([row_key(['a'])], lambda rows: [np.zeros((1, 2))])\n"
        "store.fetch([row_key(['b'])], lambda rows: os.kill(os.getpid(), 9))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    compute = Compute()
    FeatureStore(tmp_path, 2, "float32").fetch(KEYS, compute)
    assert compute.calls == [[1, 2]]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.full((1, 2), np.nan), "NaN or infinite values in float16"),
        (np.full((1, 2), 1e6), "NaN or infinite values in float16"),
        (np.zeros((1, 3)), r"have the shape \(1, 3\)"),
        (np.zeros(2), r"have the shape \(2,\)"),
    ],
    ids=["nan", "overflow", "width", "vector"],
)
def test_features_that_cannot_be_stored_are_refused(tmp_path, array, message):
    with pytest.raises(ValueError, match=message), np.errstate(over="ignore"):
        FeatureStore(tmp_path, 2, "float16").fetch(KEYS[:1], lambda rows: [array])
    assert list(tmp_path.iterdir()) == []


def test_full_store_without_write_permission_is_read(tmp_path):
    FeatureStore(tmp_path, 2, "float32").fetch(KEYS, Compute())
    tmp_path.chmod(0o500)
    try:
        assert len(FeatureStore(tmp_path, 2, "float32").fetch(KEYS, Compute())) == 3
    finally:
        tmp_path.chmod(0o700)


def test_environment_variable_names_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_FEDERATED_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("HF_FEDERATED_CACHE")
    assert cache_folder().parts[-2:] == ("hf_federated", "features")
