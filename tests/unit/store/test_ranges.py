"""Many small ranges read in one pass say the same as a scan of each."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest

from basaltmq.store import rocks
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore
from basaltmq.store.open import open_store
from basaltmq.store.ranges import read_ranges


@pytest.mark.promise("P8")
@pytest.mark.parametrize("seed", range(5))
def test_one_pass_finds_what_a_scan_of_each_range_finds(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    batch = Batch()
    for number in chance.sample(range(1000), 400):
        batch.put(Family.MESSAGES, b"%03d" % number, b"v%d" % number)
    points = sorted(chance.sample(range(1000), 60))
    ranges = [
        (b"%03d" % a, b"%03d" % b, chance.randrange(1, 6)) for a, b in zip(points[::2], points[1::2], strict=True)
    ]
    store, memory = open_store(tmp_path / "s"), MemoryStore()
    store.write(batch)
    memory.write(batch)
    expected = [list(islice(memory.scan(Family.MESSAGES, a, b), most)) for a, b, most in ranges]
    assert read_ranges(store, Family.MESSAGES, ranges, 1 << 20) == expected
    assert read_ranges(memory, Family.MESSAGES, ranges, 1 << 20) == expected
    some = read_ranges(store, Family.MESSAGES, ranges, 40)
    assert 0 < len(some) < len(ranges)
    assert some == expected[: len(some)]
    assert read_ranges(store, Family.MESSAGES, [], 40) == []
    store.close()


@pytest.mark.promise("P8")
def test_a_range_among_many_deleted_rows_is_left_out_and_those_behind_it_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rocks, "SKIPPED_MAX", 20)
    store = open_store(tmp_path / "s")
    batch = Batch()
    for number in range(1000):
        batch.put(Family.MESSAGES, b"%03d" % number, b"v")
    store.write(batch)
    batch = Batch()
    for number in range(300, 500):
        batch.delete(Family.MESSAGES, b"%03d" % number)
    store.write(batch)
    found = read_ranges(
        store,
        Family.MESSAGES,
        [(b"100", b"102", 9), (b"299", b"400", 9), (b"400", b"600", 9), (b"600", b"602", 9)],
        1000,
    )
    assert found == [[(b"100", b"v"), (b"101", b"v")], None, None, [(b"600", b"v"), (b"601", b"v")]]
    store.close()
