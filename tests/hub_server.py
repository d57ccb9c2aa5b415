"""
A small Hugging Face Hub on loopback, for tests with the real and unpatched `huggingface_hub` and `datasets`.

It speaks the protocol of the Hub for repositories of files: accounts, creation, commits with regular and LFS files,
branches and tags, listings in pages, downloads by revision. Storage answers on another host name than the endpoint,
as on the Hub, so that a test sees whether a token leaks to it. Everything is in memory. A test reads the log of the
requests and asks for faults: a status, a connection that ends half-way, a reply that gets lost, a concurrent push.

It does not do Xet, pull requests, organizations, gated repositories, `expand`, copies between repositories or limits
on rates and sizes, and it does not look into a card's YAML.
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

from hub_endpoints import ENDPOINTS, Refusal, Reply, Request, User
from hub_repository import LFS_SUFFIXES, Blob, Commit, Repository


# The clients know storage by its host, and keep their token from it.
ENDPOINT_HOST, STORAGE_HOST = "127.0.0.1", "localhost"


@dataclass(frozen=True)
class LoggedRequest:
    """
    A request and its reply.

    Args:
        kind (`str`): One of `ENDPOINTS`, or `"unknown"`.
        method (`str`): Of HTTP.
        path (`str`): Without the query, unquoted.
        host (`str`): `ENDPOINT_HOST` or `STORAGE_HOST`.
        has_token (`bool`): Whether it came with an `Authorization` header.
        received (`int`): Bytes of its body.
        status (`int`): Of the reply, 0 if it was not sent in full.
        sent (`int`): Bytes of the reply's body.
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
    The server, which runs from the start of a `with` block to its end.

    Args:
        page_size (`int`, *optional*, defaults to `1000`): Entries of a listing that come in one reply.
        lfs_threshold (`int`, *optional*, defaults to 10 MiB): A file of as many bytes goes to LFS; `LFS_SUFFIXES` do
            at any size.
        part_size (`int`, *optional*, defaults to 64 MiB): A larger LFS file is uploaded in parts of as many bytes.

    Raises:
        `AssertionError`: At the end, if a fault was asked for that no request met, or if an endpoint had an error.

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
            unmet = [kind for kind, faults in self._faults.items() if faults]
            assert not unmet, f"no request met the faults asked for: {unmet}"
            assert not self.errors, f"endpoints had errors: {self.errors}"

    def add_user(self, name: str, token: str, write: bool = True) -> None:
        """Lets `token` act for `name`; a user may have several tokens, of which some only read."""
        with self._lock:
            self.users[token] = User(name, write)

    def repository(self, repo_id: str, repo_type: str = "dataset") -> Repository:
        """What the server holds, past the protocol."""
        with self._lock:
            return self.repositories[repo_id if repo_type == "model" else f"{repo_type}s/{repo_id}"]

    def files(self, repo_id: str, revision: str = "main", repo_type: str = "dataset") -> dict[str, bytes]:
        """The contents at a revision, by path, without `.gitattributes`."""
        with self._lock:
            files = self.repository(repo_id, repo_type).at(revision).files
            return {path: blob.content for path, blob in files.items() if path != ".gitattributes"}

    def create(self, repo_id: str, private: bool = False, repo_type: str = "dataset") -> Repository:
        """A repository without the request for it."""
        key = repo_id if repo_type == "model" else f"{repo_type}s/{repo_id}"
        with self._lock:
            return self.repositories.setdefault(key, Repository(key, repo_id.split("/")[0], private))

    def push(self, repo_id: str, files: Mapping[str, bytes | None], repo_type: str = "dataset") -> Commit:
        """A commit to main past the protocol, as by somebody else; `None` deletes."""
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
            return repository.commit("main", merged, repository.owner, "A push by somebody else")

    def requests(self, kind: str | None = None, prefix: str = "", method: str | None = None) -> list[LoggedRequest]:
        """Those of a kind and a method whose path starts so, in order."""
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
        """The next requests of a kind (one of `ENDPOINTS`) are answered with a status and not carried out."""
        self._ask_for(kind, Fault("status", status), times)

    def drop_connection_next(self, kind: str, times: int = 1) -> None:
        """The connection ends in the middle of a request's body, or, if it has none, in the middle of the reply's."""
        self._ask_for(kind, Fault("drop"), times)

    def lose_reply_to(self, kind: str, times: int = 1) -> None:
        """The next requests are carried out, and the connection ends before the reply."""
        self._ask_for(kind, Fault("lose"), times)

    def before_commit(self, callback: Callable[[], Any]) -> None:
        """Calls a function once, when the next commit has arrived and before it is looked at."""
        self._ask_for("commit", Fault("call", callback=callback), 1)

    def _ask_for(self, kind: str, fault: Fault, times: int) -> None:
        if kind not in ENDPOINTS:
            raise ValueError(f"kind is {kind!r}; it has to be one of {', '.join(ENDPOINTS)}")
        with self._lock:
            self._faults[kind].extend([fault] * times)

    def next_fault(self, kind: str) -> Fault | None:
        with self._lock:
            return self._faults[kind].popleft() if self._faults[kind] else None

    def signature(self, method: str, path: str) -> str:
        return hmac.new(self._secret, f"{method} {path}".encode(), "sha256").hexdigest()

    def signed(self, method: str, host: str, path: str) -> str:
        """A URL that needs no token."""
        return f"{host}{path}?signature={self.signature(method, path)}"

    def answer(self, kind: str, request: Request, fault: Fault | None) -> Reply:
        """Carries a request out, unless a fault says not to."""
        if fault is not None and fault.mode == "status":
            return Refusal(fault.status, "A fault that the test asked for").reply
        try:
            if fault is not None and fault.callback is not None:
                fault.callback()
            with self._lock:
                return ENDPOINTS[kind][2](self, request)
        except Refusal as refusal:
            return refusal.reply
        except Exception as error:
            self.errors.append(error)
            return Reply({"error": repr(error)}, 501)  # which the clients do not retry, as they would a 500

    def record(self, request: LoggedRequest) -> None:
        with self._lock:
            self.log.append(request)


