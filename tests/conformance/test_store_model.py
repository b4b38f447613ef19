"""Random operations on every store, compared with a model of dicts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from basaltmq.store.api import Snapshot, Store
from basaltmq.store.batch import DELETE, PUT, Batch, Operation
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore
from basaltmq.store.open import open_store

FAMILIES = (Family.MESSAGES, Family.LEASES, Family.STREAM_RECORDS, Family.MESSAGE_CONTENT)
SNAPSHOTS_MAX = 3

# A small alphabet, so that keys collide. 0x00 and 0xff test bounds.
KEYS = st.binary(max_size=3).map(lambda raw: bytes(b"\x00\x01a\xff"[byte % 4] for byte in raw))
VALUES = st.binary(max_size=8) | st.just(b"\xff")
# A value with this prefix is repeated this many times, so that it is stored in a blob file or a body file.
LARGE = b"\xff"
LARGE_FACTOR = 6000
PLACES = st.sampled_from(FAMILIES)
OPERATIONS = st.one_of(
    st.tuples(st.just(PUT), PLACES, KEYS, VALUES),
    st.tuples(st.just(DELETE), PLACES, KEYS, st.just(b"")),
    st.tuples(st.just(2), PLACES, KEYS, KEYS),
)

Model: TypeAlias = dict[Family, dict[bytes, bytes]]


def apply(model: Model, operations: list[Operation]) -> None:
    for kind, family, key, value in operations:
        rows = model[family]
        if kind == PUT:
            rows[key] = value
        elif kind == DELETE:
            rows.pop(key, None)
        else:
            for each in [k for k in rows if key <= k < value]:
                del rows[each]


def expected(rows: dict[bytes, bytes], start: bytes, end: bytes | None, reverse: bool) -> list[tuple[bytes, bytes]]:
    chosen = [(key, value) for key, value in rows.items() if key >= start and (end is None or key < end)]
    return sorted(chosen, reverse=reverse)


class StoreHistory(RuleBasedStateMachine):
    """One store, its model, and snapshots with copies of the model."""

    store: Store

    def __init__(self) -> None:
        super().__init__()
        self.model: Model = {family: {} for family in FAMILIES}
        self.snapshots: list[tuple[Snapshot, Model]] = []
        self.scans: list[tuple[Iterator[tuple[bytes, bytes]], list[tuple[bytes, bytes]]]] = []

    def open(self) -> None:
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self.open()

    @rule(operations=st.lists(OPERATIONS, max_size=12), wal=st.booleans())
    def write(self, operations: list[Operation], wal: bool) -> None:
        operations = [
            (kind, family, key, value * LARGE_FACTOR if kind == PUT and value.startswith(LARGE) else value)
            for kind, family, key, value in operations
        ]
        batch = Batch()
        batch.ops = operations
        self.store.write(batch, wal=wal)
        apply(self.model, operations)

    @rule(family=PLACES, keys=st.lists(KEYS, max_size=8))
    def get(self, family: Family, keys: list[bytes]) -> None:
        rows = self.model[family]
        assert self.store.get_many(family, keys) == [rows.get(key) for key in keys]
        assert [self.store.get(family, key) for key in keys] == [rows.get(key) for key in keys]

    @rule(family=PLACES, start=KEYS, end=st.none() | KEYS, reverse=st.booleans())
    def scan(self, family: Family, start: bytes, end: bytes | None, reverse: bool) -> None:
        found = list(self.store.scan(family, start, end, reverse=reverse))
        assert found == expected(self.model[family], start, end, reverse)

    @precondition(lambda self: len(self.snapshots) < SNAPSHOTS_MAX)
    @rule()
    def take_snapshot(self) -> None:
        moment = {family: dict(rows) for family, rows in self.model.items()}
        self.snapshots.append((self.store.snapshot(*FAMILIES), moment))

    @precondition(lambda self: self.snapshots)
    @rule(
        which=st.integers(0, SNAPSHOTS_MAX - 1),
        family=PLACES,
        start=KEYS,
        end=st.none() | KEYS,
        reverse=st.booleans(),
        keys=st.lists(KEYS, max_size=4),
    )
    def read_snapshot(
        self, which: int, family: Family, start: bytes, end: bytes | None, reverse: bool, keys: list[bytes]
    ) -> None:
        snapshot, moment = self.snapshots[which % len(self.snapshots)]
        scan = snapshot.scan(family, start, end, reverse=reverse)
        first = next(scan, None)
        assert snapshot.get_many(family, keys) == [moment[family].get(key) for key in keys]
        found = [] if first is None else [first, *scan]
        assert found == expected(moment[family], start, end, reverse)

    @precondition(lambda self: self.snapshots)
    @rule(which=st.integers(0, SNAPSHOTS_MAX - 1))
    def close_snapshot(self, which: int) -> None:
        self.snapshots.pop(which % len(self.snapshots))[0].close()

    @precondition(lambda self: len(self.scans) < SNAPSHOTS_MAX)
    @rule(family=PLACES, start=KEYS, end=st.none() | KEYS, reverse=st.booleans())
    def begin_scan(self, family: Family, start: bytes, end: bytes | None, reverse: bool) -> None:
        scan = self.store.scan(family, start, end, reverse=reverse)
        self.scans.append((scan, expected(self.model[family], start, end, reverse)))

    @precondition(lambda self: self.scans)
    @rule(which=st.integers(0, SNAPSHOTS_MAX - 1), steps=st.integers(0, 4))
    def walk(self, which: int, steps: int) -> None:
        scan, rows = self.scans[which % len(self.scans)]
        for _ in range(steps):
            assert next(scan, None) == (rows.pop(0) if rows else None)

    @precondition(lambda self: self.scans)
    @rule(which=st.integers(0, SNAPSHOTS_MAX - 1))
    def finish_scan(self, which: int) -> None:
        scan, rows = self.scans.pop(which % len(self.scans))
        assert list(scan) == rows

    @invariant()
    def holds_as_many_rows(self) -> None:
        if hasattr(self, "store"):
            assert sum(1 for family in FAMILIES for _ in self.store.scan(family)) == sum(map(len, self.model.values()))

    def compare(self) -> None:
        for family in Family:
            rows = self.model.get(family, {})
            assert list(self.store.scan(family)) == sorted(rows.items())
            assert list(self.store.scan(family, reverse=True)) == sorted(rows.items(), reverse=True)
        for snapshot, moment in self.snapshots:
            for family in FAMILIES:
                assert list(snapshot.scan(family)) == sorted(moment[family].items())
        for scan, rest in self.scans:
            assert list(scan) == rest

    def teardown(self) -> None:
        if hasattr(self, "store"):
            try:
                self.compare()
            finally:
                self.store.close()


class MemoryHistory(StoreHistory):
    def open(self) -> None:
        self.store = MemoryStore()


class RocksHistory(StoreHistory):
    """Adds flushes, compactions and reopening."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="basalt-model-"))

    def open(self) -> None:
        self.rocks = open_store(self.path / "store")
        self.store = self.rocks

    @rule(family=st.none() | PLACES)
    def flush(self, family: Family | None) -> None:
        self.rocks.flush(family)

    @rule(family=PLACES)
    def compact(self, family: Family) -> None:
        self.rocks.compact(family)

    @rule()
    def open_again(self) -> None:
        self.store.close()
        self.snapshots.clear()
        self.scans.clear()
        self.open()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            shutil.rmtree(self.path)


@pytest.mark.spec("A1")
@pytest.mark.promise("P2")
def test_memory_store_matches_the_model() -> None:
    run_state_machine_as_test(MemoryHistory, settings=settings(max_examples=60, stateful_step_count=40))


@pytest.mark.spec("A1")
@pytest.mark.promise("P2")
def test_rocks_store_matches_the_model() -> None:
    run_state_machine_as_test(RocksHistory, settings=settings(max_examples=12, stateful_step_count=40))
