"""The state of a group on a topic: leases, fences, chains of message groups."""

from __future__ import annotations

import random
from itertools import count

import pytest

from basaltmq.errors import CorruptionError
from basaltmq.streams.pop.lease import Lease, hash_of
from basaltmq.streams.pop.subscription import Subscription

pytestmark = pytest.mark.spec("G3", "C7")

NOW = 1_000


def made(*leases: Lease) -> Subscription:
    numbers = count(1)
    return Subscription({0: 0}, leases, NOW, lambda: next(numbers))


def delivered(state: Subscription, offset: int, group: bytes = b"", until_ms: int = NOW + 100) -> Lease:
    lease = state.admit(0, offset, group)
    state.hold(lease, NOW, until_ms)
    state.advance(0, offset + 1)
    return lease


def expire(state: Subscription, now_ms: int) -> None:
    state.expire(now_ms, lambda lease: 0)


def ready(state: Subscription, *, is_ordered: bool = False) -> list[int]:
    """Deliver everything that is ready, and return the offsets."""
    found = []
    for lease in state.ready(is_ordered):
        state.hold(lease, NOW, NOW + 1_000)
        found.append(lease.offset)
    return found


def test_only_the_current_token_settles_and_only_in_time() -> None:
    state = made()
    lease = delivered(state, 0)
    token = lease.token
    assert state.held(0, 0, token, NOW) is lease
    assert state.held(0, 0, token + 1, NOW) is None
    assert state.held(0, 1, token, NOW) is None
    assert state.held(0, 0, 0, NOW) is None
    assert state.held(0, 0, token, NOW + 100) is None
    expire(state, NOW + 100)
    assert ready(state) == [0]
    assert state.held(0, 0, token, NOW) is None
    assert lease.attempts == 2


def test_a_change_of_the_time_voids_the_token_and_stops_the_renewal() -> None:
    state = made()
    lease = delivered(state, 0)
    lease.holder = 7
    before = lease.token
    state.extend(lease, NOW + 500)
    assert lease.token != before
    state.expire(NOW + 500, lambda lease: NOW + 9_000)
    assert ready(state) == [0]


def test_a_lease_is_extended_while_its_client_is_alive() -> None:
    state = made()
    state.hold(state.admit(0, 0, b""), NOW, NOW + 100, holder=7)
    state.expire(NOW + 100, lambda lease: NOW + 200)
    assert ready(state) == []
    assert state.next_due_ms() == NOW + 200
    state.expire(NOW + 200, lambda lease: 0)
    assert ready(state) == [0]


def test_the_end_of_a_client_frees_its_leases_only() -> None:
    state = made()
    state.hold(state.admit(0, 0, b""), NOW, NOW + 100, holder=7)
    state.hold(state.admit(0, 1, b""), NOW, NOW + 100, holder=8)
    state.release_all(7, NOW)
    assert ready(state) == [0]


def test_a_delivery_that_did_not_arrive_counts_no_attempt() -> None:
    state = made()
    lease = delivered(state, 0)
    state.release(lease, NOW)
    assert lease.attempts == 0
    assert ready(state) == [0]


def test_the_same_attempt_finds_its_leases_until_they_are_settled() -> None:
    state = made()
    for offset in (1, 0):
        state.hold(state.admit(0, offset, b""), NOW, NOW + 100, attempt=5)
    assert [lease.offset for lease in state.of_attempt(5)] == [0, 1]
    state.settle(state.of_attempt(5)[0], NOW)
    assert [lease.offset for lease in state.of_attempt(5)] == [1]
    expire(state, NOW + 100)
    assert state.of_attempt(5) == []


def test_a_later_record_of_a_message_group_waits_for_the_earlier_one() -> None:
    state = made()
    first = delivered(state, 0, b"g")
    assert state.is_chained(0, b"g")
    state.admit(0, 1, b"g")
    assert not state.is_chained(0, b"other")
    assert ready(state) == []
    expire(state, NOW + 100)
    assert ready(state) == [0]
    state.settle(first, NOW)
    assert ready(state) == [1]


def test_the_records_of_a_message_group_keep_their_order_after_a_failure() -> None:
    state = made()
    leases = [delivered(state, offset, b"g") for offset in range(3)]
    state.settle(leases[1], NOW)
    tokens = [lease.token for lease in leases]
    expire(state, NOW + 100)
    assert ready(state, is_ordered=True) == [0, 2]
    assert state.held(0, 2, tokens[2], NOW) is None


