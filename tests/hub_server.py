"""A small Hugging Face Hub on the loopback interface, for tests with the unpatched `huggingface_hub` and `datasets`.

The server implements the protocol of the Hub for file repositories: accounts, creation, commits with regular and LFS
files, branches and tags, paginated listings, and downloads by revision. As on the Hub, storage has a different host
name than the endpoint, so a test can detect whether a token leaks to storage. All data is in memory. A test can read
the request log and inject faults: an error status, a connection that is closed half-way, a lost reply, or a concurrent
push.

The server does not support Xet, pull requests, organizations, gated repositories, `expand`, copies between
repositories, or limits on rates and sizes. It does not parse the YAML of a card.
"""

from __future__ import annotations

import hmac
import inspect
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import textwrap
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from hub_endpoints import ENDPOINTS, Reply, Request, RequestError, User
from hub_repository import LFS_SUFFIXES, Blob, Commit, Repository


# The clients recognize storage by its host name and send no token to it.
ENDPOINT_HOST, STORAGE_HOST = "127.0.0.1", "localhost"


@dataclass(frozen=True)
class LoggedRequest:
    """
    A request and its reply.

    Args:
        kind (`str`): A key of `ENDPOINTS`, or `"unknown"`.
        method (`str`): The HTTP method.
        path (`str`): The unquoted path, without the query.
        host (`str`): `ENDPOINT_HOST` or `STORAGE_HOST`.
        has_token (`bool`): Whether the request had an `Authorization` header.
        received (`int`): Size of the request body in bytes.
        status (`int`): Status of the reply, 0 if the reply was not sent completely.
        sent (`int`): Size of the sent reply body in bytes.
    """

    kind: str
    method: str
    path: str
    host: str
    has_token: bool
    received: int
    status: int
    sent: int


@dataclass(frozen=True)
class Fault:
    mode: Literal["status", "drop", "lose", "call"]
    status: int = 0
    callback: Callable[[], Any] | None = None


