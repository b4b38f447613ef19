"""Makes the rows of the queue plane consistent after a repair that could not read all of them.

    quarantine             returns messages whose bodies are readable again
    messages, delayed      removes messages without a body and messages of deleted queues; restores a queue whose
                           configuration is lost, with default settings
    bodies, content_refs   deletes bodies without a message; rebuilds references from the messages
    leases, branches       removes unreadable ones; rebuilds their expiry rows
    expiry, timers, dedup  rebuilds the index rows
    queue_stats            recounts messages; totals do not change
    version rows           raises the last enqueue time and the boot number of lease tokens

A message without a row that another row names is reported by its id. Everything removed here is still in the damaged
database, in quarantine. Memory is a few dozen bytes per separate body. Nothing else may use the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import Final

from msgspec import DecodeError

from basaltmq.errors import BasaltError, CorruptionError
from basaltmq.queues.boot import CONTENT, FAMILIES, LAST_ENQUEUED_ROW, VERSION, encode_enqueued
from basaltmq.queues.config import QueueConfig, decode_config, encode_config
from basaltmq.queues.entries import rows
from basaltmq.queues.entries.backing import APART, SHARED, TIMED, Entry
from basaltmq.queues.entries.quarantine import records
from basaltmq.queues.leases.prepared import HELD
from basaltmq.queues.leases.table import BOOT_ROW, FOREVER, TOKEN_COUNT_BITS, decode_lease_call, encode_boot
from basaltmq.queues.lifecycle import timers
from basaltmq.queues.lifecycle.reclaim import decode_floor, encode_floor
from basaltmq.queues.stats import DURABLE_FIELDS, FIELDS, QueueStats
from basaltmq.queues.transactions.branch_rows import decode_branch, decode_draft, encode_branch
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import BY_LABEL, Family
from basaltmq.store.keys import queues as queue_keys
from basaltmq.store.salvage.losses import Losses
from basaltmq.store.salvage.naming import Loss, listed
from basaltmq.store.salvage.row_writer import RowWriter
from basaltmq.store.versions import put_version, read_version

BOOTS_SKIPPED: Final = 1 << 16
"""Added to the boot number of lease tokens when its row is lost: new tokens must be above those of all earlier boots.
There are 2^24 boot numbers."""

_TIMERS_KEPT_MAX: Final = 1000
"""Timer keys to remember, to write each only once."""

_ANY_SIZE: Final = -1


def reconcile_queues(store: Store, losses: Losses, now_ns: int, topics: Container[str] = ()) -> list[Loss]:
    """Make the rows of the queues consistent. Return the losses.

    `topics` are the topics that may hold the records of a stream queue.
    """
    reconciliation = _Reconciliation(store, losses, now_ns, topics)
    reconciliation.run()
    return reconciliation.found


class _Reconciliation:
    """One pass."""

    def __init__(self, store: Store, losses: Losses, now_ns: int, topics: Container[str]) -> None:
        self._store = store
        self._losses = losses
        self._now_ns = now_ns
        self._topics = topics
        self._rows = RowWriter(store)
        self.found: list[Loss] = []
        self._configs: dict[str, QueueConfig] = {}
        self._floors: dict[str, int] = {}
        self._old: dict[str, QueueStats] = {}
        self._counts: dict[str, QueueStats] = {}
        self._bodies: dict[bytes, int] = {}
        """Sizes of the separate bodies that exist."""
        self._wanted: set[bytes] = set()
        """Bodies that a message or a draft refers to."""
        self._references: set[bytes] = set()
        self._last_enqueued_ns = 0
        self._last_token = 0
        self._bodiless: dict[str, list[str]] = {}
        self._gone: Counter[str] = Counter()
        self._timers: set[bytes] = set()

    def run(self) -> None:
        self._read_queues()
        for key, body in self._store.scan(Family.MESSAGE_CONTENT):
            self._bodies[key] = len(body)
        self._quarantined()
        self._messages(Family.MESSAGES)
        self._messages(Family.DELAYED)
        self._drafts()
        self._content()
        self._leases()
        self._dedup()
        self._stats()
        self._versions()
        self._rows.flush()
        self._report()

    def _read_queues(self) -> None:
        for key, row in self._store.scan(Family.QUEUES):
            name = queue_keys.decode_queue_key(key)
            try:
                self._configs[name] = decode_config(name, row)
            except BasaltError as error:
                self._restore_config(name, str(error))
        for key, row in self._store.scan(Family.DELETED_QUEUES):
            name = queue_keys.decode_deleted_queue_key(key)
            try:
                self._floors[name] = decode_floor(name, row)
            except CorruptionError:
                self._rows.delete(Family.DELETED_QUEUES, key)
        for key, row in self._store.scan(Family.QUEUE_STATS):
            name = queue_keys.decode_queue_stats_key(key)
            try:
                self._old[name] = QueueStats.decode(name, row)
            except CorruptionError:
                self._rows.delete(Family.QUEUE_STATS, key)
                continue
            if name not in self._configs and self._losses.may_cover(Family.QUEUES, queue_keys.queue_key(name)):
                if name in self._topics and not self._old[name].messages:
                    self._report_stream(name)
                else:
                    self._restore_config(name, "its configuration is lost")
            if self._losses.hit(Family.DELETED_QUEUES) and name not in self._floors and self._old[name].floor_ns:
                # Rows below the floor belong to an earlier queue of the same name.
                self._floors[name] = self._old[name].floor_ns
                self._rows.put(
                    Family.DELETED_QUEUES, queue_keys.deleted_queue_key(name), encode_floor(self._floors[name])
                )

    def _restore_config(self, name: str, why: str) -> None:
        config = self._configs[name] = QueueConfig(name=name)
        self._rows.put(Family.QUEUES, queue_keys.queue_key(name), encode_config(config))
        text = f"{why}; it has default settings now, set them again"
        self.found.append(Loss(subject=f"queue {name!r}", text=text, family=Family.QUEUES.label, queues=[name]))

    def _report_stream(self, name: str) -> None:
        """Do not restore a queue that was probably a stream queue: a declaration with default settings would hide its
        records from clients."""
        text = (
            f"its configuration is lost; if it was a stream queue, declare it again: its records are in topic {name!r}"
        )
        self.found.append(Loss(subject=f"queue {name!r}", text=text, family=Family.QUEUES.label, queues=[name]))

    def _quarantined(self) -> None:
        """Return messages that are in quarantine only because their bodies were unreadable. Keep other bodies."""
        returned: Counter[str] = Counter()
        for record in records(self._store):
            if record.family not in (Family.MESSAGES.label, Family.DELAYED.label):
                continue
            family = BY_LABEL[record.family]
            try:
                message_key = queue_keys.message_of(record.key)[0] if family is Family.DELAYED else record.key
                queue, _, enqueued_ns, message_id = queue_keys.decode_message_key(message_key)
                _, flags, body_id, body_bytes = rows.unwrap(record.value)
            except (BasaltError, UnicodeDecodeError):
                continue
            size_bytes = self._bodies.get(queue_keys.body_key(body_id))
            if not flags & APART or size_bytes is None:
                continue
            is_whole = size_bytes == body_bytes and _is_readable(message_key, record.value)
            if not is_whole or not self._is_of_queue(queue, enqueued_ns):
                self._want_body(flags, body_id, message_id)
                continue
            self._rows.put(family, record.key, record.value)
            self._rows.delete(
                Family.QUARANTINE, queue_keys.quarantine_key(record.queue, record.found_ns, record.number)
            )
            returned[queue] += 1
        # The rows are read below.
        self._rows.flush()
        self._losses.recovered += [
            f"queue {queue!r}: {count} messages returned from quarantine, because their bodies are readable again"
            for queue, count in sorted(returned.items())
        ]

    def _messages(self, family: Family) -> None:
        is_delayed = family is Family.DELAYED
        indexes = self._losses.hit(Family.MESSAGE_EXPIRY)
        timing = self._losses.hit(Family.TIMERS)
        for key, row in self._store.scan(family):
            try:
                message_key, due_ns = queue_keys.message_of(key) if is_delayed else (key, 0)
                queue, _, enqueued_ns, message_id = queue_keys.decode_message_key(message_key)
                entry = rows.read_entry(message_key, row)
            except (BasaltError, UnicodeDecodeError):
                # A damaged row in an intact block: the queue plane quarantines it when it reads it.
                continue
            self._last_enqueued_ns = max(self._last_enqueued_ns, enqueued_ns)
            if not self._is_of_queue(queue, enqueued_ns):
                if enqueued_ns >= self._floors.get(queue, 0):
                    self._gone[queue] += 1
                    self._rows.delete(family, key)
                elif entry.flags & APART:
                    self._want(entry)
                continue
            if entry.flags & APART and self._bodies.get(queue_keys.body_key(rows.body_of(row))) != entry.size_bytes:
                self._bodiless.setdefault(queue, []).append(message_id.hex())
                self._rows.delete(family, key)
                continue
            self._count(queue, entry, is_delayed)
            self._want(entry)
            if entry.flags & TIMED and indexes:
                self._rows.put_if_missing(Family.MESSAGE_EXPIRY, queue_keys.timed_of(message_key, entry.expires_ns))
            if timing and entry.expires_ns:
                self._timer(entry.expires_ns, timers.EXPIRY, queue)
            if timing and is_delayed:
                self._timer(due_ns, timers.DELAYED, queue)

    def _is_of_queue(self, queue: str, enqueued_ns: int) -> bool:
        """Whether a row belongs to an existing queue. Restore the queue if its configuration is lost."""
        if queue not in self._configs:
            if enqueued_ns < self._floors.get(queue, 0):
                return False
            if not self._losses.may_cover(Family.QUEUES, queue_keys.queue_key(queue)):
                return False
            self._restore_config(queue, "its configuration is lost")
        old = self._old.get(queue)
        return enqueued_ns >= max(self._floors.get(queue, 0), 0 if old is None else old.floor_ns)

    def _want(self, entry: Entry) -> None:
        if entry.flags & APART:
            self._want_body(entry.flags, rows.body_of(entry.row), entry.key[-16:])

    def _want_body(self, flags: int, body_id: bytes, message_id: bytes) -> None:
        self._wanted.add(queue_keys.body_key(body_id))
        if flags & SHARED:
            self._references.add(queue_keys.content_ref_key(body_id, message_id))

    def _count(self, queue: str, entry: Entry, is_delayed: bool) -> None:
        stats = self._counts.get(queue)
        if stats is None:
            stats = self._counts[queue] = QueueStats()
        if is_delayed:
            stats.delayed += 1
            stats.delayed_bytes += entry.size_bytes
        else:
            stats.messages += 1
            stats.size_bytes += entry.size_bytes
        stats.apart += bool(entry.flags & APART)

    def _timer(self, due_ns: int, kind: bytes, queue: str) -> None:
        key = queue_keys.timer_key(due_ns + -due_ns % timers.ROUND_NS, kind, queue)
        if key not in self._timers:
            if len(self._timers) >= _TIMERS_KEPT_MAX:
                self._timers.clear()
            self._timers.add(key)
            self._rows.put_if_missing(Family.TIMERS, key)

    def _drafts(self) -> None:
        """Check prepared branches and the messages that they will enqueue."""
        found: Counter[bytes] = Counter()
        lost: Counter[bytes] = Counter()
        for key, raw in self._store.scan(Family.BRANCH_DRAFTS):
            xid = key[:-8]
            try:
                draft = decode_draft(raw)
            except (DecodeError, ValueError, CorruptionError):
                lost[xid] += 1
                self._rows.delete(Family.BRANCH_DRAFTS, key)
                continue
            body = queue_keys.body_key(draft.body_id)
            is_known = self._store.get(Family.XIDS, xid) is not None
            if not is_known or (draft.body_id != rows.NO_BODY and body not in self._bodies):
                lost[xid] += 1
                self._rows.delete(Family.BRANCH_DRAFTS, key)
                continue
            found[xid] += 1
            if draft.body_id != rows.NO_BODY:
                self._wanted.add(body)
                self._references.add(queue_keys.content_ref_key(draft.body_id, draft.body_id))
        for key, raw in self._store.scan(Family.XIDS):
            try:
                row = decode_branch(key, raw)
            except CorruptionError as error:
                self._tell_branch(key, str(error))
                self._rows.delete(Family.XIDS, key)
                continue
            lost.pop(key, None)
            if row.drafts != found[key]:
                self._tell_branch(key, f"{row.drafts - found[key]} of its {row.drafts} messages are lost")
                self._rows.put(Family.XIDS, key, encode_branch(row._replace(drafts=found[key])))
        for key, count in lost.items():
            self._tell_branch(key, f"its record is lost; the {count} messages it was to enqueue were removed")

    def _tell_branch(self, key: bytes, text: str) -> None:
        self.found.append(
            Loss(subject=f"prepared branch {key.hex()}", text=text, family=Family.XIDS.label, ids=[key.hex()])
        )

    def _content(self) -> None:
        """Make bodies and references match the messages."""
        orphans = [key for key in self._bodies if key not in self._wanted]
        for key in orphans:
            self._rows.delete(Family.MESSAGE_CONTENT, key)
        if orphans and self._losses.hit(Family.MESSAGES, Family.DELAYED):
            self._tell_ids("bodies of lost messages", "removed, because their messages are lost", orphans)
        strays: list[bytes] = []
        for key, _ in self._store.scan(Family.CONTENT_REFS):
            if key in self._references:
                self._references.discard(key)
            else:
                strays.append(queue_keys.decode_content_ref_key(key)[1])
                self._rows.delete(Family.CONTENT_REFS, key)
        for key in self._references:
            self._rows.put(Family.CONTENT_REFS, key, b"")
        bodiless = {message_id for ids in self._bodiless.values() for message_id in ids}
        strays = [message_id for message_id in strays if message_id.hex() not in bodiless]
        if strays and self._losses.hit(Family.MESSAGES, Family.DELAYED):
            self._tell_ids("messages with a shared body", "lost, unless they were acknowledged", strays)

    def _tell_ids(self, subject: str, text: str, ids: list[bytes]) -> None:
        named = [each.hex() for each in ids]
        self.found.append(
            Loss(subject=subject, text=f"{len(named)} {text}: {listed(named)}", family=Family.MESSAGES.label, ids=named)
        )

    def _leases(self) -> None:
        wanted: set[bytes] = set()
        for key, row in self._store.scan(Family.LEASES):
            try:
                queue, token = queue_keys.decode_lease_key(key)
                call, message_keys = decode_lease_call(queue, token, row)
            except (BasaltError, UnicodeDecodeError):
                self._rows.delete(Family.LEASES, key)
                continue
            self._last_token = max(self._last_token, token)
            if queue not in self._configs:
                self._rows.delete(Family.LEASES, key)
                continue
            if call.expires_ns not in (HELD, FOREVER):
                wanted.add(queue_keys.lease_expiry_key(call.expires_ns, queue, token))
            self._tell_leased(queue, [each for each in message_keys if self._is_in_gap(each)])
        for key, _ in self._store.scan(Family.LEASE_EXPIRY):
            if key in wanted:
                wanted.discard(key)
            elif self._losses.hit(Family.LEASES):
                self._rows.delete(Family.LEASE_EXPIRY, key)
        for key in wanted:
            self._rows.put(Family.LEASE_EXPIRY, key, b"")

    def _is_in_gap(self, message_key: bytes) -> bool:
        label = Family.MESSAGES.label
        is_lost = any(gap.family == label and gap.covers(message_key) for gap in self._losses.gaps)
        return is_lost and self._store.get(Family.MESSAGES, message_key) is None

    def _tell_leased(self, queue: str, message_keys: list[bytes]) -> None:
        if message_keys:
            ids = [key[-16:].hex() for key in message_keys]
            text = f"{len(ids)} leased messages are lost, unless they were acknowledged: {listed(ids)}"
            found = Loss(subject=f"queue {queue!r}", text=text, family=Family.MESSAGES.label, queues=[queue], ids=ids)
            if found not in self.found:
                self.found.append(found)

    def _dedup(self) -> None:
        if not self._losses.hit(Family.DEDUP, Family.DEDUP_EXPIRY, Family.TIMERS):
            return
        for key, row in self._store.scan(Family.DEDUP):
            try:
                queue, publisher_id = queue_keys.decode_dedup_key(key)
            except (BasaltError, UnicodeDecodeError):
                continue
            expires_ns = int.from_bytes(row[:8], "big")
            self._rows.put_if_missing(Family.DEDUP_EXPIRY, queue_keys.dedup_expiry_key(queue, expires_ns, publisher_id))
            self._timer(expires_ns + -expires_ns % timers.DEDUP_NS, timers.DEDUP, queue)

    def _stats(self) -> None:
        """Take counts from the rows. Totals do not change."""
        fields = FIELDS[:DURABLE_FIELDS]
        for name, config in self._configs.items():
            old = self._old.get(name)
            found = self._counts.get(name) or QueueStats()
            stats = QueueStats() if old is None else old
            if old is not None:
                self._tell_count(name, old, found)
            before = stats.encode()
            for each in fields:
                setattr(stats, each, getattr(found, each))
            stats.enqueued = max(stats.enqueued, stats.messages + stats.delayed)
            stats.floor_ns = max(stats.floor_ns, self._floors.get(name, 0))
            if old is None or stats.encode() != before:
                self._rows.put(Family.QUEUE_STATS, queue_keys.queue_stats_key(name), stats.encode())
            if config.expires_ms is not None and self._losses.hit(Family.TIMERS):
                self._timer(self._now_ns + config.expires_ms * timers.ROUND_NS, timers.UNUSED, name)
        for name in self._old.keys() - self._configs.keys():
            self._rows.delete(Family.QUEUE_STATS, queue_keys.queue_stats_key(name))

    def _tell_count(self, name: str, old: QueueStats, found: QueueStats) -> None:
        for had, has, what in (
            (old.messages, found.messages + len(self._bodiless.get(name, ())), "messages"),
            (old.delayed, found.delayed, "delayed messages"),
        ):
            if has < had and (what == "messages" or not self._bodiless.get(name)):
                text = f"counted {had} {what}, {has} can be read: {had - has} are lost"
                self.found.append(
                    Loss(subject=f"queue {name!r}", text=text, family=Family.MESSAGES.label, queues=[name])
                )

    def _versions(self) -> None:
        """Restore the rows that exist once for all queues."""
        is_used = any(next(iter(self._store.scan(family)), None) is not None for family in FAMILIES)
        if is_used and self._losses.hit(Family.VERSION) and read_version(self._store, CONTENT) is None:
            batch = Batch()
            put_version(batch, CONTENT, VERSION)
            self._store.write(batch)
        row = self._store.get(Family.VERSION, LAST_ENQUEUED_ROW)
        enqueued_ns = int.from_bytes(row, "big") if row is not None else 0
        if self._last_enqueued_ns > enqueued_ns or (row is None and is_used and self._losses.hit(Family.VERSION)):
            self._rows.put(
                Family.VERSION, LAST_ENQUEUED_ROW, encode_enqueued(max(self._now_ns, self._last_enqueued_ns))
            )
        boot = self._store.get(Family.VERSION, BOOT_ROW)
        used_boot = self._last_token >> TOKEN_COUNT_BITS
        if boot is None and is_used and self._losses.hit(Family.VERSION):
            self._rows.put(Family.VERSION, BOOT_ROW, encode_boot(used_boot + BOOTS_SKIPPED))
        elif boot is not None and int.from_bytes(boot, "big") < used_boot:
            self._rows.put(Family.VERSION, BOOT_ROW, encode_boot(used_boot))

    def _report(self) -> None:
        for queue, ids in sorted(self._bodiless.items()):
            text = f"{len(ids)} messages removed, because their bodies are lost: {listed(ids)}"
            label = Family.MESSAGE_CONTENT.label
            self.found.append(Loss(subject=f"queue {queue!r}", text=text, family=label, queues=[queue], ids=ids))
        for queue, count in sorted(self._gone.items()):
            text = f"{count} rows removed; the queue was deleted"
            self.found.append(Loss(subject=f"queue {queue!r}", text=text, family=Family.MESSAGES.label))


def _is_readable(message_key: bytes, row: bytes) -> bool:
    try:
        rows.read_entry(message_key, row)
    except CorruptionError:
        return False
    return True
