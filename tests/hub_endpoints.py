"""The endpoints of the local Hub. Used by the server in `hub_server.py`.

The protocol is derived from the source of the clients (`huggingface_hub` 2.4), because it is not documented.
`ENDPOINTS` lists all endpoints.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlencode

from hub_repository import LFS_SUFFIXES, Blob, Commit, Repository


if TYPE_CHECKING:
    from hub_server import HubServer


@dataclass(frozen=True)
class User:
    name: str
    may_write: bool


@dataclass(frozen=True)
class Request:
    """The parts of an HTTP request that an endpoint uses. `groups` are the named parts of the path."""

    method: str
    path: str
    groups: Mapping[str, str | None]
    query: Mapping[str, str]
    headers: Message
    body: bytes
    user: User | None

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def key(self) -> str:
        kind, name = self.groups.get("type"), self.groups["name"]
        return str(name) if kind in (None, "models") else f"{kind}/{name}"

    @property
    def revision(self) -> str:
        return self.groups.get("revision") or "main"


@dataclass(frozen=True)
class Reply:
    """An HTTP reply. A body that is not `bytes` is sent as JSON."""

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


class RequestError(Exception):
    """An error reply. The clients distinguish errors by the headers `X-Error-Code` and `X-Error-Message`."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        error_headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **headers}
        self.reply = Reply({"error": message}, status, error_headers)


def _readable_repository(hub: HubServer, request: Request) -> Repository:
    repository = hub.repositories.get(request.key)
    name = request.user.name if request.user else None
    if repository is None or (repository.is_private and repository.owner != name):
        # A private repository looks like a missing one. Without a token, the Hub sends a 401 without an error code.
        # The clients then rely on the URL, which must be https, so this server sends the code.
        raise RequestError(404 if request.user else 401, "Repository not found", "RepoNotFound")
    return repository


def _writable_repository(hub: HubServer, request: Request) -> Repository:
    repository = _readable_repository(hub, request)
    _check_may_write(request, repository.owner)
    return repository


def _check_may_write(request: Request, namespace: str | None) -> None:
    if request.user is None:
        raise RequestError(401, "A token is required")
    if not request.user.may_write:
        raise RequestError(403, f"This token of {request.user.name} is read-only")
    if namespace not in (None, request.user.name):
        raise RequestError(403, f"{request.user.name} may not write to {namespace}")


def _commit_at(repository: Repository, revision: str) -> Commit:
    try:
        return repository.at(revision)
    except KeyError:
        raise RequestError(404, f"Invalid rev id: {revision}", "RevisionNotFound") from None


def whoami(hub: HubServer, request: Request) -> Reply:
    if request.user is None:
        raise RequestError(401, "A token is required")
    token = {"displayName": "test", "role": "write" if request.user.may_write else "read"}
    auth = {"type": "access_token", "accessToken": token}
    return Reply({"type": "user", "name": request.user.name, "orgs": [], "auth": auth})


def _owner_and_key(request: Request) -> tuple[str, str]:
    """Return the owner and the key of the repository to create or delete."""
    parameters = request.json
    _check_may_write(request, parameters.get("organization"))
    assert request.user is not None
    kind = parameters.get("type") or "model"
    return request.user.name, ("" if kind == "model" else f"{kind}s/") + f"{request.user.name}/{parameters['name']}"


def create_repo(hub: HubServer, request: Request) -> Reply:
    owner, key = _owner_and_key(request)
    answer = {"url": f"{hub.endpoint}/{key}"}
    if key in hub.repositories:
        return Reply({**answer, "error": f"{key} already exists"}, 409)
    # huggingface_hub sent `private` before it sent `visibility`.
    is_private = request.json.get("visibility") == "private" or bool(request.json.get("private"))
    hub.repositories[key] = Repository(key, owner, is_private)
    return Reply(answer)


def delete_repo(hub: HubServer, request: Request) -> Reply:
    _, key = _owner_and_key(request)
    if hub.repositories.pop(key, None) is None:
        raise RequestError(404, "Repository not found", "RepoNotFound")
    return Reply({})


def validate_yaml(hub: HubServer, request: Request) -> Reply:
    has_metadata = request.json["content"].startswith("---")
    return Reply({"errors": [], "warnings": [] if has_metadata else [{"message": "The card has no metadata"}]})


