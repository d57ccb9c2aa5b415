"""Private files, and the error of a folder that is full or cannot be written to."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from safetensors import SafetensorError

from hf_federated.engines.run_monitor import RunMonitor, read_status
from hf_federated.utils.errors import UserError
from hf_federated.utils.storage import StorageError, format_size, size_of_folder, storage_errors, write_private


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o277], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_private_file_can_be_read_by_its_owner_only(tmp_path, umask):
    path = tmp_path / "file"
    write_private(path, b"first")
    path.chmod(0o666)
    write_private(path, b"second")
    assert path.read_bytes() == b"second" and mode_of(path) == 0o600
    write_private(path, b"third", mode=0o644)
    assert mode_of(path) == 0o644 and list(tmp_path.iterdir()) == [path]


def test_status_of_a_run_can_be_read_by_the_operator_only(tmp_path, umask):
    os.chmod(tmp_path, 0o700)
    (tmp_path / "network").mkdir(mode=0o700)
    os.chmod(tmp_path / "network", 0o700)
    monitor = RunMonitor(tmp_path, lambda: {"clients": {}})
    monitor.start()
    monitor.stop("complete")
    assert mode_of(tmp_path / "network" / "status.json") == 0o600 and read_status(tmp_path)["state"] == "complete"


def test_file_is_replaced_at_once_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_private(path, b"first")

    def fail(source, target):
        assert Path(source).read_bytes() == b"second" and mode_of(Path(source)) == 0o600
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        write_private(path, b"second")
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]


# The errors of the libraries that write checkpoints, as they were raised by a full and by a read-only file system.
FULL = [
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/other/file"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    Exception("No space left on device (os error 28)"),
    RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
]
READ_ONLY = [
    OSError(errno.EROFS, os.strerror(errno.EROFS), "{folder}/file"),
    OSError(errno.EACCES, os.strerror(errno.EACCES), "{folder}"),
    OSError(errno.EROFS, os.strerror(errno.EROFS), "{parent}"),
    SafetensorError('I/O error: Read-only file system (os error 30) at path "{folder}/.tmpR8JK1D"'),
    RuntimeError("[enforce fail at inline_container.cc:747] . open file failed with strerror: Read-only file system"),
    RuntimeError("[enforce fail at inline_container.cc:747] . open file failed with strerror: Permission denied"),
]


def placed(error: Exception, folder: Path) -> Exception:
    """Return an error with the paths of a folder."""
    texts = [
        str(item).format(folder=folder, parent=folder.parent) if isinstance(item, str) else item for item in error.args
    ]
    if isinstance(error, OSError):
        path = None if error.filename is None else error.filename.format(folder=folder, parent=folder.parent)
        return OSError(error.errno, error.strerror, path)
    return type(error)(*texts)


@pytest.mark.parametrize("chained", [False, True], ids=["raised", "cause"])
@pytest.mark.parametrize("error", FULL + READ_ONLY, ids=repr)
def test_error_names_folder_bytes_and_resume_in_one_line(error, chained, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(StorageError) as raised, storage_errors(folder, lambda: 8_400_000, "Use another store."):
        if chained:
            raise ValueError("The model cannot be saved.") from placed(error, folder)
        raise placed(error, folder)
    text = str(raised.value)
    assert text.startswith(f"Writing to {folder} failed: ") and text.isprintable()
    assert "at least 8.4 MB are needed, " in text and " are free. " in text and "Use another store. " in text
    assert ("Free disk space" if error in FULL else "Make the folder writable") in text
    assert "--resume" in text and isinstance(raised.value, UserError) and raised.value.exit_code == 2


def test_dev_full_is_a_full_disk(tmp_path):
    with pytest.raises(StorageError, match="No space left on device; .* are free"), storage_errors(tmp_path):
        Path("/dev/full").write_bytes(b"x")


def test_other_errors_stay(tmp_path):
    others = [
        PermissionError(errno.EACCES, "Permission denied", "/etc/shadow"),
        OSError(errno.EROFS, "Read-only file system", str(tmp_path / "run2")),
        FileNotFoundError(errno.ENOENT, "No such file", str(tmp_path / "run" / "file")),
        SafetensorError("Error while deserializing header: HeaderTooLarge"),
        RuntimeError(
            "[enforce fail at inline_container.cc:747] . open file failed with strerror: No such file or directory"
        ),
        KeyboardInterrupt(),
    ]
    for error in others:
        with pytest.raises(type(error)) as raised, storage_errors(tmp_path / "run"):
            raise error
        assert raised.value is error


def test_inner_folder_is_named(tmp_path):
    with pytest.raises(StorageError, match="Writing to .*inner failed") as raised:
        with storage_errors(tmp_path / "outer"), storage_errors(tmp_path / "inner", lambda: 12):
            raise OSError(errno.ENOSPC, "No space left on device")
    assert "at least 12 bytes are needed" in str(raised.value)


def test_sizes(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"123")
    assert size_of_folder(tmp_path) == 3 and size_of_folder(tmp_path / "none") == 0
    assert [format_size(size) for size in (999, 1000, 8_400_000, 2 * 10**9)] == [
        "999 bytes",
        "1.0 kB",
        "8.4 MB",
        "2.0 GB",
    ]
