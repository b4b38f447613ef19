"""Leases (SPEC C7): who has which messages until when, and the token that proves it.

A lease is made per call, not per message: `lease(100)` writes one row that names its hundred messages and one row in
the expiry index. Acking deletes message rows and nothing else, until the last message of the call is settled and both
rows go with it. So after a crash the messages of a lease row that still exist are the ones that are leased. What leaves
a lease alive (nack, release, a split by extend) is taken out of its row in the same batch.

    lease call row   | layout u8 | expires ns u64 | leased ns u64 | consumer bytes u16 | consumer | messages
      layout 1       per message: lp(sub-queue) | enqueued ns u64 | id (16) | ...
      layout 2       lp(sub-queue) | enqueued ns u64 | id (16) ... |     of messages that came in one call

Tokens fence: they grow with every lease, over restarts too, because the high bits are a boot number that is raised
durably before the first lease. An answer with a token that is not alive, or for a message it does not hold, is refused
whole and touches nothing.

    token   | boot u24 | count u40 |

The plane keeps all expiries of a boot in one heap. What earlier boots left is on disk in the same order and is read in
pages as its time comes, so opening costs nothing per lease.

A lease whose expiry is FOREVER is a hold: it ends with its consumer and is in memory only. No row is written for it, so
after a crash its messages are simply ready.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from struct import Struct
from struct import error as struct_error
from typing import Final

from basaltmq.errors import CorruptionError, InvalidArgumentError, LimitExceededError, StaleLeaseError, StorageError
from basaltmq.queues.change import Change
from basaltmq.queues.config import DURATION_MS_MAX
from basaltmq.queues.quarantine import Suspects
from basaltmq.queues.ready.backing import TRANSIENT, Entry
from basaltmq.queues.ready.plain import Plain
from basaltmq.queues.ready.rows import read_entry
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys.queues import (
    decode_lease_call_key,
    lease_call_expiry_key_of,
    lease_call_key_of,
    lease_call_prefix,
    lp,
    prefix_range,
    take_lp,
)

LAYOUT: Final = 1
LAYOUT_ALIKE: Final = 2

FOREVER: Final = (1 << 64) - 1
"""The expiry of a lease that lasts as long as its consumer."""

LEASE_MAX: Final = 10_000
"""Messages of one call: its row stays under half a megabyte and its failure is one batch."""

LEASED_MAX: Final = 1_000_000
"""Messages leased in one queue: about 350 bytes of memory each, which is what bounds them."""

BOOTS_SKIPPED: Final = 1 << 16
"""Boot numbers skipped when the last one is lost, so that no token is given out twice."""

UNLISTED_MAX: Final = 64
"""Calls whose messages are looked for by where the first and the last of them are, one call after the other."""

_BOOT_BITS: Final = 24
TOKEN_COUNT_BITS: Final = 40
BOOT_ROW: Final = b"queue_lease_boot"
_BOOT: Final = Struct(">I")
_HEAD: Final = Struct(">BQQH")
_PLACE_BYTES: Final = 24
_ID_BYTES: Final = 16


def check_visibility(visibility_ms: int) -> None:
    if type(visibility_ms) is not int or not 0 <= visibility_ms <= DURATION_MS_MAX:
        raise InvalidArgumentError(
            f"a lease lasts 0 ms (as long as its consumer) to {DURATION_MS_MAX} ms, not {visibility_ms!r:.80}"
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
        """Raise the boot number, durably."""
        raw = store.get(Family.VERSION, BOOT_ROW)
        last = 0 if raw is None else _BOOT.unpack(raw)[0] if len(raw) == _BOOT.size else 1 << _BOOT_BITS
        if last >> _BOOT_BITS:
            last = _last_boot(store) + BOOTS_SKIPPED
            suspects.note(Family.VERSION, BOOT_ROW, raw, f"the boot number of leases is damaged; it goes on at {last}")
        boot = last + 1
        if boot >> _BOOT_BITS:
            raise StorageError(f"the store was opened {boot} times; its lease tokens are used up: move to a new store")
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
    """The last boot that a lease on disk tells of."""
    boot = 0
    for key, _ in store.scan(Family.LEASE_CALLS):
        try:
            boot = max(boot, decode_lease_call_key(key)[1] >> TOKEN_COUNT_BITS)
        except CorruptionError:
            continue
    return min(boot, (1 << _BOOT_BITS) - 2 * BOOTS_SKIPPED)


class LeaseCall:
    """The messages of one lease call that are not settled.

    They are columns as long as all of them are answered for together, and entries by id from there on.
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
        """`plain` with the ids of its messages, and no entries; or entries alone."""
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
        """Whether nothing is left of it."""
        return self.plain is None and not self._entries

    @property
    def is_hold(self) -> bool:
        return self.expires_ns == FOREVER


