"""The local Hub behaves like the Hub for the unpatched `huggingface_hub` and `datasets`."""

from __future__ import annotations

import hashlib
import math
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from hub_server import STORAGE_HOST, HubServer, run_client
from packaging.version import Version


REPOSITORY = "anna/voices"
HAS_HUB_2 = Version(huggingface_hub.__version__) >= Version("2.0")
retries = pytest.mark.skipif(not HAS_HUB_2, reason="huggingface_hub 2.0 began to repeat interrupted transfers")
LARGE = bytes(range(256)) * 10  # 2560 bytes: an LFS file because of its size, uploaded in three parts
PARQUET = b"PAR1" + bytes(100)  # an LFS file because of its suffix, uploaded in one part


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """Anna has a write token and a read-only token; Bert is another user. Pages, LFS files and parts are small."""
    with HubServer(page_size=3, lfs_threshold=2000, part_size=1000) as hub:
        hub.add_user("anna", token="hf_anna")
        hub.add_user("anna", token="hf_anna_reads", write=False)
        hub.add_user("bert", token="hf_bert")
        yield hub


def upload(repository: str, files: dict[str, str], parent: str | None = None) -> dict[str, object]:
    """Create one commit in the client process. The file contents are encoded as latin-1."""
    from huggingface_hub import CommitOperationAdd, HfApi

    additions = [CommitOperationAdd(path, content.encode("latin-1")) for path, content in files.items()]
    try:
        commit = HfApi().create_commit(
            repository, additions, commit_message="Upload", repo_type="dataset", parent_commit=parent
        )
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        return {"error": type(error).__name__, "status": status, "message": str(error)}
    return {"commit": commit.oid}


def commit(hub: HubServer, home: Path, files: dict[str, bytes], parent: str | None = None) -> dict[str, object]:
    texts = {path: content.decode("latin-1") for path, content in files.items()}
    arguments = {"repository": REPOSITORY, "files": texts, "parent": parent}
    return run_client(hub, upload, home, token="hf_anna", arguments=arguments).value


def test_listings_and_downloads_return_the_committed_files(hub, tmp_path) -> None:
    hub.create(REPOSITORY)
    files = {"README.md": b"---\nlicense: mit\n---\n", "data/a/x.parquet": PARQUET, "data/a b/y.txt": b"y", "z": LARGE}
    first = commit(hub, tmp_path, files)["commit"]

    def client(repository: str, first: str) -> dict[str, object]:
        from pathlib import Path

        from huggingface_hub import (
            CommitOperationAdd,
            CommitOperationDelete,
            HfApi,
            hf_hub_download,
            snapshot_download,
        )

        api, dataset = HfApi(), {"repo_id": repository, "repo_type": "dataset"}
        changes = [CommitOperationAdd("new.txt", b"new"), CommitOperationDelete("z"), CommitOperationDelete("data/a/")]
        second = api.create_commit(operations=changes, commit_message="Second", parent_commit=first, **dataset).oid
        folder = Path(snapshot_download(revision=first, **dataset))
        return {
            "listed": {
                file.path: vars(file) for file in api.list_repo_tree(revision=first, recursive=True, **dataset)
            },
            "below": sorted(
                entry.path for entry in api.list_repo_tree(path_in_repo="data", revision=first, **dataset)
            ),
            "paths": [
                entry.path for entry in api.get_paths_info(paths=["z", "data/a", "none"], revision=first, **dataset)
            ],
            "latest": api.list_repo_files(**dataset),
            "shas": [api.repo_info(**dataset).sha, api.repo_info(revision=first, **dataset).sha, second],
            "sizes": {file.rfilename: file.size for file in api.repo_info(files_metadata=True, **dataset).siblings},
            "snapshot": {
                str(path.relative_to(folder)): path.read_bytes().decode("latin-1")
                for path in folder.rglob("*")
                if path.is_file()
            },
            "download": Path(hf_hub_download(filename="data/a/x.parquet", revision=first, **dataset)).read_text(),
            "titles": [commit.title for commit in api.list_repo_commits(**dataset)],
        }

    seen = run_client(
        hub, client, tmp_path / "new", token="hf_anna", arguments={"repository": REPOSITORY, "first": first}
    ).value
    listed = seen["listed"]
    assert set(listed) == {".gitattributes", "data", "data/a", "data/a b", *files}
    sha256 = hashlib.sha256(LARGE).hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(LARGE)}\n"
    assert listed["z"]["lfs"]["sha256"] == sha256
    assert listed["z"]["blob_id"] == hashlib.sha1(f"blob {len(pointer)}\0{pointer}".encode()).hexdigest()
    assert listed["z"]["size"] == listed["z"]["lfs"]["size"] == len(LARGE)
    assert listed["data/a b/y.txt"]["blob_id"] == hashlib.sha1(b"blob 1\0y").hexdigest()
    assert listed["data/a b/y.txt"]["lfs"] is None
    assert seen["below"] == ["data/a", "data/a b"]
    assert sorted(seen["paths"]) == ["data/a", "z"]
    assert seen["latest"] == [".gitattributes", "README.md", "data/a b/y.txt", "new.txt"]
    assert seen["shas"][0] == seen["shas"][2] != seen["shas"][1] == first
    assert seen["sizes"]["new.txt"] == 3
    del seen["snapshot"][".gitattributes"]
    assert seen["snapshot"] == {path: content.decode("latin-1") for path, content in files.items()}
    assert seen["download"] == PARQUET.decode()
    assert seen["titles"] == ["Second", "Upload", "initial commit"]
    pages = hub.requests("tree", f"/api/datasets/{REPOSITORY}/tree/{first}")
    # `list_repo_tree` lists the files, and from 2.0 on `snapshot_download` does too.
    num_listings = 2 if HAS_HUB_2 else 1
    assert len([page for page in pages if page.path.endswith(str(first))]) == num_listings * math.ceil(len(listed) / 3)
    assert hub.files(REPOSITORY, first) == files
    assert not hub.requests("unknown")


