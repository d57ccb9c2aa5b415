"""Certificates for mutual TLS between a gRPC client and a gRPC server."""

from __future__ import annotations

import datetime
import os
import stat
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from cryptography import x509

from hf_federated.cli.main import main
from hf_federated.security.certificates import client_certificate, client_fingerprints, create_certificates
from hf_federated.security.encrypted_session import ClientSession, Identity, ServerSession, fingerprint


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tls")
    create_certificates(path, ["localhost", "127.0.0.1"], ["north", "Zoë/2"], rsa_bits=2048)
    return path


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory) -> Path:
    """Certificates with the same names, signed by another authority."""
    path = tmp_path_factory.mktemp("other")
    create_certificates(path, ["localhost", "127.0.0.1"], ["north"], rsa_bits=2048)
    return path


def pair(certificate: Path) -> tuple[bytes, bytes]:
    return certificate.with_suffix(".key").read_bytes(), certificate.read_bytes()


def serve(certificate: Path, authority: Path) -> tuple[grpc.Server, int]:
    """Start a server that answers every call with the common name of the caller. Return the server and its port."""

    def whoami(request: bytes, context: grpc.ServicerContext) -> bytes:
        return b"|".join(context.auth_context()["x509_common_name"])

    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    handler = grpc.method_handlers_generic_handler("test", {"whoami": grpc.unary_unary_rpc_method_handler(whoami)})
    server.add_generic_rpc_handlers((handler,))
    credentials = grpc.ssl_server_credentials(
        [pair(certificate)], (authority / "ca.pem").read_bytes(), require_client_auth=True
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    return server, port


@pytest.fixture(scope="module")
def port(folder) -> Iterator[int]:
    server, number = serve(folder / "server.pem", folder)
    yield number
    server.stop(None).wait()


def call(target: str, authority: Path, certificate: Path | None) -> bytes:
    key, chain = (None, None) if certificate is None else pair(certificate)
    credentials = grpc.ssl_channel_credentials((authority / "ca.pem").read_bytes(), key, chain)
    with grpc.secure_channel(target, credentials) as channel:
        return channel.unary_unary("/test/whoami")(b"", timeout=20)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
@pytest.mark.parametrize("client", ["north", "Zoë/2"])
def test_server_identifies_client_by_common_name(folder, port, client, host):
    assert call(f"{host}:{port}", folder, client_certificate(folder, client)) == client.encode()


def test_client_certificate_of_another_authority_is_refused(folder, other_folder, port):
    with pytest.raises(grpc.RpcError) as error:
        call(f"localhost:{port}", folder, client_certificate(other_folder, "north"))
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert call(f"localhost:{port}", folder, client_certificate(folder, "north")) == b"north"


def test_client_without_certificate_is_refused(folder, port):
    with pytest.raises(grpc.RpcError) as error:
        call(f"localhost:{port}", folder, None)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


def test_server_certificate_of_another_authority_is_refused(folder, other_folder, port):
    with pytest.raises(grpc.RpcError) as error:
        call(f"localhost:{port}", other_folder, client_certificate(other_folder, "north"))
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


def test_client_and_server_certificates_are_not_interchangeable(folder, port):
    impostor, impostor_port = serve(client_certificate(folder, "north"), folder)
    with pytest.raises(grpc.RpcError):
        call(f"localhost:{impostor_port}", folder, client_certificate(folder, "north"))
    impostor.stop(None).wait()
    with pytest.raises(grpc.RpcError):
        call(f"localhost:{port}", folder, folder / "server.pem")


def test_server_certificate_for_another_host_is_refused(folder, tmp_path):
    """Both certificates have the same authority, but the server certificate has another host name."""
    for name in ("ca.pem", "ca.key"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    create_certificates(tmp_path, ["split.example.org"], rsa_bits=2048)
    server, server_port = serve(tmp_path / "server.pem", tmp_path)
    with pytest.raises(grpc.RpcError):
        call(f"localhost:{server_port}", folder, client_certificate(folder, "north"))
    server.stop(None).wait()


def test_certificate_keys_work_as_session_identities(folder):
    keys = {"north": client_certificate(folder, "north"), "server": folder / "server.pem"}
    north, server = (Identity.from_pem(name, pair(path)[0]) for name, path in keys.items())
    assert client_fingerprints(folder) == {
        "Zoë/2": fingerprint(pair(client_certificate(folder, "Zoë/2"))[1]),
        "north": north.fingerprint,
    }
    client_session = ClientSession(north, "server", fingerprint(pair(keys["server"])[1]), rsa_bits=2048)
    server_session = ServerSession(server, "north", client_fingerprints(folder)["north"], rsa_bits=2048)
    server_session.complete(client_session.finish(server_session.reply(client_session.hello())))
    assert server_session.open(client_session.seal(b"states")) == b"states"


@pytest.mark.skipif(os.name != "posix", reason="file modes exist only on POSIX")
def test_private_keys_are_readable_by_owner_only(folder):
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*.*")}
    assert {mode for name, mode in modes.items() if name.endswith(".key")} == {0o600}
    assert sum(name.endswith(".key") for name in modes) == 4 and len(modes) == 8


def test_certificate_extensions_and_validity(folder):
    def load(name: str) -> x509.Certificate:
        return x509.load_pem_x509_certificate((folder / name).read_bytes())

    authority, server, client = load("ca.pem"), load("server.pem"), load("clients/north.pem")
    certificates = (authority, server, client)
    constraints = [
        certificate.extensions.get_extension_for_class(x509.BasicConstraints) for certificate in certificates
    ]
    assert [(extension.critical, extension.value.ca) for extension in constraints] == [
        (True, True),
        (True, False),
        (True, False),
    ]
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    for certificate, days in ((authority, 3650), (server, 365), (client, 365)):
        # The validity begins an hour earlier, for peers whose clocks are slow.
        validity = certificate.not_valid_after_utc - certificate.not_valid_before_utc
        assert validity == datetime.timedelta(days=days, hours=1)
        certificate.verify_directly_issued_by(authority)
    assert len({certificate.serial_number for certificate in certificates}) == 3


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_existing_files_are_kept_without_overwrite_and_authority_is_always_kept(tmp_path):
    create_certificates(tmp_path, ["localhost"], ["north"], rsa_bits=2048)
    before = contents(tmp_path)
    with pytest.raises(
        FileExistsError, match=r"server\.pem.*server\.key.*north\.pem.*north\.key.*or overwrite the files"
    ):
        create_certificates(tmp_path, ["localhost"], ["south", "north"], rsa_bits=2048)
    assert contents(tmp_path) == before
    # A key without its certificate is an existing file too.
    (tmp_path / "clients" / "north.pem").unlink()
    with pytest.raises(FileExistsError, match=r"Files exist: \S*north\.key\."):
        create_certificates(tmp_path, clients=["north"], rsa_bits=2048)
    written = create_certificates(tmp_path, clients=["north", "south"], rsa_bits=2048, overwrite=True)
    assert [path.name for path in written] == ["north.pem", "south.pem"]
    after = contents(tmp_path)
    assert {name for name in before if before[name] != after[name]} == {"clients/north.pem", "clients/north.key"}
    x509.load_pem_x509_certificate(after["clients/north.pem"]).verify_directly_issued_by(
        x509.load_pem_x509_certificate(after["ca.pem"])
    )


def test_incomplete_or_mismatched_authority_is_rejected(folder, other_folder, tmp_path):
    (tmp_path / "ca.pem").write_bytes((folder / "ca.pem").read_bytes())
    with pytest.raises(ValueError, match=r"ca\.pem exists, but ca\.key does not. Restore it"):
        create_certificates(tmp_path, clients=["north"], rsa_bits=2048)
    (tmp_path / "ca.key").write_bytes((other_folder / "ca.key").read_bytes())
    with pytest.raises(ValueError, match=r"is not the key of ca\.pem"):
        create_certificates(tmp_path, clients=["north"], rsa_bits=2048)
    (tmp_path / "ca.key").write_bytes(b"")
    with pytest.raises(ValueError, match=r"ca\.pem or ca\.key in .* cannot be read"):
        create_certificates(tmp_path, clients=["north"], rsa_bits=2048)
    assert not (tmp_path / "clients").exists()


def test_certificate_cannot_outlive_its_authority(tmp_path):
    with pytest.raises(ValueError, match="days=31, but the authority is valid for ca_days=30 days"):
        create_certificates(tmp_path, clients=["north"], days=31, ca_days=30, rsa_bits=2048)
    assert list(tmp_path.iterdir()) == []
    create_certificates(tmp_path, clients=["north"], days=30, ca_days=30, rsa_bits=2048)
    with pytest.raises(
        ValueError, match="expires in 29 days, before a certificate that is valid for 31 days. Set days"
    ):
        create_certificates(tmp_path, clients=["south"], days=31, rsa_bits=2048)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "There is no certificate to create"),
        ({"clients": "north"}, r"clients is the string 'north'. Pass a list: \['north'\]"),
        ({"server_names": "localhost"}, "server_names is the string"),
        ({"clients": ["north", "north"]}, "Duplicate client ids: north"),
        ({"clients": [""]}, "empty string"),
        ({"clients": ["n" * 65]}, "has 65 bytes in UTF-8, but a certificate holds at most 64"),
        ({"clients": ["ü" * 33]}, "has 66 bytes"),
        ({"clients": ["north\n"]}, "cannot be printed"),
        ({"server_names": ["localhost:50051"]}, "not a host name or an IP address.*Remove scheme, port"),
        ({"server_names": ["https://localhost"]}, "not a host name or an IP address"),
        ({"server_names": ["[::1]"]}, "brackets"),
        ({"server_names": ["müller.example"]}, "xn--"),
        ({"server_names": [""]}, "not a host name"),
        ({"clients": ["north"], "days": 0}, "days=0 is not allowed. Set it to 1 to 36500"),
        ({"clients": ["north"], "ca_days": 10**6}, "ca_days=1000000"),
        ({"clients": ["north"], "rsa_bits": 1024}, "rsa_bits=1024 is not allowed. Set it to 2048"),
    ],
)
def test_invalid_arguments_are_rejected_before_writing_files(tmp_path, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        create_certificates(tmp_path / "tls", **arguments)
    assert not (tmp_path / "tls").exists()


def test_misplaced_or_damaged_client_certificate_is_rejected(folder, tmp_path):
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "south.pem").write_bytes(client_certificate(folder, "north").read_bytes())
    with pytest.raises(ValueError, match=r"south\.pem is the certificate of 'north'"):
        client_fingerprints(tmp_path)
    (tmp_path / "clients" / "south.pem").write_bytes(b"")
    with pytest.raises(ValueError, match=r"south\.pem is not a certificate"):
        client_fingerprints(tmp_path)


