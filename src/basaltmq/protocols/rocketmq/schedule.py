"""Appends scheduled records when they are due: delayed messages, committed transactions, dead letters.

A record moves from a row to the log, each with its own sync. Three steps move it exactly once:

    1. a mark per shard with the shard's next offset, synced
    2. one append per shard, synced; each record has its key in the header `rocketmq.scheduled`
    3. one batch deletes the rows and the marks

After a crash between 1 and 3, the broker reads each marked shard from the marked offset on. It deletes the rows of the
records that it finds there.

Records that are due together move in portions, and other clients are served between two of them. A timer fires at the
earliest due time, but at least once per second. So a change of the system clock delays a record by at most a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from basaltmq.broker.guard import Guard
from basaltmq.broker.scheduling.turns import Turns
from basaltmq.errors import (
    BasaltError,
    CorruptionError,
    OffsetOutOfRangeError,
    ShardNotFoundError,
    StorageError,
    StoreStalledError,
)
from basaltmq.log.batches.record import Record
from basaltmq.protocols.rocketmq.records import SCHEDULED
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.adapter import StorageAdapter
from basaltmq.streams.scheduled import Scheduled, decode_moved, decode_scheduled, put_moved

if TYPE_CHECKING:
    from basaltmq.protocols.rocketmq.host import Host

MOVED_AT_ONCE: Final = 500
"""Records of one portion: 15 ms."""

MOVED_BYTES: Final = 8 << 20
"""Bytes after which a portion ends."""

WAIT_S_MAX: Final = 1.0
RETRY_S: Final = 1.0
"""Delay after a failed portion, for example while publishers are blocked."""

_log: Final = logging.getLogger(__name__)


class _Row(NamedTuple):
    key: bytes
    scheduled: Scheduled


class Schedule:
    """The scheduled records of a virtual host."""

    def __init__(self, host: Host, checks: Callable[[int], int | None]) -> None:
        """`checks` requests decisions of undecided transactions from their producers, and returns when the next check
        is due."""
        self._host = host
        self._checks = checks
        self._moving: set[bytes] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Finish what a crash interrupted, then move what is due."""
        with self._host.guard():
            self._recover()
        self.due()

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def is_moving(self, key: bytes) -> bool:
        """Whether a scheduled record is being appended, so that it cannot be recalled."""
        return key in self._moving

    def due_at(self, due_ms: int) -> None:
        """Move records at this time, or earlier."""
        if self._task is None and not self._is_closed:
            delay_s = max(0.0, min((due_ms - self._host.now_ms()) / 1000, WAIT_S_MAX))
            if self._timer is None or self._timer.when() > self._host.loop.time() + delay_s:
                self._set_timer(delay_s)

    def due(self) -> None:
        """Move what is due now."""
        self._timer = None
        if self._task is None and not self._is_closed and self._host.vhost.is_up:
            self._task = self._host.loop.create_task(self._run())

    def _set_timer(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._host.loop.call_later(delay_s, self.due)

    async def _run(self) -> None:
        delay_s: float | None = RETRY_S
        try:
            turns = Turns()
            while self._host.vhost.is_up and await self._move_some():
                await turns.yield_if_due()
            delay_s = self._delay_s()
        except BasaltError as error:
            _log.warning("scheduled messages of vhost %r wait: %s", self._host.vhost.name, error)
        finally:
            self._task = None
        if delay_s is not None and not self._is_closed:
            self._set_timer(delay_s)

    def _delay_s(self) -> float | None:
        """Return the time until the next run, None if nothing is scheduled."""
        now_ms = self._host.now_ms()
        with self._host.guard():
            next_ms = self._checks(now_ms)
            first = next(iter(self._host.vhost.store.scan(Family.SCHEDULED_RECORDS, *_all_due())), None)
        if first is not None:
            due_ms = stream_keys.decode_scheduled_key(first[0])[1]
            next_ms = due_ms if next_ms is None else min(next_ms, due_ms)
        return None if next_ms is None else max(0.0, min((next_ms - now_ms) / 1000, WAIT_S_MAX))

    async def _move_some(self) -> bool:
        """Move a portion of what is due. Return whether there may be more."""
        host = self._host
        with host.guard():
            rows = self._due_rows()
            if not rows:
                return False
            host.check_publishing()
        self._moving = {row.key for row in rows}
        try:
            await self._move(rows)
        finally:
            self._moving = set()
        return True

    def _due_rows(self) -> list[_Row]:
        store = self._host.vhost.store
        end = stream_keys.scheduled_end(stream_keys.SCHEDULED, self._host.now_ms())
        rows: list[_Row] = []
        size = 0
        for key, raw in islice(store.scan(Family.SCHEDULED_RECORDS, stream_keys.SCHEDULED, end), MOVED_AT_ONCE):
            try:
                rows.append(_Row(key, decode_scheduled(raw)))
            except CorruptionError as error:
                _log.error("a scheduled message of vhost %r is lost: %s", self._host.vhost.name, error)
                batch = Batch()
                batch.delete(Family.SCHEDULED_RECORDS, key)
                store.write(batch)
            size += len(raw)
            if size >= MOVED_BYTES:
                break
        return rows

    async def _move(self, rows: list[_Row]) -> None:
        host = self._host
        done = Batch()
        by_shard: dict[int, tuple[StorageAdapter, str, list[Record]]] = {}
        for key, scheduled in rows:
            done.delete(Family.SCHEDULED_RECORDS, key)
            route = await self._route(scheduled)
            if route is not None:
                engine, shard, name = route
                mark = (SCHEDULED, key[1:].hex().encode())
                record = msgspec.structs.replace(scheduled.record, headers=(*scheduled.record.headers, mark))
                by_shard.setdefault(shard, (engine, name, []))[2].append(record)
        marks = Batch()
        for shard, (engine, _, _) in by_shard.items():
            put_moved(marks, shard, engine.shard_info(shard).next_offset)
            done.delete(Family.SCHEDULED_RECORDS, stream_keys.moved_shard_key(shard))
        if marks:
            with host.guard():
                host.vhost.store.write(marks)
            await host.vhost.commit.durable()
        appended = []
        for shard, (engine, name, records) in by_shard.items():
            with Guard(host.vhost):
                append = engine.batch_write(shard, records)
            confirmed = host.loop.create_future()
            host.when_confirmed(engine, append, _resolver(confirmed))
            appended.append((name, confirmed))
        for name, confirmed in appended:
            try:
                await confirmed
            except StorageError as error:
                if not isinstance(error, StoreStalledError):
                    host.vhost.fail(error)
                raise
            host.vhost.streams.notify(name)
        with host.guard():
            host.vhost.store.write(done)

    async def _route(self, scheduled: Scheduled) -> tuple[StorageAdapter, int, str] | None:
        """Return where a record goes, or None if its topic was deleted."""
        topic = self._host.plane.topics.find(scheduled.topic)
        if topic is None and not scheduled.topic_id:
            topic = await self._host.create_topic(scheduled.topic, 1)
        if topic is None or not scheduled.is_for(topic.id):
            return None
        engine, shard = self._host.route(topic, scheduled.partition % len(topic.shards))
        return engine, shard, topic.name

    def _recover(self) -> None:
        """Delete the rows of records that were appended before a crash, and the marks."""
        store = self._host.vhost.store
        batch = Batch()
        for key, raw in store.scan(Family.SCHEDULED_RECORDS, *key_parts.prefix_range(stream_keys.MOVED)):
            shard = stream_keys.decode_moved_shard_key(key)
            for found in self._appended(shard, decode_moved(raw)):
                batch.delete(Family.SCHEDULED_RECORDS, stream_keys.SCHEDULED + found)
            batch.delete(Family.SCHEDULED_RECORDS, key)
        if batch:
            store.write(batch)

    def _appended(self, shard: int, offset: int) -> list[bytes]:
        """Return the keys of scheduled records that a shard has from an offset on."""
        found: list[bytes] = []
        try:
            engine = self._host.plane.engines.get(self._host.plane.shards.get(shard).engine)
            while True:
                batch = engine.read_by_offset(shard, offset)
                for record in batch.records():
                    keys = [value for name, value in record.headers if name == SCHEDULED and value]
                    found += [bytes.fromhex(key.decode()) for key in keys]
                if batch.next_offset == offset:
                    return found
                offset = batch.next_offset
        except ShardNotFoundError:
            return found
        except OffsetOutOfRangeError as error:
            return found if error.earliest <= offset else found + self._appended(shard, error.earliest)


def _all_due() -> tuple[bytes, bytes | None]:
    return key_parts.prefix_range(stream_keys.SCHEDULED)


def _resolver(future: asyncio.Future[None]) -> Callable[[BaseException | None], None]:
    def resolve(error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    return resolve
