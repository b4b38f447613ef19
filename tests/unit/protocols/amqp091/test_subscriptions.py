"""Prefetch: the limits of consumer and channel are never exceeded, and every message is delivered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.broker.consumers.consumer import UNLIMITED, Consumer
from basaltmq.protocols.amqp091.subscriptions import Subscription, Subscriptions


class FakeConsumer:
    """The part of a consumer that holds its credit."""

    def __init__(self, prefetch: int) -> None:
        self.credit_left = prefetch or UNLIMITED
        self.queue = SimpleNamespace(has_ready=True)

    def credit(self, count: int) -> None:
        self.credit_left += count

    def limit(self, count: int | None) -> None:
        self.credit_left = UNLIMITED if count is None else count


def make(subscriptions: Subscriptions, tag: str, prefetch: int) -> tuple[Subscription, FakeConsumer]:
    subscription = Subscription("q", tag, None, no_ack=False, prefetch=prefetch)
    consumer = FakeConsumer(prefetch)
    subscriptions.by_tag[tag] = subscription
    subscriptions.add(subscription, cast(Consumer, consumer))
    return subscription, consumer


@pytest.mark.spec("E8")
@given(st.data(), st.integers(0, 4), st.lists(st.integers(0, 4), min_size=1, max_size=3))
def test_prefetch_limits_hold_and_every_message_is_sent(
    data: st.DataObject, channel_prefetch: int, prefetches: list[int]
) -> None:
    subscriptions = Subscriptions()
    subscriptions.limit_channel(channel_prefetch)
    made = [make(subscriptions, str(index), prefetch) for index, prefetch in enumerate(prefetches)]
    messages = list(range(30))
    unacked: list[tuple[Subscription, Any]] = []
    sent: list[Any] = []
    while messages or unacked:
        # The broker serves several consumers by the credit they had at the beginning of a turn.
        shares = []
        for subscription, consumer in made:
            take = min(consumer.credit_left, len(messages), data.draw(st.integers(1, 5)))
            consumer.credit_left -= take
            shares.append((subscription, [messages.pop(0) for _ in range(take)]))
        for subscription, share in shares:
            for each in subscriptions.admit(subscription, cast(Any, share)):
                unacked.append((subscription, each))
                sent.append(each)
        if channel_prefetch:
            assert len(unacked) <= channel_prefetch
        for subscription, _ in made:
            mine = sum(1 for owner, _ in unacked if owner is subscription)
            assert not subscription.prefetch or mine <= subscription.prefetch
            assert mine == subscription.outstanding
        assert unacked, "somebody can always take something"
        count = data.draw(st.integers(1, len(unacked)))
        settled, unacked = unacked[:count], unacked[count:]
        for subscription, each in subscriptions.settled([(owner, 1) for owner, _ in settled]):
            unacked.append((subscription, each))
            sent.append(each)
    assert sorted(sent) == list(range(30))


@pytest.mark.spec("E8")
def test_the_prefetch_of_a_channel_can_change_while_messages_are_unacknowledged() -> None:
    subscriptions = Subscriptions()
    subscription, consumer = make(subscriptions, "a", 10)
    subscriptions.admit(subscription, cast(Any, [1, 2, 3]))
    subscriptions.limit_channel(2)
    assert consumer.credit_left == 0
    subscriptions.settled([(subscription, 2)])
    assert consumer.credit_left == 1
    subscriptions.limit_channel(0)
    assert consumer.credit_left == 9


def test_messages_held_for_a_cancelled_consumer_are_requeued() -> None:
    subscriptions = Subscriptions()
    subscriptions.limit_channel(1)
    one, _ = make(subscriptions, "one", 0)
    two, _ = make(subscriptions, "two", 0)
    a, b, c = cast(Any, ["a", "b", "c"])
    assert subscriptions.admit(one, [a]) == [a]
    assert subscriptions.admit(two, [b, c]) == []
    assert subscriptions.remove(two) == [b, c]
    assert subscriptions.settled([(one, 1)]) == []


def test_prefetch_does_not_limit_consumers_without_acknowledgements() -> None:
    subscriptions = Subscriptions()
    subscriptions.limit_channel(1)
    subscription = Subscription("q", "t", None, no_ack=True, prefetch=5)
    assert subscription.prefetch == 0
    assert len(subscriptions.admit(subscription, cast(Any, list(range(9))))) == 9
