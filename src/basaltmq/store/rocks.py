"""The store on RocksDB, through `rocksdict`.

These properties of `rocksdict` 0.3.29 shape this module. A test pins each one:

- A `Snapshot` is consistent for gets but not for iteration; an iterator is consistent as of its creation. So our
  snapshot is one iterator per family, all created together under the write lock (see `rocks_cursor`).
- `ReadOptions.set_iterate_lower_bound` sets the upper bound. A reverse scan checks its lower bound itself.
- `write` holds the GIL, so a stalled write would block every thread. Writes set `no_slowdown` and wait outside.
  `flush_wal`, `compact_range` and multi-key reads release the GIL and can run in parallel with the event loop.
- The database stays open while any handle or iterator exists. The store tracks cursors and closes them in `close`.
- `close` fails while another thread is inside a call that released the GIL. So it rejects new calls, then waits.
- A DeleteRange whose end precedes its start is applied up to that operation and logged, and then every later open
  fails. Such a range is empty, so the store drops it.

Invariants: `_error` is set once, and finally to StoreClosedError. It is checked under `_lock` before a write, so
nothing is written after `close` began. Cursors and handles are created under `_lock`, and only while `_error` is None.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import Final, NoReturn

from rocksdict import Checkpoint, IngestExternalFileOptions, Options, Rdict, ReadOptions, WriteBatch, WriteOptions

from basaltmq.errors import (
    BasaltError,
    CorruptionError,
    InvalidArgumentError,
    InvalidConfigError,
    LimitExceededError,
    StorageError,
    StoreClosedError,
    StorePoisonedError,
    StoreReadOnlyError,
    StoreStalledError,
    is_disk_full,
)
from basaltmq.store.batch import BATCH_BYTES_MAX, DELETE, PUT, Batch, Operation
from basaltmq.store.checkpoint import write_checkpoint
from basaltmq.store.directory import MARKER, read_marker
from basaltmq.store.families import BODIES, Family
from basaltmq.store.forks import in_child, never_free
from basaltmq.store.integrity.seals import Sealer
from basaltmq.store.integrity.synced import SyncedFile
from basaltmq.store.options import UNFLUSHED_MAX, StoreOptions
from basaltmq.store.ranges import Piece
from basaltmq.store.rocks_cursor import SKIPPED_MAX, Cursor, RocksSnapshot, Run
from basaltmq.store.rocks_errors import translate
from basaltmq.store.rocks_properties import DATABASE_PROPERTIES, PROPERTIES, SIZES, UNFLUSHED, families_of
from basaltmq.store.salvage.unreadable import NOT_COMPACTED, SKIPPABLE, Unreadable, scan_past
from basaltmq.store.salvage.verify import verify, verify_open

CLOSE_WAIT_S: Final = 60.0
"""How long `close` waits for running calls. A longer call means that the disk does not respond."""

_EXHAUST: Final[partial[deque[None]]] = partial(deque, maxlen=0)  # runs an iterator of calls for their side effects
_PARTS: Final = "_db _database _families _handles _sealer _synced _unreadable _logged_sequence _was_logged _on_close"


class RocksStore:
    """A `ManagedStore` on disk, created by `open_store`."""

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
    ) -> None:
        self.path = path
        self._db = db
        self._database = database
        self.options = options
        # A view shows one point in time; `refresh` opens a new database.
        self._reopen = reopen
        self._read_only = reopen is not None
        self._on_refresh: list[Callable[[], None]] = []
        self._sealer = sealer
        self._synced = synced
        self._unreadable = unreadable
        self._logged_sequence = 0
        """The sequence number of the last WAL-logged change. Valid only if `_was_logged` is False."""
        self._was_logged = False
        self._families = families_of(db)
        if unreadable is not None:
            unreadable.on_damage = lambda family: self._families[family].set_options(NOT_COMPACTED)
        self._handles = [] if self._read_only else [db.get_column_family_handle(f.label) for f in Family]
        self._lock = threading.RLock()
        self._close_lock = threading.Lock()
        self._error: StorageError | None = None
        self._cursors: weakref.WeakSet[Cursor | Run] = weakref.WeakSet()
        self._on_close: list[Callable[[], None]] = []
        self._wrote: Callable[[int], None] | None = None
        self._writes = 0
        self._logged = WriteOptions()
        self._logged.no_slowdown = True
        self._unlogged = WriteOptions()
        self._unlogged.no_slowdown = True
        # The type stub declares a method; it is a property.
        self._unlogged.disable_wal = True  # type: ignore[method-assign, assignment]
        self._pid = os.getpid()
        in_child(self._disable_in_child)

    def get(self, family: Family, key: bytes) -> bytes | None:
        self.require_open()
        try:
            value: bytes | None = self._families[family].get(key)
        except Exception as error:
            translated = self._translated(error)
            unreadable = self._skippable(family, translated)
            if unreadable is None:
                raise translated from error
            unreadable.row(family, key, str(error))
            return None
        return value

    def get_many(self, family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        self.require_open()
        try:
            values: list[bytes | None] = self._families[family].get(list(keys))  # type: ignore[assignment]
        except Exception as error:
            translated = self._translated(error)
            if self._skippable(family, translated) is None:
                raise translated from error
            return [self.get(family, key) for key in keys]
        return values

    def scan(
        self, family: Family, start: bytes = b"", end: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        if end is not None and start >= end:
            self.require_open()
            return iter(())
        reading = ReadOptions()
        if end is not None:
            reading.set_iterate_upper_bound(end)
        with self._lock:
            cursor = self._cursor(family, reading)
        if self._unreadable is None or reverse or family not in SKIPPABLE:
            return cursor.scan_once(start, end, reverse=reverse)
        return scan_past(
            self._unreadable, family, self._families[family], cursor, partial(self._locked_cursor, family), start, end
        )

    def _locked_cursor(self, family: Family, reading: ReadOptions) -> Cursor:
        with self._lock:
            return self._cursor(family, reading)

    def read_pieces(
        self, family: Family, start: bytes, end: bytes, rows_max: int, bytes_max: int, piece_rows: int
    ) -> tuple[list[Piece], bool]:
        """Return the first rows of a range, and whether more may follow (see `ranges`)."""
        if start >= end or rows_max < 1:
            self.require_open()
            return [], start < end
        reading = ReadOptions()
        reading.set_iterate_upper_bound(end)
        run = self._run(family, start, reading)
        try:
            pieces, more = run.read(rows_max, bytes_max, piece_rows)
        finally:
            run.close()
        if more:
            return pieces, True
        # `items` also ends at a damaged block, without an error. So a scan reads the rest.
        begin = pieces[-1].keys[-1] + b"\0" if pieces else start
        done = sum([len(piece.keys) for piece in pieces])
        rest = list(islice(self.scan(family, begin, end), rows_max - done))
        if rest:
            pieces.append(Piece([], [], []))
            pieces[-1].add(rest)
        return pieces, done + len(rest) >= rows_max

    def read_ranges(
        self, family: Family, ranges: Sequence[tuple[bytes, bytes, int]], bytes_max: int
    ) -> list[list[tuple[bytes, bytes]] | None]:
        """Return the first rows of many ascending ranges, in one pass (see `ranges`)."""
        if not ranges:
            self.require_open()
            return []
        reading = ReadOptions()
        reading.set_iterate_upper_bound(ranges[-1][1])
        reading.set_max_skippable_internal_keys(SKIPPED_MAX)
        run = self._run(family, ranges[0][0], reading)
        try:
            found, bytes_max = run.read_ranges(ranges, bytes_max)
        finally:
            run.close()
        if len(found) == len(ranges) or bytes_max <= 0:
            return [*found]
        with self._lock:
            cursor = self._cursor(family, reading)
        try:
            return [*found, *cursor.read_ranges(ranges[len(found) :], bytes_max)]
        except CorruptionError as error:
            if self._skippable(family, error) is None:
                raise
        finally:
            cursor.close()
        return [*found, *([*islice(self.scan(family, start, end), most)] for start, end, most in ranges[len(found) :])]

    def _run(self, family: Family, start: bytes, reading: ReadOptions) -> Run:
        with self._lock:
            self.require_open()
            try:
                run = Run(self, self._families[family].items(from_key=start, read_opt=reading))  # type: ignore[arg-type]
            except Exception as error:
                raise self._translated(error) from error
            self._cursors.add(run)
            return run

    def snapshot(self, *families: Family) -> RocksSnapshot:
        with self._lock:
            return RocksSnapshot(self, {family: self._cursor(family, None) for family in families})

    def _cursor(self, family: Family, reading: ReadOptions | None) -> Cursor:
        """Return a cursor on the current state. The lock is held."""
        self.require_open()
        try:
            cursor = Cursor(self, self._families[family].iter(reading))
        except Exception as error:
            raise self._translated(error) from error
        self._cursors.add(cursor)
        return cursor

    def write(self, batch: Batch, *, wal: bool = True, wait_ms: int | None = None) -> None:
        options = self._logged if wal else self._unlogged
        with self._lock:
            self._require_writable()
            if not batch:
                return
            self._writes += 1
            native, size_bytes = self._native(batch)
            if wal:
                self._was_logged = True
            elif self._was_logged:
                self._logged_sequence = self._last_logged()
                self._was_logged = False
            error = self._write_native(native, options)
        if error is not None:
            self._write_failed(error, batch, options, wait_ms)
        if self._wrote is not None:
            self._wrote(size_bytes)

    def writes(self) -> int:
        return self._writes

    def _native(self, batch: Batch) -> tuple[WriteBatch, int]:
        """Return the batch as a RocksDB WriteBatch, and its size in bytes."""
        native = WriteBatch(raw_mode=True)
        ops, columns = batch.parts()
        try:
            done = 0
            for at, family, keys, values in columns:
                if done < at:
                    self._add_ops(native, ops[done:at])
                    done = at
                handle = self._handles[family]
                # `map` calls C from C, so a row costs no interpreter overhead.
                if values is None:
                    _EXHAUST(map(native.delete, keys, repeat(handle)))
                else:
                    _EXHAUST(map(native.put, keys, values, repeat(handle)))
            if done < len(ops):
                self._add_ops(native, ops[done:] if done else ops)
        except Exception as error:
            raise InvalidArgumentError(f"a batch takes keys and values of type bytes only: {error}") from error
        size_bytes = native.size_in_bytes()
        if size_bytes > BATCH_BYTES_MAX:
            raise LimitExceededError(f"a batch of {size_bytes} bytes is over the limit of {BATCH_BYTES_MAX}; split it")
        return native, size_bytes

    def _add_ops(self, native: WriteBatch, ops: list[Operation]) -> None:
        put = native.put
        delete = native.delete
        handles = self._handles
        last = Family.DEFAULT
        handle = handles[last]
        for kind, family, key, value in ops:
            if family is not last:
                last, handle = family, handles[family]
            if kind == PUT:
                put(key, value, handle)
            elif kind == DELETE:
                delete(key, handle)
            elif key < value:
                native.delete_range(key, value, handle)

    def _write_failed(self, error: Exception, batch: Batch, options: WriteOptions, wait_ms: int | None) -> None:
        """Retry during a write stall. Any other error leaves memory and disk inconsistent and poisons the store."""
        limit_ms = self.options.stall_wait_ms_max if wait_ms is None else wait_ms
        deadline = time.monotonic() + limit_ms / 1000
        pause_s = 0.001
        while True:
            translated = self._translated(error)
            if not isinstance(translated, StoreStalledError):
                self._note_damage(translated)
                self.poison(translated)
                raise translated from error
            if time.monotonic() + pause_s > deadline:
                raise translated from error
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.05)
            with self._lock:
                self._require_writable()
                self._writes += 1
                # RocksDB consumes a rejected WriteBatch too, so build it again.
                native, _ = self._native(batch)
                again = self._write_native(native, options)
                if again is None:
                    return
                error = again

    def _write_native(self, native: WriteBatch, options: WriteOptions) -> Exception | None:
        """Write a batch and return its error, if any. The lock is held."""
        try:
            self._db.write(native, options)
        except Exception as error:
            return error
        return None

    def sync(self) -> None:
        with self._lock:
            self._require_writable()
            sequence = self._last_logged()
        try:
            self._make_durable()
        except Exception as error:
            self._fail(error)
        if self._synced is not None:
            self._synced.note(sequence)

    def _make_durable(self) -> None:
        self._db.flush_wal(True)

    def _last_logged(self) -> int:
        """Return the sequence number of the last WAL-logged change. The lock is held."""
        return int(self._db.latest_sequence_number()) if self._was_logged else self._logged_sequence

    def size_bytes(self) -> int:
        return self._measure(self._families, SIZES)

    def is_behind(self) -> bool:
        return any(self._measure([self._families[each]], (UNFLUSHED,)) >= UNFLUSHED_MAX for each in BODIES)

    def poison(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = StorePoisonedError(
                    f"the store at {self.path} stopped after an I/O error; open it again: {error}",
                    is_disk_full(error),
                )

    def _disable_in_child(self) -> None:
        """Disable the store in a forked child (see `forks`). The thread that held a lock does not exist here."""
        self._lock = threading.RLock()
        self._close_lock = threading.Lock()
        if not isinstance(self._error, StoreClosedError):
            never_free([*self._families, *self._handles, *self._cursors, self._database])
            self._error = StoreClosedError(
                f"the store at {self.path} was opened by process {self._pid}; "
                "a forked child cannot use it: open a view in the child, or open the store after the parent closed it"
            )

    def close(self) -> None:
        with self._close_lock:
            with self._lock:
                if isinstance(self._error, StoreClosedError):
                    return
                sound = self._error is None and not self._read_only
                self._error = StoreClosedError(f"the store at {self.path} is closed")
            failure: BasaltError | None = None
            try:
                if sound:
                    for family in self._families:
                        family.flush(True)
            except Exception as error:
                failure = translate(error, self.path)
            self._close_database()
            for action in self._on_close:
                action()
            if failure is not None:
                raise failure

    def _close_database(self) -> None:
        for cursor in list(self._cursors):
            cursor.close()
        self._handles.clear()
        if not self._read_only:
            # Cancel running compactions, which may take minutes; they leave no trace. After this call RocksDB does not
            # flush, as a poisoned store requires.
            self._db.cancel_all_background(True)
        self._close_families(self._families)

    def _close_families(self, families: list[Rdict]) -> None:
        deadline = time.monotonic() + CLOSE_WAIT_S
        # The default family is the database itself. Close it last: it stays open while another handle exists.
        for family in reversed(families):
            while True:
                try:
                    family.close()
                    break
                except RuntimeError as error:
                    if time.monotonic() > deadline:
                        raise StorageError(
                            f"the store at {self.path} is still in use after {CLOSE_WAIT_S:.0f} s; "
                            "the disk does not respond, and the store stays locked until this process ends"
                        ) from error
                    time.sleep(0.001)
                except Exception:
                    # The family is closed. Only the flush in `rocksdict` failed, and `close` has flushed before.
                    break

    def continue_as(self, fresh: RocksStore) -> None:
        """Take over the database of another store object, which has no other user. This one must be closed."""
        with self._close_lock, self._lock:
            assert isinstance(self._error, StoreClosedError), "only a closed store gets another database"
            for name in _PARTS.split():
                setattr(self, name, getattr(fresh, name))
            self._error = None

    def on_write(self, listener: Callable[[int], None]) -> None:
        self._wrote = listener

    def on_close(self, action: Callable[[], None]) -> None:
        self._on_close.append(action)

    def set_options(self, options: Mapping[str, str], family: Family | None = None) -> None:
        self._require_writable()
        for name, value in options.items():
            if value.strip().startswith("-"):
                # RocksDB parses -1 as the largest unsigned number.
                raise InvalidConfigError(f"the value for option {name!r} cannot be negative: {value}")
        if not options:
            return
        try:
            for each in self._chosen(family):
                each.set_options(dict(options))
        except Exception as error:
            raise self._translated(error) from error
        finally:
            if self._sealer is not None:
                self._sealer.after_options()

    def flush(self, family: Family | None = None, *, wait: bool = True) -> None:
        self._require_writable()
        try:
            for each in self._chosen(family):
                each.flush(wait)
        except Exception as error:
            self._fail(error)
        if self._synced is not None:
            self._synced.note(0, check_directory=True)

    def ingest(self, family: Family, tables: Sequence[Path]) -> None:
        """Ingest SST files made by `SstFileWriter`, all or none. The files move into the database."""
        self._require_writable()
        how = IngestExternalFileOptions()
        how.set_move_files(True)
        with self._lock:
            # Ingested SST files get a sequence number but are not in the WAL.
            self._logged_sequence = self._last_logged()
            self._was_logged = False
        try:
            self._families[family].ingest_external_file([str(path) for path in tables], how)
        except Exception as error:
            self._fail(error)

    def compact(self, family: Family | None = None) -> None:
        self._require_writable()
        if self._unreadable is not None:
            self._unreadable.require_none(family)
        try:
            for each in self._chosen(family):
                each.compact_range(None, None)
        except Exception as error:
            translated = self._translated(error)
            self._note_damage(translated)
            raise translated from error

    def properties(self, family: Family | None = None) -> dict[str, int]:
        chosen = self._chosen(family)
        found = {name: self._measure(chosen, (rocks_name,)) for name, rocks_name in PROPERTIES.items()}
        if family is None:
            found |= {name: self._measure([self._db], (each,)) for name, each in DATABASE_PROPERTIES.items()}
        return found

    def background_errors(self) -> int:
        """Return the number of failed flushes and compactions. After one, compaction stops until a reopen."""
        return self._measure([self._db], (DATABASE_PROPERTIES["background-errors"],))

    def _measure(self, families: Sequence[Rdict], names: Sequence[str]) -> int:
        self.require_open()
        try:
            return sum(family.property_int_value(name) or 0 for family in families for name in names)
        except Exception as error:
            raise self._translated(error) from error

    def statistics(self) -> dict[str, str]:
        self.require_open()
        if not self.options.statistics:
            raise InvalidConfigError("statistics are off; open the store with statistics=True")
        lines = [line.partition(" ") for line in (self._database.get_statistics() or "").splitlines()]
        return {name: figures for name, _, figures in lines}

    def checkpoint(self, target: Path, *, add_files: Callable[[Path], None] | None = None) -> None:
        self._require_writable()
        marker = read_marker(self.path)
        if marker is None:
            raise CorruptionError(f"{self.path / MARKER} is missing; restore it from a backup of this store")
        write_checkpoint(self.path, target, self._create_checkpoint, self._sealer, marker, add_files)

    def unreadable(self) -> int:
        """Return the number of unreadable row ranges found."""
        return 0 if self._unreadable is None else self._unreadable.count

    def has_unreadable(self, family: Family) -> bool:
        return self._unreadable is not None and family.label in self._unreadable.families

    def verify(self, progress: Callable[[int, int], None] | None = None) -> list[str]:
        self.require_open()
        if self._sealer is not None:
            return verify_open(self.path, self._create_checkpoint, self._sealer, progress)
        return verify(self.path, progress)

    def _create_checkpoint(self, target: str) -> None:
        try:
            Checkpoint(self._db).create_checkpoint(target)
        except Exception as error:
            raise self._translated(error) from error

    def refresh(self) -> None:
        """Make a read-only view catch up with the writer. Closes its open scans and snapshots."""
        self.require_open()
        if self._reopen is None:
            return
        with self._close_lock:
            db = self._reopen()
            with self._lock:
                self.require_open()
                before, self._families = self._families, families_of(db)
                self._db = db
                for cursor in list(self._cursors):
                    cursor.close()
            self._close_families(before)
            for action in self._on_refresh:
                action()

    def on_refresh(self, action: Callable[[], None]) -> None:
        self._on_refresh.append(action)

    def _chosen(self, family: Family | None) -> list[Rdict]:
        return self._families if family is None else [self._families[family]]

    def require_open(self) -> None:
        """Raise the store's error, if any: a new object each time, because a shared one would collect tracebacks."""
        error = self._error
        if error is not None:
            raise type(error)(*error.args)

    def _require_writable(self) -> None:
        self.require_open()
        if self._read_only:
            raise StoreReadOnlyError(f"{self.path} was opened read-only")

    def _skippable(self, family: Family, error: BasaltError) -> Unreadable | None:
        """Return where to record an unreadable row, if skipping the row loses nothing else."""
        return self._unreadable if family in SKIPPABLE and isinstance(error, CorruptionError) else None

    def _translated(self, error: Exception) -> BasaltError:
        """Translate an exception. A call that raced with `close` gets StoreClosedError."""
        if isinstance(self._error, StoreClosedError):
            return StoreClosedError(*self._error.args)
        return translate(error, self.path)

    def _fail(self, error: Exception) -> NoReturn:
        """Poison the store, because memory and disk may differ, and raise."""
        translated = self._translated(error)
        self._note_damage(translated)
        self.poison(translated)
        raise translated from error

    def _note_damage(self, error: BasaltError) -> None:
        """Record a damaged SST file that a background job met. Its family is not compacted after the next open."""
        if self._unreadable is not None and isinstance(error, CorruptionError):
            self._unreadable.table(str(error))
