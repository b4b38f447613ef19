"""The directory of a store: its marker, its lock, and sealed lines."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from uuid import uuid4

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.errors import (
    BasaltError,
    CorruptionError,
    DiskFullError,
    StorageError,
    StoreLockedError,
    StoreReadOnlyError,
)
from basaltmq.store.directory import (
    Marker,
    StoreDirectory,
    decode_line,
    encode_line,
    os_error,
    read_marker,
    write_durably,
)

PATH = Path("STORE")


@given(st.dictionaries(st.text(), st.one_of(st.integers(), st.text(), st.none(), st.lists(st.integers())), max_size=5))
def test_a_sealed_line_decodes_to_its_content(said: dict[str, object]) -> None:
    assert decode_line(encode_line(said), PATH, "") == said


@pytest.mark.promise("P7")
def test_any_flipped_bit_in_a_sealed_line_is_detected() -> None:
    raw = Marker(uuid4()).encode()
    # The newline is not part of the content.
    for bit in range((len(raw) - 1) * 8):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptionError):
            Marker.decode(bytes(damaged), PATH)


@given(st.binary(max_size=200))
def test_arbitrary_marker_bytes_raise_only_the_documented_errors(raw: bytes) -> None:
    with pytest.raises(BasaltError):
        Marker.decode(raw, PATH)


def test_a_marker_is_written_once_and_read_back(tmp_path: Path) -> None:
    directory = StoreDirectory.hold(tmp_path / "a" / "b", create=True)
    assert directory.is_new
    directory.claim()
    directory.release()
    again = StoreDirectory.hold(tmp_path / "a" / "b", create=False)
    assert not again.is_new
    assert again.marker == directory.marker == read_marker(tmp_path / "a" / "b")
    again.release()
    again.release()


def test_an_unclaimed_lock_leaves_no_file(tmp_path: Path) -> None:
    write_durably(tmp_path / "STORE", Marker(uuid4()).encode())
    directory = StoreDirectory.hold(tmp_path, create=False)
    with pytest.raises(StoreLockedError):
        StoreDirectory.hold(tmp_path, create=False)
    directory.release()
    assert [entry.name for entry in tmp_path.iterdir()] == ["STORE"]


def test_one_of_many_concurrent_openers_locks_the_directory(tmp_path: Path) -> None:
    write_durably(tmp_path / "STORE", Marker(uuid4()).encode())
    start = threading.Barrier(8)
    inside: list[int] = []
    most: list[int] = []
    refused: list[BaseException] = []

    def ask(number: int) -> None:
        start.wait(30)
        for _ in range(50):
            try:
                directory = StoreDirectory.hold(tmp_path, create=False)
            except StoreLockedError as error:
                refused.append(error)
                continue
            inside.append(number)
            most.append(len(inside))
            inside.remove(number)
            directory.release()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(most) + len(refused) == 400
    assert set(most) == {1}


def test_a_failed_durable_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_durably(tmp_path / "file", b"old")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_durably(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, DiskFullError),
        (errno.EDQUOT, DiskFullError),
        (errno.EROFS, StoreReadOnlyError),
        (errno.EACCES, StoreReadOnlyError),
        (errno.EIO, StorageError),
    ],
)
def test_operating_system_errors_map_to_basalt_errors(code: int, kind: type[StorageError]) -> None:
    import os

    error = os_error(OSError(code, os.strerror(code)), Path("/data/store"))
    assert type(error) is kind
    assert "/data/store" in str(error)


@pytest.mark.promise("P7")
@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_line_with_a_matching_checksum_and_no_content_is_corrupt(body: bytes) -> None:
    raw = b"%08x %b\n" % (google_crc32c.value(body), body)
    with pytest.raises(CorruptionError, match="is not JSON; restore it"):
        Marker.decode(raw, PATH)
