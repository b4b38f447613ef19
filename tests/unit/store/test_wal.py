"""Basalt's reader of RocksDB's log format: real logs, every kind of damage, and what open does in each case."""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.errors import CorruptionError
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.integrity.manifest import oldest_log
from basaltmq.store.integrity.synced import SYNCED
from basaltmq.store.integrity.wal import BLOCK_BYTES, current_manifest, masked, read_records, scan_log, wal_files
from basaltmq.store.open import open_store
from basaltmq.store.repair import Repaired, repair


def encode(records: list[bytes]) -> bytes:
    """Write a log to the format's description, independently of the code under test."""
    out = bytearray()
    for record in records:
        rest, first = record, True
        while True:
            room = BLOCK_BYTES - len(out) % BLOCK_BYTES
            if room < 7:
                out += bytes(room)
                room = BLOCK_BYTES
            part, rest = rest[: room - 7], rest[room - 7 :]
            kind = (1 if first else 4) if not rest else (2 if first else 3)
            body = bytes([kind]) + part
            out += struct.pack("<IH", masked(google_crc32c.value(body)), len(part)) + body
            first = False
            if not rest:
                break
    return bytes(out)


@given(st.lists(st.integers(1, 90_000), max_size=6), st.randoms(use_true_random=False))
def test_records_written_to_the_format_are_read(sizes: list[int], rng: random.Random) -> None:
    import tempfile

    records = [rng.randbytes(size) for size in sizes]
    with tempfile.NamedTemporaryFile(suffix=".log") as file:
        file.write(encode(records))
        file.flush()
        scan = scan_log(Path(file.name))
        assert scan.fault is None
        assert scan.records == len(records)
        assert list(read_records(Path(file.name))) == records


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store after a crash: 200 synced batches of two rows in the WAL, in and across blocks."""
    base = tmp_path_factory.mktemp("wal")
    store = open_store(base / "live")
    for number in range(200):
        batch = Batch()
        batch.put(Family.QUEUES, b"%06d" % number, b"q" * (40_000 if number % 50 == 7 else 300))
        batch.put(Family.STATE, b"%06d" % number, b"s" * 30)
        store.write(batch)
    store.sync()
    shutil.copytree(base / "live", base / "store")
    store.close()
    return base / "store"


@pytest.fixture
def home(cut_off: Path, tmp_path: Path) -> Path:
    """Return a store with an empty SYNCED: tests cut off writes, and no file may record that they were confirmed."""
    copy = Path(shutil.copytree(cut_off, tmp_path / "store"))
    (copy / SYNCED).write_bytes(bytes((copy / SYNCED).stat().st_size))
    return copy


def log_of(home: Path) -> Path:
    (log,) = (path for path in wal_files(home / "kv") if path.stat().st_size)
    return log


def ends(log: Path) -> list[int]:
    """Return the start of each record, and the end of the last one."""
    starts, offset, data = [0], 0, log.read_bytes()
    while offset < len(data):
        if BLOCK_BYTES - offset % BLOCK_BYTES < 7:
            offset += BLOCK_BYTES - offset % BLOCK_BYTES
        kind = data[offset + 6]
        offset += 7 + int.from_bytes(data[offset + 4 : offset + 6], "little")
        if kind in (1, 4):
            starts.append(offset)
    return starts


def edit(path: Path, at: int, new: bytes) -> None:
    body = bytearray(path.read_bytes())
    body[at : at + len(new)] = new
    path.write_bytes(body)


def tree(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()}


def rows(home: Path) -> tuple[int, int, list[str]]:
    reports: list[str] = []
    store = open_store(home, report=reports.append)
    try:
        return sum(1 for _ in store.scan(Family.QUEUES)), sum(1 for _ in store.scan(Family.STATE)), reports
    finally:
        store.close()


def test_a_real_wal_and_manifest_are_read_to_the_end(home: Path) -> None:
    scan = scan_log(log_of(home))
    assert (scan.records, scan.fault) == (200, None)
    manifest = scan_log(current_manifest(home / "kv"))
    assert manifest.fault is None
    assert manifest.records > 1
    assert oldest_log(current_manifest(home / "kv")) <= int(log_of(home).stem)
    assert rows(home) == (200, 200, [])


@pytest.mark.promise("P7")
def test_every_flipped_bit_is_detected_and_only_the_last_record_can_look_torn(home: Path, tmp_path: Path) -> None:
    body = log_of(home).read_bytes()
    last = ends(log_of(home))[-2]
    copy = tmp_path / "000001.log"
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    headers = [start + byte for start in ends(log_of(home))[:-1] for byte in range(7)]
    for place in rng.sample(headers, 300) + [rng.randrange(len(body)) for _ in range(300)]:
        damaged = bytearray(body)
        damaged[place] ^= 1 << rng.randrange(8)
        copy.write_bytes(damaged)
        fault = scan_log(copy).fault
        assert fault is not None, place
        assert fault.cut_at <= place
        assert not fault.torn or place >= last, place


@pytest.mark.promise("P1", "P7")
@pytest.mark.parametrize("cut", [1, 3, 6, 7, 8, 100])
def test_a_torn_tail_is_quarantined_and_reported_and_the_rest_opens(home: Path, cut: int) -> None:
    log = log_of(home)
    body, last = log.read_bytes(), ends(log)[-2]
    log.write_bytes(body[: last + cut])
    queues, state, reports = rows(home)
    assert (queues, state) == (199, 199)
    assert len(reports) == 1
    assert log.name in reports[0]
    kept = home / "quarantine" / f"{log.name}.tail-at-{last}"
    assert kept.read_bytes() == body[last : last + cut]
    assert rows(home) == (199, 199, [])


@pytest.mark.promise("P1", "P7")
@pytest.mark.parametrize("seed", range(8))
def test_random_bytes_after_the_last_record_are_quarantined_and_no_record_is_lost(home: Path, seed: int) -> None:
    log = log_of(home)
    size = log.stat().st_size
    noise = random.Random(seed).randbytes(random.Random(seed).randint(1, 100_000))
    log.write_bytes(log.read_bytes() + noise)
    queues, state, reports = rows(home)
    assert (queues, state, len(reports)) == (200, 200, 1)
    assert (home / "quarantine" / f"{log.name}.tail-at-{size}").read_bytes() == noise


def test_zeros_after_the_last_record_are_preallocated_space(home: Path) -> None:
    log = log_of(home)
    log.write_bytes(log.read_bytes() + bytes(100_000))
    assert rows(home) == (200, 200, [])


@pytest.mark.promise("P7")
@pytest.mark.parametrize(
    ("what", "new"),
    [
        ("payload", (20, b"\xff\xff")),
        ("zeroed header, over which RocksDB reads in silence", (0, bytes(7))),
        ("recyclable type, on which RocksDB reads for ever", (6, b"\x05")),
        ("length", (4, b"\xff\x00")),
        ("checksum", (0, b"\x00")),
    ],
)
def test_damage_in_the_middle_is_refused_with_file_and_offset_and_nothing_changes(
    home: Path, what: str, new: tuple[int, bytes]
) -> None:
    log = log_of(home)
    start = ends(log)[20]
    edit(log, start + new[0], new[1])
    before = tree(home)
    with pytest.raises(CorruptionError, match=rf"{log.name}.* at byte {start} .*repair"):
        open_store(home)
    assert tree(home) == before


@pytest.mark.promise("P7")
def test_a_damaged_length_in_the_last_record_is_damage_and_not_a_torn_tail(home: Path) -> None:
    log = log_of(home)
    start = ends(log)[-2]
    edit(log, start + 5, b"\x40")
    with pytest.raises(CorruptionError, match=r"a length beyond|length does not fit"):
        open_store(home)


@pytest.mark.promise("P7")
def test_a_torn_wal_followed_by_a_wal_with_records_is_damage(home: Path) -> None:
    log = log_of(home)
    whole = log.read_bytes()
    log.with_name(f"{int(log.stem) + 40:06}.log").write_bytes(whole[: ends(log)[3]])
    log.write_bytes(whole[:-5])
    before = tree(home)
    with pytest.raises(CorruptionError, match=rf"{log.name}: .*but the later .* has records"):
        open_store(home)
    assert tree(home) == before


def test_a_torn_wal_whose_rows_were_flushed_is_ignored(home: Path) -> None:
    rows(home)
    (home / "kv" / "000001.log").write_bytes(random.Random(1).randbytes(5000))
    assert oldest_log(current_manifest(home / "kv")) > 1
    assert rows(home) == (200, 200, [])


@pytest.mark.promise("P7")
def test_repair_keeps_the_records_after_the_damage_and_the_original_file(home: Path) -> None:
    log = log_of(home)
    start = ends(log)[150]
    edit(log, start + 20, b"\xff\xff")
    damaged = log.read_bytes()
    outcome = repair(home)
    assert outcome.kept is not None
    assert (outcome.kept / "kv" / log.name).read_bytes() == damaged
    assert any(log.name in loss.line() for loss in outcome.losses)
    assert rows(home) == (199, 199, [])
    assert repair(home) == Repaired()


def test_repair_of_an_intact_store_changes_nothing(home: Path) -> None:
    before = tree(home)
    assert repair(home) == Repaired()
    after = tree(home)
    before.pop("LOCK", None)
    after.pop("LOCK", None)
    assert after == before


@pytest.mark.promise("P7")
def test_repair_writes_current_again_if_the_manifest_is_intact(home: Path) -> None:
    (home / "kv" / "CURRENT").write_bytes(b"MANIFEST-junk\n")
    with pytest.raises(CorruptionError, match="CURRENT"):
        open_store(home)
    outcome = repair(home)
    assert len(outcome.done) == 1
    assert outcome.kept is None
    assert rows(home) == (200, 200, [])


@pytest.mark.promise("P7")
def test_a_manifest_damaged_in_the_middle_is_refused_and_rebuilt_by_repair(home: Path) -> None:
    manifest = current_manifest(home / "kv")
    edit(manifest, 60, bytes(7))
    before = tree(home)
    with pytest.raises(CorruptionError, match=f"{manifest.name}.*restore a backup"):
        open_store(home)
    assert tree(home) == before
    assert repair(home).losses == []
    assert rows(home) == (200, 200, [])


@pytest.mark.promise("P7")
def test_a_manifest_shortened_after_a_clean_close_is_refused(home: Path) -> None:
    rows(home)
    manifest = current_manifest(home / "kv")
    records = list(read_records(manifest))
    manifest.write_bytes(encode(records[:-1]))
    with pytest.raises(CorruptionError, match=f"{manifest.name} has .*after a clean close"):
        open_store(home)
