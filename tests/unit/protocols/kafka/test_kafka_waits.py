"""Waiting fetches, and the single timer of a connection for them."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.fuzz.kafka import Harness as Served
from tests.fuzz.kafka import responses
from tests.unit.protocols.kafka.test_kafka_context import AnyUser, Harness, batch_of

from basaltmq.protocols.kafka import connection as connection_module
from basaltmq.protocols.kafka.context import BlockingResponse, Client, PipelinedResponse, Respond
from basaltmq.protocols.kafka.fetch import fetch
from basaltmq.protocols.kafka.fetch_state.deadline import Deadline
from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire.api import APIS, Request
from basaltmq.protocols.kafka.wire.schema import Fields

WAIT_S = 60.0


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path / "store")
    yield made
    made.close()


def asked(
    harness: Harness, client: AnyUser, offset: int, *, min_bytes: int = 1, max_wait_ms: int = 60_000
) -> BlockingResponse:
    partition = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
    body = {
        "session_id": 0,
        "session_epoch": -1,
        "max_wait_ms": max_wait_ms,
        "min_bytes": min_bytes,
        "max_bytes": 1 << 20,
        "isolation_level": 0,
        "topics": [{"topic": "t", "topic_id": None, "partitions": [partition]}],
        "forgotten_topics": [],
    }
    response: Any = fetch(harness.context, cast(Client, client), Request(APIS[k.FETCH], 12, 1, None, body))
    assert not isinstance(response, dict), "there is something to wait for"
    return cast(BlockingResponse, response)


def records_of(body: Fields | None) -> list[bytes]:
    assert body is not None
    found: list[bytes] = body["topics"][0]["partitions"][0]["records"]
    return found


class Responses:
    def __init__(self) -> None:
        self.responses: list[tuple[Fields | None, Exception | None]] = []
        self.came = asyncio.Event()

    def __call__(self, body: Fields | None, error: Exception | None) -> None:
        self.responses.append((body, error))
        self.came.set()

    async def one(self) -> Fields | None:
        await asyncio.wait_for(self.came.wait(), WAIT_S)
        ((body, error),) = self.responses
        assert error is None
        return body


@pytest.mark.spec("B2")
def test_a_fetch_waits_for_min_bytes_and_returns_all_records_of_a_turn(harness: Harness) -> None:
    engine, shard = harness.topic("t")
    one = batch_of(b"one")

    async def run() -> None:
        client, reported = AnyUser(), Responses()
        asked(harness, client, 0, min_bytes=len(one) + 1).start(reported)
        for _ in range(2):
            assert not reported.responses
            engine.append_kafka(shard, one)
            harness.context.arrivals.notify_appended(shard, len(one))
        assert not reported.responses, "who appends is not held up"
        found = records_of(await reported.one())
        assert len(found) == 2
        assert len(harness.context.arrivals) == 0
        client.deadline.close()

    asyncio.run(run())


@pytest.mark.spec("B2")
def test_an_empty_fetch_returns_after_its_wait_time(harness: Harness) -> None:
    harness.topic("t")

    async def run() -> None:
        client, reported = AnyUser(), Responses()
        begin = asyncio.get_running_loop().time()
        asked(harness, client, 0, max_wait_ms=30).start(reported)
        assert records_of(await reported.one()) == []
        assert asyncio.get_running_loop().time() >= begin + 0.03
        assert len(harness.context.arrivals) == 0

    asyncio.run(run())


@pytest.mark.spec("B2")
def test_a_cancelled_fetch_leaves_no_state(harness: Harness) -> None:
    engine, shard = harness.topic("t")

    async def run() -> None:
        client, reported = AnyUser(), Responses()
        for has_come in (False, True):
            waiting = asked(harness, client, 0)
            waiting.start(reported)
            if has_come:
                engine.append_kafka(shard, batch_of(b"one"))
                harness.context.arrivals.notify_appended(shard, 100)
            waiting.cancel()
            assert len(harness.context.arrivals) == 0
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not reported.responses
        client.deadline.close()

    asyncio.run(run())


@pytest.mark.spec("B2")
def test_an_error_in_a_waiting_fetch_is_returned(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.topic("t")

    async def run() -> None:
        client, reported = AnyUser(), Responses()
        asked(harness, client, 0).start(reported)
        failure = RuntimeError("a bug")

        def fails(*_: Any) -> Any:
            raise failure

        monkeypatch.setattr("basaltmq.protocols.kafka.fetch._look", fails)
        harness.context.arrivals.notify_appended(harness.context.topic("t").shards[0], 1)
        await asyncio.wait_for(reported.came.wait(), WAIT_S)
        assert reported.responses == [(None, failure)]
        client.deadline.close()

    asyncio.run(run())


@pytest.mark.spec("B2")
def test_one_timer_serves_many_waits_and_none_ends_early() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        made: list[float] = []
        real = loop.call_at

        def counting(when: float, *args: Any, **more: Any) -> asyncio.TimerHandle:
            made.append(when)
            return real(when, *args, **more)

        loop.call_at = counting  # type: ignore[method-assign,assignment]
        deadline = Deadline()
        called = asyncio.Event()
        for _ in range(100):
            deadline.set(loop.time() + WAIT_S, called.set)
            deadline.clear()
        assert len(made) == 1
        at = loop.time() + 0.02
        deadline.set(at + 0.01, called.set)
        deadline.set(at, called.set)
        deadline.set(at + 0.01, called.set)
        await asyncio.wait_for(called.wait(), WAIT_S)
        assert loop.time() >= at + 0.01
        called.clear()
        deadline.set(loop.time(), called.set)
        deadline.clear()
        await asyncio.sleep(0.01)
        assert not called.is_set()
        deadline.close()

    asyncio.run(run())


@pytest.mark.promise("P9")
def test_responses_that_wait_for_a_write_are_bounded_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        served = Served(tmp_path / "served")
        connection, transport = served.connect()
        starts: list[Respond] = []
        monkeypatch.setitem(served.server.handlers, k.PRODUCE, lambda *_: PipelinedResponse(starts.append))
        monkeypatch.setattr(connection_module, "IN_FLIGHT_BYTES_MAX", 1000)
        others = 50
        asked = [k.encode_request(k.PRODUCE, 9, 0, "good", {"acks": -1, "timeout_ms": 1, "topics": []})]
        asked += [k.encode_request(k.API_VERSIONS, 0, 1 + number, "good", {}) for number in range(others)]
        connection.data_received(b"".join(asked))
        assert not transport.written, "the write is not confirmed"
        assert 1 < connection.requests < others, "what waits behind it is bounded"
        (tell,) = starts
        tell({"topics": []}, None)
        reported = responses(b"".join(transport.written))
        assert [struct.unpack_from(">i", each)[0] for each in reported] == [*range(1 + others)]
        connection.connection_lost(None)
        await served.close()

    asyncio.run(run())
