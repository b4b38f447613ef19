"""Rows read and written in place agree with the message codec."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.errors import CorruptionError
from basaltmq.queues.entries import rows
from basaltmq.queues.entries.backing import APART, RETURNED, SHARED, TIMED, Entry
from basaltmq.queues.message import Message, encode_row
from basaltmq.queues.stats import FIELDS, QueueStats

TEXTS = st.text(max_size=5)
MESSAGES = st.builds(
    Message,
    id=st.binary(min_size=16, max_size=16),
    queue=TEXTS,
    payload=st.binary(max_size=40),
    enqueued_ns=st.integers(0, 2**64 - 1),
    fairness_key=TEXTS,
    headers=st.dictionaries(TEXTS, TEXTS, max_size=3),
    properties=st.binary(max_size=10),
    weight=st.integers(1, 2**32 - 1),
    throttle_keys=st.lists(TEXTS, max_size=2).map(tuple),
    attempts=st.integers(0, 2**32 - 1),
    priority=st.integers(0, 255),
    expires_ns=st.integers(0, 2**64 - 1),
)


@pytest.mark.spec("E3")
@given(MESSAGES, st.sampled_from([0, TIMED, APART, APART | SHARED, APART | SHARED | TIMED]), st.integers(0, 2**32 - 1))
def test_in_place_reads_match_the_codec(message: Message, flags: int, body_bytes: int) -> None:
    if flags & APART:
        message.payload = b""
    row, key, body_id = encode_row(message), message.key(), b"b" * 16
    if flags:
        row = rows.wrap(row, flags, body_id, body_bytes)
    entry = rows.read_entry(key, row)
    assert rows.read_entries([(key, row)]) == [entry]
    assert entry.flags == flags | (RETURNED if message.attempts else 0)
    assert rows.returns_of(row) == 0
    assert entry.expires_ns == message.expires_ns
    assert entry.size_bytes == (body_bytes if flags & APART else len(message.payload))
    assert rows.payload_of(row) == message.payload
    assert rows.attempts_of(row) == message.attempts
    assert rows.weight_of(row) == message.weight
    assert rows.throttle_keys_of(key, row) == message.throttle_keys
    assert rows.sub_of(key, 2 + len(message.queue.encode())) == message.fairness_key
    assert rows.open_row(key, row) == message
    assert rows.body_of(row) == (body_id if flags else rows.NO_BODY)
    twice = rows.count_return(rows.count_return(row))
    assert rows.returns_of(twice) == 2
    assert rows.unwrap(twice) == (*rows.unwrap(row)[:1], flags | RETURNED, *rows.unwrap(row)[2:])
    assert rows.read_entry(key, twice) == Entry(key, twice, entry.size_bytes, flags | RETURNED, entry.expires_ns)
    assert rows.unwrap(rows.rewrap(twice, b"i" * 60)) == (b"i" * 60, *rows.unwrap(twice)[1:])
    assert rows.rewrap(encode_row(message), b"i") == b"i"


@given(st.lists(st.binary(max_size=30)), st.integers(0, 2**64 - 1))
def test_plain_rows_match_the_codec(payloads: list[bytes], expires_ns: int) -> None:
    assert rows.plain_rows(payloads, expires_ns) == [
        encode_row(Message(id=bytes(16), queue="q", payload=payload, enqueued_ns=0, expires_ns=expires_ns))
        for payload in payloads
    ]


@given(st.binary(max_size=60))
def test_damaged_row_is_reported_as_corruption(row: bytes) -> None:
    key = Message(id=bytes(16), queue="q", payload=b"", enqueued_ns=0).key()
    for read in (lambda: rows.read_entry(key, row), lambda: rows.read_entries([(key, row)])):
        try:
            read()
        except CorruptionError:
            continue


@given(TEXTS, st.integers(0, 255))
def test_sub_queue_names_begin_with_the_priority(fairness_key: str, priority: int) -> None:
    assert rows.split_sub_queue(rows.sub_queue(fairness_key, priority)) == (priority, fairness_key)
    assert rows.sub_queue(fairness_key, None) == fairness_key


@given(st.lists(st.integers(0, 2**64 - 1), min_size=len(FIELDS), max_size=len(FIELDS)))
def test_counts_round_trip(values: list[int]) -> None:
    stats = QueueStats()
    stats.restore((*values, 0, 0))
    assert QueueStats.decode("q", stats.encode()).values() == (*values, 0, 0)
    with pytest.raises(CorruptionError, match="counts of queue 'q'"):
        QueueStats.decode("q", stats.encode()[:-1])
