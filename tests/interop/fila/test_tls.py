"""TLS and mutual TLS with Fila's client: accepted and refused clients, and a renewed certificate."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import fila
import grpc
import pytest
from tests.interop.fila.certificates import Authority
from tests.interop.fila.conftest import Admin, Server

from basaltmq.client import Client
from basaltmq.errors import InvalidArgumentError, UnavailableError


class Files:
    """The certificate files of a deployment."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory / "ours", "authority")
        self.stranger = Authority(directory / "theirs", "stranger")
        self.server = self.authority.sign("server")
        self.client = self.authority.sign("client")
        self.strange_client = self.stranger.sign("client")

    def options(self, *, mutual: bool) -> dict[str, str]:
        options = {"certificate": str(self.server[0]), "key": str(self.server[1])}
        return options | ({"authority": str(self.authority.certificate)} if mutual else {})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


def enqueues(server: Server, **credentials: bytes | None) -> bool:
    """Whether a client can enqueue."""
    given = {name: value for name, value in credentials.items() if value is not None}
    with fila.Client(f"localhost:{server.port}", **given) as client:
        try:
            client.enqueue("missing", None, b"")
        except fila.QueueNotFoundError:
            return True
        except fila.RPCError as error:
            if error.code is grpc.StatusCode.UNAVAILABLE:
                return False
            raise
    raise AssertionError("there is no such queue")


@pytest.mark.parametrize(
    ("mutual", "trusts", "shows", "is_let_in"),
    [
        (False, "ours", None, True),
        (False, "ours", "ours", True),
        (False, "theirs", None, False),
        (False, None, None, False),
        (True, "ours", "ours", True),
        (True, "ours", None, False),
        (True, "ours", "theirs", False),
        (True, "theirs", "ours", False),
    ],
)
def test_client_certificates_are_verified_as_configured(
    serve: Callable[..., Server], files: Files, mutual: bool, trusts: str | None, shows: str | None, is_let_in: bool
) -> None:
    server = serve(tls=files.options(mutual=mutual))
    authority = {None: None, "ours": files.authority, "theirs": files.stranger}[trusts]
    shown = {None: None, "ours": files.client, "theirs": files.strange_client}[shows]
    let_in = enqueues(
        server,
        ca_cert=None if authority is None else authority.certificate.read_bytes(),
        client_cert=None if shown is None else shown[0].read_bytes(),
        client_key=None if shown is None else shown[1].read_bytes(),
    )
    assert let_in is is_let_in


def test_a_renewed_certificate_is_served_without_a_restart(
    serve: Callable[..., Server], files: Files, tmp_path: Path
) -> None:
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    shutil.copy(files.server[0], certificate)
    shutil.copy(files.server[1], key)
    server = serve(tls={"certificate": str(certificate), "key": str(key)})
    ours, theirs = files.authority.certificate.read_bytes(), files.stranger.certificate.read_bytes()
    assert enqueues(server, ca_cert=ours)
    assert not enqueues(server, ca_cert=theirs)
    renewed = files.stranger.sign("renewed")
    shutil.copy(renewed[0], certificate)
    shutil.copy(renewed[1], key)
    assert enqueues(server, ca_cert=theirs)
    certificate.unlink()
    assert enqueues(server, ca_cert=theirs), "a file that is missing leaves the last certificate in place"


def test_the_basalt_client_supports_tls_and_client_certificates(serve: Callable[..., Server], files: Files) -> None:
    server = serve(tls=files.options(mutual=True))
    authority = files.authority.certificate.read_bytes()
    certificate, key = files.client[0].read_bytes(), files.client[1].read_bytes()
    address = f"localhost:{server.port}"
    with Client(address, ca_certificate=authority, client_certificate=certificate, client_key=key) as client:
        client.create_queue("q")
        assert len(client.enqueue("q", [b"1", b"2"])) == 2
    with Client(address, ca_certificate=authority, timeout=10) as client, pytest.raises(UnavailableError):
        client.enqueue("q", b"3")
    with pytest.raises(InvalidArgumentError, match="must be given together"):
        Client(address, ca_certificate=authority, client_certificate=certificate)


def test_api_keys_work_over_tls(serve: Callable[..., Server], files: Files) -> None:
    server = serve(tls=files.options(mutual=False), access="loopback")
    authority = files.authority.certificate.read_bytes()
    with grpc.secure_channel(f"localhost:{server.port}", grpc.ssl_channel_credentials(authority)) as channel:
        made = Admin(channel).CreateApiKey(name="k", is_superadmin=True)
        Admin(channel).CreateQueue(name="q")
    with fila.Client(f"localhost:{server.port}", ca_cert=authority, api_key=made.key) as client:
        client.enqueue("q", None, b"")