def repo_info(hub: HubServer, request: Request) -> Reply:
    repository = _readable_repository(hub, request)
    commit = _commit_at(repository, request.revision)
    siblings: list[dict[str, Any]] = [{"rfilename": path} for path in sorted(commit.files)]
    if "blobs" in request.query:
        for sibling in siblings:
            blob = commit.files[sibling["rfilename"]]
            sibling.update(size=len(blob.content), blobId=blob.oid, **blob.lfs("sha256"))
    fields = {"id": repository.name, "author": repository.owner, "private": repository.is_private, "gated": False}
    return Reply({**fields, "sha": commit.oid, "lastModified": commit.date, "tags": [], "siblings": siblings})


def tree(hub: HubServer, request: Request) -> Reply:
    folder = (request.groups["path"] or "").strip("/")
    recursive = request.query.get("recursive", "").lower() in ("true", "1")
    entries = _commit_at(_readable_repository(hub, request), request.revision).entries(folder, recursive)
    if folder and not entries:
        raise RequestError(404, f"{folder} does not exist", "EntryNotFound")
    start = int(request.query.get("cursor", 0))
    end = start + hub.page_size
    next_page = f"{hub.endpoint}{request.path}?{urlencode({**request.query, 'cursor': end})}"
    return Reply(entries[start:end], headers={"Link": f'<{next_page}>; rel="next"'} if end < len(entries) else {})


def paths_info(hub: HubServer, request: Request) -> Reply:
    requested = set(parse_qs(request.body.decode()).get("paths", []))
    entries = _commit_at(_readable_repository(hub, request), request.revision).entries()
    return Reply([entry for entry in entries if entry["path"] in requested])


def refs(hub: HubServer, request: Request) -> Reply:
    repository = _readable_repository(hub, request)
    answer: dict[str, list[dict[str, str]]] = {"converts": [], "pullRequests": []}
    for kind, folder, refs_of_kind in (("branches", "heads", repository.branches), ("tags", "tags", repository.tags)):
        answer[kind] = [
            {"name": name, "ref": f"refs/{folder}/{name}", "targetCommit": oid} for name, oid in refs_of_kind.items()
        ]
    return Reply(answer)


def commits(hub: HubServer, request: Request) -> Reply:
    repository = _readable_repository(hub, request)
    answer = []
    for commit in repository.history(_commit_at(repository, request.revision).oid):
        fields = {"title": commit.title, "message": commit.description, "authors": [{"user": commit.author}]}
        answer.append({"id": commit.oid, "date": commit.date, **fields})
    return Reply(answer)


def branch(hub: HubServer, request: Request) -> Reply:
    repository, name = _writable_repository(hub, request), request.revision
    if request.method == "DELETE":
        return _delete_ref(repository.branches, name)
    if name in repository.branches:
        raise RequestError(409, f"The branch {name} already exists")
    repository.branches[name] = _commit_at(repository, request.json.get("startingPoint") or "main").oid
    return Reply({})


def tag(hub: HubServer, request: Request) -> Reply:
    repository, revision = _writable_repository(hub, request), request.revision
    if request.method == "DELETE":
        return _delete_ref(repository.tags, revision)
    name = request.json["tag"]
    if name in repository.tags:
        raise RequestError(409, f"The tag {name} already exists")
    repository.tags[name] = _commit_at(repository, revision).oid
    return Reply({})


def _delete_ref(names: dict[str, str], name: str) -> Reply:
    if names.pop(name, None) is None:
        raise RequestError(404, f"{name} does not exist", "RevisionNotFound")
    return Reply({})


def preupload(hub: HubServer, request: Request) -> Reply:
    files = _commit_at(_writable_repository(hub, request), request.revision).files
    answer = []
    for file in request.json["files"]:
        path, blob = file["path"], files.get(file["path"])
        is_lfs = file["size"] >= hub.lfs_threshold or path.endswith(LFS_SUFFIXES)
        known = {"oid": blob.etag} if blob else {}
        answer.append({"path": path, "uploadMode": "lfs" if is_lfs else "regular", "shouldIgnore": False, **known})
    return Reply({"files": answer})


def lfs_batch(hub: HubServer, request: Request) -> Reply:
    repository = _writable_repository(hub, request)
    answer = []
    for lfs_object in request.json["objects"]:
        if lfs_object["oid"] not in repository.objects:
            actions = _upload_actions(hub, repository, lfs_object["oid"], lfs_object["size"])
            lfs_object = {**lfs_object, "actions": actions}
        answer.append(lfs_object)
    return Reply({"transfer": "basic", "objects": answer})


