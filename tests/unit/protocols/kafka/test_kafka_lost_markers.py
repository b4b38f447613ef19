"""A log that lost the marker of a transaction: the coordinator's row shows whether its records were committed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.log.strategies import transactional
from tests.unit.protocols.kafka.test_kafka_transactions import TIMEOUT_MS, Harness

from basaltmq.log.ends import read_ends
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import streams as stream_keys

pytestmark = pytest.mark.promise("P1", "P3", "P7")


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path / "store")
    yield made
    made.close()


def lose_last_frame(harness: Harness, shard: int) -> None:
    """Close the store, truncate the last frame of a shard, which is the last of the log, and open it."""
    engine = harness.streams.segments()
    assert engine is not None
    last = list(engine.index.entries(shard, 0))[-1]
    assert last.position + last.size_bytes == engine.lanes[0].log.end
    path = engine.lanes[0].log.segments()[-1].path
    harness.context.transactions.close()
    harness.streams.close()
    harness.store.close()
    assert read_ends(harness.path).lanes[0] == last.position + last.size_bytes
    os.truncate(path, last.position)
    harness.open()


async def write(harness: Harness, shard: int, value: bytes, sequence: int, *, is_commit: bool) -> None:
    transactions = harness.transactions
    row = transactions.get("id")
    if row is None:
        await transactions.initialize("id", TIMEOUT_MS)
        row = transactions.get("id")
    assert row is not None
    pid, epoch = row.producer_id, row.epoch
    await transactions.add("id", pid, epoch, shards=frozenset((shard,)))
    topic = "t" if shard == harness.context.topic("t").shards[0] else "u"
    assert await harness.produce(topic, "id", transactional(pid, sequence, value, epoch=epoch)) == 0
    await transactions.end("id", pid, epoch, is_commit)


@pytest.mark.parametrize("is_commit", [True, False])
def test_a_lost_marker_is_written_again(harness: Harness, is_commit: bool) -> None:
    shard = harness.topic("t")

    async def run() -> None:
        await write(harness, shard, b"a", 0, is_commit=True)
        await write(harness, shard, b"b", 1, is_commit=is_commit)

    asyncio.run(run())
    expected = [b"a", b"b"] if is_commit else [b"a"]
    assert harness.seen("t") == expected
    for _ in range(2):
        lose_last_frame(harness, shard)
        _ = harness.transactions
        assert harness.seen("t") == expected
    harness.reopen()
    assert harness.seen("t") == expected


def test_a_new_epoch_and_a_transaction_elsewhere_keep_the_outcome(harness: Harness) -> None:
    other = harness.topic("u")
    shard = harness.topic("t")

    async def run() -> None:
        await write(harness, shard, b"a", 0, is_commit=True)
        pid, epoch = await harness.transactions.initialize("id", TIMEOUT_MS)
        await harness.transactions.add("id", pid, epoch, shards=frozenset((other,)))

    asyncio.run(run())
    lose_last_frame(harness, shard)
    _ = harness.transactions
    assert harness.seen("t") == [b"a"]


def test_records_of_an_earlier_transaction_are_not_committed_by_a_later_one(harness: Harness) -> None:
    """Both markers are lost, and the records of the later transaction too. The earlier one was aborted."""
    shard = harness.topic("t")

    async def run() -> None:
        await write(harness, shard, b"aborted", 0, is_commit=False)
        await write(harness, shard, b"lost", 1, is_commit=True)

    asyncio.run(run())
    assert harness.seen("t") == [b"lost"]
    engine = harness.streams.segments()
    assert engine is not None
    cut = list(engine.index.entries(shard, 0))[1].position
    path = engine.lanes[0].log.segments()[-1].path
    harness.context.transactions.close()
    harness.streams.close()
    harness.store.close()
    os.truncate(path, cut)
    harness.open()
    _ = harness.transactions
    assert harness.seen("t") == []


@pytest.mark.promise("P11")
def test_a_damaged_row_costs_its_transaction_only(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    shard = harness.topic("t")

    async def run() -> None:
        await write(harness, shard, b"a", 0, is_commit=True)
        pid, epoch = await harness.transactions.initialize("open", TIMEOUT_MS)
        await harness.transactions.add("open", pid, epoch, shards=frozenset((shard,)))
        assert await harness.produce("t", "open", transactional(pid, 0, b"open", epoch=epoch)) == 0

    asyncio.run(run())
    batch = Batch()
    batch.put(Family.TRANSACTIONS, stream_keys.transaction_key("open"), b"\x01damaged")
    harness.store.write(batch)
    harness.reopen()
    assert [row.id for row in harness.transactions.all()] == ["id"]
    assert "'open' cannot be read" in caplog.text
    assert harness.seen("t") == [b"a"]

    async def go_on() -> None:
        await write(harness, shard, b"b", 1, is_commit=True)

    asyncio.run(go_on())
    assert harness.seen("t") == [b"a", b"b"]
