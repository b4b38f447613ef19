"""What a client sent and is not handled yet: a connection takes it piece by piece, for its share of each turn.

    bytes ──> Session.receive ──> events ──> handled in order
                                     └──> a method in portions (`Work`): what is behind it waits for its end

The events of one read come from a generator of the session, which stops where the share ends. The connection is not
read meanwhile, so what waits here is one read, and what a TLS transport had decrypted before reading stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Protocol

from basaltmq.broker.loop_shares import LoopShares
from basaltmq.errors import BasaltError
from basaltmq.protocols.amqp091.channel import Channel, Work
from basaltmq.protocols.amqp091.events import Event
from basaltmq.protocols.amqp091.session import Session
from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.errors import Fault, fault_of


class Taker(Protocol):
    """Who handles events: a connection."""

    def handle(self, event: Event) -> float:
        """Do what an event asks for; the time in seconds that it takes later in the turn."""
        ...

    def refuse(self, number: int, fault: Fault) -> None: ...


class Input:
    """The input of one connection."""

    __slots__ = ("_events", "_is_dropped", "_reads", "_session", "_shares", "_work", "is_behind")

    def __init__(self, session: Session, shares: LoopShares) -> None:
        self._session = session
        self._shares = shares
        self._events: Iterator[Event] | None = None
        self._reads: deque[bytes] = deque()
        self._work: tuple[Channel, m.Method, Work] | None = None
        self._is_dropped = False
        self.is_behind = False
        """Something is left for the next turn."""

    def add(self, data: bytes) -> bool:
        """Add what was read; False if it waits behind earlier input."""
        self._is_dropped = False
        if self._events is None:
            self._events = self._session.receive(data)
            return not self.is_behind
        self._reads.append(data)
        return False

    def put_back(self, event: Event) -> None:
        """Handle an event before all others that wait."""
        assert self._events is not None
        self._events = chain([event], self._events)

    def begin(self, channel: Channel, method: m.Method, work: Work) -> None:
        """A method goes on in portions."""
        self._work = (channel, method, work)

    def drop(self) -> None:
        """Forget everything: the connection is gone or broken."""
        self._is_dropped = True
        self._events = self._work = None
        self._reads.clear()
        if self.is_behind:
            self.is_behind = False
            self._shares.left()

    def take(self, taker: Taker) -> bool:
        """Handle input for a share of this turn; True if some is left."""
        self._shares.begin(was_behind=self.is_behind)
        self.is_behind = False
        try:
            self.is_behind = self._take(taker)
        finally:
            self._shares.end(has_more=self.is_behind)
        return self.is_behind

    def _take(self, taker: Taker) -> bool:
        shares = self._shares
        while True:
            if self._work is not None and (not self._go_on(taker) or shares.is_over()):
                return True
            if self._events is None:
                if not self._reads:
                    return False
                self._events = self._session.receive(self._reads.popleft())
            # `put_back` replaces the iterator, so it is looked up for each event.
            while (event := next(self._events, None)) is not None:
                later_s = taker.handle(event)
                if self._is_dropped:
                    return False
                if self._work is not None:
                    break
                if shares.is_over(later_s):
                    return True
            else:
                self._events = None

    def _go_on(self, taker: Taker) -> bool:
        """Do portions of a method; True if it is done."""
        assert self._work is not None
        channel, method, work = self._work
        try:
            for can_go_on in work:
                if not can_go_on or self._shares.is_over():
                    return False
        except Fault as fault:
            taker.refuse(channel.number, fault)
        except BasaltError as error:
            taker.refuse(channel.number, fault_of(error, method.number))
        self._work = None
        return True
