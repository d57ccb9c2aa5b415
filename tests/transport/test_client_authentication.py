"""Who may speak to a server: whom a certificate names, if the server knows it, and from one link at a time."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from loopback import TERMS, certificates, join, serve

from hf_federated.transport import (
    ClientRefusedError,
    GrpcLink,
    ServerUnreachableError,
    SplitServer,
    TlsCredentials,
)


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Path:
    return certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other_tls(tmp_path_factory) -> Path:
    """Everything of the same names, by another authority."""
    return certificates(tmp_path_factory.mktemp("other"), ["north"])


@pytest.fixture(scope="module")
def server(tls):
    with serve(tls, lambda client_id, message: client_id.encode(), clients=["north", "Zoë/2"]) as server:
        yield server


@pytest.mark.parametrize("client_id", ["north", "Zoë/2"])
def test_a_client_is_whom_its_certificate_names(tls, server, client_id):
    with join(tls, server, client_id) as link:
        assert link.exchange(b"who am I") == client_id.encode()


def test_a_client_cannot_be_another(tls, server):
    with pytest.raises(ClientRefusedError, match="The certificate is that of 'Zoë/2', and 'north' is said"):
        GrpcLink(server.address, TlsCredentials.of_client(tls, "Zoë/2"), "north", TERMS)
    assert not server.is_alive("north")


def test_a_client_that_the_server_does_not_know_is_refused(tls, server):
    with pytest.raises(ClientRefusedError, match="The server knows no client 'south'"):
        join(tls, server, "south")


@pytest.mark.parametrize("wrong", ["client", "authority"])
def test_a_certificate_of_another_authority_is_refused_with_what_to_look_at(tls, other_tls, server, wrong):
    right, foreign = (TlsCredentials.of_client(folder, "north") for folder in (tls, other_tls))
    mixed = {
        "client": TlsCredentials(foreign.certificate, foreign.key, right.authority),
        "authority": TlsCredentials(right.certificate, right.key, foreign.authority),
    }[wrong]
    with pytest.raises(ServerUnreachableError, match="whether the client's certificate is by the authority that"):
        GrpcLink(server.address, mixed, "north", TERMS, connect_timeout=0.5)
    with join(tls, server) as link:
        assert link.exchange(b"") == b"north"


def test_a_client_without_a_certificate_is_refused(tls, server):
    credentials = grpc.ssl_channel_credentials((tls / "ca.pem").read_bytes())
    with grpc.secure_channel(server.address, credentials) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/hf_federated.Split/Connect")(b"{}", timeout=5)


def test_a_client_has_one_link_at_a_time_and_the_next_waits_for_it(tls, server):
    with join(tls, server) as link:
        with pytest.raises(ClientRefusedError, match="'north' is connected already, by another link or process"):
            join(tls, server, connect_timeout=1.0)
        with ThreadPoolExecutor(1) as pool:
            following = pool.submit(join, tls, server)
            time.sleep(0.1)
            assert link.exchange(b"") == b"north" and not following.done()
            link.close()
            with following.result(10) as own:
                assert own.exchange(b"") == b"north"


@pytest.mark.parametrize("request_", [b"", b"[]", b"\xff", b'{"version": 1}', b'{"version": 1, "client_id": 3}'])
def test_what_is_no_request_is_refused(tls, server, request_):
    own = TlsCredentials.of_client(tls, "north")
    credentials = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
    with grpc.secure_channel(server.address, credentials) as channel:
        for method in ("Connect", "Heartbeat", "Leave"):
            with pytest.raises(grpc.RpcError) as error:
                channel.unary_unary(f"/hf_federated.Split/{method}")(request_, timeout=5)
            assert error.value.code().name == "INVALID_ARGUMENT", method
        with pytest.raises(grpc.RpcError) as error:
            list(channel.stream_stream("/hf_federated.Split/Exchange")(iter([b"x"]), timeout=5))
        assert error.value.code().name == "INVALID_ARGUMENT"


def test_another_server_than_one_of_split_models_is_told(tls):
    own = TlsCredentials.of_server(tls)
    other = grpc.server(ThreadPoolExecutor(1))
    credentials = grpc.ssl_server_credentials([(own.key, own.certificate)], own.authority, require_client_auth=True)
    address = f"localhost:{other.add_secure_port('localhost:0', credentials)}"
    other.start()
    with pytest.raises(ServerUnreachableError, match="is no server of split models"):
        GrpcLink(address, TlsCredentials.of_client(tls, "north"), "north", TERMS)
    other.stop(None).wait()


def test_without_tls_only_on_loopback_and_only_if_asked_for():
    def answer(client_id: str, message: bytes) -> bytes:
        return message

    with pytest.raises(ValueError, match="Give either credentials or insecure=True"):
        SplitServer(answer, None, ["north"], TERMS)
    with pytest.raises(ValueError, match=r"'0\.0\.0\.0' is none"):
        SplitServer(answer, None, ["north"], TERMS, address="0.0.0.0:0", insecure=True)
    with pytest.raises(ValueError, match=r"'split\.example\.org' is none"):
        GrpcLink("split.example.org:1", None, "north", TERMS, insecure=True)
    with pytest.raises(ValueError, match="not of the form host:port"):
        GrpcLink("localhost", None, "north", TERMS, insecure=True)
    with SplitServer(answer, None, ["north"], TERMS, address="[::1]:0", insecure=True) as server:
        with GrpcLink(server.address, None, "north", TERMS, insecure=True) as link:
            assert link.exchange(b"open") == b"open"
        with pytest.raises(ClientRefusedError, match="knows no client 'south'"):
            GrpcLink(server.address, None, "south", TERMS, insecure=True)


def test_a_server_with_tls_takes_no_client_without(tls, server):
    with pytest.raises(ServerUnreachableError):
        GrpcLink(server.address, None, "north", TERMS, insecure=True, connect_timeout=0.3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": []}, "each once and none empty"),
        ({"clients": ["north", "north"]}, "each once and none empty"),
        ({"clients": "north"}, "clients is the text 'north'"),
        ({"heartbeat_timeout": 0}, "heartbeat_timeout is 0"),
        ({"max_message_bytes": 0}, "max_message_bytes is 0"),
        ({"max_exchanges": 0}, "max_exchanges is 0"),
    ],
)
def test_arguments_that_make_no_server_are_refused(tls, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        serve(tls, lambda client_id, blob: blob, **arguments)


def test_keys_are_in_no_text_and_files_of_another_kind_are_refused(tls):
    own = TlsCredentials.of_client(tls, "north")
    assert "PRIVATE" not in repr(own) and repr(own) == "TlsCredentials()"
    with pytest.raises(ValueError, match="key is no PEM of its kind"):
        TlsCredentials(own.certificate, own.certificate, own.authority)
    with pytest.raises(ValueError, match="certificate is no PEM of its kind"):
        TlsCredentials(own.key, own.key, own.authority)


def test_without_grpc_the_error_names_the_extra(tls, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'hf-federated\[split\]'"):
        GrpcLink("localhost:1", TlsCredentials.of_client(tls, "north"), "north", TERMS)
    with pytest.raises(ImportError, match="SplitServer needs grpcio"):
        serve(tls, lambda client_id, blob: blob)