def _upload_actions(hub: HubServer, repository: Repository, oid: str, size: int) -> dict[str, Any]:
    verify = {"href": f"{hub.endpoint}/{repository.key}.git/info/lfs/objects/verify"}
    path = f"/storage/{repository.key}/{oid}"
    if size <= hub.part_size:
        return {"upload": {"href": hub.signed("PUT", hub.storage, path)}, "verify": verify}
    num_parts = math.ceil(size / hub.part_size)
    header = {f"{part:05d}": hub.signed("PUT", hub.storage, f"{path}/{part}") for part in range(1, num_parts + 1)}
    complete = hub.signed("POST", hub.endpoint, f"/api/complete-multipart/{repository.key}/{oid}")
    return {"upload": {"href": complete, "header": {"chunk_size": str(hub.part_size), **header}}, "verify": verify}


def _repository_of_signed_url(hub: HubServer, request: Request) -> Repository:
    """Return the repository of a signed URL. Storage accepts only the signature and no token."""
    if "Authorization" in request.headers:
        raise RequestError(400, "Storage accepts only the signature of the URL and no token")
    if request.query.get("signature") != hub.signature(request.method.replace("HEAD", "GET"), request.path):
        raise RequestError(403, "The signature is invalid")
    return hub.repositories[request.key]


def storage_upload(hub: HubServer, request: Request) -> Reply:
    repository, oid, part = _repository_of_signed_url(hub, request), str(request.groups["oid"]), request.groups["part"]
    if part is None:
        _store(repository, oid, request.body)
    else:
        repository.parts[oid][int(part)] = request.body
    return Reply(b"", headers={"ETag": f'"{hashlib.sha1(request.body).hexdigest()}"'})


def lfs_complete(hub: HubServer, request: Request) -> Reply:
    repository, oid = _repository_of_signed_url(hub, request), str(request.groups["oid"])
    parts = repository.parts[oid]
    etags = {part["partNumber"]: part["etag"].strip('"') for part in request.json["parts"]}
    if etags != {number: hashlib.sha1(part).hexdigest() for number, part in parts.items()}:
        raise RequestError(400, "The parts differ from the uploaded parts")
    _store(repository, oid, b"".join(parts[number] for number in sorted(parts)))
    del repository.parts[oid]
    return Reply({})


def _store(repository: Repository, oid: str, content: bytes) -> None:
    blob = Blob(content, is_lfs=True)
    if blob.sha256 != oid:
        raise RequestError(400, f"The content of {oid} has the hash {blob.sha256}")
    repository.objects[oid] = blob


def lfs_verify(hub: HubServer, request: Request) -> Reply:
    blob = _writable_repository(hub, request).objects.get(request.json["oid"])
    if blob is None or len(blob.content) != request.json["size"]:
        raise RequestError(404, f"{request.json['oid']} was not uploaded")
    return Reply({})


def commit(hub: HubServer, request: Request) -> Reply:
    repository, name = _writable_repository(hub, request), request.revision
    if name not in repository.branches:
        raise RequestError(404, f"There is no branch {name}", "RevisionNotFound")
    if "create_pr" in request.query:
        raise RequestError(400, "This server does not support pull requests")
    assert request.user is not None
    header, *changes = (json.loads(line) for line in request.body.splitlines())
    parent = header["value"].get("parentCommit")
    if parent is not None and not repository.branches[name].startswith(parent):
        raise RequestError(412, f"The latest commit of {name} is not {parent}")
    files = dict(repository.at(name).files)
    for change in changes:
        _apply_change(change["key"], change["value"], files, repository.objects)
    fields = header["value"]
    new_commit = repository.commit(name, files, request.user.name, fields["summary"], fields.get("description", ""))
    return Reply(
        {"commitOid": new_commit.oid, "commitUrl": f"{hub.endpoint}/{repository.key}/commit/{new_commit.oid}"}
    )


def _apply_change(key: str, value: dict[str, Any], files: dict[str, Blob], objects: Mapping[str, Blob]) -> None:
    path = value["path"]
    if key == "file":
        files[path] = Blob(base64.b64decode(value["content"]))
    elif key == "lfsFile":
        if value["oid"] not in objects:
            raise RequestError(400, f"{path} points to an LFS object that does not exist: {value['oid']}")
        files[path] = objects[value["oid"]]
    elif key in ("deletedFile", "deletedFolder"):
        folder = path.rstrip("/") + "/"
        deleted = [name for name in files if (name == path if key == "deletedFile" else name.startswith(folder))]
        if not deleted:
            raise RequestError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        for name in deleted:
            del files[name]
    else:
        raise RequestError(400, f"Unknown operation {key}")


