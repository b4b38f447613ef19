"""Memory use of compressed requests, and of calls that do not end."""

from __future__ import annotations

import gzip
import tracemalloc

import pytest
from tests.unit.protocols.grpc.test_grpc_server import Handlers, Session, run
from tests.unit.protocols.http2.peer import prefixed

from basaltmq.protocols.grpc.messages import PREFIX
from basaltmq.protocols.grpc.server.server import GrpcServer
from basaltmq.protocols.grpc.status import Outcome, Status


def zipped(message: bytes) -> bytes:
    packed = gzip.compress(message)
    return PREFIX.pack(1, len(packed)) + packed


@pytest.mark.parametrize("path", ["/Echo", "/Counts", "/Doubles"])
def test_compressed_requests_are_decoded_and_bombs_refused(path: str) -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        session = Session(server)
        message = {"/Echo": b"x" * 50_000, "/Counts": b"1", "/Doubles": b"y"}[path]
        session.call(path, zipped(message), grpc_encoding="gzip")
        await session.until(lambda: session.outcome() is not None)
        assert session.outcome() == Outcome(Status.OK)
        expected = {"/Echo": prefixed(message), "/Counts": prefixed(b"0" + bytes(1000)), "/Doubles": prefixed(b"yy")}[
            path
        ]
        assert session.responses() == expected
        for stream, size_bytes in ((3, 500_001), (5, 4_000_000)):
            session.call(path, zipped(bytes(size_bytes)), stream=stream, grpc_encoding="gzip")
            await session.until(lambda: session.outcome(stream) is not None)  # noqa: B023
            found = session.outcome(stream)
            assert found is not None
            assert found.status is Status.RESOURCE_EXHAUSTED
        assert session.connection.calls == 0

    run(work, request_bytes_max=1_000_000, inflated_bytes_max=500_000)


@pytest.mark.promise("P8")
def test_unread_compressed_messages_stay_compressed() -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        session = Session(server)
        bombs = zipped(bytes(20_000_000)) * 10
        tracemalloc.start()
        session.call("/Doubles", bombs, ends=False, grpc_encoding="gzip")
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 2_000_000

    run(work, inflated_bytes_max=20_000_000)


@pytest.mark.promise("P8")
@pytest.mark.parametrize("path", ["/Echo", "/Counts"])
def test_complete_messages_of_calls_that_do_not_end_count_towards_the_limit(path: str) -> None:
    async def work(server: GrpcServer, handlers: Handlers) -> None:
        session = Session(server)
        session.call(path, prefixed(b"1") * 2, ends=False)
        await session.until(lambda: session.outcome(1) is not None)
        more = session.outcome(1)
        assert more is not None
        assert more.status is Status.INTERNAL
        for stream in (3, 5, 7):
            session.call(path, prefixed(bytes(900_000)), ends=False, stream=stream)
        await session.until(lambda: session.outcome(7) is not None)
        refused = session.outcome(7)
        assert refused is not None
        assert refused.status is Status.RESOURCE_EXHAUSTED
        assert session.connection.calls == 2

    run(work, request_bytes_max=1_000_000)
