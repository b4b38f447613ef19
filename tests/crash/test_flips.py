"""A flipped bit in any file of a store or a checkpoint is found, and the file is named."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from basaltmq.errors import CorruptionError
from basaltmq.store.batch import Batch
from basaltmq.store.checkpoint import restore
from basaltmq.store.families import Family
from basaltmq.store.open import open_store
from basaltmq.store.rocks import RocksStore
from basaltmq.store.salvage.unreadable import UNREADABLE
from basaltmq.store.salvage.verify import verify

FLIPS_PER_FILE = 12
ROWS = 300
KINDS = [
    "kv/*.sst",
    "kv/*.blob",
    "kv/MANIFEST-*",
    "kv/CURRENT",
    "kv/OPTIONS-*",
    "kv/IDENTITY",
    "kv/rocksdict-config.json",
    "STORE",
    "SEALS",
]
HARMLESS = ("OPTIONS-", "IDENTITY", "rocksdict-config.json", "SEALS")
"""Files that are not needed to read rows."""


def write_rows(store: RocksStore, first: int, count: int) -> None:
    for number in range(first, first + count):
        batch = Batch()
        batch.put(Family.MESSAGES, b"%08d" % number, b"row %d " % number * 20)
        batch.put(
            Family.STREAM_RECORDS, b"%08d" % number, random.Random(number).randbytes(5000 if number % 5 == 0 else 50)
        )
        store.write(batch)


def rows(store: RocksStore) -> int:
    return sum(1 for family in (Family.MESSAGES, Family.STREAM_RECORDS) for _ in store.scan(family))


@pytest.fixture(scope="module")
def store_copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store closed cleanly, a killed one with rows in the WAL, and a checkpoint."""
    base = tmp_path_factory.mktemp("homes")
    store = open_store(base / "closed")
    write_rows(store, 0, ROWS)
    store.flush()
    write_rows(store, ROWS, ROWS)
    store.flush()
    store.checkpoint(base / "checkpoint")
    store.close()
    store = open_store(base / "crashed")
    write_rows(store, 0, ROWS)
    store.sync()
    shutil.copytree(base / "crashed", base / "cut-off")
    store.close()
    return base


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    return random.Random(seed)


def flips(path: Path, rng: random.Random, count: int) -> Iterator[int]:
    """Flip one bit at a time and undo it before the next. Yield the changed byte."""
    body = path.read_bytes()
    places = {0, len(body) - 1} | {rng.randrange(len(body)) for _ in range(count)}
    for place in sorted(places):
        fd = os.open(path, os.O_WRONLY)
        try:
            os.pwrite(fd, bytes([body[place] ^ 1 << rng.randrange(8)]), place)
            yield place
        finally:
            os.pwrite(fd, body[place : place + 1], place)
            os.close(fd)


def flip_for_good(path: Path, rng: random.Random) -> int:
    body = bytearray(path.read_bytes())
    place = rng.randrange(len(body))
    body[place] ^= 1 << rng.randrange(8)
    path.write_bytes(body)
    return place


@pytest.mark.promise("P7")
@pytest.mark.spec("A10")
@pytest.mark.parametrize("kind", KINDS)
def test_verify_names_the_file_with_a_flipped_bit(
    store_copies: Path, tmp_path: Path, rng: random.Random, kind: str
) -> None:
    home = tmp_path / "store"
    shutil.copytree(store_copies / "closed", home)
    assert verify(home) == []
    for path in sorted(home.glob(kind)):
        for place in flips(path, rng, FLIPS_PER_FILE):
            found = verify(home)
            named = [line for line in found if line.startswith(f"{home}/")]
            assert any(line.startswith(f"{path}") for line in named), (path.name, place, found)
            # RocksDB may also name the database, but no other file.
            assert all(line.startswith((f"{path}", f"{home}/kv: ")) for line in named), (path.name, place, found)
    assert verify(home) == []


@pytest.mark.promise("P7")
def test_verify_names_a_wal_with_a_flipped_bit(store_copies: Path, tmp_path: Path, rng: random.Random) -> None:
    home = tmp_path / "store"
    shutil.copytree(store_copies / "cut-off", home)
    assert verify(home) == []
    (log,) = (path for path in home.glob("kv/*.log") if path.stat().st_size)
    for place in flips(log, rng, 40):
        found = verify(home)
        named = [line for line in found if line.startswith(f"{log}: ")]
        assert len(named) == 1, (place, found)