def test_storage_receives_each_byte_once_and_no_token(hub, tmp_path) -> None:
    hub.create(REPOSITORY)
    commit(hub, tmp_path, {"z": LARGE, "x.parquet": PARQUET, "y": b"y"})
    uploads = hub.requests("storage-upload")
    assert Counter(upload.received for upload in uploads) == {1000: 2, 560: 1, len(PARQUET): 1}
    assert {request.kind for request in hub.log if request.host == STORAGE_HOST} == {"storage-upload"}
    assert not any(request.has_token for request in hub.log if request.host == STORAGE_HOST)
    assert {request.kind for request in hub.log if not request.has_token} == {"storage-upload", "lfs-complete"}
    assert hub.bytes_received(kind="storage-upload") == len(LARGE) + len(PARQUET)


def test_storage_requires_a_valid_signature_and_no_token(hub, tmp_path) -> None:
    hub.create(REPOSITORY)
    commit(hub, tmp_path, {"x.parquet": PARQUET})
    path = f"/storage/datasets/{REPOSITORY}/{hashlib.sha256(PARQUET).hexdigest()}"
    assert urllib.request.urlopen(hub.signed("GET", hub.storage, path)).read() == PARQUET
    token = {"Authorization": "Bearer hf_anna"}
    for url, headers, status in (
        (f"{hub.storage}{path}?signature=0", {}, 403),
        (hub.signed("PUT", hub.storage, path), {}, 403),
        (hub.signed("GET", hub.storage, path), token, 400),
        (hub.signed("GET", hub.endpoint, path), token, 404),
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(url, headers=headers))
        assert caught.value.code == status


def test_files_already_on_the_hub_are_not_uploaded_again(hub, tmp_path) -> None:
    hub.create(REPOSITORY)
    files = {"z": LARGE, "x.parquet": PARQUET, "y": b"y"}
    first = commit(hub, tmp_path, files)
    hub.clear_log()
    assert commit(hub, tmp_path, files) == first
    second = commit(hub, tmp_path, {**files, "y": b"other", "copy.parquet": PARQUET})
    assert second != first
    assert not hub.requests("storage-upload")
    assert len(hub.requests("commit")) == 1
    assert hub.files(REPOSITORY)["copy.parquet"] == PARQUET


def test_commit_with_outdated_parent_is_rejected(hub, tmp_path) -> None:
    hub.create(REPOSITORY)
    first = commit(hub, tmp_path, {"y": b"y"})["commit"]
    pushed = []
    hub.before_commit(lambda: pushed.append(hub.push(REPOSITORY, {"theirs": b"1"}).oid))
    rejected = commit(hub, tmp_path, {"ours": b"1"}, parent=first)
    assert (rejected["error"], rejected["status"]) == ("HfHubHTTPError", 412)
    assert hub.files(REPOSITORY) == {"y": b"y", "theirs": b"1"}
    assert "commit" in commit(hub, tmp_path, {"ours": b"1"}, parent=pushed[0])
    assert hub.files(REPOSITORY) == {"y": b"y", "theirs": b"1", "ours": b"1"}


