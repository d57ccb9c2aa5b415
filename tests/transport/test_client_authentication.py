"""Authentication of clients: certificates, known client ids, and one link per client."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from loopback import SESSION_CONFIG, certificates, join, serve

from hf_federated.transport import (
    ClientRefusedError,
    GrpcLink,
    GrpcServer,
    ServerUnreachableError,
    TlsCredentials,
)
from hf_federated.transport.protocol import VERSION


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Path:
    return certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other_tls(tmp_path_factory) -> Path:
    """Certificates with the same names, signed by another authority."""
    return certificates(tmp_path_factory.mktemp("other"), ["north"])


@pytest.fixture(scope="module")
def server(tls):
    with serve(tls, lambda client_id, message: client_id.encode(), clients=["north", "Zoë/2"]) as server:
        yield server


@pytest.mark.parametrize("client_id", ["north", "Zoë/2"])
def test_client_is_identified_by_its_certificate(tls, server, client_id):
    with join(tls, server, client_id) as link:
        assert link.exchange(b"who am I") == client_id.encode()


def test_client_cannot_use_the_id_of_another_client(tls, server):
    with pytest.raises(
        ClientRefusedError, match="The certificate belongs to 'Zoë/2', but the request names .* 'north'"
    ):
        GrpcLink(server.address, TlsCredentials.of_client(tls, "Zoë/2"), "north", SESSION_CONFIG)
    assert not server.is_alive("north")


def test_unknown_client_is_refused(tls, server):
    with pytest.raises(ClientRefusedError, match="The server does not know a client 'south'"):
        join(tls, server, "south")


@pytest.mark.parametrize("wrong", ["client", "authority"])
def test_certificate_of_another_authority_is_refused_with_advice(tls, other_tls, server, wrong):
    right, foreign = (TlsCredentials.of_client(folder, "north") for folder in (tls, other_tls))
    mixed = {
        "client": TlsCredentials(foreign.certificate, foreign.key, right.authority),
        "authority": TlsCredentials(right.certificate, right.key, foreign.authority),
    }[wrong]
    with pytest.raises(ServerUnreachableError, match="both certificates are signed by the authority that"):
        GrpcLink(server.address, mixed, "north", SESSION_CONFIG, connect_timeout=0.5)
    with join(tls, server) as link:
        assert link.exchange(b"") == b"north"


def test_connection_without_client_certificate_is_refused(tls, server):
    credentials = grpc.ssl_channel_credentials((tls / "ca.pem").read_bytes())
    with grpc.secure_channel(server.address, credentials) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/hf_federated.Sessions/Connect")(b"{}", timeout=5)


def test_second_link_of_a_client_waits_until_first_link_is_closed(tls, server):
    with join(tls, server) as link:
        with pytest.raises(ClientRefusedError, match="'north' is already connected by another link or process"):
            join(tls, server, connect_timeout=1.0)
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(join, tls, server)
            time.sleep(0.1)
            assert link.exchange(b"") == b"north" and not second.done()
            link.close()
            with second.result(10) as second_link:
                assert second_link.exchange(b"") == b"north"


HEADER = f'{{"version": {VERSION}'.encode()


@pytest.mark.parametrize("request_", [b"", b"[]", b"\xff", HEADER + b"}", HEADER + b', "client_id": 3}'])
def test_malformed_request_is_rejected(tls, server, request_):
    tls_credentials = TlsCredentials.of_client(tls, "north")
    credentials = grpc.ssl_channel_credentials(
        tls_credentials.authority, tls_credentials.key, tls_credentials.certificate
    )
    with grpc.secure_channel(server.address, credentials) as channel:
        for method in ("Connect", "Heartbeat", "Leave"):
            with pytest.raises(grpc.RpcError) as error:
                channel.unary_unary(f"/hf_federated.Sessions/{method}")(request_, timeout=5)
            assert error.value.code().name == "INVALID_ARGUMENT", method
        with pytest.raises(grpc.RpcError) as error:
            list(channel.stream_stream("/hf_federated.Sessions/Exchange")(iter([b"x"]), timeout=5))
        assert error.value.code().name == "INVALID_ARGUMENT"


def test_error_when_server_is_not_a_split_model_server(tls):
    server_credentials = TlsCredentials.of_server(tls)
    other = grpc.server(ThreadPoolExecutor(1))
    credentials = grpc.ssl_server_credentials(
        [(server_credentials.key, server_credentials.certificate)],
        server_credentials.authority,
        require_client_auth=True,
    )
    address = f"localhost:{other.add_secure_port('localhost:0', credentials)}"
    other.start()
    with pytest.raises(ServerUnreachableError, match="is not a server of hf-federated"):
        GrpcLink(address, TlsCredentials.of_client(tls, "north"), "north", SESSION_CONFIG)
    other.stop(None).wait()


def test_insecure_requires_loopback_address():
    def answer(client_id: str, message: bytes) -> bytes:
        return message

    with pytest.raises(ValueError, match="Pass either credentials or insecure=True"):
        GrpcServer(answer, None, ["north"], SESSION_CONFIG)
    with pytest.raises(ValueError, match=r"requires a loopback address .* but the host is '0\.0\.0\.0'"):
        GrpcServer(answer, None, ["north"], SESSION_CONFIG, address="0.0.0.0:0", insecure=True)
    with pytest.raises(ValueError, match=r"requires a loopback address .* but the host is 'split\.example\.org'"):
        GrpcLink("split.example.org:1", None, "north", SESSION_CONFIG, insecure=True)
    with pytest.raises(ValueError, match="does not have the form host:port"):
        GrpcLink("localhost", None, "north", SESSION_CONFIG, insecure=True)
    with GrpcServer(answer, None, ["north"], SESSION_CONFIG, address="[::1]:0", insecure=True) as server:
        with GrpcLink(server.address, None, "north", SESSION_CONFIG, insecure=True) as link:
            assert link.exchange(b"open") == b"open"
        with pytest.raises(ClientRefusedError, match="does not know a client 'south'"):
            GrpcLink(server.address, None, "south", SESSION_CONFIG, insecure=True)


def test_server_with_tls_refuses_insecure_client(tls, server):
    with pytest.raises(ServerUnreachableError):
        GrpcLink(server.address, None, "north", SESSION_CONFIG, insecure=True, connect_timeout=0.3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": []}, "non-empty list of different, non-empty client ids"),
        ({"clients": ["north", "north"]}, "non-empty list of different, non-empty client ids"),
        ({"clients": "north"}, "clients is the string 'north'"),
        ({"heartbeat_timeout": 0}, "heartbeat_timeout=0"),
        ({"max_message_bytes": 0}, "max_message_bytes=0"),
        ({"max_exchanges": 0}, "max_exchanges=0"),
    ],
)
def test_invalid_server_arguments_raise_error(tls, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        serve(tls, lambda client_id, blob: blob, **arguments)


def test_credentials_hide_keys_in_repr_and_reject_wrong_pem(tls):
    credentials = TlsCredentials.of_client(tls, "north")
    assert "PRIVATE" not in repr(credentials) and repr(credentials) == "TlsCredentials()"
    with pytest.raises(ValueError, match="key is not a private key in PEM"):
        TlsCredentials(credentials.certificate, credentials.certificate, credentials.authority)
    with pytest.raises(ValueError, match="certificate is not a certificate in PEM"):
        TlsCredentials(credentials.key, credentials.key, credentials.authority)


def test_missing_grpc_error_names_extra(tls, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'hf-federated\[network\]'"):
        GrpcLink("localhost:1", TlsCredentials.of_client(tls, "north"), "north", SESSION_CONFIG)
    with pytest.raises(ImportError, match="GrpcServer needs grpcio"):
        serve(tls, lambda client_id, blob: blob)
