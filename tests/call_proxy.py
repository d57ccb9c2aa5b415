"""`CallProxy`: forwards gRPC calls, and repeats, delays, reorders and drops some of them."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc


# What happens to a call, and how often. Names say which part reaches the other side.
ACTIONS = {
    "forward": 8,
    "drop the request": 2,
    "drop the answer": 2,
    "repeat at once": 2,
    "repeat at the same time": 2,
    "repeat later": 3,
    "delay": 2,
}
_LONGEST_DELAY = 1.5


class CallProxy:
    """
    Forwards the calls of clients without TLS to a server. It knows nothing about their content.

    Args:
        target (`str`): Address of the server.
        address (`str`): Address to listen on.
        seed (`int`): Seed of the choices.

    Attributes:
        counts (`Counter`): How often each action happened.
    """

    def __init__(self, target: str, address: str, seed: int) -> None:
        self._channel = grpc.insecure_channel(target, [("grpc.max_reconnect_backoff_ms", 500)])
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self._server = grpc.server(ThreadPoolExecutor(256), handlers=[_AllMethods(self._handle)])
        self._server.add_insecure_port(address)
        self._server.start()

    def _handle(self, method: str, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        request = list(requests)
        metadata = [(key, value) for key, value in context.invocation_metadata() if key.startswith("hf-federated")]
        with self._lock:
            (action,) = self._random.choices(list(ACTIONS), list(ACTIONS.values()))
            delay = self._random.uniform(0, _LONGEST_DELAY)
            self.counts[action] += 1

        def send() -> Any:
            return self._channel.stream_stream(method)(iter(request), metadata=metadata)

        def send_and_drop() -> None:
            with contextlib.suppress(grpc.RpcError):
                list(send())

        if action == "drop the request":
            context.abort(grpc.StatusCode.UNAVAILABLE, "dropped")
        if action == "delay":
            time.sleep(delay)
        if action == "repeat at the same time":
            threading.Thread(target=send_and_drop, daemon=True).start()
        if action == "repeat at once":
            send_and_drop()
        if action == "repeat later":
            # It arrives after later calls, in another order.
            threading.Timer(delay, send_and_drop).start()
        call = send()
        context.add_callback(call.cancel)
        try:
            answers = list(call)
        except grpc.RpcError as error:
            context.abort(error.code(), error.details())
        if action == "drop the answer":
            context.abort(grpc.StatusCode.UNAVAILABLE, "dropped")
        yield from answers


class _AllMethods(grpc.GenericRpcHandler):
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def service(self, details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(
            lambda requests, context: self._handle(details.method, requests, context)
        )