def test_permissions_by_token(hub, tmp_path) -> None:
    hub.create(REPOSITORY, private=True)
    commit(hub, tmp_path, {"x.parquet": PARQUET, "y": b"y"})

    def client(repository: str) -> dict[str, object]:
        from huggingface_hub import HfApi

        def outcome(call, *args, **kwargs) -> list[object]:
            try:
                call(*args, **kwargs)
            except Exception as error:
                return [type(error).__name__, error.response.status_code]
            return ["ok"]

        seen: dict[str, object] = {}
        for number, token in enumerate(("hf_anna", "hf_anna_reads", "hf_bert", "hf_wrong", False)):
            api, data = HfApi(token=token), {"repo_type": "dataset"}
            add = {"path_or_fileobj": b"1", "path_in_repo": f"by {token}"}
            seen[str(token)] = {
                "whoami": outcome(api.whoami) if token else None,
                "info": outcome(api.repo_info, repository, **data),
                "list": outcome(api.list_repo_files, repository, **data),
                "regular": outcome(api.hf_hub_download, repository, "y", cache_dir=f"{number}", **data),
                "large": outcome(api.hf_hub_download, repository, "x.parquet", cache_dir=f"{number}", **data),
                "write": outcome(api.upload_file, repo_id=repository, **add, **data),
                "create": outcome(api.create_repo, "anna/new", **data),
                "exists": outcome(api.create_repo, repository, exist_ok=True, **data),
            }
        return seen

    # The environment contains the token of Anna. A client with an explicit token must not use it.
    seen = run_client(hub, client, tmp_path / "new", token="hf_anna", arguments={"repository": REPOSITORY}).value
    readable = dict.fromkeys(("info", "list", "regular", "large"), ["ok"])
    assert seen["hf_anna"] == {"whoami": ["ok"], **readable, "write": ["ok"], "create": ["ok"], "exists": ["ok"]}
    forbidden = ["HfHubHTTPError", 403]
    assert seen["hf_anna_reads"] == {
        "whoami": ["ok"], **readable, "write": forbidden, "create": forbidden, "exists": ["ok"]
    }  # fmt: skip
    missing = ["RepositoryNotFoundError", 404]
    assert seen["hf_bert"] == {
        "whoami": ["ok"], **dict.fromkeys(readable, missing), "write": missing, "create": forbidden,
        "exists": forbidden,
    }  # fmt: skip
    assert set(map(tuple, seen["hf_wrong"].values())) == {("HfHubHTTPError", 401)}
    anonymous = ["RepositoryNotFoundError", 401]
    assert {name: seen["False"][name] for name in readable} == dict.fromkeys(readable, anonymous)
    assert seen["False"]["create"] == ["HfHubHTTPError", 401]
    assert list(hub.files(REPOSITORY)) == ["x.parquet", "y", "by hf_anna"]


def test_missing_repositories_revisions_and_files_raise_specific_errors(hub, tmp_path) -> None:
    hub.create(REPOSITORY)

    def client(repository: str) -> list[str]:
        from huggingface_hub import CommitOperationDelete, HfApi

        api, data = HfApi(), {"repo_type": "dataset"}
        delete = {"operations": [CommitOperationDelete("none")], "commit_message": "Delete"}
        seen = []
        for call in (
            lambda: api.repo_info("anna/none", **data),
            lambda: api.repo_info(repository, revision="none", **data),
            lambda: list(api.list_repo_tree(repository, "none", **data)),
            lambda: api.hf_hub_download(repository, "none", **data),
            lambda: api.hf_hub_download(repository, "none", revision="none", **data),
            lambda: api.create_commit(repository, revision="none", **delete, **data),
            lambda: api.create_commit(repository, **delete, **data),
            lambda: api.create_repo(repository, **data),
            lambda: api.delete_repo("anna/none", **data),
        ):
            try:
                call()
            except Exception as error:
                seen.append(f"{type(error).__name__} {error.response.status_code}")
        return seen

    assert run_client(hub, client, tmp_path, token="hf_anna", arguments={"repository": REPOSITORY}).value == [
        "RepositoryNotFoundError 404",
        "RevisionNotFoundError 404",
        "RemoteEntryNotFoundError 404",
        "RemoteEntryNotFoundError 404",
        "RevisionNotFoundError 404",
        "RevisionNotFoundError 404",
        "RemoteEntryNotFoundError 404",
        "HfHubHTTPError 409",
        "RepositoryNotFoundError 404",
    ]