def encode_lease_call(call: LeaseCall, queue_bytes: int) -> bytes:
    """The row of a call; `queue_bytes` is the length of lp(queue), which its keys begin with."""
    consumer = lp(call.consumer)[2:]
    plain = call.plain
    if plain is not None:
        head = plain.keys[0][:-_ID_BYTES]
        # They are in order: what the first and the last have in common, all have.
        if plain.keys[-1].startswith(head):
            alike = _HEAD.pack(LAYOUT_ALIKE, call.expires_ns, call.leased_ns, len(consumer))
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
    """A call without its entries, and the keys of its messages."""
    prefix = lp(queue)
    try:
        layout, expires_ns, leased_ns, consumer_bytes = _HEAD.unpack_from(row)
        at = _HEAD.size + consumer_bytes
        consumer = row[_HEAD.size : at].decode()
        if layout not in (LAYOUT, LAYOUT_ALIKE):
            raise ValueError
        message_keys = _alike(prefix, row, at) if layout == LAYOUT_ALIKE else _one_by_one(prefix, row, at)
    except (struct_error, ValueError, CorruptionError):
        raise CorruptionError(f"lease {token} of queue {queue!r} is damaged ({len(row)} bytes)") from None
    return LeaseCall(token, consumer, leased_ns, expires_ns, {}), message_keys


def _one_by_one(prefix: bytes, row: bytes, at: int) -> list[bytes]:
    message_keys: list[bytes] = []
    while at < len(row):
        end = take_lp(row, at)[1] + _PLACE_BYTES
        if end > len(row):
            raise ValueError
        message_keys.append(prefix + row[at:end])
        at = end
    return message_keys


def _alike(prefix: bytes, row: bytes, at: int) -> list[bytes]:
    begin = take_lp(row, at)[1] + _PLACE_BYTES - _ID_BYTES
    if begin >= len(row) or (len(row) - begin) % _ID_BYTES:
        raise ValueError
    head = prefix + row[at:begin]
    return [head + row[place : place + _ID_BYTES] for place in range(begin, len(row), _ID_BYTES)]


