"""The transaction coordinator: fencing, timeouts, the last stable offset, and the state after a crash."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import msgspec
import pytest
from tests.unit.log.strategies import transactional
from tests.unit.protocols.kafka.test_kafka_context import AnyUser

from basaltmq.broker.vhost_streams import VHostStreams
from basaltmq.durability import Durability
from basaltmq.errors import CorruptionError
from basaltmq.log.batches.kafka import read_header
from basaltmq.protocols.kafka.admin.topic_settings import topic_config
from basaltmq.protocols.kafka.context import Client, Context, Settings, awaited
from basaltmq.protocols.kafka.server import handlers
from basaltmq.protocols.kafka.transactions.coordinator import IDLE_MS_MAX, TIMEOUT_MS_MAX, Transactions
from basaltmq.protocols.kafka.transactions.row import EPOCH_MAX, State, Transaction
from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import APIS
from basaltmq.protocols.kafka.wire.errors import Refused
from basaltmq.store.families import Family
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.store.open import open_store
from basaltmq.streams.offsets import Commit

TIMEOUT_MS = 60_000


class Harness:
    """A context without a broker. `crash` leaves the state of a killed process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now_ms = 1_700_000_000_000
        self.open()

    def open(self) -> None:
        self.store = open_store(self.path)
        self.streams = VHostStreams(self.store, self.path, lambda: self.now_ms)
        queues = SimpleNamespace(by_name={})
        alarms = SimpleNamespace(reason=lambda vhost: None)
        vhost = SimpleNamespace(name="/", streams=self.streams, store=self.store, is_up=True, queues=queues)
        node = SimpleNamespace(alarms=alarms)
        self.context = Context(cast(Any, node), cast(Any, vhost), Settings(), lambda: self.now_ms)

    def close(self) -> None:
        self.context.close()
        self.streams.close()
        self.store.close()

    def reopen(self) -> None:
        """Reopen as after a kill: the context is not closed, and only written data remains."""
        self.context.transactions.close()
        self.streams.close()
        self.store.close()
        self.open()

    @property
    def transactions(self) -> Transactions:
        return self.context.transactions

    def topic(self, name: str) -> int:
        self.context.plane.topics.create(name, topic_config((), 1, Durability.SYNCED))
        return self.context.topic(name).shards[0]

    async def ask(self, key: int, version: int, body: dict[str, Any]) -> dict[str, Any]:
        """Call as over the wire: missing fields have their defaults."""
        raw = k.encode_request(key, version, 1, "test", body)
        response: Any = handlers()[key](self.context, cast(Client, AnyUser()), k.decode_request(raw[4:]))
        response = await awaited(response)
        encoded = b"".join(k.encode_response(APIS[key], version, 1, response))
        return k.decode_response(key, version, encoded[4:])[1]

    async def produce(self, topic: str, transactional_id: str | None, raw: bytes) -> int:
        body = {
            "transactional_id": transactional_id,
            "acks": -1,
            "timeout_ms": 1000,
            "topics": [{"name": topic, "partitions": [{"index": 0, "records": raw}]}],
        }
        response = await self.ask(k.PRODUCE, 9, body)
        code: int = response["topics"][0]["partitions"][0]["error_code"]
        return code

    async def fetch(self, topic: str, isolation_level: int = 1, offset: int = 0) -> dict[str, Any]:
        partition = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
        body = {
            "replica_id": -1,
            "max_wait_ms": 0,
            "min_bytes": 1,
            "max_bytes": 1 << 20,
            "isolation_level": isolation_level,
            "topics": [{"topic": topic, "partitions": [partition]}],
        }
        response = await self.ask(k.FETCH, 12, body)
        found: dict[str, Any] = response["topics"][0]["partitions"][0]
        return found

    def seen(self, topic: str) -> list[bytes]:
        engine, shard = self.context.engine(self.context.topic(topic), 0)
        return [(record.value or b"") for record in engine.read_by_offset(shard, 0).records()]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path / "store")
    yield made
    made.close()


