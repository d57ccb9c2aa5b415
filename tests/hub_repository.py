"""Repositories of the local Hub, their commits and files. Used by the server in `hub_server.py`."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from typing import Any


LFS_SUFFIXES = (".parquet", ".arrow", ".safetensors", ".bin")
GIT_ATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()


@dataclass(frozen=True)
class Blob:
    """The content of a file. For an LFS file, git stores a pointer instead of the content."""

    content: bytes
    is_lfs: bool = False

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def pointer(self) -> bytes:
        size = len(self.content)
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {size}\n".encode()

    @cached_property
    def oid(self) -> str:
        stored = self.pointer if self.is_lfs else self.content
        return hashlib.sha1(b"blob %d\0" % len(stored) + stored).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_lfs else self.oid

    def lfs(self, name: str) -> dict[str, Any]:
        """Return the LFS fields of a listing, with the hash under the key `name`. Empty for a regular file."""
        sizes = {"size": len(self.content), "pointerSize": len(self.pointer)}
        return {"lfs": {name: self.sha256, **sizes}} if self.is_lfs else {}


@dataclass(frozen=True)
class Commit:
    """A snapshot of all files, by path."""

    parent: str | None
    author: str
    title: str
    description: str
    files: Mapping[str, Blob]
    created_at: datetime = field(default_factory=lambda: datetime.now(timezone.utc))

    @cached_property
    def oid(self) -> str:
        files = sorted((path, blob.oid) for path, blob in self.files.items())
        fields = [self.parent, self.author, self.title, self.description, str(self.created_at), files]
        return hashlib.sha1(json.dumps(fields).encode()).hexdigest()

    @property
    def date(self) -> str:
        return self.created_at.strftime("%Y-%m-%dT%H:%M:%S.000Z")

    def entries(self, folder: str = "", recursive: bool = True) -> list[dict[str, Any]]:
        """Return the files and folders below a folder in the format of the Hub."""
        prefix = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, Any]] = {}
        trees: dict[str, Any] = defaultdict(hashlib.sha1)
        for path in sorted(path for path in self.files if path.startswith(prefix)):
            blob, parts = self.files[path], path[len(prefix) :].split("/")
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                parent = prefix + "/".join(parts[:depth])
                trees[parent].update(f"{path} {blob.oid}\n".encode())
                entries.setdefault(parent, {"type": "directory", "size": 0, "path": parent})
            if recursive or len(parts) == 1:
                entry = {"type": "file", "oid": blob.oid, "size": len(blob.content), "path": path}
                entries[path] = {**entry, **blob.lfs("oid")}
        for parent, tree in trees.items():
            entries[parent]["oid"] = tree.hexdigest()
        return list(entries.values())


@dataclass
class Repository:
    """A repository. `key` is the path of its page: `"datasets/anna/voices"`, or `"anna/bert"` for a model."""

    key: str
    owner: str
    is_private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    objects: dict[str, Blob] = field(default_factory=dict)
    parts: dict[str, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))

    def __post_init__(self) -> None:
        self.commit("main", {".gitattributes": Blob(GIT_ATTRIBUTES)}, self.owner, "initial commit")

    @property
    def name(self) -> str:
        return "/".join(self.key.split("/")[-2:])

    def commit(self, branch: str, files: Mapping[str, Blob], author: str, title: str, description: str = "") -> Commit:
        commit = Commit(self.branches.get(branch), author, title, description, files)
        self.commits[commit.oid] = commit
        self.branches[branch] = commit.oid
        return commit

    def at(self, revision: str) -> Commit:
        """
        Return the commit of a branch, a tag or a commit hash.

        Raises:
            `KeyError`: If the revision does not exist.
        """
        return self.commits[self.branches.get(revision) or self.tags.get(revision) or revision]

    def history(self, revision: str = "main") -> list[Commit]:
        """Return the commits up to a revision, latest first."""
        commits = [self.at(revision)]
        while (parent := commits[-1].parent) is not None:
            commits.append(self.commits[parent])
        return commits
