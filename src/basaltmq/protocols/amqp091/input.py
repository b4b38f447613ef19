"""Unhandled input of a connection, handled in portions within the connection's share of each loop turn.

    bytes ──> Session.receive ──> events ──> handled in order
                                     └──> a method in portions (`Work`) blocks the events behind it

The session yields the events of one read from a generator, which is suspended when the share is used up. The socket is
not read meanwhile. So the buffer holds one read, plus what a TLS transport had decrypted before reading stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Protocol

from basaltmq.broker.scheduling.loop_shares import LoopShares
from basaltmq.errors import BasaltError
from basaltmq.protocols.amqp091.channel import Channel, Work
from basaltmq.protocols.amqp091.events import Event
from basaltmq.protocols.amqp091.session import Session
from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.errors import Fault, fault_of


class FrameHandler(Protocol):
    """Handler of events: a connection."""

    def handle(self, event: Event) -> float:
        """Handle an event. Return the time in seconds that it will take at the end of the turn."""
        ...

    def refuse(self, number: int, fault: Fault) -> None: ...


class Input:
    """Unhandled input of one connection."""

    __slots__ = ("_events", "_is_dropped", "_reads", "_session", "_shares", "_work", "is_behind")

    def __init__(self, session: Session, shares: LoopShares) -> None:
        self._session = session
        self._shares = shares
        self._events: Iterator[Event] | None = None
        self._reads: deque[bytes] = deque()
        self._work: tuple[Channel, m.Method, Work] | None = None
        self._is_dropped = False
        self.is_behind = False
        """Unhandled input remains for the next turn."""

    def add(self, data: bytes) -> bool:
        """Add received bytes. Return False if they wait behind earlier input."""
        self._is_dropped = False
        if self._events is None:
            self._events = self._session.receive(data)
            return not self.is_behind
        self._reads.append(data)
        return False

    def put_back(self, event: Event) -> None:
        """Insert an event before all unhandled ones."""
        assert self._events is not None
        self._events = chain([event], self._events)

    def begin(self, channel: Channel, method: m.Method, work: Work) -> None:
        """Start a method that runs in portions."""
        self._work = (channel, method, work)

    def drop(self) -> None:
        """Discard everything, because the connection is lost or broken."""
        self._is_dropped = True
        self._events = self._work = None
        self._reads.clear()
        if self.is_behind:
            self.is_behind = False
            self._shares.left()

    def take(self, consumer: FrameHandler) -> bool:
        """Handle input for the share of this turn. Return True if some is left."""
        self._shares.begin(was_behind=self.is_behind)
        self.is_behind = False
        try:
            self.is_behind = self._take(consumer)
        finally:
            self._shares.end(has_more=self.is_behind)
        return self.is_behind

    def _take(self, consumer: FrameHandler) -> bool:
        shares = self._shares
        while True:
            if self._work is not None and (not self._go_on(consumer) or shares.is_over()):
                return True
            if self._events is None:
                if not self._reads:
                    return False
                self._events = self._session.receive(self._reads.popleft())
            # `put_back` replaces the iterator, so it is looked up for each event.
            while (event := next(self._events, None)) is not None:
                later_s = consumer.handle(event)
                if self._is_dropped:
                    return False
                if self._work is not None:
                    break
                if shares.is_over(later_s):
                    return True
            else:
                self._events = None

    def _go_on(self, consumer: FrameHandler) -> bool:
        """Run portions of the current method. Return True if it is finished."""
        assert self._work is not None
        channel, method, work = self._work
        try:
            for can_go_on in work:
                if not can_go_on or self._shares.is_over():
                    return False
        except Fault as fault:
            consumer.refuse(channel.number, fault)
        except BasaltError as error:
            consumer.refuse(channel.number, fault_of(error, method.number))
        self._work = None
        return True