def test_missing_cryptography_error_names_extra_for_certificates(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for function in (lambda: create_certificates(tmp_path, clients=["north"]), lambda: client_fingerprints(tmp_path)):
        with pytest.raises(ImportError, match=r"pip install 'hf-federated\[network\]'"):
            function()


# The command `hf-federated certificates`.


def test_command_writes_certificates_and_prints_fingerprints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = "certificates tls --server localhost --server ::1 --client north --client south --rsa-bits 2048 --days 9"
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    for path in ("ca.pem", "server.pem", "clients/north.pem", "clients/south.pem"):
        pem = (tmp_path / "tls" / path).read_bytes()
        assert f"tls/{path}  {fingerprint(pem)}" in printed
    assert "Keep tls/ca.key to yourself" in printed and "PRIVATE" not in printed
    left = x509.load_pem_x509_certificate(pem).not_valid_after_utc - datetime.datetime.now(datetime.timezone.utc)
    assert left.days == 8
    # Clients can be added later, and existing files are kept.
    assert main("certificates tls --client east --rsa-bits 2048".split()) == 0
    assert "ca.pem  sha256" not in capsys.readouterr().out
    assert list(client_fingerprints("tls")) == ["east", "north", "south"]
    assert main("certificates tls --client east --rsa-bits 2048".split()) == 2
    assert (
        "east.key. Choose another folder or other clients, or overwrite the files. The option is --overwrite."
        in capsys.readouterr().err
    )
    assert main("certificates tls --client east --rsa-bits 2048 --overwrite".split()) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "no certificate was requested. Pass --server NAME"),
        ("--server localhost:1", "localhost:1' is not a host name"),
        ("--client north --days 0", "days=0"),
    ],
)
def test_command_prints_errors_on_one_line(tmp_path, capsys, options, message):
    assert main(["certificates", str(tmp_path / "tls"), *options.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "tls").exists()