async def refused(step: Coroutine[Any, Any, Any]) -> int:
    with pytest.raises(Refused) as found:
        await step
    return found.value.code


def test_a_new_epoch_fences_older_ones_and_aborts_their_transactions(harness: Harness) -> None:
    shard = harness.topic("t")

    async def run() -> None:
        transactions = harness.transactions
        pid, first = await transactions.initialize("id", TIMEOUT_MS)
        await transactions.add("id", pid, first, shards=frozenset((shard,)))
        assert await harness.produce("t", "id", transactional(pid, 0, b"zombie", epoch=first)) == 0
        again, second = await transactions.initialize("id", TIMEOUT_MS)
        assert again == pid
        assert second > first
        assert harness.seen("t") == []
        assert await refused(transactions.end("id", pid, first, True)) == e.PRODUCER_FENCED
        assert await refused(transactions.add("id", pid, first, shards=frozenset((shard,)))) == e.PRODUCER_FENCED
        code = await harness.produce("t", "id", transactional(pid, 1, b"zombie", epoch=first))
        assert code == e.INVALID_PRODUCER_EPOCH
        for version, wanted in ((1, e.INVALID_PRODUCER_EPOCH), (2, e.PRODUCER_FENCED), (3, e.PRODUCER_FENCED)):
            late = {"transactional_id": "id", "producer_id": pid, "producer_epoch": first}
            assert (await harness.ask(k.END_TXN, version, {**late, "committed": True}))["error_code"] == wanted
            added = await harness.ask(k.ADD_OFFSETS_TO_TXN, version, {**late, "group_id": "g"})
            assert added["error_code"] == wanted
        for version, wanted in ((3, e.INVALID_PRODUCER_EPOCH), (4, e.PRODUCER_FENCED)):
            asked = {"transactional_id": "id", "transaction_timeout_ms": TIMEOUT_MS, "producer_id": pid}
            bumped = await harness.ask(k.INIT_PRODUCER_ID, version, {**asked, "producer_epoch": first})
            assert bumped["error_code"] == wanted
        assert await refused(transactions.end("id", pid + 1, second, True)) == e.INVALID_PRODUCER_ID_MAPPING
        assert await refused(transactions.end("nobody", pid, second, True)) == e.INVALID_PRODUCER_ID_MAPPING
        assert await refused(transactions.initialize("", TIMEOUT_MS)) == e.INVALID_REQUEST
        assert await refused(transactions.end("", pid, second, True)) == e.INVALID_REQUEST
        for timeout_ms in (0, -1, TIMEOUT_MS_MAX + 1):
            assert await refused(transactions.initialize("id", timeout_ms)) == e.INVALID_TRANSACTION_TIMEOUT

    asyncio.run(run())


def test_a_producer_increases_its_epoch_and_may_repeat_the_request(harness: Harness) -> None:
    async def run() -> None:
        transactions = harness.transactions
        pid, epoch = await transactions.initialize("id", TIMEOUT_MS)
        assert await transactions.initialize("id", TIMEOUT_MS, (pid, epoch)) == (pid, epoch + 1)
        assert await transactions.initialize("id", TIMEOUT_MS, (pid, epoch)) == (pid, epoch + 1), "asked again"
        assert await transactions.initialize("id", TIMEOUT_MS, (pid, epoch + 1)) == (pid, epoch + 2)
        assert await refused(transactions.initialize("id", TIMEOUT_MS, (pid, epoch))) == e.PRODUCER_FENCED
        harness.reopen()
        assert await harness.transactions.initialize("id", TIMEOUT_MS) == (pid, epoch + 3)
        row = harness.transactions.get("id")
        assert row is not None
        harness.transactions._write(msgspec.structs.replace(row, epoch=EPOCH_MAX - 1))
        other, fresh = await harness.transactions.initialize("id", TIMEOUT_MS)
        assert (other > pid, fresh) == (True, 0), "epochs are used up"

    asyncio.run(run())


