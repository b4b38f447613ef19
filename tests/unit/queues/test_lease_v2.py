"""Lease rows of version 2 come back as they went in, and damaged ones are told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.errors import CorruptionError, InvalidArgumentError
from basaltmq.queues.lease_v2 import Lease, decode_lease, encode_lease
from basaltmq.store.keys import queues as keys

U64 = st.integers(0, (1 << 64) - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
LEASES = st.builds(
    Lease,
    queue=TEXT,
    message_id=st.binary(min_size=16, max_size=16),
    consumer=TEXT,
    expires_ns=U64,
    token=U64,
    fairness_key=TEXT,
    enqueued_ns=U64,
)


@pytest.mark.spec("C2")
@given(LEASES)
def test_a_lease_round_trips_and_finds_its_message(lease: Lease) -> None:
    assert decode_lease(lease.queue, lease.message_id, encode_lease(lease)) == lease
    assert keys.decode_message_key(lease.message_key()) == (
        lease.queue,
        lease.fairness_key,
        lease.enqueued_ns,
        lease.message_id,
    )


@pytest.mark.spec("C2")
@given(LEASES, st.binary(min_size=1, max_size=3))
def test_a_lease_cut_at_any_byte_or_with_bytes_added_is_damaged(lease: Lease, added: bytes) -> None:
    row = encode_lease(lease)
    for wrong in (*(row[:size] for size in range(len(row))), row + added, b"\x09" + row[1:]):
        with pytest.raises(CorruptionError, match=lease.message_id.hex()):
            decode_lease(lease.queue, lease.message_id, wrong)


@pytest.mark.spec("C2")
def test_a_time_or_name_that_does_not_fit_is_refused() -> None:
    fields = {"queue": "q", "message_id": b"i" * 16, "fairness_key": "", "enqueued_ns": 0}
    with pytest.raises(InvalidArgumentError, match="64 bits"):
        encode_lease(Lease(**fields, consumer="c", expires_ns=1 << 64, token=0))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="too long"):
        encode_lease(Lease(**fields, consumer="c" * 70_000, expires_ns=1, token=0))  # type: ignore[arg-type]
