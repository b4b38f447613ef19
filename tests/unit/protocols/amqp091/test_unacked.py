"""Unsettled deliveries compared with a plain model, and tags that were never sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.protocols.amqp091.unacked import Unacked
from basaltmq.protocols.amqp091.wire.errors import PRECONDITION_FAILED, ChannelFault

METHOD = (60, 80)


def filled(count: int) -> Unacked[str]:
    unacked: Unacked[str] = Unacked()
    for tag in range(1, count + 1):
        unacked.last = tag
        unacked.entries[tag] = ("source", tag * 10, bytes((tag,)))
    return unacked


@given(st.integers(0, 30), st.lists(st.tuples(st.integers(0, 35), st.booleans()), max_size=30))
def test_settling_follows_the_model(count: int, calls: list[tuple[int, bool]]) -> None:
    unacked, waiting = filled(count), set(range(1, count + 1))
    for tag, multiple in calls:
        meant = {each for each in waiting if tag == 0 or each <= tag} if multiple else {tag} & waiting
        if tag > count or (not meant and not (multiple and tag == 0)):
            with pytest.raises(ChannelFault) as caught:
                unacked.take(tag, multiple, METHOD)
            assert caught.value.code == PRECONDITION_FAILED
            assert caught.value.text == f"unknown delivery tag {tag}"
        else:
            taken = unacked.take(tag, multiple, METHOD)
            assert [each[0] for each in taken] == sorted(meant)
            assert all(each[2] == each[0] * 10 for each in taken)
            waiting -= meant
        assert set(unacked.entries) == waiting


def test_deliveries_can_be_returned_and_taken_again() -> None:
    unacked = filled(5)
    taken = unacked.take(3, True, METHOD)
    unacked.put_back(taken)
    assert unacked.take(0, True, METHOD) == [*taken, *[(tag, "source", tag * 10, bytes((tag,))) for tag in (4, 5)]]


def test_clearing_returns_all_deliveries_in_order_of_tags() -> None:
    unacked = filled(4)
    unacked.put_back(unacked.take(2, False, METHOD))
    assert [each[0] for each in unacked.clear()] == [1, 2, 3, 4]
    assert len(unacked) == 0
    with pytest.raises(ChannelFault):
        unacked.take(1, False, METHOD)