@pytest.mark.promise("P7")
@pytest.mark.spec("A10")
def test_verify_and_restore_name_the_checkpoint_file_with_a_flipped_bit(
    store_copies: Path, tmp_path: Path, rng: random.Random
) -> None:
    home = tmp_path / "checkpoint"
    shutil.copytree(store_copies / "checkpoint", home)
    assert verify(home) == []
    for path in sorted(each for each in home.rglob("*") if each.is_file() and each.stat().st_size):
        for place in flips(path, rng, 2):
            found = verify(home)
            assert any(line.startswith(f"{path}: ") for line in found), (path.name, place, found)
            with pytest.raises(CorruptionError, match=path.name):
                restore(home, tmp_path / "back")
            assert not (tmp_path / "back").exists()
    restore(home, tmp_path / "back")


@pytest.mark.promise("P7")
@pytest.mark.parametrize("kind", [*KINDS, "kv/*.log"])
def test_open_after_a_bit_flip_names_the_file_or_reads_every_row(
    store_copies: Path, tmp_path: Path, rng: random.Random, kind: str
) -> None:
    source = store_copies / ("cut-off" if kind == "kv/*.log" else "closed")
    expected = ROWS * 2 if kind == "kv/*.log" else ROWS * 4
    for attempt in range(6):
        home = tmp_path / f"store-{attempt}"
        shutil.copytree(source, home)
        path = rng.choice([each for each in sorted(home.glob(kind)) if each.stat().st_size])
        place = flip_for_good(path, rng)
        reports: list[str] = []
        found, passed_over, error = open_and_count(home, reports)
        if error is not None:
            # Damaged tables may also be detected when they are read.
            assert path.name in str(error) or (found is None and kind in ("kv/*.sst", "kv/*.blob")), (place, error)
            assert not path.name.startswith(HARMLESS)
            continue
        reported = [line for line in reports if path.name in line]
        if kind == "kv/*.log":
            # A flip in the last record looks like a torn tail: it is truncated, reported, and kept.
            assert reported
            assert found in (expected, expected - 2)
            assert list((home / "quarantine").iterdir())
        elif passed_over:
            # Unreadable rows of messages are skipped and recorded.
            assert kind == "kv/*.sst"
            assert (home / "quarantine" / UNREADABLE).exists()
        else:
            assert found == expected
            assert reported or kind in ("kv/*.sst", "kv/*.blob"), (path.name, place, reports)


def open_and_count(home: Path, reports: list[str]) -> tuple[int | None, int, CorruptionError | None]:
    """Return the number of rows and the skipped ranges, or the error; 0 rows if the open failed."""
    try:
        store = open_store(home, report=reports.append)
    except CorruptionError as error:
        return 0, 0, error
    try:
        return rows(store), store.unreadable(), None
    except CorruptionError as error:
        return None, 0, error
    finally:
        store.close()


@pytest.mark.promise("P7")
@pytest.mark.spec("A10")
@pytest.mark.parametrize("kind", ["kv/*.sst", "kv/*.blob"])
def test_verify_of_an_open_store_finds_a_flip_hidden_by_its_cache(
    store_copies: Path, tmp_path: Path, rng: random.Random, kind: str
) -> None:
    home = tmp_path / "store"
    shutil.copytree(store_copies / "closed", home)
    store = open_store(home)
    try:
        assert rows(store) == ROWS * 4
        assert store.verify() == []
        for path in sorted(home.glob(kind)):
            for place in flips(path, rng, 3):
                found = [line for line in store.verify() if line.startswith(f"{home}/")]
                # RocksDB may also refuse to open the table; that line names the database.
                about_file = [line for line in found if not line.startswith(f"{home}/kv: ")]
                assert len(about_file) == 1, (place, found)
                assert about_file[0].startswith(f"{path}: ")
        assert store.verify() == []
        assert not (home / "verify.tmp").exists()
    finally:
        store.close()
