"""Read-ahead for consumers: it is used, its results equal normal reads, and its memory is bounded."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, cast

import pytest
from tests.unit.log.strategies import transactional
from tests.unit.protocols.kafka.test_kafka_context import AnyUser, batch_of
from tests.unit.protocols.kafka.test_kafka_transactions import Harness

from basaltmq.log.batches.kafka import read_header, records
from basaltmq.log.kafka_run import take_batches
from basaltmq.protocols.kafka.context import Client
from basaltmq.protocols.kafka.fetch import fetch
from basaltmq.protocols.kafka.fetch_state import read_ahead
from basaltmq.protocols.kafka.fetch_state.read_ahead import Next
from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire.api import APIS, Request
from basaltmq.streams.engines.segment import kafka as segment_kafka
from basaltmq.streams.engines.segment.engine import SegmentEngine

STEPS = 120
FIELDS = ("records", "high_watermark", "last_stable_offset", "log_start_offset", "error_code", "aborted_transactions")


class Consumer(AnyUser):
    """A client that continues at its position."""

    def __init__(self) -> None:
        self.is_gone = False

    def unsent_bytes(self) -> int | None:
        return None if self.is_gone else 0


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    made = Harness(tmp_path_factory.mktemp("ahead") / "store")
    yield made
    made.close()


def ask(
    harness: Harness, consumer: AnyUser, topics: dict[str, int], bytes_max: int, isolation_level: int = 0
) -> list[Any]:
    """Return the response of each partition, in the order of the request."""
    body = {
        "session_id": 0,
        "session_epoch": -1,
        "max_wait_ms": 0,
        "min_bytes": 1,
        "max_bytes": 50 << 20,
        "isolation_level": isolation_level,
        "topics": [
            {
                "topic": topic,
                "topic_id": None,
                "partitions": [{"partition": 0, "fetch_offset": offset, "partition_max_bytes": bytes_max}],
            }
            for topic, offset in topics.items()
        ],
        "forgotten_topics": [],
    }
    response = fetch(harness.context, cast(Client, consumer), Request(APIS[k.FETCH], 12, 1, None, body))
    assert isinstance(response, dict)
    return [{name: each["partitions"][0].get(name) for name in FIELDS} for each in response["topics"]]


async def idle() -> None:
    """Run enough turns of the loop for all pending work."""
    for _ in range(10):
        await asyncio.sleep(0)


def in_loop(harness: Harness, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        try:
            await run()
        finally:
            harness.context.ahead.close()

    asyncio.run(whole())


def filled(harness: Harness, name: str, batches: int, value_bytes: int = 1000) -> tuple[SegmentEngine, int]:
    harness.topic(name)
    engine, shard = harness.context.engine(harness.context.topic(name), 0)
    for number in range(batches):
        engine.wait(engine.append_kafka(shard, batch_of(b"%d" % number, b"x" * value_bytes)))
    return engine, shard


def next_of(response: dict[str, Any]) -> int:
    header = read_header(response["records"][-1])
    return header.base_offset + header.last_offset_delta + 1


def test_a_sequential_fetch_is_served_from_the_read_ahead(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(harness, "on", 30)
    taken: list[int] = []

    def counted(log: Any, shard: int, base_offset: int, *rest: Any, **more: Any) -> Any:
        taken.append(base_offset)
        return take_batches(log, shard, base_offset, *rest, **more)

    monkeypatch.setattr(segment_kafka, "take_batches", counted)

    async def run() -> None:
        consumer = Consumer()
        offset = 0
        while offset < 40:
            taken.clear()
            (response,) = ask(harness, consumer, {"on": offset}, 4096)
            assert taken == ([] if offset else [0])
            offset = next_of(response)
            await idle()
            assert offset in taken, "what follows is taken meanwhile"
        taken.clear()
        ask(harness, consumer, {"on": 2}, 4096)
        assert taken == [2], "another place than the one made ready"

    in_loop(harness, run)


@pytest.mark.parametrize("seed", [int(os.environ.get("BASALT_TEST_SEED", "1")), 2])
def test_responses_are_the_same_with_and_without_read_ahead(harness: Harness, seed: int) -> None:
    """The partition changes between two fetches in all possible ways."""
    print(f"seed {seed}")
    dice = random.Random(seed)
    name = f"same-{seed}"
    engine, shard = filled(harness, name, 20)

    async def run() -> None:
        consumers = [Consumer() for _ in range(3)]
        places = [0, 0, 0]
        for step in range(STEPS):
            at = dice.randrange(3)
            isolation = dice.randrange(2)
            bytes_max = dice.choice((2500, 4096, 4096, 4096, 9000))
            (got,) = ask(harness, consumers[at], {name: places[at]}, bytes_max, isolation)
            stranger = Consumer()
            (expected,) = ask(harness, stranger, {name: places[at]}, bytes_max, isolation)
            harness.context.ahead.take(stranger)
            assert got == expected, f"seed {seed}, step {step}"
            info = engine.shard_info(shard)
            if got["records"]:
                places[at] = next_of(got)
            elif got["error_code"] or dice.random() < 0.5:
                places[at] = dice.randint(info.start_offset, info.high_watermark)
            await idle()
            what = dice.random()
            if what < 0.3:
                sizes = [dice.randint(1, 1500) for _ in range(dice.randint(1, 4))]
                engine.wait(engine.append_kafka(shard, batch_of(*(b"y" * size for size in sizes))))
            elif what < 0.34:
                engine.wait(engine.append_kafka(shard, transactional(900 + step, 0, b"open" * 200)))
            elif what < 0.38 and step > STEPS // 2:
                engine.delete_records_before(shard, dice.randint(info.start_offset, info.high_watermark))
            elif what < 0.40 and step > 3 * STEPS // 4 and info.high_watermark > info.start_offset:
                engine.delete_by_offset(shard, [dice.randint(info.start_offset, info.high_watermark - 1)])

    in_loop(harness, run)


def test_read_ahead_of_a_trimmed_partition_is_not_used(harness: Harness) -> None:
    engine, shard = filled(harness, "trimmed", 20)

    async def run() -> None:
        consumer = Consumer()
        (response,) = ask(harness, consumer, {"trimmed": 0}, 4096)
        await idle()
        assert harness.context.ahead.size_bytes > 0
        engine.delete_records_before(shard, 30)
        (response,) = ask(harness, consumer, {"trimmed": next_of(response)}, 4096)
        assert response["error_code"] == 1, "out of range"
        assert harness.context.ahead.size_bytes == 0

    in_loop(harness, run)


def test_read_ahead_does_not_contain_deleted_records(harness: Harness) -> None:
    engine, shard = filled(harness, "deleted", 20)

    async def run() -> None:
        consumer = Consumer()
        (response,) = ask(harness, consumer, {"deleted": 0}, 4096)
        following = next_of(response)
        await idle()
        engine.delete_by_offset(shard, [following])
        (response,) = ask(harness, consumer, {"deleted": following}, 4096)
        assert b"%d" % (following // 2) not in [each.value for each in records_of(response)]

    in_loop(harness, run)


def records_of(response: dict[str, Any]) -> list[Any]:
    return [record for raw in response["records"] for record in records(raw)]


def test_read_ahead_is_used_only_at_its_offset(harness: Harness) -> None:
    engine, shard = filled(harness, "place", 20)
    following = engine.read_kafka(shard, 0, 4096).next_offset
    ahead = segment_kafka.take_ahead(engine, shard, following, 4096)
    assert ahead is not None
    for offset in (following - 2, following + 2):
        assert engine.read_kafka(shard, offset, 4096, ahead=ahead) == engine.read_kafka(shard, offset, 4096)
    assert engine.read_kafka(shard, following, 4096, ahead=ahead).batches is not ahead.taken.batches
    engine.read_kafka(shard, 0, 4096)
    assert segment_kafka.take_ahead(engine, shard, following, 500) is None, "a batch over the limit is not kept"


def test_read_ahead_is_bounded_per_client_and_in_total_and_freed_on_disconnect(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "CLIENT_BYTES_MAX", 10_000)
    monkeypatch.setattr(read_ahead, "BYTES_MAX", 15_000)
    names = [f"little-{number}" for number in range(4)]
    for name in names:
        filled(harness, name, 20)
    ahead = harness.context.ahead

    async def run() -> None:
        consumers = [Consumer() for _ in range(4)]
        for consumer in consumers:
            ask(harness, consumer, dict.fromkeys(names, 0), 4096)
            await idle()
            assert ahead.size_bytes <= 15_000
        kept = [ahead.take(consumer) for consumer in consumers]
        assert [len(each) for each in kept] == [0, 0, 2, 2], "the oldest goes first; one has room for two partitions"
        assert ahead.size_bytes == 0
        ask(harness, consumers[0], dict.fromkeys(names, 0), 4096)
        consumers[0].is_gone = True
        await idle()
        assert not ahead.take(consumers[0])

    in_loop(harness, run)


def test_unused_read_ahead_is_dropped(harness: Harness) -> None:
    engine, shard = filled(harness, "aged", 20)
    ahead = harness.context.ahead

    async def run() -> None:
        old, young = Consumer(), Consumer()
        following = engine.read_kafka(shard, 0, 4096).next_offset
        for consumer in (old, young):
            ahead.prepare(consumer, [Next(engine, shard, following, 4096)])
            await idle()
            assert ahead.size_bytes > 0
            ahead._expire()
        assert not ahead.take(old)
        assert ahead.take(young)
        assert ahead.size_bytes == 0

    in_loop(harness, run)
