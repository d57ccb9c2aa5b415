"""`FeatureStore`: a folder of memory-mapped files with the features of texts.

Each part of a store has two files in the format of NumPy: `<digest>.rows.npy` with the key and the number of vectors
of each row, and `<digest>.values.npy` with the vectors. The digest is a hash of both contents. A part is written to
temporary files and renamed, and the file of rows comes last. A process that is killed leaves no part that is read.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from huggingface_hub.constants import HF_HOME
from transformers.utils import logging

from ..utils.file_lock import FileLock, FileLockedError
from ..utils.storage import storage_errors


logger = logging.get_logger(__name__)

# Environment variable with the folder of all stores.
CACHE_VARIABLE = "HF_FEDERATED_CACHE"
_KEY_BYTES = 16
_ROW_TYPE = np.dtype([("key", f"V{_KEY_BYTES}"), ("length", "<i8")])
_SECONDS_BETWEEN_TRIES = 0.1


def cache_folder() -> Path:
    """Return the folder of all stores: `$HF_FEDERATED_CACHE`, by default `hf_federated/features` below `$HF_HOME`."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path(HF_HOME) / "hf_federated" / "features")


def row_key(texts: Sequence[str]) -> bytes:
    """
    Return the key of a row: a hash of its texts.

    Args:
        texts (`Sequence[str]`): One text, or the two texts of a pair.
    """
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


class FeatureStore:
    """
    The features of texts on disk, by the hash of the text. Several processes can use a store at the same time.

    A part with a wrong hash, such as a truncated file, is deleted, and its rows are computed again.

    Args:
        folder (`pathlib.Path`): The folder of the store. Only features of one encoder with one length may be in it.
        width (`int`): Number of values of a vector.
        dtype (`str`): NumPy type of the values, such as `"float32"`.

    Example:

    ```python
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from hf_federated.features import FeatureStore, row_key

    >>> folder, keys = Path(tempfile.mkdtemp()), [row_key(["a"]), row_key(["bb"])]
    >>> FeatureStore(folder, 2, "float32").fetch(keys, lambda rows: [np.full((1, 2), row + 1.0) for row in rows])[1]
    array([[2., 2.]], dtype=float32)
    >>> FeatureStore(folder, 2, "float32").fetch(keys[:1], lambda rows: [])[0]  # the row is not computed again
    array([[1., 1.]], dtype=float32)

    ```
    """

    def __init__(self, folder: Path, width: int, dtype: str) -> None:
        self.folder = folder
        self.width = width
        self.dtype = np.dtype(dtype)
        self._parts: dict[str, np.ndarray] = {}
        # The part of each key, and its first and last vector in the part.
        self._places: dict[bytes, tuple[str, int, int]] = {}

    def fetch(self, keys: Sequence[bytes], compute: Callable[[list[int]], Sequence[np.ndarray]]) -> list[np.ndarray]:
        """
        Return the features of rows, and compute the features that the store does not have.

        Args:
            keys (`Sequence[bytes]`): The key of each row, see [`~hf_federated.features.row_key`].
            compute (`Callable`): Called with the positions of missing rows, without duplicates. Returns an array of
                shape `(vectors, width)` for each position. Another process waits until the call ends.

        Returns:
            `list[np.ndarray]`: Read-only arrays of shape `(vectors, width)`, one per row.

        Raises:
            ValueError: If a computed value is NaN or infinite, or if an array has another shape.
            StorageError: If the folder is full or cannot be written to.
        """
        if self._missing(keys):
            self._load()
        if self._missing(keys):
            with storage_errors(self.folder, advice=f"{CACHE_VARIABLE} names another folder."), self._lock():
                self._load()  # another process may have computed the rows in the meantime
                if missing := self._missing(keys):
                    self._write([keys[row] for row in missing], compute(missing))
        return [np.asarray(self._read(key)) for key in keys]

    def _missing(self, keys: Sequence[bytes]) -> list[int]:
        """Positions of rows that this object does not know, without duplicates."""
        first = {key: row for row, key in reversed(list(enumerate(keys))) if key not in self._places}
        return sorted(first.values())

    def _read(self, key: bytes) -> np.ndarray:
        part, start, stop = self._places[key]
        return self._parts[part][start:stop]

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Wait for the lock of the folder. Without the lock, two processes would compute the same rows."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / "store.lock")
        while not lock.is_held:
            try:
                lock.acquire()
            except FileLockedError:
                time.sleep(_SECONDS_BETWEEN_TRIES)
        try:
            yield
        finally:
            lock.release()

    def _load(self) -> None:
        """Open the parts that other objects or processes have written."""
        for path in sorted(self.folder.glob("*.rows.npy")):
            name = path.name.removesuffix(".rows.npy")
            if name not in self._parts:
                self._open(name)

    def _open(self, name: str) -> None:
        files = self.folder / f"{name}.rows.npy", self.folder / f"{name}.values.npy"
        try:
            rows, values = (np.load(file, mmap_mode="r", allow_pickle=False) for file in files)
            is_valid = rows.dtype == _ROW_TYPE and values.dtype == self.dtype and values.shape[1:] == (self.width,)
            if not is_valid or _digest(rows, values) != name:
                raise ValueError("the content does not match its name")
        except (OSError, ValueError, EOFError) as error:
            if all(file.exists() for file in files):
                logger.warning("%s is damaged (%s). Its features are computed again.", files[0], error)
            for file in files:
                with suppress(OSError):  # without the permission to delete it, the part stays and is not read
                    file.unlink(missing_ok=True)
            return
        self._parts[name] = values
        stops = np.cumsum(rows["length"])
        for row, stop in zip(rows, stops.tolist(), strict=True):
            self._places[row["key"].tobytes()] = (name, stop - int(row["length"]), stop)

    def _write(self, keys: Sequence[bytes], computed: Sequence[np.ndarray]) -> None:
        rows = np.empty(len(keys), _ROW_TYPE)
        for number, (key, vectors) in enumerate(zip(keys, computed, strict=True)):
            if vectors.ndim != 2 or vectors.shape[1] != self.width:
                raise ValueError(
                    f"The features of a text have the shape {vectors.shape}; they must have the shape (vectors,"
                    f" {self.width})."
                )
            rows[number] = (key, len(vectors))
        values = np.concatenate(list(computed)).astype(self.dtype)
        if not np.isfinite(values).all():
            raise ValueError(
                f"The features of a text have NaN or infinite values in {self.dtype}. Check the weights of the model,"
                " or use the type float32."
            )
        name = _digest(rows, values)
        for kind, array in (("values", values), ("rows", rows)):
            staged = self.folder / f".{name}-{secrets.token_hex(8)}"
            try:
                with open(staged, "wb") as file:
                    np.save(file, array, allow_pickle=False)
                os.replace(staged, self.folder / f"{name}.{kind}.npy")
            finally:
                staged.unlink(missing_ok=True)
        self._open(name)


def _digest(rows: np.ndarray, values: np.ndarray) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array in (rows, values):
        digest.update(f"{array.shape} {array.dtype.str}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()
