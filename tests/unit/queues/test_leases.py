"""Leases: fencing tokens, rows after a kill, expiry."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.queues.conftest import NOWHERE, Clock, Planes, TestStore, payloads, settle

from basaltmq.errors import CorruptionError, QueueNotFoundError, StaleLeaseError, StoreStalledError
from basaltmq.queues.entries.backing import TRANSIENT, Entry
from basaltmq.queues.entries.plain import Plain
from basaltmq.queues.leases.expiry import EXPIRY_PAGE, HEAP_SLACK, LeaseExpiry
from basaltmq.queues.leases.table import LeaseCall, Tokens, decode_lease_call, encode_lease_call
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys.parts import lp
from basaltmq.store.keys.queues import lease_expiry_key, message_key

KEYS = st.lists(
    st.tuples(st.sampled_from(["", "a", "é"]), st.integers(0, 2**64 - 1), st.binary(min_size=16, max_size=16)),
    unique_by=lambda key: key[2],
    max_size=20,
)


@pytest.mark.spec("C2", "C7")
@given(st.text(max_size=10), st.text(max_size=10), KEYS, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_lease_row_holds_the_leased_messages(
    queue: str, consumer: str, places: list[tuple[str, int, bytes]], expires_ns: int, token: int
) -> None:
    keys = [message_key(queue, *place) for place in places]
    call = LeaseCall(token, consumer, 7, expires_ns, {key[-16:]: Entry(key, b"", 0) for key in keys})
    decoded, found = decode_lease_call(queue, token, encode_lease_call(call, len(lp(queue))))
    assert found == keys
    assert (decoded.token, decoded.consumer, decoded.leased_ns, decoded.expires_ns) == (token, consumer, 7, expires_ns)


@pytest.mark.spec("C2", "C7")
@given(st.sampled_from(["", "a", "é"]), st.lists(st.binary(min_size=16, max_size=16), min_size=1, unique=True))
def test_lease_row_of_columns_is_independent_of_enqueue_calls(sub: str, ids: list[bytes]) -> None:
    ids.sort()
    sizes = [1] * len(ids)
    one_call = [message_key("q", sub, 5, each) for each in ids]
    two_calls = [*one_call, *[message_key("q", sub, 6, each) for each in ids]]
    rows: list[bytes] = []
    for keys, all_ids in ((one_call, ids), (two_calls, ids + ids)):
        call = LeaseCall(1, "c", 7, 8, {}, Plain(keys, [], sizes * (len(keys) // len(ids))), all_ids)
        rows.append(encode_lease_call(call, len(lp("q"))))
        decoded, found = decode_lease_call("q", 1, rows[-1])
        assert found == keys
        assert (decoded.consumer, decoded.leased_ns, decoded.expires_ns) == ("c", 7, 8)
    assert [row[0] for row in rows] == [2, 1]
    for cut in (1, 15):
        with pytest.raises(CorruptionError):
            decode_lease_call("q", 1, rows[0][:-cut])


def test_transient_messages_are_not_in_the_lease_row() -> None:
    key = message_key("q", "a", 1, bytes(16))
    call = LeaseCall(1, "c", 0, 0, {key[-16:]: Entry(key, b"", 0, TRANSIENT)})
    assert decode_lease_call("q", 1, encode_lease_call(call, 3))[1] == []


@given(st.binary(max_size=80))
def test_damaged_lease_row_is_reported(row: bytes) -> None:
    try:
        decode_lease_call("q", 1, row)
    except CorruptionError as error:
        assert "lease 1 of queue 'q'" in str(error)  # noqa: PT017


@pytest.mark.spec("C7")
@pytest.mark.promise("P4")
def test_tokens_grow_over_restarts(store: TestStore) -> None:
    seen: list[int] = []
    for _ in range(3):
        tokens = Tokens.open(store, NOWHERE)
        seen += [tokens.next() for _ in range(3)]
    assert seen == sorted(set(seen))


@pytest.mark.spec("C7")
@pytest.mark.promise("P4")
def test_stale_token_is_refused_without_changes(plane: QueuePlane, make: Callable[..., str], clock: Clock) -> None:
    queue = make(visibility_timeout_ms=100)
    plane.enqueue(queue, [b"a"])
    first = plane.lease(queue)[0]
    clock.pass_ms(100)
    settle(plane, clock)
    second = plane.lease(queue)[0]
    assert second.id == first.id
    assert second.token > first.token
    for answer in (plane.ack, plane.nack, plane.release, plane.extend):
        with pytest.raises(StaleLeaseError):
            answer(queue, first.token)
    with pytest.raises(StaleLeaseError):
        plane.ack(queue, first.token, [first.id])
    assert plane.stats(queue)["leased"] == 1
    assert plane.ack(queue, second.token) == 1


@pytest.mark.spec("C7")
def test_ack_with_a_message_outside_the_lease_is_refused(plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make()
    plane.enqueue(queue, [b"a", b"b", b"c"])
    mine = plane.lease(queue, 2)
    other = plane.lease(queue)[0]
    for ids in ([mine[0].id, other.id], [mine[0].id, mine[0].id], [bytes(16)]):
        with pytest.raises(StaleLeaseError):
            plane.ack(queue, mine[0].token, ids)
    assert plane.stats(queue)["leased"] == 3
    plane.ack(queue, mine[0].token, [mine[0].id])
    with pytest.raises(StaleLeaseError):
        plane.ack(queue, mine[0].token, [mine[0].id])
    plane.ack(queue, mine[0].token)
    with pytest.raises(StaleLeaseError):
        plane.ack(queue, mine[0].token)


@pytest.mark.spec("C7", "C13")
def test_ack_after_queue_deletion_is_refused(plane: QueuePlane, make: Callable[..., str]) -> None:
    queue = make()
    plane.enqueue(queue, [b"a"])
    held = plane.lease(queue)[0]
    plane.delete(queue)
    with pytest.raises(QueueNotFoundError):
        plane.ack(queue, held.token)
    make()
    plane.enqueue(queue, [b"b"])
    with pytest.raises(StaleLeaseError):
        plane.ack(queue, held.token)
    assert payloads(plane, queue) == [b"b"]


@pytest.mark.spec("C7", "E10")
@pytest.mark.parametrize("part", ["ack", "nack", "release"])
def test_leases_survive_a_kill(
    planes: Planes, plane: QueuePlane, make: Callable[..., str], clock: Clock, part: str
) -> None:
    queue = make(visibility_timeout_ms=1000)
    plane.enqueue(queue, [b"a", b"b", b"c"])
    held = plane.lease(queue, 3, consumer="worker")
    getattr(plane, part)(queue, held[0].token, [held[1].id])
    again = planes.open()
    stats = again.stats(queue)
    assert stats["leased"] == 2
    assert stats["ready"] == (0 if part == "ack" else 1)
    assert [d.payload for d in again.lease(queue, 5)] == ([] if part == "ack" else [b"b"])
    assert again.ack(queue, held[0].token, [held[0].id]) == 1
    clock.pass_ms(1000)
    settle(again, clock)
    assert [(d.payload, d.attempts) for d in again.lease(queue, 5)] == (
        [(b"c", 1)] if part == "ack" else [(b"b", 2 if part == "nack" else 1), (b"c", 1)]
    )


@pytest.mark.spec("C7")
def test_hold_writes_nothing_and_lasts_until_release_or_process_end(
    planes: Planes, plane: QueuePlane, make: Callable[..., str], clock: Clock, store: TestStore
) -> None:
    queue = make()
    plane.enqueue(queue, [b"a", b"b", b"c"])
    before = len(store.batches)
    held = plane.lease(queue, 3, visibility_ms=0)
    assert len(store.batches) == before
    clock.pass_ms(1e9)
    settle(plane, clock)
    assert plane.stats(queue)["leased"] == 3
    assert plane.ack(queue, held[0].token, [held[0].id]) == 1
    assert plane.release(queue, held[0].token, [held[1].id]) == 1
    assert store.rows(Family.LEASES) == store.rows(Family.LEASE_EXPIRY) == []
    again = planes.open()
    assert again.deadline_ns() is None
    assert [(d.payload, d.attempts) for d in again.lease(queue, 5)] == [(b"b", 0), (b"c", 0)]
    with pytest.raises(StaleLeaseError):
        again.ack(queue, held[0].token)


@pytest.mark.spec("C7")
def test_hold_converts_to_a_lease_and_back(
    planes: Planes, plane: QueuePlane, make: Callable[..., str], clock: Clock, store: TestStore
) -> None:
    queue = make()
    plane.enqueue(queue, [b"a", b"b"])
    held = plane.lease(queue, 2, visibility_ms=0)
    assert plane.extend(queue, held[0].token, 1000) == held[0].token
    assert planes.open().stats(queue)["leased"] == 2
    part = plane.extend(queue, held[0].token, 0, [held[0].id])
    assert part != held[0].token
    assert plane.extend(queue, held[0].token, 0) == held[0].token
    assert store.rows(Family.LEASES) == store.rows(Family.LEASE_EXPIRY) == []
    clock.pass_ms(1e9)
    settle(plane, clock)
    assert plane.ack(queue, part) == plane.ack(queue, held[0].token) == 1
    assert planes.open().stats(queue)["messages"] == 0


@pytest.mark.spec("C7")
def test_extended_lease_survives_a_restart(
    planes: Planes, plane: QueuePlane, make: Callable[..., str], clock: Clock
) -> None:
    queue = make(visibility_timeout_ms=100)
    plane.enqueue(queue, [b"a"])
    held = plane.lease(queue)[0]
    clock.pass_ms(90)
    assert plane.extend(queue, held.token, 100) == held.token
    clock.pass_ms(90)
    settle(plane, clock)
    again = planes.open()
    settle(again, clock)
    assert again.lease(queue) == []
    clock.pass_ms(10)
    settle(again, clock)
    assert again.lease(queue)[0].attempts == 1


@pytest.mark.spec("C7")
def test_extending_a_part_splits_the_lease(
    planes: Planes, plane: QueuePlane, make: Callable[..., str], clock: Clock, store: TestStore
) -> None:
    queue = make(visibility_timeout_ms=100)
    plane.enqueue(queue, [b"a", b"b", b"c"])
    held = plane.lease(queue, 3)
    token = plane.extend(queue, held[0].token, 1000, [held[1].id])
    assert token > held[0].token
    with pytest.raises(StaleLeaseError):
        plane.ack(queue, held[0].token, [held[1].id])
    with pytest.raises(StaleLeaseError):
        plane.extend(queue, token, 1000, [held[0].id])
    clock.pass_ms(100)
    settle(plane, clock)
    again = planes.open()
    assert again.stats(queue)["leased"] == 1
    assert again.ack(queue, token) == 1
    assert payloads(again, queue) == [b"a", b"c"]
    assert store.rows(Family.LEASES) == store.rows(Family.LEASE_EXPIRY) == []


@pytest.mark.spec("C6", "C7")
@pytest.mark.promise("P2")
def test_failed_write_leaves_leases_and_messages_unchanged(
    plane: QueuePlane, make: Callable[..., str], store: TestStore
) -> None:
    queue = make()
    plane.enqueue(queue, [b"a", b"b"])
    store.refuse = 1
    with pytest.raises(StoreStalledError):
        plane.lease(queue, 2)
    assert plane.stats(queue)["leased"] == 0
    held = plane.lease(queue, 2)
    assert [d.payload for d in held] == [b"a", b"b"]
    before = plane.stats(queue)
    for refused in (
        lambda: plane.ack(queue, held[0].token),
        lambda: plane.nack(queue, held[0].token, delay_ms=5),
        lambda: plane.nack(queue, held[0].token, reject=True),
        lambda: plane.release(queue, held[0].token, [held[0].id]),
        lambda: plane.extend(queue, held[0].token, 9, [held[0].id]),
        lambda: plane.extend(queue, held[0].token, 9),
        lambda: plane.enqueue(queue, [b"c"]),
    ):
        store.refuse = 1
        with pytest.raises(StoreStalledError):
            refused()
        assert plane.stats(queue) == before
    assert plane.ack(queue, held[0].token) == 2


@pytest.mark.spec("C7", "E10")
@pytest.mark.promise("P9")
def test_old_leases_are_loaded_in_pages_when_due(store: TestStore) -> None:
    old = Tokens.open(store, NOWHERE)
    tokens = [old.next() for _ in range(3 * EXPIRY_PAGE)]
    batch = Batch()
    for index, token in enumerate(tokens):
        batch.put(Family.LEASE_EXPIRY, lease_expiry_key(1000 + index, "q", token), b"")
    store.write(batch)
    expiry = LeaseExpiry(store, Tokens.open(store, NOWHERE), NOWHERE)
    assert len(expiry._heap) == EXPIRY_PAGE
    assert expiry.deadline_ns() == 1000
    due: list[int] = []
    while found := expiry.due(1000 + len(tokens), 100):
        due += [token for _, _, token in found]
    assert due == tokens
    assert expiry.deadline_ns() is None


@pytest.mark.promise("P8")
def test_settled_leases_are_removed_from_memory(store: TestStore) -> None:
    tokens = Tokens.open(store, NOWHERE)
    expiry = LeaseExpiry(store, tokens, NOWHERE)
    for number in range(10 * HEAP_SLACK):
        token = tokens.next()
        expiry.add(10**18 + number, "q", token)
        expiry.remove(token)
    assert len(expiry._heap) <= HEAP_SLACK + 1
    assert expiry.deadline_ns() is None


@pytest.mark.spec("C7")
def test_leases_expire_on_time_while_new_ones_arrive(plane: QueuePlane, make: Callable[..., str], clock: Clock) -> None:
    queue = make(visibility_timeout_ms=50)
    lost = plane.enqueue(queue, [b"lost"])
    plane.lease(queue)
    for step in range(100):
        plane.enqueue(queue, [b"%d" % step])
        done = plane.lease(queue)
        assert done[0].id != lost[0] or step >= 50
        plane.ack(queue, done[0].token)
        clock.pass_ms(1)
        plane.run_due(clock())
    assert plane.stats(queue)["failed"] == 1
    assert plane.stats(queue)["messages"] == 1
