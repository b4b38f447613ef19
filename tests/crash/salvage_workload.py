"""A store with every kind of data, a ledger of confirmed data, damage to its files, and the checks after a repair.

A copy of an open, idle store equals what SIGKILL leaves, because nothing is only in memory.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

import basaltmq
from basaltmq.embedded.database import Basalt, Settings
from basaltmq.embedded.reconcile import reconcile_planes
from basaltmq.pipeline.audit.store import audit_rows
from basaltmq.queues.content import Content
from basaltmq.queues.draft import Draft
from basaltmq.queues.entries.backing import APART
from basaltmq.queues.entries.rows import payload_of, read_entry
from basaltmq.store.api import Store
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as queue_keys
from basaltmq.store.repair import Repaired, repair
from basaltmq.store.salvage.files import table_family
from basaltmq.store.salvage.naming import Loss
from basaltmq.store.salvage.swap import LOSSES
from basaltmq.store.salvage.verify import verify
from basaltmq.streams.view import StreamView

QUEUES: Final = ("plain", "fair", "late", "brief", "large", "first", "second", "once", "idle")
TOPICS: Final = {"frames": "segment", "rows": "rocksdb"}
PARTITIONS: Final = 2
HOUR_MS: Final = 3_600_000
QUIET: Final = Settings(maintenance_interval_s=3600.0)


@dataclass(frozen=True)
class Held:
    """A message that was confirmed and not settled."""

    queue: str
    family: Family
    key: bytes
    payload: bytes


@dataclass
class Ledger:
    """The confirmed data."""

    messages: dict[str, Held] = field(default_factory=dict)
    acked: set[str] = field(default_factory=set)
    records: dict[tuple[str, int, int], bytes] = field(default_factory=dict)
    in_log: set[str] = field(default_factory=set)
    """Messages enqueued after the last flush."""


def build(path: Path, killed: Path, seed: int, size: int = 60) -> Ledger:
    """Create a store at `path`, closed cleanly, and a copy at `killed` as SIGKILL would leave it."""
    rng = random.Random(seed)
    ledger = Ledger()
    with basaltmq.open(path, settings=QUIET) as db:
        for name in QUEUES:
            db.queue(name, dedup_window_ms=HOUR_MS if name == "once" else None)
        for name, engine in TOPICS.items():
            db.topic(name, partitions=PARTITIONS, engine=engine)
        for step in range(3):
            _fill(db, rng, size, step, ledger)
            db.store.flush()
        flushed = set(messages(db.store))
        for step in range(3, 5):
            _fill(db, rng, size // 5, step, ledger)
        db.store.sync()
        ledger.messages = messages(db.store)
        ledger.in_log = set(ledger.messages) - flushed
        ledger.records = dict(records(db))
        shutil.copytree(path, killed)
    return ledger


def _fill(db: Basalt, rng: random.Random, size: int, step: int, ledger: Ledger) -> None:
    def body(least: int, most: int) -> bytes:
        return rng.randbytes(rng.randint(least, most))

    db.queue("plain").enqueue([body(100, 300) for _ in range(3 * size)])
    fair: list[bytes | str | Draft] = [
        Draft(payload=body(50, 200), fairness_key=f"key-{n % 7}", weight=1 + n % 3) for n in range(size)
    ]
    db.queue("fair").enqueue(fair)
    db.queue("late").enqueue([Draft(payload=body(50, 100), delay_ms=HOUR_MS + n) for n in range(size)])
    db.queue("brief").enqueue([Draft(payload=body(50, 100), ttl_ms=HOUR_MS + n) for n in range(size // 2)])
    db.queue("large").enqueue([body(5_000, 20_000) for _ in range(size // 5)])
    db.queue("large").enqueue([body(32_000, 90_000) for _ in range(size // 5)])
    db.queue_plane.publish(["first", "second"], body(40_000, 50_000))
    for _ in range(size // 10):
        db.queue_plane.publish(["first", "second"], body(5_000, 9_000))
    db.queue("once").enqueue([Draft(payload=body(50, 100), dedup_id=b"%d-%d" % (step, n)) for n in range(size // 2)])
    for name in ("plain", "fair", "large"):
        leased = db.queue(name).lease(size // 5)
        ledger.acked |= {each.id.hex() for each in leased[::2]}
        db.queue(name).ack(leased[::2])
    for name in TOPICS:
        for partition in range(PARTITIONS):
            db.topic(name).append([body(100, 6_000) for _ in range(size // 4)], partition=partition)
            db.topic(name).append(body(10, 100), key=b"%d" % step, tags=[b"tag"], partition=partition)
        with db.topic(name).consume(f"group-{step}", wait=0) as consumer:
            next(consumer)
            consumer.commit()


def messages(store: Store) -> dict[str, Held]:
    """Return all messages of a store with their bodies."""
    content = Content(store)
    found: dict[str, Held] = {}
    for family in (Family.MESSAGES, Family.DELAYED):
        for key, row in store.scan(family):
            own = queue_keys.message_of(key)[0] if family is Family.DELAYED else key
            entry = read_entry(own, row)
            payload = content.get(entry) if entry.flags & APART else payload_of(row)
            queue = queue_keys.decode_message_key(own)[0]
            found[own[-16:].hex()] = Held(queue, family, key, payload)
    return found


def records(db: Basalt) -> Iterator[tuple[tuple[str, int, int], bytes]]:
    for name in TOPICS:
        for partition in range(PARTITIONS):
            for record in db.topic(name, create=False).read(partition):
                yield (name, partition, record.offset), record.value or b""


KINDS: Final = (
    "messages", "queues", "bodies", "blob", "body", "places", "names", "objects", "shards", "index", "stats", "rows",
    "MANIFEST", "CURRENT", "wal", "OPTIONS", "IDENTITY", "STORE", "LOCK", "SEALS", "SYNCED",
)  # fmt: skip
"""Kinds of files to damage: a table of a family, a blob file, or a file by its name."""

_FAMILIES: Final = {
    "messages": Family.MESSAGES,
    "queues": Family.QUEUES,
    "bodies": Family.MESSAGE_CONTENT,
    "places": Family.BODY_PLACES,
    "names": Family.OBJECT_NAMES,
    "objects": Family.CONFIGURED_OBJECTS,
    "shards": Family.SHARDS,
    "index": Family.STREAM_INDEX,
    "stats": Family.QUEUE_STATS,
    "rows": Family.STREAM_RECORDS,
}

WAYS: Final = ("flip", "truncate", "remove")


def targets(path: Path, kind: str) -> list[Path]:
    """Return the files of a kind."""
    database = path / "kv"
    if kind in _FAMILIES:
        return sorted(each for each in database.glob("*.sst") if table_family(each)[0] == _FAMILIES[kind].label)
    if kind == "blob":
        return sorted(database.glob("*.blob"))
    if kind == "body":
        return sorted((path / "bodies").glob("*.body"))
    if kind == "wal":
        return sorted(each for each in database.glob("*.log") if each.stat().st_size)
    if kind in ("MANIFEST", "OPTIONS"):
        return sorted(database.glob(f"{kind}-*"))[-1:]
    where = path if kind in ("STORE", "LOCK", "SEALS", "SYNCED") else database
    return [where / kind] if (where / kind).exists() else []


def damage(file: Path, way: str, rng: random.Random) -> str:
    """Damage a file. Return a description for the report of a failure."""
    data = bytearray(file.read_bytes())
    if way == "remove" or not data:
        file.unlink()
        return f"removed {file.name}"
    at = rng.randrange(len(data))
    if way == "truncate":
        file.write_bytes(data[:at])
    else:
        data[at] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
    return f"{way} {file.name} at {at} of {len(data)}"


def repaired(path: Path) -> Repaired:
    return repair(path, reconcile=reconcile_planes)


def reported(outcome: Repaired) -> list[Loss]:
    """Return the losses of the report in quarantine."""
    if outcome.kept is None:
        return outcome.losses
    lines = (outcome.kept / LOSSES).read_bytes().splitlines()
    losses = [msgspec.json.decode(line, type=Loss) for line in lines]
    assert losses == outcome.losses
    return losses


def is_reported(losses: list[Loss], message_id: str, held: Held) -> bool:
    """Return whether the report names a lost message or its range."""
    for loss in losses:
        if message_id in loss.ids or loss.subject in ("confirmed writes", "table"):
            return True
        is_range = loss.family == held.family.label and not loss.ids and bool(loss.start or loss.end)
        is_above = is_range and bytes.fromhex(loss.start) <= held.key
        if is_above and (loss.end is None or held.key < bytes.fromhex(loss.end)):
            return True
    return False


def check(path: Path, ledger: Ledger, losses: list[Loss]) -> tuple[int, int]:
    """Check a store after its repair. Return the numbers of lost messages and records."""
    assert verify(path) == []
    with StreamView.open(path) as view:
        findings = [each for each in audit_rows(path, view) if each.kind != "unread"]
    assert findings == []
    assert repaired(path) == Repaired(), "a second repair finds nothing"
    with basaltmq.open(path, create=False, settings=QUIET) as db:
        found = messages(db.store)
        missing = {each: held for each, held in ledger.messages.items() if each not in found}
        for message_id, held in missing.items():
            assert is_reported(losses, message_id, held), f"{message_id} of {held.queue} is lost without a report"
        for message_id, held in found.items():
            known = ledger.messages.get(message_id)
            if known is None:
                assert losses, f"{message_id} of {held.queue} came back without a report of a loss"
            else:
                assert held.payload == known.payload
        lost_records = _check_topics(db, ledger, losses)
        _serve(db, found)
    return len(missing), lost_records


def _check_topics(db: Basalt, ledger: Ledger, losses: list[Loss]) -> int:
    there: dict[tuple[str, int, int], bytes] = {}
    names = {topic.name for topic in db.topics()}
    for name in set(TOPICS) - names:
        assert losses, f"topic {name} is lost without a report"
    if names >= set(TOPICS):
        there = dict(records(db))
    missing = {at: value for at, value in ledger.records.items() if there.get(at) != value}
    if missing:
        about = [loss for loss in losses if loss.family in ("stream_records", "shards", "configured_objects", "")]
        assert about, f"{len(missing)} records are lost without a report: {sorted(missing)[:3]}"
    for name in names & set(TOPICS):
        for partition in range(PARTITIONS):
            end = db.topic(name, create=False).info(partition).high_watermark
            added = db.topic(name, create=False).append(b"after", partition=partition)
            assert added.offset >= end
    return len(missing)


def _serve(db: Basalt, found: dict[str, Held]) -> None:
    """Check that every queue accepts a message and delivers all messages."""
    there = {queue.name for queue in db.queues()}
    by_queue: dict[str, int] = dict.fromkeys(there, 0)
    for held in found.values():
        if held.family is Family.MESSAGES:
            by_queue[held.queue] = by_queue.get(held.queue, 0) + 1
    assert set(by_queue) == there, "messages of a missing queue"
    for name, count in by_queue.items():
        queue = db.queue(name, create=False)
        queue.enqueue(b"after")
        assert queue.stats()["messages"] == count + 1
        handed = 0
        while leased := queue.lease(500, visibility_ms=HOUR_MS):
            handed += len(leased)
            queue.ack(leased)
        assert handed + queue.stats()["messages"] == count + 1
        if name in ("late", "idle", "once"):
            assert queue.stats()["messages"] == 0