def test_requests_in_every_transaction_state_return_the_errors_of_kafka(harness: Harness) -> None:
    shard = harness.topic("t")
    harness.topic("u")

    async def run() -> None:
        transactions = harness.transactions
        pid, epoch = await transactions.initialize("id", TIMEOUT_MS)
        assert await refused(transactions.end("id", pid, epoch, True)) == e.INVALID_TXN_STATE
        raw = transactional(pid, 0, b"early", epoch=epoch)
        assert await harness.produce("t", "id", raw) == e.INVALID_TXN_STATE
        assert await harness.produce("t", None, raw) == e.INVALID_REQUEST
        assert await refused(transactions.commit_offsets("id", pid, epoch, "g", {})) == e.INVALID_TXN_STATE
        for is_commit in (True, False):
            await transactions.add("id", pid, epoch, shards=frozenset((shard,)))
            both = await asyncio.gather(
                transactions.end("id", pid, epoch, is_commit),
                transactions.end("id", pid, epoch, is_commit),
                return_exceptions=True,
            )
            assert [getattr(each, "code", None) for each in both] == [None, e.CONCURRENT_TRANSACTIONS]
            await transactions.end("id", pid, epoch, is_commit)
            assert await refused(transactions.end("id", pid, epoch, not is_commit)) == e.INVALID_TXN_STATE
        body = {"transactional_id": "id", "producer_id": pid, "producer_epoch": epoch}
        topics = [{"name": "t", "partitions": [0]}, {"name": "none", "partitions": [0]}]
        response = await harness.ask(k.ADD_PARTITIONS_TO_TXN, 3, {**body, "topics": topics})
        codes = [each["results"][0]["error_code"] for each in response["results"]]
        assert codes == [e.OPERATION_NOT_ATTEMPTED, e.UNKNOWN_TOPIC_OR_PARTITION]
        response = await harness.ask(k.ADD_PARTITIONS_TO_TXN, 3, {**body, "topics": topics[:1]})
        assert response["results"][0]["results"][0]["error_code"] == 0
        assert await harness.produce("u", "id", raw) == e.INVALID_TXN_STATE, "it was not added"
        assert await harness.produce("t", "id", raw) == 0
        assert await harness.produce("t", "id", raw) == 0, "sent again"
        described = await harness.ask(k.DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": ["id", "nobody"]})
        first, second = described["transaction_states"]
        assert (first["transaction_state"], first["topics"]) == ("Ongoing", [{"topic": "t", "partitions": [0]}])
        assert second["error_code"] == e.TRANSACTIONAL_ID_NOT_FOUND
        asked = {"state_filters": ["Ongoing", "Nonsense"], "producer_id_filters": []}
        listed = await harness.ask(k.LIST_TRANSACTIONS, 0, asked)
        assert [each["transactional_id"] for each in listed["transaction_states"]] == ["id"]
        assert listed["unknown_state_filters"] == ["Nonsense"]
        response = await harness.ask(k.DESCRIBE_PRODUCERS, 0, {"topics": [{"name": "t", "partition_indexes": [0]}]})
        (active,) = response["topics"][0]["partitions"][0]["active_producers"]
        assert (active["producer_id"], active["current_txn_start_offset"]) == (pid, 0)
        await transactions.end("id", pid, epoch, True)
        assert harness.seen("t") == [b"early"]

    asyncio.run(run())


def test_partitions_are_added_in_order_and_a_pending_decision_is_reported(harness: Harness) -> None:
    shard, other = harness.topic("t"), harness.topic("u")
    source = harness.context.topic("t")

    async def run() -> None:
        transactions = harness.transactions
        pid, epoch = await transactions.initialize("id", TIMEOUT_MS)
        await transactions.add("id", pid, epoch, groups=frozenset("g"))
        await asyncio.gather(
            transactions.commit_offsets("id", pid, epoch, "g", {(source.id, 0): Commit(5)}),
            transactions.add("id", pid, epoch, shards=frozenset((shard,))),
            transactions.commit_offsets("id", pid, epoch, "g", {(source.id, 0): Commit(6)}),
            transactions.add("id", pid, epoch, shards=frozenset((other,)), groups=frozenset("h")),
        )
        row = transactions.get("id")
        assert row is not None
        assert (row.shards, row.groups) == (frozenset((shard, other)), frozenset("gh"))
        late = [
            asyncio.create_task(transactions.add("id", pid, epoch, groups=frozenset("i"))),
            asyncio.create_task(transactions.add("id", pid, epoch, groups=frozenset("j"))),
        ]
        await asyncio.sleep(0)
        assert await refused(transactions.end("id", pid, epoch, True)) == e.CONCURRENT_TRANSACTIONS
        assert await refused(transactions.initialize("id", TIMEOUT_MS)) == e.CONCURRENT_TRANSACTIONS
        await asyncio.gather(*late)
        ending = asyncio.create_task(transactions.end("id", pid, epoch, True))
        await asyncio.sleep(0)
        assert await refused(transactions.add("id", pid, epoch, groups=frozenset("g"))) == e.CONCURRENT_TRANSACTIONS
        await ending
        committed = harness.context.plane.offsets.of_group("g")
        assert {at: commit.offset for at, commit in committed.items()} == {(source.id, 0): 6}

    asyncio.run(run())


def test_transactional_offsets_require_the_generation_of_the_member(harness: Harness) -> None:
    harness.topic("t")

    async def run() -> None:
        pid, epoch = await harness.transactions.initialize("id", TIMEOUT_MS)
        await harness.transactions.add("id", pid, epoch, groups=frozenset("g"))
        topics = [{"name": "t", "partitions": [{"partition_index": 0, "committed_offset": 3}]}]
        asked = {"transactional_id": "id", "group_id": "g", "producer_id": pid, "producer_epoch": epoch}

        async def code(member: str, generation: int) -> int:
            given = {"member_id": member, "generation_id": generation, "topics": topics}
            response = await harness.ask(k.TXN_OFFSET_COMMIT, 3, {**asked, **given})
            found: int = response["topics"][0]["partitions"][0]["error_code"]
            return found

        assert await code("m", 4) == e.ILLEGAL_GENERATION, "a group of before a restart"
        joining = {
            "group_id": "g",
            "session_timeout_ms": 10_000,
            "rebalance_timeout_ms": 10_000,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b""}],
        }
        joined = await harness.ask(k.JOIN_GROUP, 3, {**joining, "member_id": ""})
        member, generation = joined["member_id"], joined["generation_id"]
        await harness.ask(k.SYNC_GROUP, 3, {"group_id": "g", "generation_id": generation, "member_id": member})
        assert await code(member, generation + 1) == e.ILLEGAL_GENERATION
        assert await code("stranger", generation) == e.UNKNOWN_MEMBER_ID
        assert not harness.transactions.is_pending("g", harness.context.topic("t").id, 0)
        assert await code(member, generation) == e.NONE
        assert harness.transactions.is_pending("g", harness.context.topic("t").id, 0)

    asyncio.run(run())