class HubServer:
    """
    The Hub server. It runs during a `with` block.

    Args:
        page_size (`int`, *optional*, defaults to `1000`): Number of entries per page of a listing.
        lfs_threshold (`int`, *optional*, defaults to 10 MiB): Files of at least this size in bytes are LFS files.
            Files with a suffix in `LFS_SUFFIXES` are always LFS files.
        part_size (`int`, *optional*, defaults to 64 MiB): Larger LFS files are uploaded in parts of this size in
            bytes.

    Raises:
        `AssertionError`: At the end of the block, if an injected fault was not used, or if an endpoint raised an
            unexpected error.

    Example:

    ```python
    with HubServer() as hub:
        hub.add_user("anna", token="hf_anna")
        run_client(hub, "from huggingface_hub import HfApi; print(HfApi().whoami())", tmp_path, token="hf_anna")
    ```
    """

    def __init__(self, *, page_size: int = 1000, lfs_threshold: int = 10 * 2**20, part_size: int = 64 * 2**20) -> None:
        self.page_size, self.lfs_threshold, self.part_size = page_size, lfs_threshold, part_size
        self.log: list[LoggedRequest] = []
        self.users: dict[str, User] = {}
        self.repositories: dict[str, Repository] = {}
        self.errors: list[Exception] = []
        self._lock = threading.RLock()
        self._faults: dict[str, deque[Fault]] = defaultdict(deque)
        self._secret = secrets.token_bytes()
        self._server = _Server((ENDPOINT_HOST, 0), _Handler)
        self._server.hub = self
        self.endpoint = f"http://{ENDPOINT_HOST}:{self._server.server_port}"
        self.storage = f"http://{STORAGE_HOST}:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        if error is None:
            unused = [kind for kind, faults in self._faults.items() if faults]
            assert not unused, f"no request used the injected faults: {unused}"
            assert not self.errors, f"endpoints raised errors: {self.errors}"

    def add_user(self, name: str, token: str, write: bool = True) -> None:
        """Add a token for a user. A user can have several tokens, and tokens with `write=False` are read-only."""
        with self._lock:
            self.users[token] = User(name, write)

    def repository(self, repo_id: str, repo_type: str = "dataset") -> Repository:
        """Return a repository of the server, without a request."""
        with self._lock:
            return self.repositories[repo_id if repo_type == "model" else f"{repo_type}s/{repo_id}"]

    def files(self, repo_id: str, revision: str = "main", repo_type: str = "dataset") -> dict[str, bytes]:
        """Return the contents of the files at a revision, by path, without `.gitattributes`."""
        with self._lock:
            files = self.repository(repo_id, repo_type).at(revision).files
            return {path: blob.content for path, blob in files.items() if path != ".gitattributes"}

    def create(self, repo_id: str, private: bool = False, repo_type: str = "dataset") -> Repository:
        """Create a repository without a request."""
        key = repo_id if repo_type == "model" else f"{repo_type}s/{repo_id}"
        with self._lock:
            return self.repositories.setdefault(key, Repository(key, repo_id.split("/")[0], private))

    def push(self, repo_id: str, files: Mapping[str, bytes | None], repo_type: str = "dataset") -> Commit:
        """Commit to the main branch without a request, as another user would. `None` deletes a file."""
        with self._lock:
            repository = self.repository(repo_id, repo_type)
            merged = dict(repository.at("main").files)
            for path, content in files.items():
                if content is None:
                    del merged[path]
                    continue
                blob = merged[path] = Blob(content, path.endswith(LFS_SUFFIXES) or len(content) >= self.lfs_threshold)
                if blob.is_lfs:
                    repository.objects[blob.sha256] = blob
            return repository.commit("main", merged, repository.owner, "A push by another user")

    def requests(self, kind: str | None = None, prefix: str = "", method: str | None = None) -> list[LoggedRequest]:
        """Return the logged requests with this kind, method and path prefix, in order."""
        with self._lock:
            log = list(self.log)
        return [
            request
            for request in log
            if kind in (None, request.kind) and method in (None, request.method) and request.path.startswith(prefix)
        ]

    def bytes_served(self, prefix: str = "", kind: str | None = None) -> int:
        return sum(request.sent for request in self.requests(kind, prefix))

    def bytes_received(self, prefix: str = "", kind: str | None = None) -> int:
        return sum(request.received for request in self.requests(kind, prefix))

    def clear_log(self) -> None:
        with self._lock:
            self.log.clear()

    def fail_next(self, kind: str, times: int = 1, status: int = 503) -> None:
        """Answer the next requests of a kind (a key of `ENDPOINTS`) with an error status, without executing them."""
        self._add_fault(kind, Fault("status", status), times)

    def drop_connection_next(self, kind: str, times: int = 1) -> None:
        """Close the connection in the middle of the request body, or of the reply body if the request has no body."""
        self._add_fault(kind, Fault("drop"), times)

    def lose_reply_to(self, kind: str, times: int = 1) -> None:
        """Execute the next requests of a kind, and close the connection before the reply."""
        self._add_fault(kind, Fault("lose"), times)

    def before_commit(self, callback: Callable[[], Any]) -> None:
        """Call a function once, after the next commit request arrives and before it is processed."""
        self._add_fault("commit", Fault("call", callback=callback), 1)

    def _add_fault(self, kind: str, fault: Fault, times: int) -> None:
        if kind not in ENDPOINTS:
            raise ValueError(f"kind={kind!r} is unknown. Use one of {', '.join(ENDPOINTS)}")
        with self._lock:
            self._faults[kind].extend([fault] * times)

    def next_fault(self, kind: str) -> Fault | None:
        with self._lock:
            return self._faults[kind].popleft() if self._faults[kind] else None

    def signature(self, method: str, path: str) -> str:
        return hmac.new(self._secret, f"{method} {path}".encode(), "sha256").hexdigest()

    def signed(self, method: str, host: str, path: str) -> str:
        """Return a signed URL, which needs no token."""
        return f"{host}{path}?signature={self.signature(method, path)}"

    def answer(self, kind: str, request: Request, fault: Fault | None) -> Reply:
        """Execute a request, unless a fault prevents it."""
        if fault is not None and fault.mode == "status":
            return RequestError(fault.status, "A fault that the test injected").reply
        try:
            if fault is not None and fault.callback is not None:
                fault.callback()
            with self._lock:
                return ENDPOINTS[kind][2](self, request)
        except RequestError as request_error:
            return request_error.reply
        except Exception as error:
            self.errors.append(error)
            return Reply({"error": repr(error)}, 501)  # the clients retry a 500, but not a 501

    def record(self, request: LoggedRequest) -> None:
        with self._lock:
            self.log.append(request)


