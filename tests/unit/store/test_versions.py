"""Versions of content: new, current, older, newer, and a crash at every batch of an upgrade."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from basaltmq.errors import CorruptionError, StoreTooNewError, StoreTooOldError
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore
from basaltmq.store.open import open_store
from basaltmq.store.versions import bring_up_to_date, put_version, read_version

NAME = "things"
F = Family.STATE
FAMILIES = (F, Family.QUEUES)
BATCH_ROWS = 2

pytestmark = pytest.mark.spec("A9")


class Crash(Exception):
    """Simulates the end of the process."""


class CrashingStore(MemoryStore):
    """Crashes before a given write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes_left = 1_000_000
        self.synced_version: int | None = None

    def write(self, batch: Batch, *, wal: bool = True, wait_ms: int | None = None) -> None:
        if self.writes_left == 0:
            raise Crash
        self.writes_left -= 1
        super().write(batch, wal=wal, wait_ms=wait_ms)

    def sync(self) -> None:
        super().sync()
        self.synced_version = read_version(self, NAME)


def rows_v1(store: Store, count: int) -> None:
    batch = Batch()
    for number in range(count):
        batch.put(F, b"%d" % number, b"one")
    store.write(batch)


def one_to_two(store: Store) -> Iterator[Batch]:
    """Rewrites every row of version 1, a few per batch."""
    batch = Batch()
    for key, value in store.scan(F):
        if value == b"one":
            batch.put(F, key, b"two")
        if len(batch) == BATCH_ROWS:
            yield batch
            batch = Batch()
    yield batch


def two_to_three(store: Store) -> Iterator[Batch]:
    """Moves everything to another family as one batch."""
    batch = Batch()
    for key, value in store.scan(F):
        assert value == b"two", "a step sees the result of the previous step"
        batch.put(Family.QUEUES, key, b"three")
        batch.delete(F, key)
    yield batch


def nothing_to_do(store: Store) -> Iterator[Batch]:
    yield from ()


STEPS = {1: one_to_two, 2: two_to_three, 3: nothing_to_do}


def test_empty_content_starts_at_the_current_version() -> None:
    store = CrashingStore()
    assert bring_up_to_date(store, NAME, 3, STEPS, FAMILIES) is True
    assert read_version(store, NAME) == 3
    assert store.synced_version == 3
    assert bring_up_to_date(store, NAME, 3, STEPS, FAMILIES) is False


def test_content_at_the_current_version_is_not_changed() -> None:
    store = CrashingStore()
    bring_up_to_date(store, NAME, 2, STEPS, FAMILIES)
    rows_v1(store, 3)
    store.writes_left = 0
    assert bring_up_to_date(store, NAME, 2, STEPS, FAMILIES) is False


def test_rows_without_a_version_row_are_version_1() -> None:
    store = MemoryStore()
    rows_v1(store, 5)
    assert bring_up_to_date(store, NAME, 2, STEPS, FAMILIES) is False
    assert read_version(store, NAME) == 2
    assert [value for _, value in store.scan(F)] == [b"two"] * 5


@pytest.mark.parametrize("first", [1, 2, 3])
def test_every_older_version_is_upgraded_step_by_step(first: int) -> None:
    store = CrashingStore()
    rows_v1(store, 5)
    for version in range(1, first):
        bring_up_to_date(store, NAME, version + 1, STEPS, FAMILIES)
    assert bring_up_to_date(store, NAME, 4, STEPS, FAMILIES) is False
    assert read_version(store, NAME) == store.synced_version == 4
    assert list(store.scan(F)) == []
    assert [value for _, value in store.scan(Family.QUEUES)] == [b"three"] * 5


def test_a_newer_version_is_refused_with_both_versions_and_nothing_changes() -> None:
    store = CrashingStore()
    rows_v1(store, 2)
    batch = Batch()
    put_version(batch, NAME, 7)
    store.write(batch)
    store.writes_left = 0
    with pytest.raises(StoreTooNewError, match="things is at version 7, but this Basalt reads up to version 3"):
        bring_up_to_date(store, NAME, 3, STEPS, FAMILIES)
    assert [value for _, value in store.scan(F)] == [b"one"] * 2


@pytest.mark.promise("P2")
def test_a_crash_before_any_write_of_an_upgrade_loses_and_duplicates_nothing() -> None:
    total_writes = 0
    while True:
        store = CrashingStore()
        rows_v1(store, 5)
        store.writes_left = total_writes
        try:
            bring_up_to_date(store, NAME, 4, STEPS, FAMILIES)
            break
        except Crash:
            version = read_version(store, NAME) or 1
            if version >= 2:
                assert b"one" not in {value for _, value in store.scan(F)}
            if version >= 3:
                assert list(store.scan(F)) == []
        store.writes_left = 1_000_000
        bring_up_to_date(store, NAME, 4, STEPS, FAMILIES)
        assert read_version(store, NAME) == 4
        assert list(store.scan(Family.QUEUES)) == [(b"%d" % number, b"three") for number in range(5)]
        total_writes += 1
    assert total_writes == 5


@pytest.mark.spec("A9")
def test_an_older_version_without_an_upgrade_is_refused_with_both_versions() -> None:
    store = MemoryStore()
    bring_up_to_date(store, NAME, 2, {}, FAMILIES)
    with pytest.raises(StoreTooOldError, match="is at version 2; this Basalt reads version 3 and cannot upgrade"):
        bring_up_to_date(store, NAME, 3, {}, FAMILIES)
    assert read_version(store, NAME) == 2


def test_each_kind_of_content_has_a_separate_version() -> None:
    store = MemoryStore()
    bring_up_to_date(store, "one kind", 3, {}, (F,))
    bring_up_to_date(store, "another", 9, {}, (Family.XIDS,))
    assert (read_version(store, "one kind"), read_version(store, "another")) == (3, 9)
    assert read_version(store, "none") is None


@pytest.mark.promise("P7")
@pytest.mark.parametrize("raw", [b"", b"\x00\x00\x01", b"\x00\x00\x00\x00\x01", b"\x00\x00\x00\x00"])
def test_a_damaged_version_row_is_named(raw: bytes) -> None:
    store = MemoryStore()
    batch = Batch()
    batch.put(Family.VERSION, NAME.encode(), raw)
    store.write(batch)
    with pytest.raises(CorruptionError, match="the version row 'things'"):
        bring_up_to_date(store, NAME, 3, STEPS, FAMILIES)


def test_an_upgrade_on_disk_survives_a_reopen(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    rows_v1(store, 300)
    bring_up_to_date(store, NAME, 4, STEPS, FAMILIES)
    store.poison(OSError("no flush at close"))
    store.close()
    store = open_store(tmp_path / "store")
    assert read_version(store, NAME) == 4
    assert sum(1 for _ in store.scan(Family.QUEUES)) == 300
    store.close()
