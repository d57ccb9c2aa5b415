"""Measure the memory of a process that receives a large message of any content, and how long it holds its lock.

    python benchmarks/large_messages.py --size-mb 1024 --output large_messages.json

A hostile client sends each content of `CONTENTS` as its update to the server of a federation (`server`), or a hostile
server sends it as a request to a client (`client`). The receiver is a separate process. A thread in it wakes every
10 ms. The CPU time of the process between two wakes is an upper limit of the time for which the interpreter's lock was
held (`lock_seconds`). The longest pause (`pause_seconds`) includes the time for which other programs had the CPU. All
heartbeat timeouts are 6 s, and two honest clients take part in the round of the server.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
from network import peak_memory
from network_scale import FORK, TinyModel, start, train_client, training_arguments
from returning_clients import returning_client

from hf_federated import FederatedCallback, FederatedConfig, FederatedTrainer, NetworkEngine
from hf_federated.messages import Announcement, ClientUpdate, Fit, Message, read_message
from hf_federated.messages.serialization import PackedPieces
from hf_federated.trainer.network_settings import NetworkSettings
from hf_federated.transport import GrpcConnection, GrpcTransport
from hf_federated.transport.framing import frame, unframe
from hf_federated.transport.protocol import JoinedPieces


HEARTBEAT = 6.0
HONEST, HOSTILE = ["north", "south"], "west"
SECONDS_BETWEEN_TICKS = 0.01
TIMEOUT = 600


class Repeated:
    """
    A content that is built when it is sent.

    Args:
        num_bytes (`int`): Total number of bytes.
        start (`bytes`): First bytes.
        unit (`bytes`): What follows, repeatedly.
    """

    def __init__(self, num_bytes: int, start: bytes, unit: bytes) -> None:
        self._num_bytes, self._start = num_bytes, start
        self._block = unit * ((1 << 20) // len(unit) + 1)

    def __len__(self) -> int:
        return self._num_bytes

    def __iter__(self) -> Iterator[bytes]:
        remaining = self._num_bytes
        for block in (self._start, *([self._block] * (self._num_bytes // len(self._block) + 1))):
            if remaining > 0:
                yield block[:remaining]
            remaining -= len(block)


def with_header(header: bytes, num_bytes: int) -> Repeated:
    """Return a file with a header, followed by zeros."""
    return Repeated(num_bytes, struct.pack("<Q", len(header)) + header, bytes(1 << 16))


def header_only(start: str, unit: str) -> Callable[[int, Message], Repeated]:
    """Return a content that is one header."""
    return lambda size, _: Repeated(size, struct.pack("<Q", size - 8) + start.encode(), unit.encode())


def tensors(names: Iterator[str], size: int, metadata: str = "{}", overlap: int = 0, last: int = 0) -> Repeated:
    """Return a file with a tensor of 4 bytes for each name, and a tensor with the other bytes."""
    text, offset = [f'{{"__metadata__":{metadata}'], 0
    for name in names:
        first = max(offset - overlap, 0)
        text.append(f'"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[{first},{first + 4}]}}')
        offset = first + 4
    header = ",".join(text)
    # The length of the number of bytes decides the length of the header.
    free = size - 8 - len(header) - 200 - offset
    rest = f',"rest":{{"dtype":"U8","shape":[{free}],"data_offsets":[{offset},{offset + free}]}}}}'
    padded = (header + rest).ljust(len(header) + 200)
    return with_header(padded.encode(), size)


def one_tensor(size: int, message: Message, odd_address: bool = False) -> JoinedPieces:
    """Return a valid message with one tensor, which starts at an odd address or at a multiple of 16 bytes."""
    values: dict[str, torch.Tensor] = {"linear.weight": torch.empty((size - 4096) // 4)}
    if odd_address:
        values["tail"] = torch.zeros(1, dtype=torch.uint8)
    if isinstance(message, Fit):
        changed: Message = Fit(message.round, message.client_id, 0, values, nonce=message.nonce)
    else:
        changed = ClientUpdate(message.round, message.client_id, values, 1, 0, 1, nonce=message.nonce)
    return JoinedPieces(PackedPieces(changed.to_tree()))


def values_at_the_limits(size: int, message: Message) -> Repeated:
    """Return a header with many different dictionaries and characters of four bytes."""
    tree = ",".join(f'{{\\"{number}\\":[1]}}' for number in range(90_000))
    return tensors(iter(()), size, f'{{"tree":"[\\"\U0001f600{"a" * 6_000_000}\\",{tree}]"}}')


def escaped_values(size: int, message: Message) -> Repeated:
    """Return a header without brackets and commas, whose text becomes a list of lists."""
    tree = r"\u005b" + r"\u005b\u005d\u002c" * 450_000 + r"1\u005d"
    return tensors(iter(()), size, f'{{"tree":"{tree}"}}')


CONTENTS: dict[str, Callable[[int, Any], Any]] = {
    "lists": header_only('{"__metadata__":{},"a":[', "[],"),
    "keys": header_only("{", '"":0,'),
    "one text": header_only('{"__metadata__":{"tree":"', "a"),
    "escaped text": header_only('{"__metadata__":{"tree":"', r"\u0041"),
    "nesting": header_only("", "["),
    "digits": header_only('{"a":', "1"),
    "spaces": header_only("{}", " "),
    "utf-16": lambda size, _: Repeated(
        size, struct.pack("<Q", size - 8) + "{".encode("utf-16"), "[],".encode("utf-16-le")
    ),
    "zeros": lambda size, _: Repeated(size, b"", bytes(1 << 16)),
    "random bytes": lambda size, _: Repeated(size, b"", random.Random(0).randbytes(1 << 20)),
    "2 million tensors": lambda size, _: tensors(map(str, range(min(2 * 10**6, size // 200))), size),
    "50,000 tensors": lambda size, _: tensors(map(str, range(50_000)), size),
    "long names": lambda size, _: tensors((f"{number}{'a' * 20_000}" for number in range(400)), size),
    "overlap": lambda size, _: tensors(map(str, range(1000)), size, overlap=2),
    "values at the limits": values_at_the_limits,
    "escaped values": escaped_values,
    "one tensor": one_tensor,
    "one tensor at an odd address": lambda size, message: one_tensor(size, message, odd_address=True),
}


class Ticks:
    """Measures the longest pause of a thread that wakes every 10 ms, in seconds and in CPU seconds of the process."""

    def __init__(self) -> None:
        self.longest = self.longest_cpu = 0.0
        threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        last, last_cpu = time.perf_counter(), time.process_time()
        while True:
            time.sleep(SECONDS_BETWEEN_TICKS)
            now, cpu = time.perf_counter(), time.process_time()
            self.longest, last = max(self.longest, now - last), now
            self.longest_cpu, last_cpu = max(self.longest_cpu, cpu - last_cpu), cpu


class Measurement(logging.Handler):
    """The memory and the lock of this process from `begin` on, and the clients that it loses."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[str] = []
        self._before, self._ticks = 0, Ticks()
        for module in ("engines.network", "trainer.join"):
            logging.getLogger(f"hf_federated.{module}").addHandler(self)

    def begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = peak_memory()
        self._ticks.longest = self._ticks.longest_cpu = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", "") == "lost":
            self.lost.append(record.client)  # type: ignore[attr-defined]
        if "joined the federation" in record.getMessage():
            self.begin()

    def result(self, outcome: str) -> dict[str, Any]:
        return {
            "mib": (peak_memory() - self._before) / 2**20,
            "lock_seconds": self._ticks.longest_cpu,
            "pause_seconds": self._ticks.longest,
            "lost": self.lost,
            "outcome": outcome[:160],
        }


