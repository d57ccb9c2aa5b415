"""Records a round of a networked federation with secure aggregation, and writes the table of its messages.

The table is in `docs/how-to/secure-aggregation.md`. This command writes it again:

python tests/secure_aggregation/wire_recording.py
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch


ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from federations import CLIENTS, build_federation  # noqa: E402  # the path is set above
from tiny import arguments, tiny_model  # noqa: E402

from hf_federated import FederatedConfig, FederatedTrainer, Ledger  # noqa: E402
from hf_federated.engines import NetworkEngine  # noqa: E402
from hf_federated.messages import Announcement  # noqa: E402
from hf_federated.messages.secure_aggregation import SECURE_MESSAGES  # noqa: E402
from hf_federated.messages.serialization import unpack  # noqa: E402
from hf_federated.security.certificates import create_certificates  # noqa: E402
from hf_federated.testing.processes import free_address  # noqa: E402
from hf_federated.transport import Event, GrpcTransport  # noqa: E402
from hf_federated.transport.framing import unframe  # noqa: E402


PAGE = ROOT / "docs" / "how-to" / "secure-aggregation.md"
_MARKERS = re.compile(r"(?<=<!-- wire: begin -->\n\n).*?(?=\n<!-- wire: end -->)", re.DOTALL)
CLASSES = {message.kind: message for message in (Announcement, *SECURE_MESSAGES)}
DOWN, UP = "to the client", "to the server"
SERVER, RECIPIENT, SUM = "server", "recipient only", "no party: the server learns the sum"
# Fields that the server cannot read. The server can read all others.
HIDDEN = {
    ("key_shares", "envelopes"): RECIPIENT,
    ("submit_masked", "envelopes"): RECIPIENT,
    ("masked_update", "masked"): SUM,
}


@dataclass(frozen=True)
class Recorded:
    """
    A message of one client on the wire.

    Args:
        client_id: The client.
        direction: `DOWN` or `UP`.
        kind: Kind of the message.
        fields: The content of each field of the blob, without its name. A dictionary of tensors is one field, and a
            dictionary of other values has a field for each of its keys.
        num_bytes: Size of the blob, with the names of the fields. The ledger counts the same bytes.
    """

    client_id: str
    direction: str
    kind: str
    fields: dict[str, bytes]
    num_bytes: int


class RecordingTransport(GrpcTransport):
    """Transport that records each blob between the server and the clients, before and after TLS."""

    def __init__(self, address: str, certificates: str) -> None:
        super().__init__(address, certificates)
        self.messages: list[Recorded] = []

    def send(self, client_id: str, build: Callable[[], Any]) -> None:
        header, blob = unframe(b"".join(build()), state=str, keep=list, num_clients=int)
        self._add(client_id, DOWN, bytes(blob), {f"header.{name}": value for name, value in header.items()})
        super().send(client_id, build)

    def receive(self, timeout: float | None) -> Event | None:
        event = super().receive(timeout)
        if event is not None and event.blob:
            self._add(event.client_id, UP, bytes(event.blob), {})
        return event

    def _add(self, client_id: str, direction: str, blob: bytes, header: dict[str, Any]) -> None:
        tree = unpack(blob)
        fields = dict(contents({**header, **tree["fields"]}))
        self.messages.append(Recorded(client_id, direction, tree["kind"], fields, len(blob)))


def contents(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bytes]]:
    """The name and the content of each field."""
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            yield prefix + name, tensor_bytes(value)
        elif isinstance(value, dict) and all(isinstance(item, torch.Tensor) for item in value.values()):
            yield prefix + name, b"".join(map(tensor_bytes, value.values()))
        elif isinstance(value, dict):
            yield from contents(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
            yield prefix + name, text.encode()


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def record(directory: Path) -> tuple[list[Recorded], Ledger]:
    """Train a tiny model for one round with three clients over TLS. Return all messages in order, and the ledger."""
    create_certificates(directory / "tls", ["127.0.0.1"], list(CLIENTS))
    tls = str(directory / "tls")
    settings: dict[str, Any] = {"secure_aggregation": "secagg", "secure_aggregation_kwargs": {"max_weight": 10}}
    clients = {
        name: build_federation(directory / name, {name: examples}, num_rounds=1, federation=settings)
        for name, examples in CLIENTS.items()
    }
    address = free_address()
    transport = RecordingTransport(address, tls)
    engine = NetworkEngine(list(CLIENTS), transport=transport, join_timeout=60)
    federation = FederatedConfig(num_rounds=1, **settings)
    server = FederatedTrainer(tiny_model(), arguments(directory / "server"), federation=federation, engine=engine)
    joining = [
        threading.Thread(
            target=trainer.join,
            args=[address],
            kwargs={"client_id": name, "certificates": tls, "connect_timeout": 60},
            daemon=True,
        )
        for name, trainer in clients.items()
    ]
    for thread in joining:
        thread.start()
    server.train()
    for thread in joining:
        thread.join(20)
    return transport.messages, server.ledger


def table(messages: Sequence[Recorded]) -> str:
    """The messages of one client as a table in Markdown. Fields of all requests, or of all messages, come first."""
    client_id = min(message.client_id for message in messages)
    one_client = [message for message in messages if message.client_id == client_id]
    rounds = [message for message in one_client if message.kind != Announcement.kind]
    common = shared_fields(rounds)
    requests = shared_fields([message for message in rounds if message.direction == DOWN])
    requests = {name: size for name, size in requests.items() if name not in common}
    lines = ["| message | direction | field | bytes | who can read it |", "|---|---|---|---:|---|"]
    for text, direction, shared in (("each message", "both", common), ("each request", DOWN, requests)):
        lines += [f"| {text} | {direction} | `{name}` | {size} | {SERVER} |" for name, size in shared.items()]
    for message in one_client:
        name = CLASSES[message.kind].__name__
        lines.append(f"| [`{name}`] | {message.direction} | *all fields* | {message.num_bytes} | |")
        lines += [
            f"| | | `{field}` | {len(content)} | {HIDDEN.get((message.kind, field), SERVER)} |"
            for field, content in message.fields.items()
            if message not in rounds or field not in {**common, **requests}
        ]
    return "\n".join(lines) + "\n"


def shared_fields(messages: Sequence[Recorded]) -> dict[str, int]:
    """The fields that all messages have, and their largest sizes."""
    names = [name for name in messages[0].fields if all(name in message.fields for message in messages)]
    return {name: max(len(message.fields[name]) for message in messages) for name in names}


def page_table() -> str:
    """The table of the page."""
    found = _MARKERS.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    return found.group()


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        recorded, _ = record(Path(folder))
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_MARKERS.sub(lambda _: table(recorded), text), encoding="utf-8")