def resolve(hub: HubServer, request: Request) -> Reply:
    repository, path = _readable_repository(hub, request), str(request.groups["path"])
    commit = _commit_at(repository, request.revision)
    blob, headers = commit.files.get(path), {"X-Repo-Commit": commit.oid}
    if blob is None:
        raise RequestError(404, f"{path} does not exist", "EntryNotFound", **headers)
    headers["ETag"] = f'"{blob.etag}"'
    if not blob.is_lfs:
        return _range_reply(request, blob.content, headers)
    location = hub.signed("GET", hub.storage, f"/storage/{repository.key}/{blob.sha256}")
    linked = {"X-Linked-ETag": f'"{blob.etag}"', "X-Linked-Size": str(len(blob.content))}
    return Reply(b"", 302, {**headers, **linked, "Location": location})


def storage_download(hub: HubServer, request: Request) -> Reply:
    oid = str(request.groups["oid"])
    return _range_reply(request, _repository_of_signed_url(hub, request).objects[oid].content, {"ETag": f'"{oid}"'})


def _range_reply(request: Request, content: bytes, headers: dict[str, str]) -> Reply:
    headers = {**headers, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("Range", ""))
    if match is None:
        return Reply(content, headers=headers)
    first, last = match.groups()
    start = int(first) if first else max(len(content) - int(last), 0)
    end = min(int(last) + 1 if first and last else len(content), len(content))
    if start >= end:
        raise RequestError(416, "The range is outside the file", **{"Content-Range": f"bytes */{len(content)}"})
    headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
    return Reply(content[start:end], 206, headers)


REPOSITORY = r"(?P<type>models|datasets|spaces)/(?P<name>[^/]+/[^/]+)"
PAGE = r"(?:(?P<type>datasets|spaces)/)?(?P<name>[^/]+/[^/]+?)"
REVISION = r"(?P<revision>[^/]+)"
STORED = rf"{PAGE}/(?P<oid>[0-9a-f]{{64}})"
# Maps the kind of a request, as used in the log and in faults, to its HTTP methods, path and function.
ENDPOINTS: dict[str, tuple[str, str, Callable[[HubServer, Request], Reply]]] = {
    "whoami": ("GET", r"/api/whoami-v2", whoami),
    "create-repo": ("POST", r"/api/repos/create", create_repo),
    "delete-repo": ("DELETE", r"/api/repos/delete", delete_repo),
    "validate-yaml": ("POST", r"/api/validate-yaml", validate_yaml),
    "repo-info": ("GET", rf"/api/{REPOSITORY}(?:/revision/{REVISION})?", repo_info),
    "tree": ("GET", rf"/api/{REPOSITORY}/tree/{REVISION}(?:/(?P<path>.*))?", tree),
    "paths-info": ("POST", rf"/api/{REPOSITORY}/paths-info/{REVISION}", paths_info),
    "refs": ("GET", rf"/api/{REPOSITORY}/refs", refs),
    "commits": ("GET", rf"/api/{REPOSITORY}/commits/{REVISION}", commits),
    "branch": ("POST DELETE", rf"/api/{REPOSITORY}/branch/{REVISION}", branch),
    "tag": ("POST DELETE", rf"/api/{REPOSITORY}/tag/{REVISION}", tag),
    "preupload": ("POST", rf"/api/{REPOSITORY}/preupload/{REVISION}", preupload),
    "commit": ("POST", rf"/api/{REPOSITORY}/commit/{REVISION}", commit),
    "lfs-batch": ("POST", rf"/{PAGE}\.git/info/lfs/objects/batch", lfs_batch),
    "lfs-complete": ("POST", rf"/api/complete-multipart/{STORED}", lfs_complete),
    "lfs-verify": ("POST", rf"/{PAGE}\.git/info/lfs/objects/verify", lfs_verify),
    "resolve": ("GET HEAD", rf"/{PAGE}/resolve/{REVISION}/(?P<path>.+)", resolve),
    "storage-upload": ("PUT", rf"/storage/{STORED}(?:/(?P<part>\d+))?", storage_upload),
    "storage-download": ("GET HEAD", rf"/storage/{STORED}", storage_download),
}