class _Server(ThreadingHTTPServer):
    hub: HubServer
    daemon_threads = True
    block_on_close = False  # the clients' connections stay open
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # a reply's headers and body in one packet

    def do_GET(self) -> None:
        hub, url = self.server.hub, urlsplit(self.path)
        host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        kind, groups = _endpoint(self.command, url.path)
        fault = hub.next_fault(kind)
        drop = fault is not None and fault.mode == "drop"
        length = int(self.headers.get("Content-Length") or 0)
        chunked = self.headers.get("Transfer-Encoding") == "chunked"
        cut = drop and (length > 0 or chunked)
        body = b"".join(self._chunks(cut)) if chunked else self.rfile.read(length // 2 if cut else length)
        reply = self._reply(kind, groups, host, body, fault) if not cut else Reply(b"")
        content = b"" if self.command == "HEAD" else reply.content
        in_full = fault is None or fault.mode in ("status", "call")
        if not in_full:
            content = content[: len(content) // 2] if drop else b""
        has_token = "Authorization" in self.headers
        status = reply.status if in_full else 0
        # Before the reply, after which the test may look at the log.
        hub.record(
            LoggedRequest(kind, self.command, unquote(url.path), host, has_token, len(body), status, len(content))
        )
        if in_full or (drop and content):
            self.send_response(reply.status)
            for name, value in {**reply.headers, "Content-Length": str(len(reply.content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
            self.wfile.flush()
        if not in_full:
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
                return Refusal(401, "Invalid credentials in Authorization header").reply
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        return hub.answer(kind, Request(self.command, url.path, groups, query, self.headers, body, user), fault)

    def _chunks(self, cut: bool) -> list[bytes]:
        """The body of a request that does not tell its length; of one to cut, the first chunk."""
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
            if cut:
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
    """What a process did; `value` is what its function returned."""

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
    Runs code in a fresh process whose Hub is `hub`: the clients read their settings when they are imported.

    Args:
        hub ([`HubServer`]): The server.
        client (`str` or `Callable`): Code, or a function, of which the process sees the source alone: it imports
            what it needs itself.
        home (`Path`): Holds the clients' caches; a new folder is an empty cache.
        token (`str`, *optional*): The clients' token.
        arguments (`Mapping`, *optional*): Of the function; they and what it returns go through JSON.
        check (`bool`, *optional*, defaults to `True`): Whether a process that fails fails the test.
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
    A process whose Hub is `hub` and that runs one function after the other: imports take seconds, and only once.

    Its caches and what it has imported last as long as it does; a function that needs an empty cache passes a
    `cache_dir`. Use as a context manager.

    Args:
        hub ([`HubServer`]): The server.
        home (`Path`): Holds the clients' caches.
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
        What a function returns there; it sees its own source alone. An exception fails the test.

        Args:
            function (`Callable`): Imports what it needs itself.
            token (`str`, *optional*): The clients' token.
            arguments: Of the function; they and what it returns go through JSON.
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
