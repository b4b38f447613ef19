"""TLS of the gRPC listener: optional client certificates, and negotiation of HTTP/2."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Literal

import pytest
from tests.interop.fila.certificates import Authority

from basaltmq.client.channel import Target
from basaltmq.protocols.grpc.client.call import CallFailed
from basaltmq.protocols.grpc.client.channel import Channel
from basaltmq.protocols.grpc.server.certificates import Certificates
from basaltmq.protocols.grpc.server.methods import Unary
from basaltmq.protocols.grpc.server.server import GrpcServer
from basaltmq.protocols.grpc.services.error_status import outcome_of
from basaltmq.protocols.grpc.services.queue_server import TlsFiles

WAIT_S = 60


class Files:
    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory / "ours", "authority")
        self.server = self.authority.sign("server")
        self.client = self.authority.sign("client")
        self.stranger = Authority(directory / "theirs", "stranger").sign("client")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


def is_let_in(files: Files, clients: Literal["ignore", "ask", "require"], shown: tuple[Path, Path] | None) -> bool:
    async def work() -> bool:
        server = GrpcServer({"/Echo": Unary(lambda raw, call: raw, bytes)}, outcome_of)
        given = TlsFiles(files.server[0], files.server[1], files.authority.certificate, clients)
        tls = Certificates(given.settings())
        port = await server.listen("127.0.0.1", 0, tls.context, tls.refresh)
        target = Target(
            f"localhost:{port}",
            ca_certificate=files.authority.certificate.read_bytes(),
            client_certificate=None if shown is None else shown[0].read_bytes(),
            client_key=None if shown is None else shown[1].read_bytes(),
        )
        context = target.context()
        assert isinstance(context, ssl.SSLContext)
        channel = Channel("localhost", port, tls=context)
        try:
            return await channel.unary("/Echo", b"x", WAIT_S) == b"x"
        except CallFailed:
            return False
        finally:
            await channel.close()
            await server.stop(0, "bye")

    return asyncio.run(asyncio.wait_for(work(), WAIT_S))


def test_an_optional_client_certificate_may_be_missing_but_not_invalid(files: Files) -> None:
    assert is_let_in(files, "ask", None)
    assert is_let_in(files, "ask", files.client)
    assert not is_let_in(files, "ask", files.stranger)
    assert not is_let_in(files, "require", None)
    assert is_let_in(files, "ignore", files.stranger)
