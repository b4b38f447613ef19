"""An open store skips unreadable rows of messages, records them, and continues to accept writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from basaltmq.errors import CorruptionError, StorePoisonedError
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.open import open_store
from basaltmq.store.options import StoreOptions
from basaltmq.store.ranges import read_pieces, read_ranges
from basaltmq.store.repair import repair
from basaltmq.store.rocks import RocksStore
from basaltmq.store.salvage.files import table_family
from basaltmq.store.salvage.unreadable import UNREADABLE

ROWS = 1000


def key(number: int) -> bytes:
    return b"\x00\x01q%05d" % number


@pytest.fixture(params=[Family.MESSAGES, Family.LEASES, Family.QUEUES], ids=lambda family: family.label)
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.fixture
def home(tmp_path: Path, family: Family) -> Path:
    store = open_store(tmp_path / "store")
    batch = Batch()
    for number in range(ROWS):
        batch.put(family, key(number), os.urandom(100))
    store.write(batch)
    store.close()
    table = max((tmp_path / "store" / "kv").glob("*.sst"), key=lambda each: each.stat().st_size)
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)
    return tmp_path / "store"


@pytest.mark.promise("P7")
@pytest.mark.parametrize("family", [Family.MESSAGES, Family.LEASES], indirect=True)
def test_messages_around_a_damaged_block_are_readable_by_every_call(home: Path, family: Family) -> None:
    store = open_store(home)
    found = [each for each, _ in store.scan(family)]
    assert ROWS // 2 < len(found) < ROWS
    start, end = key(0), key(ROWS)
    pieces, _ = read_pieces(store, family, start, end, ROWS, 1 << 24, 100)
    assert [each for piece in pieces for each in piece.keys] == found
    ranges = [(key(number), key(number + 50), 50) for number in range(0, ROWS, 50)]
    read = read_ranges(store, family, ranges, 1 << 24)
    assert [each for rows in read for each, _ in rows or ()] == found
    values = store.get_many(family, [key(number) for number in range(ROWS)])
    assert [key(number) for number, value in enumerate(values) if value is not None] == found
    lost = next(key(number) for number in range(ROWS) if key(number) not in set(found))
    assert store.get(family, lost) is None
    assert store.unreadable() > 0
    store.close()
    said = [json.loads(line) for line in (home / "quarantine" / UNREADABLE).read_text().splitlines()]
    assert said[0]["family"] == family.label
    assert bytes.fromhex(said[0]["start"]) <= lost < bytes.fromhex(said[0]["end"])
    assert repair(home).kept is not None
    assert not (home / "quarantine" / UNREADABLE).exists()


@pytest.mark.promise("P1", "P7")
@pytest.mark.parametrize("family", [Family.MESSAGES, Family.LEASES], indirect=True)
def test_rows_written_into_the_range_of_a_damaged_block_are_read(home: Path, family: Family) -> None:
    """Also those written before the damage is found, and those in other SST files."""
    (table,) = [each for each in (home / "kv").glob("*.sst") if table_family(each)[0] == family.label]
    store = open_store(home)
    beside = [key(number) + b"+" for number in range(0, ROWS, 10)]
    write_all(store, family, beside[::2])
    store.flush(family)
    write_all(store, family, beside[1::2])
    read = {each for each, _ in store.scan(family)}
    assert {*beside} <= read
    lost = {key(number) for number in range(ROWS)} - read
    assert 0 < len(lost) < ROWS // 2
    later = [key(number) + b"-" for number in range(0, ROWS, 10)]
    write_all(store, family, later)
    start, end = key(0), key(ROWS)
    pieces, _ = read_pieces(store, family, start, end, 2 * ROWS, 1 << 24, 100)
    assert {each for piece in pieces for each in piece.keys} == read | {*later}
    assert [store.get(family, each) for each in (beside[0], later[-1])] == [b"row"] * 2
    # A scan that begins in the block does not read it.
    assert next(iter(store.scan(family, min(lost) + b"!")))[0] in {*beside, *later}
    store.sync()
    store.close()
    store = open_store(home)
    assert {each for each, _ in store.scan(family)} == read | {*later}
    store.close()
    assert (home / "quarantine" / "unreadable" / table.name).exists()
    outcome = repair(home)
    assert outcome.remaining == []
    assert outcome.losses
    store = open_store(home)
    assert {each for each, _ in store.scan(family)} == read | {*later}
    store.close()


def write_all(store: RocksStore, family: Family, keys: list[bytes]) -> None:
    batch = Batch()
    for each in keys:
        batch.put(family, each, b"row")
    store.write(batch)


@pytest.mark.promise("P7")
@pytest.mark.parametrize("family", [Family.QUEUES], indirect=True)
def test_unreadable_rows_of_other_families_raise(home: Path, family: Family) -> None:
    store = open_store(home)
    with pytest.raises(CorruptionError):
        list(store.scan(family))
    with pytest.raises(CorruptionError):
        store.get_many(family, [key(number) for number in range(ROWS)])
    assert store.unreadable() == 0
    store.close()


def compact_all(store: RocksStore, family: Family) -> None:
    fill(store, family)
    store.compact(family)
    fill(store, family)


@pytest.mark.promise("P7", "P11")
@pytest.mark.parametrize("family", [Family.MESSAGES], indirect=True)
def test_a_damaged_family_accepts_writes_and_is_not_compacted(home: Path, family: Family) -> None:
    store = open_store(home)
    assert len(list(store.scan(family))) < ROWS
    fill(store, family)
    assert store.properties()["background-errors"] == 0
    with pytest.raises(CorruptionError, match="repair"):
        store.compact()
    store.close()
    store = open_store(home)
    fill(store, family)
    assert store.properties()["background-errors"] == 0
    store.close()


def fill(store: RocksStore, family: Family) -> None:
    for _ in range(8):
        batch = Batch()
        for number in range(0, ROWS, 3):
            batch.put(family, key(number), os.urandom(50))
        store.write(batch)
        store.flush(family)


@pytest.mark.promise("P7", "P11")
def test_a_compaction_over_damage_poisons_the_store_only_once(home: Path, family: Family) -> None:
    store = open_store(home, options=StoreOptions(stall_wait_ms_max=20_000))
    with pytest.raises((CorruptionError, StorePoisonedError)):
        compact_all(store, family)
    store.close()
    store = open_store(home)
    fill(store, family)
    assert store.properties()["background-errors"] == 0
    store.close()
    assert repair(home).remaining == []
    store = open_store(home)
    store.compact()
    store.close()
