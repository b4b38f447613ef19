"""The specification's rules for messages on disk and in memory, tested through an embedded store."""

from __future__ import annotations

import gc
import random
import shutil
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from rocksdict import Rdict
from tests.unit.embedded.killed_process import lines_until_killed
from tests.unit.embedded.queue_rig import LONG_S, finish, payloads, until

import basaltmq
from basaltmq.embedded.database import Basalt, Settings
from basaltmq.embedded.queue import EmbeddedQueue
from basaltmq.errors import StaleLeaseError
from basaltmq.queues.transactions.xid import Xid
from basaltmq.store.bodies.recent import RECENT_BYTES_MAX
from basaltmq.store.families import Family

MIB = 1 << 20
HOUR_NS = 3_600_000_000_000
FAN = ("a", "b", "c")


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Basalt]:
    with basaltmq.open(tmp_path / "data") as opened:
        yield opened


def rows(db: Basalt, family: Family) -> int:
    return sum(1 for _ in db.store.scan(family))


def drained(db: Basalt, name: str) -> list[bytes]:
    """Lease and acknowledge everything that is ready."""
    queue = db.queue(name, create=False)
    found: list[bytes] = []
    while leased := queue.lease(500):
        found += payloads(leased)
        queue.ack(leased)
    return found


def crashed(db: Basalt) -> Path:
    """Copy the store as SIGKILL would leave it now."""
    copy = db.path.with_name(f"{db.path.name}-crashed")
    shutil.copytree(db.path, copy)
    return copy


PAIRS = """
import sys, basaltmq
db = basaltmq.open(sys.argv[1])
left, right = db.queue("left"), db.queue("right", durability="written")
log = db.topic("left", engine="rocksdb")
number = 0
while True:
    with db.transaction() as tx:
        tx.enqueue(left, b"%d" % number)
        tx.enqueue(right, b"%d" % number * 900)
    log.append(b"%d" % number)
    print(number)
    number += 1
"""


@pytest.mark.spec("A1")
@pytest.mark.promise("P2")
def test_families_are_isolated_and_a_batch_over_them_is_atomic(tmp_path: Path) -> None:
    path = tmp_path / "data"
    confirmed = len(lines_until_killed(PAIRS, path, 40))
    assert len(list(path.rglob("CURRENT"))) == 1
    assert set(Rdict.list_cf(str(next(path.rglob("CURRENT")).parent))) == {family.label for family in Family}
    with basaltmq.open(path) as db:
        left = [message.payload for message in db.queue("left").browse()]
        right = [message.payload for message in db.queue("right").browse()]
        assert len(left) >= confirmed
        assert right == [payload * 900 for payload in left]
        db.delete_queue("left")
        assert len(list(db.topic("left").read())) >= confirmed
        assert len(drained(db, "right")) == len(left)


@pytest.mark.spec("A4")
def test_ids_and_places_are_not_reused_after_a_crash(db: Basalt) -> None:
    before = [each for _ in range(10) for each in db.queue("orders").enqueue([b"x"] * 5)]
    an_hour_ago = Settings(clock_ns=lambda: time.time_ns() - HOUR_NS)
    with basaltmq.open(crashed(db), settings=an_hour_ago) as again:
        assert [message.id for message in again.queue("orders").browse()] == before
        after = again.queue("orders").enqueue([b"y"] * 50)
        assert not set(before) & set(after)
        assert [message.id for message in again.queue("orders").browse()] == before + after


