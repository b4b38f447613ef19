"""Runs: consecutive frames in one buffer, and what ends a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.log_frames import encode_batch
from tests.unit.log.strategies import BATCHES
from tests.unit.log.test_columnar import stored

from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import Record
from basaltmq.log.frame import RELOCATED
from basaltmq.log.run import Taken, take_runs

pa = pytest.importorskip("pyarrow")
from basaltmq.log.arrow import concatenated, cutter, joined, to_arrow  # noqa: E402

SEED = 11
SHARD = 5
PLENTY = 1 << 30


def frame(base: int, records: Sequence[Record], shard: int = SHARD, flags: int = 0) -> bytes:
    return b"".join(encode_batch(SEED, shard, base, ColumnBatch.from_records(records, 0), 0, flags))


def frames(batches: Sequence[Sequence[Record]], base: int = 0) -> list[bytes]:
    made = []
    for records in batches:
        made.append(frame(base, records))
        base += len(records)
    return made


def take(raw: bytes, base: int = 0, end: int = PLENTY, records_max: int = PLENTY, bytes_max: int = PLENTY) -> Taken:
    with_copies = take_runs(SEED, raw, SHARD, base, end, records_max, bytes_max, None)
    taken = take_runs(SEED, raw, SHARD, base, end, records_max, bytes_max, cutter(raw))
    assert taken[1:] == with_copies[1:]
    return taken


def plain(*sizes: int, key: bytes | None = None) -> list[Record]:
    return [Record(bytes(size), key, timestamp_ms=size) for size in sizes]


PLAIN = st.lists(
    st.builds(Record, st.binary(max_size=30), st.none() | st.binary(max_size=5), timestamp_ms=st.integers(0, 1 << 40)),
    min_size=1,
    max_size=9,
)
ALIKE = st.builds(lambda records, times: [records] * times, PLAIN, st.integers(1, 4))


@pytest.mark.spec("B6")
@given(st.lists(ALIKE, min_size=1, max_size=5), st.integers(0, 1 << 20) | st.just((1 << 16) - 3))
def test_a_run_has_the_same_records_as_its_single_frames(groups: list[list[list[Record]]], base: int) -> None:
    batches = [records for group in groups for records in group]
    taken = take(b"".join(frames(batches, base)), base)
    everything = [record for records in batches for record in records]
    assert [record for run in taken.runs for record in run.records()] == stored(everything, base)
    assert (taken.records, taken.next_offset) == (len(everything), base + len(everything))
    arrow = joined(taken.runs)
    arrow.validate(full=True)
    one_by_one = [to_arrow(batch, at) for run in taken.runs for at, batch in run.batches()]
    assert arrow.equals(concatenated(one_by_one))


@pytest.mark.spec("B6")
@given(st.lists(BATCHES, min_size=1, max_size=4))
def test_runs_with_headers_and_tags_are_joined_too(batches: list[list[Record]]) -> None:
    taken = take(b"".join(frames(batches)))
    whole = 0
    for records in batches:
        if any(record.expire_at_ms for record in records):
            break
        whole += len(records)
    assert taken.next_offset == whole
    expected = [record for records in batches for record in records][:whole]
    assert [record for run in taken.runs for record in run.records()] == stored(expected, 0)
    arrow = joined(taken.runs)
    arrow.validate(full=True)
    assert arrow.num_rows == whole
    assert arrow.column("headers").to_pylist() == [
        [{"key": name, "value": value} for name, value in record.headers] for record in expected
    ]


def test_frames_with_the_same_layout_form_one_run() -> None:
    taken = take(b"".join(frames([plain(3, 5), plain(4, 4), plain(1, 7), plain(1), plain(2)])))
    assert [len(run.begins) for run in taken.runs] == [3, 1, 1]


def test_runs_with_a_gap_between_them_keep_their_offsets() -> None:
    first, second = take(frame(0, plain(1, 2))), take(frame(1 << 20, plain(3)), 1 << 20)
    assert joined([*first.runs, *second.runs]).column("offset").to_pylist() == [0, 1, 1 << 20]


FOLLOWING: dict[str, Callable[[], bytes]] = {
    "another shard": lambda: frame(2, plain(1), shard=SHARD + 1),
    "a gap": lambda: frame(3, plain(1)),
    "an earlier offset": lambda: frame(1, plain(1)),
    "a copy": lambda: frame(2, plain(1), flags=RELOCATED),
    "expiries": lambda: frame(2, [Record(b"x", expire_at_ms=9, timestamp_ms=1)]),
    "nothing": lambda: b"",
    "zeros": lambda: bytes(200),
    "half a frame": lambda: frame(2, plain(50))[:-16],
}


@pytest.mark.promise("P3")
@pytest.mark.parametrize("following", FOLLOWING)
def test_an_irregular_frame_ends_a_run(following: str) -> None:
    raw = frame(0, plain(8, 8)) + FOLLOWING[following]() + frame(3, plain(1))
    taken = take(raw if following not in ("nothing", "half a frame") else raw[: -len(frame(3, plain(1)))])
    assert (taken.next_offset, len(taken.runs), taken.is_next, taken.is_full) == (2, 1, False, False)
    assert taken.is_cut == (following in ("nothing", "half a frame"))
    assert taken.size_bytes == len(frame(0, plain(8, 8)))


@pytest.mark.promise("P3")
def test_a_frame_with_a_changed_byte_ends_a_run() -> None:
    # All bytes except padding, which has no meaning. This frame has none.
    good, bad = frame(0, plain(8, 8)), frame(2, plain(7, 3, key=b"k"))
    for at in range(len(bad)):
        changed = bytearray(bad)
        changed[at] ^= 0x10
        assert take(good + bytes(changed)).next_offset == 2, f"byte {at}"


@pytest.mark.promise("P3")
def test_frames_at_or_after_the_end_are_not_returned() -> None:
    raw = b"".join(frames([plain(1, 1)] * 4))
    assert take(raw, end=4).next_offset == 4
    assert not take(raw, end=0).runs


@pytest.mark.parametrize(
    ("records_max", "bytes_max", "taken_records", "is_full"), [(5, 99, 4, False), (99, 5, 4, True)]
)
def test_a_frame_that_exceeds_the_limits_ends_a_run(
    records_max: int, bytes_max: int, taken_records: int, is_full: bool
) -> None:
    taken = take(b"".join(frames([plain(1, 1)] * 4)), records_max=records_max, bytes_max=bytes_max)
    assert (taken.records, taken.data_bytes) == (taken_records, taken_records)
    assert (taken.is_next, taken.is_full) == (True, is_full)
    assert not take(frame(0, plain(9)), bytes_max=1).runs


def rows_of(batch: Any) -> list[bytes]:
    values: list[bytes] = batch.column("value").to_pylist()
    return values


def test_empty_values_are_joined() -> None:
    taken = take(b"".join(frames([plain(0, 0), plain(0, 0), plain(0, 1)])))
    assert rows_of(joined(taken.runs)) == [b"", b"", b"", b"", b"", bytes(1)]


def test_values_of_equal_and_different_sizes_keep_their_order() -> None:
    """Offsets of frames with equal sizes are cached. Other frames must not use the cached offsets."""
    alike, shifted, empty = plain(3, 3, 3), plain(2, 3, 4), plain(0, 0, 0)
    layouts = [[alike] * 3, [shifted] * 2, [alike, shifted], [shifted, alike], [empty] * 2, [alike], [plain(5)] * 4]
    for first in layouts:
        for second in layouts:
            for third in layouts:
                batches = [*first, *second, *third]
                arrow = joined(take(b"".join(frames(batches))).runs)
                arrow.validate(full=True)
                assert rows_of(arrow) == [record.value for batch in batches for record in batch]