class Rejections(FederatedCallback):
    def __init__(self) -> None:
        self.rejected: dict[str, str] = {}

    def on_round_end(self, args: Any, state: Any, control: Any, round: Any = None, **kwargs: Any) -> None:
        self.rejected |= round.rejected


def run_server(num_bytes: int, results: Any) -> None:
    """Run one round, and send the address and the settings, and then the measurement."""
    torch.set_num_threads(1)
    engine = NetworkEngine(
        [*HONEST, HOSTILE],
        address="127.0.0.1:0",
        insecure=True,
        heartbeat_timeout=HEARTBEAT,
        max_message_bytes=num_bytes,
    )
    rejections = Rejections()
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            model=TinyModel(),
            args=training_arguments(folder),
            engine=engine,
            federation=FederatedConfig(num_rounds=1, local_steps=1, min_clients=2),
            callbacks=[rejections],
        )
        begin = engine.transport.start

        def begin_and_send(client_ids: Any, settings: Any) -> None:
            begin(client_ids, settings)
            results.send((engine.transport.address, settings.to_dict()))
            measurement.begin()

        engine.transport.start = begin_and_send  # type: ignore[method-assign]
        measurement = Measurement()
        trainer.train()
    results.send(measurement.result(json.dumps(rejections.rejected)))


