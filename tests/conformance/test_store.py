"""Conformance of both stores, RocksDB and memory, with `store/api.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from basaltmq.errors import (
    InvalidArgumentError,
    LimitExceededError,
    StorageError,
    StoreClosedError,
    StorePoisonedError,
)
from basaltmq.store.api import Reader, Store
from basaltmq.store.batch import BATCH_BYTES_MAX, Batch
from basaltmq.store.families import Family
from basaltmq.store.keys.parts import prefix_range

A = Family.MESSAGES
B = Family.LEASES
C = Family.STREAM_RECORDS

pytestmark = pytest.mark.spec("A1")


def put(store: Store, family: Family, *rows: tuple[bytes, bytes]) -> None:
    batch = Batch()
    for key, value in rows:
        batch.put(family, key, value)
    store.write(batch)


def fill(store: Store, family: Family, count: int, value: bytes = b"v") -> list[bytes]:
    keys = [b"%06d" % number for number in range(count)]
    put(store, family, *((key, value) for key in keys))
    return keys


def keys_of(rows: Iterator[tuple[bytes, bytes]]) -> list[bytes]:
    return [key for key, _ in rows]


def test_written_rows_are_read_back(store: Store) -> None:
    put(store, A, (b"k", b"v"))
    assert store.get(A, b"k") == b"v"
    assert store.get(A, b"other") is None


def test_families_are_isolated(store: Store) -> None:
    for family in Family:
        put(store, family, (b"k", family.label.encode()))
    for family in Family:
        assert list(store.scan(family)) == [(b"k", family.label.encode())]


@pytest.mark.spec("C6")
@pytest.mark.promise("P2")
def test_batch_over_families_is_atomic(store: Store) -> None:
    put(store, A, (b"old", b"1"))
    batch = Batch()
    batch.delete(A, b"old")
    batch.put(A, b"k", b"a")
    batch.put(B, b"k", b"b")
    batch.put(C, b"k", b"c")
    store.write(batch)
    assert [store.get(family, b"k") for family in (A, B, C)] == [b"a", b"b", b"c"]
    assert store.get(A, b"old") is None


def test_last_operation_of_a_batch_wins(store: Store) -> None:
    put(store, A, (b"k3", b"0"), (b"k4", b"0"))
    batch = Batch()
    batch.put(A, b"k1", b"1")
    batch.put(A, b"k1", b"2")
    batch.put(A, b"k2", b"1")
    batch.delete(A, b"k2")
    batch.delete(A, b"k3")
    batch.put(A, b"k3", b"3")
    batch.delete_range(A, b"k4", b"k6")
    batch.put(A, b"k5", b"5")
    batch.put(A, b"k7", b"7")
    batch.delete_range(A, b"k7", b"k8")
    store.write(batch)
    assert list(store.scan(A)) == [(b"k1", b"2"), (b"k3", b"3"), (b"k5", b"5")]


def test_empty_batch_changes_nothing(store: Store) -> None:
    put(store, A, (b"k", b"v"))
    store.write(Batch())
    store.sync()
    assert list(store.scan(A)) == [(b"k", b"v")]


def test_get_many_keeps_order_and_returns_none_for_missing_keys(store: Store) -> None:
    put(store, A, (b"a", b"1"), (b"b", b""), (b"c", b"3"))
    assert store.get_many(A, [b"c", b"x", b"a", b"c", b"b"]) == [b"3", None, b"1", b"3", b""]
    assert store.get_many(A, []) == []
    assert store.get_many(A, (b"a",)) == [b"1"]


def test_get_many_accepts_large_lists(store: Store) -> None:
    keys = fill(store, A, 5000)
    assert store.get_many(A, [*keys, *keys, b"none"]) == [b"v"] * 10_000 + [None]


BOUNDS: list[tuple[bytes, bytes | None]] = [
    (b"", None),
    (b"", b""),
    (b"", b"\xff\xff"),
    (b"000003", None),
    (b"000003", b"000007"),
    (b"0000030", b"0000069"),
    (b"000003", b"000003"),
    (b"000007", b"000003"),
    (b"zzz", None),
    (b"", b"000000"),
    (b"", b"000000\x00"),
    (b"000599", b"000600"),
    (b"000100", b"000587"),
]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("start", "end"), BOUNDS)
@pytest.mark.parametrize("through_snapshot", [False, True])
def test_scans_respect_bounds_in_both_directions(
    store: Store, start: bytes, end: bytes | None, reverse: bool, through_snapshot: bool
) -> None:
    keys = fill(store, A, 600)
    expected = sorted((k for k in keys if k >= start and (end is None or k < end)), reverse=reverse)
    with store.snapshot(A) as snapshot:
        reader: Reader = snapshot if through_snapshot else store
        assert keys_of(reader.scan(A, start, end, reverse=reverse)) == expected


@pytest.mark.parametrize("reverse", [False, True])
def test_scans_of_an_empty_family_are_empty(store: Store, reverse: bool) -> None:
    assert list(store.scan(A, reverse=reverse)) == []


def test_prefix_scans_find_exactly_the_keys_of_the_prefix(store: Store) -> None:
    keys = [
        b"",
        b"a",
        b"a\x00",
        b"a\xfe",
        b"a\xff",
        b"a\xff\xff",
        b"b",
        b"\xff",
        b"\xff\x00",
        b"\xff\xff",
        b"\xff\xff\xff",
    ]
    put(store, A, *((key, b"") for key in keys))
    for prefix in (b"", b"a", b"a\xff", b"b", b"\xff", b"\xff\xff", b"c"):
        for reverse in (False, True):
            found = keys_of(store.scan(A, *prefix_range(prefix), reverse=reverse))
            assert found == sorted((key for key in keys if key.startswith(prefix)), reverse=reverse)


def test_delete_range_includes_the_start_and_excludes_the_end(store: Store) -> None:
    keys = fill(store, A, 10)
    batch = Batch()
    batch.delete_range(A, keys[3], keys[6])
    store.write(batch)
    assert keys_of(store.scan(A)) == keys[:3] + keys[6:]
    assert store.get_many(A, keys[2:7]) == [b"v", None, None, None, b"v"]


@pytest.mark.parametrize(("start", "end"), [(b"5", b"5"), (b"9", b"1"), (b"", b""), (b"1", b"")])
def test_reversed_range_deletes_nothing(store: Store, start: bytes, end: bytes) -> None:
    put(store, A, (b"5", b"v"))
    batch = Batch()
    batch.put(A, b"before", b"1")
    batch.delete_range(A, start, end)
    batch.put(A, b"after", b"1")
    store.write(batch)
    assert keys_of(store.scan(A)) == [b"5", b"after", b"before"]


def test_range_deletes_and_puts_apply_in_order(store: Store) -> None:
    keys = fill(store, A, 10)
    batch = Batch()
    batch.delete_range(A, b"", b"\xff")
    store.write(batch)
    put(store, A, (keys[4], b"again"))
    assert list(store.scan(A)) == [(keys[4], b"again")]


def test_scan_is_a_snapshot(store: Store) -> None:
    keys = fill(store, A, 1000)
    forward, backward, untouched = store.scan(A), store.scan(A, reverse=True), store.scan(A)
    first = next(forward)
    batch = Batch()
    batch.delete_range(A, keys[1], keys[900])
    batch.put(A, b"000000a", b"late")
    batch.put(A, keys[950], b"changed")
    store.write(batch)
    assert [first, *forward] == [(key, b"v") for key in keys]
    assert list(backward) == [(key, b"v") for key in reversed(keys)]
    assert keys_of(untouched) == keys
    assert len(list(store.scan(A))) == 102


@pytest.mark.promise("P2")
def test_snapshot_is_consistent_over_families(store: Store) -> None:
    keys = fill(store, A, 700)
    put(store, B, *((key, b"b") for key in keys))
    with store.snapshot(A, B) as snapshot:
        batch = Batch()
        batch.delete_range(A, keys[0], keys[600])
        batch.put(B, keys[5], b"late")
        batch.put(A, b"x", b"late")
        store.write(batch)
        batch = Batch()
        batch.delete_range(B, keys[300], keys[650])
        store.write(batch)
        assert list(snapshot.scan(A)) == [(key, b"v") for key in keys]
        assert list(snapshot.scan(B, reverse=True)) == [(key, b"b") for key in reversed(keys)]
        assert snapshot.get(A, keys[5]) == b"v"
        assert snapshot.get(A, b"x") is None
        assert snapshot.get(A, b"\xff") is None
        assert snapshot.get_many(B, [keys[5], b"x", keys[400]]) == [b"b", None, b"b"]
    assert store.get(A, keys[5]) is None


def test_scans_and_gets_of_one_snapshot_interleave(store: Store) -> None:
    keys = fill(store, A, 900)
    with store.snapshot(A) as snapshot:
        forward, backward = snapshot.scan(A), snapshot.scan(A, reverse=True)
        middle = snapshot.scan(A, keys[300], keys[600])
        up, down, between = [], [], []
        for number in range(900):
            up.append(next(forward)[0])
            down.append(next(backward)[0])
            if number < 300:
                between.append(next(middle)[0])
            assert snapshot.get(A, keys[(number * 7) % 900]) == b"v"
        assert up == keys
        assert down == keys[::-1]
        assert between == keys[300:600]
        for ended in (forward, backward, middle):
            assert next(ended, None) is None


def test_snapshot_refuses_other_families(store: Store) -> None:
    with store.snapshot(A) as snapshot, pytest.raises(StorageError, match="does not include family leases"):
        snapshot.get(B, b"k")


def test_closed_snapshot_refuses_reads_and_close_is_repeatable(store: Store) -> None:
    fill(store, A, 900)
    snapshot = store.snapshot(A)
    under_way = snapshot.scan(A)
    next(under_way)
    snapshot.close()
    snapshot.close()
    for call in (lambda: snapshot.get(A, b"k"), lambda: snapshot.scan(A), lambda: list(under_way)):
        with pytest.raises(StoreClosedError, match="snapshot is closed"):
            call()
    assert len(list(store.scan(A))) == 900


def test_dropped_scan_releases_its_resources(store: Store) -> None:
    keys = fill(store, A, 100)
    for _ in range(50):
        next(store.scan(A))
        store.scan(A)
        store.snapshot(A, B)
    assert keys_of(store.scan(A)) == keys


def test_empty_keys_and_values_are_rows(store: Store) -> None:
    put(store, A, (b"", b""), (b"k", b""))
    assert store.get(A, b"") == b""
    assert store.get_many(A, [b"", b"k"]) == [b"", b""]
    assert list(store.scan(A)) == [(b"", b""), (b"k", b"")]
    assert list(store.scan(A, reverse=True)) == [(b"k", b""), (b"", b"")]
    with store.snapshot(A) as snapshot:
        assert snapshot.get(A, b"") == b""
    batch = Batch()
    batch.delete(A, b"")
    store.write(batch)
    assert store.get(A, b"") is None


@pytest.mark.promise("P8")
def test_long_keys_and_large_values_round_trip(store: Store) -> None:
    key = bytes(range(256)) * 256 + b"tail"
    value = bytes(range(251)) * (16 * 1024 * 1024 // 251 + 1)
    put(store, A, (key, b"1"), (key + b"\x00", b"2"))
    put(store, C, (b"large", value), (b"larger", value[1:]))
    assert store.get(A, key) == b"1"
    assert keys_of(store.scan(A, key)) == [key, key + b"\x00"]
    assert store.get(C, b"large") == value
    assert [row[1] for row in store.scan(C, reverse=True)] == [value[1:], value]
    with store.snapshot(C) as snapshot:
        assert snapshot.get(C, b"large") == value
        assert sum(len(v) for _, v in snapshot.scan(C)) == 2 * len(value) - 1


@pytest.mark.spec("C6")
@pytest.mark.promise("P2", "P8")
def test_batch_over_the_size_limit_is_refused(store: Store) -> None:
    chunk = bytes(BATCH_BYTES_MAX // 8)
    batch = Batch()
    batch.put(A, b"first", b"1")
    for number in range(8):
        batch.put(C, b"%d" % number, chunk)
    with pytest.raises(LimitExceededError, match=f"over the limit of {BATCH_BYTES_MAX}"):
        store.write(batch)
    assert store.get(A, b"first") is None
    assert list(store.scan(C)) == []
    put(store, A, (b"k", b"v"))
    assert store.get(A, b"k") == b"v"


@pytest.mark.spec("C6")
@pytest.mark.promise("P2")
@pytest.mark.parametrize("bad", ["text", bytearray(b"k"), memoryview(b"k"), None, 7])
def test_batch_with_other_types_than_bytes_is_refused(store: Store, bad: object) -> None:
    for place in ("key", "value", "delete", "range"):
        batch = Batch()
        batch.put(A, b"first", b"1")
        if place == "key":
            batch.put(A, bad, b"v")  # type: ignore[arg-type]
        elif place == "value":
            batch.put(A, b"k", bad)  # type: ignore[arg-type]
        elif place == "delete":
            batch.delete(A, bad)  # type: ignore[arg-type]
        else:
            batch.delete_range(A, b"", bad)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="bytes only"):
            store.write(batch)
    assert list(store.scan(A)) == []


def test_writes_without_wal_are_readable(store: Store) -> None:
    batch = Batch()
    batch.put(A, b"k", b"v")
    store.write(batch, wal=False, wait_ms=0)
    assert store.get(A, b"k") == b"v"


def test_size_grows_with_writes(store: Store) -> None:
    before = store.size_bytes()
    put(store, A, (b"a", bytes(100_000)))
    put(store, C, (b"c", bytes(300_000)))
    assert store.size_bytes() - before >= 400_000


CALLS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get(A, b"k"),
    "get_many": lambda store: store.get_many(A, [b"k"]),
    "scan": lambda store: list(store.scan(A)),
    "empty scan": lambda store: list(store.scan(A, b"b", b"a")),
    "snapshot": lambda store: store.snapshot(A),
    "write": lambda store: put(store, A, (b"k", b"late")),
    "write nothing": lambda store: store.write(Batch()),
    "sync": lambda store: store.sync(),
    "size_bytes": lambda store: store.size_bytes(),
    "is_behind": lambda store: store.is_behind(),
}


@pytest.mark.parametrize("call", sorted(CALLS))
def test_calls_after_close_are_refused(store: Store, call: str) -> None:
    put(store, A, (b"k", b"v"))
    store.close()
    store.close()
    with pytest.raises(StoreClosedError, match="is closed"):
        CALLS[call](store)


@pytest.mark.promise("P11")
@pytest.mark.parametrize("call", sorted(CALLS))
def test_calls_on_a_poisoned_store_name_the_first_cause(store: Store, call: str) -> None:
    put(store, A, (b"k", b"v"))
    store.poison(OSError("the disk went away"))
    store.poison(OSError("a later one"))
    for _ in range(2):
        with pytest.raises(StorePoisonedError, match=r"open it again.*the disk went away"):
            CALLS[call](store)


@pytest.mark.promise("P11")
def test_scans_and_snapshots_end_with_the_store(store: Store) -> None:
    fill(store, A, 2000)
    scan, snapshot = store.scan(A), store.snapshot(A)
    inner = snapshot.scan(A)
    next(scan)
    next(inner)
    store.poison(OSError("gone"))
    for call in (lambda: list(scan), lambda: list(inner), lambda: snapshot.get(A, b"k"), lambda: snapshot.scan(A)):
        with pytest.raises(StorePoisonedError):
            call()


def test_scans_and_snapshots_are_refused_after_close(store: Store) -> None:
    fill(store, A, 2000)
    scan, snapshot = store.scan(A), store.snapshot(A)
    inner = snapshot.scan(A)
    next(scan)
    next(inner)
    store.close()
    for call in (lambda: list(scan), lambda: list(inner), lambda: snapshot.get(A, b"k"), lambda: snapshot.scan(A)):
        with pytest.raises(StoreClosedError):
            call()
    snapshot.close()


def test_poisoned_store_can_be_closed(store: Store) -> None:
    put(store, A, (b"k", b"v"))
    store.poison(OSError("gone"))
    store.close()
    with pytest.raises(StoreClosedError):
        store.get(A, b"k")
    store.poison(OSError("late"))
    with pytest.raises(StoreClosedError):
        store.get(A, b"k")


@pytest.mark.promise("P2")
def test_batches_are_atomic_for_other_threads(store: Store) -> None:
    """A token moves between two keys of two families. Readers never see it in both or in none."""
    put(store, A, (b"token", b"0"))
    stop = threading.Event()

    def move(rounds: int) -> None:
        for number in range(rounds):
            batch = Batch()
            here, there = (A, B) if number % 2 == 0 else (B, A)
            batch.delete(here, b"token")
            batch.put(there, b"token", b"%d" % number)
            batch.put(A, b"pair", b"%d" % number)
            batch.put(A, b"twin", b"%d" % number)
            store.write(batch)
        stop.set()

    def watch() -> int:
        looks = 0
        while not stop.is_set() or looks == 0:
            with store.snapshot(A, B) as snapshot:
                seen = [snapshot.get(family, b"token") is not None for family in (A, B)]
            assert sum(seen) == 1
            pair, twin = store.get_many(A, [b"pair", b"twin"])
            assert pair == twin
            rows = dict(store.scan(A))
            assert rows.get(b"pair") == rows.get(b"twin")
            looks += 1
        return looks

    with ThreadPoolExecutor(3) as pool:
        watchers = [pool.submit(watch) for _ in range(2)]
        pool.submit(move, 600).result(60)
        assert all(watcher.result(60) > 0 for watcher in watchers)


def test_parallel_writes_lose_nothing(store: Store) -> None:
    def work(worker: int) -> None:
        for number in range(100):
            put(store, A, (b"%d-%03d" % (worker, number), b"a"), (b"shared", b"%d" % worker))
            store.sync()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, worker) for worker in range(4)]:
            done.result(60)
    assert keys_of(store.scan(A)) == [b"%d-%03d" % (w, n) for w in range(4) for n in range(100)] + [b"shared"]


@pytest.mark.parametrize("round_number", range(3))
def test_close_during_use_raises_store_closed_in_every_thread(store: Store, round_number: int) -> None:
    """Every operation in progress gets StoreClosedError, and close returns."""
    keys = fill(store, A, 2000, bytes(200))
    uses: list[Callable[[int], object]] = [
        lambda n: store.get(A, keys[n % 2000]),
        lambda n: store.get_many(A, keys),
        lambda n: list(store.scan(A)),
        lambda n: put(store, B, (b"%d" % n, b"v")),
        lambda n: store.sync(),
        lambda n: store.snapshot(A).get(A, keys[0]),
        lambda n: store.size_bytes(),
    ]
    begun = threading.Barrier(len(uses) + 1)

    def use(call: Callable[[int], object]) -> str:
        call(0)
        begun.wait(30)
        number = 0
        try:
            while True:
                call(number)
                number += 1
        except StoreClosedError:
            return "closed"

    with ThreadPoolExecutor(len(uses)) as pool:
        running = [pool.submit(use, call) for call in uses]
        begun.wait(30)
        store.close()
        assert [each.result(60) for each in running] == ["closed"] * len(uses)
