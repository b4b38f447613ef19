"""Overfull and underfull: the limits on a store with a simulated size, the freed space on a real store."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from basaltmq.errors import InvalidConfigError, StoreClosedError, StoreOverfullError
from basaltmq.store.batch import Batch
from basaltmq.store.families import MIB, Family
from basaltmq.store.keys.queues import body_key
from basaltmq.store.memory import MemoryStore
from basaltmq.store.open import open_store
from basaltmq.store.space.size import STEP_BYTES_MAX, STEP_BYTES_MIN, SizeGuard

WAIT_S = 60
OVER = 16 * MIB
UNDER = 8 * MIB

pytestmark = pytest.mark.spec("A11")


class Scale(MemoryStore):
    """A store whose size the test sets."""

    def __init__(self, weight: int = 0) -> None:
        super().__init__()
        self.weight = weight
        self.measured = 0
        self.compacted = threading.Semaphore(0)

    def size_bytes(self) -> int:
        self.require_open()
        self.measured += 1
        return self.weight

    def properties(self, family: Family | None = None) -> dict[str, int]:
        self.require_open()
        return {"sst-bytes": 90 if family is Family.MESSAGES else 0, "blob-bytes": 10 if family is Family.LEASES else 0}

    def compact(self, family: Family | None = None) -> None:
        self.require_open()
        self.compacted.release()


def underfull_of(guard: SizeGuard) -> threading.Event:
    """Return an event that is set when the guard reports that the store is underfull again."""
    found = threading.Event()

    def heard(overfull: bool, size_bytes: int) -> None:
        if not overfull:
            found.set()

    guard.listen(heard)
    return found


def guard_of(scale: Scale) -> SizeGuard:
    return SizeGuard(scale, overfull_bytes=OVER, underfull_bytes=UNDER)


def test_the_state_changes_at_the_limits_and_not_between_them() -> None:
    scale = Scale()
    guard = guard_of(scale)
    seen: list[tuple[bool, int]] = []
    guard.listen(lambda overfull, size_bytes: seen.append((overfull, size_bytes)))
    for weight, overfull in [
        (UNDER, False),
        (OVER - 1, False),
        (OVER, True),
        (OVER + 5, True),
        (OVER - 1, True),
        (UNDER + 1, True),
        (UNDER, False),
        (OVER - 1, False),
        (OVER, True),
        (0, False),
    ]:
        scale.weight = weight
        assert guard.measure() == weight
        assert guard.overfull is overfull, weight
    assert seen == [(True, OVER), (False, UNDER), (True, OVER), (False, 0)]
    guard.close()


@pytest.mark.parametrize(("over", "under"), [(10, 10), (10, 11), (10, 0), (10, -1), (0, 0)])
def test_invalid_limits_are_refused(over: int, under: int) -> None:
    with pytest.raises(InvalidConfigError, match="underfull_bytes"):
        SizeGuard(Scale(), overfull_bytes=over, underfull_bytes=under)


def test_a_store_opened_overfull_blocks_publishers_from_the_start() -> None:
    guard = guard_of(Scale(OVER))
    heard: list[bool] = []
    guard.listen(lambda overfull, size_bytes: heard.append(overfull))
    assert guard.overfull
    assert heard == [True]
    guard.close()


@pytest.mark.promise("P8")
def test_writes_are_measured_once_per_step() -> None:
    scale = Scale()
    guard = guard_of(scale)
    before = scale.measured
    for _ in range(80):
        guard.wrote(guard.step_bytes // 8)
    assert scale.measured - before == 10
    scale.weight = OVER
    guard.wrote(guard.step_bytes)
    assert guard.overfull
    guard.close()


def test_the_measuring_step_depends_on_the_limits_within_bounds() -> None:
    for gap, step in [(MIB, STEP_BYTES_MIN), (32 * MIB, 2 * MIB), (100_000 * MIB, STEP_BYTES_MAX)]:
        guard = SizeGuard(Scale(), overfull_bytes=MIB + gap, underfull_bytes=MIB)
        assert guard.step_bytes == step
        guard.close()


@pytest.mark.promise("P8")
def test_publishers_are_refused_with_figures_and_remedy() -> None:
    scale = Scale()
    guard = guard_of(scale)
    guard.admit()
    scale.weight = OVER + 7
    guard.measure()
    scale.weight = UNDER + 1
    guard.measure()
    with pytest.raises(
        StoreOverfullError, match=f"{UNDER + 1} bytes, its limit is {OVER}.*reduced it to {UNDER}"
    ) as caught:
        guard.admit()
    assert caught.value.retriable
    scale.weight = UNDER
    guard.measure()
    guard.admit()
    guard.close()


def test_each_write_while_overfull_triggers_another_reclaim() -> None:
    scale = Scale(OVER)
    guard = guard_of(scale)
    underfull = underfull_of(guard)
    for _ in range(3):
        for _ in range(2):
            assert scale.compacted.acquire(timeout=WAIT_S)
        guard.wrote(1)
    scale.weight = 0
    guard.wrote(1)
    assert underfull.wait(WAIT_S)
    guard.close()


@pytest.mark.promise("P8")
def test_deletes_by_consumers_bring_a_real_store_below_its_limit(tmp_path: Path) -> None:
    """Publishers fill the store to its limit. Consumers delete without being blocked, and the disk space is freed."""
    store = open_store(tmp_path / "store")
    guard = SizeGuard(store, overfull_bytes=24 * MIB, underfull_bytes=6 * MIB)
    underfull = underfull_of(guard)
    events: list[bool] = []
    guard.listen(lambda overfull, size_bytes: events.append(overfull))
    produced = 0
    while True:
        try:
            guard.admit()
        except StoreOverfullError:
            break
        batch = Batch()
        for _ in range(50):
            batch.put(Family.CONTENT_REFS, body_key(b"%016d" % produced), os.urandom(600))
            batch.put(Family.STREAM_RECORDS, body_key(b"%016d" % produced), os.urandom(6000))
            produced += 1
        store.write(batch)
        assert produced < 20_000, "the store never became overfull"
    assert guard.size_bytes >= 24 * MIB
    assert store.size_bytes() < 24 * MIB + 4 * guard.step_bytes
    kept = 100
    for first in range(0, produced - kept, 50):
        batch = Batch()
        for number in range(first, min(first + 50, produced - kept)):
            batch.delete(Family.CONTENT_REFS, body_key(b"%016d" % number))
            batch.delete(Family.STREAM_RECORDS, body_key(b"%016d" % number))
        store.write(batch)
    assert underfull.wait(WAIT_S)
    guard.admit()
    assert store.size_bytes() <= 6 * MIB
    on_disk = sum(
        entry.stat().st_size for entry in (tmp_path / "store" / "kv").iterdir() if entry.suffix in (".sst", ".blob")
    )
    assert on_disk <= 6 * MIB
    assert events == [True, False]
    assert sum(1 for _ in store.scan(Family.STREAM_RECORDS)) == kept
    guard.close()
    store.close()


def test_the_store_can_be_closed_during_a_reclaim(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    batch = Batch()
    for number in range(200):
        batch.put(Family.STREAM_RECORDS, body_key(b"%016d" % number), os.urandom(10_000))
    store.write(batch)
    guard = SizeGuard(store, overfull_bytes=MIB, underfull_bytes=1000)
    guard.wrote(1)
    store.close()
    guard.close()
    open_store(tmp_path / "store").close()


def test_a_failing_listener_affects_neither_the_write_nor_other_listeners(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scale = Scale()
    guard = guard_of(scale)
    heard: list[bool] = []

    def fail(overfull: bool, size_bytes: int) -> None:
        raise ValueError("a bug of the listener")

    guard.listen(fail)
    guard.listen(lambda overfull, size_bytes: heard.append(overfull))
    scale.weight = OVER
    batch = Batch()
    batch.put(Family.STATE, b"key", bytes(guard.step_bytes))
    scale.write(batch)
    assert scale.get(Family.STATE, b"key") is not None
    assert heard == [True]
    assert "a bug of the listener" in caplog.text
    guard.close()


def test_a_write_is_applied_although_the_size_cannot_be_measured() -> None:
    class Unmeasurable(Scale):
        def size_bytes(self) -> int:
            if self.measured:
                raise StoreClosedError("the store is closing")
            return super().size_bytes()

    scale = Unmeasurable()
    guard = guard_of(scale)
    batch = Batch()
    batch.put(Family.STATE, b"key", bytes(guard.step_bytes))
    scale.write(batch)
    assert scale.get(Family.STATE, b"key") is not None
    guard.close()
