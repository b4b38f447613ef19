"""Hypothesis strategies for records, and batches as producers send them."""

from __future__ import annotations

from struct import pack

import google_crc32c
from hypothesis import strategies as st
from tests.log_frames import encode_plain

from basaltmq.log.batches import kafka
from basaltmq.log.batches.record import NEVER, Record

TIMES = st.integers(0, 1 << 45)
HEADERS = st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=9)), max_size=3)


@st.composite
def records(draw: st.DrawFn) -> Record:
    return Record(
        draw(st.none() | st.binary(max_size=40)),
        draw(st.none() | st.binary(max_size=9)),
        tuple(draw(HEADERS)),
        tuple(draw(st.lists(st.binary(max_size=9), max_size=3))),
        draw(TIMES),
        draw(st.just(NEVER) | st.integers(1, 1 << 45)),
    )


BATCHES = st.lists(records(), min_size=1, max_size=12)


def transactional(producer_id: int, sequence: int, *values: bytes, key: bytes | None = None, epoch: int = 0) -> bytes:
    """Return a record batch of a producer's transaction."""
    raw = encode_plain([Record(value, key, timestamp_ms=1_700_000_000_000) for value in values])
    attributes = pack(">h", kafka.TRANSACTIONAL)
    covered = attributes + raw[23:43] + pack(">qhi", producer_id, epoch, sequence) + raw[57:]
    return raw[:17] + pack(">I", google_crc32c.value(covered)) + covered
