"""Confirms: each message gets exactly one outcome, and nacks precede a multiple ack that would cover them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.protocols.amqp091.wire import frames

from basaltmq.protocols.amqp091.confirms import Confirms
from basaltmq.protocols.amqp091.wire import methods as m


class Publisher:
    """The state of messages that a client derives from acks and nacks."""

    def __init__(self, count: int) -> None:
        self.open = set(range(1, count + 1))
        self.taken: set[int] = set()
        self.refused: set[int] = set()
        self.answers = 0

    def receive_line(self, out: list[bytes | memoryview[int]]) -> None:
        for frame in frames(b"".join(out)):
            method = frame.method
            assert isinstance(method, m.BasicAck | m.BasicNack)
            self.answers += 1
            upto = method.delivery_tag
            meant = {each for each in self.open if each <= upto} if method.multiple else {upto} & self.open
            assert method.multiple or meant, "a single answer is for a message that has none yet"
            self.open -= meant
            (self.taken if isinstance(method, m.BasicAck) else self.refused).update(meant)


@given(st.data(), st.integers(1, 40))
def test_confirms_and_nacks_reach_every_message_in_any_order(data: st.DataObject, count: int) -> None:
    order = data.draw(st.permutations(range(1, count + 1)))
    wrong = data.draw(st.sets(st.sampled_from(order)))
    confirms, client = Confirms(1), Publisher(count)
    confirms.last = count
    at = 0
    while at < count:
        size = data.draw(st.integers(1, 8))
        group = sorted(order[at : at + size])
        at += size
        for ok in (False, True):
            numbers = [each for each in group if (each not in wrong) is ok]
            if numbers:
                out: list[bytes | memoryview[int]] = []
                confirms.answer(numbers, ok, out)
                client.receive_line(out)
        assert confirms.unanswered == len(client.open)
    assert client.open == set()
    assert client.refused == wrong
    assert client.taken == set(order) - wrong


def test_consecutive_confirms_are_one_frame() -> None:
    confirms, client = Confirms(1), Publisher(200)
    out: list[bytes | memoryview[int]] = []
    confirms.last = 200
    confirms.answer(range(1, 101), True, out)
    confirms.answer(range(101, 201), True, out)
    client.receive_line(out)
    assert client.answers == 2
    assert client.open == set()


def test_a_single_message_is_confirmed_without_multiple() -> None:
    confirms = Confirms(9)
    out: list[bytes | memoryview[int]] = []
    confirms.last = 1
    confirms.answer([1], True, out)
    (frame,) = frames(bytes(out[0]))
    assert frame.channel == 9
    assert frame.method == m.BasicAck(1, False)