def test_a_transaction_recovered_after_a_crash_times_out(harness: Harness) -> None:
    shard = harness.topic("t")

    async def run() -> None:
        pid, epoch = await harness.transactions.initialize("id", TIMEOUT_MS)
        await harness.transactions.add("id", pid, epoch, shards=frozenset((shard,)))
        assert await harness.produce("t", "id", transactional(pid, 0, b"late", epoch=epoch)) == 0
        harness.now_ms += TIMEOUT_MS
        harness.reopen()
        async with asyncio.timeout(60):
            while (row := harness.transactions.get("id")) is None or row.state is not State.COMPLETE_ABORT:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert row.epoch == epoch + 1

    asyncio.run(run())


def test_read_committed_fetches_get_last_stable_offset_and_aborted_transactions(harness: Harness) -> None:
    shard = harness.topic("t")

    async def run() -> None:
        transactions = harness.transactions
        producers = {}
        for name in ("a", "b"):
            producers[name] = await transactions.initialize(name, TIMEOUT_MS)
            await transactions.add(name, *producers[name], shards=frozenset((shard,)))
        (a, epoch_a), (b, epoch_b) = producers["a"], producers["b"]
        assert (await harness.fetch("t"))["last_stable_offset"] == 0, "nothing is written"
        assert await harness.produce("t", "a", transactional(a, 0, b"a0", b"a1", epoch=epoch_a)) == 0
        assert await harness.produce("t", "b", transactional(b, 0, b"b0", epoch=epoch_b)) == 0
        found = await harness.fetch("t")
        assert (found["high_watermark"], found["last_stable_offset"], found["records"]) == (3, 0, b"")
        await transactions.end("a", a, epoch_a, False)
        found = await harness.fetch("t")
        assert (found["high_watermark"], found["last_stable_offset"]) == (4, 2)
        assert found["aborted_transactions"] == [{"producer_id": a, "first_offset": 0}]
        latest = {"partition_index": 0, "timestamp": -1}
        for isolation_level, wanted in ((0, 4), (1, 2)):
            asked = {"isolation_level": isolation_level, "topics": [{"name": "t", "partitions": [latest]}]}
            response = await harness.ask(k.LIST_OFFSETS, 6, {"replica_id": -1, **asked})
            assert response["topics"][0]["partitions"][0]["offset"] == wanted
        await transactions.add("a", a, epoch_a, shards=frozenset((shard,)))
        assert await harness.produce("t", "a", transactional(a, 2, b"a2", epoch=epoch_a)) == 0
        await transactions.end("a", a, epoch_a, True)
        await transactions.end("b", b, epoch_b, False)
        found = await harness.fetch("t")
        assert found["last_stable_offset"] == found["high_watermark"] == 7
        aborted = [{"producer_id": a, "first_offset": 0}, {"producer_id": b, "first_offset": 2}]
        assert found["aborted_transactions"] == aborted
        assert (await harness.fetch("t", offset=4))["aborted_transactions"] == [], "none of them lies there"
        assert not (await harness.fetch("t", isolation_level=0))["aborted_transactions"]
        assert harness.seen("t") == [b"a2"]

    asyncio.run(run())


