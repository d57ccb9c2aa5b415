"""Federated data sets on the Hugging Face Hub: one push is one commit, and a reader fetches only what it asks for."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from datasets import Dataset
from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    hf_hub_download,
)
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import tqdm
from tqdm.contrib.concurrent import thread_map

from .client_rows import ClientRows
from .partition_file import PARTITION_FILE, PartitionFile, PartitionFileError, StoredFile
from .storage import choose_clients, read_rows


README = "README.md"
# The Hub takes this many large files in one commit.
MAX_FILES_PER_COMMIT = 25_000


class ConcurrentPushError(RuntimeError):
    """Somebody else committed to the repository while a push was under way. Nothing of the push was published."""


def push_folder(
    write: Callable[[Path, str | None], PartitionFile],
    repo_id: str,
    private: bool | None = None,
    revision: str | None = None,
    token: bool | str | None = None,
    commit_message: str | None = None,
) -> CommitInfo | None:
    """
    Commits a federated data set to the Hub.

    Args:
        write (`Callable[[Path, str | None], PartitionFile]`):
            Fills an empty folder, given the card that the repository has.
        repo_id (`str`):
            The repository. It is made if there is none.
        private (`bool`, *optional*):
            Whether a repository that is made is private. The default of its owner if left out. `True` refuses a
            repository that is there and public.
        revision (`str`, *optional*):
            A branch; it is made from the main branch if there is none.
        token (`bool` or `str`, *optional*):
            As in `huggingface_hub`.
        commit_message (`str`, *optional*):
            Message of the commit.

    Returns:
        `CommitInfo` or `None`: The commit; `None` if the repository had all of it already.

    Raises:
        `ValueError`: If the repository holds other data or is public against `private=True`, or the data set has too
            many files for one commit.
        `ConcurrentPushError`: If somebody else committed meanwhile.
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True).repo_id
    if revision is not None:
        api.create_branch(repo_id, branch=revision, repo_type="dataset", exist_ok=True)
    info = api.dataset_info(repo_id, revision=revision)
    if private and not info.private:
        raise ValueError(
            f"{repo_id} is there already and is public, so private=True cannot keep the data private. Push to another"
            " repository, or make this one private first."
        )
    head = info.sha
    there = {
        entry.path: entry
        for entry in api.list_repo_tree(repo_id, recursive=True, revision=head, repo_type="dataset")
        if isinstance(entry, RepoFile)
    }
    _check_ours(there, repo_id)
    card = Path(api.hf_hub_download(repo_id, README, repo_type="dataset", revision=head)) if README in there else None
    with tempfile.TemporaryDirectory(prefix="hf_federated-") as folder:
        root = Path(folder)
        partition_file = write(root, card.read_text(encoding="utf-8") if card else None)
        written = {str(path.relative_to(root).as_posix()): path for path in root.rglob("*") if path.is_file()}
        if len(written) > MAX_FILES_PER_COMMIT:
            raise ValueError(
                f"{len(partition_file.clients)} clients make {len(written)} files; the Hub takes"
                f" {MAX_FILES_PER_COMMIT} in one commit. Push row numbers instead (index_only=True), or fewer clients."
            )
        unchanged = {file.path for file in partition_file.files() if _is_there(file, there.get(file.path))}
        operations = [
            *(CommitOperationAdd(path, written[path]) for path in sorted(written.keys() - unchanged)),
            *(CommitOperationDelete(path) for path in sorted(there) if _is_data(path) and path not in written),
        ]
        return _commit(api, repo_id, operations, head, revision, commit_message or "Upload federated data set")


def _commit(
    api: HfApi, repo_id: str, operations: list, head: str | None, revision: str | None, message: str
) -> CommitInfo | None:
    try:
        commit = api.create_commit(
            repo_id,
            operations,
            commit_message=message,
            repo_type="dataset",
            revision=revision,
            parent_commit=head,
        )
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code == 412:
            raise ConcurrentPushError(
                f"{repo_id} got another commit while this one was made, so nothing was published. Look at what changed"
                " there and push again."
            ) from error
        raise
    return None if commit.oid == head else commit


def _check_ours(there: dict[str, RepoFile], repo_id: str) -> None:
    data = [path for path in there if _is_data(path)]
    if data and PARTITION_FILE not in there:
        raise ValueError(
            f"{repo_id} holds data that is no federated data set ({', '.join(sorted(data)[:3])}, …), and would be"
            " replaced. Push to another repository."
        )


def _is_data(path: str) -> bool:
    return path.startswith(("data/", "index/", "pictures/")) or path == PARTITION_FILE


def _is_there(file: StoredFile, entry: RepoFile | None) -> bool:
    return entry is not None and entry.lfs is not None and entry.lfs.sha256 == file.sha256


def read_hub_partition(
    repo_id: str, revision: str | None = None, token: bool | str | None = None, cache_dir: str | Path | None = None
) -> tuple[PartitionFile, str]:
    """
    Downloads `partition.json`.

    Returns:
        `tuple[PartitionFile, str]`: Its content and the commit that it is of.

    Raises:
        `FileNotFoundError`: If the repository holds no federated data set.
    """
    try:
        path = hf_hub_download(
            repo_id, PARTITION_FILE, repo_type="dataset", revision=revision, token=token, cache_dir=cache_dir
        )
    except EntryNotFoundError as error:
        raise FileNotFoundError(
            f"{repo_id} has no {PARTITION_FILE}, so it holds no federated data set. An ordinary data set is cut into"
            f' clients with FederatedDataset.from_dataset(DatasetSource("{repo_id}"), partitioner).'
        ) from error
    # The cache lays files out as snapshots/<commit>/<path>; offline it is the only place that knows the commit.
    return PartitionFile.read(Path(path).parent), Path(path).parent.name


def fetch_rows(
    repo_id: str,
    partition_file: PartitionFile,
    commit: str,
    split: str,
    clients: Sequence[str] | None = None,
    token: bool | str | None = None,
    cache_dir: str | Path | None = None,
    source: Dataset | None = None,
) -> ClientRows:
    """
    Downloads the files of the clients asked for, at one commit, and nothing else. Arguments as in [`read_rows`].

    Raises:
        `PartitionFileError`: If a file at that commit is not the one that `partition.json` lists.
    """
    chosen = choose_clients(partition_file, split, clients)
    files = [file for client in chosen for file in client.splits[split].files]
    if split in partition_file.index:
        files.append(partition_file.index[split].file)

    def fetch(file: StoredFile) -> Path:
        try:
            path = hf_hub_download(
                repo_id, file.path, repo_type="dataset", revision=commit, token=token, cache_dir=cache_dir
            )
        except EntryNotFoundError as error:
            raise PartitionFileError(
                f"{repo_id} lacks {file.path} at {commit}, which {PARTITION_FILE} lists."
            ) from error
        return Path(path)

    thread_map(fetch, files, desc=f"Fetching {len(chosen)} clients", max_workers=8, tqdm_class=tqdm, disable=None)
    root = Path(
        hf_hub_download(
            repo_id, PARTITION_FILE, repo_type="dataset", revision=commit, token=token, cache_dir=cache_dir
        )
    ).parent
    return read_rows(partition_file, root, split, clients, source)