class _Server(ThreadingHTTPServer):
    hub: HubServer
    daemon_threads = True
    block_on_close = False  # connections of clients stay open
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # headers and body of a reply in one packet

    def do_GET(self) -> None:
        hub, url = self.server.hub, urlsplit(self.path)
        host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        kind, groups = _endpoint(self.command, url.path)
        fault = hub.next_fault(kind)
        drop = fault is not None and fault.mode == "drop"
        length = int(self.headers.get("Content-Length") or 0)
        chunked = self.headers.get("Transfer-Encoding") == "chunked"
        truncate = drop and (length > 0 or chunked)
        body = b"".join(self._chunks(truncate)) if chunked else self.rfile.read(length // 2 if truncate else length)
        reply = self._reply(kind, groups, host, body, fault) if not truncate else Reply(b"")
        content = b"" if self.command == "HEAD" else reply.content
        is_complete = fault is None or fault.mode in ("status", "call")
        if not is_complete:
            content = content[: len(content) // 2] if drop else b""
        has_token = "Authorization" in self.headers
        status = reply.status if is_complete else 0
        # The request is logged before the reply, because the test may read the log after the reply.
        hub.record(
            LoggedRequest(kind, self.command, unquote(url.path), host, has_token, len(body), status, len(content))
        )
        if is_complete or (drop and content):
            self.send_response(reply.status)
            for name, value in {**reply.headers, "Content-Length": str(len(reply.content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
            self.wfile.flush()
        if not is_complete:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _reply(self, kind: str, groups: dict[str, str | None], host: str, body: bytes, fault: Fault | None) -> Reply:
        hub, url = self.server.hub, urlsplit(self.path)
        if kind == "unknown" or (host == STORAGE_HOST) != kind.startswith("storage-"):
            return Reply({"error": "Not found"}, 404)
        header, user = self.headers.get("Authorization"), None
        if header is not None and not kind.startswith("storage-"):
            user = hub.users.get(header.removeprefix("Bearer "))
            if user is None:
                return RequestError(401, "Invalid credentials in Authorization header").reply
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        return hub.answer(kind, Request(self.command, url.path, groups, query, self.headers, body, user), fault)

    def _chunks(self, truncate: bool) -> list[bytes]:
        """Read the chunks of a request body without a content length; only the first chunk if `truncate` is true."""
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
            if truncate:
                return chunks
        self.rfile.readline()
        return chunks

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _endpoint(method: str, path: str) -> tuple[str, dict[str, str | None]]:
    for kind, (methods, pattern, _) in ENDPOINTS.items():
        if method in methods.split() and (match := re.fullmatch(pattern, path)):
            groups = match.groupdict()
            return kind, {name: value and unquote(value) for name, value in groups.items()}
    return "unknown", {}


@dataclass(frozen=True)
class ClientRun:
    """The result of a client process. `value` is the return value of its function."""

    returncode: int
    stdout: str
    stderr: str
    value: Any = None


def run_client(
    hub: HubServer,
    client: str | Callable[..., Any],
    home: Path,
    *,
    token: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    check: bool = True,
) -> ClientRun:
    """
    Run code in a new process that uses `hub` as its Hub. The client libraries read their settings on import.

    Args:
        hub ([`HubServer`]): The server.
        client (`str` or `Callable`): Code or a function. The process receives only the source of the function, so the
            function must contain its imports.
        home (`Path`): Folder for the caches of the client libraries. A new folder is an empty cache.
        token (`str`, *optional*): The token of the client.
        arguments (`Mapping`, *optional*): Arguments of the function. Arguments and return value are encoded as JSON.
        check (`bool`, *optional*, defaults to `True`): Whether a failed process fails the test.
    """
    answer = home / "answer.json"
    home.mkdir(parents=True, exist_ok=True)
    answer.unlink(missing_ok=True)
    if callable(client):
        code = "from __future__ import annotations\n" + textwrap.dedent(inspect.getsource(client))
        code += f"\nimport json\nreturned = {client.__name__}(**json.loads({json.dumps(dict(arguments or {}))!r}))\n"
        code += f"with open({str(answer)!r}, 'w') as file:\n    json.dump(returned, file)\n"
    else:
        code = client
    script = home / "client.py"
    script.write_text(code)
    process = subprocess.run(
        [sys.executable, str(script)],
        env=_environment(hub, home) | ({"HF_TOKEN": token} if token else {}),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0 or not check, f"the client failed:\n{process.stdout}\n{process.stderr}"
    value = json.loads(answer.read_text()) if answer.exists() else None
    return ClientRun(process.returncode, process.stdout, process.stderr, value)


class HubClient:
    """
    A client process that uses `hub` as its Hub and runs several functions, so that slow imports are done only once.

    Caches and imported modules are kept until the process ends. A function that needs an empty cache must pass a
    `cache_dir`. Use it as a context manager.

    Args:
        hub ([`HubServer`]): The server.
        home (`Path`): Folder for the caches of the client libraries.
    """

    def __init__(self, hub: HubServer, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        (home / "client.py").write_text(_LOOP)
        self._errors = open(home / "stderr.txt", "w+")
        self._process = subprocess.Popen(
            [sys.executable, str(home / "client.py")],
            env=_environment(hub, home),
            cwd=home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self) -> HubClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)
        self._errors.close()

    def run(self, function: Callable[..., Any], token: str | None = None, **arguments: Any) -> Any:
        """
        Run a function in the process and return its return value. An exception fails the test.

        Args:
            function (`Callable`): The process receives only the source of the function, so it must contain its
                imports.
            token (`str`, *optional*): The token of the client.
            arguments: Arguments of the function. Arguments and return value are encoded as JSON.
        """
        source = "from __future__ import annotations\n" + textwrap.dedent(inspect.getsource(function))
        task = {"source": source, "name": function.__name__, "token": token, "arguments": arguments}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"error": "the process ended"}')
        if "error" in answer:
            self._errors.seek(0)
            raise AssertionError(f"{function.__name__} failed:\n{answer['error']}\n{self._errors.read()[-2000:]}")
        return answer["value"]


_LOOP = """
import json, os, sys, traceback

answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    task, names = json.loads(line), {}
    os.environ.pop("HF_TOKEN", None)
    if task["token"]:
        os.environ["HF_TOKEN"] = task["token"]
    try:
        exec(task["source"], names)
        answer = {"value": names[task["name"]](**task["arguments"])}
    except Exception:
        answer = {"error": traceback.format_exc()}
    print(json.dumps(answer), file=answers, flush=True)
"""


def _environment(hub: HubServer, home: Path) -> dict[str, str]:
    folder = Path(__file__).parent
    environment = {
        name: value
        for name, value in os.environ.items()
        if not re.match(r"HF_|HUGGING|TRANSFORMERS_OFFLINE|.*_proxy$", name, flags=re.IGNORECASE)
    }
    return environment | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONPATH": os.pathsep.join([str(folder.parent), str(folder)]),
    }
