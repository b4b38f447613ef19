"""Leases under limits: their number in memory, and clocks that are set back."""

from __future__ import annotations

from itertools import count

from tests.unit.streams.pop.test_subscription import NOW, delivered, expire, made, ready

from basaltmq.streams.pop.lease import Lease
from basaltmq.streams.pop.subscription import Held, Subscription


def test_all_subscriptions_share_a_limit_of_leases() -> None:
    numbers = count(1)
    held = Held(limit=3)
    first, second = (Subscription({0: 0}, (), NOW, lambda: next(numbers), held) for _ in range(2))
    leases = [delivered(first, offset) for offset in range(2)]
    assert [each.is_full for each in (first, second)] == [False, False]
    delivered(second, 0)
    assert [each.is_full for each in (first, second)] == [True, True]
    first.settle(leases[0], NOW)
    assert [each.is_full for each in (first, second)] == [False, False]
    first.close()
    assert held.count == 1


def test_a_clock_that_is_set_back_does_not_hold_leases_longer() -> None:
    hour_ms = 3_600_000
    state = made()
    lease = state.admit(0, 0, b"")
    state.hold(lease, NOW + hour_ms, NOW + hour_ms + 100)
    token = lease.token
    expire(state, NOW + hour_ms)
    assert state.next_due_ms() == NOW + hour_ms + 100
    expire(state, NOW)
    assert state.next_due_ms() == NOW + 100
    assert state.held(0, 0, token, NOW + 50) is lease
    assert state.changed[0, 0] is lease
    expire(state, NOW + 100)
    assert ready(state) == [0]


def test_a_clock_that_was_set_back_before_the_start_does_not_hold_leases_longer() -> None:
    state = made()
    lease = state.admit(0, 0, b"")
    state.hold(lease, NOW + 3_600_000, NOW + 3_600_100)
    again = made(Lease.decode(0, 0, lease.encode()))
    expire(again, NOW + 100)
    assert ready(again) == [0]