def test_branches_and_tags_of_a_model_repository(hub, tmp_path) -> None:
    def client() -> dict[str, object]:
        from pathlib import Path

        from huggingface_hub import HfApi

        api = HfApi()
        name = api.create_repo("model").repo_id
        first = api.upload_file(repo_id=name, path_or_fileobj=b"1", path_in_repo="x").oid
        api.create_branch(name, branch="feature/a")
        api.create_branch(name, branch="feature/a", exist_ok=True)
        api.create_tag(name, tag="v1", revision="feature/a")
        api.upload_file(repo_id=name, path_or_fileobj=b"2", path_in_repo="x", revision="feature/a")
        refs = api.list_repo_refs(name)
        revisions = ["main", "feature/a", "v1", first]
        contents = [Path(api.hf_hub_download(name, "x", revision=revision)).read_text() for revision in revisions]
        named = [[ref.name for ref in refs.branches], [ref.name for ref in refs.tags]]
        api.delete_tag(name, tag="v1")
        api.delete_branch(name, branch="feature/a")
        refs = api.list_repo_refs(name)
        left = [len(refs.branches), len(refs.tags)]
        api.delete_repo(name)
        return {"name": name, "contents": contents, "named": named, "left": left, "exists": api.repo_exists(name)}

    assert run_client(hub, client, tmp_path, token="hf_anna").value == {
        "name": "anna/model",
        "contents": ["1", "2", "1", "1"],
        "named": [["main", "feature/a"], ["v1"]],
        "left": [1, 0],
        "exists": False,
    }


def test_commit_with_missing_lfs_object_is_rejected(hub, tmp_path) -> None:
    hub.create(REPOSITORY)
    hub.before_commit(lambda: hub.repository(REPOSITORY).objects.clear())
    rejected = commit(hub, tmp_path, {"x.parquet": PARQUET})
    assert (rejected["error"], rejected["status"]) == ("BadRequestError", 400)
    assert hub.files(REPOSITORY) == {}


@retries
def test_interrupted_upload_is_retried(hub, tmp_path) -> None:
    hub.create(REPOSITORY)
    hub.drop_connection_next("storage-upload")
    assert "commit" in commit(hub, tmp_path, {"z": LARGE})
    assert [(upload.received, upload.status) for upload in hub.requests("storage-upload")] == [
        (500, 0),
        (1000, 200),
        (1000, 200),
        (560, 200),
    ]
    assert hub.files(REPOSITORY) == {"z": LARGE}


def test_rerun_after_failed_upload_uploads_only_missing_files(hub, tmp_path) -> None:
    hub.create(REPOSITORY)
    files = {f"{number}.parquet": PARQUET + bytes([number]) for number in range(6)}
    hub.fail_next("storage-upload", status=403)
    assert commit(hub, tmp_path, files)["error"] == "RuntimeError"
    assert hub.files(REPOSITORY) == {}
    stored = len(hub.repository(REPOSITORY).objects)
    assert stored < len(files)
    hub.clear_log()
    assert "commit" in commit(hub, tmp_path, files)
    assert len(hub.requests("storage-upload")) == len(files) - stored
    assert hub.files(REPOSITORY) == files


def test_failed_commit_has_no_effect_and_commit_with_lost_reply_has_an_effect(hub, tmp_path) -> None:
    hub.create(REPOSITORY)
    hub.fail_next("commit", status=503)
    failed = commit(hub, tmp_path, {"x.parquet": PARQUET})
    assert (failed["error"], failed["status"]) == ("HfHubHTTPError", 503)
    assert hub.files(REPOSITORY) == {}
    hub.lose_reply_to("commit")
    assert commit(hub, tmp_path, {"x.parquet": PARQUET})["error"] == "RemoteProtocolError"
    assert hub.files(REPOSITORY) == {"x.parquet": PARQUET}
    hub.clear_log()
    assert commit(hub, tmp_path, {"x.parquet": PARQUET}) == {"commit": hub.repository(REPOSITORY).at("main").oid}
    assert not hub.requests("storage-upload") and not hub.requests("commit")


