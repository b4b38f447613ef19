"""The lease table of a queue (SPEC C7): which consumer has which messages until when, and the fencing token.

A lease covers a call, not a message: `lease(100)` writes one row that names its 100 messages and one row in the expiry
index. An ack deletes only message rows. Both lease rows are deleted with the last message of the call. So after a
crash, the leased messages of a lease row are those that still exist. Messages that leave a lease alive (nack, release,
a split by extend) are removed from its row in the same batch.

    lease call row   | layout u8 | expires ns u64 | leased ns u64 | consumer bytes u16 | consumer | messages
      layout 1       per message: lp(sub-queue) | enqueued ns u64 | id (16) | ...
      layout 2       lp(sub-queue) | enqueued ns u64 | id (16) ... |     messages published in one call

Tokens fence: they grow with every lease, also over restarts. Their high bits are a boot number that is raised durably
before the first lease. A request with a token that is not live, or for a message that the lease does not hold, is
rejected as a whole and changes nothing.

    token   | boot u24 | count u40 |

`LeaseExpiry` keeps all expiries of a boot in one heap. Leases of earlier boots are on disk in the same order and are
read in pages when they are due, so opening costs nothing per lease.

A lease with the expiry FOREVER is consumer-bound: it ends with its consumer and exists in memory only. It has no rows,
so after a crash its messages are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from struct import Struct
from struct import error as struct_error
from typing import Final

from basaltmq.errors import CorruptionError, InvalidArgumentError, LimitExceededError, StaleLeaseError, StorageError
from basaltmq.ids import ID_BYTES
from basaltmq.queues.change import Change
from basaltmq.queues.config import DURATION_MS_MAX
from basaltmq.queues.entries.backing import TRANSIENT, Entry
from basaltmq.queues.entries.plain import Plain
from basaltmq.queues.entries.quarantine import Suspects
from basaltmq.queues.entries.rows import read_entry
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys.parts import lp, prefix_range, take_lp
from basaltmq.store.keys.queues import (
    TIME_AND_ID_BYTES,
    decode_lease_key,
    lease_expiry_key_of,
    lease_key_of,
    lease_prefix,
)

LAYOUT: Final = 1
LAYOUT_SAME_PLACE: Final = 2

FOREVER: Final = (1 << 64) - 1
"""The expiry of a consumer-bound lease."""

LEASE_MAX: Final = 10_000
"""Messages of one call: keeps its row below 0.5 MB and its failure in one batch."""

LEASED_MAX: Final = 1_000_000
"""Leased messages of one queue. Each takes about 350 bytes of memory."""

BOOTS_SKIPPED: Final = 1 << 16
"""Boot numbers skipped when the last one is lost, so that no token is issued twice."""

UNINDEXED_MAX: Final = 64
"""Calls that are searched one after the other by their first and last key, before their messages are indexed."""

_BOOT_BITS: Final = 24
TOKEN_COUNT_BITS: Final = 40
BOOT_ROW: Final = b"queue_lease_boot"
_BOOT: Final = Struct(">I")
_HEAD: Final = Struct(">BQQH")


def check_visibility(visibility_ms: int) -> None:
    if type(visibility_ms) is not int or not 0 <= visibility_ms <= DURATION_MS_MAX:
        raise InvalidArgumentError(
            f"a lease lasts 0 (until its consumer ends) to {DURATION_MS_MAX} ms, got {visibility_ms!r:.80}"
        )


def encode_boot(boot: int) -> bytes:
    return _BOOT.pack(boot)


class Tokens:
    """Fencing tokens of one boot."""

    __slots__ = ("_next", "_start")

    def __init__(self, boot: int) -> None:
        self._start = self._next = boot << TOKEN_COUNT_BITS

    @classmethod
    def open(cls, store: Store, suspects: Suspects) -> Tokens:
        """Raise the boot number durably."""
        raw = store.get(Family.VERSION, BOOT_ROW)
        last = 0 if raw is None else _BOOT.unpack(raw)[0] if len(raw) == _BOOT.size else 1 << _BOOT_BITS
        if last >> _BOOT_BITS:
            last = _last_boot(store) + BOOTS_SKIPPED
            suspects.note(Family.VERSION, BOOT_ROW, raw, f"the boot number of leases is damaged; continuing at {last}")
        boot = last + 1
        if boot >> _BOOT_BITS:
            raise StorageError(f"lease tokens are used up: the store was opened {boot} times; move to a new store")
        batch = Batch()
        batch.put(Family.VERSION, BOOT_ROW, _BOOT.pack(boot))
        store.write(batch)
        store.sync()
        return cls(boot)

    def next(self) -> int:
        self._next += 1
        return self._next

    def is_of_this_boot(self, token: int) -> bool:
        return token > self._start


def _last_boot(store: Store) -> int:
    """Return the highest boot number in the lease keys on disk."""
    boot = 0
    for key, _ in store.scan(Family.LEASES):
        try:
            boot = max(boot, decode_lease_key(key)[1] >> TOKEN_COUNT_BITS)
        except CorruptionError:
            continue
    return min(boot, (1 << _BOOT_BITS) - 2 * BOOTS_SKIPPED)


class LeaseCall:
    """The unsettled messages of one lease call.

    They are kept in columns until a request concerns only some of them; then they become entries by id.
    """

    __slots__ = ("_entries", "consumer", "expires_ns", "ids", "leased_ns", "plain", "token")

    def __init__(
        self,
        token: int,
        consumer: str,
        leased_ns: int,
        expires_ns: int,
        entries: dict[bytes, Entry],
        plain: Plain | None = None,
        ids: list[bytes] | None = None,
    ) -> None:
        """Takes either `plain` with the ids of its messages, or entries."""
        self.token = token
        self.consumer = consumer
        self.leased_ns = leased_ns
        self.expires_ns = expires_ns
        self.plain = plain
        self.ids = ids or []
        self._entries = entries

    @property
    def entries(self) -> dict[bytes, Entry]:
        if self.plain is not None:
            self._entries = dict(zip(self.ids, self.plain.entries(), strict=True))
            self.plain = None
            self.ids = []
        return self._entries

    @entries.setter
    def entries(self, entries: dict[bytes, Entry]) -> None:
        self.plain = None
        self.ids = []
        self._entries = entries

    @property
    def is_settled(self) -> bool:
        """Whether all its messages are settled."""
        return self.plain is None and not self._entries

    @property
    def is_consumer_bound(self) -> bool:
        return self.expires_ns == FOREVER


def encode_lease_call(call: LeaseCall, queue_bytes: int) -> bytes:
    """Encode the row of a call. `queue_bytes` is the length of lp(queue), the prefix of all keys."""
    consumer = lp(call.consumer)[2:]
    plain = call.plain
    if plain is not None:
        head = plain.keys[0][:-ID_BYTES]
        # Keys are sorted: a prefix of the first and the last key is a prefix of all.
        if plain.keys[-1].startswith(head):
            alike = _HEAD.pack(LAYOUT_SAME_PLACE, call.expires_ns, call.leased_ns, len(consumer))
            return b"".join((alike, consumer, head[queue_bytes:], plain.id_bytes()))
    parts = [_HEAD.pack(LAYOUT, call.expires_ns, call.leased_ns, len(consumer)), consumer]
    if plain is not None:
        parts += [key[queue_bytes:] for key in plain.keys]
        return b"".join(parts)
    entries: Iterable[Entry] = call.entries.values()
    if [e for e in entries if e.flags]:
        entries = [e for e in entries if not e.flags & TRANSIENT]
    parts += [e.key[queue_bytes:] for e in entries]
    return b"".join(parts)


def decode_lease_call(queue: str, token: int, row: bytes) -> tuple[LeaseCall, list[bytes]]:
    """Return a call without its entries, and the keys of its messages."""
    prefix = lp(queue)
    try:
        layout, expires_ns, leased_ns, consumer_bytes = _HEAD.unpack_from(row)
        at = _HEAD.size + consumer_bytes
        consumer = row[_HEAD.size : at].decode()
        if layout not in (LAYOUT, LAYOUT_SAME_PLACE):
            raise ValueError
        message_keys = (
            _decode_keys_of_place(prefix, row, at) if layout == LAYOUT_SAME_PLACE else _decode_keys(prefix, row, at)
        )
    except (struct_error, ValueError, CorruptionError):
        raise CorruptionError(f"lease {token} of queue {queue!r} is damaged ({len(row)} bytes)") from None
    return LeaseCall(token, consumer, leased_ns, expires_ns, {}), message_keys


def _decode_keys(prefix: bytes, row: bytes, at: int) -> list[bytes]:
    message_keys: list[bytes] = []
    while at < len(row):
        end = take_lp(row, at)[1] + TIME_AND_ID_BYTES
        if end > len(row):
            raise ValueError
        message_keys.append(prefix + row[at:end])
        at = end
    return message_keys


def _decode_keys_of_place(prefix: bytes, row: bytes, at: int) -> list[bytes]:
    begin = take_lp(row, at)[1] + TIME_AND_ID_BYTES - ID_BYTES
    if begin >= len(row) or (len(row) - begin) % ID_BYTES:
        raise ValueError
    head = prefix + row[at:begin]
    return [head + row[place : place + ID_BYTES] for place in range(begin, len(row), ID_BYTES)]


class Leases:
    """The leases of one queue. Adds rows to the given batch, and changes its own memory at once."""

    __slots__ = (
        "_by_id",
        "_by_token",
        "_count",
        "_prefix",
        "_queue",
        "_settling",
        "_unindexed",
        "returned_ns",
        "size_bytes",
    )

    def __init__(self, queue: str, returned_ns: int = 0) -> None:
        self._queue = queue
        self._prefix = lease_prefix(queue)
        self._by_token: dict[int, LeaseCall] = {}
        self._by_id: dict[bytes, LeaseCall] = {}
        """Leased messages by id, without those of unindexed calls."""
        self._unindexed: dict[int, LeaseCall] = {}
        """Calls in columns. Most of them are settled as a whole before anyone looks up one of their messages."""
        self._settling: list[Collection[bytes]] = []
        """Messages settled by the open change. Their rows exist until it is written."""
        self._count = 0
        self.size_bytes = 0
        """Bytes of the bodies of all leased messages."""
        self.returned_ns = returned_ns
        """Messages up to this enqueue time may have been leased before. For later messages it is known."""

    @classmethod
    def load(
        cls,
        store: Store,
        queue: str,
        suspects: Suspects,
        returned_ns: int = 0,
        last_ns: int = 0,
        is_orphan: Callable[[LeaseCall], bool] = lambda call: False,
    ) -> Leases:
        """Read the leases of a queue from disk, with those of their messages that still exist.

        If a lease row is unreadable or orphaned (`is_orphan`), its messages are ready. Then every message up to the
        enqueue time `last_ns` counts as possibly leased before. The same holds if the store skipped unreadable rows.
        """
        leases = cls(queue, returned_ns)
        for key, row in store.scan(Family.LEASES, *prefix_range(lease_prefix(queue))):
            try:
                call, message_keys = decode_lease_call(queue, decode_lease_key(key)[1], row)
                if is_orphan(call):
                    raise CorruptionError(f"lease {call.token} of queue {queue!r} belongs to an unknown branch")
            except CorruptionError as error:
                suspects.note(Family.LEASES, key, row, str(error))
                leases.returned_ns = max(leases.returned_ns, last_ns)
                continue
            found = store.get_many(Family.MESSAGES, message_keys)
            for message_key, message_row in zip(message_keys, found, strict=True):
                message_id = message_key[-16:]
                if message_row is None or message_id in leases._by_id:
                    continue
                try:
                    entry = read_entry(message_key, message_row)
                except CorruptionError as error:
                    suspects.note(Family.MESSAGES, message_key, message_row, str(error))
                    continue
                entry.row = b""
                call.entries[message_id] = entry
            leases.restore(call, call.entries)
        if store.has_unreadable(Family.LEASES):
            leases.returned_ns = max(leases.returned_ns, last_ns)
        return leases

    def __len__(self) -> int:
        """Number of leased messages."""
        return self._count

    def calls(self) -> list[LeaseCall]:
        return list(self._by_token.values())

    def _index_all(self) -> None:
        """Index the messages of all calls by id."""
        for call in self._unindexed.values():
            self._by_id.update(dict.fromkeys(call.entries if call.plain is None else call.ids, call))
        self._unindexed.clear()

    def has_key(self, key: bytes) -> bool:
        if self._unindexed:
            self._index_all()
        return key[-16:] in self._by_id or any(key[-16:] in ids for ids in self._settling)

    def leave(self, change: Change, ids: Collection[bytes]) -> None:
        """Note messages that this change removes from their leases. Readers of the queue's rows must not treat them as
        ready before the change is written."""
        if not self._settling:
            change.after(self._settling.clear)
            change.undo(self._settling.clear)
        self._settling.append(ids)

    def leased_among(self, keys: Sequence[bytes]) -> list[int]:
        """Return the indexes of the leased messages among these keys, which are in ascending order."""
        if self._unindexed and keys:
            first, last = keys[0], keys[-1]
            for call in self._unindexed.values():
                if call.plain is None or (call.plain.keys[0] <= last and call.plain.keys[-1] >= first):
                    self._index_all()
                    break
        held: Collection[bytes] = self._by_id
        if self._settling:
            held = {*held, *chain.from_iterable(self._settling)}
        return [number for number, key in enumerate(keys) if key[-16:] in held] if held else []

    def paged_out(self, entry: Entry) -> None:
        """Note that a returned message leaves memory. From now on its enqueue time marks it as possibly redelivered."""
        self.returned_ns = max(self.returned_ns, int.from_bytes(entry.key[-24:-16], "big"))

    def has_memory_only(self) -> bool:
        """Whether some lease state is not on disk: consumer-bound leases, or transient messages."""
        calls = self._by_token.values()
        return any(call.is_consumer_bound for call in calls) or any(
            e.flags & TRANSIENT for call in calls if call.plain is None for e in call.entries.values()
        )

    def forget_holds(self) -> None:
        """Note the messages of consumer-bound leases as returned, because memory is about to be dropped."""
        for call in self._by_token.values():
            if call.is_consumer_bound:
                for entry in call.entries.values():
                    self.paged_out(entry)

    def room(self) -> int:
        return LEASED_MAX - self._count

    def all_keys(self) -> list[bytes]:
        found: list[bytes] = []
        for call in self._by_token.values():
            found += [e.key for e in call.entries.values()] if call.plain is None else call.plain.keys
        return found

    def add(self, batch: Batch, call: LeaseCall) -> None:
        """Start a lease."""
        count = len(call.entries) if call.plain is None else len(call.plain)
        if count > LEASE_MAX:
            raise LimitExceededError(f"a lease of {count} messages exceeds the limit of {LEASE_MAX} per call")
        if call.plain is None:
            self.restore(call, call.entries)
        else:
            self.restore_plain(call, call.plain, call.ids)
        self._write(batch, call)

    def restore_plain(self, call: LeaseCall, plain: Plain, ids: list[bytes]) -> None:
        """Like `restore`, for all messages of a call in columns."""
        call.plain, call.ids = plain, ids
        self._by_token[call.token] = self._unindexed[call.token] = call
        if len(self._unindexed) > UNINDEXED_MAX:
            self._index_all()
        self._count += len(ids)
        self.size_bytes += plain.size_bytes

    def restore(self, call: LeaseCall, entries: dict[bytes, Entry]) -> None:
        """Put messages under a call in memory, for example when their removal was not written."""
        if call.entries is not entries:
            call.entries.update(entries)
        self._by_token[call.token] = call
        self._by_id.update(dict.fromkeys(entries, call))
        self._count += len(entries)
        self.size_bytes += sum([e.size_bytes for e in entries.values()])

    def take_plain(self, token: int, ids: Sequence[bytes] | None) -> tuple[LeaseCall, Plain, list[bytes]] | None:
        """Take all messages of a live lease with their ids. Return None if they are not in columns or `ids` names other
        messages."""
        call = self.require(token)
        plain, all_ids = call.plain, call.ids
        if plain is None or (ids is not None and list(ids) != all_ids):
            return None
        call.entries = {}
        if self._unindexed.pop(token, None) is None:
            self._unindex(all_ids)
        self._count -= len(all_ids)
        self.size_bytes -= plain.size_bytes
        del self._by_token[token]
        return call, plain, all_ids

    def forget(self, call: LeaseCall) -> None:
        """Drop a call from memory, for example when it was not written."""
        self._by_token.pop(call.token, None)
        self._remove_entries(call.entries)

    def require(self, token: int) -> LeaseCall:
        call = self._by_token.get(token)
        if call is None:
            raise StaleLeaseError(
                f"lease {token} of queue {self._queue!r} has ended: it expired, or all its messages are settled; "
                "lease the messages again, and extend leases before they expire"
            )
        return call

    def take(self, token: int, ids: Sequence[bytes] | None) -> tuple[LeaseCall, dict[bytes, Entry]]:
        """Remove messages (all by default) from a live lease in memory. Raise, and remove none, if one is not in it."""
        call = self.require(token)
        self._index_all()
        if ids is None:
            taken = call.entries
            call.entries = {}
        else:
            held = call.entries
            taken = {}
            for message_id in ids:
                entry = held.get(message_id)
                if entry is None or message_id in taken:
                    raise StaleLeaseError(
                        f"message {message_id.hex()} is not in lease {token} of queue {self._queue!r}: it was "
                        "already settled, or belongs to another lease"
                    )
                taken[message_id] = entry
            for message_id in taken:
                del held[message_id]
        self._remove_entries(taken)
        if not call.entries:
            del self._by_token[token]
        return call, taken

    def _remove_entries(self, entries: dict[bytes, Entry]) -> None:
        self._index_all()
        self._unindex(entries)
        self._count -= len(entries)
        self.size_bytes -= sum([e.size_bytes for e in entries.values()])

    def _unindex(self, ids: Iterable[bytes]) -> None:
        by_id = self._by_id
        for message_id in ids:
            del by_id[message_id]

    def settled(self, batch: Batch, call: LeaseCall, *, rewrite: bool) -> None:
        """Write the lease rows after `take`. Set `rewrite` if the removed messages continue to exist in this queue."""
        if call.is_consumer_bound:
            return
        if call.is_settled:
            batch.delete(Family.LEASES, lease_key_of(self._prefix, call.token))
            batch.delete(Family.LEASE_EXPIRY, lease_expiry_key_of(call.expires_ns, self._prefix, call.token))
        elif rewrite:
            batch.put(Family.LEASES, lease_key_of(self._prefix, call.token), self._encode(call))

    def cancel(self, change: Change, call: LeaseCall) -> None:
        """Remove the rows of a call that started and ended in one change."""
        if call.is_consumer_bound:
            return
        change.cancel(Family.LEASES, lease_key_of(self._prefix, call.token))
        change.cancel(Family.LEASE_EXPIRY, lease_expiry_key_of(call.expires_ns, self._prefix, call.token))

    def move_expiry(self, batch: Batch, call: LeaseCall, expires_ns: int) -> None:
        if not call.is_consumer_bound:
            batch.delete(Family.LEASE_EXPIRY, lease_expiry_key_of(call.expires_ns, self._prefix, call.token))
            if expires_ns == FOREVER:
                batch.delete(Family.LEASES, lease_key_of(self._prefix, call.token))
        call.expires_ns = expires_ns
        self._write(batch, call)

    def _write(self, batch: Batch, call: LeaseCall) -> None:
        if call.is_consumer_bound:
            return
        batch.put(Family.LEASES, lease_key_of(self._prefix, call.token), self._encode(call))
        batch.put(Family.LEASE_EXPIRY, lease_expiry_key_of(call.expires_ns, self._prefix, call.token), b"")

    def _encode(self, call: LeaseCall) -> bytes:
        return encode_lease_call(call, len(self._prefix))

    def delete_expiry(self, batch: Batch, call: LeaseCall) -> None:
        """Delete the call's row in the expiry index only."""
        if not call.is_consumer_bound:
            batch.delete(Family.LEASE_EXPIRY, lease_expiry_key_of(call.expires_ns, self._prefix, call.token))