@pytest.mark.spec("A4", "E3")
def test_bodies_of_any_size_round_trip_and_large_ones_are_stored_once(db: Basalt) -> None:
    for name in FAN:
        db.queue(name)
    sizes = (0, 1, 100, 4096, 4097, 70_000, 5 * MIB)
    bodies = [bytes([number]) * size for number, size in enumerate(sizes)]
    for body in bodies:
        db.queue("a").enqueue(body)
    # Only bodies above 4 KiB have a separate row.
    assert rows(db, Family.MESSAGE_CONTENT) == 3
    assert drained(db, "a") == bodies
    assert rows(db, Family.MESSAGE_CONTENT) == rows(db, Family.MESSAGES) == 0
    for body in bodies:
        db.queue_plane.publish(FAN, body)
    stored = sum(
        len(value) for family in (Family.MESSAGES, Family.MESSAGE_CONTENT) for _, value in db.store.scan(family)
    )
    assert 5 * MIB < stored < 6 * MIB
    for name in FAN:
        assert drained(db, name) == bodies
    assert rows(db, Family.MESSAGE_CONTENT) == rows(db, Family.CONTENT_REFS) == rows(db, Family.MESSAGES) == 0


@pytest.mark.spec("E4")
def test_shared_body_survives_a_crash_until_its_last_message_is_acked(db: Basalt) -> None:
    queues = [db.queue(name) for name in FAN]
    expected: Counter[bytes] = Counter()
    for number in range(9):
        body = b"%d" % number * 20_000
        db.queue_plane.publish(FAN, body)
        expected[body] = 3 - number % 4
        for queue in queues[: number % 4]:
            leased = queue.lease(9)
            queue.ack([message for message in leased if message.payload == body])
            queue.release([message for message in leased if message.payload != body])
    expected = +expected
    with basaltmq.open(crashed(db)) as again:
        assert rows(again, Family.MESSAGE_CONTENT) == len(expected) == 7
        assert rows(again, Family.CONTENT_REFS) == expected.total()
        assert Counter(body for name in FAN for body in drained(again, name)) == expected
        assert rows(again, Family.MESSAGE_CONTENT) == rows(again, Family.CONTENT_REFS) == 0


@pytest.mark.spec("E4")
def test_ack_before_the_write_cancels_the_write(db: Basalt) -> None:
    db.queue("orders")
    plane = db.queue_plane
    before = db.store.properties(None)["memtable-bytes"]
    with plane.change():
        (held,) = plane.deliver("orders", [b"x" * 4 * MIB])
        plane.ack("orders", held.token)
    assert db.store.properties(None)["memtable-bytes"] - before < MIB
    assert rows(db, Family.MESSAGE_CONTENT) == rows(db, Family.MESSAGES) == 0
    assert (db.queue("orders").stats()["acked"], db.queue("orders").stats()["messages"]) == (1, 0)


