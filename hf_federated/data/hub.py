"""Federated data sets on the Hugging Face Hub: one push is one commit, and a reader fetches only what it asks for."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    hf_hub_download,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import tqdm
from tqdm.contrib.concurrent import thread_map

from .client_datasets import ClientDatasets
from .storage.card import config_names
from .storage.folder import PICTURES, README, choose_clients, open_split
from .storage.partition_file import PARTITION_FILE, PartitionFile, PartitionFileError, StoredFile


# The Hub takes this many large files in one commit.
MAX_FILES_PER_COMMIT = 25_000


class ConcurrentPushError(RuntimeError):
    """Somebody else committed to the repository while a push was under way. Nothing of the push was published."""


@dataclass(frozen=True)
class RepositoryState:
    """
    What a repository holds before a push.

    Args:
        head (`str`, *optional*): The commit that the push builds on; `None` if there is no repository.
        files (`dict[str, RepoFile]`): Its files by path.
        card (`str`, *optional*): Its README.md.
        stored ([`PartitionFile`], *optional*): The federated data set that it holds.
    """

    head: str | None = None
    files: dict[str, RepoFile] = field(default_factory=dict)
    card: str | None = None
    stored: PartitionFile | None = None

    @property
    def client_names(self) -> set[str]:
        """Names of the configurations that an earlier push wrote."""
        return set() if self.stored is None else {client.name for client in self.stored.clients}

    def own_files(self) -> set[str]:
        """What an earlier push wrote beside the card, which a new one replaces."""
        if self.stored is None:
            return set()
        return {PARTITION_FILE, *PICTURES.values(), *(file.path for file in self.stored.files())} & self.files.keys()


def push_folder(
    write: Callable[[Path, RepositoryState], PartitionFile],
    repo_id: str,
    private: bool | None = None,
    revision: str | None = None,
    token: bool | str | None = None,
    commit_message: str | None = None,
) -> CommitInfo | None:
    """
    Commits a federated data set to the Hub.

    Nothing is made on the Hub before everything is written here, so that an error leaves no empty repository. Of what
    the repository holds only the files of an earlier push are removed.

    Args:
        write (`Callable[[Path, RepositoryState], PartitionFile]`):
            Fills an empty folder, given what the repository holds.
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
    if "/" not in repo_id:
        repo_id = f"{api.whoami()['name']}/{repo_id}"
    there = _look(api, repo_id, private, revision)
    with tempfile.TemporaryDirectory(prefix="hf_federated-") as folder:
        root = Path(folder)
        partition_file = write(root, there)
        written = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
        if len(written) > MAX_FILES_PER_COMMIT:
            raise ValueError(
                f"{len(partition_file.clients)} clients make {len(written)} files; the Hub takes"
                f" {MAX_FILES_PER_COMMIT} in one commit. Push row numbers instead (index_only=True), or fewer clients."
            )
        unchanged = {file.path for file in partition_file.files() if _is_there(file, there.files.get(file.path))}
        operations = [
            *(CommitOperationAdd(path, written[path]) for path in sorted(written.keys() - unchanged)),
            *(CommitOperationDelete(path) for path in sorted(there.own_files() - written.keys())),
        ]
        if there.head is None:
            api.create_repo(repo_id, repo_type="dataset", private=private)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, repo_type="dataset", exist_ok=True)
        head = there.head or api.dataset_info(repo_id, revision=revision).sha
        return _commit(api, repo_id, operations, head, revision, commit_message or "Upload federated data set")


def _look(api: HfApi, repo_id: str, private: bool | None, revision: str | None) -> RepositoryState:
    try:
        info = api.dataset_info(repo_id)
    except RepositoryNotFoundError:
        return RepositoryState()
    if private and not info.private:
        raise ValueError(
            f"{repo_id} is there already and is public, so private=True cannot keep the data private. Push to another"
            " repository, or make this one private first."
        )
    try:
        head = info.sha if revision is None else api.dataset_info(repo_id, revision=revision).sha
    except RevisionNotFoundError:  # a branch that is made from the main branch
        head = info.sha
    files = {
        entry.path: entry
        for entry in api.list_repo_tree(repo_id, recursive=True, revision=head, repo_type="dataset")
        if isinstance(entry, RepoFile)
    }

    def read(path: str) -> str | None:
        if path not in files:
            return None
        local = api.hf_hub_download(repo_id, path, repo_type="dataset", revision=head)
        try:
            return Path(local).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{repo_id}: {path} is no UTF-8 text ({error}). Correct it there, and push again."
            ) from error

    card, text = read(README), read(PARTITION_FILE)
    try:
        stored = None if text is None else PartitionFile.from_json(text)
    except PartitionFileError as error:
        raise ValueError(f"{repo_id} holds another {PARTITION_FILE} ({error}). Push to another repository.") from error
    if stored is None:
        data = sorted(path for path in files if path.startswith(("data/", "index/")))
        if data or (card is not None and config_names(card, repo_id)):
            raise ValueError(
                f"{repo_id} holds data that is no federated data set ({', '.join(data[:3]) or 'see its configs'}), and"
                " `load_dataset` would mix the two. Push to another repository."
            )
    return RepositoryState(head, files, card, stored)


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


def _is_there(file: StoredFile, entry: RepoFile | None) -> bool:
    return entry is not None and entry.lfs is not None and entry.lfs.sha256 == file.sha256


def read_hub_partition(
    repo_id: str, revision: str | None = None, token: bool | str | None = None, cache_dir: str | Path | None = None
) -> tuple[PartitionFile, Path]:
    """
    Downloads `partition.json`.

    Returns:
        `tuple[PartitionFile, Path]`: Its content, and the folder of the cache that holds the files of its commit. The
        folder's name is the commit: offline nothing else knows it.

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
    snapshot = Path(path).parent
    return PartitionFile.read(snapshot), snapshot


def fetch_split(
    repo_id: str,
    partition_file: PartitionFile,
    snapshot: Path,
    split: str,
    clients: Sequence[str] | None = None,
    token: bool | str | None = None,
    cache_dir: str | Path | None = None,
    source: Dataset | None = None,
) -> ClientDatasets:
    """
    Downloads the files of the clients asked for, at the commit of `partition.json`, and nothing else.

    Arguments as in [`open_split`] and [`read_hub_partition`], which returns the snapshot.

    Raises:
        `PartitionFileError`: If a file at that commit is not the one that `partition.json` lists.
    """
    chosen = choose_clients(partition_file, split, clients)
    files = [file for client in chosen for file in client.splits[split].files]
    if split in partition_file.index:
        files.append(partition_file.index[split].file)

    commit = snapshot.name

    def fetch(file: StoredFile) -> None:
        try:
            hf_hub_download(repo_id, file.path, repo_type="dataset", revision=commit, token=token, cache_dir=cache_dir)
        except EntryNotFoundError as error:
            raise PartitionFileError(
                f"{repo_id} lacks {file.path} at {commit}, which {PARTITION_FILE} lists."
            ) from error

    thread_map(fetch, files, desc=f"Fetching {len(chosen)} clients", max_workers=8, tqdm_class=tqdm, disable=None)
    return open_split(partition_file, snapshot, split, clients, source, token)
