"""The store on RocksDB with large bodies in files of their own.

A body of 32 KiB or more in the family `message_content` is written once, to a body file. It never passes through
RocksDB's WAL, memtables, blob files or flushes. The family `body_places` has a row that points to it. Callers see one
family: get, scan and snapshot return the body, and deleting the row deletes it. So shared bodies, prepared branches,
dead-lettering and requeues change rows only. Large bodies in rows of earlier versions stay readable.

    write    append bodies (pwritev) ─> one WriteBatch: rows, places, live bytes of files, durable end ─> WAL
    sync     fdatasync body files    ─> sync WAL ─> confirms. Files dead by then are removed
    read     16 MiB of bodies that were just written are in memory (`recent`); place ─> pread, check the CRC

States of a file: current (receives appends), full, dead (no live bytes), removed. A restart ends the current file.

Invariants
----------
- A row that points to a body is written after the body, and a sync of the WAL comes after a sync of the bodies. So a
  confirmed message has its body.
- `body_files` has the live bytes of each file, written in the same batch as the rows that change them. They are exact
  after any crash, and an open reads one row per file, not one per body. If rows and files do not match, an open counts
  them again from the places.
- A file is removed when its live bytes are 0 as of a durable write, and no snapshot, scan or backup is open. Bodies are
  never overwritten, so a place is valid as long as its file exists.
- When half of a full file is garbage, a thread moves its live bodies. It appends them to the current file, a few at a
  time, and changes their places. A reader that finds its file removed reads the place again.

In a crash
----------
A killed process loses nothing that was written. A power loss may leave a batch in the WAL whose body is not on disk.
Such a batch was never confirmed, and the open cuts the WAL there (`integrity/body_tails.py`). If the row of such a body
was already flushed to an SST file, the body counts as damaged: it is reported and quarantined. A flipped bit loses one
body. A missing file loses its bodies. Both are reported like unreadable rows. While rows of `body_places` are
unreadable, the files that exist are kept, because a repair finds the bodies of those rows in them.

A write that RocksDB refuses (a stall) moves the end of the file back. A failed append or fdatasync, as on a full disk,
poisons the store like a failed WAL write, and nothing is confirmed.

Rejected: RocksDB's blob files (bodies pass through WAL and memtable first: measured 1.6 bytes written per byte, and the
CRC of the WAL in the calling thread), a WAL of our own (a second recovery), reference counts per body.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Final

from rocksdict import Options, Rdict, WriteBatch, WriteOptions

from basaltmq.errors import BasaltError, CorruptionError, LimitExceededError, StorageError, StoreStalledError
from basaltmq.store.batch import BATCH_BYTES_MAX, DELETE, PUT, Batch, Operation
from basaltmq.store.bodies.files import BodyFile, BodyFiles
from basaltmq.store.bodies.reading import CONTENT, PLACES, BodySnapshot, Row, with_bodies
from basaltmq.store.bodies.recent import RecentBodies
from basaltmq.store.directory import os_error
from basaltmq.store.families import Family
from basaltmq.store.integrity.body_frames import (
    BODIES,
    DURABLE_KEY,
    KEY_BYTES_MAX,
    Place,
    decode_files,
    encode_live,
    encode_number,
    file_name,
    frame_bytes,
    link_files,
    walk,
)
from basaltmq.store.integrity.seals import Sealer
from basaltmq.store.integrity.synced import SyncedFile
from basaltmq.store.options import StoreOptions
from basaltmq.store.rocks import RocksStore
from basaltmq.store.rocks_cursor import RocksSnapshot
from basaltmq.store.salvage.excision import excised
from basaltmq.store.salvage.unreadable import Unreadable

LARGE_BYTES_MIN: Final = 32 << 10
"""Smaller bodies are rows: one WAL write for the whole group is cheaper than one file write per body."""

UNSYNCED_BYTES_MAX: Final = 64 << 20
"""Large publishes wait while more bytes than this are not synced. Above it, the kernel would block the writing thread,
which is the event loop. From half of it on, a thread syncs, because publishers without confirms request no sync."""

MOVE_BYTES: Final = 1 << 20
"""Bytes of bodies that a move appends under one lock."""

MOVE_FREE_BYTES: Final = 64 << 20
"""Free disk space that a move leaves. With a full disk, opening the store and draining queues need this space."""

TIDY_WAIT_S: Final = 60.0
"""How long `close` waits for the thread that removes and empties files."""

FILES: Final = Family.BODY_FILES
_FAMILY_OF: Final = itemgetter(1)

_log: Final = logging.getLogger("basaltmq.store")


class BodyStore(RocksStore):
    """A `ManagedStore` on disk, created by `open_store` and `open_view`."""

    def __init__(
        self,
        path: Path,
        db: Rdict,
        options: StoreOptions,
        database: Options,
        *,
        sealer: Sealer | None = None,
        synced: SyncedFile | None = None,
        unreadable: Unreadable | None = None,
        reopen: Callable[[], Rdict] | None = None,
        held: Callable[[], Mapping[int, int]] | None = None,
    ) -> None:
        """`held` returns the open body files of a view."""
        super().__init__(
            path, db, options, database, sealer=sealer, synced=synced, unreadable=unreadable, reopen=reopen
        )
        self._files = BodyFiles(path / BODIES, held=held)
        self._recent = RecentBodies()
        self._written: dict[bytes, bytes] = {}
        """The bodies of the batch that is being written."""
        self._is_view = held is not None
        self._tidying = threading.Lock()
        self._tidier: threading.Thread | None = None
        self._wants_tidy = False
        self._is_stopping = False
        if unreadable is not None:
            self._watch_damage(unreadable)
        if not self._is_view and not self._files.load(decode_files(self.scan(FILES))):
            self.recount_bodies()

    # Reads

    def get(self, family: Family, key: bytes) -> bytes | None:
        if family is CONTENT and self._has_bodies():
            recent = self._recent.get(key)
            if recent is not None:
                self.require_open()
                return recent
            row = super().get(PLACES, key)
            if row is not None:
                return self.body(key, row)
        return super().get(family, key)

    def get_many(self, family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        if family is not CONTENT or not self._has_bodies():
            return super().get_many(family, keys)
        recent = [self._recent.get(key) for key in keys]
        others = [key for key, body in zip(keys, recent, strict=True) if body is None]
        rows = super().get_many(PLACES, others)
        small = iter(super().get_many(CONTENT, [key for key, row in zip(others, rows, strict=True) if row is None]))
        read = (next(small) if row is None else self.body(key, row) for key, row in zip(others, rows, strict=True))
        return [next(read) if body is None else body for body in recent]

    def scan(
        self, family: Family, start: bytes = b"", end: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[Row]:
        if family is not CONTENT or not self._has_bodies():
            return super().scan(family, start, end, reverse=reverse)
        with self._lock:
            places = super().scan(PLACES, start, end, reverse=reverse)
            small = super().scan(CONTENT, start, end, reverse=reverse)
            pin = self._files.pin()
        return with_bodies(places, small, self.body, pin, reverse=reverse)

    def snapshot(self, *families: Family) -> RocksSnapshot:
        if CONTENT not in families or not self._has_bodies():
            return super().snapshot(*families)
        with self._lock:
            cursors = {family: self._cursor(family, None) for family in (*families, PLACES)}
            return BodySnapshot(self, cursors, self.body, self._files.pin())

    def _has_bodies(self) -> bool:
        return self._is_view or bool(self._files.files)

    def body(self, key: bytes, row: bytes) -> bytes | None:
        """Return the body that a row points to. None if it was deleted meanwhile, or is unreadable, which is
        recorded."""
        try:
            while True:
                place = Place.decode(key, row)
                try:
                    return self._files.read(key, place)
                except FileNotFoundError:
                    # Moved or deleted since the row was read.
                    now = super().get(PLACES, key)
                    if now is None:
                        return None
                    if now == row:
                        path = self._files.directory / file_name(place.file)
                        raise CorruptionError(f"{path} is missing; it had the body {key.hex()}") from None
                    row = now
                except OSError as error:
                    raise CorruptionError(
                        f"{self._files.directory / file_name(place.file)} cannot be read: {error.strerror}"
                    ) from error
        except CorruptionError as error:
            if self._unreadable is None:
                raise
            self._unreadable.row(CONTENT, key, str(error))
            return None

    # Writes

    def _native(self, batch: Batch) -> tuple[WriteBatch, int]:
        ops, columns = batch.parts()
        if CONTENT not in map(_FAMILY_OF, ops) and not any(each.family is CONTENT for each in columns):
            return super()._native(batch)
        self._files.begin()
        self._written = {}
        try:
            diverted, body_bytes = self._diverted(batch.ops)
            native, size_bytes = super()._native(diverted)
            if size_bytes + body_bytes > BATCH_BYTES_MAX:
                raise LimitExceededError(
                    f"a batch of {size_bytes + body_bytes} bytes is over the limit of {BATCH_BYTES_MAX}; split it"
                )
        except BaseException as error:
            self._files.undo()
            self._written = {}
            if isinstance(error, StorageError):
                self.poison(error)
            raise
        if self._files.unsynced_bytes * 2 > UNSYNCED_BYTES_MAX:
            self._tidy_later()
        return native, size_bytes + body_bytes

    def _write_native(self, native: WriteBatch, options: WriteOptions) -> Exception | None:
        error = super()._write_native(native, options)
        if error is not None:
            self._files.undo()
            self._written = {}
            return error
        for key, body in self._written.items():
            self._recent.add(key, body)
        self._written = {}
        if self._files.is_due():
            self._tidy_later()
        self._files.begin()
        return None

    def _diverted(self, ops: list[Operation]) -> tuple[Batch, int]:
        """Append the large bodies, and return the batch with places instead of them, and the size of the bodies."""
        batch = Batch()
        body_bytes = sum([len(op[3]) for op in ops if op[1] is CONTENT and op[0] == PUT and is_large(op[2], op[3])])
        if body_bytes > BATCH_BYTES_MAX:
            raise LimitExceededError(f"a batch is over the limit of {BATCH_BYTES_MAX} bytes; split it")
        before: dict[bytes, Place | None] = {}

        def release(key: bytes) -> None:
            self._recent.drop(key)
            self._written.pop(key, None)
            place = before[key] if key in before else self._place(key)
            if place is not None:
                self._files.release(key, place)
            if place is not None or self.has_unreadable(PLACES):
                batch.delete(PLACES, key)
            before[key] = None

        for op in ops:
            kind, family, key, value = op
            if family is not CONTENT:
                batch.ops.append(op)
            elif kind == PUT and is_large(key, value):
                release(key)
                place = self._files.append(key, value)
                before[key] = place
                self._written[key] = value
                batch.put(PLACES, key, place.encode())
            else:
                batch.ops.append(op)
                if kind in (PUT, DELETE):
                    release(key)
                elif key < value:
                    if self.has_unreadable(PLACES):
                        batch.delete_range(PLACES, key, value)
                    for each in self._keys_of(key, value) | {each for each in before if key <= each < value}:
                        release(each)
        self._account(batch)
        return batch, body_bytes

    def _place(self, key: bytes) -> Place | None:
        row = super().get(PLACES, key) if self._files.files else None
        return None if row is None else Place.decode(key, row)

    def _keys_of(self, start: bytes, end: bytes) -> set[bytes]:
        return {key for key, _ in super().scan(PLACES, start, end)}

    def _account(self, batch: Batch) -> None:
        """Add the live bytes of the files that the batch touches, and what is durable as of now."""
        touched = self._files.touched()
        if not touched:
            return
        for number, live_bytes in touched.items():
            batch.put(FILES, encode_number(number), encode_live(live_bytes))
        forgotten, self._files.forgotten = self._files.forgotten, set()
        for number in forgotten:
            batch.delete(FILES, encode_number(number))
        batch.put(FILES, DURABLE_KEY, self._files.durable.encode())

    def _make_durable(self) -> None:
        self._files.sync(self._lock)
        with self._lock:
            idle = self._files.idle()
        super()._make_durable()
        with self._lock:
            self._files.dead |= idle
            if (self._files.dead and not self._files.pins) or self._files.wasteful():
                self._tidy_later()

    def is_behind(self) -> bool:
        return self._files.unsynced_bytes > UNSYNCED_BYTES_MAX or super().is_behind()

    # Space

    def size_bytes(self) -> int:
        return super().size_bytes() + self._files.size_bytes()

    def properties(self, family: Family | None = None) -> dict[str, int]:
        found = super().properties(family)
        if family is None or family is CONTENT:
            found["blob-bytes"] += self._files.size_bytes()
        return found

    def flush(self, family: Family | None = None, *, wait: bool = True) -> None:
        # An SST file must not refer to bodies that are not synced, because a power loss could remove them.
        self.sync()
        super().flush(family, wait=wait)

    def recount_bodies(self) -> None:
        """Count the live bytes of all files again, from the places."""
        live = dict.fromkeys(self._files.files, 0)
        for key, row in super().scan(PLACES):
            with contextlib.suppress(CorruptionError):
                place = Place.decode(key, row)
                live[place.file] = live.get(place.file, 0) + frame_bytes(key, place.size)
        batch = Batch()
        batch.delete_range(FILES, b"", b"\xff" * 16)
        for number, live_bytes in live.items():
            batch.put(FILES, encode_number(number), encode_live(live_bytes))
        self.write(batch)
        self._files.load(live)

    def tidy(self) -> None:
        """Remove dead files, and move live bodies out of files that are half garbage. Slow: call it in a thread."""
        with self._tidying:
            self._remove_and_move()

    def _remove_and_move(self) -> None:
        self.sync()
        self._files.remove_dead(self._lock)
        while not self._is_stopping:
            with self._lock:
                wasteful = [each for each in self._files.wasteful() if self._has_room(each)]
                self._files.has_changed = bool(wasteful)
            if not wasteful:
                return
            for file in wasteful:
                self._empty(file)
            self.sync()
            self._files.remove_dead(self._lock)

    def _tidy_later(self) -> None:
        """Run `tidy` in a thread, once more if it runs already. The lock is held."""
        if self._is_stopping or threading.current_thread() is self._tidier:
            return
        self._wants_tidy = True
        if self._tidier is None:
            self._tidier = threading.Thread(target=self._tidy, name="basalt-bodies", daemon=True)
            self._tidier.start()

    def _tidy(self) -> None:
        while True:
            with self._lock:
                if not self._wants_tidy or self._is_stopping:
                    self._tidier = None
                    return
                self._wants_tidy = False
            try:
                self.tidy()
            except (BasaltError, OSError) as error:
                # The store is closed or poisoned, or the disk is full. The files stay, and a later write tries again.
                _log.debug("body files of %s were not removed: %s", self.path, error)

    def _has_room(self, file: BodyFile) -> bool:
        """Whether the live bodies of a file can be moved before the file is removed."""
        disk = os.statvfs(self._files.directory)
        return disk.f_bavail * disk.f_frsize >= file.live_bytes + MOVE_FREE_BYTES

    def _empty(self, file: BodyFile) -> None:
        """Move the live bodies of a file to the current file."""
        path = self._files.directory / file_name(file.number)
        bodies: list[tuple[bytes, Place, bytes]] = []
        room = MOVE_BYTES
        for key, place in walk(path, file.number):
            if self._is_stopping:
                return
            if super().get(PLACES, key) != place.encode():
                continue
            try:
                body = self._files.read(key, place)
            except CorruptionError:
                file.is_stuck = True
                continue
            bodies.append((key, place, body))
            room -= len(body)
            if room <= 0:
                self._append_again(bodies)
                bodies, room = [], MOVE_BYTES
        self._append_again(bodies)
        # Bodies behind a damaged header stay.
        file.is_stuck = file.is_stuck or file.live_bytes > 0

    def _append_again(self, bodies: list[tuple[bytes, Place, bytes]]) -> None:
        with self._lock:
            self._require_writable()
            self._files.begin()
            batch = Batch()
            try:
                for key, place, body in bodies:
                    if super().get(PLACES, key) == place.encode():
                        moved = self._files.append(key, body)
                        self._files.release(key, place)
                        batch.put(PLACES, key, moved.encode())
                if batch:
                    self._account(batch)
                    self._write_rows(batch)
            except BaseException:
                self._files.undo()
                raise
            self._files.begin()

    def _write_rows(self, batch: Batch) -> None:
        """Write rows as they are: bodies among them are not diverted. The lock is held."""
        self._writes += 1
        self._was_logged = True
        error = super()._write_native(super()._native(batch)[0], self._logged)
        if error is not None:
            failure = self._translated(error)
            if not isinstance(failure, StoreStalledError):
                self.poison(failure)
            raise failure from error

    # Damage

    def _watch_damage(self, unreadable: Unreadable) -> None:
        stop_compaction = unreadable.on_damage
        unreadable.excise = self._excise

        def damaged(family: Family) -> None:
            if family is PLACES:
                self._files.keep_all()
            if stop_compaction is not None:
                stop_compaction(family)

        unreadable.on_damage = damaged
        if PLACES.label in unreadable.families:
            self._files.keep_all()

    def _excise(self, family: Family, start: bytes, end: bytes | None, fault: str) -> bool:
        """Take a range with a damaged block out of the database. Return whether that succeeded."""
        try:
            with self._lock:
                self._require_writable()
                batch = excised(self.path, self._create_checkpoint, family, start, end, fault)
                if batch is None:
                    return False
                self._write_rows(batch)
        except (BasaltError, OSError) as error:
            _log.error("the rows next to damaged ones stay hidden until the store is repaired: %s", error)
            return False
        return True

    # Operators

    def compact(self, family: Family | None = None) -> None:
        super().compact(family)
        if family is None or family is CONTENT:
            with self._lock:
                self._files.end_current()
            self.tidy()

    def checkpoint(self, target: Path, *, add_files: Callable[[Path], None] | None = None) -> None:
        pin = self._files.pin()

        def add_all(draft: Path) -> None:
            with self._lock:
                self._files.end_current()
            link_files(self.path / BODIES, draft / BODIES)
            if add_files is not None:
                add_files(draft)

        super().checkpoint(target, add_files=add_all)
        del pin

    def verify(self, progress: Callable[[int, int], None] | None = None) -> list[str]:
        pin = self._files.pin()
        found = super().verify(progress)
        del pin
        return found

    def close(self) -> None:
        self._is_stopping = True
        tidier = self._tidier
        if tidier is not None and tidier is not threading.current_thread():
            tidier.join(TIDY_WAIT_S)
        failure: BasaltError | None = None
        if self._error is None and not self._read_only:
            try:
                self._files.sync(self._lock)
            except OSError as error:
                failure = os_error(error, self.path)
                self.poison(failure)
        super().close()
        self._files.close()
        if failure is not None:
            raise failure

    def continue_as(self, fresh: RocksStore) -> None:
        assert isinstance(fresh, BodyStore), "opened by open_store"
        self._files = fresh._files
        self._recent = RecentBodies()
        self._is_stopping = False
        super().continue_as(fresh)
        assert self._unreadable is not None, "a store that is written to has it"
        self._unreadable.excise = self._excise


def is_large(key: bytes, body: bytes) -> bool:
    """Whether a body is stored in a body file."""
    return type(body) is bytes and len(body) >= LARGE_BYTES_MIN and 0 < len(key) <= KEY_BYTES_MAX
