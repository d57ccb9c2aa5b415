"""Both parties compare the settings, so that a client also refuses a server that accepts other settings."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest

from hf_federated.trainer.network_settings import NetworkSettings
from hf_federated.transport import (
    CallEndpoint,
    CallTransport,
    ClientRefusedError,
    GrpcConnection,
    GrpcTransport,
    Transport,
)
from hf_federated.transport.framing import frame


OWN = NetworkSettings({"learning_rate": "0.1", "aggregation": "FedAvg"})
ERROR = "learning_rate: 0.5 at the server, 0.1 at the client"


class AcceptsEveryClient(NetworkSettings):
    """Settings of a server that does not compare them."""

    def differences(self, theirs: Any, is_client: bool = False) -> list[str]:
        return []


@contextlib.contextmanager
def started(transport: Transport, settings: NetworkSettings):
    transport.start(["north"], settings)
    try:
        yield transport
    finally:
        transport.stop()


@pytest.mark.parametrize("rate", ["0.1", "0.5"])
def test_client_compares_the_settings_of_a_server_on_another_machine(rate):
    settings = AcceptsEveryClient({**OWN.settings, "learning_rate": rate})
    with started(GrpcTransport("127.0.0.1:0", insecure=True), settings) as transport:
        expected = contextlib.nullcontext() if rate == "0.1" else pytest.raises(ClientRefusedError, match=ERROR)
        with expected:
            options = {"insecure": True, "connect_timeout": 5, "reconnect_timeout": 5}
            GrpcConnection(transport.address, None, "north", OWN, frame({"num_examples": 3}), **options).close()


@pytest.mark.parametrize("rate", ["0.1", "0.5"])
def test_client_compares_the_settings_of_a_server_that_calls_it(rate):
    endpoint = CallEndpoint()
    errors: list[str] = []

    def join() -> None:
        try:
            endpoint.connect(OWN, frame({"num_examples": 3}))
        except ClientRefusedError as error:
            errors.append(str(error))

    client = threading.Thread(target=join, daemon=True)
    client.start()
    settings = AcceptsEveryClient({**OWN.settings, "learning_rate": rate})
    calls = {"north": lambda request, timeout: endpoint.handle(request)}
    with started(CallTransport(calls, call_timeout=5), settings):
        client.join(10)
    assert not client.is_alive()
    assert errors == [] if rate == "0.1" else ERROR in errors[0]
