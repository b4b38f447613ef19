"""Stream queues: appended once, read by many consumers from any offset, never consumed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.rig import (
    PERSISTENT,
    BrokenStore,
    Clock,
    FakePublisher,
    FakeSink,
    headers_of,
    props,
    publish,
    run,
    settlement,
    turns,
    until,
)

from basaltmq.broker.consumers.stream_queue import with_offset
from basaltmq.broker.message import properties
from basaltmq.broker.message.amqp_table import Timestamp
from basaltmq.broker.message.stream_envelope import envelope_of
from basaltmq.broker.vhost import REJECT, VHost
from basaltmq.errors import DamagedFrameError, LimitExceededError, PreconditionFailedError
from basaltmq.log.batches.record import Record
from basaltmq.store.memory import MemoryStore
from basaltmq.store.open import open_store

STREAM = {"x-queue-type": "stream"}


async def filled(vhost: VHost, count: int = 10, name: str = "s") -> None:
    vhost.declare_queue(name, durable=True, arguments=STREAM)
    publisher = FakePublisher()
    publish(vhost, publisher, name, *(b"%d" % number for number in range(count)))
    await until(lambda: len(publisher.reported) == count)
    assert publisher.numbers() == list(range(1, count + 1))


async def read(vhost: VHost, count: int, wanted: Any, name: str = "s") -> list[bytes]:
    sink = FakeSink(vhost, ack=True)
    arguments = {} if wanted is None else {"x-stream-offset": wanted}
    consumer = vhost.subscribe(name, sink, tag="c", prefetch=3, arguments=arguments)
    await until(lambda: len(sink.got) >= count)
    await turns(20)
    consumer.cancel()
    return sink.payloads()


@pytest.mark.spec("B1")
def test_every_consumer_reads_all_records_from_its_offset() -> None:
    clock = Clock()

    async def test(vhost: VHost) -> None:
        await filled(vhost, 5)
        clock.pass_ms(3_600_000)
        publisher = FakePublisher()
        publish(vhost, publisher, "s", b"5", b"6")
        await until(lambda: len(publisher.reported) == 2)
        everything = [b"%d" % number for number in range(7)]
        assert await read(vhost, 7, "first") == everything
        assert await read(vhost, 7, "first") == everything, "reading takes nothing away"
        assert await read(vhost, 1, "last") == [b"6"]
        assert await read(vhost, 4, 3) == everything[3:]
        assert await read(vhost, 7, 0) == everything
        assert await read(vhost, 2, "30m") == [b"5", b"6"]
        assert await read(vhost, 2, Timestamp(clock.now_ns // 1_000_000_000 - 60)) == [b"5", b"6"]
        assert await read(vhost, 0, None) == []
        assert vhost.declare_queue("s", passive=True).messages == 7

    run(test, clock=clock)


def test_deliveries_carry_their_offset_and_respect_credit() -> None:
    async def test(vhost: VHost) -> None:
        await filled(vhost, 5)
        sink = FakeSink(vhost)
        consumer = vhost.subscribe("s", sink, tag="c", prefetch=2, arguments={"x-stream-offset": "first"})
        await turns()
        assert [headers_of(each)["x-stream-offset"] for each in sink.got] == [0, 1]
        vhost.settle([settlement("s", sink.got[0])])
        consumer.credit(1)
        await until(lambda: len(sink.got) == 3)
        await turns()
        assert len(sink.got) == 3

    run(test)


def test_a_waiting_consumer_gets_new_records() -> None:
    async def test(vhost: VHost) -> None:
        await filled(vhost, 2)
        sink = FakeSink(vhost, ack=True)
        vhost.subscribe("s", sink, tag="c", prefetch=10)
        publish(vhost, FakePublisher(), "s", b"new")
        await until(lambda: sink.payloads() == [b"new"])

    run(test)


def test_unsupported_operations_on_streams_are_refused() -> None:
    async def test(vhost: VHost) -> None:
        await filled(vhost, 1)
        sink = FakeSink(vhost)
        with pytest.raises(PreconditionFailedError, match="prefetch"):
            vhost.subscribe("s", sink, tag="c")
        with pytest.raises(PreconditionFailedError, match="acknowledge"):
            vhost.subscribe("s", sink, tag="c", prefetch=1, no_ack=True)
        for wrong in ("soon", -1, True, 1.5):
            with pytest.raises(PreconditionFailedError, match="x-stream-offset"):
                vhost.subscribe("s", sink, tag="c", prefetch=1, arguments={"x-stream-offset": wrong})
        with pytest.raises(PreconditionFailedError):
            vhost.get("s")
        with pytest.raises(PreconditionFailedError):
            vhost.purging("s")
        assert len(vhost.queues.by_name["s"].consumers) == 0

    run(test)


@pytest.mark.promise("P10")
def test_a_stream_survives_and_a_deleted_one_does_not() -> None:
    store = MemoryStore()

    async def before(vhost: VHost) -> None:
        await filled(vhost, 3)
        await filled(vhost, 3, "gone")
        vhost.bind_queue("s", "amq.topic", "#")
        vhost.delete_queue("gone")
        vhost.declare_queue("gone", durable=True, arguments=STREAM)

    async def after(vhost: VHost) -> None:
        assert await read(vhost, 3, "first") == [b"0", b"1", b"2"]
        assert vhost.declare_queue("gone", passive=True).messages == 0
        publisher = FakePublisher()
        publish(vhost, publisher, "any.key", b"routed", exchange="amq.topic")
        await until(lambda: publisher.numbers() == [1])
        assert await read(vhost, 1, "last") == [b"routed"]

    run(before, store)
    run(after, store)


def test_a_fan_out_reaches_queues_and_streams_with_one_confirm() -> None:
    async def test(vhost: VHost) -> None:
        await filled(vhost, 0)
        vhost.declare_queue("q", durable=True)
        for name in ("s", "q"):
            vhost.bind_queue(name, "amq.fanout", "")
        publisher = FakePublisher()
        publish(vhost, publisher, "", b"x" * 300, exchange="amq.fanout")
        await until(lambda: publisher.numbers() == [1])
        assert vhost.get("q") is not None
        assert await read(vhost, 1, "first") == [b"x" * 300]

    run(test)


@pytest.mark.spec("E7")
def test_dead_letters_reach_a_stream_completely_also_after_a_restart() -> None:
    store = MemoryStore()
    large = b"x" * 6000

    async def before(vhost: VHost) -> None:
        vhost.declare_queue("s", durable=True, arguments=STREAM)
        to_stream = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "s"}
        vhost.declare_queue("q", durable=True, arguments=to_stream)
        publish(vhost, FakePublisher(), "q", large, b"small", b"late")
        for _ in range(2):
            got = vhost.get("q")
            assert got is not None
            vhost.settle([settlement("q", got[0], REJECT)])
        assert sorted(await read(vhost, 2, "first"), key=len) == [b"small", large]
        await until(lambda: vhost.plane.stats("s")["messages"] == 0)
        got = vhost.get("q")
        assert got is not None
        vhost.stream_queues._wake = lambda queue: None
        vhost.spool._busy.add("s")
        vhost.settle([settlement("q", got[0], REJECT)])
        await turns(20)
        assert vhost.plane.stats("s")["ready"] == 1, "it waits as if the broker had died before it was moved"

    async def after(vhost: VHost) -> None:
        assert sorted(await read(vhost, 3, "first"), key=len) == [b"late", b"small", large]
        await until(lambda: vhost.plane.stats("s")["messages"] == 0)

    run(before, store)
    run(after, store)


def test_a_message_too_large_for_a_stream_is_refused_without_side_effects(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(vhost: VHost) -> None:
        await filled(vhost, 1)

        def refuse(*given: object) -> None:
            raise LimitExceededError("the test finds it too large")

        publisher = FakePublisher()
        with monkeypatch.context() as patch:
            patch.setattr(vhost.queues.by_name["s"].stream, "_engine", Refusing(refuse))
            publish(vhost, publisher, "s", b"large")
            await until(lambda: publisher.numbers("nack") == [1])
        assert vhost.is_up
        publish(vhost, publisher, "s", b"1", first=2)
        await until(lambda: publisher.numbers() == [2])
        assert await read(vhost, 2, "first") == [b"0", b"1"]

    run(test)


class Refusing:
    """An engine that refuses every append."""

    def __init__(self, refuse: Any) -> None:
        self.batch_write = self.confirmed = refuse


def test_a_store_stall_delays_without_duplicates() -> None:
    store = BrokenStore()

    async def test(vhost: VHost) -> None:
        await filled(vhost, 1)
        publisher = FakePublisher()
        store.stall = True
        publish(vhost, publisher, "s", b"1")
        await turns(20)
        publish(vhost, publisher, "s", b"2", first=2)
        await turns(20)
        assert publisher.reported == []
        store.stall = False
        vhost.stream_queues.append(vhost.queues.by_name["s"], [(properties.encode_envelope("", "s", PERSISTENT), b"3")])
        await until(lambda: publisher.numbers() == [1, 2])
        assert await read(vhost, 4, "first") == [b"0", b"1", b"2", b"3"]

    run(test, store)


@pytest.mark.parametrize(
    "raw",
    [
        b"\0\0",
        PERSISTENT,
        props({"a": 1}),
        props({"x-stream-offset": "forged"}, content_type="text/plain", content_encoding="gzip"),
        props(content_type="text/plain", content_encoding="gzip", message_id="m"),
    ],
)
def test_adding_the_offset_header_changes_nothing_else(raw: bytes) -> None:
    before = properties.parse(raw)
    exchange, key, after_raw = properties.decode_envelope(with_offset(properties.encode_envelope("ex", "key", raw), 77))
    properties.peek(after_raw)
    after = properties.parse(after_raw)
    assert (exchange, key) == ("ex", "key")
    assert after.headers == {**before.headers, "x-stream-offset": 77}
    after.headers_raw = before.headers_raw
    assert after == before


def test_streams_are_kept_in_a_log_beside_a_store_on_disk(tmp_path: Path) -> None:
    async def whole() -> None:
        for turn in range(2):
            store = open_store(tmp_path / "store")
            vhost = VHost("/", store, path=tmp_path / "store")
            vhost.start()
            if turn == 0:
                vhost.declare_queue("s", durable=True, arguments={**STREAM, "x-max-length-bytes": 1 << 20})
                publisher = FakePublisher()
                publish(vhost, publisher, "s", *(b"%d" % number for number in range(50)))
                await until(lambda reported=publisher.reported: len(reported) == 50)  # type: ignore[misc]
            assert await read(vhost, 50, "first") == [b"%d" % number for number in range(50)]
            await vhost.close()
            store.close()
        assert (tmp_path / "store" / "log").is_dir()

    asyncio.run(whole())


@pytest.mark.promise("P7")
def test_a_damaged_frame_loses_only_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(vhost: VHost) -> None:
        await filled(vhost, 5)
        stream = vhost.queues.by_name["s"].stream
        read_by_offset = stream._engine.read_by_offset

        def damaged(shard: int, offset: int, *rest: int) -> Any:
            if offset <= 2:
                raise DamagedFrameError(shard, offset, 2, "the test damages it")
            return read_by_offset(shard, offset, *rest)

        monkeypatch.setattr(stream._engine, "read_by_offset", damaged)
        assert await read(vhost, 2, "first") == [b"3", b"4"]
        assert vhost.is_up

    run(test)


@pytest.mark.spec("B1")
def test_records_of_other_protocols_have_headers_key_and_timestamp() -> None:
    headers = (("text", "grün".encode()), ("raw", b"\xff\0"), ("twice", b"1"), ("twice", b"2"), ("x" * 300, b"long"))
    record = Record(b"body", b"key", headers, timestamp_ms=1_700_000_000_123)
    exchange, key, raw = properties.decode_envelope(with_offset(envelope_of(record), 5))
    properties.peek(raw)
    reported = properties.parse(raw)
    assert (exchange, key, reported.timestamp) == ("", "", 1_700_000_000)
    assert reported.headers == {
        "text": "grün",
        "raw": b"\xff\0",
        "twice": "2",
        "x-stream-key": "key",
        "timestamp_in_ms": 1_700_000_000_123,
        "x-stream-offset": 5,
    }
    large = Record(b"", b"k" * 70_000, (("a", b"a" * 60_000), ("b", b"b" * 6_000), ("c", b"c")), timestamp_ms=-1)
    reported = properties.parse(properties.decode_envelope(envelope_of(large))[2])
    assert set(reported.headers) == {"a", "c"}, "what fits into a frame"
    assert reported.timestamp is None


@pytest.mark.parametrize(
    "forged",
    [b"", b"\0", b"\xff", b"\0\0", b"\0\0\xff\xff", b"\0\0\x20\0\0\0\0\x09abc", b"\x05ab", b"\0\0\x80\0\x05ab"],
)
def test_an_invalid_envelope_header_of_another_protocol_is_an_ordinary_header(forged: bytes) -> None:
    raw = properties.decode_envelope(with_offset(envelope_of(Record(b"body", headers=(("amqp", forged),))), 5))[2]
    properties.peek(raw)
    assert properties.parse(raw).headers.keys() >= {"amqp", "x-stream-offset"}


def test_envelopes_from_amqp_are_delivered_unchanged() -> None:
    envelope = properties.encode_envelope("ex", "key", props(content_type="a/b", headers={"h": 1}))
    assert envelope_of(Record(b"body", headers=(("amqp", envelope),), timestamp_ms=1)) == envelope
