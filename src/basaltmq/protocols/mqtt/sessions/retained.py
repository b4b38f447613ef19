"""Retained messages: one row per topic, and their delivery to new subscriptions.

A retained publish writes its row in the batch of the message. An empty payload deletes the row.

A subscription gets all matching messages in the order of their topics. They pass through the queue of the session, so
they have its order, flow control and acknowledgements. A wildcard reads a page of rows per step and waits while the
queue of the session is long. This scan is called a walk. Other clients are served between two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

from basaltmq.broker.message import properties as amqp
from basaltmq.broker.message.operations import Enqueue, Row
from basaltmq.broker.vhost import VHost
from basaltmq.clock import NS_PER_MS
from basaltmq.errors import BasaltError
from basaltmq.protocols.mqtt.sessions import message, rows
from basaltmq.protocols.mqtt.sessions.rows import RetainedRow
from basaltmq.protocols.mqtt.sessions.session import Session
from basaltmq.protocols.mqtt.wire import topics
from basaltmq.queues.draft import Draft
from basaltmq.store.families import Family
from basaltmq.store.keys import mqtt as keys
from basaltmq.store.keys.parts import prefix_range

PAGE: Final = 100
"""Rows read per step."""

SCANNED_MAX: Final = 1000
"""Rows compared with the filter per step, whether they match or not: about 2 ms."""

WAITING_MAX: Final = 1000
"""Ready messages in the queue of a session above which its walk waits."""

WAIT_S: Final = 0.01


class Ignored:
    """The result of an operation that nobody waits for."""

    __slots__ = ()

    def done(self) -> bool:
        return True

    def set_result(self, result: object, /) -> None: ...

    def set_exception(self, error: BaseException, /) -> None: ...


class Retained:
    """The retained messages of a virtual host."""

    def __init__(self, vhost: VHost, clock_ns: Callable[[], int]) -> None:
        self._vhost = vhost
        self._clock_ns = clock_ns
        self._walks: dict[tuple[str, str], asyncio.Handle] = {}
        """The next step of each walk, by client id and filter."""

    def row(self, topic: str, properties: bytes, payload: bytes) -> Row:
        """Return the row of a retained publish."""
        key = keys.retained_key(topic)
        if not payload:
            return Family.MQTT_RETAINED, key, None
        now_ns = self._clock_ns()
        expiration_ms = amqp.peek(properties).expiration_ms
        expires_ns = 0 if expiration_ms is None else now_ns + expiration_ms * NS_PER_MS
        return Family.MQTT_RETAINED, key, rows.encode(RetainedRow(payload, properties, now_ns, expires_ns))

    def get(self, topic: str) -> RetainedRow | None:
        raw = self._vhost.store.get(Family.MQTT_RETAINED, keys.retained_key(topic))
        return None if raw is None else rows.decode(RetainedRow, raw)

    def page(self, topic_filter: str, after: str = "", limit: int = PAGE) -> tuple[list[tuple[str, RetainedRow]], str]:
        """Return matching messages in topic order, and the topic after which the next page starts; empty at the end.

        A page may be empty although more follow, because a step compares a limited number of rows.
        """
        found: list[tuple[str, RetainedRow]] = []
        now_ns = self._clock_ns()
        for scanned, (topic, raw) in enumerate(self._candidates(topic_filter, after), 1):
            if _matches(topic_filter, topic):
                row = rows.decode(RetainedRow, raw)
                if not row.expires_ns or row.expires_ns > now_ns:
                    found.append((topic, row))
            if len(found) >= limit or scanned >= SCANNED_MAX:
                return found, topic
        return found, ""

    def _candidates(self, topic_filter: str, after: str) -> Iterator[tuple[str, bytes]]:
        """Yield rows that share the levels of a filter before its first wildcard."""
        fixed = topic_filter.split("+", 1)[0].split("#", 1)[0]
        start, end = prefix_range(fixed.encode())
        if topic_filter.endswith("/#") and fixed == topic_filter[:-1]:
            # `a/#` matches `a` too, which sorts before all topics below it.
            start = fixed[:-1].encode()
        if after:
            start = max(start, after.encode() + b"\0")
        for key, raw in self._vhost.store.scan(Family.MQTT_RETAINED, start, end):
            yield keys.decode_retained_key(key), raw

    def send(self, session: Session, topic_filter: str, done: Callable[[], bool]) -> None:
        """Add the retained messages of a subscription to the queue of its session. `done` says when to stop."""
        if not topics.has_wildcard(topic_filter):
            row = self.get(topic_filter)
            if row is not None and not 0 < row.expires_ns <= self._clock_ns():
                self._enqueue(session, [(topic_filter, row)])
            return
        self.stop(session.client_id, topic_filter)
        self._step(session, topic_filter, done, "")

    def _step(self, session: Session, topic_filter: str, done: Callable[[], bool], after: str) -> None:
        walk = (session.client_id, topic_filter)
        self._walks.pop(walk, None)
        if done() or not self._vhost.is_up or topic_filter not in session.subscriptions:
            return
        loop = asyncio.get_running_loop()
        try:
            if self._vhost.plane.stats(session.queue)["ready"] > WAITING_MAX:
                self._walks[walk] = loop.call_later(WAIT_S, self._step, session, topic_filter, done, after)
                return
            found, after = self.page(topic_filter, after)
            self._enqueue(session, found)
        except BasaltError:
            # The queue or the virtual host is gone. The session ends for the same reason.
            return
        if after:
            self._walks[walk] = loop.call_soon(self._step, session, topic_filter, done, after)

    def _enqueue(self, session: Session, found: list[tuple[str, RetainedRow]]) -> None:
        if not found:
            return
        now_ns = self._clock_ns()
        drafts = [
            Draft(
                payload=row.payload,
                properties=message.retained_envelope(topic, row.properties),
                transient=not session.is_durable,
                ttl_ms=max(1, (row.expires_ns - now_ns) // NS_PER_MS) if row.expires_ns else None,
            )
            for topic, row in found
        ]
        size_bytes = sum(len(row.payload) for _, row in found)
        self._vhost.enqueue(Enqueue(session.queue, drafts, size_bytes, Ignored()))

    def stop(self, client_id: str, topic_filter: str) -> None:
        """Stop a walk, because its subscription has ended or starts again."""
        handle = self._walks.pop((client_id, topic_filter), None)
        if handle is not None:
            handle.cancel()


def _matches(topic_filter: str, topic: str) -> bool:
    """Whether a filter matches a topic name."""
    if topics.hides(topic_filter, topic):
        return False
    if topic_filter in ("#", topic):
        return True
    wanted, levels = topic_filter.split("/"), topic.split("/")
    for at, level in enumerate(wanted):
        if level == "#":
            return True
        if at >= len(levels) or level not in ("+", levels[at]):
            return False
    return len(wanted) == len(levels)