@retries
def test_interrupted_download_resumes(hub, tmp_path) -> None:
    mebibyte = 2**20
    # Half of the content is more than the 10 MiB that a client writes at once.
    content = bytes(range(256)) * (22 * mebibyte // 256)
    hub.create(REPOSITORY)
    hub.push(REPOSITORY, {"z": content})
    hub.drop_connection_next("storage-download")

    def client(repository: str) -> list[str]:
        import hashlib
        from pathlib import Path

        from huggingface_hub import HfFileSystem, hf_hub_download

        content = Path(hf_hub_download(repository, "z", repo_type="dataset")).read_bytes()
        with HfFileSystem().open(f"datasets/{repository}/z", block_size=1000) as file:
            file.seek(-5, 2)
            end = file.read().hex()
        return [hashlib.sha256(content).hexdigest(), end]

    seen = run_client(hub, client, tmp_path / "new", arguments={"repository": REPOSITORY}).value
    assert seen == [hashlib.sha256(content).hexdigest(), content[-5:].hex()]
    downloads = [(download.sent, download.status) for download in hub.requests("storage-download")]
    assert downloads == [(11 * mebibyte, 0), (12 * mebibyte, 206), (5, 206)]
    assert hub.bytes_served(f"/storage/datasets/{REPOSITORY}") == 23 * mebibyte + 5


def test_datasets_can_push_and_load(hub, tmp_path) -> None:
    def client(repository: str) -> dict[str, object]:
        from datasets import Dataset, load_dataset

        rows = Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 1, 0]})
        first = rows.push_to_hub(repository, private=True).oid
        rows.select([1]).push_to_hub(repository)
        rows.select([0]).push_to_hub(repository, config_name="other")
        latest, old = load_dataset(repository, split="train"), load_dataset(repository, revision=first)
        streamed = load_dataset(repository, "other", split="train", streaming=True)
        return {"latest": latest.to_dict(), "old": old["train"].to_dict(), "streamed": list(streamed)}

    seen = run_client(hub, client, tmp_path, token="hf_anna", arguments={"repository": REPOSITORY}).value
    assert seen["old"] == {"text": ["a", "b", "c"], "label": [0, 1, 0]}
    assert seen["latest"] == {"text": ["b"], "label": [1]}
    assert seen["streamed"] == [{"text": "a", "label": 0}]
    assert hub.repository(REPOSITORY).is_private
    assert not any(request.has_token for request in hub.log if request.host == STORAGE_HOST)
    assert not hub.requests("unknown")


def test_load_dataset_uses_the_configurations_of_the_card(hub, tmp_path) -> None:
    hub.create(REPOSITORY, private=True)
    card = """---
configs:
- config_name: default
  default: true
  data_files: [{split: train, path: data/*/train-*}]
- config_name: a
  data_files: [{split: train, path: data/a/train-*}]
- config_name: b
  data_files: [{split: train, path: data/b/train-*}]
---
"""

    def client(repository: str, card: str) -> dict[str, object]:
        import io

        from datasets import Dataset, load_dataset
        from huggingface_hub import CommitOperationAdd, HfApi

        def parquet(text: str) -> bytes:
            file = io.BytesIO()
            Dataset.from_dict({"text": [text]}).to_parquet(file)
            return file.getvalue()

        files = {f"data/{name}/train-00000-of-00001.parquet": parquet(name) for name in "ab"}
        additions = [CommitOperationAdd(path, content) for path, content in files.items()]
        additions.append(CommitOperationAdd("README.md", card.encode()))
        HfApi().create_commit(repository, additions, commit_message="Upload", repo_type="dataset")
        names = {"all": None, "a": "a", "b": "b"}
        seen = {key: load_dataset(repository, name, split="train")["text"][:] for key, name in names.items()}
        try:
            load_dataset(repository, "c")
        except ValueError as error:
            seen["c"] = str(error)
        return seen

    arguments = {"repository": REPOSITORY, "card": card}
    seen = run_client(hub, client, tmp_path, token="hf_anna", arguments=arguments).value
    assert "['default', 'a', 'b']" in seen.pop("c")
    assert seen == {"all": ["a", "b"], "a": ["a"], "b": ["b"]}
    denied = "from datasets import load_dataset; load_dataset('anna/voices')"
    run = run_client(hub, denied, tmp_path / "new", token="hf_bert", check=False)
    assert run.returncode == 1
    assert "DatasetNotFoundError" in run.stderr


def test_many_files_are_one_commit_with_two_requests_per_file(hub, tmp_path) -> None:
    hub.create(REPOSITORY)
    files = {f"data/{number}/train-00000-of-00001.parquet": PARQUET + b"%d" % number for number in range(300)}
    hub.clear_log()
    assert "commit" in commit(hub, tmp_path, files)
    assert Counter(request.kind for request in hub.log) == {
        "preupload": math.ceil(len(files) / 256),
        "lfs-batch": math.ceil(len(files) / 256),
        "storage-upload": len(files),
        "lfs-verify": len(files),
        "commit": 1,
    }
    assert hub.files(REPOSITORY) == files


def test_unused_or_unknown_fault_raises_an_error() -> None:
    with pytest.raises(AssertionError, match="commit"), HubServer() as hub:
        hub.fail_next("commit")
    with pytest.raises(ValueError, match="'commits-typo'.*preupload"), HubServer() as hub:
        hub.fail_next("commits-typo")