class Leases:
    """The leases of one queue. Changes rows in the batch it is handed, and its own memory at once."""

    __slots__ = (
        "_by_id",
        "_by_token",
        "_count",
        "_leaving",
        "_prefix",
        "_queue",
        "_unlisted",
        "returned_ns",
        "size_bytes",
    )

    def __init__(self, queue: str, returned_ns: int = 0) -> None:
        self._queue = queue
        self._prefix = lease_call_prefix(queue)
        self._by_token: dict[int, LeaseCall] = {}
        self._by_id: dict[bytes, LeaseCall] = {}
        """The messages of all calls but the unlisted ones."""
        self._unlisted: dict[int, LeaseCall] = {}
        """Calls that are columns and, as a rule, are settled as such before anybody asks for one of their messages."""
        self._leaving: list[Collection[bytes]] = []
        """Messages that the change that is open has settled: their rows are there until it is written."""
        self._count = 0
        self.size_bytes = 0
        """Bodies of all leased messages."""
        self.returned_ns = returned_ns
        """Messages up to this place may have been leased before; of the others it is known."""

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
        """The leases that rows tell of, with those of their messages that still exist.

        The messages of a lease whose row cannot be read, or that nobody can end (`is_orphan`), are ready; from there
        every message up to the place `last_ns` may have been leased before.
        """
        leases = cls(queue, returned_ns)
        for key, row in store.scan(Family.LEASE_CALLS, *prefix_range(lease_call_prefix(queue))):
            try:
                call, message_keys = decode_lease_call(queue, decode_lease_call_key(key)[1], row)
                if is_orphan(call):
                    raise CorruptionError(f"the branch of lease {call.token} of queue {queue!r} is not known")
            except CorruptionError as error:
                suspects.note(Family.LEASE_CALLS, key, row, str(error))
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
        return leases

    def __len__(self) -> int:
        """Messages leased."""
        return self._count

    def calls(self) -> list[LeaseCall]:
        return list(self._by_token.values())

    def _list_all(self) -> None:
        """Have every message that is leased in the index."""
        for call in self._unlisted.values():
            self._by_id.update(dict.fromkeys(call.entries if call.plain is None else call.ids, call))
        self._unlisted.clear()

    def has_key(self, key: bytes) -> bool:
        if self._unlisted:
            self._list_all()
        return key[-16:] in self._by_id or any(key[-16:] in ids for ids in self._leaving)

    def leave(self, change: Change, ids: Collection[bytes]) -> None:
        """Messages are taken out of their leases in this change. Whoever reads the queue's rows before it is written
        must not take them for ready: they are done, or come back with the change."""
        if not self._leaving:
            change.after(self._leaving.clear)
            change.undo(self._leaving.clear)
        self._leaving.append(ids)

    def held_among(self, keys: Sequence[bytes]) -> list[int]:
        """Which of the messages with these keys, which ascend, are leased."""
        if self._unlisted and keys:
            first, last = keys[0], keys[-1]
            for call in self._unlisted.values():
                if call.plain is None or (call.plain.keys[0] <= last and call.plain.keys[-1] >= first):
                    self._list_all()
                    break
        held: Collection[bytes] = self._by_id
        if self._leaving:
            held = {*held, *chain.from_iterable(self._leaving)}
        return [number for number, key in enumerate(keys) if key[-16:] in held] if held else []

    def paged_out(self, entry: Entry) -> None:
        """A message that came back leaves memory; from here on its place says that it may have come back."""
        self.returned_ns = max(self.returned_ns, int.from_bytes(entry.key[-24:-16], "big"))

    def has_memory_only(self) -> bool:
        """True if something of the leases is on no disk: holds, and transient messages."""
        calls = self._by_token.values()
        return any(call.is_hold for call in calls) or any(
            e.flags & TRANSIENT for call in calls if call.plain is None for e in call.entries.values()
        )

    def forget_holds(self) -> None:
        """Memory is about to be lost: what is held comes back."""
        for call in self._by_token.values():
            if call.is_hold:
                for entry in call.entries.values():
                    self.paged_out(entry)

    def call_of(self, message_id: bytes) -> LeaseCall | None:
        self._list_all()
        return self._by_id.get(message_id)

    def room(self) -> int:
        return LEASED_MAX - self._count

    def all_keys(self) -> list[bytes]:
        found: list[bytes] = []
        for call in self._by_token.values():
            found += [e.key for e in call.entries.values()] if call.plain is None else call.plain.keys
        return found

    def add(self, batch: Batch, call: LeaseCall) -> None:
        """Begin a lease."""
        count = len(call.entries) if call.plain is None else len(call.plain)
        if count > LEASE_MAX:
            raise LimitExceededError(f"a lease of {count} messages: at most {LEASE_MAX} in one call")
        if call.plain is None:
            self.restore(call, call.entries)
        else:
            self.restore_plain(call, call.plain, call.ids)
        self._write(batch, call)

    def restore_plain(self, call: LeaseCall, plain: Plain, ids: list[bytes]) -> None:
        """The same as `restore`, for all messages of a call as columns."""
        call.plain, call.ids = plain, ids
        self._by_token[call.token] = self._unlisted[call.token] = call
        if len(self._unlisted) > UNLISTED_MAX:
            self._list_all()
        self._count += len(ids)
        self.size_bytes += plain.size_bytes

    def restore(self, call: LeaseCall, entries: dict[bytes, Entry]) -> None:
        """Hold messages under a call in memory, as when their removal was not written."""
        if call.entries is not entries:
            call.entries.update(entries)
        self._by_token[call.token] = call
        self._by_id.update(dict.fromkeys(entries, call))
        self._count += len(entries)
        self.size_bytes += sum([e.size_bytes for e in entries.values()])

    def take_plain(self, token: int, ids: Sequence[bytes] | None) -> tuple[LeaseCall, Plain, list[bytes]] | None:
        """All messages of a live lease with their ids, if it has them as columns and `ids`, if any, are just those."""
        call = self.require(token)
        plain, all_ids = call.plain, call.ids
        if plain is None or (ids is not None and list(ids) != all_ids):
            return None
        call.entries = {}
        if self._unlisted.pop(token, None) is None:
            self._unlist(all_ids)
        self._count -= len(all_ids)
        self.size_bytes -= plain.size_bytes
        del self._by_token[token]
        return call, plain, all_ids

    def forget(self, call: LeaseCall) -> None:
        """Drop a call from memory, as when it was not written."""
        self._by_token.pop(call.token, None)
        self._lose_entries(call.entries)

    def require(self, token: int) -> LeaseCall:
        call = self._by_token.get(token)
        if call is None:
            raise StaleLeaseError(
                f"lease {token} of queue {self._queue!r} is over: it expired, or all its messages are settled; "
                "lease again, and extend in time"
            )
        return call

    def take(self, token: int, ids: Sequence[bytes] | None) -> tuple[LeaseCall, dict[bytes, Entry]]:
        """Take messages (all by default) out of a live lease, in memory; refused whole if one is not in it."""
        call = self.require(token)
        self._list_all()
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
                        f"message {message_id.hex()} is not held by lease {token} of queue {self._queue!r}: it was "
                        "settled before, or belongs to another lease"
                    )
                taken[message_id] = entry
            for message_id in taken:
                del held[message_id]
        self._lose_entries(taken)
        if not call.entries:
            del self._by_token[token]
        return call, taken

    def _lose_entries(self, entries: dict[bytes, Entry]) -> None:
        self._list_all()
        self._unlist(entries)
        self._count -= len(entries)
        self.size_bytes -= sum([e.size_bytes for e in entries.values()])

    def _unlist(self, ids: Iterable[bytes]) -> None:
        by_id = self._by_id
        for message_id in ids:
            del by_id[message_id]

    def settled(self, batch: Batch, call: LeaseCall, *, rewrite: bool) -> None:
        """Write what `take` left. `rewrite` if what was taken goes on living as a message of this queue."""
        if call.is_hold:
            return
        if call.is_settled:
            batch.delete(Family.LEASE_CALLS, lease_call_key_of(self._prefix, call.token))
            batch.delete(Family.LEASE_CALL_EXPIRY, lease_call_expiry_key_of(call.expires_ns, self._prefix, call.token))
        elif rewrite:
            batch.put(Family.LEASE_CALLS, lease_call_key_of(self._prefix, call.token), self._encode(call))

    def cancel(self, change: Change, call: LeaseCall) -> None:
        """A call that began and ended in one change leaves no rows."""
        if call.is_hold:
            return
        change.cancel(Family.LEASE_CALLS, lease_call_key_of(self._prefix, call.token))
        change.cancel(Family.LEASE_CALL_EXPIRY, lease_call_expiry_key_of(call.expires_ns, self._prefix, call.token))

    def move_expiry(self, batch: Batch, call: LeaseCall, expires_ns: int) -> None:
        if not call.is_hold:
            batch.delete(Family.LEASE_CALL_EXPIRY, lease_call_expiry_key_of(call.expires_ns, self._prefix, call.token))
            if expires_ns == FOREVER:
                batch.delete(Family.LEASE_CALLS, lease_call_key_of(self._prefix, call.token))
        call.expires_ns = expires_ns
        self._write(batch, call)

    def _write(self, batch: Batch, call: LeaseCall) -> None:
        if call.is_hold:
            return
        batch.put(Family.LEASE_CALLS, lease_call_key_of(self._prefix, call.token), self._encode(call))
        batch.put(Family.LEASE_CALL_EXPIRY, lease_call_expiry_key_of(call.expires_ns, self._prefix, call.token), b"")

    def _encode(self, call: LeaseCall) -> bytes:
        return encode_lease_call(call, len(self._prefix))

    def delete_expiry(self, batch: Batch, call: LeaseCall) -> None:
        """The row of a call in the expiry index goes; the call's own row is somebody else's matter."""
        if not call.is_hold:
            batch.delete(Family.LEASE_CALL_EXPIRY, lease_call_expiry_key_of(call.expires_ns, self._prefix, call.token))