def test_a_transaction_past_its_timeout_is_aborted_and_its_producer_fenced(harness: Harness) -> None:
    shard = harness.topic("t")

    async def run() -> None:
        pid, epoch = await harness.transactions.initialize("id", TIMEOUT_MS)
        await harness.transactions.add("id", pid, epoch, shards=frozenset((shard,)))
        assert await harness.produce("t", "id", transactional(pid, 0, b"late", epoch=epoch)) == 0
        harness.now_ms += TIMEOUT_MS - 1
        await harness.transactions.expire("id")
        row = harness.transactions.get("id")
        assert row is not None
        assert row.state is State.ONGOING
        harness.reopen()
        harness.now_ms += 1
        await harness.transactions.expire("id")
        row = harness.transactions.get("id")
        assert row is not None
        assert (row.state, row.epoch) == (State.COMPLETE_ABORT, epoch + 1)
        assert await refused(harness.transactions.end("id", pid, epoch, True)) == e.PRODUCER_FENCED
        assert (await harness.fetch("t"))["last_stable_offset"] == 2
        assert harness.seen("t") == []

    asyncio.run(run())


@pytest.mark.promise("P1", "P2")
def test_partitions_and_decisions_are_durable_before_they_take_effect(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = harness.topic("t")

    async def run() -> None:
        transactions = harness.transactions
        loop = asyncio.get_running_loop()
        pid, epoch = await transactions.initialize("id", TIMEOUT_MS)
        raw = transactional(pid, 0, b"x", epoch=epoch)
        at_once = transactions._durable

        async def before_it_is_durable(
            step: Coroutine[Any, Any, Any],
        ) -> tuple[asyncio.Task[Any], asyncio.Future[None]]:
            """Run a step until it waits for the disk. Return it with a function that lets it continue."""
            synced = loop.create_future()
            monkeypatch.setattr(transactions, "_durable", lambda: synced)
            task = asyncio.create_task(step)
            for _ in range(10):
                await asyncio.sleep(0)
            assert not task.done()
            monkeypatch.setattr(transactions, "_durable", at_once)
            return task, synced

        adding, synced = await before_it_is_durable(transactions.add("id", pid, epoch, shards=frozenset((shard,))))
        assert await harness.produce("t", "id", raw) == e.INVALID_TXN_STATE
        synced.set_result(None)
        await adding
        assert await harness.produce("t", "id", raw) == 0
        ending, synced = await before_it_is_durable(transactions.end("id", pid, epoch, True))
        assert harness.context.plane.drivers.info("t", 0).next_offset == 1, (
            "a marker tells of a decision that may be lost"
        )
        assert harness.seen("t") == []
        synced.set_result(None)
        await ending
        assert harness.context.plane.drivers.info("t", 0).next_offset == 2
        assert harness.seen("t") == [b"x"]

    asyncio.run(run())


STEPS = ("decided", "marked", "completed")


@pytest.mark.promise("P1", "P2")
@pytest.mark.parametrize("is_commit", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_a_decided_transaction_completes_after_a_crash_at_any_step(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, step: str, is_commit: bool
) -> None:
    topics = {name: harness.topic(name) for name in ("t", "u")}
    source = harness.context.topic("t")

    class Killed(Exception):
        pass

    def die(*_: object) -> None:
        raise Killed

    def dying(method: Callable[..., Any]) -> Callable[..., Any]:
        def done(*args: Any) -> None:
            method(*args)
            raise Killed

        return done

    async def run() -> None:
        transactions = harness.transactions
        pid, epoch = await transactions.initialize("id", TIMEOUT_MS)
        await transactions.add("id", pid, epoch, shards=frozenset(topics.values()), groups=frozenset("g"))
        for name in topics:
            assert await harness.produce(name, "id", transactional(pid, 0, b"in " + name.encode(), epoch=epoch)) == 0
        await transactions.commit_offsets("id", pid, epoch, "g", {(source.id, 0): Commit(5)})
        assert transactions.is_pending("g", source.id, 0)
        if step == "decided":
            monkeypatch.setattr(transactions, "_mark", die)
        elif step == "marked":
            monkeypatch.setattr(transactions, "_complete", die)
        else:
            monkeypatch.setattr(transactions, "_complete", dying(transactions._complete))
        with pytest.raises(Killed):
            await transactions.end("id", pid, epoch, is_commit)
        ends = [harness.context.plane.drivers.info(name, 0).next_offset for name in topics]
        harness.reopen()
        row = harness.transactions.get("id")
        assert row is not None
        assert row.state is (State.COMPLETE_COMMIT if is_commit else State.COMPLETE_ABORT)
        for name in topics:
            assert harness.seen(name) == ([b"in " + name.encode()] if is_commit else [])
            assert (await harness.fetch(name))["last_stable_offset"] == 2, "one record and one marker"
        committed = harness.context.plane.offsets.of_group("g")
        assert {at: commit.offset for at, commit in committed.items()} == ({(source.id, 0): 5} if is_commit else {})
        assert not harness.transactions.is_pending("g", source.id, 0)
        assert ends == ([1, 1] if step == "decided" else [2, 2])
        await harness.transactions.end("id", pid, epoch, is_commit)
        assert not list(
            harness.store.scan(Family.TRANSACTIONS, *key_parts.prefix_range(stream_keys.busy_transaction_key("")))
        )
        assert not list(
            harness.store.scan(Family.TRANSACTIONS, *key_parts.prefix_range(stream_keys.pending_offset_prefix("id")))
        )

    asyncio.run(run())


def test_an_open_transaction_continues_after_a_crash_or_a_disconnect(harness: Harness) -> None:
    shard = harness.topic("t")

    async def run() -> None:
        pid, epoch = await harness.transactions.initialize("id", TIMEOUT_MS)
        await harness.transactions.add("id", pid, epoch, shards=frozenset((shard,)))
        assert await harness.produce("t", "id", transactional(pid, 0, b"0", epoch=epoch)) == 0
        harness.reopen()
        assert harness.seen("t") == []
        assert await harness.produce("t", "id", transactional(pid, 0, b"0", epoch=epoch)) == 0, "known from the log"
        assert await harness.produce("t", "id", transactional(pid, 1, b"1", epoch=epoch)) == 0
        ending = asyncio.create_task(harness.transactions.end("id", pid, epoch, True))
        await asyncio.sleep(0)
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        await asyncio.gather(*harness.transactions._tasks)
        assert harness.seen("t") == [b"0", b"1"]
        harness.reopen()
        await harness.transactions.add("id", pid, epoch, shards=frozenset((shard,)))
        code = await harness.produce("t", "id", transactional(pid, 2, b"2", epoch=epoch))
        assert code == 0, "the marker has no place among a producer's batches"

    asyncio.run(run())


def test_transactional_records_without_a_row_are_aborted_at_open(harness: Harness) -> None:
    shard = harness.topic("t")
    engine, _ = harness.context.engine(harness.context.topic("t"), 0)
    engine.wait(engine.append_kafka(shard, transactional(900, 0, b"stranger", epoch=4)))
    harness.reopen()
    engine, _ = harness.context.engine(harness.context.topic("t"), 0)
    assert harness.seen("t") == []
    assert engine.shard_info(shard).high_watermark == 2
    marker = read_header(engine.read_kafka(shard, 1).batches[0])
    assert (marker.is_control, marker.producer_id, marker.producer_epoch) == (True, 900, 4)


@pytest.mark.promise("P10")
def test_deleting_a_topic_deletes_its_producer_state(harness: Harness) -> None:
    shard = harness.topic("t")

    async def run() -> None:
        pid, epoch = await harness.transactions.initialize("id", TIMEOUT_MS)
        await harness.transactions.add("id", pid, epoch, shards=frozenset((shard,)), groups=frozenset("g"))
        assert await harness.produce("t", "id", transactional(pid, 0, b"0", epoch=epoch)) == 0
        topic_id: UUID = harness.context.topic("t").id
        await harness.transactions.commit_offsets("id", pid, epoch, "g", {(topic_id, 0): Commit(1)})
        assert harness.store.get(Family.PRODUCERS, stream_keys.producers_key(shard)) is not None
        await asyncio.to_thread(harness.context.plane.topics.delete, "t")
        await harness.transactions.end("id", pid, epoch, True)
        harness.context.producers.close()
        assert harness.store.get(Family.PRODUCERS, stream_keys.producers_key(shard)) is None
        assert harness.context.plane.offsets.of_group("g") == {}

    asyncio.run(run())


def test_unused_transactional_ids_expire(harness: Harness) -> None:
    async def run() -> None:
        await harness.transactions.initialize("old", TIMEOUT_MS)
        pid, epoch = await harness.transactions.initialize("open", TIMEOUT_MS)
        await harness.transactions.add("open", pid, epoch, groups=frozenset("g"))
        harness.now_ms += IDLE_MS_MAX
        await harness.transactions.initialize("young", TIMEOUT_MS)
        harness.now_ms += 1
        assert harness.transactions.sweep() == 1
        assert [row.id for row in harness.transactions.all()] == ["open", "young"]

    asyncio.run(run())


@pytest.mark.parametrize("committed", [(), ((1, 0), (1 << 40, 77))])
def test_rows_round_trip_and_a_damaged_row_is_reported(committed: tuple[tuple[int, int], ...]) -> None:
    shards, groups = frozenset((1, 1 << 40)), frozenset(("g", "ü"))
    row = Transaction("id", 7, 3, 2, State.PREPARE_ABORT, 1000, 5, 6, shards, groups, committed)
    raw = row.encode()
    assert Transaction.decode("id", raw) == row
    for size in range(len(raw)):
        with pytest.raises(CorruptionError):
            Transaction.decode("id", raw[:size])
    with pytest.raises(CorruptionError):
        Transaction.decode("id", raw + b"\0")
    with pytest.raises(CorruptionError):
        Transaction.decode("id", bytes([raw[0] ^ 3]) + raw[1:])