def test_a_redelivery_voids_the_later_leases_of_the_message_group() -> None:
    state = made()
    first = delivered(state, 0, b"g", NOW + 100)
    later = delivered(state, 1, b"g", NOW + 10_000)
    token = later.token
    expire(state, NOW + 100)
    assert ready(state) == [0]
    assert state.held(0, 1, token, NOW + 101) is None
    assert state.changed[0, 1] is later
    state.settle(first, NOW)
    assert ready(state) == [1]


def test_an_expired_record_that_is_not_the_first_waits() -> None:
    state = made()
    delivered(state, 0, b"g", NOW + 10_000)
    delivered(state, 1, b"g", NOW + 100)
    expire(state, NOW + 100)
    assert ready(state, is_ordered=True) == []


def test_the_rows_give_the_same_state() -> None:
    state = made()
    held = delivered(state, 0, b"g", NOW + 500)
    held.attempt, held.holder = hash_of("a"), hash_of("c")
    state.admit(0, 1, b"g")
    delivered(state, 2)
    rows = [(lease.offset, lease.encode()) for lease in state.leases.values()]
    again = made(*(Lease.decode(0, offset, raw) for offset, raw in rows))
    assert again.held(0, 0, held.token, NOW) is not None
    assert [lease.offset for lease in again.of_attempt(hash_of("a"))] == [0]
    assert ready(again) == []
    expire(again, NOW + 100)
    assert ready(again) == [2]
    again.settle(again.leases[0, 0], NOW)
    assert ready(again) == [1]


def test_a_cursor_that_was_moved_back_voids_the_tokens_and_keeps_the_order() -> None:
    state = made()
    delivered(state, 0, b"g")
    state.settle(state.leases[0, 0], NOW)
    old = delivered(state, 1, b"g")
    token = old.token
    assert state.admit(0, 0, b"g") is not old
    assert state.admit(0, 1, b"g") is old
    assert state.held(0, 1, token, NOW) is None
    state.hold(state.leases[0, 0], NOW, NOW + 100)
    assert ready(state) == []
    state.settle(state.leases[0, 0], NOW)
    assert ready(state) == [1]


def test_a_ready_record_waits_for_an_earlier_one_that_the_cursor_finds_again() -> None:
    state = made()
    delivered(state, 0, b"g")
    state.settle(state.leases[0, 0], NOW)
    delivered(state, 1, b"g")
    expire(state, NOW + 100)
    state.hold(state.admit(0, 0, b"g"), NOW, NOW + 1_000)
    assert ready(state) == []
    state.settle(state.leases[0, 0], NOW)
    assert ready(state) == [1]


def test_a_returned_record_is_not_given_again_to_the_same_attempt() -> None:
    state = made()
    state.hold(state.admit(0, 0, b""), NOW, NOW + 100, attempt=5)
    state.extend(state.leases[0, 0], NOW + 500)
    assert state.of_attempt(5) == []


def test_a_damaged_row_is_refused() -> None:
    with pytest.raises(CorruptionError):
        Lease.decode(0, 0, b"\x01")
    with pytest.raises(CorruptionError):
        Lease.decode(0, 0, b"\x09" + Lease(0, 0).encode()[1:])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("is_ordered", [True, False])
def test_random_work_keeps_the_order_and_ends_empty(seed: int, is_ordered: bool) -> None:
    chance = random.Random(seed)
    state = made()
    groups = [b"", b"a", b"b"]
    group_of: dict[int, bytes] = {}
    settled: list[int] = []
    held: dict[int, int] = {}
    now, next_offset, total = NOW, 0, 60
    for _ in range(20_000):
        if len(settled) == total:
            break
        now += chance.randrange(20)
        expire(state, now)
        for lease in state.ready(is_ordered):
            state.hold(lease, now, now + 50)
            held[lease.offset] = lease.token
        if next_offset < total:
            group = group_of[next_offset] = chance.choice(groups)
            is_blocked = bool(group) and state.is_chained(0, group)
            lease = state.admit(0, next_offset, group)
            if not is_blocked:
                state.hold(lease, now, now + 50)
                held[next_offset] = lease.token
            next_offset += 1
        if held and chance.random() < 0.6:
            offset = chance.choice(list(held))
            current = state.held(0, offset, held.pop(offset), now)
            if current is None:
                continue
            if not is_ordered and group_of[offset]:
                earlier = [each for each in range(offset) if group_of[each] == group_of[offset]]
                assert set(earlier) <= set(settled), "an earlier record of the message group is not done"
            if chance.random() < 0.7:
                state.settle(current, now)
                settled.append(offset)
            else:
                state.extend(current, now + 5)
    assert sorted(settled) == list(range(total))
    assert not state.leases
