"""Push federated datasets to the Hugging Face Hub in one commit, and download only the requested files."""

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
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import tqdm
from tqdm.contrib.concurrent import thread_map

from ..utils.errors import UserError
from .client_datasets import ClientDatasets
from .storage.card import config_names
from .storage.folder import PICTURES, README, choose_clients, open_split
from .storage.partition_file import PARTITION_FILE, PartitionFile, PartitionFileError, StoredFile


# Maximum number of large files that the Hub accepts in one commit.
MAX_FILES_PER_COMMIT = 25_000


class ConcurrentPushError(UserError):
    """The repository received another commit during a push. Nothing of the push was published."""


@dataclass(frozen=True)
class RepositoryState:
    """
    The content of a repository before a push.

    Args:
        head (`str`, *optional*): The parent commit of the push; `None` if the repository does not exist.
        files (`dict[str, RepoFile]`): The files of the repository, by path.
        card (`str`, *optional*): The content of README.md.
        stored ([`PartitionFile`], *optional*): The federated dataset in the repository.
    """

    head: str | None = None
    files: dict[str, RepoFile] = field(default_factory=dict)
    card: str | None = None
    stored: PartitionFile | None = None

    @property
    def client_names(self) -> set[str]:
        """The names of the configurations that the previous push wrote for its clients."""
        return set() if self.stored is None else {client.name for client in self.stored.clients}

    def previous_files(self) -> set[str]:
        """Return the files of the previous push, except the card. A new push replaces these files."""
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
    Commit a federated dataset to the Hub.

    All files are written locally before the repository is created, so an error leaves no empty repository. A push
    removes only files of the previous push.

    Args:
        write (`Callable[[Path, RepositoryState], PartitionFile]`):
            Writes the dataset into an empty folder, given the state of the repository.
        repo_id (`str`):
            The repository. It is created if it does not exist.
        private (`bool`, *optional*):
            Whether a new repository is private. Defaults to the setting of its owner. With `True`, a push to an
            existing public repository is an error.
        revision (`str`, *optional*):
            A branch. It is created from the main branch if it does not exist.
        token (`bool` or `str`, *optional*):
            As in `huggingface_hub`.
        commit_message (`str`, *optional*):
            Message of the commit.

    Returns:
        `CommitInfo` or `None`: The commit, or `None` if the repository is already up to date.

    Raises:
        `ValueError`: If the repository contains other data or is public although `private=True`, or if the dataset has
            too many files for one commit.
        `ConcurrentPushError`: If the repository received another commit during the push.
    """
    api = HfApi(token=token)
    if "/" not in repo_id:
        repo_id = f"{api.whoami()['name']}/{repo_id}"
    state = _repository_state(api, repo_id, private, revision)
    with tempfile.TemporaryDirectory(prefix="hf_federated-") as folder:
        root = Path(folder)
        partition_file = write(root, state)
        written = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
        if len(written) > MAX_FILES_PER_COMMIT:
            raise ValueError(
                f"{len(partition_file.clients)} clients need {len(written)} files, but the Hub accepts at most"
                f" {MAX_FILES_PER_COMMIT} in one commit. Push row numbers (index_only=True), or push fewer clients."
            )
        uploaded = {path: entry.lfs.sha256 for path, entry in state.files.items() if entry.lfs is not None}
        unchanged = {file.path for file in partition_file.files() if uploaded.get(file.path) == file.sha256}
        operations = [
            *(CommitOperationAdd(path, written[path]) for path in sorted(written.keys() - unchanged)),
            *(CommitOperationDelete(path) for path in sorted(state.previous_files() - written.keys())),
        ]
        if state.head is None:
            api.create_repo(repo_id, repo_type="dataset", private=private)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, repo_type="dataset", exist_ok=True)
        head = state.head or api.dataset_info(repo_id, revision=revision).sha
        return _commit(api, repo_id, operations, head, revision, commit_message or "Upload federated dataset")


def _repository_state(api: HfApi, repo_id: str, private: bool | None, revision: str | None) -> RepositoryState:
    try:
        info = api.dataset_info(repo_id)
    except RepositoryNotFoundError:
        return RepositoryState()
    if private and not info.private:
        raise ValueError(
            f"{repo_id} already exists and is public, so private=True cannot keep the data private. Push to another"
            " repository, or make this repository private first."
        )
    try:
        head = info.sha if revision is None else api.dataset_info(repo_id, revision=revision).sha
    except RevisionNotFoundError:  # the branch does not exist yet and will start at the main branch
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
                f"{repo_id}: {path} is not valid UTF-8 ({error}). Correct the file on the Hub, and push again."
            ) from error

    card, text = read(README), read(PARTITION_FILE)
    try:
        stored = None if text is None else PartitionFile.from_json(text)
    except PartitionFileError as error:
        raise ValueError(
            f"{repo_id} has an invalid {PARTITION_FILE} ({error}). Push to another repository."
        ) from error
    if stored is None:
        data = sorted(path for path in files if path.startswith(("data/", "index/")))
        if data or (card is not None and config_names(card, repo_id)):
            raise ValueError(
                f"{repo_id} contains data that is not a federated dataset"
                f" ({', '.join(data[:3]) or 'see its configs'}). `load_dataset` would mix both datasets. Push to"
                " another repository."
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
                f"{repo_id} received another commit during the push, so nothing was published. Review the new commit,"
                " and push again."
            ) from error
        raise
    return None if commit.oid == head else commit


def read_hub_partition(
    repo_id: str, revision: str | None = None, token: bool | str | None = None, cache_dir: str | Path | None = None
) -> tuple[PartitionFile, Path]:
    """
    Download `partition.json`.

    Returns:
        `tuple[PartitionFile, Path]`: The content, and the cache folder for the files of its commit. The name of the
        folder is the commit hash, which is not available from another source without a network.

    Raises:
        `FileNotFoundError`: If the repository does not contain a federated dataset.
    """
    try:
        path = hf_hub_download(
            repo_id, PARTITION_FILE, repo_type="dataset", revision=revision, token=token, cache_dir=cache_dir
        )
    except RemoteEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{repo_id} has no {PARTITION_FILE}, so it is not a federated dataset. Partition an ordinary dataset with"
            f' FederatedDataset.from_dataset(DatasetSource("{repo_id}"), partitioner).'
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
    Download only the files of the requested clients, at the commit of `partition.json`.

    The arguments are those of [`open_split`] and [`read_hub_partition`]; the latter returns `snapshot`.

    Raises:
        `PartitionFileError`: If a file at this commit is missing or differs from its entry in `partition.json`.
    """
    chosen = choose_clients(partition_file, split, clients)
    files = [file for client in chosen for file in client.splits[split].files]
    if split in partition_file.index:
        files.append(partition_file.index[split].file)

    commit = snapshot.name

    def fetch(file: StoredFile) -> None:
        try:
            hf_hub_download(repo_id, file.path, repo_type="dataset", revision=commit, token=token, cache_dir=cache_dir)
        except RemoteEntryNotFoundError as error:
            raise PartitionFileError(
                f"{repo_id} has no file {file.path} at {commit}, but {PARTITION_FILE} lists it."
            ) from error

    thread_map(fetch, files, desc=f"Fetching {len(chosen)} clients", max_workers=8, tqdm_class=tqdm, disable=None)
    return open_split(partition_file, snapshot, split, clients, source, token)
