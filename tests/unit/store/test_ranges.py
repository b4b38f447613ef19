"""Many small ranges read in one pass have the same rows as a scan of each."""

from __future__ import annotations

import random
from itertools import islice, pairwise
from pathlib import Path

import pytest

from basaltmq.errors import StoreClosedError
from basaltmq.store import rocks
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore
from basaltmq.store.open import open_store
from basaltmq.store.ranges import Piece, Row, read_pieces, read_ranges
from basaltmq.store.rocks_cursor import RUN_ROWS, Run


@pytest.mark.promise("P8")
@pytest.mark.parametrize("most", [6, 60])
@pytest.mark.parametrize("seed", range(4))
def test_one_pass_returns_the_same_rows_as_a_scan_per_range(tmp_path: Path, seed: int, most: int) -> None:
    chance = random.Random(seed)
    batch = Batch()
    for number in chance.sample(range(1000), 400):
        batch.put(Family.MESSAGES, b"%03d" % number, b"v%d" % number)
    points = sorted(chance.sample(range(1000), 60))
    # Adjacent ranges that are read completely use a faster path, which a gap between ranges ends.
    pairs = [*pairwise(points[:30]), *zip(points[30::2], points[31::2], strict=True)]
    ranges = [(b"%03d" % a, b"%03d" % b, chance.randrange(1, most)) for a, b in pairs]
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
def test_a_range_among_many_tombstones_is_skipped_and_later_ranges_are_read(
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


def rows_of(pieces: list[Piece]) -> list[Row]:
    assert all(piece.keys for piece in pieces)
    assert all(piece.sizes == list(map(len, piece.values)) for piece in pieces)
    return [row for piece in pieces for row in zip(piece.keys, piece.values, strict=True)]


@pytest.mark.promise("P8")
@pytest.mark.parametrize("seed", range(3))
def test_a_bulk_read_returns_the_rows_of_a_scan(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    batch = Batch()
    for number in chance.sample(range(1000), 400):
        batch.put(Family.MESSAGES, b"%03d" % number, bytes(chance.randrange(100)))
    store, memory = open_store(tmp_path / "s"), MemoryStore()
    for each in (store, memory):
        each.write(batch)
        for _ in range(40):
            start, end = sorted(b"%03d" % chance.randrange(1000) for _ in range(2))
            most = chance.randrange(1, 200)
            whole = (
                list(memory.scan(Family.MESSAGES, start, end))
                if each is memory
                else list(store.scan(Family.MESSAGES, start, end))
            )
            piece = chance.randrange(1, 90)
            pieces, more = read_pieces(each, Family.MESSAGES, start, end, most, 1 << 20, piece)
            rows = rows_of(pieces)
            assert rows == whole[:most]
            assert more or len(rows) == len(whole)
            assert not more or len(rows) == most
            assert [len(each.keys) for each in pieces[:-1]] == [piece] * (len(pieces) - 1)
            pieces, more = read_pieces(each, Family.MESSAGES, start, end, most, 50, piece)
            few = rows_of(pieces)
            assert few == whole[: len(few)]
            assert more or len(few) == len(whole)
            assert len(few) <= RUN_ROWS + 2
    store.close()


@pytest.mark.promise("P10")
def test_a_bulk_read_continues_after_a_damaged_block_and_records_it(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    batch = Batch()
    chance = random.Random(0)
    for number in range(2000):
        batch.put(Family.MESSAGES, b"%04d" % number, chance.randbytes(100))
    store.write(batch)
    store.close()
    (table,) = [each for each in (tmp_path / "s" / "kv").glob("*.sst") if each.stat().st_size > 100_000]
    raw = bytearray(table.read_bytes())
    raw[len(raw) // 2] ^= 1
    table.write_bytes(raw)
    store = open_store(tmp_path / "s")
    pieces, more = read_pieces(store, Family.MESSAGES, b"", b"\xff", 5000, 1 << 30, 100)
    found = [key for key, _ in rows_of(pieces)]
    assert not more
    assert 1500 < len(found) < 2000, "only the damaged block is lost"
    assert (found[0], found[-1]) == (b"0000", b"1999")
    assert store.unreadable() == 1
    store.close()


def test_a_read_of_a_closed_run_raises() -> None:
    class Open:
        path = Path("store")

        def require_open(self) -> None:
            return None

    run = Run(Open(), iter([(b"k", b"v")]))
    run.close()
    with pytest.raises(StoreClosedError):
        run.read(1, 1, 1)