@pytest.mark.spec("A7", "E11")
def test_early_end_of_a_read_does_not_read_the_rest(db: Basalt) -> None:
    queue = db.queue("orders", durability="written")
    for number in range(640):
        queue.enqueue(b"%d" % number + bytes(64 * 1024))
    xids = [Xid(7, b"%d" % number, b"branch") for number in range(3)]
    for xid in xids:
        with db.xa.begin(xid) as session:
            session.enqueue("orders", b"in doubt")
        db.xa.prepare(xid)
    tracemalloc.start()
    try:
        first = [message.payload.rstrip(b"\0") for message in islice(queue.browse(), 3)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert first == [b"0", b"1", b"2"]
    # All of them have 40 MiB.
    assert peak < 16 * MIB
    assert sum(1 for _ in queue.browse()) == queue.stats()["ready"] == 640
    assert db.xa.recover() == xids


@pytest.mark.spec("C1")
def test_threads_share_a_queue_without_duplicates(db: Basalt) -> None:
    queue = db.queue("orders", durability="written", visibility_timeout_ms=60_000)
    total, producers = 1200, 4
    handled: list[bytes] = []

    def produce(part: int) -> None:
        for number in range(part, total, producers):
            queue.enqueue(b"%d" % number, fairness_key=f"key{number % 7}")

    def consume() -> None:
        until_s = time.monotonic() + LONG_S
        while len(handled) < total and time.monotonic() < until_s:
            leased = queue.lease(20, wait=0.1)
            handled.extend(payloads(leased))
            queue.ack(leased)

    threads = [threading.Thread(target=produce, args=(part,)) for part in range(producers)]
    threads += [threading.Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        finish(thread)
    assert sorted(map(int, handled)) == list(range(total))
    assert rows(db, Family.MESSAGES) == rows(db, Family.LEASES) == rows(db, Family.LEASE_EXPIRY) == 0


@pytest.mark.spec("C1", "C2")
def test_messages_and_leases_survive_a_crash_in_key_order(db: Basalt) -> None:
    queue = db.queue("orders", attempts_max=0)
    for number in range(7):
        queue.enqueue(b"%d" % number, fairness_key="odds" if number % 2 else "even")
    leased = queue.lease(2, visibility_ms=600_000)
    token, ids = leased[0].token, [message.id for message in leased]
    with basaltmq.open(crashed(db)) as again:
        queue = again.queue("orders")
        assert (queue.stats()["leased"], queue.stats()["ready"]) == (2, 5)
        assert rows(again, Family.MESSAGES) == 7
        assert rows(again, Family.QUEUES) == 1
        assert rows(again, Family.LEASES) == rows(again, Family.LEASE_EXPIRY) > 0
        keys = [key for key, _ in again.store.scan(Family.MESSAGES)]
        assert [b"even" in key for key in keys] == [True] * 4 + [False] * 3
        ready = [message.payload for message in queue.browse()]
        assert ready == [each for each in (b"0", b"2", b"4", b"6", b"1", b"3", b"5") if each not in payloads(leased)]
        assert again.queue_plane.ack("orders", token, ids) == 2
        assert rows(again, Family.LEASES) == rows(again, Family.LEASE_EXPIRY) == 0
        with pytest.raises(StaleLeaseError):
            again.queue_plane.ack("orders", token, ids)
        assert sorted(drained(again, "orders")) == sorted(ready)


@pytest.mark.spec("E1")
@pytest.mark.parametrize("kind", ["plain", "priority", "fair"])
def test_every_queue_type_supports_all_operations(db: Basalt, kind: str) -> None:
    queue = db.queue("orders", priorities_max=9) if kind == "priority" else db.queue("orders")
    for number in range(9):
        fields: dict[str, Any] = {}
        if kind == "priority":
            fields["priority"] = number % 3
        elif kind == "fair":
            fields["fairness_key"] = f"k{number % 3}"
        queue.enqueue(b"%d" % number, **fields)
    assert queue.stats()["ready"] == 9
    leased = queue.lease(4)
    assert (queue.stats()["ready"], queue.stats()["leased"], queue.stats()["messages"]) == (5, 4, 9)
    # Two return to their places, before later messages.
    queue.ack([leased[0], leased[2]])
    queue.release([leased[1], leased[3]])
    again = queue.lease(9)
    got = payloads([leased[0], leased[2], *again])
    assert sorted(got) == [b"%d" % number for number in range(9)]
    if kind == "fair":
        parts = [[each for each in payloads(again) if int(each) % 3 == key] for key in range(3)]
        assert parts == [sorted(part) for part in parts]
        assert len({int(each) % 3 for each in payloads(leased)}) == 3
    else:
        order = [b"%c" % each for each in (b"258147036" if kind == "priority" else b"012345678")]
        assert payloads(leased) == order[:4]
        assert payloads(again) == [order[1], *order[3:]]
    queue.nack(again[:1], reject=True)
    queue.release(again[1:])
    assert queue.purge() == 6
    assert queue.stats()["messages"] == 0
    assert queue.lease(9) == []


@pytest.mark.spec("E2")
@pytest.mark.promise("P8")
def test_backlog_is_paged_out_and_read_in_order(db: Basalt) -> None:
    large, small = db.queue("large", durability="written"), db.queue("small", durability="written")
    tracemalloc.start()
    try:
        for number in range(4):
            large.enqueue(bytes([number]) * (16 * MIB))
        for number in range(0, 20_000, 1000):
            small.enqueue([b"%01000d" % each for each in range(number, number + 1000)])
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The queues have 64 MiB and 19 MiB. The store keeps the last large bodies for their first delivery.
    assert held < RECENT_BYTES_MAX + 8 * MIB
    assert drained(db, "small") == [b"%01000d" % each for each in range(20_000)]
    for number in range(4):
        leased = large.lease()
        assert leased[0].payload == bytes([number]) * (16 * MIB)
        large.ack(leased)


@pytest.mark.spec("E10")
@pytest.mark.promise("P9")
def test_open_after_a_crash_does_not_read_the_backlog(db: Basalt) -> None:
    queue = db.queue("orders", durability="written")
    rng = random.Random(1)
    for _ in range(16):
        queue.enqueue([rng.randbytes(2000) for _ in range(1000)])
    db.store.flush()
    queue.enqueue([b"changed"] * 10)
    path = crashed(db)
    assert size_bytes(path) > 30 * MIB
    before = read_bytes()
    with basaltmq.open(path) as again:
        assert again.queue("orders").stats()["ready"] == 16_010
        (first,) = again.queue("orders").lease()
        assert len(first.payload) == 2000
        assert read_bytes() - before < 8 * MIB


def read_bytes() -> int:
    """Return the bytes that this process has read with read(2)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.mark.spec("E5")
def test_disk_space_is_freed_while_one_percent_of_messages_remain(db: Basalt) -> None:
    queue = db.queue("orders", durability="written")
    rng = random.Random(1)
    stay: list[bytes] = []
    for _ in range(8):
        queue.enqueue([rng.randbytes(32 * 1024) for _ in range(100)])
        db.store.flush()
        leased = queue.lease(100, visibility_ms=600_000)
        stay.append(leased[0].payload)
        queue.ack(leased[1:])
    reading = begun_reading(db)
    db.store.compact()
    # 25 MiB were written, and every file has a remaining message.
    until(lambda: size_bytes(db.path) < 6 * MIB)
    assert next(reading) == b"second"
    with basaltmq.open(crashed(db)) as again:
        assert again.queue("orders").stats()["messages"] == 8
        assert {bytes(value) for _, value in again.store.scan(Family.MESSAGE_CONTENT)} == set(stay)


def begun_reading(db: Basalt) -> Iterator[bytes]:
    """Start to browse another queue."""
    db.queue("read").enqueue([b"first", b"second"])
    reading = (message.payload for message in db.queue("read").browse())
    assert next(reading) == b"first"
    return reading


def size_bytes(path: Path) -> int:
    total = 0
    for each in path.rglob("*"):
        try:
            total += each.stat().st_size
        except FileNotFoundError:
            # RocksDB deleted it meanwhile.
            continue
    return total


def has_ready(queue: EmbeddedQueue) -> bool:
    return queue.stats()["ready"] > 0


SCRIPT = """
function on_failure(msg)
  if msg.attempts >= 2 then return {action = "dlq"} end
  return {action = "retry", delay_ms = 0}
end
"""


@pytest.mark.promise("P5")
@pytest.mark.spec("C8")
@pytest.mark.parametrize("limit", ["attempts", "script"])
def test_expired_lease_counts_as_a_failure_like_a_nack(db: Basalt, limit: str) -> None:
    settings = {"attempts_max": 2} if limit == "attempts" else {"on_failure_script": SCRIPT, "attempts_max": 9}
    attempts: dict[str, list[int]] = {"nacked": [], "expired": []}
    for name, seen in attempts.items():
        queue = db.queue(name, dead_letter_queue=f"{name}-dead", visibility_timeout_ms=20, **settings)
        queue.enqueue(b"poison")
        for _ in range(2):
            (leased,) = queue.lease(wait=LONG_S, visibility_ms=60_000 if name == "nacked" else None)
            seen.append(leased.attempts)
            if name == "nacked":
                queue.nack(leased)
        dead = db.queue(f"{name}-dead", create=False)
        until(partial(has_ready, dead))
        assert queue.lease() == []
        assert (queue.stats()["failed"], queue.stats()["dead_lettered"]) == (2, 1)
        assert drained(db, f"{name}-dead") == [b"poison"]
    assert attempts["nacked"] == attempts["expired"] == [0, 1]
