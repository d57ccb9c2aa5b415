"""A middlebox that holds a connection at any byte costs at most `reconnect_timeout`, and changes no answer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from loopback import CountingAnswer, Relay, certificates, join, serve

from hf_federated.transport import ServerUnreachableError


RECONNECT_SECONDS = 3.0
# Up to about 3 kB travel in each direction before the client's first message.
POSITIONS = [0, 1, 300, 1000, 2000, 2500, 3000, 3500, 4000, 6000]
FAST = [0, 2000, 6000]


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Path:
    return certificates(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize(
    "position",
    [position if position in FAST else pytest.param(position, marks=pytest.mark.slow) for position in POSITIONS],
)
def test_held_connection_is_replaced(tls, position):
    answer = CountingAnswer()
    with serve(tls, answer) as server, Relay(server) as relay:
        relay.hold_after = position
        started = time.monotonic()
        with join(tls, relay, connect_timeout=60.0, reconnect_timeout=RECONNECT_SECONDS) as link:
            answers = [link.exchange(bytes([number]) * 1000) for number in range(4)]
        assert time.monotonic() - started < RECONNECT_SECONDS
        assert relay.num_silenced == 1 and len(relay.connections) > 1
    assert answers == [f"{number + 1}: ".encode() + bytes([number]) * 1000 for number in range(4)]


def test_error_names_the_attempts_and_a_firewall(tls):
    with serve(tls, CountingAnswer()) as server, Relay(server) as relay:
        relay.num_silenced = 100
        with pytest.raises(ServerUnreachableError, match=r"in \d+ attempts.*no firewall.*gRPC status"):
            join(tls, relay, connect_timeout=3.0, reconnect_timeout=RECONNECT_SECONDS)
        assert len(relay.connections) > 1
