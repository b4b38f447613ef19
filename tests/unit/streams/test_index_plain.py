"""Key hashes of plain frames, computed without decoding records."""

from __future__ import annotations

import pytest

from basaltmq.log.batches.columnar import KEY_OFFSETS, VALUE_OFFSETS, ColumnBatch
from basaltmq.log.batches.record import Record
from basaltmq.streams.adapter import hash64
from basaltmq.streams.engines.segment.index.plain import key_hashes
from basaltmq.streams.engines.segment.index.rows import IndexTerms
from basaltmq.streams.shards import ShardConfig

AT = 3


def _found(batch: ColumnBatch, *, records: int | None = None, is_wanted: bool = True) -> set[bytes] | None:
    raw = b"\xff" * AT + batch.body + b"\xff" * 9
    return key_hashes(raw, AT, len(batch.body), batch.count if records is None else records, is_wanted=is_wanted)


@pytest.mark.promise("P6")
@pytest.mark.parametrize(
    "keys", [[b"a"], [b"a", b"b", b"a"], [b"", b"long" * 100, b"x"], [b"k%d" % at for at in range(500)]]
)
def test_hashes_equal_those_of_the_decoded_records(keys: list[bytes]) -> None:
    batch = ColumnBatch.from_records([Record(b"v" * at, key) for at, key in enumerate(keys)], 1)
    words = IndexTerms(batch, ShardConfig(index_keys=True))
    found = _found(batch)
    assert found == {each.to_bytes(8, "big") for each in words.key_hashes}
    assert found == {hash64(key).to_bytes(8, "big") for key in keys}
    assert _found(batch, is_wanted=False) == set()


@pytest.mark.promise("P6")
@pytest.mark.parametrize(
    "records",
    [
        [Record(b"v")],
        [Record(b"v", b"a"), Record(b"v")],
        [Record(b"v", b"a", headers=(("h", b"x"),))],
        [Record(b"v", b"a", tags=(b"t",))],
        [Record(b"v", b"a", expire_at_ms=5)],
        # The same number of buffers as a body with values and keys.
        [Record(b"v", tags=(b"t",), expire_at_ms=5)],
    ],
)
def test_a_body_with_other_columns_takes_the_slow_path(records: list[Record]) -> None:
    assert _found(ColumnBatch.from_records(records, 1)) is None


@pytest.mark.promise("P6")
@pytest.mark.parametrize("kind", [VALUE_OFFSETS, KEY_OFFSETS])
@pytest.mark.parametrize("place", [0, 2])
def test_offsets_that_do_not_match_their_data_take_the_slow_path(kind: int, place: int) -> None:
    batch = ColumnBatch.from_records([Record(b"v", b"a"), Record(b"v", b"b")], 1)
    body = bytearray(batch.body)
    at = batch.extents[kind][0] + 4 * place
    body[at : at + 4] = (9).to_bytes(4, "little")
    assert key_hashes(bytes(body), 0, len(body), 2, is_wanted=True) is None


@pytest.mark.promise("P6")
def test_a_count_or_length_that_differs_from_the_header_takes_the_slow_path() -> None:
    batch = ColumnBatch.from_records([Record(b"v", b"a"), Record(b"v", b"b")], 1)
    assert _found(batch, records=1) is None
    assert key_hashes(batch.body, 0, len(batch.body) - 8, 2, is_wanted=True) is None