def hostile_client(address: str, settings: dict[str, str], content: str, num_bytes: int) -> None:
    """Answer each request with a content."""
    announcement = Announcement(1, 1, 0, 1).to_bytes()
    with GrpcConnection(address, None, HOSTILE, NetworkSettings(settings), announcement, insecure=True) as connection:
        reply: Any = None
        while (blob := connection.receive(reply)) is not None:
            _, received = unframe(blob, state=str, keep=list, num_clients=int)
            request = read_message(bytes(received))
            reply = CONTENTS[content](num_bytes, ClientUpdate(0, HOSTILE, {}, 1, 0, 1, nonce=request.nonce))


def measure_server(content: str, num_bytes: int) -> dict[str, Any]:
    """Measure a server that receives a content from a client."""
    results, ours = FORK.Pipe()
    processes = [start(run_server, num_bytes, ours)]
    address, settings = receive(results, processes[0])
    processes += [start(returning_client, address, settings, name) for name in HONEST]
    processes.append(start(hostile_client, address, settings, content, num_bytes))
    measured = receive(results, processes[0])
    for process in processes:
        process.join(TIMEOUT)
    return measured


class CopiedSettings(NetworkSettings):
    """Settings that equal those of the client that connects, which also compares them."""

    def differences(self, theirs: Any, is_client: bool = False) -> list[str]:
        self.settings = theirs
        return []


def run_hostile_server(content: str, num_bytes: int, results: Any) -> None:
    """Report that the client has joined, send it a content, and report whether it was lost before it left."""
    transport = GrpcTransport("127.0.0.1:0", insecure=True, heartbeat_timeout=HEARTBEAT)
    transport.start([HONEST[0]], CopiedSettings({}))
    results.send(transport.address)
    while (event := transport.receive(TIMEOUT)) is not None and event.kind != "joined":
        pass
    results.send("joined")
    request = Fit(0, HONEST[0], seed=0, state={}, nonce="n")
    header = frame({"state": "", "keep": [], "num_clients": 3})
    # A request has a few bytes more than its content.
    transport.send(HONEST[0], lambda: JoinedPieces(header, CONTENTS[content](num_bytes - 1024, request)))
    event = transport.receive(TIMEOUT)
    results.send("no event" if event is None else event.kind)
    transport.stop()


def run_client(address: str, results: Any) -> None:
    """Take part in a federation with a trainer, and send the measurement."""
    measurement = Measurement()
    try:
        train_client(1, address, HONEST[0], 0)
        outcome = "the run ended"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    results.send(measurement.result(outcome))


def measure_client(content: str, num_bytes: int) -> dict[str, Any]:
    """Measure a client that receives a content from a server."""
    (from_server, server_end), (from_client, client_end) = FORK.Pipe(), FORK.Pipe()
    server = start(run_hostile_server, content, num_bytes, server_end)
    client = start(run_client, receive(from_server, server), client_end)
    if from_client in connection.wait([from_server, from_client], TIMEOUT):
        raise RuntimeError(f"The client did not join: {receive(from_client, client)['outcome']}")
    receive(from_server, server)
    if receive(from_server, server) == "lost":
        # The client would try to connect again.
        client.kill()
        measured: dict[str, Any] = {"lost": [HONEST[0]]}
    else:
        measured = receive(from_client, client)
    for process in (server, client):
        process.join(TIMEOUT)
    return measured


def receive(results: Any, process: Any) -> Any:
    """Return what a process sends. A process that ends without an answer is an error at once."""
    has_ended = process.sentinel in connection.wait([results, process.sentinel], TIMEOUT)
    if not results.poll():
        reason = f"ended with code {process.exitcode}" if has_ended else f"did not answer within {TIMEOUT} s"
        raise RuntimeError(f"A process {reason} before it sent a result. See its error above.")
    return results.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=1024, help="size of a message in MiB")
    parser.add_argument("--contents", nargs="+", choices=CONTENTS, default=list(CONTENTS), metavar="CONTENT")
    parser.add_argument("--receivers", nargs="+", choices=["server", "client"], default=["server", "client"])
    parser.add_argument("--output", help="JSON file to write the results to")
    options = parser.parse_args()
    measure = {"server": measure_server, "client": measure_client}
    results = []
    for receiver in options.receivers:
        for content in options.contents:
            measured = measure[receiver](content, options.size_mb << 20)
            results.append({"receiver": receiver, "content": content, "size_mib": options.size_mb, **measured})
            print(json.dumps(results[-1]), flush=True)
    if options.output:
        Path(options.output).write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
